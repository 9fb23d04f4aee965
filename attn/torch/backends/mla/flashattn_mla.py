"""FLASH_ATTN_MLA: FlashAttention with a second query, softmax(q_pe k_pe^T + q_nope c^T) c, for Hopper and Blackwell.

FlashAttention 3 on sm_90, its own package or vLLM's build, and FlashAttention 4 on sm_10x take the rotary part as query and
key, the latent as value and, through `qv`, as the other key: the two halves of a cache row, by strides. Ragged queries of any
length decode in one call. Interfaces of Dao-AILab/flash-attention at 0251105a and of vLLM 0.24 to 0.33; the log-sum-exp is
natural, [H, T] from 3 and [T, H] from 4.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attn.capabilities import Capabilities, Device, Feature, MultipleOf, Request
from attn.errors import BackendLoadError
from attn.imports import assumed
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._vendor import arch_of, lacking
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl
from attn.torch.backends.mla._vendor import state

State = tuple[torch.Tensor, torch.Tensor]  #: out [T, H, L], lse [H, T]


class _Halves(NamedTuple):
    """A decode as these functions take it. q: [T, H, Dr], k: [N, P, 1, Dr], rotary; qv: [T, H, L], v: [N, P, 1, L], latent."""

    q: torch.Tensor
    qv: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    meta: MLADecodeMetadata
    scale: float


def _fa3(module: Any, call: _Halves) -> State:
    out, lse = module.flash_attn_with_kvcache(
        call.q,
        call.k,
        call.v,
        qv=call.qv,
        cache_seqlens=call.meta.seq_lens,
        page_table=call.meta.block_table,
        cu_seqlens_q=call.meta.query_start_loc,
        max_seqlen_q=call.meta.max_query_len,
        softmax_scale=call.scale,
        causal=True,
        return_softmax_lse=True,
    )[:2]
    return out, lse


def _vllm(module: Any, call: _Halves) -> State:
    return module.flash_attn_varlen_func(  # type: ignore[no-any-return]
        call.q,
        call.k,
        call.v,
        max_seqlen_q=call.meta.max_query_len,
        cu_seqlens_q=call.meta.query_start_loc,
        max_seqlen_k=call.meta.max_seq_len,
        seqused_k=call.meta.seq_lens,
        q_v=call.qv,
        block_table=call.meta.block_table,
        softmax_scale=call.scale,
        causal=True,
        return_softmax_lse=True,
        fa_version=3,
    )


def _fa4(module: Any, call: _Halves) -> State:
    out, lse = module.flash_attn_varlen_func(
        call.q,
        call.k,
        call.v,
        qv=call.qv,
        cu_seqlens_q=call.meta.query_start_loc,
        max_seqlen_q=call.meta.max_query_len,
        max_seqlen_k=call.meta.max_seq_len,
        seqused_k=call.meta.seq_lens,
        page_table=call.meta.block_table,
        softmax_scale=call.scale,
        causal=True,
        return_lse=True,
    )[:2]
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

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        rank, provider = self.kv_lora_rank, _chosen(arch_of(call.q.device))
        halves = _Halves(
            q=call.q[..., rank:],
            qv=call.q[..., :rank],
            k=call.kv_cache[:, :, None, rank:],
            v=call.kv_cache[:, :, None, :rank],
            meta=call.meta,
            scale=self.scale,
        )
        return state(*_SERVES[provider.name][2](provider.load(), halves))
