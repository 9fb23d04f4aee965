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

Window = tuple[int | None, int | None]

#: The columns of an item. ROW is the request of a single, and otherwise the item's first row in the query buffer.
TABLE, ROW, POSITION, LOW, HIGH, BLOCKS, SINGLE, CONTEXT = range(8)
#: The columns of a tile.
PAGE, OFFSET, SOURCE, FIRST, STOP = range(5)
#: CONTEXT of an item without a tree: no key is at or past it.
NO_TREE = 2**31 - 1


class Plan(NamedTuple):
    """The lists, and the positions of each token's rows."""

    items: jax.Array  # [8 * I]: column c of item i at c * I + i
    tiles: jax.Array  # [5 * X]
    counts: jax.Array  # [2]: how many of each are real
    table: jax.Array  # [R * B plus the pages of a block]: entries may be read before it is known whether they are used
    row_of: jax.Array  # [T] the row of the query buffer that holds token t (0 for padding)
    live: jax.Array  # [T] bool: the token belongs to a request
    single: jax.Array  # [T] bool: the token is its request's only one in this batch
    request: jax.Array  # [T]
    token_of_row: jax.Array  # [M] which token each row of the query buffer holds (0 for none)
    request_of_row: jax.Array  # [M]
    token_of_slot: jax.Array  # [X * tile] the same for the rows of new keys and values


def query_rows(num_tokens: int, num_requests: int, align: int, large: int) -> int:
    """M: rows of the query buffer for any batch of T tokens in R requests, with each longer request's rows aligned."""
    padded = num_tokens + min(num_requests, num_tokens // 2) * (align - 1)
    return -(-padded // align) * align + large


def item_count(num_tokens: int, num_requests: int, large: int) -> int:
    """I: the most tiles of `large` rows that a batch of T tokens in R requests has."""
    return min(num_requests, num_tokens) + num_tokens // large


def tile_count(num_tokens: int, num_requests: int, tile: int) -> int:
    """X: the most tiles of cache rows that a batch writes to."""
    return min(2 * num_requests, num_tokens) + num_tokens // tile + 1


def make(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_table: jax.Array,
    slot_mapping: jax.Array,
    *,
    page: int,
    tile: int,
    align: int,
    large: int,
    kv_block: int,
    causal: bool,
    window: Window,
    tree_mask: jax.Array | None,
) -> Plan:
    """Make the plan of a batch: [R + 1], [R], [R, B], [T], all int32.

    Requests of more than one row are cut into items of `large` rows (a multiple of `align`).
    """
    num_requests, columns = block_table.shape
    num_tokens = slot_mapping.shape[0]
    start, q_lens = query_start_loc[:-1], jnp.diff(query_start_loc)
    context = seq_lens - q_lens
    is_tree = jnp.zeros_like(q_lens, jnp.bool_) if tree_mask is None else q_lens <= tree_mask.shape[1]
    is_single = q_lens == 1

    # Query rows: each longer request's begin at a multiple of `align`.
    region_size = jnp.where(is_single, 0, _round_up(q_lens, align))
    region_end = jnp.cumsum(region_size, dtype=jnp.int32)
    region = region_end - region_size
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request, live = _owner(query_start_loc[1:], token)
    single = live & is_single[request]
    row_of = jnp.where(live & ~single, region[request] + token - start[request], 0)
    row = jnp.arange(query_rows(num_tokens, num_requests, align, large), dtype=jnp.int32)
    request_of_row, real = _owner(region_end, row)
    within = row - region[request_of_row]
    token_of_row = jnp.where(real & (within < q_lens[request_of_row]), start[request_of_row] + within, 0)

    # Items.
    per_request = -(-q_lens // large)
    item_end = jnp.cumsum(per_request, dtype=jnp.int32)
    item = jnp.arange(item_count(num_tokens, num_requests, large), dtype=jnp.int32)
    r, _ = _owner(item_end, item)
    offset = (item - (item_end - per_request)[r]) * large
    position = context[r] + offset
    rows = jnp.minimum(q_lens[r] - offset, large)
    left, right = window
    high = seq_lens[r]
    if causal:
        high = jnp.where(is_tree[r], high, jnp.minimum(high, position + rows))
        if tree_mask is not None:  # a single has no mask except LOW and HIGH
            high -= (is_single & ~tree_mask[:, 0, 0])[r]
    if right is not None:
        high = jnp.minimum(high, position + rows + right)
    high = jnp.maximum(high, 0)
    low = jnp.zeros_like(high) if left is None else jnp.clip(position - left, 0, high)
    blocks = jnp.maximum(-(-(high - low // page * page) // kv_block), 1)
    items = jnp.stack([
        r * columns, jnp.where(is_single, jnp.arange(num_requests), region)[r] + offset, position, low, high, blocks,
        is_single[r].astype(jnp.int32),
        jnp.where(is_tree[r], context[r], NO_TREE),
    ])  # fmt: skip

    # Tiles of new rows: those of positions [context, seq) that have a slot.
    first = jnp.maximum(context, 0) // tile  # rows before the first key have no slot in the cache
    per_request = jnp.where(q_lens > 0, -(-seq_lens // tile) - first, 0)
    tile_end = jnp.cumsum(per_request, dtype=jnp.int32)
    begin = tile_end - per_request
    index = jnp.arange(tile_count(num_tokens, num_requests, tile), dtype=jnp.int32)
    r, real = _owner(tile_end, index)
    at = (first[r] + index - begin[r]) * tile
    mine = (request == jnp.arange(num_requests)[:, None]) & live & (slot_mapping >= 0)
    where = (context[request] + token - start[request])[None]
    written_from = jnp.where(mine, where, NO_TREE).min(axis=1, initial=NO_TREE)
    written_to = jnp.where(mine, where + 1, 0).max(axis=1, initial=0)
    tiles = jnp.stack([
        jnp.where(real, block_table[r, jnp.clip(at // page, 0, columns - 1)], 0), at % page, index * tile,
        jnp.clip(written_from[r] - at, 0, tile), jnp.clip(written_to[r] - at, 0, tile),
    ])  # fmt: skip
    slot = jnp.arange(index.shape[0] * tile, dtype=jnp.int32)
    r, p = r[slot // tile], at[slot // tile] + slot % tile
    fresh = real[slot // tile] & (p >= context[r]) & (p < seq_lens[r])
    token_of_slot = jnp.where(fresh, start[r] + p - context[r], 0)
    counts = jnp.stack([item_end[-1], tile_end[-1]])
    table = jnp.pad(block_table.reshape(-1), (0, kv_block // page))
    return Plan(
        items.reshape(-1), tiles.reshape(-1), counts, table, row_of, live, single, request, token_of_row, request_of_row,
        token_of_slot,
    )  # fmt: skip


def _round_up(x: jax.Array, multiple: int) -> jax.Array:
    return -(-x // multiple) * multiple


def _owner(ends: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(which of the runs that stop at `ends` contains each index, whether one does); 0 if none does."""
    owner = jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32)
    there = owner < ends.shape[0]
    return jnp.where(there, owner, 0), there
