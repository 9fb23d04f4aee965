"""The plan of a batch of decodes, on the device: how the keys of requests of any lengths are cut into work items.

`launch.SplitKV` has the bounds, which the host knows. A program of `paged_attention` computes its own item; kernels whose
programs hold no vector of requests read it from the table that `items` fills.
"""

import triton
import triton.language as tl

FIELDS = 4  #: of a row of the table: request, first key, end of the keys, number of parts (-1: no item)


@triton.jit
def visible(  # type: ignore[no-untyped-def]
    first, last, seq_len, left, right, chunk, BLOCK_N: tl.constexpr, HAS_CHUNK: tl.constexpr
):  # fmt: skip
    """(aligned begin, low, high) of the keys that some row at positions first..last sees."""
    low = tl.maximum(first - left, 0)
    if HAS_CHUNK:
        low = tl.maximum(low, tl.maximum(first, 0) // chunk * chunk)
    high = tl.maximum(tl.minimum(last + right + 1, seq_len), 0)
    return tl.where(low < high, low // BLOCK_N * BLOCK_N, high), low, high


@triton.jit
def item_of(  # type: ignore[no-untyped-def]
    item, query_start_loc, seq_lens, num_reqs, min_query, max_query, left, right, tree_right, tree_w, chunk, split_tiles,
    max_splits, whole_from, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, HAS_TREE: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """The plan of a decode, computed by each of its programs: (request, first and last tile, part, parts) of an item.

    A request's visible tiles are cut into parts of equal size, of at most so many tiles that all requests have at most
    max_splits + num_reqs items, and not below `split_tiles`; `whole_from` requests of about equal length stay whole.
    max_splits = 0: into parts of exactly `split_tiles`, from the first visible tile on. Requests in several parts come first,
    since theirs are the longest. Beyond the last item, request is BLOCK_R.
    """
    n = tl.arange(0, BLOCK_R)
    begin = tl.load(query_start_loc + n, mask=n < num_reqs, other=0)
    q_len = tl.load(query_start_loc + n + 1, mask=n < num_reqs, other=0) - begin
    seq_len = tl.load(seq_lens + n, mask=n < num_reqs, other=0)
    chosen = (n < num_reqs) & (q_len > min_query) & (q_len <= max_query)
    reach = tl.where(q_len <= tree_w, tree_right, right) if HAS_TREE else right
    aligned, _, end = visible(seq_len - q_len, seq_len - 1, seq_len, left, reach, chunk, BLOCK_N, HAS_CHUNK)
    tiles = tl.where(chosen, tl.cdiv(end - aligned, BLOCK_N), 0)
    # the smallest number that makes few enough items, by four halvings (`split_tiles_of` is the counterpart on the host)
    room = max_splits + num_reqs
    total = tl.sum(tiles.to(tl.int64), 0)
    low = tl.maximum(split_tiles, tl.cdiv(total, room).to(tl.int32))
    high = tl.maximum(low, tl.cdiv(total, tl.maximum(max_splits, 1)).to(tl.int32))
    for _ in tl.static_range(4):
        middle = (low + high) // 2
        fits = tl.sum(tl.where(chosen, tl.maximum(tl.cdiv(tiles, middle), 1), 0), 0) <= room
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
        high = tl.where(fits, middle, high)
    longest = tl.max(tiles, 0)
    live = tl.sum(chosen.to(tl.int32), 0)
    even = (live >= whole_from) & (4 * longest.to(tl.int64) * live <= 5 * total)
    split_tiles = tl.where(max_splits > 0, tl.where(even, tl.maximum(high, longest), high), split_tiles)
    counts = tl.where(chosen, tl.maximum(tl.cdiv(tiles, split_tiles), 1), 0)
    long = tl.where(counts > 1, counts, 0)
    before = tl.sum(long, 0)
    counts = tl.where(item < before, long, counts - long)
    target = tl.where(item < before, item, item - before)
    ends = tl.cumsum(counts, 0)
    r = tl.sum((ends <= target).to(tl.int32), 0)
    own = n == r
    count = tl.sum(tl.where(own, counts, 0), 0)
    part = target - tl.sum(tl.where(own, ends - counts, 0), 0)
    whole = tl.sum(tl.where(own, tiles, 0), 0)
    of = tl.maximum(count, 1)
    first = tl.where(max_splits > 0, part * whole // of, part * split_tiles)
    last = tl.where(max_splits > 0, (part + 1) * whole // of, tl.minimum((part + 1) * split_tiles, whole))
    return r, first, last, part, count


@triton.jit(do_not_specialize=("num_reqs", "max_query", "split_tiles", "max_splits", "whole_from", "num_items"))
def items(  # type: ignore[no-untyped-def]
    table, query_start_loc, seq_lens, num_reqs, max_query, split_tiles, max_splits, whole_from, num_items,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (num_items): one program fills one row of the table, and of its second part if the item is a request's first."""
    item = tl.program_id(0)
    r, first, last, part, count = item_of(
        item, query_start_loc, seq_lens, num_reqs, 0, max_query, 1 << 30, 0, 0, 0, 0, split_tiles, max_splits, whole_from,
        BLOCK_N, BLOCK_R, False, False,
    )  # fmt: skip
    valid = r < num_reqs
    row = table + item * 4
    tl.store(row, tl.where(valid, r, 0))
    tl.store(row + 1, tl.where(valid, first * BLOCK_N, 0))
    tl.store(row + 2, tl.where(valid, last * BLOCK_N, 0))
    tl.store(row + 3, tl.where(valid, count, -1))
    if valid & (part == 0):
        tl.store(table + num_items * 4 + 2 * r, item)
        tl.store(table + num_items * 4 + 2 * r + 1, count)
