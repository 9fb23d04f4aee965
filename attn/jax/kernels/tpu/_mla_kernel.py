"""The MLA kernel's body: what items compute on the blocks that `_pages` loads, where a page is both keys and values.

Every row of an item, one per head and token, reads all of a block: rows are on sublanes, keys on lanes in the scores, and
the block is the stationary side of both products. That costs the same whether 16 or 256 rows pass it, and this determines
the kernel's speed.

There are two groups of items, which differ only in the number and the source of their rows: one token of a request that has
just one (a decode), or up to `large` tokens of a longer one. Scores are in units of log2; m (their reference), l (sum) and
acc are float32. Only blocks with a masked score compute masks; unused slots may contain NaN, so in such blocks values are
zeroed first.

Blocks are processed in a way that fails for rare numbers (see `_stream`), which leaves a sum that is not finite, or a mark in
`lost`. Items that end so are processed again after all others, exactly: none waits for a scalar that says whether it failed.

One-byte codes are multiplied as they are where the matrix unit takes them: widening them costs more than the products.
"""

import dataclasses
import functools
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

#: How large, in powers of two, a sum of exponentials may be before its item is repeated with `_exact`.
_MAX_LOG2_SUM = 60.0

#: What the scalars of `factors` multiply: scores (into units of log2), and outputs.
SCORES, OUTPUTS = range(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig(PagedConfig):
    """The static configuration. A row of the cache is `lanes` wide; its first `values` columns are the value."""

    single_tile: int  # keys per score matrix of singles; `key_tile` is of longer requests
    values: int
    staged: bool  # keys enter products from `wide`, since they are not multiplied as they are stored
    rebiased: bool  # the cache is float8_e4m3fn, read as another format: see `rebiased`


@dataclasses.dataclass(frozen=True)
class RowRefs:
    """Refs for the items of one row group, and keys of a score matrix. S: rows; query and out: in HBM, by request or packed."""

    key_tile: int
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


class MLAStep(NamedTuple):
    """The keys of an item that are processed together: `size` rows of the block in `slot`, from `start` on.

    The first is at position `begin`. masked: some row may not see some of them.
    """

    item: Item
    slot: jax.Array
    start: jax.Array | int
    begin: jax.Array
    size: int
    masked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLARefs(PagedRefs):
    """Refs passed to the kernel; None for those this launch does not use."""

    factors: Ref  # [2] float32 in SMEM
    failed: Ref  # [items, 128] int32, above 0 in the rows of those that must be repeated with `_exact`
    single: RowRefs
    long: RowRefs | None = None
    wide: Ref = None  # [kv_block, lanes]: a block's keys as they are multiplied
    lost: Ref = None  # [8, 128] int32, above 0 where a NaN of the item's keys was lost


def run(cfg: MLAConfig, refs: MLARefs) -> None:
    """The whole launch."""
    _pages.writing(cfg, refs, lambda: _attend(cfg, refs))


def _attend(cfg: MLAConfig, refs: MLARefs) -> None:
    loads = _pages.Loads(cfg, refs, refs.counts[0])
    refs.failed[...] = jnp.zeros(refs.failed.shape, jnp.int32)
    groups = [(rows, _item_ops(cfg, refs, rows)) for rows in (refs.single, refs.long) if rows is not None]
    _pages.attend(cfg, refs, loads, groups[0][1], groups[1][1] if refs.long else None)
    pl.when(jnp.max(refs.failed[...]) > 0)(lambda: _repeat(cfg, refs, loads, groups))


def _repeat(cfg: MLAConfig, refs: MLARefs, loads: _pages.Loads, groups: list[tuple[RowRefs, _pages.ItemOps]]) -> None:
    """Process the failed items again, and those whose rows this overwrites: a long request's last item writes a whole tile,
    which may contain rows of the next requests.
    """
    # any slot: the pipeline has ended, so nothing else loads
    slot = jnp.int32(0)

    def whole(i: jax.Array, rows: RowRefs, ops: _pages.ItemOps) -> None:
        item, first = loads.item(i), loads.first_page(i) * cfg.page

        def block(b: jax.Array, _: None) -> None:
            loads.start(i, b, slot)
            loads.wait(i, b, slot)
            _exact(cfg, refs, rows, MLAStep(item, slot, 0, first + b * cfg.kv_block, cfg.kv_block, True))

        _pages.start(ops.queries(i))
        _pages.wait(ops.queries(i))
        ops.reset()
        lax.fori_loop(0, loads.field(_plan.BLOCKS, i), block, None)
        ops.finish(i)
        _pages.start(ops.outputs(i))
        _pages.wait(ops.outputs(i))

    def one(i: jax.Array, stop: jax.Array) -> jax.Array:
        """stop: the end of the long requests' rows that have been written again."""
        row, long = loads.field(_plan.ROW, i), loads.field(_plan.SINGLE, i) == 0
        again = (jnp.max(refs.failed[pl.ds(i, 1), :]) > 0) | (long & (row < stop))
        for rows, ops in groups:
            pl.when(again & (long == (rows is refs.long)))(functools.partial(whole, i, rows, ops))
        return jnp.where(again & long, row + cfg.large, stop)

    lax.fori_loop(0, loads.count, one, jnp.int32(0))


def _item_ops(cfg: MLAConfig, refs: MLARefs, rows: RowRefs) -> _pages.ItemOps:
    def item_rows(ref: Ref, i: jax.Array) -> Ref:
        row = refs.items[_plan.ROW * cfg.num_items + i]
        if rows is refs.single:
            return ref.at[row]
        return ref.at[pl.ds(pl.multiple_of(row * cfg.group, cfg.align * cfg.group), rows.q.shape[1])]

    def queries(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        return [copy(item_rows(rows.query, i), rows.q.at[slot], refs.q_sem.at[slot])]

    def outputs(i: jax.Array) -> list[Any]:
        copies = [copy(rows.o, item_rows(rows.out, i), refs.o_sem)]
        return copies + ([copy(rows.lse_rows, item_rows(rows.lse, i), refs.o_sem)] if cfg.lse else [])

    def attend(item: Item, begin: jax.Array, slot: jax.Array) -> None:
        def process(start: jax.Array | int, size: int, masked: bool) -> None:
            _stream(cfg, refs, rows, MLAStep(item, slot, start, begin + start, size, masked))

        def step(start: jax.Array | int, size: int) -> None:
            """Keys that every row sees at once, and others by halves."""
            stop = begin + start + size
            # a decode's only row sees all keys below `high`; the first row of others sees the fewest
            clear = stop <= item.high
            if cfg.mask.causal and rows is refs.long:
                clear &= stop <= item.position + 1
            pl.when(clear)(lambda: process(start, size, False))
            pl.when(jnp.logical_not(clear))(lambda: masked(start) if size == least else halves(start, size // 2))

        def halves(start: jax.Array | int, size: int) -> None:
            def half(n: jax.Array, _: None) -> None:
                at = pl.multiple_of(start + n * size, size)
                pl.when(begin + at < item.high)(lambda: step(at, size))

            lax.fori_loop(0, 2, half, None)

        def masked(start: jax.Array | int) -> None:
            tiles = lax.div(start, cfg.tile) + least // cfg.tile
            _pages.clean(cfg, refs, slot, item.low - begin, item.high - begin, tiles)
            process(start, least, True)

        least = min(2 * rows.key_tile, cfg.kv_block)  # one tile's products run beside the other's exponentials
        step(0, cfg.kv_block)

    def finish(i: jax.Array) -> None:
        _mark(cfg, refs, rows, i)
        _finish(cfg, refs, rows)

    return _pages.ItemOps(queries, outputs, lambda: _reset(refs, rows), attend, finish)


def _reset(refs: MLARefs, rows: RowRefs) -> None:
    rows.m[...] = jnp.full(rows.m.shape, -jnp.inf, jnp.float32)
    rows.l[...] = jnp.zeros(rows.l.shape, jnp.float32)
    rows.acc[...] = jnp.zeros(rows.acc.shape, jnp.float32)
    if refs.lost is not None:
        refs.lost[...] = jnp.zeros(refs.lost.shape, jnp.int32)


def _mark(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, i: jax.Array) -> None:
    """Mark item i if it must be repeated with `_exact`."""
    sums = [rows.l[...]]
    if rows.order is not None:  # rows see different keys, and a weight of 0 does not keep NaN out of a sum
        sums += [rows.acc[:, lane : lane + LANES] for lane in range(0, cfg.values, LANES)]
    zero = functools.reduce(jnp.add, [jnp.sum((x * 0.0).reshape(-1, 8, LANES), axis=0) for x in sums])
    lost = 0 if refs.lost is None else refs.lost[...]
    refs.failed[pl.ds(i, 1), :] = jnp.max(jnp.where(zero == 0.0, lost, 1), axis=0, keepdims=True)


def _seen(cfg: MLAConfig, rows: RowRefs, step: MLAStep, start: Any) -> jax.Array:
    """Whether rows see the keys of the tile at `start`: [rows, keys]."""
    j = step.begin + start + lax.broadcasted_iota(jnp.int32, (rows.q.shape[1], rows.key_tile), 1)
    visible = j < step.item.high
    if cfg.mask.causal and rows.order is not None:
        visible &= j <= step.item.position + widen(rows.order[...], rows.key_tile)
    return visible


def _scores(cfg: MLAConfig, rows: RowRefs, step: MLAStep, start: Any, keys: jax.Array) -> jax.Array:
    """Products of queries and keys. Their factor multiplies differences from the maximum, so that the largest has a weight of 1
    also where the compiler contracts a product and a difference into one operation."""
    s = dot(rows.q[step.item.q_slot], keys, 1, 1)
    return jnp.where(_seen(cfg, rows, step, start), s, -jnp.inf) if step.masked else s


def _stream(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, step: MLAStep) -> None:
    """Process a step in one pass.

    Products of keys run a tile ahead of the exponentials, and products of values a tile behind them. Exponentials are relative
    to the maximum of the rows' scores so far and of the first tile, so that no tile waits for the scores of all. A sum that
    shows that later scores are much larger becomes NaN, as does one of numbers that are not finite.
    """
    dtype, factor = rows.q.dtype, refs.factors[SCORES]
    tiles = [pl.ds(step.start + first, rows.key_tile) for first in range(0, step.size, rows.key_tile)]
    scores: list[jax.Array] = []
    weights: list[jax.Array] = []

    def keys(tile: Any) -> jax.Array:
        codes = rows_at(cfg, refs, step.slot, 0, 0, tile)
        if not cfg.staged:
            return codes
        ready = rebiased(codes, refs.lost) if cfg.rebiased else codes.astype(refs.wide.dtype)
        refs.wide[tile, :] = ready
        return ready

    def values(tile: Any) -> jax.Array:
        return refs.wide[tile, : cfg.values] if cfg.staged else refs.kv[step.slot, 0, 0, tile, : cfg.values]

    for n in range(len(tiles) + 2):
        if n < len(tiles):
            scores.append(_scores(cfg, rows, step, n * rows.key_tile, keys(tiles[n])))
        if n == 1:
            m = rows.m[...]
            base = jnp.maximum(m, jnp.max(scores[0], axis=1, keepdims=True))
            rescale = jnp.exp2((m - base) * factor)
            sums = jnp.zeros((rows.q.shape[1], min(rows.key_tile, LANES)), jnp.float32)
            acc = rows.acc[...] * widen(rescale, cfg.values)
        if 1 <= n <= len(tiles):
            p = jnp.exp2((scores[n - 1] - widen(base, rows.key_tile)) * factor)
            for lane in range(0, rows.key_tile, LANES):
                sums += p[:, lane : lane + LANES]
            weights.append(p.astype(dtype))
        if n > len(tiles):
            total = rows.l[...] * rescale + jnp.sum(sums, axis=1, keepdims=True)
            rows.m[...], rows.l[...] = base, jnp.where(total <= 2.0**_MAX_LOG2_SUM, total, jnp.nan)
        if n >= 2:
            acc += dot(weights[n - 2], values(tiles[n - 2]), 1, 0)
    rows.acc[...] = acc


def _exact(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, step: MLAStep) -> None:
    """The same relative to the maximum of all scores, where no row is affected by numbers that it does not see."""
    dtype, factor = rows.q.dtype, refs.factors[SCORES]

    def tile(n: jax.Array, _: None) -> None:
        start = pl.multiple_of(n * rows.key_tile, rows.key_tile)
        keys = widened_exactly(cfg, rows_at(cfg, refs, step.slot, 0, 0, pl.ds(start, rows.key_tile)))
        s = _scores(cfg, rows, step, start, keys.astype(dtype))
        m = rows.m[...]
        new_m = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        safe = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        p, rescale = jnp.exp2((s - widen(safe, rows.key_tile)) * factor), jnp.exp2((m - safe) * factor)
        rows.m[...], rows.l[...] = new_m, rows.l[...] * rescale + jnp.sum(p, axis=1, keepdims=True)
        pv = _select(p.astype(dtype), _seen(cfg, rows, step, start), keys[:, : cfg.values])
        rows.acc[...] = rows.acc[...] * widen(rescale, cfg.values) + pv

    lax.fori_loop(0, step.size // rows.key_tile, tile, None)


def _select(p: jax.Array, seen: jax.Array, wide: jax.Array) -> jax.Array:
    """p [rows, keys] times values [keys, n] in float32, where a row includes only the values it sees, NaN and infinities among
    them."""
    pv = dot(p, jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(p.dtype), 1, 0)
    attends = jnp.where(seen, 1.0, 0.0).astype(p.dtype)
    for is_number, number in ((wide == jnp.inf, jnp.inf), (wide == -jnp.inf, -jnp.inf), (wide != wide, jnp.nan)):
        pv += jnp.where(dot(attends, jnp.where(is_number, 1.0, 0.0).astype(p.dtype), 1, 0) > 0, number, 0.0)
    return pv


def _finish(cfg: MLAConfig, refs: MLARefs, rows: RowRefs) -> None:
    """Write acc / l into `o`, and the natural log-sum-exp into `lse_rows`."""
    m, total = rows.m[...], rows.l[...]
    normaliser = jnp.where(total == 0.0, 0.0, refs.factors[OUTPUTS] / jnp.where(total == 0.0, 1.0, total))
    rows.o[...] = (rows.acc[...] * widen(normaliser, cfg.values)).astype(rows.o.dtype)
    if cfg.lse:
        rows.lse_rows[...] = (m * refs.factors[SCORES] + jnp.log2(total)) * (1 / LOG2_E)
