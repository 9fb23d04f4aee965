"""FLASH_ATTN_MLA: FlashAttention with a second query, softmax(q_pe k_pe^T + q_nope c^T) c, for Hopper and Blackwell.

FlashAttention 3 on sm_90 and FlashAttention 4 on sm_10x take the rotary part as query and key, the latent as value and,
through `qv`, as the other key: the two halves of a cache row, by strides. Ragged queries of any length decode in one call.
Interfaces of Dao-AILab/flash-attention at 0251105a; the log-sum-exp is natural, [H, T] from 3 and [T, H] from 4.
"""

import functools
import importlib
from typing import Any

import torch

from attn.backends.abstract import AttentionLayer
from attn.capabilities import Capabilities, Device, Feature, MultipleOf, Request
from attn.imports import installed
from attn.torch.backends._vendor import arch_of
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import MLACommonBackend, MLACommonImpl
from attn.torch.backends.mla._vendor import state

#: module -> (what it is called, what brings it, its architectures)
_PROVIDERS = {
    "flash_attn_interface": ("FlashAttention 3", "flash-attn-3", "sm_90"),
    "flash_attn.cute.interface": ("FlashAttention 4", "flash-attn-4", "sm_10"),
}


class FlashAttnMLABackend(MLACommonBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(576,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        archs=(("cuda", ("sm_90", "sm_10*")),),
    )
    latent_dims = ((512, 64),)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type["FlashAttnMLAImpl"]:
        return FlashAttnMLAImpl

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        arch = device.arch if device is not None else ""
        if not why and _module(arch) is None:
            wanted = [p for p in _PROVIDERS.values() if not arch or arch.startswith(p[2])]
            why.append(" or ".join(f"{name} is not installed (pip install {brings})" for name, brings, _ in wanted))
        return why


@functools.cache
def _known(found: tuple[str, ...], arch: str) -> str | None:
    return next((module for module in found if not arch or arch.startswith(_PROVIDERS[module][2])), None)


def _module(arch: str) -> str | None:
    """The installed provider for an architecture (any, when it is not known), or None."""
    return _known(tuple(module for module in _PROVIDERS if installed(module)), arch)


class FlashAttnMLAImpl(MLACommonImpl):
    backend = FlashAttnMLABackend
    can_return_lse_for_decode = True

    @staticmethod
    def get_supported_kernel_block_size() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    def _decode(
        self, layer: AttentionLayer, q: torch.Tensor, kv_cache: torch.Tensor, meta: MLADecodeMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank = self.kv_lora_rank
        name = _module(arch_of(q.device))
        assert name is not None  # why_not has seen to it
        module: Any = importlib.import_module(name)
        rope, latent = kv_cache[:, :, None, rank:], kv_cache[:, :, None, :rank]
        rules = {"softmax_scale": self.scale, "causal": True}
        if name == "flash_attn_interface":
            out, lse = module.flash_attn_with_kvcache(
                q[..., rank:], rope, latent, qv=q[..., :rank], cache_seqlens=meta.seq_lens, page_table=meta.block_table,
                cu_seqlens_q=meta.query_start_loc, max_seqlen_q=meta.max_query_len, return_softmax_lse=True, **rules,
            )[:2]  # fmt: skip
            return state(out, lse)
        out, lse = module.flash_attn_varlen_func(
            q[..., rank:], rope, latent, qv=q[..., :rank], cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len, max_seqlen_k=meta.max_seq_len, seqused_k=meta.seq_lens,
            page_table=meta.block_table, return_lse=True, **rules,
        )[:2]  # fmt: skip
        return state(out, lse.T)
