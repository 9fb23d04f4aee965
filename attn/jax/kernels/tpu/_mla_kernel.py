"""The MLA kernel's body: what items compute on the blocks that `_pages` loads, where a page is both keys and values.

Every row of an item, one per head and token, reads all of a block: rows are on sublanes, keys on lanes in the scores, and
the block is the stationary side of both products. That costs the same whether 16 or 256 rows pass it, and this determines
the kernel's speed.

There are two kinds of item, which differ only in the number and the source of their rows: one token of a request that has
just one (a decode), or up to `large` tokens of a longer one. Scores are in units of log2; m (running maximum), l (sum) and
acc are float32. Only blocks with a masked score compute masks; unused slots may contain NaN, so in such blocks values are
zeroed first.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu import _pages, _plan
from attn.jax.kernels.tpu._pages import Item, copy
from attn.jax.kernels.tpu._refs import LOG2_E, PagedConfig, PagedRefs, Ref, dot, rows_at, widen, widen_e4m3

#: Keys that are widened at a time.
_WIDENED = 128

#: What the scalars of `factors` multiply: scores (into units of log2), and outputs.
SCORES, OUTPUTS = range(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PagedConfig):
    """The static configuration. A row of the cache is `lanes` wide; its first `values` columns are the value."""

    values: int
    widened: bool  # the cache stores codes
    even_odd: bool  # widened with `widen_e4m3`, which changes the order of keys


@dataclasses.dataclass(frozen=True)
class Rows:
    """Refs for the items of one kind. S: their rows; the first three are in HBM, by request or packed."""

    tokens: int
    query: Ref  # [R, S, lanes] or [rows of all, lanes]
    out: Ref  # the same with `values` lanes
    q: Ref  # [2, S, lanes] in VMEM
    o: Ref  # [S, values]
    m: Ref  # [S, 128] float32, as are the next ones
    l: Ref  # noqa: E741
    acc: Ref  # [S, values]
    lse: Ref = None  # [R, S, 128] or [rows of all, 128] in HBM
    lse_rows: Ref = None  # [S, 128]
    order: Ref = None  # [S, 128] int32: a row's token within the item


class Block(NamedTuple):
    """The keys in `slot`, from position `begin` on, for an item; `masked`: some row may not see some of them."""

    item: Item
    slot: jax.Array
    begin: jax.Array
    masked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs(PagedRefs):
    """Refs passed to the kernel; None for those this launch does not use."""

    factors: Ref  # [2] float32 in SMEM
    single: Rows
    long: Rows | None = None
    wide: Ref = None  # [kv_block, lanes]: a block's codes as numbers


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

        def go(masked: bool) -> None:
            if masked:
                _pages.clean(cfg, refs, slot, item.low - begin, item.high - begin)
            if cfg.widened:
                _widen(cfg, refs, slot)
            _attend(cfg, refs, rows, Block(item, slot, begin, masked))

        pl.when(clear)(lambda: go(False))
        pl.when(jnp.logical_not(clear))(lambda: go(True))

    return _pages.ItemOps(queries, outputs, lambda: _reset(rows), attend, lambda: _finish(cfg, refs, rows))


def _reset(rows: Rows) -> None:
    rows.m[...] = jnp.full(rows.m.shape, -jnp.inf, jnp.float32)
    rows.l[...] = jnp.zeros(rows.l.shape, jnp.float32)
    rows.acc[...] = jnp.zeros(rows.acc.shape, jnp.float32)


def _widen(cfg: Config, refs: Refs, slot: jax.Array) -> None:
    """Convert a block's codes to numbers of the query's dtype, into `wide`."""
    size = min(cfg.kv_block, _WIDENED)

    def part(n: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(n * size, size), size)
        codes = rows_at(cfg, refs, slot, 0, 0, at)
        refs.wide[at, :] = widen_e4m3(codes) if cfg.even_odd else codes.astype(refs.wide.dtype)

    lax.fori_loop(0, cfg.kv_block // size, part, None)


def _attend(cfg: Config, refs: Refs, rows: Rows, block: Block) -> None:
    """Process a block for all rows of an item."""
    number = rows.q.shape[1]
    row_tile = cfg.row_tile if number % cfg.row_tile == 0 else number

    def tile(n: jax.Array, _: None) -> None:
        _tile(cfg, refs, rows, block, pl.ds(pl.multiple_of(n * row_tile, row_tile), row_tile))

    lax.fori_loop(0, number // row_tile, tile, None, unroll=number == row_tile)


def _tile(cfg: Config, refs: Refs, rows: Rows, block: Block, at: Any) -> None:
    """The same for the rows `at`."""
    item, slot, begin, masked = block
    dtype = rows.q.dtype
    starts = range(0, cfg.kv_block, cfg.key_tile)

    def keys(start: Any, width: int) -> jax.Array:
        at = pl.ds(start, cfg.key_tile)
        return refs.wide[at, :width] if cfg.widened else refs.kv[slot, 0, 0, at, :width]

    def seen(start: Any) -> jax.Array:
        j = start + lax.broadcasted_iota(jnp.int32, (at.size, cfg.key_tile), 1)
        if cfg.even_odd:  # within each `_WIDENED` keys, the even ones come first
            size = min(cfg.kv_block, _WIDENED)
            within = j & (size - 1)
            j += jnp.where(within < size // 2, within, within - size + 1)
        j += begin
        visible = j < item.high
        if cfg.mask.causal and rows.order is not None:
            visible &= j <= item.position + widen(rows.order[at, :], cfg.key_tile)
        return visible

    def scores(start: Any) -> jax.Array:
        s = dot(rows.q[item.q_slot, at, :], keys(start, cfg.lanes), 1, 1) * refs.factors[SCORES]
        return jnp.where(seen(start), s, -jnp.inf) if masked else s

    parts = [scores(start) for start in starts]
    m = rows.m[at, :]
    top_of = parts[0]
    for s in parts[1:]:
        top_of = jnp.maximum(top_of, s)
    new_m = jnp.maximum(m, jnp.max(top_of, axis=1, keepdims=True))
    safe = jnp.where(new_m == -jnp.inf, 0.0, new_m) if masked else new_m
    base = widen(safe, cfg.key_tile)
    rescale = jnp.exp2(m - safe)
    total = rows.l[at, :] * rescale
    kept = rows.acc[at, :] * widen(rescale, cfg.values)
    added = jnp.zeros_like(kept)
    for start, s in zip(starts, parts, strict=True):
        p = jnp.exp2(s - base)
        total += jnp.sum(p, axis=1, keepdims=True)
        added += dot(p.astype(dtype), keys(start, cfg.values), 1, 0)
    rows.m[at, :], rows.l[at, :], rows.acc[at, :] = new_m, total, kept + added

    if masked and cfg.mask.causal and rows.order is not None:
        # a weight of 0 does not keep NaN out of a sum: if there was one, every row is recomputed with only the keys it sees

        @pl.when(jnp.max(jnp.where(added != added, 1.0, 0.0)) > 0)
        def _() -> None:
            def one(n: jax.Array, total: jax.Array) -> jax.Array:
                start = pl.multiple_of(n * cfg.key_tile, cfg.key_tile)
                p = jnp.exp2(scores(start) - base).astype(dtype)
                return total + _select(p, seen(start), keys(start, cfg.values))

            rows.acc[at, :] = kept + lax.fori_loop(0, len(starts), one, jnp.zeros_like(kept))


def _select(p: jax.Array, seen: jax.Array, values: jax.Array) -> jax.Array:
    """p [rows, keys] times values [keys, n], where a row includes only the values it sees, NaN and infinities among them."""
    wide = values.astype(jnp.float32)
    part = dot(p, jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(p.dtype), 1, 0)
    attends = jnp.where(seen, 1.0, 0.0).astype(p.dtype)
    for what, mark in ((wide == jnp.inf, jnp.inf), (wide == -jnp.inf, -jnp.inf), (wide != wide, jnp.nan)):
        part += jnp.where(dot(attends, jnp.where(what, 1.0, 0.0).astype(p.dtype), 1, 0) > 0, mark, 0.0)
    return part


def _finish(cfg: Config, refs: Refs, rows: Rows) -> None:
    """Write acc / l into `o`, and the natural log-sum-exp into `lse_rows`."""
    m, total = rows.m[...], rows.l[...]
    normaliser = jnp.where(total == 0.0, 0.0, refs.factors[OUTPUTS] / jnp.where(total == 0.0, 1.0, total))
    rows.o[...] = (rows.acc[...] * widen(normaliser, cfg.values)).astype(rows.o.dtype)
    if cfg.lse:
        rows.lse_rows[...] = (m + jnp.log2(total)) * (1 / LOG2_E)
