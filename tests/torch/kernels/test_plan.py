"""Stream-K over decodes' keys: every tile of every block of rows once, as much for each program, interpreted on a CPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attn.kernels import fill
from attn.kernels.launch import FUSED, STARTED, UNBOUNDED, block_of
from attn.kernels.mla_launch import mla_stream_k
from attn.kernels.plan import FIELDS
from attn.torch.kernels.plan import stream_k
from tests.levels import sampled

pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_N = 16


def planned(q_lens: list[int], seq_lens: list[int], heads: int, rows: int, groups: int) -> list[list[tuple[int, ...]]]:
    """Return each group's items."""
    starts = torch.tensor(np.concatenate([[0], np.cumsum(q_lens)]), dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    room = groups + sum(-(-q * heads // rows) for q in q_lens)
    table = stream_k(starts, lens, heads, rows, groups, room, BLOCK_N).tolist()
    items = [tuple(table[i : i + FIELDS]) for i in range(2 * groups, len(table), FIELDS)]
    assert len(items) == room
    return [items[table[2 * g] : table[2 * g + 1]] for g in range(groups)]


@pytest.mark.parametrize("seed", sampled(range(8), 3, "batches of stream-K"))
def test_items_are_every_tile_of_every_block_once(seed: int) -> None:
    """Splits of a block follow one another; a group starts at most one block that it does not end, its last item."""
    rng = np.random.default_rng(seed)
    count, heads, groups = int(rng.integers(1, 40)), int(rng.choice([16, 128])), int(rng.choice([5, 33, 132]))
    q_lens, seq_lens = rng.integers(0, 5, count), (2 ** rng.uniform(0, 11, count)).astype(int)
    q_lens[0], seq_lens[-1] = 1, 0
    rows = 64 * int(rng.integers(1, 4))
    found = planned(q_lens.tolist(), seq_lens.tolist(), heads, rows, groups)
    splits: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for g, items in enumerate(found):
        for i, (r, start, q_len, seq_len, block, begin, end, number) in enumerate(items):
            assert (start, q_len, seq_len) == (q_lens[:r].sum(), q_lens[r], seq_lens[r])
            if number > 1:  # only these have states: one that begins a block, and one that does not
                assert i == (len(items) - 1 if begin == 0 else 0)
            splits.setdefault((r, block), []).append((begin, end, number, g))
    blocks = [(r, b) for r in range(count) for b in range(-(-int(q_lens[r]) * heads // rows))]
    assert sorted(splits) == blocks
    for (r, _), own in splits.items():
        tiles = max(1, -(-int(seq_lens[r]) // BLOCK_N))
        bounds = [0, *(end for _, end, _, _ in own)]
        assert [begin for begin, *_ in own] == bounds[:-1] and bounds[-1] == tiles * BLOCK_N and all(np.diff(bounds) > 0)
        assert {number for _, _, number, _ in own} == {len(own)}
        assert [g for *_, g in own] == list(range(own[0][3], own[0][3] + len(own)))


def test_groups_have_equally_many_tiles() -> None:
    """54 decodes of 64 to 65k keys on 132 programs: splits of equal size took half as long again as the mean."""
    lens = (2 ** np.random.default_rng(0).uniform(6, 16, 54)).astype(int)
    found = planned([1] * 54, lens.tolist(), 64, 64, 132)
    tiles = [sum((end - begin) // BLOCK_N for *_, begin, end, _ in items) for items in found]
    started = [len(items) for items in found]
    assert max(tiles) <= -(-(sum(tiles) + STARTED * 54) // 132)
    assert max(n + STARTED * k for n, k in zip(tiles, started, strict=True)) <= 1.1 * np.mean(tiles) + 3 * STARTED


def test_blocks_of_about_equal_length_that_nearly_fill_the_device_stay_whole() -> None:
    for lens, groups, whole in (
        ([4096] * 64, 66, True), ([4000 + 10 * i for i in range(60)], 66, True), ([4096] * 67, 66, False),
        ([4096] * 40, 66, False), ([500] * 63 + [30000], 66, False),
    ):  # fmt: skip
        found = planned([1] * len(lens), lens, 64, 64, groups)
        assert all(item[-1] == 1 for items in found for item in items) == whole
        assert not whole or all(len(items) <= 1 for items in found)


def test_programs_of_a_group_share_keys_and_leave_few_multiprocessors_idle() -> None:
    for row_tiles, span in ((1, 1), (2, 2), (4, 4), (8, 4), (32, 4), (5, 5), (7, 7), (3, 3)):
        found = mla_stream_k(9, row_tiles, 100, 132)
        assert found is not None and found.span == span and found.groups == 132 // span
        assert found.items == found.groups + 9 * -(-row_tiles // span)
    assert mla_stream_k(9, 2, 2, 132) is None
    assert mla_stream_k(9, 400, 100, 4) is not None


def test_equal_lengths_take_stream_k_where_whole_waves_would_wait() -> None:
    for requests, row_tiles, tiles in ((64, 2, 64), (128, 2, 128), (64, 8, 64), (16, 2, 512), (64, 1, 64), (16, 8, 16)):
        assert mla_stream_k(requests, row_tiles, tiles, 132, uneven=False) is None
    for requests, row_tiles, tiles in ((200, 2, 117), (70, 2, 512), (1, 300, 128)):
        assert mla_stream_k(requests, row_tiles, tiles, 132, uneven=False) is not None


@pytest.mark.parametrize(("longest", "whole"), [(1, True), (2**20, False)])
def test_decodes_stay_whole_only_where_they_are_of_about_equal_length(longest: int, whole: bool) -> None:
    """A million keys times thousands of requests exceed 32 bits."""
    count = 10_000
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(count, dtype=torch.int32, device=DEVICE)
    lens[-1] = longest
    lists = [torch.zeros_like(starts) for _ in range(2)]
    arguments = {name: value for name, value in fill.constants(1, 16).items() if name not in ("num_warps", *FUSED)}
    arguments |= {
        "output": torch.zeros(count, 1, 16, device=DEVICE),
        "lse": None,
        "counters": None,
        "tokens": count,
        "lse_h": 0,
    }
    arguments |= {"whole": lists[0], "split": lists[1], "query_start_loc": starts, "seq_lens": lens, "num_reqs": count}
    arguments |= {"left": UNBOUNDED, "most": 1, "keys_per_tile": 16, "whole_from": 26, "BLOCK_R": block_of(count)}
    fill.fill[(1,)](**arguments)
    for made, chosen in zip(lists, (whole, not whole), strict=True):
        torch.testing.assert_close(made, starts * chosen)
