"""Prefill on Hopper: the ragged paged attention of `paged_attention`, manually scheduled (Gluon) for sm_90.

Each program holds packed rows (tokens of one request x the G query heads of a kv head) in consumers of four warps and 64 rows:
two consumers, or three for heads of at most 64, whose exponentials take about as long as their products, or one where rows see
few keys, in two programs that share a multiprocessor. Two producer warps, one for keys and one for values, look up pages and
copy them with the bulk tensor engine into rings of tiles of 64 or 128 keys. Heads are padded to 64, 128, 256 or 512 in shared
memory, keys to 192 too, where the engine fills in zeros. Products are of one or two blocks of a head's columns, each of which
has its accumulators (`column_blocks`). Values above 256 are computed in two passes over the keys, each a unit of work, and keys
above 256 are copied in two blocks. `hopper_prefill_launch` has the rules
for sizes. A consumer computes the scores of the next tile while it multiplies the last tile's weights with its values, with the
exponentials in between. In bfloat16, tiles without a mask need no maximum: what is subtracted from scores follows the sums of
weights (`_weigh_all`). Consumers drift apart until one's exponentials overlap another's products (Shah et al.,
FlashAttention-3, 2024). Tiles are processed from the last key to the first, so that the tiles that need a mask come first and
last.

What rows see (docs/semantics.md §18), trees apart: a row sees the keys from its window's left edge or its chunk's beginning up
to its position, the window's right edge, or the end of its request's prefix; and those of its span. A span that holds the row,
as an image's does, only extends the range on either side, so tiles are classified by the rows' first and last keys: outside of
the range of every row (not copied), inside of the range of every row (no mask), or between. If a span does not touch the rest
of what its row sees, all tiles from the span to the row are masked, by both ranges. Where consumers have rows far apart (one or
few query heads a unit), each passes by the tiles that only the others' rows see, uncomputed.

Grid: any number of programs, each of which takes one unit of work after another from a counter, in the order request, kv head,
longest rows first, so that programs that run at the same time share the keys of few heads in the second-level cache. If rows
see different numbers of keys, the shorter ones of all heads come last, so that programs end together. With fewer programs than
multiprocessors some are left for a decode that runs concurrently (`paged_launch`). The producer of keys looks units up, and
hands them to the others through shared memory, while consumers compute the last tiles of the unit before; it copies queries
too, if the engine can, and a unit ahead where memory allows. No length is fetched from the device.

Pages after a request's last are not read (the engine fills in zeros). Values in slots after its length, or before the first
key that a row of the tile sees, are not used: their producer overwrites them. If a value that some row sees is NaN or
infinite, a consumer repeats its tile key by key, so that it affects only the rows that see it.

The engine is faster with boxes that begin at multiples of 32 bytes. Heads of 40, 56, 72... columns, of which every other one
begins 16 bytes after such a multiple, are one row a token for it (`JOINED`): a box begins with 8 columns of the head before, or
ends with those of the next one. Queries have zeros there, and results of such columns are not stored; if one of those numbers
is NaN or infinite, the rows are computed again as above.

Layouts: query [T, H, D], output [T, H, Dv]; caches [N, P, K, D] and [N, P, K, Dv] of any strides (multiples of 16 bytes; last
dimension dense), or one array [2N, P, K, D] of both, or a call's own keys and values [m, K, D] and [m, K, Dv] as one page, of
the rows or, `ragged`, of others; or, of `equal` requests, [R, M, K, D] and [R, M, K, Dv], where M is `num_pages`, and which
have no lists but, where not all M are keys, `seq_lens`; lse [H, T] float32, natural log. D is a multiple of 8 up to 512, Dv one
that is not padded to more than D is, and G at most 128.
"""

from typing import Any

from attn.kernels.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attn.kernels.launch import UNBOUNDED

_FIELDS = gl.constexpr(9)  #: numbers that describe a unit of work
_FAR = gl.constexpr(UNBOUNDED)
_LEEWAY = gl.constexpr(8.0)  #: in base 2, between scores and the maximum that is subtracted from them
_BATCH = ("left", "right", "min_query", "num_reqs", "num_pages", "lse_h", "table_r", "rows")


@gluon.constexpr_function
def column_blocks(size: int, most: int) -> tuple[tuple[int, int], ...]:
    """First column and number of columns of each block of a head of `size`, of at most `most` columns: 96 is 64 + 32.

    Dimensions of Gluon's tensors are powers of two, and products have a depth of 16. A head has two blocks, or one where that
    is as many columns: three blocks of 112 were slower than one of 128.
    """
    # 112 columns as 64 + 32 + 16 ran at 443 TFLOP/s where 128 ran at 481, but 192 as 128 + 64 at 585 instead of 557 (H100):
    # two blocks at most, and only where they are fewer columns.
    half = max(8, 1 << (size - 1).bit_length() - 1)
    tail = max(16, 1 << (size - half - 1).bit_length())
    widths = (half, tail) if tail < half else (2 * half,)
    return tuple((at + i * half, min(width, most)) for i, width in enumerate(widths) for at in range(0, width, most))


@gluon.constexpr_function
def most_columns(columns: int) -> int:
    """As many columns as a tile of shared memory, or a consumer's accumulators, may have."""
    return min(columns, 256)


@gluon.jit
def _head(unit, PASSES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the units that have the same rows a unit is, and the first of its columns of values."""
    return unit[1] // PASSES, unit[1] % PASSES * 256


@gluon.jit
def _before(kv_head, JOINED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of another head that a tile has before the head's own: none, or 8 of every other head where heads are joined."""
    return kv_head * JOINED % 16 if JOINED > 0 else 0


@gluon.jit
def _place(kv_head, JOINED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The kv head and the first column of a head's boxes, which begin at multiples of 32 bytes where heads are joined."""
    return (0, kv_head * JOINED - _before(kv_head, JOINED)) if JOINED > 0 else (kv_head, 0)


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _seek(tile, request, before, query_start_loc, min_query, num_reqs, BLOCK_Q: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the request that contains tile `tile`, counted over all requests, and the number of tiles of earlier requests.

    The search starts at `request`, before which there are `before` tiles. Requests of at most `min_query` tokens have no tiles.
    If there is no tile of that number, the returned request is at least `num_reqs`.
    """
    # 32 requests at a time, one a lane: all at once would be more values than a producer's 24 registers hold.
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    passed = 32
    while (passed == 32) & (request < num_reqs):
        i = request + lane
        begin = gl.load(query_start_loc + i, mask=i < num_reqs, other=0)
        end = gl.load(query_start_loc + i + 1, mask=i < num_reqs, other=0)
        q_len = end - begin
        ends = before + gl.associative_scan(gl.where(q_len > min_query, (q_len + BLOCK_Q - 1) // BLOCK_Q, 0), 0, _add)
        earlier = ends <= tile
        passed = gl.sum(earlier.to(gl.int32), 0)
        # Of requests that end before the tile, the last one's end. Those without tiles have the same end and are passed over
        # too.
        before = gl.max(gl.where(earlier, ends, before), 0)
        request += passed
    return request, before


@gluon.jit
def _find(tile, request, before, starts, min_query, num_reqs, BLOCK_Q: gl.constexpr, EQUAL: gl.constexpr):  # type: ignore[no-untyped-def]
    """`_seek`, by a division where requests are equal."""
    query_start_loc, _, rows, _ = starts
    if EQUAL:
        tiles = (rows + BLOCK_Q - 1) // BLOCK_Q
        request = tile // tiles
        before = request * tiles
    else:
        request, before = _seek(tile, request, before, query_start_loc, min_query, num_reqs, BLOCK_Q)
    return request, before


@gluon.jit
def _since(low, position, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first key from `low` on that the chunk of rows at that position has."""
    if CHUNK > 0:
        low = gl.maximum(low, gl.maximum(position, 0) // CHUNK * CHUNK)
    return low


@gluon.jit
def _right(right, is_causal, r):  # type: ignore[no-untyped-def]
    """The number of later keys that causality and the window let a request's rows see."""
    if is_causal is not None:
        right = gl.where(gl.load(is_causal + r), 0, right)
    return right


@gluon.jit
def _span(spans, row, valid, position, left, CHUNK: gl.constexpr, SPAN_RIGHT: gl.constexpr):  # type: ignore[no-untyped-def]
    """First and last key of rows' spans; the last is negative, or before the first, if there is none."""
    low = gl.load(spans + 2 * row, mask=valid, other=-1)
    high = gl.load(spans + 2 * row + 1, mask=valid, other=-1)
    if SPAN_RIGHT > 0:
        low = gl.maximum(low, position - left)
        high = gl.minimum(high, position + SPAN_RIGHT)
    return _since(low, position, CHUNK), high


@gluon.jit
def _extent(  # type: ignore[no-untyped-def]
    mask, r, begin, q_len, seq_len, first, context, BLOCK_Q: gl.constexpr, CHUNK: gl.constexpr, SPAN_RIGHT: gl.constexpr
):
    """First key that some row of a tile sees, and the last one + 1."""
    # This may include keys that no row sees (between a span and a window), but omits none that one sees.
    spans, prefix, is_causal, left, right = mask
    end = gl.minimum(first + BLOCK_Q, q_len)
    until = context + end - 1 + _right(right, is_causal, r)
    if spans is not None:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        lowest = lane * 0 + _FAR
        highest = lane * 0 - 1
        for token in range(first, end, 32):
            valid = token + lane < end
            low, high = _span(spans, begin + token + lane, valid, context + token + lane, left, CHUNK, SPAN_RIGHT)
            # (-1, -1) is no span, and a window or chunk may have left nothing of one
            valid = valid & (high >= gl.maximum(low, 0))
            lowest = gl.minimum(lowest, gl.where(valid, low, _FAR))
            highest = gl.maximum(highest, gl.where(valid, high, -1))
        until = gl.maximum(until, gl.max(highest, 0))
    if prefix is not None:
        shared = gl.load(prefix + r)
        until = gl.maximum(until, shared - 1)
    high = gl.maximum(gl.minimum(until + 1, seq_len), 0)
    since = _since(context + first - left, context + first, CHUNK)
    if spans is not None:
        since = gl.minimum(since, gl.min(lowest, 0))
    return gl.maximum(since, 0), high


@gluon.jit
def _describe(  # type: ignore[no-untyped-def]
    unit, request, before, starts, mask, num_reqs, K: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGED: gl.constexpr, RAGGED: gl.constexpr, EQUAL: gl.constexpr, HAS_RIGHT: gl.constexpr, CHUNK: gl.constexpr,
    SPAN_RIGHT: gl.constexpr,
):  # fmt: skip
    """A unit: its request, -1 if there is none; one of K passes over kv heads (`_head`); the request's first token and number
    of tokens; the tile's first token; keys before the request's first token; first key if keys have no pages, or the one page
    of equal requests; first key of a tile of keys, last key + 1."""
    query_start_loc, seq_lens, rows, keys = starts
    # past the last request the last one's lengths are read, which exist; the number -1 says that there is no unit
    r = gl.minimum(request, num_reqs - 1)
    if EQUAL:  # no load, which the first copies of a program, and of each unit, would wait for, unless lengths differ
        begin = r * rows
        q_len = rows
        k_begin = r
        seq_len = keys
        if seq_lens is not None:
            seq_len = gl.load(seq_lens + r)
    else:
        begin = gl.load(query_start_loc + r)
        q_len = gl.load(query_start_loc + r + 1) - begin
        # an array that is not there is not read
        k_begin = gl.load(seq_lens + r) if PAGED or RAGGED else begin
        seq_len = k_begin if PAGED else (gl.load(seq_lens + r + 1) - k_begin if RAGGED else q_len)
    # A request's units: for each kv head its longest rows, heads one after the other, so that programs share a head's keys;
    # then the shorter rows of all heads.
    of_request = unit - before * K
    tiles = gl.maximum((q_len + BLOCK_Q - 1) // BLOCK_Q, 1)
    # two units for each program, of the shorter half of rows, are left for the end
    last_ones = gl.minimum((2 * gl.num_programs(0) + K - 1) // K, tiles // 2) if HAS_RIGHT else 0
    together = tiles - last_ones
    tail = of_request - together * K
    kv_head = gl.where(tail < 0, of_request // together, tail % K)
    from_last = gl.where(tail < 0, of_request % together, together + tail // K)
    # the last rows are the longest: start them first, so that they do not end last; past the last unit no row is read
    first = gl.maximum(tiles - 1 - from_last, 0) * BLOCK_Q
    context = seq_len - q_len
    since, high = _extent(mask, r, begin, q_len, seq_len, first, context, BLOCK_Q, CHUNK, SPAN_RIGHT)
    # Rounded down to a multiple of BLOCK_N, so that no box of a tile lies in two pages. Without keys low is high: no tiles.
    low = gl.minimum(since // BLOCK_N * BLOCK_N, high)
    return gl.where(request < num_reqs, r, -1), kv_head, begin, q_len, first, context, k_begin, low, high


@gluon.jit
def _bars(STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Barriers that say that a stage is full, and that it is empty."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return full, gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def _publish(units_ring, u_full, wave, unit):  # type: ignore[no-untyped-def]
    """Hand a unit over to the consumers."""
    # Two places in turn (`wave % 2`): the next unit is written while consumers still work on this one.
    for i in gl.static_range(_FIELDS):
        value = gl.full([1], unit[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        units_ring.index(wave % 2 * _FIELDS + i).store(value)
    # every lane's number is stored before one lane says so
    barrier()
    mbarrier.arrive(u_full.index(wave % 2), count=1)


@gluon.jit
def _uniform(x):  # type: ignore[no-untyped-def]
    """x of the first lane. All lanes have it, but of numbers from memory the compiler does not know that: since Triton 3.8 it
    computed each product's address in every lane, and moved it: 497 instructions a tile of 128 keys instead of 429."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _read(units_ring, wave, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The unit of that wave, as `_describe` returned it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit = ()
    for i in gl.static_range(_FIELDS):
        unit = unit + (_uniform(gl.sum(units_ring.index(wave % 2 * _FIELDS + i).load(layout), 0)),)  # type: ignore[assignment]
    return unit


@gluon.jit
def _take(units_ring, u_bars, wave, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for that wave's unit, and read it."""
    u_full, u_empty = u_bars
    # A barrier's phase is the parity of its uses: the wave's number in this place, modulo 2. Producers wait for the opposite
    # parity of `empty`, which a barrier that was never used counts as passed, so that the first turn needs no case of its own.
    mbarrier.wait(u_full.index(wave % 2), wave // 2 & 1)
    unit = _read(units_ring, wave, WARPS)
    # `arrive` first synchronises the partition's warps, so all of them have read the unit
    mbarrier.arrive(u_empty.index(wave % 2), count=1)
    return unit


@gluon.jit
def _pages_of(table, start, seq_len, num_pages, P: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Pages of the boxes of the tile of keys at `start`, one a lane; `num_pages`, which is none, for boxes after the last key:
    the engine fills in zeros for accesses outside its tensor."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    at = start + lane * BOX
    return gl.load(table + at // P, mask=(lane < BLOCK_N // BOX) & (at < seq_len) & (at >= 0), other=num_pages)


@gluon.jit
def _copy_queries(  # type: ignore[no-untyped-def]
    q_desc, q_ring, q_bars, wave, token, head, before, G: gl.constexpr, PIECES: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Copy each consumer's queries, once it has used the last ones in their place. before: as of `_before`; the engine fills
    such columns with zeros, by which the products multiply the other head's."""
    q_full, q_empty = q_bars
    COLUMNS: gl.constexpr = 64
    TILES: gl.constexpr = PIECES if q_ring.shape[2] == COLUMNS else 1
    ROOM: gl.constexpr = q_ring.shape[2] // COLUMNS * TILES
    Q_STAGES: gl.constexpr = q_ring.shape[0] // CONSUMERS // TILES
    # The engine swizzles rows of 128 bytes, so a box has 64 columns, and a tile of more lies in memory as that many boxes.
    boxes = reinterpret(q_ring, q_ring.dtype, [q_ring.shape[0] // TILES * ROOM, 1, 64 // G, G, COLUMNS], q_desc.layout)
    for consumer in gl.static_range(CONSUMERS):
        at = wave % Q_STAGES * CONSUMERS + consumer
        mbarrier.wait(q_empty.index(at), wave // Q_STAGES & 1 ^ 1)
        # counts as the producer's arrival, and the phase ends once the engine has written that many bytes
        mbarrier.expect(q_full.index(at), 64 * PIECES * COLUMNS * 2)
        for h in gl.static_range(PIECES):
            column = h * COLUMNS - before
            load_box(q_desc, [0, token + consumer * (64 // G), head, column], q_full.index(at), boxes.index(at * ROOM + h))


@gluon.jit
def _copy_boxes(  # type: ignore[no-untyped-def]
    desc, ring, stage, bar, pages, origin, STAGES: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, PAGED: gl.constexpr,
    EQUAL: gl.constexpr,
):  # fmt: skip
    """Copy a tile into a stage of the ring. origin: its first key, kv head and first column. pages: of the boxes; of equal
    requests, the one page; without pages, the request's first key."""
    start, kv_head, column = origin
    COLUMNS: gl.constexpr = 64
    BLOCK_N: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[0] // STAGES * ring.shape[2]
    PIECES: gl.constexpr = WIDTH // COLUMNS
    BOXES: gl.constexpr = BLOCK_N // BOX
    # A tile is PIECES blocks of 64 columns, each BLOCK_N rows of 128 bytes. BOX is a multiple of 16, so a box begins at a
    # multiple of the 8 rows after which the swizzle repeats, and is the same in memory as these rows of the tile.
    boxes = reinterpret(ring, ring.dtype, [STAGES * PIECES * BOXES, 1, BOX, 1, COLUMNS], desc.layout)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    # the whole tile: boxes outside the tensor are zeros, which count as bytes too
    mbarrier.expect(bar, BLOCK_N * WIDTH * 2)
    for b in gl.static_range(BOXES):
        if PAGED:
            # from one lane to all: a copy's coordinates are the warp's, not a lane's
            page = gl.max(gl.where(lane == b, pages, 0), 0)
            # where pages divide a tile, a box is a whole page
            slot = 0 if BLOCK_N % P == 0 else (start + b * BOX) % P
        elif EQUAL:
            page = pages
            slot = start + b * BOX
        else:
            page = 0
            slot = pages + start + b * BOX
        for h in gl.static_range(PIECES):
            load_box(desc, [page, slot, kv_head, column + h * COLUMNS], bar, boxes.index((stage * PIECES + h) * BOXES + b))


@gluon.jit
def _copy_keys(  # type: ignore[no-untyped-def]
    ring, tables, count, tiles, start, request, P: gl.constexpr, BOX: gl.constexpr, PAGED: gl.constexpr, EQUAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys of a request's tiles, downwards from the one at `start`, in as many blocks of columns as have barriers."""
    k_desc, k_ring, k_bars = ring
    k_full, k_empty = k_bars
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    BARS: gl.constexpr = k_full.shape[0] // STAGES
    r, place, seq_len, pages = request
    block_table, num_pages, table_r = tables
    if PAGED:
        table = block_table + r.to(gl.int64) * table_r
        pages = _pages_of(table, start, seq_len, num_pages, P, BOX, BLOCK_N)
    for _i in range(tiles):
        now = pages
        if PAGED:
            # the next tile's, whose loads then pass while this tile waits for its place
            pages = _pages_of(table, start - BLOCK_N, seq_len, num_pages, P, BOX, BLOCK_N)
        stage = count % STAGES
        for i in gl.static_range(BARS):
            at = stage * BARS + i
            origin = start, place[0], place[1] + i * k_ring.shape[2]
            # until every consumer's products have read the tile that was here STAGES tiles ago
            mbarrier.wait(k_empty.index(at), count // STAGES & 1 ^ 1)
            _copy_boxes(k_desc, k_ring, at, k_full.index(at), now, origin, BARS * STAGES, P, BOX, PAGED, EQUAL)
        count += 1
        start -= BLOCK_N
    return count


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    q_desc, k_desc, q_ring, k_ring, units_ring, q_bars, u_bars, k_bars, counters, starts, block_table, mask, min_query,
    num_reqs, num_pages, table_r,
    K: gl.constexpr, PASSES: gl.constexpr, G: gl.constexpr, PIECES: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    COPIED: gl.constexpr, PAGED: gl.constexpr, RAGGED: gl.constexpr, EQUAL: gl.constexpr, HAS_RIGHT: gl.constexpr,
    CHUNK: gl.constexpr, SPAN_RIGHT: gl.constexpr, SHARED: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """Producer of one warp: look up units of work, and copy their queries, and their keys into the ring, in the order in
    which the consumers use them. The next unit is looked up while the consumers compute the tiles that the ring holds. When a
    program took it before it copied this one's keys, the last programs ended 10 % later (causal, 8,192 rows, 16 x 256)."""
    u_full, u_empty = u_bars
    ring = k_desc, k_ring, k_bars
    tables = block_table, num_pages, table_r
    count = 0
    wave = 0
    number = gl.program_id(0)
    none = number * 0  # no constant, as it changes in a loop
    request, before = _find(number // K, none, none, starts, min_query, num_reqs, BLOCK_Q, EQUAL)
    unit = _describe(
        number, request, before, starts, mask, num_reqs, K, BLOCK_Q, BLOCK_N, PAGED, RAGGED, EQUAL, HAS_RIGHT, CHUNK, SPAN_RIGHT
    )
    _publish(units_ring, u_full, wave, unit)
    unit = _read(units_ring, wave, 1)
    while unit[0] >= 0:
        kv_head, _ = _head(unit, PASSES)
        r, head, begin, q_len, first, context, k_begin, low, high = unit
        of_keys = r, _place(kv_head // SHARED, JOINED), context + q_len, k_begin
        before_keys = _before(kv_head // SHARED, JOINED)
        tiles = (high - low + BLOCK_N - 1) // BLOCK_N
        start = low + (tiles - 1) * BLOCK_N
        # Queries are copied first where there are two places for them. With one place the consumers must first end the unit
        # before: waiting for that would hold up the keys, so as many tiles go first as the ring has stages.
        early = 0
        if COPIED and Q_STAGES == 2:
            _copy_queries(q_desc, q_ring, q_bars, wave, begin + first, kv_head * G, before_keys, G, PIECES, CONSUMERS)
        elif COPIED:  # the last unit's queries are still in their place
            early = gl.minimum(tiles, STAGES)
            count = _copy_keys(ring, tables, count, early, start, of_keys, P, BOX, PAGED, EQUAL, STAGES)
            _copy_queries(q_desc, q_ring, q_bars, wave, begin + first, kv_head * G, before_keys, G, PIECES, CONSUMERS)
        start -= early * BLOCK_N
        count = _copy_keys(ring, tables, count, tiles - early, start, of_keys, P, BOX, PAGED, EQUAL, STAGES)
        wave += 1
        # The first units are the programs' own numbers. The counter orders nothing else, so it may be relaxed.
        number = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
        request, before = _find(number // K, request, before, starts, min_query, num_reqs, BLOCK_Q, EQUAL)
        # consumers and the producer of values have read the unit two before, which was in this place
        mbarrier.wait(u_empty.index(wave % 2), wave // 2 & 1 ^ 1)
        unit = _describe(
            number, request, before, starts, mask, num_reqs, K, BLOCK_Q, BLOCK_N, PAGED, RAGGED, EQUAL, HAS_RIGHT, CHUNK,
            SPAN_RIGHT,
        )  # fmt: skip
        _publish(units_ring, u_full, wave, unit)
        unit = _read(units_ring, wave, 1)
    # A program adds 1 here after it has taken its last number, so the program that counts the last one knows that none reads
    # the counters any more, and leaves them 0 for the next launch on the stream.
    if gl.atomic_add(counters + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:  # every program has taken its last unit
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def _produce_values(  # type: ignore[no-untyped-def]
    v_desc, v_ring, units_ring, u_bars, v_bars, v_raw, block_table, mask, num_pages, table_r,
    BLOCK_V: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    PASSES: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, EQUAL: gl.constexpr, VALUES_AT: gl.constexpr,
    CHUNK: gl.constexpr, SPAN_RIGHT: gl.constexpr, ENDS: gl.constexpr, SHARED: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """Producer of one warp: copy the units' values into the ring, and overwrite those that no row sees. ENDS: as
    `PrefillParams.ends`; then no value is overwritten."""
    v_full, v_empty = v_bars
    HALVES: gl.constexpr = BLOCK_V // 64
    dtype: gl.constexpr = v_ring.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # 16 rows of 64 columns at a time: 32 values of 16 bits a lane, for a warp of 24 registers a thread
    v_rows = reinterpret(v_ring, dtype, [STAGES * HALVES * (BLOCK_N // 16), 16, 64], rows_layout)
    clear_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, clear_layout))
    count = 0
    raw_phase = 0
    wave = 0
    unit = _take(units_ring, u_bars, wave, 1)
    while unit[0] >= 0:
        kv_head, column = _head(unit, PASSES)
        place = _place(kv_head // SHARED, JOINED)
        r, head, begin, q_len, first, context, k_begin, low, high = unit
        seq_len = context + q_len
        # computed again: a unit's `low` is rounded down to a tile, and keys between the two must be cleared
        seen, _ = _extent(mask, r, begin, q_len, seq_len, first, context, BLOCK_Q, CHUNK, SPAN_RIGHT)
        tiles = (high - low + BLOCK_N - 1) // BLOCK_N
        start = low + (tiles - 1) * BLOCK_N
        pages = k_begin
        if PAGED:
            table = block_table + r.to(gl.int64) * table_r
            pages = _pages_of(table, start, seq_len, num_pages, P, BOX, BLOCK_N)
        for _i in range(tiles):
            now = pages
            if PAGED:
                now += VALUES_AT
                pages = _pages_of(table, start - BLOCK_N, seq_len, num_pages, P, BOX, BLOCK_N)
            stage = count % STAGES
            origin = start, place[0], place[1] + column
            mbarrier.wait(v_empty.index(stage), count // STAGES & 1 ^ 1)
            # Scores of such keys are selected away, but their values would be multiplied by a weight of 0, and 0 times a NaN in
            # unused memory is NaN. So the engine reports to a barrier of this warp alone, which overwrites them before it tells
            # the consumers. The engine's own zeros need none of that.
            if ENDS:
                _copy_boxes(v_desc, v_ring, stage, v_full.index(stage), now, origin, STAGES, P, BOX, PAGED, EQUAL)
            elif (start + BLOCK_N > seq_len) | (start < seen):
                _copy_boxes(v_desc, v_ring, stage, v_raw, now, origin, STAGES, P, BOX, PAGED, EQUAL)
                mbarrier.wait(v_raw, raw_phase)
                raw_phase ^= 1
                valid = seq_len - start
                for c in range(BLOCK_N // 16):
                    if (c * 16 < seen - start) | (c * 16 + 16 > valid):
                        kept = (row + c * 16 >= seen - start) & (row + c * 16 < valid)
                        for h in gl.static_range(HALVES):
                            box = v_rows.index((stage * HALVES + h) * (BLOCK_N // 16) + c)
                            nothing = gl.zeros([16, 64], dtype, clear_layout)
                            box.store(gl.where(kept[:, None], box.load(clear_layout), nothing))
                # stores of threads, before the consumers' products, which read shared memory through another proxy
                fence_async_shared()
                barrier()
                mbarrier.arrive(v_full.index(stage), count=1)
            else:
                _copy_boxes(v_desc, v_ring, stage, v_full.index(stage), now, origin, STAGES, P, BOX, PAGED, EQUAL)
            count += 1
            start -= BLOCK_N
        wave += 1
        unit = _take(units_ring, u_bars, wave, 1)


@gluon.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh: a series where the quotient would cancel; saturates on both sides where exp overflows."""
    y = x * x
    series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949))))
    return gl.where(gl.abs(x) < 0.25, series, 1.0 - 2.0 / (gl.exp2(x * 2.8853900817779268) + 1.0))


@gluon.jit
def _by_eights(x):  # type: ignore[no-untyped-def]
    """[64, N] as [64, N / 8, 8]: of every eight columns each thread has the same two."""
    # A product's accumulator has, in each 8 columns, columns 2 t and 2 t + 1 in lane t of four (PTX, wgmma's layout of D), so
    # sums over the middle dimension stay within a thread.
    return gl.reshape(x, [64, x.shape[1] // 8, 8])


@gluon.jit
def _sums(weights):  # type: ignore[no-untyped-def]
    """Sums of weights [64, N] over each thread's keys, [64, 8], which the unit's end adds up."""
    return gl.sum(_by_eights(weights), 1)


@gluon.constexpr_function
def _masking(two: bool, left: bool) -> tuple[str, str]:
    """PTX that replaces a score $1 by -inf unless the row sees key $2, and its operands: `_masked`."""
    # $3 and $4: the last and the first key of the row; $5 and $6: the first and the last of its other range
    lines = ["{ .reg .pred own, other;", "setp.le.s32 own, $2, $3;"]
    if left:
        lines += ["setp.ge.and.s32 own, $2, $4, own;"]
    if two:
        lines += ["setp.ge.s32 other, $2, $5;", "setp.le.and.s32 other, $2, $6, other;", "or.pred own, own, other;"]
    return " ".join([*lines, "selp.f32 $0, $1, 0fFF800000, own; }"]), "=f,f,r" + ",r" * (4 if two else 2)


@gluon.jit
def _masked(s, start, seen, TWO: gl.constexpr, HAS_LEFT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores, -inf for keys that a row does not see. seen, TWO: as in `_weigh`.

    In PTX, since the compiler would compare before the wait for the scores, and pack the results into integers: 825
    instructions a tile of 128 keys instead of 622.
    """
    PTX: gl.constexpr = _masking(TWO, HAS_LEFT)
    j = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    operands = (s, gl.broadcast(s, j[None, :])[1])
    for i in gl.static_range(4 if TWO else 2):
        operands = operands + (gl.broadcast(s, seen[i][:, None])[1],)  # type: ignore[assignment]
    return gl.inline_asm_elementwise(PTX[0], PTX[1], operands, gl.float32, is_pure=True, pack=1)


@gluon.jit
def _weigh(  # type: ignore[no-untyped-def]
    s, m_i, l_i, start, seen, scaling, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr
):
    """The online softmax of one tile of scores: (weights, running maximum, running sum, factor for earlier sums).

    seen: of rows, the last and the first key that they see; with MASKED = 2 the first and the last of another range too.
    scaling: what scores are multiplied by, and their cap or None.
    """
    factor, cap = scaling
    if cap is not None:
        s = cap * _tanh(s * factor)
    if MASKED:
        s = _masked(s, start, seen, MASKED == 2, HAS_LEFT)
    # plain scores are scaled inside the exponent, where the product is fused
    m_new = gl.maximum(m_i, gl.max(s, 1) * factor if cap is None else gl.max(s, 1))
    # what is subtracted may lag behind the maximum, so that sums are seldom multiplied (`_scaled`): weights are then up to 2**8
    m_new = gl.where(m_new - m_i > _LEEWAY, m_new, m_i)
    guard = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2((s * factor if cap is None else s) - guard[:, None])
    alpha = gl.exp2(m_i - guard)
    # each thread's own keys: lanes are added up once a unit, not once a tile
    l_i = l_i * _of_rows(alpha, l_i) + _sums(p)
    return p, m_new, l_i, alpha


@gluon.constexpr_function
def _renewing() -> tuple[str, str]:
    """PTX of `_renewed` for a thread's four sums, of which two are of one row, and its operands."""
    # Outputs $0-3: factors, $4-7: sums, $8-11: what is subtracted; inputs $12-15: sums, $16-19: what is subtracted.
    rows, bound = ((0, 1), (2, 3)), "0f4F800000"  # 2**32
    lines = ["{ .reg .pred some, any, large; .reg .f32 most, other, by; .reg .b32 bits;"]
    lines += [f"mov.f32 ${i}, 0f3F800000; mov.f32 ${4 + i}, ${12 + i}; mov.f32 ${8 + i}, ${16 + i};" for i in range(4)]
    lines += [f"setp.gt.f32 some, $12, {bound};"]
    lines += [f"setp.gt.or.f32 some, ${12 + i}, {bound}, some;" for i in range(1, 4)]
    # the whole warp jumps or stays, as the shuffles below need all its lanes
    lines += ["vote.sync.any.pred any, some, 0xffffffff;", "@!any bra DONE;"]
    for a, b in rows:
        lines += [f"max.f32 most, ${12 + a}, ${12 + b};"]
        # four neighbouring lanes have a row, so two exchanges find the largest of their sums
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 other, most, {lane}, 31, 0xffffffff;", "max.f32 most, most, other;"]
        # The exponent e of the largest sum, from its bits: the factor is 2**-e, by its bits again, and e is added to what is
        # subtracted. 253 bounds e by 126, so that 2**-e is a normal number; an infinite sum stays infinite and is found at the
        # end.
        lines += [f"setp.gt.f32 large, most, {bound};", "mov.b32 bits, most;", "shr.u32 bits, bits, 23;"]
        lines += ["min.u32 bits, bits, 253;", "selp.b32 bits, bits, 127, large;"]
        lines += ["sub.u32 bits, bits, 127;", "cvt.rn.f32.u32 by, bits;", "sub.u32 bits, 127, bits;"]
        lines += ["shl.b32 bits, bits, 23;", "mov.b32 other, bits;"]
        for i in (a, b):
            lines += [
                f"mov.f32 ${i}, other;",
                f"mul.rn.f32 ${4 + i}, ${12 + i}, other;",
                f"add.rn.f32 ${8 + i}, ${16 + i}, by;",
            ]
    return " ".join([*lines, "DONE: }"]), ",".join(["=f"] * 12 + ["f"] * 8)


@gluon.jit
def _renewed(l_i, m_i):  # type: ignore[no-untyped-def]
    """Factor for earlier sums, running sums, and what is subtracted from scores, [64, 8] each. Where a row has a sum above
    2**32, its sums are divided by a power of two; others stay what they are."""
    PTX: gl.constexpr = _renewing()
    float32 = l_i.dtype  # each output's; Triton 3.9 takes no constants in a list
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [l_i, m_i], (float32, float32, float32), is_pure=True, pack=4)


@gluon.jit
def _weigh_all(s, m_i, l_i, scaling):  # type: ignore[no-untyped-def]
    """`_weigh` of a tile of which every row sees every key, without its maximum: what is subtracted follows the sums of earlier
    tiles. m_i: [64, 8].

    Sums of earlier tiles are at most 2**32 (`_renewed`), so a weight may be at least 2**95 times as large as those. One beyond
    bfloat16's range makes the results of its row infinite or NaN, and they are computed again (`_nan_safe`).
    """
    factor, cap = scaling
    if cap is not None:
        s = cap * _tanh(s * factor)
    alpha, l_i, m_i = _renewed(l_i, m_i)
    # [64, N / 8, 8]: a thread's two columns of eight meet its two columns of `m_i`, without a reduction over lanes
    s8 = _by_eights(s)
    guard = gl.convert_layout(m_i, gl.SliceLayout(1, s8.type.layout))[:, None, :]
    p = gl.exp2((s8 * factor if cap is None else s8) - guard)
    l_i = l_i + gl.convert_layout(gl.sum(p, 1), l_i.type.layout)
    return gl.convert_layout(gl.reshape(p, s.shape), s.type.layout), m_i, l_i, alpha


@gluon.jit
def _scores(q_ring, q_at, keys, count, D: gl.constexpr, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for tile `count` of keys, and start its products with a tile of queries, one for each block of columns."""
    k_ring, k_full, k_empty = keys
    TILES: gl.constexpr = k_ring.shape[0] // STAGES
    BARS: gl.constexpr = k_full.shape[0] // STAGES
    WIDTH: gl.constexpr = k_ring.shape[2]
    ROOM: gl.constexpr = TILES if q_ring.shape[2] == WIDTH else q_ring.shape[2] // WIDTH
    BLOCKS: gl.constexpr = column_blocks(D, WIDTH)
    COUNT: gl.constexpr = q_ring.shape[0] * q_ring.shape[2] // WIDTH
    queries = reinterpret(q_ring, q_ring.dtype, [COUNT, 64, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    stage = _stage(count, STAGES)
    s = _zeros(k_ring.shape[1])
    for i in gl.static_range(len(BLOCKS)):
        # blocks of columns that were copied by one barrier arrive together, so only the first of them waits
        if i < BARS:
            mbarrier.wait(k_full.index(stage * BARS + i), count // STAGES & 1)
        q = queries.index(q_at * ROOM + BLOCKS[i][0] // WIDTH).slice(BLOCKS[i][0] % WIDTH, BLOCKS[i][1], 1)
        k = k_ring.index(stage * TILES + BLOCKS[i][0] // WIDTH).slice(BLOCKS[i][0] % WIDTH, BLOCKS[i][1], 1)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _await_scores(s, keys, count, LATER: gl.constexpr, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the products that `_scores` started before the last `LATER` ones, and release the keys."""
    k_ring, k_full, k_empty = keys
    BARS: gl.constexpr = k_full.shape[0] // STAGES
    stage = _stage(count, STAGES)
    for i in gl.static_range(BARS):
        # Products end in the order in which they started: with so many left, those that read block i have ended.
        s = warpgroup_mma_wait(LATER + BARS - 1 - i, deps=[s])
        _release(k_empty, stage * BARS + i)
    return s


@gluon.jit
def _nothing(DV: gl.constexpr, BLOCK_V: gl.constexpr):  # type: ignore[no-untyped-def]
    """Accumulators of 64 rows, one for each block of the values' columns."""
    BLOCKS: gl.constexpr = column_blocks(DV, BLOCK_V)
    acc = ()
    for i in gl.static_range(len(BLOCKS)):
        acc = acc + (_zeros(BLOCKS[i][1]),)  # type: ignore[assignment]
    return acc


@gluon.jit
def _zeros(WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores or accumulators of 64 rows."""
    return gl.zeros([64, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))


@gluon.jit
def _add_values(weights, v_ring, stage, acc, DV: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the products of weights and a tile of values, one for each block of the head's columns."""
    BLOCKS: gl.constexpr = column_blocks(DV, v_ring.shape[2])
    started = ()
    for i in gl.static_range(len(BLOCKS)):
        # no data moves: a thread has the same elements of an accumulator and of a left operand (PTX, fragments of wgmma)
        p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        v = v_ring.index(stage).slice(BLOCKS[i][0], BLOCKS[i][1], 1)
        started = started + (warpgroup_mma(p, v, acc[i], is_async=True),)  # type: ignore[assignment]
    return started


@gluon.jit
def _in_eights(x, l_i):  # type: ignore[no-untyped-def]
    """One number a row, for each of a thread's two columns."""
    return gl.broadcast(l_i, _of_rows(x, l_i))[1]


@gluon.jit
def _of_rows(x, acc):  # type: ignore[no-untyped-def]
    """One number a row, as a column of the accumulator's layout."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.constexpr_function
def _scaling(count: int) -> tuple[str, str]:
    """PTX that multiplies `count` numbers of a thread by as many factors unless those of all the warp's rows are 1, and its
    operands. A thread has two rows, of which the first four numbers are two each."""
    lines = ["{ .reg .pred own, some;", *(f"mov.f32 ${i}, ${count + i};" for i in range(count))]
    # 0f3F800000 is 1. A vote of the warp's 16 rows: if they differed in whether they jump, it would run both ways.
    lines += [f"setp.neu.f32 own, ${2 * count}, 0f3F800000;", f"setp.neu.or.f32 own, ${2 * count + 2}, 0f3F800000, own;"]
    lines += ["vote.sync.any.pred some, own, 0xffffffff;", "@!some bra DONE;"]
    lines += [f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return " ".join([*lines, "DONE: }"]), ",".join(["=f"] * count + ["f"] * 2 * count)


@gluon.jit
def _scaled(acc, factor):  # type: ignore[no-untyped-def]
    """Each row of an accumulator times its factor. Multiplications by 1 take a tenth of a loop's instructions, or a third."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    PTX: gl.constexpr = _scaling(COUNT)
    if len(factor.shape) == 2:
        eights = _by_eights(acc)
        of_rows = gl.convert_layout(factor, gl.SliceLayout(1, eights.type.layout))[:, None, :]
        factors = gl.convert_layout(gl.reshape(gl.broadcast(eights, of_rows)[1], acc.shape), acc.type.layout)
    else:
        factors = gl.broadcast(acc, _of_rows(factor, acc))[1]
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [acc, factors], gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def _times(acc, factor):  # type: ignore[no-untyped-def]
    """Each row of the accumulators times its factor."""
    product = ()
    for i in gl.static_range(len(acc)):
        product = product + (_scaled(acc[i], factor),)  # type: ignore[assignment]
    return product


@gluon.jit
def _await(acc):  # type: ignore[no-untyped-def]
    """Wait for all products."""
    done = ()
    for i in gl.static_range(len(acc)):
        done = done + (warpgroup_mma_wait(0, deps=[acc[i]]),)  # type: ignore[assignment]
    return done


@gluon.constexpr_function
def _narrowing(dtype: Any) -> str:
    """PTX that rounds two float32 numbers to 16 bits each, the first one into the lower half."""
    return f"cvt.rn.{'bf16' if dtype.name == 'bf16' else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def _pairs(x, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Round [64, N] to 16 bits, in pairs of columns: int32 [64, N / 2]. The assembly is volatile so that it stays behind the
    wait for products that read the last pairs, from the same registers."""
    PTX: gl.constexpr = _narrowing(dtype)
    low, high = gl.split(gl.reshape(x, [64, x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(PTX, "=r,f,f", [low, high], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _of_pairs(pairs, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """The 16-bit numbers [64, N] of what `_pairs` returned."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.reshape(gl.join(low, high), [64, 2 * pairs.shape[1]])


@gluon.jit
def _narrow(weights, dtype: gl.constexpr, DV: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights in pairs, since ptxas swaps the halves of every pair of 16-bit values that a loop carries. For values above 128
    they stay as they are."""
    return _pairs(weights, dtype) if DV <= 128 else weights


@gluon.jit
def _narrowed(weights, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """The 16-bit weights [64, N] of what `_narrow` returned."""
    return _of_pairs(weights, dtype) if weights.dtype == gl.int32 else weights.to(dtype)


@gluon.jit
def _release(empty, stage):  # type: ignore[no-untyped-def]
    """Tell the producer that this consumer's products have read a stage of the ring.

    One thread arrives. `mbarrier.arrive` would first synchronise the consumer's warps, whose products end together.
    """
    mbarrier.expect(empty.index(stage), 0)


@gluon.jit
def _stage(count, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The stage of the ring that has tile `count`."""
    if STAGES == 1:  # 0, which the compiler is not to know: it would keep every product's address, more than registers hold
        return count // (1 << 30)
    return count % STAGES


@gluon.constexpr_function
def _needs_no_maximum(dtype: Any) -> bool:
    """Whether weights [16 bits] have float32's range, so that tiles without a mask need no maximum (`_weigh_all`)."""
    return bool(dtype == gl.bfloat16)


@gluon.constexpr_function
def _waits_ahead(blocks: int, dtype: Any) -> bool:
    """Whether `_step` waits for values before it awaits products, by the number of blocks of a head."""
    return blocks > 1 or _needs_no_maximum(dtype)


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    sums, count, inputs, start, seen, scaling, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, D: gl.constexpr, DV: gl.constexpr
):
    """Compute the scores of tile `count` while the values of the previous tile are multiplied with its `weights`.

    sums: weights of the previous tile, `_narrow`ed; accumulators of tiles before it; their factor, by which they have been
    multiplied already unless tiles have 128 keys: the products of that many keys last longer than the multiplication; running
    maximum; running sum.

    This waits for the tile's own values before it awaits the products, since the compiler moves no exponential behind a wait in
    a loop, but would await products before all of them. With heads in one block that is slower if tiles need a maximum.
    """
    # The order is what overlaps: this tile's scores and the last tile's values are both on the tensor cores while the
    # exponentials are computed, which need the scores alone.
    weights, acc, alpha, m_i, l_i = sums
    q_ring, q_at, keys, values = inputs
    k_ring, k_full, k_empty = keys
    v_ring, v_full, v_empty = values
    STAGES: gl.constexpr = v_full.shape[0]
    AHEAD: gl.constexpr = STAGES > 1 and _waits_ahead(len(acc), v_ring.dtype)
    LATE: gl.constexpr = k_ring.shape[1] == 128
    stage = _stage(count, STAGES)
    old = _stage(count - 1, STAGES)
    s = _scores(q_ring, q_at, keys, count, D, STAGES)
    weights = _narrowed(weights, v_ring.dtype)
    if not AHEAD:
        mbarrier.wait(v_full.index(old), (count - 1) // STAGES & 1)
    if LATE:
        acc = _times(acc, alpha)
    acc = _add_values(weights, v_ring, old, acc, DV)
    # the products of values, started later, go on
    s = _await_scores(s, keys, count, len(acc), STAGES)
    if len(m_i.shape) == 2:
        weights, m_i, l_i, alpha = _weigh_all(s, m_i, l_i, scaling)
    else:
        weights, m_i, l_i, alpha = _weigh(s, m_i, l_i, start, seen, scaling, MASKED, HAS_LEFT)
    if AHEAD:
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    acc = _await(acc)
    # after the wait: the products before read the old weights from the registers that the new ones get
    weights = _narrow(weights, v_ring.dtype, DV)
    _release(v_empty, old)
    if not LATE:
        acc = _times(acc, alpha)
    return weights, acc, alpha, m_i, l_i


@gluon.jit
def _pass_by(count, tiles, keys, values):  # type: ignore[no-untyped-def]
    """Release tiles unread, each once it is there, and return the number of the next one."""
    k_ring, k_full, k_empty = keys
    v_ring, v_full, v_empty = values
    STAGES: gl.constexpr = v_full.shape[0]
    BARS: gl.constexpr = k_full.shape[0] // STAGES
    for _i in range(tiles):
        stage = count % STAGES
        for i in gl.static_range(BARS):
            mbarrier.wait(k_full.index(stage * BARS + i), count // STAGES & 1)
            _release(k_empty, stage * BARS + i)
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
        _release(v_empty, stage)
        count += 1
    return count


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars, v_bars, block_table,
    sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides, table_r,
    G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, P: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, COPIED: gl.constexpr, PAGED: gl.constexpr,
    EQUAL: gl.constexpr, NEGATE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, CHUNK: gl.constexpr,
    SPAN_RIGHT: gl.constexpr, PASSES: gl.constexpr, SHARED: gl.constexpr, JOINED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer of four warps: 64 rows of each of the program's tiles."""
    ROWS: gl.constexpr = CONSUMER * 64
    WIDTH: gl.constexpr = most_columns(DV)
    dtype: gl.constexpr = q_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // most_columns(BLOCK_D), most_columns(BLOCK_D) // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    spans, prefix, is_causal, left, right = mask
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    keys = k_ring, k_full, k_empty
    values = v_ring, v_full, v_empty
    scaling = factor, cap if HAS_CAP else None
    TWO: gl.constexpr = spans is not None  # ranges of keys that a row may see
    # Whether consumers' rows are so far apart that they see whole tiles that the others' do not, which those then pass by.
    # Spans may be anywhere.
    APART: gl.constexpr = spans is None and 64 * CONSUMERS // G >= BLOCK_N
    ALL: gl.constexpr = _needs_no_maximum(dtype)
    count = 0
    copy_row = ROWS + gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    copy_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))
    row = ROWS + gl.arange(0, 64, layout=ROW)
    wave = 0
    unit = _take(units_ring, u_bars, wave, 4)
    while unit[0] >= 0:
        kv_head, column = _head(unit, PASSES)
        r, head, begin, q_len, first, context, k_begin, low, high = unit
        last = context + gl.minimum(first + BLOCK_Q, q_len) - 1
        q_at = wave % Q_STAGES * CONSUMERS + CONSUMER
        inputs = q_ring, q_at, keys, values
        # A request's last unit may have no row for this consumer. Barriers count all consumers, so it must still pass every
        # tile.
        if first + ROWS // G < q_len:
            if COPIED:
                mbarrier.wait(q_full.index(q_at), wave // Q_STAGES & 1)
            else:
                token = first + copy_row // G
                query_head = kv_head * G + copy_row % G
                d = copy_d - _before(kv_head // SHARED, JOINED)
                in_bounds = ((copy_row < BLOCK_Q * G) & (token < q_len))[:, None] & (d < D)[None, :]
                if JOINED > 0:
                    in_bounds = in_bounds & (d >= 0)[None, :]
                at = (begin + token).to(gl.int64) * q_t + query_head * q_h
                q = gl.load(query + at[:, None] + d[None, :], mask=in_bounds, other=0.0)
                if NEGATE:
                    q = (0.0 - q.to(gl.float32)).to(dtype)
                barrier()  # no warp reads the last ones any more
                q_ring.index(q_at).store(q)
                fence_async_shared()
                barrier()

            # Keys that each row sees, and the tiles of `tiles` (counted from the last key) where masks end and begin again: the
            # first loop runs to `right_of`, the one without a mask to `left_from`, the last one to the unit's first key.
            position = context + first + row // G
            reach = _right(right, is_causal, r)
            upper = gl.minimum(position + reach, high - 1)
            lower = _since(position - left, position, CHUNK)
            tiles = (high - low + BLOCK_N - 1) // BLOCK_N
            # the keys before the last one that all rows see need no mask, so that each row has a maximum before the tiles that
            # need none; this consumer's own first token decides their upper end
            full_to = context + first + ROWS // G + reach
            full_from = _since(last - left, last, CHUNK)
            if prefix is not None:  # it touches what the window lets a row see (`paged_launch`)
                shared = gl.minimum(gl.load(prefix + r), high)
                upper = gl.maximum(upper, shared - 1)
                full_to = gl.maximum(full_to, shared - 1)
            seen = upper, lower
            disjoint = 0
            if APART and HAS_RIGHT and CONSUMER < CONSUMERS - 1:
                last_seen = gl.minimum(context + gl.minimum(first + (ROWS + 63) // G, q_len - 1) + reach, high - 1)
                if prefix is not None:
                    last_seen = gl.maximum(last_seen, shared - 1)
                needed = (gl.maximum(last_seen + 1 - low, 0) + BLOCK_N - 1) // BLOCK_N
                count = _pass_by(count, tiles - needed, keys, values)
                tiles = needed
            if APART and HAS_LEFT and CONSUMER > 0:
                first_seen = _since(context + first + ROWS // G - left, context + first + ROWS // G, CHUNK)
                before = gl.minimum(gl.maximum(first_seen - low, 0) // BLOCK_N, tiles)
                low += before * BLOCK_N
                tiles -= before
            if TWO:
                valid = (row < BLOCK_Q * G) & (first + row // G < q_len)
                since, until = _span(spans, begin + first + row // G, valid, position, left, CHUNK, SPAN_RIGHT)
                until = gl.minimum(until, high - 1)
                has_span = until >= gl.maximum(since, 0)
                touches = has_span & (since <= upper + 1) & (until >= lower - 1)
                upper = gl.where(touches, gl.maximum(upper, until), upper)
                lower = gl.where(touches, gl.minimum(lower, since), lower)
                seen = upper, lower, since, until  # type: ignore[assignment]
                # a row whose span does not touch the rest has no keys in common with others
                full_to = gl.min(gl.where(valid, gl.where(has_span == touches, upper, -_FAR), _FAR), 0)
                full_from = gl.max(gl.where(valid, lower, -_FAR), 0)
                disjoint = full_to < -_FAR // 2
            right_of = tiles - gl.minimum(gl.maximum(gl.minimum(full_to, high) - low, 0) // BLOCK_N, tiles)
            left_from = tiles
            if HAS_LEFT:
                left_from = tiles - gl.minimum((gl.maximum(full_from - low, 0) + BLOCK_N - 1) // BLOCK_N, tiles)
            if TWO:  # the last loop's mask has both ranges
                right_of = gl.where(disjoint, 1, right_of)
                left_from = gl.where(disjoint, 1, left_from)
            # the last tile of keys is weighed before the loops, always with a mask
            right_of = gl.maximum(right_of, 1)
            left_from = gl.maximum(left_from, right_of)

            acc = _nothing(WIDTH, BLOCK_V)
            AHEAD: gl.constexpr = STAGES > 1 and _waits_ahead(len(acc), dtype)
            l_i = _sums(_zeros(BLOCK_N))
            m_i = gl.full([64], float("-inf"), gl.float32, ROW)
            if tiles > 0:
                # the first tile has no values of another to overlap with
                s = _await_scores(_scores(q_ring, q_at, keys, count, D, STAGES), keys, count, 0, STAGES)
                start = low + (tiles - 1) * BLOCK_N
                weights, m_i, l_i, alpha = _weigh(s, m_i, l_i, start, seen, scaling, 2 if TWO else 1, HAS_LEFT)
                if AHEAD:
                    mbarrier.wait(v_full.index(_stage(count, STAGES)), count // STAGES & 1)
                sums = _narrow(weights, dtype, WIDTH), acc, alpha, m_i, l_i
                count += 1
                if HAS_RIGHT or TWO:  # else the last tile alone has keys that no row sees, behind the last one
                    for _i in range(1, right_of):
                        start -= BLOCK_N
                        sums = _step(sums, count, inputs, start, seen, scaling, 1, HAS_LEFT, D, WIDTH)
                        count += 1
                # The loop without maxima keeps what it subtracts beside each thread's sums, [64, 8]; -inf, of rows without a
                # key, would make its scores infinite.
                if ALL:
                    weights, acc, alpha, m_i, l_i = sums
                    m_i = _in_eights(gl.where(m_i == float("-inf"), 0.0, m_i), l_i)
                    sums = weights, acc, _in_eights(alpha, l_i), m_i, l_i
                for _i in range(right_of, left_from):
                    start -= BLOCK_N
                    sums = _step(sums, count, inputs, start, seen, scaling, 0, HAS_LEFT, D, WIDTH)
                    count += 1
                # back to one number a row, which is the same in all eight columns
                if ALL:
                    weights, acc, alpha, m_i, l_i = sums
                    m_i, alpha = gl.convert_layout(gl.max(m_i, 1), ROW), gl.convert_layout(gl.max(alpha, 1), ROW)
                    sums = weights, acc, alpha, m_i, l_i
                if HAS_LEFT or TWO:
                    for _i in range(left_from, tiles):
                        start -= BLOCK_N
                        if TWO:  # read again, so that these need no registers in the other loops
                            also = _span(spans, begin + first + row // G, valid, position, left, CHUNK, SPAN_RIGHT)
                            seen = upper, lower, also[0], also[1]  # type: ignore[assignment]
                        MASKED: gl.constexpr = 2 if TWO else 1
                        sums = _step(sums, count, inputs, start, seen, scaling, MASKED, HAS_LEFT, D, WIDTH)
                        count += 1
                weights, acc, alpha, m_i, l_i = sums
                # the last scores are computed: the next unit's queries may come
                if COPIED:
                    _release(q_empty, q_at)
                old = _stage(count - 1, STAGES)
                if not AHEAD:
                    mbarrier.wait(v_full.index(old), (count - 1) // STAGES & 1)
                if BLOCK_N == 128:
                    acc = _times(acc, alpha)
                acc = _await(_add_values(_narrowed(weights, dtype), v_ring, old, acc, WIDTH))
                _release(v_empty, old)
            elif COPIED:
                _release(q_empty, q_at)
            if APART and HAS_LEFT and CONSUMER > 0:
                count = _pass_by(count, before, keys, values)

            # over the four lanes of a row, for the first time
            l_i = gl.convert_layout(gl.sum(l_i, 1), ROW)
            valid = (row < BLOCK_Q * G) & (first + row // G < q_len)  # other rows' queries may be anything
            head_sinks = sinks + kv_head * G + row % G if HAS_SINKS else None
            log, scale = _finalize(l_i, m_i, head_sinks, valid, v_factor)
            rows = (begin + first + row // G).to(gl.int64) * o_t + (kv_head * G + row % G) * o_h
            BLOCKS: gl.constexpr = column_blocks(WIDTH, BLOCK_V)
            results = _rounded(acc, scale, dtype)
            own = column - _before(kv_head // SHARED, JOINED)
            for i in gl.static_range(len(BLOCKS)):
                _write(output, rows, valid, _of_pairs(results[i], dtype), own, BLOCKS[i][0], DV, JOINED)
            # 0 times a NaN or an infinity may have reached rows that do not see that value, or a weight may be infinite
            if _have_odd(results, valid, dtype) != 0:
                if TWO:
                    also = _span(spans, begin + first + row // G, valid, position, left, CHUNK, SPAN_RIGHT)
                    seen = upper, lower, also[0], also[1]  # type: ignore[assignment]
                queries = query + begin.to(gl.int64) * q_t, q_t, q_h, valid
                k_at, v_at = kv_head // SHARED * k_strides[2], kv_head // SHARED * v_strides[2] + column
                caches = key_cache + k_at, value_cache + v_at, k_strides, v_strides, block_table, table_r
                acc, most, total = _nan_safe(
                    queries, caches, unit, kv_head, row, seen, scaling, WIDTH, BLOCK_V, P, D, G, NEGATE, PAGED, EQUAL, HAS_LEFT
                )
                log, scale = _finalize(gl.convert_layout(total, ROW), gl.convert_layout(most, ROW), head_sinks, valid, v_factor)
                results = _rounded(acc, scale, dtype)
                for i in gl.static_range(len(BLOCKS)):
                    _write(output, rows, valid, _of_pairs(results[i], dtype), column, BLOCKS[i][0], DV, JOINED)
            if HAS_LSE:
                token = first + row // G
                of_rows = lse + (kv_head * G + row % G).to(gl.int64) * lse_h + begin + token
                gl.store(of_rows, log * 0.6931471805599453, mask=valid & (column == 0))
        else:  # no row of the unit is this consumer's
            if COPIED:
                mbarrier.wait(q_full.index(q_at), wave // Q_STAGES & 1)
                _release(q_empty, q_at)
            count = _pass_by(count, (high - low + BLOCK_N - 1) // BLOCK_N, keys, values)
        wave += 1
        unit = _take(units_ring, u_bars, wave, 4)


@gluon.jit
def _finalize(l_i, m_i, sinks, valid, v_factor):  # type: ignore[no-untyped-def]
    """Log-sum-exp of rows in base 2, and the scale of their sums of values: 0 for a row without keys, whatever its sink.
    sinks: pointers to each row's, or None."""
    log = gl.where(l_i == 0, float("-inf"), m_i + gl.log2(l_i))
    scale = gl.where(l_i == 0, 0.0, v_factor / gl.where(l_i == 0, 1.0, l_i))
    if sinks is not None:
        sink = gl.load(sinks, mask=valid, other=0.0) * 1.4426950408889634
        scale = scale * gl.where(log == float("-inf"), 0.0, 1.0 / (1.0 + gl.exp2(sink - log)))
    return log, scale


@gluon.jit
def _rounded(acc, scale, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """`_pairs` of each of the accumulators, whose rows are multiplied by their scale."""
    results = ()
    for i in gl.static_range(len(acc)):
        results = results + (_pairs(acc[i] * _of_rows(scale, acc[i]), dtype),)  # type: ignore[assignment]
    return results


@gluon.constexpr_function
def _by_row(width: int, columns: int) -> Any:
    """A layout of [64, width] in which a thread has some columns of a row, and a warp the rows that accumulators give it."""
    # An accumulator's warp has 16 rows and a thread two columns of eight; here `columns` adjacent ones, so that a store is 8 or
    # 16 bytes. Rows stay within their warp, so the conversion needs no barrier of warps.
    inner, wide = columns.bit_length() - 1, width >= 4 * columns
    beside = [[0, 1 << i] for i in range(inner + 2, width.bit_length() - 1)]
    registers = [*([0, 1 << i] for i in range(inner)), *([[8, 0]] if wide else []), *beside]
    lanes = [[0, columns], [0, 2 * columns] if wide else [8, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
def _write(  # type: ignore[no-untyped-def]
    output, rows, valid, result, column, FROM: gl.constexpr, DV: gl.constexpr, JOINED: gl.constexpr
):
    """Store a result [64, N], whose first column is `column` + FROM of `DV`, negative where another head's columns come first.
    rows: where in `output` each begins.

    The compiler moves results between the threads of a warp, through memory of its own: 16 bytes a thread, but 8 where tiles
    leave no more. Stored by the threads that have them, 4 bytes each, they took a program of 1,000 rows up to 9 % longer.
    """
    LAYOUT: gl.constexpr = _by_row(result.shape[1], 8 if DV <= 256 else 4)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d = column + FROM + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    written = gl.convert_layout(valid, ROW)[:, None]
    if DV > 256 or FROM + result.shape[1] > DV or JOINED > 0:
        written = written & (d < DV)[None, :]
    if JOINED > 0:
        written = written & (d >= 0)[None, :]
    gl.store(output + gl.convert_layout(rows, ROW)[:, None] + d[None, :], gl.convert_layout(result, LAYOUT), mask=written)


@gluon.constexpr_function
def _times_zero(dtype: Any) -> str:
    """PTX that multiplies two 16-bit numbers by 0."""
    ptx_type = "bf16" if dtype.name == "bf16" else "f16"
    return f"{{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.{ptx_type}x2 $0, $1, zero, zero; }}"


@gluon.jit
def _odd(pairs, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of which some are set where one of two numbers is NaN or infinite: those of its product by 0, without the sign."""
    PTX: gl.constexpr = _times_zero(dtype)
    return gl.inline_asm_elementwise(PTX, "=r,r", [pairs], gl.int32, is_pure=True, pack=1) & 0x7FFF7FFF


@gluon.jit
def _or(a, b):  # type: ignore[no-untyped-def]
    return a | b


@gluon.jit
def _have_odd(results, valid, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Not 0 if some row's result has a NaN or an infinity."""
    bits = 0
    for i in gl.static_range(len(results)):
        of_rows = gl.reduce(_odd(results[i], dtype), 1, _or)
        bits = bits | gl.reduce(gl.where(gl.convert_layout(valid, of_rows.type.layout), of_rows, 0), 0, _or)
    return bits


@gluon.jit
def _nan_safe(  # type: ignore[no-untyped-def]
    queries, caches, unit, kv_head, row, seen, scaling, DV: gl.constexpr, BLOCK_V: gl.constexpr, P: gl.constexpr,
    D: gl.constexpr, G: gl.constexpr, NEGATE: gl.constexpr, PAGED: gl.constexpr, EQUAL: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):  # fmt: skip
    """The weighted sum of values, the maximum and the sum of weights, one key at a time: keys that a row does not see are
    selected away, not multiplied by 0."""
    key_cache, value_cache, k_strides, v_strides, block_table, table_r = caches
    k_block, k_slot, _ = k_strides
    v_block, v_slot, _ = v_strides
    factor, cap = scaling
    r, _, begin, q_len, first, context, k_begin, low, high = unit
    TWO: gl.constexpr = len(seen) == 4
    acc = _nothing(DV, BLOCK_V)
    LAYOUT: gl.constexpr = acc[0].type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    query, q_t, q_h, valid = queries
    at = gl.convert_layout((first + row // G).to(gl.int64) * q_t + (kv_head * G + row % G) * q_h, ROW)
    in_bounds = gl.convert_layout(valid, ROW)[:, None]
    if NEGATE:
        factor = 0.0 - factor
    upper = gl.convert_layout(seen[0], ROW)
    lower = gl.convert_layout(seen[1], ROW)
    if TWO:
        since = gl.convert_layout(seen[2], ROW)
        until = gl.convert_layout(seen[3], ROW)
    m_i = gl.full([64], float("-inf"), gl.float32, ROW)
    l_i = gl.zeros([64], gl.float32, ROW)
    # A unit's first tile may begin before the first key that a row sees, in pages whose entries name none, as a server may have
    # freed them: the engine fills in zeros there, but loads would be out of the cache.
    least = gl.where(gl.convert_layout(valid, ROW), lower, _FAR)
    if TWO:
        has_span = gl.convert_layout(valid, ROW) & (until >= gl.maximum(since, 0))
        least = gl.minimum(least, gl.where(has_span, since, _FAR))
    # Rare, so simple: it reads the cache again by plain loads, whatever the ring holds by now.
    for j in range(gl.maximum(low, gl.min(least, 0)), high):
        if PAGED:
            page = gl.load(block_table + r.to(gl.int64) * table_r + j // P).to(gl.int64)
            k_at = page * k_block + (j % P) * k_slot
            v_at = page * v_block + (j % P) * v_slot
        elif EQUAL:
            k_at = k_begin.to(gl.int64) * k_block + j * k_slot
            v_at = k_begin.to(gl.int64) * v_block + j * v_slot
        else:
            k_at = (k_begin + j).to(gl.int64) * k_slot
            v_at = (k_begin + j).to(gl.int64) * v_slot
        s = gl.zeros([64], gl.float32, ROW)
        for h in range(0, D, 64):  # few columns at a time, read again for each key, so that this needs few registers
            q = gl.load(query + at[:, None] + h + d[None, :], mask=in_bounds & (h + d < D)[None, :], other=0.0)
            k = gl.load(key_cache + k_at + h + d, mask=h + d < D, other=0.0)
            s += gl.sum(q.to(gl.float32) * k.to(gl.float32)[None, :], 1)
        s = s * factor
        if cap is not None:
            s = cap * _tanh(s)
        allowed = j <= upper
        if HAS_LEFT:
            allowed = allowed & (j >= lower)
        if TWO:
            allowed = allowed | ((j >= since) & (j <= until))
        m_new = gl.maximum(m_i, gl.where(allowed, s, float("-inf")))
        guard = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m_i - guard)
        p = gl.where(allowed, gl.exp2(s - guard), 0.0)
        l_i = l_i * alpha + p
        m_i = m_new
        acc = _add_value(acc, p, alpha, allowed, value_cache + v_at, DV, BLOCK_V)
    return acc, m_i, l_i


@gluon.jit
def _add_value(acc, p, alpha, allowed, value, DV: gl.constexpr, BLOCK_V: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add the value at the pointer, with the rows' weights, to the accumulators, times `alpha`, of the rows that see it."""
    BLOCKS: gl.constexpr = column_blocks(DV, BLOCK_V)
    added = ()
    for i in gl.static_range(len(acc)):
        dv = BLOCKS[i][0] + gl.arange(0, BLOCKS[i][1], layout=gl.SliceLayout(0, acc[i].type.layout))
        v = gl.load(value + dv, mask=dv < DV, other=0.0).to(gl.float32)
        weighted = _of_rows(p, acc[i]) * v[None, :]
        added = added + (acc[i] * _of_rows(alpha, acc[i]) + gl.where(_of_rows(allowed, acc[i]), weighted, 0.0),)  # type: ignore[assignment]
    return added


@gluon.jit(do_not_specialize=_BATCH)
def prefill(  # type: ignore[no-untyped-def]
    output, lse, query, key_cache, value_cache, query_start_loc, seq_lens, block_table, sinks, spans, prefix, is_causal,
    counters, q_desc, k_desc, v_desc, factor, v_factor, num_reqs, num_pages, lse_h, table_r, rows,
    o_t, o_h, q_t, q_h, k_block, k_slot, k_head, v_block, v_slot, v_head, cap, left, right, min_query,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
    P: gl.constexpr, BOX: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, COPIED: gl.constexpr, PAGED: gl.constexpr, RAGGED: gl.constexpr,
    EQUAL: gl.constexpr, NEGATE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    VALUES_AT: gl.constexpr, CHUNK: gl.constexpr, SPAN_RIGHT: gl.constexpr, FAR: gl.constexpr, ENDS: gl.constexpr,
    SHARED: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    # Heads may be outermost and far apart, and a page may hold all of a request: offsets in them are of their strides' type.
    # 64 bits in each launch would cost 3 % at heads of 64, by the schedule that the compiler then finds.
    if FAR:
        o_h, q_h, k_head, v_head = o_h.to(gl.int64), q_h.to(gl.int64), k_head.to(gl.int64), v_head.to(gl.int64)
        k_slot, v_slot = k_slot.to(gl.int64), v_slot.to(gl.int64)
    if value_cache is None:
        value_cache = key_cache + VALUES_AT * k_block.to(gl.int64)  # one array holds the keys, and the values behind them
    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # dimensions of a tile are powers of two: 129 to 192 columns are three tiles of 64, but not of queries that consumers store
    PIECES: gl.constexpr = (D + 63) // 64
    K_COLUMNS: gl.constexpr = 64 if PIECES == 3 else most_columns(BLOCK_D)
    K_TILES: gl.constexpr = 3 if PIECES == 3 else BLOCK_D // K_COLUMNS
    K_BARS: gl.constexpr = 1 if PIECES == 3 else K_TILES  # blocks of a head's columns, copied one after the other
    Q_TILES: gl.constexpr = 3 if COPIED and PIECES == 3 else 1
    Q_COLUMNS: gl.constexpr = BLOCK_D if Q_TILES == 1 else 64
    PASSES: gl.constexpr = (DV + 255) // 256  # over the keys, each for some columns of the values
    q_ring = gl.allocate_shared_memory(dtype, [CONSUMERS * Q_STAGES * Q_TILES, 64, Q_COLUMNS], ring)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES * K_TILES, BLOCK_N, K_COLUMNS], ring)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_V], ring)
    units_ring = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    u_bars = _bars(2)
    q_bars = _bars(CONSUMERS * Q_STAGES)
    k_bars = _bars(STAGES * K_BARS)
    v_bars = _bars(STAGES)
    v_raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS * Q_STAGES):
        mbarrier.init(q_bars[0].index(i), count=1)
        mbarrier.init(q_bars[1].index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(u_bars[0].index(i), count=1)
        mbarrier.init(u_bars[1].index(i), count=CONSUMERS + 1)
    for i in gl.static_range(STAGES * K_BARS):
        mbarrier.init(k_bars[0].index(i), count=1)
        mbarrier.init(k_bars[1].index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(v_bars[0].index(i), count=1)
        mbarrier.init(v_bars[1].index(i), count=CONSUMERS)
    mbarrier.init(v_raw, count=1)
    fence_async_shared()
    # A launch may begin before the one before it has ended (`launch_pdl`), whose results are not read, nor its memory written,
    # before it has. Then a decode of the same batch may start on the multiprocessors that this grid leaves free.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    mask = spans, prefix, is_causal, left, right  # what rows see
    starts = query_start_loc, seq_lens, rows, num_pages  # equal requests have no lists of pages, but as many keys
    k_strides, v_strides = (k_block, k_slot, k_head), (v_block, v_slot, v_head)
    # each partition's arguments are written out: a constant cannot be assigned to a variable
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    0,
                )),
                (_produce, (
                    q_desc, k_desc, q_ring, k_ring, units_ring, q_bars, u_bars, k_bars, counters, starts, block_table, mask,
                    min_query, num_reqs, num_pages, table_r, H // G * PASSES, PASSES, G, PIECES, P, BOX, BLOCK_Q, BLOCK_N,
                    CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED, RAGGED, EQUAL, HAS_RIGHT, CHUNK, SPAN_RIGHT, SHARED, JOINED,
                )),
                (_produce_values, (
                    v_desc, v_ring, units_ring, u_bars, v_bars, v_raw, block_table, mask, num_pages, table_r, BLOCK_V, P, BOX,
                    BLOCK_Q, BLOCK_N, PASSES, STAGES, PAGED, EQUAL, VALUES_AT, CHUNK, SPAN_RIGHT, ENDS, SHARED, JOINED,
                )),
            ],
            [1, 1],
            [PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    0,
                )),
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    1,
                )),
                (_produce, (
                    q_desc, k_desc, q_ring, k_ring, units_ring, q_bars, u_bars, k_bars, counters, starts, block_table, mask,
                    min_query, num_reqs, num_pages, table_r, H // G * PASSES, PASSES, G, PIECES, P, BOX, BLOCK_Q, BLOCK_N,
                    CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED, RAGGED, EQUAL, HAS_RIGHT, CHUNK, SPAN_RIGHT, SHARED, JOINED,
                )),
                (_produce_values, (
                    v_desc, v_ring, units_ring, u_bars, v_bars, v_raw, block_table, mask, num_pages, table_r, BLOCK_V, P, BOX,
                    BLOCK_Q, BLOCK_N, PASSES, STAGES, PAGED, EQUAL, VALUES_AT, CHUNK, SPAN_RIGHT, ENDS, SHARED, JOINED,
                )),
            ],
            [4, 1, 1],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    0,
                )),
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    1,
                )),
                (_consume, (
                    output, lse, query, key_cache, value_cache, q_ring, k_ring, v_ring, units_ring, q_bars, u_bars, k_bars,
                    v_bars, block_table, sinks, factor, v_factor, cap, mask, o_t, o_h, lse_h, q_t, q_h, k_strides, v_strides,
                    table_r, G, D, DV, BLOCK_D, BLOCK_V, P, BLOCK_Q, BLOCK_N, CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED,
                    EQUAL, NEGATE, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SINKS, HAS_LSE, CHUNK, SPAN_RIGHT, PASSES, SHARED, JOINED,
                    2,
                )),
                (_produce, (
                    q_desc, k_desc, q_ring, k_ring, units_ring, q_bars, u_bars, k_bars, counters, starts, block_table, mask,
                    min_query, num_reqs, num_pages, table_r, H // G * PASSES, PASSES, G, PIECES, P, BOX, BLOCK_Q, BLOCK_N,
                    CONSUMERS, STAGES, Q_STAGES, COPIED, PAGED, RAGGED, EQUAL, HAS_RIGHT, CHUNK, SPAN_RIGHT, SHARED, JOINED,
                )),
                (_produce_values, (
                    v_desc, v_ring, units_ring, u_bars, v_bars, v_raw, block_table, mask, num_pages, table_r, BLOCK_V, P, BOX,
                    BLOCK_Q, BLOCK_N, PASSES, STAGES, PAGED, EQUAL, VALUES_AT, CHUNK, SPAN_RIGHT, ENDS, SHARED, JOINED,
                )),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
