"""Launch rules: what they promise for any shape and architecture. 2 s."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attn.kernels.launch import (
    MIN_KEYS_TO_SPLIT,
    MIN_SPLIT_TILES,
    SHARED_MEMORY,
    are_whole,
    decode_launch,
    power_of_two,
    prefill_launch,
    prefill_programs,
    row_launch,
    row_splits,
    rows_of_speculation,
    run_together,
    split_kv_for,
    split_tiles_of,
)
from attn.kernels.paged_launch import ARRAYS, Kinds, Launches, LayerParams


def test_launch_rules_need_no_triton() -> None:
    """`attn explain` names kernels' limits on machines without it, and JAX imports the rules of kernels it does not launch."""
    folder = Path(__file__).parents[2] / "attn" / "kernels"
    rules = sorted(path.stem for path in folder.glob("*launch.py"))
    assert {"launch", "paged_launch", "hopper_prefill_launch", "mla_launch"} <= set(rules)
    program = f"import sys; sys.modules['triton'] = None; import {', '.join(f'attn.kernels.{name}' for name in rules)}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder.parents[1])


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, "interpreter", "sm_999"])
def test_tiles_hold_a_group(arch: str) -> None:
    for group in (1, 3, 8, 71, 256):
        for head_size in (32, 96, 256):
            for itemsize, stored in ((2, 1), (2, 2), (4, 4)):
                for rule in (decode_launch, prefill_launch):
                    launch = rule(arch, group, head_size, itemsize, stored)
                    assert launch.block_m >= group
                    assert launch.block_m % 16 == 0 and launch.block_n % 16 == 0
                    assert MIN_SPLIT_TILES * launch.block_n < MIN_KEYS_TO_SPLIT


@pytest.mark.parametrize("seed", range(20))
def test_items_of_any_lengths_are_within_the_grid_and_end_together(seed: int) -> None:
    """The device searches the same share (`test_paged_attention` compares them); too many items would be left out."""
    rng = np.random.default_rng(seed)
    num_reqs, kv_heads = int(2 ** rng.uniform(0, 9)), int(rng.choice([1, 4, 8, 16]))
    tiles = (2 ** rng.uniform(0, 11, num_reqs)).astype(np.int64)
    split_kv = split_kv_for(num_reqs, kv_heads, int(tiles.max()), 0, 132)
    assert split_kv is not None and split_kv.block_r >= num_reqs
    split_tiles = split_tiles_of(tiles, split_kv)
    counts = -(-tiles // split_tiles)
    assert counts.sum() <= split_kv.items == split_kv.max_splits + num_reqs
    assert split_tiles <= max(MIN_SPLIT_TILES, -(-tiles.sum() // split_kv.max_splits)), "no longer than without the search"


def test_a_full_device_needs_no_parts_and_an_idle_one_does() -> None:
    for keys, kv_heads in (([4096] * 64, 8), ([3000] * 32, 8), ([500] * 256, 4), ([], 8), ([100], 8)):
        assert are_whole(np.array(keys, int), kv_heads, 132)
    for keys in ([32768], [32768] * 16, [500] * 63 + [30000], [200, 500, 1000, 16000] * 16, [131072] * 2):
        assert not are_whole(np.array(keys), 8, 132)
    assert split_kv_for(4, 8, MIN_SPLIT_TILES, 0, 132) is None


def test_splits_of_many_rows_are_only_made_where_they_pay() -> None:
    """On an H100 the first four took 0.81, 0.83, 0.93 and 0.8 of the time unsplit, the others 1.19, 1.2 and 1."""
    rng = np.random.default_rng(0)
    short, long, uneven = (rng.integers(top // 20, top, n) for top, n in ((1500, 80), (6000, 92), (11000, 44)))
    for keys, kv_heads in (([1536] * 22, 8), ([3657] * 45, 4), ([9216] * 26, 8), (short, 4)):
        assert are_whole(np.array(keys), kv_heads, 132, 64) and not are_whole(np.array(keys), kv_heads, 132)
    for keys, kv_heads in (([7628] * 20, 8), (long, 4), (uneven, 4), ([500] * 3, 8)):
        assert not are_whole(np.array(keys), kv_heads, 132, 64)


def test_short_decodes_are_only_split_where_it_pays() -> None:
    """On an H200 batches like the first four took 0.82, 0.79, 0.86 and 0.9 of the time unsplit, like the others 1.1 to 2.6."""
    rng = np.random.default_rng(0)
    short, few, tail = (rng.integers(low, top, n) for low, top, n in ((200, 600, 97), (100, 1050, 9), (500, 1100, 134)))
    for keys, kv_heads in (([684] * 26, 8), (short, 4), (tail, 4), (rng.integers(80, 830, 97), 8)):
        assert are_whole(np.array(keys), kv_heads, 132, 16) and not are_whole(np.array(keys), kv_heads, 132)
    for keys, kv_heads in (([1310] * 130, 1), ([543] * 23, 4), ([928] * 30, 2), (few, 2), (short, 1)):
        assert not are_whole(np.array(keys), kv_heads, 132, 16)


@pytest.mark.parametrize("seed", range(20))
def test_decodes_are_whole_where_the_search_leaves_the_longest_whole(seed: int) -> None:
    """Most batches are decided by bounds of the search alone."""
    rng, seen = np.random.default_rng(seed), set()
    for _ in range(50):
        kv_heads, num_reqs = int(rng.choice([1, 4, 8, 16])), int(2 ** rng.uniform(0, 9))
        longest = int(2 ** rng.uniform(8, 16))
        keys = rng.integers(int(longest * rng.uniform(0, 1)), longest + 1, num_reqs)
        tiles = -(-keys // 64)
        split_kv = split_kv_for(num_reqs, kv_heads, int(tiles.max()), 0, 132)
        expected = split_kv is None or split_tiles_of(tiles, split_kv) >= int(tiles.max())
        assert are_whole(keys, kv_heads, 132) == expected
        seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize(("keys", "kv_heads"), [([131072], 8), ([65536] * 8, 4), ([32768] * 16, 8), ([32768], 8)])
def test_long_requests_are_cut_into_one_wave(keys: list[int], kv_heads: int) -> None:
    """One item more than the device runs at once takes half as long again (H200: 0.159 ms, 0.141 in one wave)."""
    tiles = np.array(keys) // 64
    split_kv = split_kv_for(len(keys), kv_heads, int(tiles.max()), 0, 132)
    assert split_kv is not None
    items = int((-(-tiles // split_tiles_of(tiles, split_kv))).sum())
    assert 0.9 * 2 * 132 / kv_heads < items <= 2 * 132 / kv_heads


@pytest.mark.parametrize(("num_reqs", "kv_heads", "rows", "most"), [
    (42, 1, 64, 222), (10, 8, 64, 23), (33, 4, 64, 99), (26, 8, 64, 49), (33, 4, 16, 33), (26, 8, 32, 33), (200, 8, 16, 33),
])  # fmt: skip
def test_tiles_of_many_rows_are_cut_into_more_parts(num_reqs: int, kv_heads: int, rows: int, most: int) -> None:
    """Measured (H200): where requests take half a wave or more."""
    split_kv = split_kv_for(num_reqs, kv_heads, 1000, 0, 132, rows)
    assert split_kv is not None and (split_kv.max_splits, split_kv.items) == (most, most + num_reqs)


def test_crowded_parts_have_a_launch_of_their_own() -> None:
    """Where requests take half of the items that fit at once, their rows are padded to the 64 of a tensor instruction."""
    dtypes: list[str | None] = [None] * len(ARRAYS)
    for name in ("output", "query", "key_cache"):
        dtypes[ARRAYS.index(name)] = "bfloat16"
    for name in ("query_start_loc", "seq_lens", "block_table"):
        dtypes[ARRAYS.index(name)] = "int32"

    def launches(size: int = 128, queries: int = 5, invariant: bool = False, arch: str = "sm_90") -> Launches:
        kinds = Kinds(arch, 132, True, tuple(dtypes), (32, size, 16, 8, size), (None, None), queries, True, False)
        return Launches(kinds, LayerParams(1.0, right=0, invariant=invariant))

    rules = launches()
    many, few = rules.split_kv(17, 4096, False), rules.split_kv(16, 4096, False)  # 33 items fit at once, by 8 kv heads
    assert many is not None and few is not None and (many.crowded, few.crowded) == (True, False)
    tiles = [(x["BLOCK_M"], x["BLOCK_N"], x["BLOCK_Q"]) for x in (rules.decode(32, True), rules.decode(32), rules.decode(0))]
    assert tiles == [(64, 64, 8), (32, 64, 8), (32, 32, 8)]
    assert many.items == 17 + 3 * 33 // 2 and rules.split_kv(17, 4096, True) is None
    for other in (launches(queries=1), launches(size=256), launches(invariant=True), launches(arch="sm_100")):
        assert other.decode(32, True) == other.decode(32)


def test_results_of_stretches_have_room_whatever_is_split() -> None:
    """As many requests as there are items to spare are split, each into at most one stretch for each item that fits at once."""
    for num_reqs, split in ((1, 1), (3, 3), (20, 20), (300, 33)):
        plans = [split_kv_for(num_reqs, 8, 1000, stretch, 132) for stretch in (0, 4)]
        assert plans[0] is not None and plans[1] is not None
        assert plans[0] == replace(plans[1], merged=plans[0].merged, stored=plans[0].items) and plans[1].stored == 33 * split


def test_tiles_of_prompts_are_the_batchs_unless_bits_are_the_requests() -> None:
    assert [LayerParams(1.0, right=0, invariant=invariant).of_prompts(4, 250).keys_below for invariant in (False, True)] == [
        250, None,
    ]  # fmt: skip


def test_power_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_rows_of_speculation_share_a_tile() -> None:
    assert rows_of_speculation("sm_90", 4, 5, 2) == 20 and decode_launch("sm_90", 20, 128, 2, 2).block_m == 32
    # one token, rows that fit in the tile of one, too many rows, too many tokens, float32, another platform
    for args in (("sm_90", 4, 1, 2), ("sm_90", 4, 4, 2), ("sm_90", 8, 9, 2), ("sm_90", 1, 17, 2), ("sm_90", 4, 5, 4),
                 ("gfx942", 4, 5, 2)):  # fmt: skip
        assert rows_of_speculation(*args) == 0


def test_little_work_is_one_launch() -> None:
    """By the tiles of all requests, spread over 132 multiprocessors, and the prompts' longest program."""

    def together(requests: list[tuple[int, int]], heads: int, kv_heads: int) -> bool:
        q_lens, keys = np.array(requests, int).reshape(-1, 2).T
        return run_together(q_lens, keys, heads // kv_heads, kv_heads, 132)

    assert together([(57, 57), (1, 22), (1, 1338)], 16, 16)  # 368 tiles, 3 for each; a prompt's program takes 6
    assert together([(57, 57)] * 4 + [(1, 100)] * 10, 32, 8)  # 288 tiles
    assert together([(40, 9000)], 32, 8) and together([(64, 64), (0, 5000), (1, 0)], 8, 1)
    assert not together([(57, 57)] * 4 + [(1, 1000)] * 40, 32, 8)  # decodes that fill the device: 43 for each
    assert not together([(60, 60)] * 200, 32, 8) and not together([(60, 9000)] * 3, 32, 8)  # and so do prompts
    # measured on an H200, us: 57 and 19, 16.8 and 10.7 (rows to merge); 18 and 28, 31 and 38 (long programs)
    assert not together([(60, 400)] * 5, 32, 8) and not together([(10, 162)], 28, 4)
    assert together([(20, 1000)], 28, 4) and together([(60, 2000)] * 5, 8, 1)
    assert not together([(1, 20)], 16, 16) and not together([], 16, 16)
    # chunks of few tiles over many keys, 147 and 70, 361 and 77, 106 and 75; others fill the device, 382 and 812
    assert together([(137, 713), (41, 17864), (47, 170)], 16, 16)
    assert together([(128, 32768)], 8, 1) and together([(512, 8192)], 8, 1) and not together([(512, 30720)], 32, 8)


def test_a_mixed_batch_shares_the_device_where_that_is_shorter() -> None:
    second = 480e12, 4e12  # of a prefill, of a decode, on the whole device
    assert prefill_programs(0.13e-3 * second[0], 0.25e-3 * second[1], 132) in range(60, 80)
    assert prefill_programs(0.2e-3 * second[0], 0.03e-3 * second[1], 132) == 132
    assert prefill_programs(second[0], 0.0, 132) == 132


@pytest.mark.parametrize("seed", range(10))
def test_no_other_share_of_a_mixed_batch_is_shorter(seed: int) -> None:
    """The rule solves for the number of multiprocessors; this tries all."""
    rng, shared = np.random.default_rng(seed), 0
    for _ in range(200):
        whole, decode, processors = 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-6, -2), int(rng.choice([4, 80, 132, 148]))
        programs = np.arange(max(1, processors // 8), processors)
        prefill = whole * processors / programs
        done = prefill * np.minimum(1, (processors - programs) / (3 / 7 * processors))
        times = prefill + np.maximum(0, decode - done)
        chosen = prefill_programs(whole * 480e12, decode * 4e12, processors)
        if times.min() < 0.9 * (whole + 0.7 * decode):
            assert times[chosen - programs[0]] == pytest.approx(times.min(), rel=1e-9)
            shared += 1
        else:
            assert chosen == processors
    assert 20 < shared < 180


@pytest.mark.parametrize("programs", [1, 8, 130, 528, 5000])
def test_no_part_of_a_single_row_is_empty(programs: int) -> None:
    for tiles in (1, 2, 7, 100, 901):
        splits = row_splits(programs, tiles, 528, 512)
        assert 1 <= splits <= 64
        assert splits == 1 or (splits - 1) * -(-tiles // splits) < tiles
    assert row_splits(programs, 0, 528, 512) == 1


def test_single_rows_are_cut_where_the_device_is_not_full() -> None:
    assert row_splits(8, 100, 528, 512) > 8
    assert row_splits(130, 100, 528, 512) == 4
    assert row_splits(528, 100, 528, 512) == 1
    assert row_splits(8, 2, 528, 512) == 1
    assert row_splits(130, 10, 528, 4096) == 1 < row_splits(130, 10, 528, 512)  # a wide state costs more to merge


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, "interpreter"])
@pytest.mark.parametrize("size", [64, 80, 512])
def test_single_rows_fit_the_device(arch: str, size: int) -> None:
    launch, slots = row_launch(arch, 4, size, 2, 132)
    assert launch.block_n >= 16
    assert slots in (132, 528, 512)
    stages = max(1, launch.num_stages - 1)
    tiles = 4 * launch.block_n * power_of_two(size) * stages * (4 if slots == 528 else 1)
    assert tiles <= SHARED_MEMORY.get(arch, 1 << 30)
