"""The MLA kernel's body: what items compute on the blocks that `_pages` loads, where a page is both keys and values.

Every row of an item, one per head and token, reads all of a block: rows are on sublanes, keys on lanes in the scores, and
the block is the stationary side of both products. That costs the same whether 16 or 256 rows pass it, and this determines
the kernel's speed.

There are two kinds of item, which differ only in the number and the source of their rows: one token of a request that has
just one (a decode), or up to `large` tokens of a longer one. Scores are in units of log2; m (their reference), l (sum) and
acc are float32 and double-buffered: a block reads one buffer and writes the other, so that it can be repeated. Only blocks
with a masked score compute masks; unused slots may contain NaN, so in such blocks values are zeroed first.

One-byte codes are multiplied as they are where the matrix unit takes them: widening them costs more than the products.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu import _pages, _plan
from attn.jax.kernels.tpu._pages import Item, copy
from attn.jax.kernels.tpu._refs import (
    LANES,
    LOG2_E,
    PagedConfig,
    PagedRefs,
    Ref,
    dot,
    rebiased,
    rows_at,
    widen,
    widened_exactly,
)

#: How far from 1, in powers of two, a sum of exponentials may be before its block is repeated with `_exact`.
_ROOM = 60.0

#: What the scalars of `factors` multiply: scores (into units of log2), and outputs.
SCORES, OUTPUTS = range(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PagedConfig):
    """The static configuration. A row of the cache is `lanes` wide; its first `values` columns are the value."""

    values: int
    staged: bool  # keys enter products from `wide`, since they are not multiplied as they are stored
    rebiased: bool  # the cache is float8_e4m3fn, read as another format: see `rebiased`


@dataclasses.dataclass(frozen=True)
class Rows:
    """Refs for the items of one kind. S: their rows; the first three are in HBM, by request or packed."""

    tokens: int
    query: Ref  # [R, S, lanes] or [rows of all, lanes]
    out: Ref  # the same with `values` lanes
    q: Ref  # [2, S, lanes] in VMEM
    o: Ref  # [S, values]
    m: Ref  # [2, S, 128] float32, as are the next ones: before and after a block
    l: Ref  # noqa: E741
    acc: Ref  # [2, S, values]
    lse: Ref = None  # [R, S, 128] or [rows of all, 128] in HBM
    lse_rows: Ref = None  # [S, 128]
    order: Ref = None  # [S, 128] int32: a row's token within the item


class Block(NamedTuple):
    """The keys in `slot`, from position `begin` on, for an item whose sums so far are in buffer `before`.

    masked: some row may not see some of them.
    """

    item: Item
    slot: jax.Array
    begin: jax.Array
    before: jax.Array
    masked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs(PagedRefs):
    """Refs passed to the kernel; None for those this launch does not use."""

    factors: Ref  # [2] float32 in SMEM
    turn: Ref  # [2] in SMEM: which buffer of the sums is current, and whether the block must be repeated
    single: Rows
    long: Rows | None = None
    wide: Ref = None  # [kv_block, lanes]: a block's keys as they are multiplied
    lost: Ref = None  # [8, 128] int32, above 0 where a NaN of the cache was lost


def run(cfg: Config, refs: Refs) -> None:
    """The whole launch."""
    if cfg.write:
        _pages.write(cfg, refs)
    loads = _pages.Loads(cfg, refs, refs.counts[0])
    _pages.attend(cfg, refs, loads, _kind(cfg, refs, refs.single), None if refs.long is None else _kind(cfg, refs, refs.long))


def _kind(cfg: Config, refs: Refs, rows: Rows) -> _pages.ItemOps:
    def place(ref: Ref, i: jax.Array) -> Ref:
        row = refs.items[_plan.ROW * cfg.num_items + i]
        if rows is refs.single:
            return ref.at[row]
        return ref.at[pl.ds(pl.multiple_of(row * cfg.group, cfg.align * cfg.group), rows.q.shape[1])]

    def queries(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        return [copy(place(rows.query, i), rows.q.at[slot], refs.q_sem.at[slot])]

    def outputs(i: jax.Array) -> list[Any]:
        copies = [copy(rows.o, place(rows.out, i), refs.o_sem)]
        return copies + ([copy(rows.lse_rows, place(rows.lse, i), refs.o_sem)] if cfg.lse else [])

    def attend(item: Item, begin: jax.Array, slot: jax.Array) -> None:
        stop = begin + cfg.kv_block
        clear = stop <= item.high  # whether every row sees every key
        if cfg.mask.causal and rows is refs.long:
            clear &= stop <= item.position + 1
        before = refs.turn[0]
        refs.turn[0], refs.turn[1] = 1 - before, jnp.int32(0)

        def go(masked: bool) -> None:
            if masked:
                _pages.clean(cfg, refs, slot, item.low - begin, item.high - begin, cfg.kv_block // cfg.tile)
            _by_tiles(cfg, rows, lambda at: _stream(cfg, refs, rows, Block(item, slot, begin, before, masked), at))

        pl.when(clear)(lambda: go(False))
        pl.when(jnp.logical_not(clear))(lambda: go(True))

        @pl.when(refs.turn[1] > 0)
        def _() -> None:
            _by_tiles(cfg, rows, lambda at: _exact(cfg, refs, rows, Block(item, slot, begin, before, True), at))

    return _pages.ItemOps(queries, outputs, lambda: _reset(refs, rows), attend, lambda: _finish(cfg, refs, rows))


def _reset(refs: Refs, rows: Rows) -> None:
    refs.turn[0] = 0
    rows.m[0] = jnp.full(rows.m.shape[1:], -jnp.inf, jnp.float32)
    rows.l[0] = jnp.zeros(rows.l.shape[1:], jnp.float32)
    rows.acc[0] = jnp.zeros(rows.acc.shape[1:], jnp.float32)


def _by_tiles(cfg: Config, rows: Rows, do: Callable[[Any], None]) -> None:
    """Call do(rows of a tile) for all rows of an item."""
    number = rows.q.shape[1]
    row_tile = cfg.row_tile if number % cfg.row_tile == 0 else number

    def tile(n: jax.Array, _: None) -> None:
        do(pl.ds(pl.multiple_of(n * row_tile, row_tile), row_tile))

    lax.fori_loop(0, number // row_tile, tile, None, unroll=number == row_tile)


def _seen(cfg: Config, rows: Rows, block: Block, at: Any, start: Any) -> jax.Array:
    """Whether the rows `at` see the keys of the tile at `start`: [rows, keys]."""
    j = block.begin + start + lax.broadcasted_iota(jnp.int32, (at.size, cfg.key_tile), 1)
    visible = j < block.item.high
    if cfg.mask.causal and rows.order is not None:
        visible &= j <= block.item.position + widen(rows.order[at, :], cfg.key_tile)
    return visible


def _scores(cfg: Config, refs: Refs, rows: Rows, block: Block, at: Any, start: Any, keys: jax.Array) -> jax.Array:
    s = dot(rows.q[block.item.q_slot, at, :], keys, 1, 1) * refs.factors[SCORES]
    return jnp.where(_seen(cfg, rows, block, at, start), s, -jnp.inf) if block.masked else s


def _stream(cfg: Config, refs: Refs, rows: Rows, block: Block, at: Any) -> None:
    """Process a block for the rows `at` in one pass.

    Products of keys run a tile ahead of the exponentials, and products of values a tile behind them. Exponentials are relative
    to the maximum of the rows' scores so far and of the first tile, so that no tile waits for the scores of all. If a sum shows
    that later scores are much larger, or that a number is not finite, `turn[1]` is set, and `_exact` must follow.
    """
    before, after, dtype = block.before, 1 - block.before, rows.q.dtype
    tiles = [pl.ds(start, cfg.key_tile) for start in range(0, cfg.kv_block, cfg.key_tile)]
    scores: list[jax.Array] = []
    weights: list[jax.Array] = []
    if cfg.rebiased:
        refs.lost[...] = jnp.zeros(refs.lost.shape, jnp.int32)

    def keys(tile: Any) -> jax.Array:
        codes = rows_at(cfg, refs, block.slot, 0, 0, tile)
        if not cfg.staged:
            return codes
        ready = rebiased(codes, refs.lost) if cfg.rebiased else codes.astype(refs.wide.dtype)
        refs.wide[tile, :] = ready
        return ready

    def values(tile: Any) -> jax.Array:
        return refs.wide[tile, : cfg.values] if cfg.staged else refs.kv[block.slot, 0, 0, tile, : cfg.values]

    for n in range(len(tiles) + 2):
        if n < len(tiles):
            scores.append(_scores(cfg, refs, rows, block, at, tiles[n].start, keys(tiles[n])))
        if n == 1:
            m = rows.m[before, at, :]
            base = jnp.maximum(m, jnp.max(scores[0], axis=1, keepdims=True))
            rescale = jnp.exp2(m - base)
            sums = jnp.zeros((at.size, min(cfg.key_tile, LANES)), jnp.float32)
            acc = rows.acc[before, at, :] * widen(rescale, cfg.values)
        if 1 <= n <= len(tiles):
            p = jnp.exp2(scores[n - 1] - widen(base, cfg.key_tile))
            for lane in range(0, cfg.key_tile, LANES):
                sums += p[:, lane : lane + LANES]
            weights.append(p.astype(dtype))
        if n > len(tiles):
            total = rows.l[before, at, :] * rescale + jnp.sum(sums, axis=1, keepdims=True)
            rows.m[after, at, :], rows.l[after, at, :] = base, total
            strange = jnp.where((total >= 2.0**-_ROOM) & (total <= 2.0**_ROOM), 0, 1)
            if cfg.rebiased:
                strange = jnp.maximum(strange, jnp.max(refs.lost[...]))
            refs.turn[1] |= jnp.max(strange)  # before the last product, since a scalar takes long to arrive
        if n >= 2:
            acc += dot(weights[n - 2], values(tiles[n - 2]), 1, 0)
    rows.acc[after, at, :] = acc
    if block.masked and cfg.mask.causal and rows.order is not None:  # a weight of 0 does not keep NaN out of a sum
        refs.turn[1] |= jnp.max(jnp.where(jnp.abs(acc) < jnp.inf, 0, 1))


def _exact(cfg: Config, refs: Refs, rows: Rows, block: Block, at: Any) -> None:
    """The same relative to the maximum of all scores, where no row is affected by numbers that it does not see."""
    dtype, after = rows.q.dtype, 1 - block.before

    def tile(n: jax.Array, _: None) -> None:
        start, source = pl.multiple_of(n * cfg.key_tile, cfg.key_tile), jnp.where(n == 0, block.before, after)
        keys = widened_exactly(cfg, rows_at(cfg, refs, block.slot, 0, 0, pl.ds(start, cfg.key_tile)))
        s = _scores(cfg, refs, rows, block, at, start, keys.astype(dtype))
        m, total = rows.m[source, at, :], rows.l[source, at, :]
        so_far = jnp.where(total == 0, -jnp.inf, m + jnp.log2(total))
        new = jnp.maximum(so_far, jnp.max(s, axis=1, keepdims=True))
        new = jnp.where(new == -jnp.inf, 0.0, new)
        p, rescale = jnp.exp2(s - widen(new, cfg.key_tile)), jnp.where(total == 0, 0.0, jnp.exp2(m - new))
        rows.m[after, at, :], rows.l[after, at, :] = new, total * rescale + jnp.sum(p, axis=1, keepdims=True)
        part = _select(p.astype(dtype), _seen(cfg, rows, block, at, start), keys[:, : cfg.values])
        rows.acc[after, at, :] = rows.acc[source, at, :] * widen(rescale, cfg.values) + part

    lax.fori_loop(0, cfg.kv_block // cfg.key_tile, tile, None)


def _select(p: jax.Array, seen: jax.Array, wide: jax.Array) -> jax.Array:
    """p [rows, keys] times values [keys, n] in float32, where a row includes only the values it sees, NaN and infinities among
    them."""
    part = dot(p, jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(p.dtype), 1, 0)
    attends = jnp.where(seen, 1.0, 0.0).astype(p.dtype)
    for what, mark in ((wide == jnp.inf, jnp.inf), (wide == -jnp.inf, -jnp.inf), (wide != wide, jnp.nan)):
        part += jnp.where(dot(attends, jnp.where(what, 1.0, 0.0).astype(p.dtype), 1, 0) > 0, mark, 0.0)
    return part


def _finish(cfg: Config, refs: Refs, rows: Rows) -> None:
    """Write acc / l into `o`, and the natural log-sum-exp into `lse_rows`."""
    now = refs.turn[0]
    m, total = rows.m[now], rows.l[now]
    normaliser = jnp.where(total == 0.0, 0.0, refs.factors[OUTPUTS] / jnp.where(total == 0.0, 1.0, total))
    rows.o[...] = (rows.acc[now] * widen(normaliser, cfg.values)).astype(rows.o.dtype)
    if cfg.lse:
        rows.lse_rows[...] = (m + jnp.log2(total)) * (1 / LOG2_E)
