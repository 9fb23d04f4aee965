"""Blocks, steps and pages of the ragged TPU kernel, in TPU interpret mode against the float64 oracle (about 30 s)."""

import math
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from tests.jax.kernels.tpu.ragged import BLOCKS, SINKS, SLOPES, check, check_case, launch
from tests.levels import sampled

CASES: dict[str, dict[str, Any]] = {
    # two blocks that every row sees, each in one step; one whose second half holds the diagonal
    "whole_blocks": {"mode": "eager", "lens": ((1, 40), (70, 201))},
    # items whose last steps see 62, 30, 36, 64 and 8 keys
    "short_steps": {
        "lens": ((1, 70, 40), (70, 100, 72)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=64, last=32),
        "alibi_slopes": SLOPES,
    },
    # steps of two tiles, the second of which has masks: items end in either half of it, in the first tile and with a chunk; the
    # last one has a row that sees all keys of its steps
    "pairs": {
        "lens": ((1, 70, 40, 33), (70, 150, 100, 64)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=32, last=16, fused=2),
        "sinks": SINKS,
    },
    "pairs_repeated": {
        "mode": "eager",
        "gain": 60.0,
        "lens": ((64, 3), (96, 61)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=32, fused=2),
    },
    # steps of up to four tiles, the last of which has masks, alone and after whole ones; items begin in a tile and between two
    "fused": {
        "lens": ((200, 40, 70), (200, 150, 155)),
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=128, key_tile=32, last=16, fused=4),
        "sinks": SINKS,
    },
    "fused_wide": {
        "mode": "eager",
        "heads": (4, 1, 512),
        "gain": 20.0,
        "lens": ((96, 1, 40), (116, 20, 64)),
        "blocks": BLOCKS._replace(kv_block=128, large=64, chunk=128, key_tile=32, fused=3),
    },
    # new rows fill two pages of the first request, which the last one sees too, none of the third, and two of the fourth
    "whole_pages": {
        "page": 32,
        "lens": ((70, 1, 40, 66, 3), (70, 33, 100, 100, 40)),
        "hold_back": 6,
        "same_page": ((4, 0, 0, 1),),
        "blocks": BLOCKS._replace(large=32),
    },
    # last pages that are read from the new rows: two tiles of them and a part, one, and whole tiles alone
    "last_pages": {
        "page": 64,
        "lens": ((150, 100, 112), (150, 164, 112)),
        "blocks": BLOCKS._replace(large=32, kv_block=128),
    },
    # one that another request sees, some of whose rows are older, beside a single whose own row is read from the cache
    "last_page_of_another": {
        "page": 32,
        "lens": ((90, 1, 32), (90, 33, 64)),
        "same_page": ((2, 0, 0, 2),),
        "mode": "eager",
        "blocks": BLOCKS._replace(large=32),
    },
    # items that share a block: the last step of the first one ends in a page that only the second one sees; two of a request
    # whose third has two blocks
    "shared_blocks": {
        "mode": "eager",
        "heads": (4, 1, 128),
        "lens": ((1, 70, 70), (70, 73, 130)),
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32),
    },
    "shared_blocks_of_a_window": {
        "heads": (4, 1, 128),
        "lens": ((70, 3), (73, 40)),
        "window": (60, None),
        "sinks": SINKS[:4],
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32, last=16),
    },
    # tiles that all fit the ring, and are written after every key is loaded; a tile in the middle of a block, one in two pages,
    # and rows that are not written
    "late": {
        "page": 32,
        "lens": ((3, 1, 20, 1), (70, 33, 100, 129)),
        "padding": 1,
        "hold_back": 2,
        "blocks": BLOCKS._replace(large=32),
    },
    # a page with new rows that another request sees, whose keys are asked for before anything is attended
    "late_of_another": {
        "lens": ((20, 3), (36, 40)),
        "padding": 1,
        "same_page": ((1, 0, 0, 1),),
        "mode": "eager",
        "sinks": SINKS,
    },
    "whole_pages_of_a_single": {
        "page": 32,
        "lens": ((70, 1, 3), (70, 33, 40)),
        "same_page": ((1, 0, 0, 0), (2, 0, 0, 1)),
    },
}

#: Those that no defect of `tests.testing.planted` needs; each of the others alone notices one.
SPARE = ("fused_wide", "shared_blocks_of_a_window")


@pytest.mark.parametrize("name", sampled(list(CASES), 1, "pages of the ragged kernel", lambda name: name not in SPARE))
def test_against_the_oracle(name: str) -> None:
    check_case(CASES[name])


def test_pages_are_loaded_once_for_items_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from HBM to VMEM of a page's size, counted where the interpreter executes them.

    Items of 32 rows see 1, 2 and 3 pages of the first request, and 4 and 5 of the second, whose last one has two blocks.
    """
    moved, real = {}, interpret_pallas_call.DMA.execute_read

    def read(dma: Any) -> None:
        real(dma)
        moved[dma.id] = dma.data_size if dma.src_memory_space != dma.dst_memory_space else 0

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", read)
    blocks = BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32, last=16)
    check(launch(heads=(4, 1, 128), page=32, lens=((70, 40), (70, 130)), blocks=blocks))
    page = 2 * math.prod(kernel.cache_shape(1, 32, 1, 128))
    assert list(moved.values()).count(page) == 3 + 4 + 5
