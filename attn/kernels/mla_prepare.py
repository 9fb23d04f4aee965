"""The launch before a decode of latents: it writes new rows to the cache, splits the keys, and clears rows of no request.

A launch that waits for the one before takes some microseconds, and an absorbed decode of 64 requests not much more than a
hundred. None of the three needs another: programs 0 to groups - 1 fill the table of stream-K (`plan`), the next store a new
token's latents each (`latent_write`), the last write the rows of no request (`fill`).
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels import fill, latent_write, plan
from attn.kernels.fill import fill_rows
from attn.kernels.latent_write import write_row
from attn.kernels.plan import stream_k_items


@triton.jit(do_not_specialize=("num_reqs", "groups", "rows", "new", "tokens"))
def prepare(  # type: ignore[no-untyped-def]
    table, cache, output, lse, kv_c, k_pe, slots, k_scale, query_start_loc, seq_lens, factor, num_reqs, groups, rows, new,
    tokens, lse_h, kv_c_t, k_pe_t, c_block, c_slot,
    H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, L: tl.constexpr, DR: tl.constexpr, P: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < groups:
        if table is not None:
            stream_k_items(program, table, query_start_loc, seq_lens, num_reqs, groups, rows, H, BLOCK_N, BLOCK_Q)
    elif program < groups + new:
        if kv_c is not None:
            token, at = (program - groups).to(tl.int64), (kv_c_t, k_pe_t, c_block, c_slot)
            write_row(token, kv_c, k_pe, cache, slots, k_scale, factor, at, L, DR, P, BLOCK_L, BLOCK_R, FORMAT)
    else:
        first = (program - groups - new).to(tl.int64) * ROWS
        fill_rows(first, output, lse, query_start_loc, num_reqs, tokens, lse_h, H, COLUMNS, BLOCK_H, BLOCK, ROWS)


def constants(stream_k: tuple[int, int, int], row: tuple[int, int, int], code: str) -> dict[str, Any]:
    """The constants and options of `prepare`. stream_k: heads, keys of a tile, `launch.block_of`; row: L, Dr, and the page;
    code: as in `latent_write.constants`."""
    of_stream_k, of_rows = plan.constants(*stream_k), latent_write.constants(*row, code, 0, 0)
    # Arguments that choose launches are `fill`'s alone, in lower case; both `latent_write` and `plan` call a block size
    # BLOCK_R: the plan's is BLOCK_Q here.
    of_fill = {
        name: value for name, value in fill.constants(stream_k[0], row[0]).items() if name.isupper() and name != "BLOCK_R"
    }
    made = {
        **of_rows,
        **of_stream_k,
        **of_fill,
        "BLOCK_Q": of_stream_k["BLOCK_R"],
        "BLOCK_R": of_rows["BLOCK_R"],
        "num_warps": 4,
    }
    # no query is copied here, so the kernel has no such parameter
    return {name: value for name, value in made.items() if name != "NOPE"}
