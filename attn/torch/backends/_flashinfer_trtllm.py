"""TensorRT-LLM's kernels within FlashInfer, for FLASHINFER on Blackwell: no plan, the block table as it is.

sm_10x has decode and prefill (backend "trtllm-gen"), sm_12x decode alone, by XQA: FlashInfer itself goes there from
`trtllm_batch_decode_with_kv_cache` (decode.py: "auto" is trtllm-gen for capability 10 and xqa elsewhere), so that
`flashinfer.xqa` is not called from here. XQA knows Hopper too, where the wrappers are what was measured. All of this ran on a
stand-in only: no Blackwell device has been at hand.

What the functions cannot do goes to the wrappers: a soft cap; a log-sum-exp, and so sinks, of XQA; windows without
causality; e5m2; prefill of an e4m3 cache, which wants a quantised query. The log-sum-exp [T, H] is base 2 (lse.cuh).
trtllm-gen's binaries are fetched at first use, or come with flashinfer-cubin. Interface of FlashInfer 0.7.2.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn.torch.backends._flashinfer import WORKSPACE, Group, workspace
from attn.torch.backends._vendor import lacking
from attn.torch.metadata import PagedAttentionMetadata

#: Pages that there are kernels for; of 128 tokens trtllm-gen lacks some (flashinfer#4094).
_PAGES = {"trtllm-gen": (16, 32, 64), "xqa": (16, 32, 64, 128)}
#: Query heads of one kv head that XQA takes here: a limit that FlashInfer states for wide heads (jit/xqa.py), kept for all.
_XQA_RATIO = 16
_NEEDS = (
    ("decode.trtllm_batch_decode_with_kv_cache", ("window_left", "kv_layout", "backend", "return_lse")),
    ("prefill.trtllm_batch_context_with_kv_cache", ("window_left", "kv_layout", "backend", "return_lse", "causal")),
)


@dataclass
class UnplannedMetadata(PagedAttentionMetadata):
    """The batch, and its decodes that come first (`num_decodes`)."""

    num_decodes: int = 0

    @functools.cached_property
    def plain(self) -> bool:
        """Whether every request has a query, and at least as many keys as queries; told by the host's lengths."""
        starts, lens = self.host_lens()
        queries = np.diff(starts)
        return bool(((queries > 0) & (lens >= queries)).all())

    @functools.cached_property
    def prefill_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(first rows, first keys) of the requests after the decodes, each [R - num_decodes + 1] int32 on the device."""
        keys = self.seq_lens[self.num_decodes :].cumsum(0, dtype=torch.int32)
        return self.query_start_loc[self.num_decodes :] - self.num_decodes, torch.nn.functional.pad(keys, (1, 0))


@functools.cache
def _installed() -> bool:
    """Whether the installed FlashInfer has both functions with these arguments; the wrappers are older."""
    import flashinfer

    return not lacking("flashinfer", flashinfer, _NEEDS)


@functools.cache
def backend_for(arch: str, group: Group, block_size: int | None, logs: bool) -> str | None:
    """The backend that serves a layer's part of any batch (decode or prefill), or None: the wrappers do.

    group: with first = last = 0, so that it is decided once for all layers that agree; logs: a log-sum-exp is wanted.
    """
    name = {"sm_10": "trtllm-gen", "sm_12": "xqa"}.get(arch[:5])
    if name is None or group.soft_cap or block_size not in _PAGES[name]:
        return None
    decode = group.kind == "decode"
    if name == "xqa" and (not decode or logs or group.num_heads > _XQA_RATIO * group.num_kv_heads):
        return None
    if not decode and not group.causal and group.window_left >= 0:
        return None
    # beside its own dtype a decode reads e4m3: under trtllm-gen for bfloat16, under XQA for both
    mixed = decode and group.kv_dtype == torch.float8_e4m3fn and (name == "xqa" or group.dtype == torch.bfloat16)
    return name if (group.kv_dtype == group.dtype or mixed) and _installed() else None


def fits(meta: UnplannedMetadata, group: Group, logs: bool) -> bool:
    """Whether a batch is one that the kernels are made for: no request without rows or keys, none with more rows than keys, and
    statistics of softmax, 8 bytes for each head and row (rounded up to 256 a request), that half of the workspace holds."""
    rows = 1 if group.kind == "decode" else meta.max_query_len
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
    """(out [n, H, D], lse [n, H] base 2, or None unless `logs`) of one part of the batch.

    query: [n, H, D] contiguous; keys: key and value caches [N, P, K, D].
    """
    import flashinfer

    part = slice(group.first, group.last)
    table, lens = meta.block_table[part], meta.seq_lens[part]
    # XQA's semaphores are the head of its workspace and must be zeros between calls: not the wrappers' workspace
    held = workspace(query.device, backend)
    rules: dict[str, Any] = {"window_left": group.window_left, "kv_layout": "NHD", "backend": backend, "return_lse": logs}
    scale = group.scale * k_scale
    if group.kind == "prefill":
        first_rows, first_keys = meta.prefill_bounds
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
    # a captured graph's padding: a request without keys at replay, whatever the kernel makes of it
    empty = (lens == 0)[:, None]
    return torch.where(empty[..., None], 0, out), None if log is None else torch.where(empty, -torch.inf, log)
