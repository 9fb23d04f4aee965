"""TensorRT-LLM's kernels in FlashInfer, for FLASHINFER on Blackwell: they need no plan and read the block table directly.

sm_10x has decode and prefill (backend "trtllm-gen"); sm_12x has decode only, by XQA. `trtllm_batch_decode_with_kv_cache`
dispatches to both (decode.py: "auto" is trtllm-gen for capability 10 and xqa elsewhere), so this module does not call
`flashinfer.xqa`. XQA also supports Hopper, but there the measured wrappers are used. All of this was tested on a simulated
FlashInfer only: no Blackwell device was available.

The wrappers serve what these functions cannot do: a soft cap; a log-sum-exp, and therefore sinks, by XQA; windows without
causality; e5m2; prefill of an e4m3 cache, which requires a quantised query. The log-sum-exp [T, H] is base 2 (lse.cuh).
trtllm-gen's binaries are downloaded at first use, or come with flashinfer-cubin. Interface of FlashInfer 0.7.2.
"""

import functools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from attn.torch.backends._flashinfer import WORKSPACE, Group, workspace
from attn.torch.backends._paged import is_captured
from attn.torch.backends._vendor import lacking
from attn.torch.metadata import PLANNED_BY, PagedAttentionMetadata

#: Supported page sizes; for pages of 128 tokens trtllm-gen lacks some kernels (flashinfer#4094).
_PAGES = {"trtllm-gen": (16, 32, 64), "xqa": (16, 32, 64, 128)}
#: Query heads per kv head that are passed to XQA: FlashInfer's limit for wide heads (jit/xqa.py), applied to all heads.
_XQA_RATIO = 16
_NEEDS = (
    ("decode.trtllm_batch_decode_with_kv_cache", ("window_left", "kv_layout", "backend", "return_lse")),
    ("prefill.trtllm_batch_context_with_kv_cache", ("window_left", "kv_layout", "backend", "return_lse", "causal")),
)


@dataclass
class UnplannedMetadata(PagedAttentionMetadata):
    """The batch, and the number of decodes at its start (`num_decodes`)."""

    num_decodes: int = 0

    _launched_by: ClassVar = attrgetter(*PLANNED_BY)

    @property
    def plain(self) -> bool:
        """Whether every request has a query, and at least as many keys as queries, by the lengths on the host."""
        starts, lens = self.host_lens()
        plans = self.kept().plans
        if "plain" not in plans:
            queries = np.diff(starts)
            plans["plain"] = bool(((queries > 0) & (lens >= queries)).all())
        return bool(plans["plain"])

    def prefill_bounds(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cumulative (query, key) lengths of the requests from `first` on, each [R - first + 1] int32, made once
        outside of captures. Those before have one query each."""
        bounds: tuple[torch.Tensor, torch.Tensor] | None = self.kept().plans.get(("bounds", first))
        # A graph records the sums, because its replays have other lengths; what is made in it has no value before a replay.
        captured = is_captured(self.seq_lens)
        if bounds is None or captured:
            keys = self.seq_lens[first:].cumsum(0, dtype=torch.int32)
            bounds = self.query_start_loc[first:] - first, torch.nn.functional.pad(keys, (1, 0))
            if not captured:
                self.kept().plans["bounds", first] = bounds
        return bounds


@functools.cache
def _installed() -> bool:
    """Whether the installed FlashInfer has both functions with these arguments; old releases have only the wrappers."""
    import flashinfer

    return not lacking("flashinfer", flashinfer, _NEEDS)


@functools.cache
def backend_for(arch: str, group: Group, block_size: int | None, logs: bool) -> str | None:
    """Return the kernel backend that serves a layer's group of any batch (decode or prefill), or None to use the wrappers.

    group: with first = last = 0, so that the result is cached for all equal layers. logs: whether a log-sum-exp is needed.
    """
    # a prefix: sm_100 and sm_103, sm_120 and sm_121
    name = {"sm_10": "trtllm-gen", "sm_12": "xqa"}.get(arch[:5])
    if name is None or group.soft_cap or block_size not in _PAGES[name]:
        return None
    decode = group.wrapper == "decode"
    if name == "xqa" and (not decode or logs or group.num_heads > _XQA_RATIO * group.num_kv_heads):
        return None
    # prefill kernels have windows under causality only
    if not decode and not group.causal and group.window_left >= 0:
        return None
    # decode also reads e4m3 caches: trtllm-gen with bfloat16 queries, XQA with either dtype
    mixed = decode and group.kv_dtype == torch.float8_e4m3fn and (name == "xqa" or group.dtype == torch.bfloat16)
    return name if (group.kv_dtype == group.dtype or mixed) and _installed() else None


def fits(meta: UnplannedMetadata, group: Group, logs: bool) -> bool:
    """Whether the kernels support a batch.

    Every request needs rows, and at least as many keys as rows. The softmax statistics, 8 bytes per head and row (rows
    rounded up to a multiple of 256 per request), must fit in half of the workspace.
    """
    rows = 1 if group.wrapper == "decode" else meta.max_query_len
    statistics = 8 * group.num_heads * (group.last - group.first) * -(-rows // 256) * 256
    return meta.plain and not (logs and statistics > WORKSPACE // 2)


def run(
    backend: str,
    group: Group,
    meta: UnplannedMetadata,
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    logs: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out [n, H, D], lse [n, H] base 2, or None unless `logs`) of one group of the batch.

    query: [n, H, D] contiguous; keys: key and value caches [N, P, K, D].
    """
    import flashinfer

    requests = slice(group.first, group.last)
    table, lens = meta.block_table[requests], meta.seq_lens[requests]
    # XQA's semaphores at the start of its workspace must be zero between calls, so the wrappers' workspace cannot be used
    held = workspace(query.device, backend)
    rules: dict[str, Any] = {"window_left": group.window_left, "kv_layout": "NHD", "backend": backend, "return_lse": logs}
    # both products have a factor each: the softmax scale with that of keys, and that of values
    scale = group.scale * k_scale
    if group.wrapper == "prefill":
        first_rows, first_keys = meta.prefill_bounds(group.first)
        result = flashinfer.prefill.trtllm_batch_context_with_kv_cache(
            query=query,
            kv_cache=keys,
            workspace_buffer=held,
            block_tables=table,
            seq_lens=lens,
            max_q_len=meta.max_query_len,
            max_kv_len=meta.max_seq_len,
            bmm1_scale=scale,
            bmm2_scale=v_scale,
            batch_size=group.last - group.first,
            cum_seq_lens_q=first_rows,
            cum_seq_lens_kv=first_keys,
            causal=group.causal,
            **rules,
        )
        return result if logs else (result, None)
    result = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        query, keys, held, table, lens, meta.max_seq_len, bmm1_scale=scale, bmm2_scale=v_scale, **rules
    )
    out, log = result if logs else (result, None)
    # padding of a captured graph is a request without keys at replay, for which the kernel's result is undefined
    empty = (lens == 0)[:, None]
    return torch.where(empty[..., None], 0, out), None if log is None else torch.where(empty, -torch.inf, log)
