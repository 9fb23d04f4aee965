"""The table of stream-K for a batch of decodes (`attn.kernels.plan`), filled on the device of torch's tensors."""

import functools

import torch

from attn.kernels import plan
from attn.kernels.launch import FIELDS, block_of
from attn.torch.kernels.direct import Prepared, Signature, signature_of, temporary


def stream_k(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, heads: int, rows: int, groups: int, items: int, block_n: int
) -> torch.Tensor:
    """Divide a batch of decodes evenly between `groups` groups of programs: the table of their items, int32, on the device.

    A request's rows, `heads` per token, are blocks of `rows`, and each block attends all of the request's keys, in tiles of
    `block_n`. All blocks in a line, each with its tiles and STARTED more for what it costs beside them, are divided at
    equal distances, as stream-K divides a product of matrices (Osama et al., 2023). The group's splits of blocks are its
    items. Blocks of about equal length, at least four for five groups, stay whole instead.

    query_start_loc: [R + 1], seq_lens: [R], int32. Requests without tokens have no item; those without keys have one, without
    keys. Returns [2 groups + FIELDS items]: the first item of each group and the one after its last; then for each item its
    request, the request's first token, tokens and keys (so that a program waits for one load), its block, its
    first key, the end of its keys, and the splits of its block. items: at least groups + all blocks of requests.

    A group has at most two items with a partial result: the last split of a block or one in the middle, whose state is the
    group's first, and a block's first split, its last item, whose state is the group's second.
    """
    num_reqs = seq_lens.shape[0]
    # int32, as the lengths are. Not zeroed: programs read the items between their group's two bounds only.
    table = temporary(seq_lens.new_empty(2 * groups + FIELDS * items))
    arrays = (table, query_start_loc, seq_lens)
    # the kernel holds all requests in one vector, whose size is a power of two: another number of them seldom compiles again
    kernel = _prepared(signature_of(arrays), heads, block_n, block_of(num_reqs))
    kernel(groups, arrays, num_reqs, groups, rows)
    return table


@functools.lru_cache(maxsize=256)
def _prepared(signature: Signature, *sizes: int) -> Prepared:
    return Prepared(plan.stream_k, **plan.constants(*sizes))
