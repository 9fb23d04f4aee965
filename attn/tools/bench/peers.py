"""The peers of `attn bench`: kernels that are not backends of this package, run on a benchmark workload's arrays.

`sdpa`, `sdpa-flash`, `sdpa-cudnn` and `flex` are PyTorch's, on keys copied out of the pages beforehand ("dense"): the time
that a kernel without pages takes. `flashinfer-*` are FlashInfer's wrappers over the pages, called as in its documentation,
without this package's adapter: the difference to FLASHINFER's row is the adapter's cost. `vllm-triton` is vLLM's unified
attention kernel with vLLM's rule for splitting keys. `FLASH_ATTN:<package>` is that backend restricted to one of its
providers. Signatures: FlashInfer 0.7, vLLM 0.33.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn.capabilities import Device, Request
from attn.errors import UnsupportedError
from attn.imports import installed
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._vendor import arch_of

if TYPE_CHECKING:
    from attn.tools.bench.on_torch import Workload

Call = Callable[[], torch.Tensor]
_WORKSPACE = 512 << 20  #: bytes, as in FlashInfer's own benchmarks; decode of 16 x 32k needs it


@dataclass(frozen=True)
class Peer:
    """A kernel and how it is called.

    `prepare` turns a workload into the call that is timed, which returns the output: [T, H, D], or [R, H, Q, D] from a dense
    kernel. It raises `UnsupportedError` for workloads that the kernel does not support.
    """

    name: str
    prepare: Callable[["Workload"], Call]
    module: str = "torch"
    gpu: bool = True  #: needs a GPU


def peers_on(device: torch.device) -> dict[str, Peer]:
    """The peers installed for a device, by name."""
    peers = [*PEERS, *_of_providers()]
    return {p.name: p for p in peers if (device.type == "cuda" or not p.gpu) and installed(p.module)}


# dense


def _dense(workload: "Workload") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [R, H, Q, D], key and value [R, K, S, D]."""
    query, key, value = (x.transpose(1, 2).contiguous() for x in workload.batched())
    return query, key, value


def _sdpa(backend: SDPBackend | None) -> Callable[["Workload"], Call]:
    def prepare(workload: "Workload") -> Call:
        q, k, v = _dense(workload)
        causal = q.shape[2] > 1
        # torch's own choice needs no context manager, which costs host time.
        if backend is None:
            return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        return call

    return prepare


def _flex(workload: "Workload") -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _dense(workload)
    mask = None
    if q.shape[2] > 1:
        # Made once, as FlexAttention's documentation advises.
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device)
    # Uncompiled, it computes the whole matrix of scores.
    attend = torch.compile(flex_attention)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)


# paged


def _flashinfer(wrapper: str) -> Callable[["Workload"], Call]:
    def prepare(workload: "Workload") -> Call:
        import flashinfer

        case, device = workload.case, workload.device
        # Planned once, outside the timed call, as FlashInfer's documentation shows.
        lens = torch.tensor([m for _, m in workload.lens], dtype=torch.int32)
        pages = (lens + case.block_size - 1) // case.block_size
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int().to(device)
        indices = torch.cat([torch.from_numpy(t) for t in workload.tables]).to(device)
        last = ((lens - 1) % case.block_size + 1).int().to(device)
        space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        cache = (workload.key_cache, workload.value_cache)
        shape = (case.num_heads, case.num_kv_heads, case.head_size)
        dtypes = {"q_data_type": workload.query.dtype, "kv_data_type": workload.cache.dtype}
        if wrapper == "decode":
            if any(q > 1 for q, _ in workload.lens):
                raise UnsupportedError("supports only one token per request")
            # With tensor cores, which FlashInfer advises for grouped queries.
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            decode.plan(indptr, indices, last, *shape, case.block_size, **dtypes)
            return lambda: decode.run(workload.query, cache)
        if wrapper == "fa3" and workload.cache.dtype != workload.query.dtype:
            raise UnsupportedError(f"kv_cache_dtype={case.kv_cache_dtype}: needs queries in the cache's dtype")
        starts = workload.metadata.query_start_loc
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=wrapper)
        prefill.plan(starts, indptr, indices, last, *shape, case.block_size, causal=True, **dtypes)
        return lambda: prefill.run(workload.query, cache)

    return prepare


_SPLITS, _LEAST_PROGRAMS, _LONGEST_SPLIT = 16, 128, 8  #: vLLM's constants (v1/attention/backends/triton_attn.py)


def _vllm(workload: "Workload") -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import KVQuantMode, unified_attention

    case, meta, device = workload.case, workload.metadata, workload.device
    modes = {torch.float8_e4m3fn: KVQuantMode.FP8_PER_TENSOR, workload.query.dtype: KVQuantMode.NONE}
    if workload.cache.dtype not in modes:
        raise UnsupportedError(f"kv_cache_dtype={case.kv_cache_dtype} (supports auto, fp8)")
    most = max(q for q, _ in workload.lens)
    # vLLM splits the keys of short queries only; otherwise the arrays of partial results are not used.
    rows, heads = (len(workload.query) if most <= _LONGEST_SPLIT else 1), case.num_heads
    # The kernel's tiles have power-of-two widths.
    width = 1 << (case.head_size - 1).bit_length()
    partial_outputs = torch.empty(rows, heads, _SPLITS, width, device=device)
    partial_maxima, partial_sums = (torch.empty(rows, heads, _SPLITS, device=device) for _ in range(2))
    # [R, K], the scales of an fp8 cache.
    one = torch.ones(len(workload.lens), case.num_kv_heads, device=device)

    def call() -> torch.Tensor:
        unified_attention(
            q=workload.query,
            k=workload.key_cache,
            v=workload.value_cache,
            out=workload.output,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=most,
            seqused_k=meta.seq_lens,
            max_seqlen_k=max(m for _, m in workload.lens),
            softmax_scale=case.head_size**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=meta.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=_LEAST_PROGRAMS // case.num_kv_heads,
            num_par_softmax_segments=_SPLITS,
            softmax_segm_output=partial_outputs,
            softmax_segm_max=partial_maxima,
            softmax_segm_expsum=partial_sums,
            kv_quant_mode=modes[workload.cache.dtype],
        )
        return workload.output

    return call


# FLASH_ATTN with one provider


def _of_providers() -> Iterator[Peer]:
    for provider in providers.present():
        yield Peer(f"FLASH_ATTN:{provider.name}", _with_provider(provider), provider.module)


def _with_provider(provider: providers.Provider) -> Callable[["Workload"], Call]:
    def prepare(workload: "Workload") -> Call:
        from attn.torch.backends.flash_attn import FlashAttentionImpl

        # Only the choice of the package is overridden: the row times the backend's adapter with it.
        class OneProvider(FlashAttentionImpl):
            def _provider(self, request: Request, arch: str) -> providers.Provider:
                return provider

        case = workload.case
        request = Request(case.head_size, case.dtype, case.kv_cache_dtype, case.block_size)
        arch = arch_of(workload.device)
        if why := provider.reasons(request, Device("torch", "cuda", arch=arch) if arch else None):
            raise UnsupportedError("; ".join(why))
        peer = type(workload)(case, "FLASH_ATTN", workload.device, OneProvider)

        def call() -> torch.Tensor:
            peer.forward()
            return peer.output

        return call

    return prepare


PEERS = (
    Peer("sdpa", _sdpa(None), gpu=False),
    Peer("sdpa-flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("sdpa-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("flex", _flex, gpu=False),
    *(Peer(f"flashinfer-{variant}", _flashinfer(variant), "flashinfer") for variant in ("decode", "fa2", "fa3")),
    Peer("vllm-triton", _vllm, "vllm.v1.attention.ops.triton_unified_attention"),
)
