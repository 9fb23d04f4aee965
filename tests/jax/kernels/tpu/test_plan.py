"""The ragged TPU kernel's plan, and the rule of its block sizes (about 2 s)."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn.jax.kernels.tpu import _plan
from attn.jax.kernels.tpu._chips import CHIPS, RaggedBlocks, blocks_for
from attn.jax.kernels.tpu._refs import PagedConfig, PagedShape, RaggedConfig
from attn.visibility import BatchMask, LayerMask, Visibility

#: 8 kv heads of 4 query heads, pages of 128 tokens
SHAPE = PagedShape(2048, 1, 256, 1, 2, 8, 128, 128, 4, 2, 2)


def test_rows_before_the_first_key_see_a_prefix_and_a_span() -> None:
    """No range by causality, and the prefix, which has none of its own without a window, does not give way to the span."""
    starts, lens, slots = jnp.array([0, 7]), jnp.array([5]), jnp.zeros(7, jnp.int32)
    seen = BatchMask(spans=jnp.tile(jnp.array([[3, 4]], jnp.int32), (7, 1)), prefix=jnp.array([1], jnp.int32))
    batch = _plan.Batch(starts, lens, jnp.zeros((1, 2), jnp.int32), slots, seen)
    query, cache = jax.ShapeDtypeStruct((7, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 16, 128), jnp.bfloat16)
    shape = _plan.shape_of(query, cache, batch, 7, LayerMask(), lse=False, write=False)
    cfg = PagedConfig(**vars(shape), kv_block=16, large=8, key_tile=16, slots=3)
    ranges = jax.jit(functools.partial(_plan.make, cfg))(batch).ranges
    np.testing.assert_array_equal(ranges[0, :4, 0], [0, 1, 3, 5])


@pytest.mark.parametrize("seed", range(12))
def test_the_ranges_of_the_plan_are_what_rows_see(seed: int) -> None:
    """Rows before the first key and rows of no request included; what all rows of an item see, and what none does."""
    rng = np.random.default_rng(seed)
    lens, query_lens = rng.integers(0, 24, 5), rng.integers(0, 9, 5)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows = max(int(starts[-1]), 1) + 2
    first = rng.integers(0, np.maximum(np.repeat(lens, query_lens), 1))
    last = np.minimum(first + rng.integers(0, 6, len(first)), np.repeat(lens, query_lens) - 1)
    spans = np.full((rows, 2), -1, np.int32)
    spans[: len(first)] = np.where((rng.random(len(first)) < 0.6)[:, None], np.stack([first, last], axis=1), -1)
    window = [(None, None), (3, None), (3, 2), (None, 2)][seed % 4]
    layer = LayerMask(bool(rng.random() < 0.5), window, [None, None, 5][seed % 3], bool(seed % 2))
    prefix, flags = rng.integers(0, 20, 5).astype(np.int32), rng.random(5) < 0.5
    seen = BatchMask(None, spans, prefix if seed % 5 else None, None if layer.causal else flags)
    batch = _plan.Batch(
        *map(jnp.asarray, (starts, lens.astype(np.int32), np.zeros((5, 2), np.int32))), jnp.zeros(rows, jnp.int32)
    )
    batch = batch._replace(mask=seen.map(jnp.asarray))
    query, cache = jax.ShapeDtypeStruct((rows, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 16, 128), jnp.bfloat16)
    shape = _plan.shape_of(query, cache, batch, 8, layer, lse=False, write=False)
    cfg = PagedConfig(**vars(shape), kv_block=16, large=4, key_tile=16, slots=3)
    plan = jax.jit(functools.partial(_plan.make, cfg))(batch)
    items = np.asarray(plan.items).reshape(-1, cfg.num_items)
    assert len(items) == _plan.GAPS + 2 * (cfg.ranges - 1) and plan.ranges is not None
    key, met = np.arange(24), 0
    for i in range(int(plan.counts[0])):
        r = int(items[_plan.TABLE, i]) // cfg.columns
        offset = int(items[_plan.POSITION, i]) - (lens[r] - query_lens[r])
        number = min(4, query_lens[r] - offset)
        row, position = int(starts[r]) + offset + np.arange(number), int(items[_plan.POSITION, i]) + np.arange(number)
        want = Visibility(layer, seen).allowed(position[:, None], key, r, row[:, None]) & (key < lens[r])
        low, high = np.asarray(plan.ranges[i])[: 2 * cfg.ranges].reshape(-1, 2, 4).transpose(1, 2, 0)[:, :, :, None]
        got = ((key >= low) & (key < high)).any(axis=1)
        np.testing.assert_array_equal(got, np.pad(want, ((0, 4 - number), (0, 0))))
        bound = items[:, i]
        gaps = bound[_plan.GAPS :].reshape(-1, 2)
        inside = (key >= bound[_plan.LOW]) & (key < bound[_plan.HIGH])
        hidden = ~inside | ((key >= gaps[:, :1]) & (key < gaps[:, 1:])).any(axis=0)
        assert not got[:, hidden].any()
        assert want[:, (key >= bound[_plan.CLEAR]) & (key < bound[_plan.CLEAR_STOP])].all()
        assert bound[_plan.MORE] == (((key >= low) & (key < high))[:, 1:].any())
        met += number
    assert met == query_lens.sum()


def test_what_prompts_move() -> None:
    """16 prompts of 500 rows at the bandwidth of a v6e: 140 us, where 171 are too many for the goal of 150."""
    query_lens = jnp.full(16, 500, jnp.int32)
    starts = jnp.arange(17, dtype=jnp.int32) * 500
    table, slots = jnp.arange(16 * 16, dtype=jnp.int32).reshape(16, 16), jnp.zeros(8000, jnp.int32)
    batch = _plan.Batch(starts, query_lens, table, slots + 1)
    query, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8000, 32, 128), (256, 2, 8, 128, 128)))
    shape = _plan.shape_of(query, cache, batch, 500, LayerMask(), lse=False, write=True)
    sizes = vars(shape) | blocks_for("v6e", shape)._asdict()
    cfg = RaggedConfig(**(dict.fromkeys(RaggedConfig.__dataclass_fields__, False) | sizes))
    plan = jax.jit(functools.partial(_plan.make, cfg))(batch)
    items = np.asarray(plan.items).reshape(_plan.columns(cfg), -1)[:, : int(plan.counts[0])]
    number = np.arange(items.shape[1])
    # a block that items share is loaded for the first of them
    loads = number[items[_plan.GROUP] == number]
    pages = -(-items[_plan.HIGH, items[_plan.GROUP_LAST, loads]] // 128)
    row = 2 * 8 * 128 * 2
    moved = 2 * 8000 * 32 * 128 * 2 + 2 * 8000 * row + pages.sum() * 128 * row
    assert len(number) == 64 and pages.tolist() == [4] * 16
    assert 139 < moved / 1640e9 * 1e6 < 141


def test_the_rule_of_block_sizes() -> None:
    """Every chip's default fits its memory, and pages divide blocks."""
    for chip, limits in CHIPS.items():
        for heads, group, lanes in ((8, 4, 128), (32, 1, 128), (1, 71, 128), (8, 8, 256), (16, 1, 256)):
            for page in (16, 256):
                blocks = blocks_for(chip, PagedShape(4096, 1, 4096 // page, 4096, 2, heads, page, lanes, group, 2, 2, lse=True))
                kv = blocks.slots * 2 * heads * blocks.kv_block * lanes * 2
                assert kv < limits.vmem and blocks.kv_block % page == 0 and blocks.kv_block % blocks.chunk == 0
                assert blocks.large * group % blocks.row_tile == 0 and blocks.chunk % blocks.key_tile == 0
    with pytest.raises(ValueError, match="chip='v3' is unknown"):
        blocks_for("v3", SHAPE)


def test_blocks_of_decodes() -> None:
    """4,096 keys over all heads; 2,048 on a v7x where they fit and all requests have one row; of one byte on every chip, but
    not where heads are wider."""

    def keys(chip: str, max_query_len: int, heads: int, cache_itemsize: int = 2, lanes: int = 128) -> int:
        sizes = {"num_kv_heads": heads, "max_query_len": max_query_len, "cache_itemsize": cache_itemsize, "lanes": lanes}
        blocks = blocks_for(chip, dataclasses.replace(SHAPE, **sizes))
        assert blocks.slots * 2 * heads * blocks.kv_block * lanes * cache_itemsize < CHIPS[chip].vmem
        return blocks.kv_block

    assert [keys("v7x", 1, heads) for heads in (1, 2, 8, 32)] == [4096, 2048, 2048, 1024]
    assert [keys("v6e", n, heads) for n in (1, 2) for heads in (1, 2, 3, 4, 8)] == [4096, 2048, 1024, 1024, 1024] * 2
    assert [keys("v7x", 2, 8), keys("v6e", 1, 8), keys("v5e", 1, 8)] == [1024] * 3
    assert [keys(chip, n, 8, 1) for chip in ("v5e", "v7x") for n in (1, 2)] == [2048] * 4
    assert [keys("v6e", n, heads, 1, 256) for n in (1, 2) for heads in (1, 2, 8)] == [4096, 2048, 1024] * 2


def test_blocks_of_wide_heads() -> None:
    """Heads of 512 take no more bytes a block than those of 256, and no more products a stretch of code."""
    for chip in ("v5e", "v6e", "v7x"):
        for itemsize, heads, rows in itertools.product((2, 4), (1, 2, 8), (1, 300, 2048)):
            shape = dataclasses.replace(
                SHAPE, num_kv_heads=heads, max_query_len=rows, itemsize=itemsize, cache_itemsize=itemsize
            )
            narrow, wide = (blocks_for(chip, dataclasses.replace(shape, lanes=lanes)) for lanes in (256, 512))
            assert wide.kv_block == SHAPE.page or wide.kv_block * 512 <= narrow.kv_block * 256
            assert wide.stretch * 512 <= narrow.stretch * 256
            assert wide.slots * 2 * heads * wide.kv_block * 512 * itemsize < CHIPS[chip].vmem


def test_blocks_of_short_requests() -> None:
    """Singles share blocks, which are no longer than all of them; a block of others is no longer than what one may see."""

    def sizes(requests: int, max_query_len: int = 1, **more: Any) -> tuple[int, int, int]:
        shape = dataclasses.replace(SHAPE, num_requests=requests, max_query_len=max_query_len, **more)
        blocks = blocks_for("v6e", shape)
        return blocks.kv_block, blocks.segment, blocks.slots

    page, window = SHAPE.page, {"mask": LayerMask(window=(127, None)), "columns": 4096 // SHAPE.page}
    assert [sizes(n, **window) for n in (32, 2, 1)] == [(1024, 128, 3), (512, 128, 6), (256, 128, 8)]
    assert sizes(32, 2, **window)[0] == 512
    assert [sizes(n, columns=128 // page)[0] for n in (1, 4, 64)] == [128, 512, 1024]


def test_items_of_the_longest_requests() -> None:
    """1,024 rows on the chips that take them, and 2,048 there of one head, for queries of two bytes: in float32 a stretch
    that long compiles for minutes."""

    def blocks(chip: str, itemsize: int) -> RaggedBlocks:
        return blocks_for(chip, dataclasses.replace(SHAPE, max_query_len=2048, itemsize=itemsize, cache_itemsize=itemsize))

    for chip, rows in (("v5e", 512), ("v6e", 1024), ("v7x", 1024)):
        assert (blocks(chip, 2).large * 4, blocks(chip, 4).large * 4) == (rows, 512)
        assert blocks(chip, 4).stretch == blocks("v5e", 4).stretch
    one_head = dataclasses.replace(SHAPE, max_query_len=2048, num_kv_heads=1, group=8)
    assert [blocks_for(chip, one_head).large * 8 for chip in ("v5e", "v6e", "v7x")] == [512, 2048, 2048]
    # from sixteen smaller items on, and of wide heads from eight on, if their queries are at most 4 MiB
    for heads, lanes, rows in (
        (1, 256, (512, 512, 1024, 2048)),
        (1, 512, (512, 1024, 2048, 2048)),
        (2, 512, (512, 1024, 1024, 1024)),
        (4, 512, (512, 1024, 1024, 1024)),
        (8, 512, (512, 512, 1024, 1024)),
    ):
        shape = dataclasses.replace(one_head, num_kv_heads=heads, lanes=lanes)
        lengths = (448, 512, 1000, 2048)
        assert tuple(blocks_for("v6e", dataclasses.replace(shape, max_query_len=n)).large * 8 for n in lengths) == rows
        assert {blocks_for("v5e", dataclasses.replace(shape, max_query_len=n)).large * 8 for n in lengths} == {512}


def test_short_last_steps() -> None:
    """Of prompts of up to 16 items in two bytes: longer ones, single rows and float32 compile no other step."""

    def last(max_query_len: int, itemsize: int = 2, group: int = 4) -> int:
        sizes = {"max_query_len": max_query_len, "itemsize": itemsize, "group": group}
        return blocks_for("v6e", dataclasses.replace(SHAPE, **sizes)).last

    assert [last(n) for n in (1, 8, 512, 1024, 2048)] == [0, 128, 128, 128, 0]
    assert [last(512, itemsize=4), last(512, group=1)] == [0, 0]


def test_steps_of_several_tiles() -> None:
    """Where each row sees all before it: two where eight heads have 512 rows, up to four where fewer have as many or more."""

    def fused(max_query_len: int, **sizes: Any) -> int:
        return blocks_for("v6e", dataclasses.replace(SHAPE, max_query_len=max_query_len, **sizes)).fused

    assert [fused(n) for n in (1, 512, 2048)] == [1, 2, 1]
    assert [fused(2048, num_kv_heads=heads, group=8) for heads in (1, 2, 4)] == [4, 4, 2]
    masks = (LayerMask(False), LayerMask(True, window=(600, None)), LayerMask(True, chunk_size=600))
    assert {fused(512, mask=mask) for mask in masks} == {1} and fused(512, ranges=1) == 1
    assert [fused(1000, num_kv_heads=heads, lanes=512, group=8) for heads in (1, 2, 4)] == [4, 4, 2]
    assert fused(1000, num_kv_heads=1, lanes=512, group=8, itemsize=4, cache_itemsize=4) == 2
