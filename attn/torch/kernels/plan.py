"""The table of work items of a batch of decodes (`attn.kernels.plan`), filled on the device of torch's tensors."""

import functools

import torch

from attn.kernels import plan
from attn.kernels.launch import FUSED, SplitKV
from attn.torch.kernels.direct import Kind, Prepared, kind_of


def items(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, split_kv: SplitKV, block_n: int
) -> torch.Tensor:
    """Return the table of a batch of causal decodes, int32 on the device: a row of `plan.FIELDS` per item, then (first item,
    number of parts) per request. query_start_loc: [R + 1], seq_lens: [R], int32; requests without tokens have no item."""
    num_reqs = seq_lens.shape[0]
    table = seq_lens.new_empty(plan.FIELDS * split_kv.items + 2 * num_reqs)
    arrays = (table, query_start_loc, seq_lens)
    kernel = _prepared(kind_of(arrays), block_n, split_kv.block_r)
    kernel(
        split_kv.items,
        arrays,
        num_reqs,
        max_query_len,
        split_kv.split_tiles,
        split_kv.max_splits,
        split_kv.whole_from,
        split_kv.items,
    )
    return table


@functools.lru_cache(maxsize=256)
def _prepared(kind: Kind, block_n: int, block_r: int) -> Prepared:
    return Prepared(plan.items, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=1, **FUSED)
