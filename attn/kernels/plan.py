"""The plan of a batch of decodes, on the device: it divides the keys of requests of any lengths into work items.

Split-KV (`item_of`): splits of a request are of equal size, and each program computes its own item within the bounds of
`launch.SplitKV`, which the host knows. Stream-K (`stream_k`): each program has as many tiles of keys as the others,
from the end of one request to the beginning of another, and reads its items from a table. It is for kernels whose programs
fill a multiprocessor: there splits of equal size leave a fourth of the device idle (`benchmarks.mla_plan`).
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.launch import FIELDS, FUSED, MIN_SPLIT_TILES, STARTED

FIELDS_OF_ITEM, _STARTED = tl.constexpr(FIELDS), tl.constexpr(STARTED)
_MIN_SPLIT_TILES = tl.constexpr(MIN_SPLIT_TILES)


@triton.jit
def visible(  # type: ignore[no-untyped-def]
    first, last, seq_len, left, right, chunk, BLOCK_N: tl.constexpr, HAS_CHUNK: tl.constexpr
):
    """(aligned begin, low, high) of the keys that some row at positions first..last sees."""
    # Positions are negative where a request has more rows than keys (docs/semantics.md §3). `left` and `right` are at most
    # 2**30 (`paged_launch.bound`), so that their sums with positions of shorter sequences are within 32 bits.
    low = tl.maximum(first - left, 0)
    if HAS_CHUNK:
        low = tl.maximum(low, tl.maximum(first, 0) // chunk * chunk)
    high = tl.maximum(tl.minimum(last + right + 1, seq_len), 0)
    # Tiles begin at multiples of BLOCK_N, so that one lies within a page if its size is such a multiple. Without visible keys
    # the range begins at its end: loops over it run zero times.
    return tl.where(low < high, low // BLOCK_N * BLOCK_N, high), low, high


@triton.jit
def stretch_of(tiles, STRETCH: tl.constexpr, STRETCHES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of each stretch, of which the last may be shorter, of a request of so many visible tiles: at least STRETCH, and as
    many as leave at most STRETCHES. It depends on the request alone, as results are summed stretch by stretch
    (docs/semantics.md §17)."""
    return tl.maximum(tl.cdiv(tiles, STRETCHES), STRETCH)


@triton.jit
def item_of(  # type: ignore[no-untyped-def]
    item, query_start_loc, seq_lens, num_reqs, min_query, max_query, left, right, tree_right, tree_w, chunk, split_tiles,
    max_splits, whole_from, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_CHUNK: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    """The plan of a decode, computed by each of its programs: (request, block of its rows, first and last tile, split, number
    of splits, place of the block's first partial result) of an item.

    The visible tiles of a request, one block of rows, are divided into equal splits of at least `split_tiles`, as many as
    leave at most max_splits + num_reqs items for all requests; `whole_from` requests of about equal length stay whole.
    BLOCK_Q: 0, or the tokens of a block where requests have several, which are split alike and count as requests do.
    STRETCH > 0: a split is one or more stretches of its request (`stretch_of`). Requests in several splits come first, since
    theirs are the longest. Beyond the last item, request is BLOCK_R.
    """
    # Every program reads the lengths of all requests: a list of items on the device would cost a launch of its own before each
    # batch. Absent requests have no rows and so no items.
    n = tl.arange(0, BLOCK_R)
    begin = tl.load(query_start_loc + n, mask=n < num_reqs, other=0)
    q_len = tl.load(query_start_loc + n + 1, mask=n < num_reqs, other=0) - begin
    seq_len = tl.load(seq_lens + n, mask=n < num_reqs, other=0)
    chosen = (n < num_reqs) & (q_len > min_query) & (q_len <= max_query)
    # a tree's own right bound holds for the requests that are short enough to have a tree
    reach = tl.where(q_len <= tree_w, tree_right, right) if HAS_TREE else right
    aligned, _, end = visible(seq_len - q_len, seq_len - 1, seq_len, left, reach, chunk, BLOCK_N, HAS_CHUNK)
    tiles = tl.where(chosen, tl.cdiv(end - aligned, BLOCK_N), 0)
    blocks = chosen.to(tl.int32)
    room = max_splits + num_reqs
    if BLOCK_Q > 0:
        blocks = tl.where(chosen, tl.cdiv(q_len, BLOCK_Q), 0)
    if BLOCK_Q > 0 or STRETCH > 0:
        room = max_splits + tl.sum(blocks, 0)
    # the smallest number that makes few enough items, by four halvings (`split_tiles_of` is the counterpart on the host)
    # 64 bits: 2**24 tiles of one request times its blocks, and the sum over requests, exceed 32. `high` always fits, since each
    # block of rows has at most one split that is not full. Below `low` the splits are too many.
    total = tl.sum(tiles.to(tl.int64) * blocks, 0)
    longest = tl.max(tiles, 0)
    low = tl.maximum(split_tiles, tl.cdiv(total, room).to(tl.int32))
    high = tl.maximum(low, tl.cdiv(total, tl.maximum(max_splits, 1)).to(tl.int32))
    for _ in tl.static_range(4):
        middle = (low + high) // 2
        fits = tl.sum(blocks * tl.maximum(tl.cdiv(tiles, middle), 1), 0) <= room
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
        high = tl.where(fits, middle, high)
    live = tl.sum(blocks, 0)
    # Requests whose longest is at most 5/4 of the mean end about together when whole, and need no merge.
    even = (live >= whole_from) & (4 * longest.to(tl.int64) * live <= 5 * total)
    split_tiles = tl.where(even, tl.maximum(high, longest), high)
    splits = tl.maximum(tl.cdiv(tiles, split_tiles), 1)
    if STRETCH > 0:
        stretch = stretch_of(tiles, STRETCH, STRETCHES)
        stretches = tl.cdiv(tiles, stretch)
        splits = tl.maximum(tl.minimum(splits, stretches), 1)
    counts = blocks * splits
    # Number the items: those of requests in several splits first, then the others, each in requests' order. r is the first
    # request whose items end behind `target`; requests without items end where the one before them does and are passed over.
    long = tl.where(splits > 1, counts, 0)
    before = tl.sum(long, 0)
    counts = tl.where(item < before, long, counts - long)
    target = tl.where(item < before, item, item - before)
    ends = tl.cumsum(counts, 0)
    r = tl.sum((ends <= target).to(tl.int32), 0)
    selected = n == r
    num_splits = tl.sum(tl.where(selected & (counts > 0), splits, 0), 0)
    split_index = target - tl.sum(tl.where(selected, ends - counts, 0), 0)
    # A request's items are ordered by block, then by split: `paged_attention.merge` finds a row's splits at equal distances.
    block = 0
    if BLOCK_Q > 0:
        block = split_index // tl.maximum(num_splits, 1)
        split_index -= block * num_splits
    whole = tl.sum(tl.where(selected, tiles, 0), 0)
    of = tl.maximum(num_splits, 1)
    place = item - split_index
    # splits differ by one tile at most, or one stretch
    if STRETCH > 0:
        own = tl.sum(tl.where(selected, stretch, 0), 0)
        count = tl.sum(tl.where(selected, stretches, 0), 0)
        first = tl.minimum(split_index * count // of * own, whole)
        last = tl.minimum((split_index + 1) * count // of * own, whole)
        # as many partial results as `paged_attention.attention` stores of the requests before this one
        stored = tl.where((splits > 1) & (blocks > 0), stretches - stretches // splits + 1, 0)
        place = tl.sum(tl.where(n < r, stored, 0), 0)
    else:
        first = split_index * whole // of
        last = (split_index + 1) * whole // of
    return r, block, first, last, split_index, num_splits, place


@triton.jit(do_not_specialize=("num_reqs", "groups", "rows"))
def stream_k(  # type: ignore[no-untyped-def]
    table, query_start_loc, seq_lens, num_reqs, groups, rows, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Fill the table of stream-K, which `attn.torch.kernels.plan` describes. Grid (groups)."""
    stream_k_items(tl.program_id(0), table, query_start_loc, seq_lens, num_reqs, groups, rows, H, BLOCK_N, BLOCK_R)


@triton.jit
def stream_k_items(  # type: ignore[no-untyped-def]
    g, table, query_start_loc, seq_lens, num_reqs, groups, rows, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Write the items of group `g` to the table."""
    n = tl.arange(0, BLOCK_R)
    begin = tl.load(query_start_loc + n, mask=n < num_reqs, other=0)
    q_len = tl.load(query_start_loc + n + 1, mask=n < num_reqs, other=0) - begin
    seq_len = tl.load(seq_lens + n, mask=n < num_reqs, other=0)
    blocks = tl.cdiv(q_len * H, rows)
    work = tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1)
    # All blocks in a line, in units of tiles: block b of a request occupies [begins + b cost, begins + (b + 1) cost), of which
    # the first `work` units are its tiles of keys and the rest stands for its beginning and end. Group g has
    # [g per_group, (g + 1) per_group).
    cost = work + _STARTED
    count = tl.sum(blocks, 0)
    total = tl.sum(blocks * cost, 0)
    per_group = tl.maximum(tl.cdiv(total, groups), _MIN_SPLIT_TILES)
    longest = tl.max(tl.where(blocks > 0, cost, 0), 0)
    if (count <= groups) & (5 * count >= 4 * groups) & (4 * longest * count <= 5 * total):
        cost = cost * 0 + longest  # blocks of about equal length nearly fill the device: one each
        per_group = longest
    begins = tl.cumsum(blocks * cost, 0) - blocks * cost
    low, high = g * per_group, (g + 1) * per_group
    # The first block whose tiles end behind `low`, and the one after the last that begins before `high`. Division truncates
    # towards 0 here, so negative numerators are treated apart.
    done = low - begins - work
    first = tl.where(done < 0, 0, tl.minimum(done // cost + 1, blocks))
    last = tl.where(high > begins, tl.minimum(tl.cdiv(high - begins, cost), blocks), 0)
    # An item's place in the table is its group's number plus its block's. From one item to the next, one of the two grows or
    # both do, so no two items share a place, and no group has to know how many items the others have.
    tl.store(table + 2 * g, g + tl.sum(first, 0))
    tl.store(table + 2 * g + 1, g + tl.sum(last, 0))
    first_item = table + 2 * groups + (g + tl.cumsum(blocks, 0) - blocks) * FIELDS_OF_ITEM
    # All requests at once: lane n writes the i-th item that this group has of request n.
    for i in tl.range(0, tl.max(last - first, 0), num_stages=1):
        block = first + i
        start = begins + block * cost
        item = first_item + block * FIELDS_OF_ITEM
        in_group = block < last
        tl.store(item, n, mask=in_group)
        tl.store(item + 1, begin, mask=in_group)
        tl.store(item + 2, q_len, mask=in_group)
        tl.store(item + 3, seq_len, mask=in_group)
        tl.store(item + 4, block, mask=in_group)
        tl.store(item + 5, tl.maximum(low - start, 0) * BLOCK_N, mask=in_group)
        tl.store(item + 6, tl.minimum(high - start, work) * BLOCK_N, mask=in_group)
        # how many groups the block's tiles lie in: the block is merged if more than one
        tl.store(item + 7, (start + work - 1) // per_group - start // per_group + 1, mask=in_group)


def constants(heads: int, block_n: int, block_r: int) -> dict[str, Any]:
    """The constants and options of `stream_k`. block_r: `launch.block_of`."""
    return {"H": heads, "BLOCK_N": block_n, "BLOCK_R": block_r, "num_warps": max(1, min(8, block_r // 64)), **FUSED}
