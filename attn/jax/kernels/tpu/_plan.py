"""The kernel's plan, step by step, computed by XLA from the batch: flat tables for the scalar core.

A batch becomes *items*, each one tile of one request's query rows with the keys that those rows may see, and *tiles*, each
one aligned group of cache rows that receive new tokens. The kernel then processes the two lists without further decisions.
The length of each list is static for a bucket; the number of real entries is a value. A request of one row is a *single*:
its rows are the heads, and are stored separately from those of longer requests.

New tokens are arranged so that each is in its tile at the row it will have in the cache: a write is then whole aligned
tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn.jax.kernels.tpu._refs import PagedConfig, PagedShape
from attn.visibility import BatchMask, LayerMask, Visibility

#: The columns of an item. ROW is the request of a single, and otherwise the item's first row in the query buffer.
TABLE, ROW, POSITION, LOW, HIGH, BLOCKS, SINGLE, CONTEXT = range(8)
#: The columns of a tile.
PAGE, OFFSET, SOURCE, FIRST, STOP = range(5)
#: CONTEXT of an item without a tree: no key is at or past it.
NO_TREE = 2**31 - 1


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


class Rows(NamedTuple):
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
    """The lists, and the places of each token."""

    items: jax.Array  # [8 * I]: column c of item i at c * I + i
    tiles: jax.Array  # [5 * X]
    counts: jax.Array  # [2]: how many of each are real
    table: jax.Array  # [R * B plus the pages of a block]: entries may be read before it is known whether they are used
    rows: Rows
    token_of_slot: jax.Array  # [X * tile] which token each row of new keys and values holds (0 for none)


def shape_of(
    query: jax.Array, cache: jax.Array, batch: Batch, max_query_len: int, mask: LayerMask, *, lse: bool, write: bool
) -> PagedShape:
    """The shape of a call: query [T, H, ...] over a cache [N, planes, K, P, lanes]."""
    (num_requests, columns), (_, planes, num_kv_heads, page, lanes) = batch.block_table.shape, cache.shape
    of_heads = planes, num_kv_heads, page, lanes, query.shape[1] // num_kv_heads
    of_elements = query.dtype.itemsize, cache.dtype.itemsize
    return PagedShape(query.shape[0], num_requests, columns, max_query_len, *of_heads, *of_elements, mask, lse, write)


def fresh_tiles(cfg: PagedConfig, plan: Plan, rows: jax.Array) -> jax.Array:
    """The new tokens' rows [T, planes, K, lanes] in the plan's tiles, as `_refs.PagedRefs.fresh`."""
    fresh = rows[plan.token_of_slot]
    if not cfg.narrow:
        return fresh.transpose(1, 2, 0, 3)
    return fresh.reshape(-1, cfg.tile, *fresh.shape[1:]).transpose(0, 2, 3, 1, 4)


def make(cfg: PagedConfig, batch: Batch) -> Plan:
    """Make the plan of a batch. Requests of more than one row are cut into items of `cfg.large` rows."""
    rows, region = _rows(cfg, batch)
    items, num_items = _items(cfg, batch, region)
    tiles, num_tiles, token_of_slot = _tiles(cfg, batch, rows)
    table = jnp.pad(batch.block_table.reshape(-1), (0, cfg.kv_block // cfg.page))
    return Plan(items.reshape(-1), tiles.reshape(-1), jnp.stack([num_items, num_tiles]), table, rows, token_of_slot)


def _rows(cfg: PagedConfig, batch: Batch) -> tuple[Rows, jax.Array]:
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
    return Rows(row_of, live, single, request, token_of_row, request_of_row), region


def _items(cfg: PagedConfig, batch: Batch, region: jax.Array) -> tuple[jax.Array, jax.Array]:
    """([8, I], the number of real ones). region: [R], the first row of each request in the query buffer."""
    q_lens, context, large, tree = batch.query_lens, batch.context, max(cfg.large, 1), batch.mask.tree
    is_single = q_lens == 1
    is_tree = jnp.zeros_like(is_single) if tree is None else q_lens <= tree.shape[1]
    per_request = -(-q_lens // large)
    ends = jnp.cumsum(per_request, dtype=jnp.int32)
    item = jnp.arange(cfg.num_items, dtype=jnp.int32)
    r, _ = _owner(ends, item)
    offset = (item - (ends - per_request)[r]) * large
    position = context[r] + offset
    last = position + jnp.minimum(q_lens[r] - offset, large) - 1
    low, high = Visibility(cfg.mask).bounds(position, last, batch.seq_lens[r], ordered=cfg.mask.causal & ~is_tree[r], xp=jnp)
    if cfg.mask.causal and tree is not None:  # a single has no mask except LOW and HIGH
        high -= (is_single & ~tree[:, 0, 0])[r]
    high = jnp.maximum(high, 0)
    low = jnp.minimum(low, high)
    blocks = jnp.maximum(-(-(high - low // cfg.page * cfg.page) // cfg.kv_block), 1)
    row = jnp.where(is_single, jnp.arange(cfg.num_requests), region)[r] + offset
    of_tree = jnp.where(is_tree[r], context[r], NO_TREE)
    columns = [r * cfg.columns, row, position, low, high, blocks, is_single[r].astype(jnp.int32), of_tree]
    return jnp.stack(columns), ends[-1]


def _tiles(cfg: PagedConfig, batch: Batch, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """([5, X], the number of real ones, `token_of_slot`): tiles of the rows at positions [context, seq) that have a slot."""
    if not cfg.write:  # in cross attention the slots are not those of these rows
        return jnp.zeros((5, cfg.num_tiles), jnp.int32), jnp.int32(0), jnp.zeros(0, jnp.int32)
    start, context, request = batch.start, batch.context, rows.request
    first = jnp.maximum(context, 0) // cfg.tile  # rows before the first key have no slot in the cache
    per_request = jnp.where(batch.query_lens > 0, -(-batch.seq_lens // cfg.tile) - first, 0)
    ends = jnp.cumsum(per_request, dtype=jnp.int32)
    begin = ends - per_request
    index = jnp.arange(cfg.num_tiles, dtype=jnp.int32)
    r, real = _owner(ends, index)
    at = (first[r] + index - begin[r]) * cfg.tile
    mine = (request == jnp.arange(cfg.num_requests)[:, None]) & rows.live & (batch.slot_mapping >= 0)
    where = (context[request] + jnp.arange(cfg.num_tokens, dtype=jnp.int32) - start[request])[None]
    written_from = jnp.where(mine, where, NO_TREE).min(axis=1, initial=NO_TREE)
    written_to = jnp.where(mine, where + 1, 0).max(axis=1, initial=0)
    page = jnp.where(real, batch.block_table[r, jnp.clip(at // cfg.page, 0, cfg.columns - 1)], 0)
    written = [jnp.clip(end[r] - at, 0, cfg.tile) for end in (written_from, written_to)]
    tiles = jnp.stack([page, at % cfg.page, index * cfg.tile, *written])
    slot = jnp.arange(cfg.num_tiles * cfg.tile, dtype=jnp.int32)
    r, p = r[slot // cfg.tile], at[slot // cfg.tile] + slot % cfg.tile
    fresh = real[slot // cfg.tile] & (p >= context[r]) & (p < batch.seq_lens[r])
    return tiles, ends[-1], jnp.where(fresh, start[r] + p - context[r], 0)


def _round_up(x: jax.Array, multiple: int) -> jax.Array:
    return -(-x // multiple) * multiple


def _owner(ends: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(which of the runs that stop at `ends` contains each index, whether one does); 0 if none does."""
    owner = jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32)
    there = owner < ends.shape[0]
    return jnp.where(there, owner, 0), there
