"""What an MLA batch asks of the device, counted without one: chunks of a context, and how decodes fill the multiprocessors.

    python -m benchmarks.mla_plan 63q1s4k_8q512s32k      named batches
    python -m benchmarks.mla_plan --random 6 --seed 77   those of `attn bench --mla --random 6 --seed 77` on a GPU of 80 GB

The first table counts the requests of a batch that are expanded (more than 16 new tokens): their rows, their tokens of context,
the chunks of context, the rows that these chunks attend and merge, the bytes of keys and values that they write, the bytes
that the merges read and write, and the operations. The last two columns are the operations if each request took the cheaper
form, absorbed or expanded, and how many of them would be absorbed.

The second table is about the other requests, on 132 multiprocessors of which each runs one program of 64 rows at a time. Times
are in tiles of 64 keys. "least" is the sum of all tiles by the multiprocessors: no plan ends sooner. "equal splits" is the
plan of paged attention: requests are divided into splits of at most one size, each a program, started in the plan's order as
multiprocessors become free. "stream-K" is what runs (`plan.stream_k`): all requests in a line are divided evenly between the
programs. The time of a program is its tiles and STARTED more for each of its splits. Megabytes are of the partial results that
are merged, written and read.
"""

import argparse
import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.dtypes import DTYPES
from attn.kernels.launch import MIN_SPLIT_TILES, STARTED, split_kv_for, split_tiles_of
from attn.kernels.mla_launch import mla_split_size, mla_stream_k
from attn.reports.machines import pairs
from attn.tables import Column, block, cells
from attn.tools.bench.case import NOPE, ROPE, VALUE, BenchCase, abbreviated, parse
from attn.tools.bench.sample import sample, sizes_of
from attn.torch.backends.mla import _mla
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

COLUMNS = (
    Column("requests", key="requests"),
    Column("rows", key="rows", form=","),
    Column("context", key="context", form=","),
    Column("turns", key="turns"),
    Column("rows merged", key="merged", form=","),
    Column("GB written", key="written", form=".1f"),
    Column("GB merged", key="merging", form=".2f"),
    Column("TFLOP", key="tflop", form=".1f"),
    Column("cheaper", key="cheaper", form=".1f"),
    Column("absorbed", key="absorbed"),
)
DECODES = (
    Column("requests", key="requests"),
    Column("keys", key="keys", form=","),
    Column("row tiles", key="row_tiles"),
    Column("least", key="least", form=".1f"),
    Column("equal splits", key="split_time", form=".0f"),
    Column("programs", key="splits"),
    Column("MB merged", key="split_mb", form=".0f"),
    Column("stream-K", key="stream_k_time", form=".0f"),
    Column("splits", key="stream_k_splits"),
    Column("MB merged", key="stream_k_mb", form=".0f"),
)
MULTIPROCESSORS = 132
TILE = 64  #: rows, and keys
_PAGE = 1 << 20  # one page per request: a plan depends on lengths only


def counted(case: BenchCase) -> dict[str, Any]:
    """Count the prefill of one batch in one layer, by the columns' keys; empty if every request is a decode."""
    lens = np.array(parse(case.batch))
    tables = [[r] for r in range(len(lens))]
    batch = CommonAttentionMetadata.from_lens(*lens.T.tolist(), tables, _PAGE)
    spec = KVCacheSpec(_PAGE, 1, case.head_size, case.dtype)
    prefill = MLACommonMetadataBuilder(spec).build(0, batch).prefill
    if prefill is None:
        return {}
    size, heads, rank = DTYPES[case.dtype].itemsize, case.num_heads, case.kv_lora_rank
    per_token = heads * (NOPE + ROPE + VALUE) * size
    plan = prefill.plan(_mla._WORKSPACE // per_token)
    merged, context = sum(chunk.rows.stop - chunk.rows.start for chunk in plan.chunks), int(prefill.context_lens.sum())
    state = size if plan.once else max(4, size)  # bytes of an element of the merged output
    forms = []
    for n, c in zip(prefill.query_lens.tolist(), prefill.context_lens.tolist(), strict=True):
        seen, projection = pairs(n, n + c, n + c), rank * (NOPE + VALUE)
        expanded = (NOPE + ROPE + VALUE) * seen + projection * (n + c)
        forms.append((2 * heads * expanded, 2 * heads * ((case.head_size + rank) * seen + projection * n)))
    return {
        "requests": len(forms),
        "rows": prefill.num_tokens,
        "context": context,
        "turns": len(plan.chunks),
        "merged": merged,
        "written": per_token * context / 1e9,
        "merging": merged * heads * (VALUE * (2 * state + size) + 3 * 4) / 1e9,
        "tflop": sum(expanded for expanded, _ in forms) / 1e12,
        "cheaper": sum(map(min, forms)) / 1e12,
        "absorbed": sum(absorbed < expanded for expanded, absorbed in forms),
    }


def decoded(case: BenchCase) -> dict[str, Any]:
    """Count how the batch's decodes fill the device in one layer, by the keys of DECODES; empty if there is none."""
    lens = np.array(parse(case.batch))
    lens = lens[lens[:, 0] <= (MLACommonMetadataBuilder.decode_threshold or 0)]
    if not len(lens):
        return {}
    tiles, row_tiles = -(-lens[:, 1] // TILE), -(-int(lens[:, 0].max()) * case.num_heads // TILE)
    state = 2 * 4 * TILE * case.kv_lora_rank / 1e6  # of a row tile's partial result, written and read
    sizes, merged = equal_splits(tiles, row_tiles)
    time, splits, partial = stream_k(tiles, row_tiles)
    return {
        "requests": len(lens),
        "keys": int(lens[:, 1].sum()),
        "row_tiles": row_tiles,
        "least": int(tiles.sum()) * row_tiles / MULTIPROCESSORS,
        "split_time": makespan([size + STARTED for size in sizes for _ in range(row_tiles)]),
        "splits": len(sizes) * row_tiles,
        "split_mb": merged * row_tiles * state,
        "stream_k_time": time,
        "stream_k_splits": splits,
        "stream_k_mb": partial * state,
    }


def makespan(times: list[int]) -> int:
    """The time until the last of some programs ends; each starts on the multiprocessor that is free first."""
    busy = [0] * MULTIPROCESSORS
    for time in times:
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)


def equal_splits(tiles: "IntArray", row_tiles: int) -> tuple[list[int], int]:
    """Return the tiles of each split in the order of their start, and how many are merged."""
    if len(tiles) == 1 or tiles.max() <= 1.5 * tiles.mean():
        split = mla_split_size(len(tiles) * row_tiles, int(tiles.max()) * TILE, TILE, MULTIPROCESSORS) // TILE
        sizes = [min(split, n - low) for low in range(0, int(tiles.max()), split) for n in tiles.tolist() if low < max(n, 1)]
        return sizes, int((-(-tiles[tiles > split] // split)).sum())
    split_kv = split_kv_for(len(tiles), row_tiles, int(tiles.max()), 0, MULTIPROCESSORS)
    if split_kv is None:
        return tiles.tolist(), 0
    counts = (-(-tiles // split_tiles_of(tiles, split_kv))).clip(min=1)
    long = [
        n * (i + 1) // c - n * i // c for n, c in zip(tiles.tolist(), counts.tolist(), strict=True) if c > 1 for i in range(c)
    ]
    return long + tiles[counts == 1].tolist(), len(long)


def stream_k(tiles: "IntArray", row_tiles: int) -> tuple[int, int, int]:
    """Return the longest program's time, how many splits there are, and how many of them are merged, of a block's row tiles."""
    plan = mla_stream_k(len(tiles), row_tiles, 1 << 20, MULTIPROCESSORS)
    assert plan is not None
    work = np.repeat(tiles.clip(min=1), -(-row_tiles // plan.span))
    ends = np.cumsum(work + STARTED)
    per_group = max(-(-int(ends[-1]) // plan.groups), MIN_SPLIT_TILES)
    begins = ends - work - STARTED
    first, last = begins // per_group, (begins + work - 1) // per_group  # the group of each block's first and last tile
    time = np.zeros(plan.groups, int)
    for i in range(len(work)):
        groups = np.arange(first[i], last[i] + 1)
        low, high = np.maximum(groups * per_group, begins[i]), np.minimum((groups + 1) * per_group, begins[i] + work[i])
        time[groups] += high - low + STARTED
    counts = last - first + 1
    return int(time.max()), plan.span * int(counts.sum()), plan.span * int(counts[counts > 1].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", metavar="BATCH")
    parser.add_argument("--heads", help="query heads (default: 128)")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fixed = {} if args.heads is None else {"heads": args.heads}
    cases = [BenchCase.latent(batch, **fixed) for batch in args.batches]
    cases += sample(args.random, args.seed, sizes_of([80 << 30], mla=True), mla=True, **fixed)
    lines = [["batch", "heads", *(column.name for column in COLUMNS)]]
    lines += [[abbreviated(case.batch), case.heads, *cells(counted(case), COLUMNS)] for case in cases]
    print("\n".join(block(lines, numbers=range(1, len(lines[0])))))
    lines = [["batch", "heads", *(column.name for column in DECODES)]]
    lines += [[abbreviated(case.batch), case.heads, *cells(counts, DECODES)] for case in cases if (counts := decoded(case))]
    if len(lines) > 1:
        print("\n" + "\n".join(block(lines, numbers=range(1, len(lines[0])))))


if __name__ == "__main__":
    main()
