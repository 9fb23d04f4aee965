"""What adapters of vendors' MLA decode kernels share: batches of one query length, one convention for the answer, and who
brings FlashMLA."""

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

#: What is looked for -> where the functions are: DeepSeek's package, or the copy of it that vLLM's CUDA wheels carry, which
#: takes an `out` too.
_FLASH_MLA = {"flash_mla": "flash_mla", "vllm._flashmla_C": "vllm.third_party.flashmla.flash_mla_interface"}
FLASH_MLA = "|".join(_FLASH_MLA)
_FLASH_MLA_NEEDS = (
    ("get_mla_metadata", ()),
    ("flash_mla_with_kvcache", ("softmax_scale", "causal", "is_fp8_kvcache", "indices", "extra_k_cache")),
    ("flash_mla_sparse_fwd", ("indices", "sm_scale", "d_v")),
)


@functools.cache
def flash_mla() -> Any:
    """FlashMLA's functions, from the first package that brings them. Raises `BackendLoadError` for one that is broken."""
    name = _FLASH_MLA[first_installed(FLASH_MLA) or "flash_mla"]
    with loading(name):
        return importlib.import_module(name)


def without_flash_mla() -> list[str]:
    """Why the installed FlashMLA cannot be used; empty when it can, or when none is installed, which is told elsewhere."""
    found = first_installed(FLASH_MLA)
    if found is None or assumed(found):
        return []
    try:
        return list(lacking(_FLASH_MLA[found], flash_mla(), _FLASH_MLA_NEEDS))
    except BackendLoadError as error:
        return [str(error)]


def state(out: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, L], lse [H, T]) with a row that sees no key, whose lse vendors give as either infinity, as 0 and -inf."""
    empty = log.isinf()
    return torch.where(empty.T[..., None], 0, out), torch.where(empty, -torch.inf, log)


def with_heads(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """q [T, H, D] with heads of zeros added, where a kernel knows certain numbers of heads only."""
    return q if q.shape[1] == num_heads else torch.nn.functional.pad(q, (0, 0, 0, num_heads - q.shape[1]))


def by_query_len(meta: MLADecodeMetadata) -> Iterator[tuple[int, Rows, Rows]]:
    """(q_len, requests, rows) for each distinct query length of the batch; where there is but one, slices."""
    if meta.query_len is not None:
        if meta.query_len:
            yield meta.query_len, slice(None), slice(0, meta.num_tokens)
        return
    starts, _ = meta.host_lens()
    lens = np.diff(starts)
    for length in np.unique(lens[lens > 0]):
        who = np.flatnonzero(lens == length)
        rows = (starts[who][:, None] + np.arange(length)).reshape(-1).astype(np.int64)
        device = meta.seq_lens.device
        yield int(length), torch.from_numpy(who).to(device), torch.from_numpy(rows).to(device)


class UniformMLAImpl(MLACommonImpl):
    """For kernels whose requests all have one query length. A subclass writes `_decode_uniform`."""

    can_return_lse_for_decode = True

    def _decode_uniform(
        self, call: DecodeCall, q: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The requests of a call that have n rows each. q: [R, n, H, L + Dr] contiguous; lens: [R], block_table: [R, B] int32.
        Returns (out [R, n, H, L], lse [R, H, n] natural, an infinity where a row sees no key)."""
        raise NotImplementedError

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, meta = call.q, call.meta
        out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
        for length, requests, rows in by_query_len(meta):
            part = q[rows].reshape(-1, length, *q.shape[1:])
            got, log = self._decode_uniform(call, part, meta.seq_lens[requests], meta.block_table[requests])
            got, log = state(got.reshape(-1, *got.shape[2:]), log.transpose(0, 1).reshape(q.shape[1], -1))
            if isinstance(rows, slice) and rows == slice(0, q.shape[0]):
                return got, log
            out[rows], lse[:, rows] = got, log
        return out, lse

    def _plan(self, meta: MLADecodeMetadata, *key: Any) -> Any:
        """The batch's plan under a key of this backend and its heads, or None."""
        return meta.plans.get((self.backend.get_name(), self.num_heads, *key))

    def _keep(self, meta: MLADecodeMetadata, plan: Any, *key: Any) -> Any:
        """Keep a plan for the layers that follow."""
        meta.plans[self.backend.get_name(), self.num_heads, *key] = plan
        return plan
