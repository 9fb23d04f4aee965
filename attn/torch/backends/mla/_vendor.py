"""Helpers of the adapters for vendors' MLA decode kernels.

Batches split by query length, one convention for results, and the packages that provide FlashMLA.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from attn.errors import BackendLoadError
from attn.imports import assumed, first_installed, loading
from attn.torch.backends._vendor import lacking
from attn.torch.backends.mla._metadata import MLADecodeMetadata, Rows
from attn.torch.backends.mla._mla import DecodeCall, MLACommonImpl

#: Module to search for -> module with the functions: DeepSeek's package, or its copy in vLLM's CUDA wheels, which also takes
#: `out`.
_FLASH_MLA = {"flash_mla": "flash_mla", "vllm._flashmla_C": "vllm.third_party.flashmla.flash_mla_interface"}
FLASH_MLA = "|".join(_FLASH_MLA)
_FLASH_MLA_NEEDS = (
    ("get_mla_metadata", ()),
    ("flash_mla_with_kvcache", ("softmax_scale", "causal", "is_fp8_kvcache", "indices", "extra_k_cache")),
    ("flash_mla_sparse_fwd", ("indices", "sm_scale", "d_v")),
)


@functools.cache
def flash_mla() -> Any:
    """Return the module of FlashMLA's functions, from the first package that has it.

    Raises `BackendLoadError` if that package is broken.
    """
    # neither: the import below fails and names the package
    name = _FLASH_MLA[first_installed(FLASH_MLA) or "flash_mla"]
    with loading(name):
        return importlib.import_module(name)


def without_flash_mla() -> list[str]:
    """Return why the installed FlashMLA cannot be used; empty if it can, or if none is installed (reported elsewhere)."""
    module = first_installed(FLASH_MLA)
    if module is None or assumed(module):
        return []
    try:
        return list(lacking(_FLASH_MLA[module], flash_mla(), _FLASH_MLA_NEEDS))
    except BackendLoadError as error:
        return [str(error)]


def state(out: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [T, H, L], lse [H, T]) with rows that see no key, whose lse is either infinity, set to 0 and -inf."""
    empty = log.isinf()
    return torch.where(empty.T[..., None], 0, out), torch.where(empty, -torch.inf, log)


def with_heads(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Pad q [T, H, D] with zero heads to `num_heads`, for kernels that support only certain numbers of heads."""
    return q if q.shape[1] == num_heads else torch.nn.functional.pad(q, (0, 0, 0, num_heads - q.shape[1]))


def by_query_len(meta: MLADecodeMetadata) -> Iterator[tuple[int, Rows, Rows]]:
    """Yield (q_len, requests, rows) for each distinct query length of the batch; slices if there is only one."""
    if meta.query_len is not None:
        # 0: no row in any request
        if meta.query_len:
            yield meta.query_len, slice(None), slice(0, meta.num_tokens)
        return
    starts, _ = meta.host_lens()
    lens = np.diff(starts)
    # a call for each length, of which a batch of drafts has few
    for length in np.unique(lens[lens > 0]):
        requests = np.flatnonzero(lens == length)
        rows = (starts[requests][:, None] + np.arange(length)).reshape(-1).astype(np.int64)
        device = meta.seq_lens.device
        yield int(length), torch.from_numpy(requests).to(device), torch.from_numpy(rows).to(device)


class UniformMLAImpl(MLACommonImpl):
    """Base for kernels that need one query length per call. A subclass implements `_decode_uniform`."""

    can_return_lse_for_decode = True

    def _decode_uniform(
        self, call: DecodeCall, q: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the requests of a call that have n rows each.

        q: [R, n, H, L + Dr] contiguous; lens: [R], block_table: [R, B], int32. Returns (out [R, n, H, L], lse [R, H, n]
        natural log, either infinity for a row that sees no key).
        """
        raise NotImplementedError

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, meta = call.q, call.meta
        # no padding and one length: tensors as they are, without a gather
        if meta.query_len and meta.num_tokens == q.shape[0]:
            return self._decode_rows(call, q, meta.query_len, meta.seq_lens, meta.block_table)
        # rows of requests without tokens, and padding, stay 0 and -inf
        out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
        for length, requests, rows in by_query_len(meta):
            state = self._decode_rows(call, q[rows], length, meta.seq_lens[requests], meta.block_table[requests])
            out[rows], lse[:, rows] = state
        return out, lse

    def _decode_rows(
        self, call: DecodeCall, q: torch.Tensor, length: int, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [T, H, L], lse [H, T]) of the rows q [T, H, L + Dr] of requests with `length` rows each."""
        heads = q.shape[1]
        # [requests, rows of each, heads, L + Dr]
        out, log = self._decode_uniform(call, q.reshape(-1, length, heads, q.shape[2]), lens, block_table)
        return state(out.reshape(-1, *out.shape[2:]), log.transpose(0, 1).reshape(heads, -1))

    def _plan(self, meta: MLADecodeMetadata, *key: Any) -> Any:
        """Return the batch's plan for this backend, its number of heads and `key`, or None."""
        return meta.plans.get((self.backend.get_name(), self.num_heads, *key))

    def _keep(self, meta: MLADecodeMetadata, plan: Any, *key: Any) -> Any:
        """Store a plan for the following layers, and return it."""
        meta.plans[self.backend.get_name(), self.num_heads, *key] = plan
        return plan
