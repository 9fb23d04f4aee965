"""Rows of no request: zeros, with a log-sum-exp of -inf.

Requests' rows come first, and other kernels write all of them. Where an output has more rows than the requests have tokens,
this kernel writes the rest: an output that was filled beforehand would be written twice, which takes a prompt of 2,048 tokens
some percent of its time.

It also prepares the launches that follow: it sets the counters of `hopper_prefill` to 0, and decides which of two launches has
the decodes. Those of about equal length are best left whole, by another launch than their splits would have: `whole` and
`split` are `query_start_loc` for one of these and zeros for the other, which then finds requests without tokens.

Layouts: output [T, H, D], dense; lse [H, T] float32 or None; counters [2] or None; query_start_loc, whole, split [R + 1] and
seq_lens [R], int32, the last three None where decodes have one launch. Grid: a program for every ROWS rows.
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.launch import FUSED, power_of_two

ROWS = 8  #: per program


@triton.jit
def _whole_or_split(  # type: ignore[no-untyped-def]
    whole, split, query_start_loc, seq_lens, num_reqs, left, most, keys_per_tile, whole_from, BLOCK_R: tl.constexpr
):
    """Whether the plan of the batch (`plan.item_of`) would split no decode, a request of up to `most` rows, for the sake of the
    others. left: keys that rows see to the left."""
    # one program reads all lengths and writes both lists
    if tl.program_id(0) == 0:
        i = tl.arange(0, BLOCK_R)
        end = tl.load(query_start_loc + 1 + i, mask=i < num_reqs, other=0)
        rows = end - tl.load(query_start_loc + i, mask=i < num_reqs, other=0)
        keys = tl.minimum(tl.load(seq_lens + i, mask=i < num_reqs, other=0), left + rows)
        tiles = tl.where((rows > 0) & (rows <= most), (keys + keys_per_tile - 1) // keys_per_tile, 0)
        live = tl.sum((tiles > 0).to(tl.int32), 0)
        # the condition of `plan.item_of`, where requests stay whole
        even = (live >= whole_from) & (4 * tl.max(tiles, 0).to(tl.int64) * live <= 5 * tl.sum(tiles.to(tl.int64), 0))
        # A launch whose list is zeros finds no rows and ends at once. The host cannot choose instead: it does not know the
        # lengths.
        tl.store(whole, 0)
        tl.store(split, 0)
        tl.store(whole + 1 + i, tl.where(even, end, 0), mask=i < num_reqs)
        tl.store(split + 1 + i, tl.where(even, 0, end), mask=i < num_reqs)


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    output, lse, counters, whole, split, query_start_loc, seq_lens, num_reqs, tokens, lse_h, left, most, keys_per_tile,
    whole_from,
    H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    if whole is not None:
        _whole_or_split(whole, split, query_start_loc, seq_lens, num_reqs, left, most, keys_per_tile, whole_from, BLOCK_R)
    if counters is not None:
        tl.store(counters + tl.arange(0, 2), tl.zeros([2], tl.int32))
    first = tl.program_id(0).to(tl.int64) * ROWS
    fill_rows(first, output, lse, query_start_loc, num_reqs, tokens, lse_h, H, COLUMNS, BLOCK_H, BLOCK, ROWS)


@triton.jit
def fill_rows(  # type: ignore[no-untyped-def]
    first, output, lse, query_start_loc, num_reqs, tokens, lse_h,
    H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write those of ROWS rows from `first` on, a 64-bit number, that are of no request."""
    h, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    # the last entry of `query_start_loc` is the number of tokens that have a request
    for row in range(tl.maximum(tl.load(query_start_loc + num_reqs), first), tl.minimum(first + ROWS, tokens)):
        for c in range(0, COLUMNS, BLOCK):
            at = row * COLUMNS + c + column
            tl.store(output + at, tl.zeros([BLOCK], output.dtype.element_ty), mask=c + column < COLUMNS)
        if lse is not None:
            tl.store(lse + h.to(tl.int64) * lse_h + row, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=h < H)


def constants(heads: int, size: int) -> dict[str, Any]:
    """The constants and options of `fill`, and the arguments of a launch that chooses nothing."""
    columns, chooses = heads * size, dict.fromkeys(("whole", "split", "seq_lens"))
    numbers = dict.fromkeys(("left", "most", "keys_per_tile", "whole_from"), 0) | {"BLOCK_R": 1}
    blocks = {"BLOCK_H": power_of_two(heads), "BLOCK": min(1024, power_of_two(columns)), "ROWS": ROWS}
    return {"H": heads, "COLUMNS": columns, **blocks, **chooses, **numbers, "num_warps": 4, **FUSED}
