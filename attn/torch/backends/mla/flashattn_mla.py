"""FLASH_ATTN_MLA: FlashAttention with a second query, softmax(q_pe k_pe^T + q_nope c^T) c, for Hopper and Blackwell.

FlashAttention 3 on sm_90 (its own package or vLLM's build) and FlashAttention 4 on sm_10x take the rotary part as query and
key, and the latent as value and, with `qv`, as the second key. Both are strided views of a cache row. One call decodes ragged
queries of any length. Interfaces of Dao-AILab/flash-attention at 0251105a and of vLLM 0.24 to 0.33. The log-sum-exp is
natural, [H, T] in version 3 and [T, H] in version 4.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attn.capabilities import Device, Feature, MultipleOf, Request
from attn.errors import BackendLoadError
from attn.imports import assumed
from attn.torch import records
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._vendor import arch_of, lacking
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl
from attn.torch.backends.mla._vendor import state

State = tuple[torch.Tensor, torch.Tensor]  #: out [T, H, L], lse [H, T]


class _Halves(NamedTuple):
    """The arguments of these functions. q: [T, H, Dr], k: [N, P, 1, Dr], rotary; qv: [T, H, L], v: [N, P, 1, L], latent."""

    q: torch.Tensor
    qv: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    meta: MLADecodeMetadata
    scale: float

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every provider has under the same name."""
        lens = {"cu_seqlens_q": self.meta.query_start_loc, "max_seqlen_q": self.meta.max_query_len}
        # always causal: to a single row this makes no difference
        return {**lens, "softmax_scale": self.scale, "causal": True}


def _fa3(module: Any, call: _Halves) -> State:
    pages = {"cache_seqlens": call.meta.seq_lens, "page_table": call.meta.block_table}
    attend = module.flash_attn_with_kvcache
    out, lse = attend(call.q, call.k, call.v, qv=call.qv, **call.common, **pages, return_softmax_lse=True)[:2]
    return out, lse


def _vllm(module: Any, call: _Halves) -> State:
    version = {"return_softmax_lse": True, "fa_version": 3}
    pages = {"max_seqlen_k": call.meta.max_seq_len, "seqused_k": call.meta.seq_lens, "block_table": call.meta.block_table}
    attend = module.flash_attn_varlen_func
    return attend(call.q, call.k, call.v, q_v=call.qv, **call.common, **pages, **version)


def _fa4(module: Any, call: _Halves) -> State:
    pages = {"max_seqlen_k": call.meta.max_seq_len, "seqused_k": call.meta.seq_lens, "page_table": call.meta.block_table}
    attend = module.flash_attn_varlen_func
    out, lse = attend(call.q, call.k, call.v, qv=call.qv, **call.common, **pages, return_lse=True)[:2]
    return out, lse.T


#: provider -> (its architecture, the function and the arguments that it must have, the call), in order of preference
_SERVES: dict[str, tuple[str, tuple[str, tuple[str, ...]], Callable[..., State]]] = {
    "FlashAttention 3": ("sm_90", ("flash_attn_with_kvcache", ("qv", "page_table", "cu_seqlens_q")), _fa3),
    "vLLM's FlashAttention 3": ("sm_90", ("flash_attn_varlen_func", ("q_v", "seqused_k", "block_table", "fa_version")), _vllm),
    "FlashAttention 4": ("sm_10", ("flash_attn_varlen_func", ("qv", "page_table", "seqused_k")), _fa4),
}


def _for(arch: str) -> list[providers.Provider]:
    """Return the providers for an architecture (all, if it is unknown), installed or not, in order of preference."""
    # by name: the list may lack one of them
    named = {provider.name: provider for provider in providers.PROVIDERS}
    return [named[name] for name, (prefix, *_) in _SERVES.items() if name in named and (not arch or arch.startswith(prefix))]


def _why_not(provider: providers.Provider) -> tuple[str, ...]:
    """Return why an installed provider cannot be used; empty if it can."""
    if assumed(provider.module):
        return ()
    try:
        return lacking(provider.module, provider.load(), [_SERVES[provider.name][1]])
    except BackendLoadError as error:
        return (str(error),)


@functools.cache
def _chosen(arch: str) -> providers.Provider:
    """Return the best usable provider, cached for the process; `why_not` has checked that there is one."""
    return next(provider for provider in _for(arch) if provider.present() and not _why_not(provider))


class FlashAttnMLABackend(MLACommonBackend):
    name = "FLASH_ATTN_MLA"
    block_sizes = (MultipleOf(16),)
    capabilities = records.CUDA(
        head_sizes=(576,), features=frozenset({Feature.MLA, Feature.LSE}), archs=(("cuda", ("sm_90", "sm_10*")),)
    )
    latent_dims = ((512, 64),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if why:
            return why
        # The record's own reasons come first: only then is a package looked for, and imported.
        candidates = _for(device.arch if device is not None else "")
        present = [provider for provider in candidates if provider.present()]
        if not present:
            return [
                " or ".join(f"{provider.name} is not installed (pip install {provider.install})" for provider in candidates)
            ]
        reasons = [_why_not(provider) for provider in present]
        return [] if () in reasons else [reason for why in reasons for reason in why]


class FlashAttnMLAImpl(MLACommonImpl, backend=FlashAttnMLABackend):
    can_return_lse_for_decode = True

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        rank, provider = self.kv_lora_rank, _chosen(arch_of(call.q.device))
        halves = _Halves(
            q=call.q[..., rank:],
            qv=call.q[..., :rank],
            # views of each row's two parts: nothing is copied
            k=call.kv_cache[:, :, None, rank:],
            v=call.kv_cache[:, :, None, :rank],
            meta=call.meta,
            scale=self.scale,
        )
        return state(*_SERVES[provider.name][2](provider.load(), halves))
