"""Rows of no request: zeros, with a log-sum-exp of -inf.

Requests' rows come first, and other kernels write all of them. Where an output has more rows than the requests have tokens,
this kernel writes the rest: an output that was filled beforehand would be written twice, which takes a prompt of 2,048 tokens
some percent of its time. It also sets the counters of `hopper_prefill` to 0.

Layouts: output [T, H, D], dense; lse [H, T] float32 or None; counters [2] int32 or None; query_start_loc [R + 1] int32.
Grid: a program for every ROWS rows.
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.launch import FUSED, power_of_two

ROWS = 8  #: per program


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    output, lse, counters, query_start_loc, num_reqs, tokens, lse_h,
    H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    if counters is not None:
        tl.store(counters + tl.arange(0, 2), tl.zeros([2], tl.int32))
    h, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    for row in range(tl.maximum(tl.load(query_start_loc + num_reqs), first), tl.minimum(first + ROWS, tokens)):
        for c in range(0, COLUMNS, BLOCK):
            at = row * COLUMNS + c + column
            tl.store(output + at, tl.zeros([BLOCK], output.dtype.element_ty), mask=c + column < COLUMNS)
        if lse is not None:
            tl.store(lse + h.to(tl.int64) * lse_h + row, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=h < H)


def constants(heads: int, size: int) -> dict[str, Any]:
    """The constants and options of `fill`."""
    columns = heads * size
    blocks = {"BLOCK_H": power_of_two(heads), "BLOCK": min(1024, power_of_two(columns)), "ROWS": ROWS}
    return {"H": heads, "COLUMNS": columns, **blocks, "num_warps": 4, **FUSED}
