"""FLASH_ATTN_MLA: FlashAttention with a second query, softmax(q_pe k_pe^T + q_nope c^T) c, for Hopper and Blackwell.

FlashAttention 3 on sm_90, its own package or vLLM's build, and FlashAttention 4 on sm_10x take the rotary part as query and
key, the latent as value and, through `qv`, as the other key: the two halves of a cache row, by strides. Ragged queries of any
length decode in one call. Interfaces of Dao-AILab/flash-attention at 0251105a and of vLLM 0.24 to 0.33; the log-sum-exp is
natural, [H, T] from 3 and [T, H] from 4.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from attn.backends.abstract import AttentionLayer
from attn.capabilities import Capabilities, Device, Feature, MultipleOf, Request
from attn.errors import BackendLoadError
from attn.imports import assumed
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._vendor import arch_of, lacking
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import MLACommonBackend, MLACommonImpl
from attn.torch.backends.mla._vendor import state

State = tuple[torch.Tensor, torch.Tensor]  #: out [T, H, L], lse [H, T]


def _fa3(module: Any, q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Any, rules: Any) -> State:
    out, lse = module.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=meta.seq_lens, page_table=meta.block_table, cu_seqlens_q=meta.query_start_loc,
        max_seqlen_q=meta.max_query_len, return_softmax_lse=True, **rules,
    )[:2]  # fmt: skip
    return out, lse


def _vllm(module: Any, q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Any, rules: Any) -> State:
    return module.flash_attn_varlen_func(  # type: ignore[no-any-return]
        q, k, v, meta.max_query_len, meta.query_start_loc, meta.max_seq_len, seqused_k=meta.seq_lens, q_v=qv,
        block_table=meta.block_table, return_softmax_lse=True, fa_version=3, **rules,
    )  # fmt: skip


def _fa4(module: Any, q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Any, rules: Any) -> State:
    out, lse = module.flash_attn_varlen_func(
        q, k, v, qv=qv, cu_seqlens_q=meta.query_start_loc, max_seqlen_q=meta.max_query_len, max_seqlen_k=meta.max_seq_len,
        seqused_k=meta.seq_lens, page_table=meta.block_table, return_lse=True, **rules,
    )[:2]  # fmt: skip
    return out, lse.T


#: provider -> (its architectures, the function and the arguments that it must have, the call), the best first
_SERVES: dict[str, tuple[str, tuple[str, tuple[str, ...]], Callable[..., State]]] = {
    "FlashAttention 3": ("sm_90", ("flash_attn_with_kvcache", ("qv", "page_table", "cu_seqlens_q")), _fa3),
    "vLLM's FlashAttention 3": ("sm_90", ("flash_attn_varlen_func", ("q_v", "seqused_k", "block_table", "fa_version")), _vllm),
    "FlashAttention 4": ("sm_10", ("flash_attn_varlen_func", ("qv", "page_table", "seqused_k")), _fa4),
}


def _for(arch: str) -> list[providers.Provider]:
    """The providers for an architecture (all, when it is not known), installed or not, the best first."""
    named = {provider.name: provider for provider in providers.PROVIDERS}
    return [named[name] for name, (own, *_) in _SERVES.items() if name in named and (not arch or arch.startswith(own))]


def _why_not(provider: providers.Provider) -> tuple[str, ...]:
    """Why an installed provider cannot be used; empty when it can."""
    if assumed(provider.module):
        return ()
    try:
        return lacking(provider.module, provider.load(), [_SERVES[provider.name][1]])
    except BackendLoadError as error:
        return (str(error),)


@functools.cache
def _chosen(arch: str) -> providers.Provider:
    """The best provider that can be used, kept for the process; why_not has seen to it that there is one."""
    return next(provider for provider in _for(arch) if provider.present() and not _why_not(provider))


class FlashAttnMLABackend(MLACommonBackend):
    name = "FLASH_ATTN_MLA"
    block_sizes = (MultipleOf(16),)
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(576,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        archs=(("cuda", ("sm_90", "sm_10*")),),
    )
    latent_dims = ((512, 64),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if why:
            return why
        wanted = _for(device.arch if device is not None else "")
        found = [provider for provider in wanted if provider.present()]
        if not found:
            return [" or ".join(f"{provider.name} is not installed (pip install {provider.install})" for provider in wanted)]
        reasons = [_why_not(provider) for provider in found]
        return [] if () in reasons else [reason for told in reasons for reason in told]


class FlashAttnMLAImpl(MLACommonImpl, backend=FlashAttnMLABackend):
    can_return_lse_for_decode = True

    def _decode(
        self, layer: AttentionLayer, q: torch.Tensor, kv_cache: torch.Tensor, meta: MLADecodeMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, provider = self.kv_lora_rank, _chosen(arch_of(q.device))
        rope, latent = kv_cache[:, :, None, rank:], kv_cache[:, :, None, :rank]
        rules = {"softmax_scale": self.scale, "causal": True}
        call = _SERVES[provider.name][2]
        return state(*call(provider.load(), q[..., rank:], q[..., :rank], rope, latent, meta, rules))
