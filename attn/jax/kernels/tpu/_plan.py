"""The kernel's plan, step by step, computed by XLA from the batch: flat tables for the scalar core.

A batch becomes *items*, each one tile of one request's query rows with the keys that those rows may see, and *tiles*, each
one aligned group of cache rows that receive new tokens. The kernel then processes the two lists without further decisions.
The length of each list is static for a bucket; the number of real entries is a value. A request of one row is a *single*:
its rows are the heads, and are stored separately from those of longer requests. With a line (`_line`) singles are the first
items, and BLOCKS is how many segments of it they are.

New tokens are arranged so that each is in its tile at the row it will have in the cache: a write is then whole aligned
tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn.jax.kernels.tpu._refs import PagedConfig, PagedShape
from attn.visibility import BatchMask, LayerMask, Visibility

#: The columns of an item. ROW is the request of a single, and otherwise the item's first row in the query buffer; END is the
#: length of its request. If the plan lists ranges, every row sees the keys from CLEAR to CLEAR_STOP, none those between a pair
#: of columns from GAPS on, and MORE is whether any row has more ranges than the first.
TABLE, ROW, POSITION, LOW, HIGH, BLOCKS, SINGLE, CONTEXT, END, CLEAR, CLEAR_STOP, MORE, GAPS = range(13)
#: Instead of those of ranges, if items may share a block: the first and the last item that do so with an item, and how many
#: pages of it the item's steps read.
GROUP, GROUP_LAST, READ = CLEAR, CLEAR_STOP, MORE
#: The last columns if new rows are written late: the first tile of the item's request, and the position of its first row.
NEW_TILE, NEW_AT = -2, -1
#: The columns of a tile.
PAGE, OFFSET, SOURCE, FIRST, STOP = range(5)
#: The columns of a run: PAGE, and its first row among the new ones; of a request's last page also how many tiles new rows fill.
RUN_SOURCE, RUN_TILES = 1, 2
#: CONTEXT of an item without a tree: no key is at or past it.
NO_TREE = 2**31 - 1
#: The first key and the stop of a range without keys.
EMPTY = 2**31 - 1, -1


def columns(cfg: PagedConfig) -> int:
    """The number of columns of an item."""
    of_ranges = GAPS - CLEAR + 2 * (cfg.ranges - 1) if cfg.ranges else 0
    return CLEAR + of_ranges + (3 if cfg.shares else 0) + (2 if cfg.late else 0)


class Batch(NamedTuple):
    """The arrays of a call that describe its requests, int32, and what their rows see."""

    query_start_loc: jax.Array  # [R + 1]
    seq_lens: jax.Array  # [R]
    block_table: jax.Array  # [R, B]
    slot_mapping: jax.Array  # [T]
    mask: BatchMask = BatchMask()

    @property
    def start(self) -> jax.Array:
        return self.query_start_loc[:-1]

    @property
    def query_lens(self) -> jax.Array:
        return jnp.diff(self.query_start_loc)

    @property
    def context(self) -> jax.Array:
        """The position of each request's first row: [R]."""
        return self.seq_lens - self.query_lens


class RowMap(NamedTuple):
    """Where each token's query row is, [T], and which token each row of the query buffer holds, [M]."""

    row_of: jax.Array  # the row that holds token t (0 for padding)
    live: jax.Array  # bool: the token belongs to a request
    single: jax.Array  # bool: the token is its request's only one in this batch
    request: jax.Array
    token_of_row: jax.Array  # 0 for none
    request_of_row: jax.Array

    def by_token(self, single: jax.Array, long: jax.Array | None, fill: float) -> jax.Array:
        """[R, H, E] of singles and [M, H, E] of the query buffer, if there is one -> [T, H, E], `fill` for padding."""
        rows = single[self.request]
        if long is not None:
            rows = jnp.where(self.single[:, None, None], rows, long[self.row_of])
        return jnp.where(self.live[:, None, None], rows, fill)


class Plan(NamedTuple):
    """The lists of items, tiles and runs, and the query row and cache tile of each token."""

    items: jax.Array  # [columns * I]: column c of item i at c * I + i
    tiles: jax.Array  # [5 * X]
    counts: jax.Array  # how many of each are real, with a line how many items are singles, which come first, and its blocks
    # [R * B plus the pages of a block]: entries may be read before it is known whether they are used; -1 - n for a page that
    # a long request reads from the new rows, where its first row is in tile n
    table: jax.Array
    # [2 * Y] pages that new rows fill, and [3 * R] last pages of which they fill tiles. Of the last four counts, two are how
    # many of the latter and of the former are real, each followed by a flag: that no key is read from a page of `tiles`, all
    # of which fit the ring; and that a single sees a page that is filled.
    runs: jax.Array | None
    rows: RowMap
    token_of_slot: jax.Array  # [X * tile] which token each row of new keys and values holds (0 for none)
    ranges: jax.Array | None  # [I, 8, large]: of each row of an item, first key and stop of each of its ranges


def shape_of(
    query: jax.Array, cache: jax.Array, batch: Batch, max_query_len: int, mask: LayerMask, *, lse: bool, write: bool
) -> PagedShape:
    """The shape of a call: query [T, H, ...] over a cache [N, planes, K, P, lanes]."""
    (num_requests, columns), (_, planes, num_kv_heads, page, lanes) = batch.block_table.shape, cache.shape
    # as many as have eight bytes for each of the others' tokens
    scale_heads = -(-8 * num_kv_heads // (lanes + 8)) if cache.dtype == jnp.uint8 else 0
    num_kv_heads -= scale_heads
    of_heads = planes, num_kv_heads, page, lanes, query.shape[1] // num_kv_heads
    of_elements = query.dtype.itemsize, cache.dtype.itemsize
    described = batch.mask._replace(tree=None)
    # without a window a row's first range begins where its prefix does, so that one is both
    separate_prefix = described.prefix is not None and (mask.window[0] is not None or batch.mask.tree is not None)
    ranges = 0 if described.is_plain else 1 + (described.spans is not None) + separate_prefix
    of_batch = query.shape[0], num_requests, columns, max_query_len
    return PagedShape(*of_batch, *of_heads, *of_elements, mask, lse, write, ranges, scale_heads)


def fresh_tiles(cfg: PagedConfig, plan: Plan, rows: jax.Array) -> jax.Array:
    """The new tokens' rows [T, planes, K, lanes] in the plan's tiles, as `_refs.PagedRefs.fresh`."""
    fresh = rows[plan.token_of_slot]
    if not cfg.narrow:
        return fresh.transpose(1, 2, 0, 3)
    return fresh.reshape(-1, cfg.tile, *fresh.shape[1:]).transpose(0, 2, 3, 1, 4)


def make(cfg: PagedConfig, batch: Batch) -> Plan:
    """Make the plan of a batch. Requests of more than one row are split into items of `cfg.large` rows."""
    rows, region = _rows(cfg, batch)
    items, counts, ranges = _items(cfg, batch, rows, region)
    tiles, runs, lasts, token_of_slot, new = _tiles(cfg, batch, rows)
    table, listed = batch.block_table, None
    counts.insert(1, tiles.number)
    if cfg.late:
        # an item's request, by where its entries of the table begin
        request = items[TABLE] // cfg.columns
        items = jnp.concatenate([items, jnp.stack(new)[:, request]])
        # Such a page must be written before its other reader loads it.
        used = jnp.arange(cfg.columns) * cfg.page < batch.seq_lens[:, None]
        page, stop = tiles.columns[PAGE], tiles.columns[STOP]
        of_tile = used & (table == page[:, None, None]) & (stop > tiles.columns[FIRST])[:, None, None]
        counts.append((jnp.sum(of_tile, dtype=jnp.int32) > jnp.sum(stop > tiles.columns[FIRST])).astype(jnp.int32))
    if runs and lasts:
        listed = jnp.concatenate([runs.columns.reshape(-1), lasts.columns.reshape(-1)])
        page, source = jnp.where(jnp.arange(cfg.num_runs) < runs.number, runs.columns, -1)
        source_tile = jnp.max(jnp.where(table == page[:, None, None], source[:, None, None] // cfg.tile, -1), axis=0)
        single = batch.query_lens[:, None] == 1
        table = jnp.where((source_tile >= 0) & ~single, -1 - source_tile, table)
        at_last = lasts.is_new[:, None] & (jnp.arange(cfg.columns) == lasts.at[:, None])
        table = jnp.where(at_last, -1 - lasts.source[:, None] // cfg.tile, table)
        counts += [lasts.number, lasts.alone, runs.number, jnp.any((source_tile >= 0) & single).astype(jnp.int32)]
    table = jnp.pad(table.reshape(-1), (0, cfg.kv_block // cfg.page))
    return Plan(items.reshape(-1), tiles.columns.reshape(-1), jnp.stack(counts), table, listed, rows, token_of_slot, ranges)


def _rows(cfg: PagedConfig, batch: Batch) -> tuple[RowMap, jax.Array]:
    """(the rows of the query buffer, where each longer request begins at a multiple of `align`; its first row [R])."""
    start, q_lens = batch.start, batch.query_lens
    region_size = jnp.where(q_lens == 1, 0, _round_up(q_lens, cfg.align))
    region_end = jnp.cumsum(region_size, dtype=jnp.int32)
    region = region_end - region_size
    token = jnp.arange(cfg.num_tokens, dtype=jnp.int32)
    request, live = _owner(batch.query_start_loc[1:], token)
    single = live & (q_lens == 1)[request]
    row_of = jnp.where(live & ~single, region[request] + token - start[request], 0)
    row = jnp.arange(cfg.num_rows, dtype=jnp.int32)
    request_of_row, real = _owner(region_end, row)
    within = row - region[request_of_row]
    token_of_row = jnp.where(real & (within < q_lens[request_of_row]), start[request_of_row] + within, 0)
    return RowMap(row_of, live, single, request, token_of_row, request_of_row), region


def _items(
    cfg: PagedConfig, batch: Batch, rows: RowMap, region: jax.Array
) -> tuple[jax.Array, list[jax.Array], jax.Array | None]:
    """([columns, I], `Plan.counts` without that of tiles, `Plan.ranges`).

    region: [R], each request's first row in the query buffer.
    """
    q_lens, context, large, tree = batch.query_lens, batch.context, max(cfg.large, 1), batch.mask.tree
    is_single = q_lens == 1
    is_tree = jnp.zeros_like(is_single) if tree is None else q_lens <= tree.shape[1]
    per_request = -(-q_lens // large)
    # the line of singles comes first
    order = jnp.argsort(~is_single, stable=True) if cfg.segment and cfg.large else jnp.arange(cfg.num_requests)
    ends = jnp.cumsum(per_request[order], dtype=jnp.int32)
    item = jnp.arange(cfg.num_items, dtype=jnp.int32)
    at, real = _owner(ends, item)
    r = order[at].astype(jnp.int32)
    offset = (item - (ends - per_request[order])[at]) * large
    position = context[r] + offset
    last = position + jnp.minimum(q_lens[r] - offset, large) - 1
    of_tree = jnp.where(is_tree[r], context[r], NO_TREE)
    more: list[jax.Array] = []
    ranges = None
    if cfg.ranges:
        within = offset[:, None] + jnp.arange(large, dtype=jnp.int32)
        token = jnp.where(within < q_lens[r][:, None], batch.start[r][:, None] + within, cfg.num_tokens)
        (low, high), more, ranges = _seen_by_items(_ranges(cfg, batch, rows, is_tree), token, of_tree)
    else:
        low, high = Visibility(cfg.mask).bounds(
            position, last, batch.seq_lens[r], ordered=cfg.mask.causal & ~is_tree[r], xp=jnp
        )
        if cfg.mask.causal and tree is not None:  # a single has no mask except LOW and HIGH
            high -= (is_single & ~tree[:, 0, 0])[r]
    high = jnp.maximum(high, 0)
    low = jnp.minimum(low, high)
    origin = low // cfg.page * cfg.page
    blocks = jnp.maximum(-(-(high - origin) // cfg.kv_block), 1)
    if cfg.shares:
        may_share = real & ~is_single[r] & (blocks == 1)
        is_same = (r[1:] == r[:-1]) & (origin[1:] == origin[:-1]) & may_share[1:] & may_share[:-1]
        first = lax.cummax(jnp.where(jnp.pad(is_same, (1, 0)), 0, item))
        last = lax.cummin(jnp.where(jnp.pad(is_same, (0, 1)), NO_TREE, item), reverse=True)
        size = cfg.per_part * cfg.page  # parts of a block arrive as a whole
        read = _round_up(_round_up(high - origin, cfg.least), size) // cfg.page
        more = [first, last, jnp.minimum(read, -(-(high[last] - origin) // cfg.page))]
    counts = [ends[-1]]
    if cfg.segment:
        of_line = is_single[r] & real
        blocks = jnp.where(of_line, jnp.maximum(-(-(high - origin) // cfg.segment), 1), blocks)
        visited = blocks
        for gap in zip(more[GAPS - CLEAR :: 2], more[GAPS - CLEAR + 1 :: 2], strict=True):  # whole segments are skipped
            first, stop = ((x - origin + up) // cfg.segment for x, up in zip(gap, (cfg.segment - 1, 0), strict=True))
            visited -= jnp.maximum(stop - first, 0)
        total = jnp.sum(jnp.where(of_line, visited, 0), dtype=jnp.int32)
        counts += [jnp.sum(of_line, dtype=jnp.int32), -(-total // cfg.segments)]
    row = jnp.where(is_single, jnp.arange(cfg.num_requests), region)[r] + offset
    kind = [is_single[r].astype(jnp.int32), of_tree, batch.seq_lens[r]]
    columns = [r * cfg.columns, row, position, low, high, blocks, *kind, *more]
    return jnp.stack(columns), counts, ranges


def _ranges(cfg: PagedConfig, batch: Batch, rows: RowMap, is_tree: jax.Array) -> jax.Array:
    """[n, 2, T]: the first key and the stop of each range that each token's row sees, the tree's edges apart.

    The first is that of causality and the window, extended by every other that touches it. One without keys is `EMPTY`.
    """
    request, mask, layer = rows.request, batch.mask, cfg.mask
    position = (batch.context - batch.start)[request] + jnp.arange(cfg.num_tokens, dtype=jnp.int32)

    def bounds(layer: LayerMask, ordered: jax.Array | bool = False) -> tuple[jax.Array, jax.Array]:
        return Visibility(layer).bounds(position, position, batch.seq_lens[request], ordered=ordered, xp=jnp)

    ordered = layer.causal & ~is_tree[request] if mask.is_causal is None else mask.is_causal[request]
    ranges = [bounds(layer, ordered)]
    if layer.causal and mask.tree is not None:  # a single has no mask except its ranges
        low, high = ranges[0]
        ranges = [(low, high - (rows.single & ~mask.tree[request, 0, 0]))]
    if mask.spans is not None:
        left, right = layer.window if layer.span_window else (None, None)
        low, high = bounds(layer._replace(window=(left, right or None)))  # a right bound of 0 is causality
        ranges.append((jnp.maximum(low, mask.spans[:, 0]), jnp.minimum(high, mask.spans[:, 1] + 1)))
    if mask.prefix is not None:
        low, high = bounds(layer._replace(window=(None, None)))
        ranges.append((low, jnp.minimum(high, mask.prefix[request])))
    ranges = [(jnp.where(low < high, low, EMPTY[0]), jnp.where(low < high, high, EMPTY[1])) for low, high in ranges]
    # one of two may touch the first only after the other is joined to it; a prefix that is not listed must be joined first
    for k in range(1, len(ranges)) if len(ranges) < 3 else (2, 1, 2):
        (low, high), (other_low, other_high) = ranges[0], ranges[k]
        join = (other_low < other_high) & ((high < 0) | ((other_low <= high) & (low <= other_high))) & ~is_tree[request]
        ranges[0] = jnp.where(join, jnp.minimum(low, other_low), low), jnp.where(join, jnp.maximum(high, other_high), high)
        ranges[k] = jnp.where(join, EMPTY[0], other_low), jnp.where(join, EMPTY[1], other_high)
    return jnp.stack([jnp.stack(pair) for pair in ranges[: cfg.ranges]])


def _seen_by_items(
    ranges: jax.Array, token: jax.Array, of_tree: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array], jax.Array]:
    """(LOW and HIGH, the columns from CLEAR on, `Plan.ranges`) of items, by the ranges of tokens, `_ranges`.

    token: [I, large], which token is in each row of each item, T for none; of_tree: CONTEXT.
    """
    none = jnp.broadcast_to(jnp.array(EMPTY, jnp.int32)[:, None], (*ranges.shape[:2], 1))
    of_rows = jnp.concatenate([ranges, none], axis=2)[:, :, token]  # [n, 2, I, large]
    real = token < ranges.shape[2]
    clear_low = jnp.max(jnp.where(real, of_rows[0, 0], -1), axis=1)
    clear_high = jnp.min(jnp.where(real, of_rows[0, 1], EMPTY[0]), axis=1)
    # the keys between the least and the greatest of each range, in order, and what is between those
    low, high = lax.sort((of_rows[:, 0].min(axis=2), of_rows[:, 1].max(axis=2)), dimension=0, num_keys=1)
    high = lax.cummax(high, axis=0)
    gaps = [(high[k], jnp.where(low[k + 1] == EMPTY[0], 0, low[k + 1])) for k in range(len(ranges) - 1)]
    rows = of_rows.reshape(-1, *token.shape).transpose(1, 0, 2)
    rows = jnp.pad(rows, ((0, 0), (0, 8 - rows.shape[1]), (0, 0)))
    more = (of_rows[1:, 1] >= 0).any(axis=(0, 2)).astype(jnp.int32)
    return (low[0], high[-1]), [clear_low, jnp.minimum(clear_high, of_tree), more, *(x for gap in gaps for x in gap)], rows


class _Copies(NamedTuple):
    """A list of copies: [columns, the most], and how many are real."""

    columns: jax.Array
    number: jax.Array


class _LastPages(NamedTuple):
    """The last pages of requests, of which new rows fill tiles, and which of them are read from the new rows."""

    columns: jax.Array
    number: jax.Array
    is_new: jax.Array  # [R] bool
    at: jax.Array  # [R], the page's column of the table
    source: jax.Array  # [R], its first row among the new ones
    alone: jax.Array  # the flag of `Plan.runs`


def _tiles(
    cfg: PagedConfig, batch: Batch, rows: RowMap
) -> tuple[_Copies, _Copies | None, _LastPages | None, jax.Array, tuple[jax.Array, jax.Array]]:
    """(tiles of the rows at positions [context, seq) that have a slot, pages that such rows fill, last pages of which they
    fill tiles, `token_of_slot`, of each request its first tile and the position of that).

    Tiles that are in the second or third list are among the new rows, but not in the first.
    """
    if not cfg.write:  # in cross attention the slots are not those of these rows
        none = jnp.zeros(0, jnp.int32)
        return _Copies(jnp.zeros((5, cfg.num_tiles), jnp.int32), jnp.int32(0)), None, None, none, (none, none)
    start, context, request = batch.start, batch.context, rows.request
    first = jnp.maximum(context, 0) // cfg.tile  # rows before the first key have no slot in the cache
    per_request = jnp.where(batch.query_lens > 0, -(-batch.seq_lens // cfg.tile) - first, 0)
    ends = jnp.cumsum(per_request, dtype=jnp.int32)
    begin = ends - per_request
    index = jnp.arange(cfg.num_tiles, dtype=jnp.int32)
    r, real = _owner(ends, index)
    at = (first[r] + index - begin[r]) * cfg.tile
    of_request = (request == jnp.arange(cfg.num_requests)[:, None]) & rows.live & (batch.slot_mapping >= 0)
    position = (context[request] + jnp.arange(cfg.num_tokens, dtype=jnp.int32) - start[request])[None]
    written_from = jnp.where(of_request, position, NO_TREE).min(axis=1, initial=NO_TREE)
    written_to = jnp.where(of_request, position + 1, 0).max(axis=1, initial=0)

    def page_of(r: jax.Array, at: jax.Array) -> jax.Array:
        return batch.block_table[r, jnp.clip(at // cfg.page, 0, cfg.columns - 1)]

    slot = jnp.arange(cfg.num_tiles * cfg.tile, dtype=jnp.int32)
    owner, p = r[slot // cfg.tile], at[slot // cfg.tile] + slot % cfg.tile
    fresh = real[slot // cfg.tile] & (p >= context[owner]) & (p < batch.seq_lens[owner])
    token_of_slot = jnp.where(fresh, start[owner] + p - context[owner], 0)
    runs, lasts, source = None, None, index * cfg.tile
    if cfg.num_runs:
        token_of_slot = jnp.pad(token_of_slot, (0, cfg.page - cfg.tile))  # the last page is read as a whole
        per_page = cfg.page // cfg.tile
        from_page = -(-jnp.minimum(written_from, written_to + cfg.page) // cfg.page)
        whole = jnp.maximum(written_to // cfg.page - from_page, 0)
        run = jnp.arange(cfg.num_runs, dtype=jnp.int32)
        stops = jnp.cumsum(whole, dtype=jnp.int32)
        owner, _ = _owner(stops, run)
        run_at = from_page[owner] + run - (stops - whole)[owner]
        run_source = (begin[owner] - first[owner]) * cfg.tile + run_at * cfg.page
        runs = _Copies(jnp.stack([page_of(owner, run_at * cfg.page), run_source]), stops[-1])
        # a last page whose rows are all new and written; what other requests see of it may not be
        last_at, rest = written_to // cfg.page, written_to % cfg.page
        last_page = page_of(jnp.arange(cfg.num_requests), last_at * cfg.page)
        is_used = jnp.arange(cfg.columns) * cfg.page < batch.seq_lens[:, None]
        users = jnp.sum(is_used & (batch.block_table == last_page[:, None, None]), axis=(1, 2))
        is_new = (written_to == batch.seq_lens) & (rest > 0) & (last_at >= from_page)
        is_new &= (users == 1) & (batch.query_lens > 1)
        last_source = (begin - first) * cfg.tile + last_at * cfg.page
        filled = jnp.where(is_new, rest // cfg.tile, 0)
        stops = jnp.cumsum(filled > 0, dtype=jnp.int32)
        owner, _ = _owner(stops, jnp.arange(cfg.num_requests))
        of_lasts = jnp.stack([last_page, last_source, filled])[:, owner]
        left = per_request - whole * per_page - filled
        ends = jnp.cumsum(left, dtype=jnp.int32)
        r, real = _owner(ends, index)
        nth = index - (ends - left)[r]
        nth += jnp.where(nth >= (from_page * per_page - first)[r], (whole * per_page + filled)[r], 0)
        at, source = (first[r] + nth) * cfg.tile, (begin[r] + nth) * cfg.tile
    page = jnp.where(real, page_of(r, at), 0)
    written = [jnp.clip(end[r] - at, 0, cfg.tile) for end in (written_from, written_to)]
    if runs:
        is_read = real & (written[0] < written[1]) & ~(is_new[r] & (at >= (last_at * cfg.page)[r]))
        alone = (~jnp.any(is_read) & (ends[-1] <= cfg.ring)).astype(jnp.int32)
        lasts = _LastPages(of_lasts, stops[-1], is_new, last_at, last_source, alone)
    tiles = _Copies(jnp.stack([page, at % cfg.page, source, *written]), ends[-1])
    return tiles, runs, lasts, token_of_slot, (begin, first * cfg.tile)


def _round_up(x: jax.Array, multiple: int) -> jax.Array:
    return -(-x // multiple) * multiple


def _owner(ends: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(which of the runs that stop at `ends` contains each index, whether one does); 0 if none does."""
    owner = jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32)
    inside = owner < ends.shape[0]
    return jnp.where(inside, owner, 0), inside
