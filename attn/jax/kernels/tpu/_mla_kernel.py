"""The MLA kernel's body: what items compute on the blocks that `_pages` loads, where a page is both keys and values.

Every row of an item, one per head and token, reads all of a block: rows are on sublanes, keys on lanes in the scores, and
the block is the stationary side of both products. That costs the same whether 16 or 256 rows pass it, and this determines
the kernel's speed.

There are two groups of items, which differ only in the number and the source of their rows: one token of a request that has
just one (a decode), or up to `large` tokens of a longer one. Scores are in units of log2; m (their reference), l (sum) and
acc are float32. Only steps with a masked score compute masks; unused slots may contain NaN, so in such steps they are zeroed
first.

Many items have one step or two, so nothing clears their sums before the first one, and one that may be the last writes results
beside its sums.

Blocks are processed in a way that fails for rare numbers (see `_stream`), which leaves a mark in `failed`. Items that have one
are processed again after all others, exactly: none waits for a scalar that says whether it failed.

One-byte codes are multiplied as they are where the matrix unit takes them: widening them costs more than the products.
"""

import dataclasses
import functools
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

    @property
    def least(self) -> int:
        return min(2 * self.key_tile, self.kv_block)  # at most: see `RowRefs.least`


@dataclasses.dataclass(frozen=True)
class RowRefs:
    """Refs for the items of one row group, and keys of a score matrix. S: rows; query and out: in HBM, by request or packed."""

    key_tile: int
    query: Ref  # [R, S, lanes] or [rows of all, lanes]
    out: Ref  # the same with `values` lanes
    q: Ref  # [2, S, lanes] in VMEM
    o: Ref  # [2, S, values]
    m: Ref  # [S, 128] float32, as are the next ones
    l: Ref  # noqa: E741
    acc: Ref  # [S, values]
    lse: Ref = None  # [R, S, 128] or [rows of all, 128] in HBM
    lse_rows: Ref = None  # [2, S, 128]
    order: Ref = None  # [S, 128] int32: a row's token within the item

    @property
    def row_blocks(self) -> list[Any]:
        """The rows of each score matrix: 256 or 128 of them keep the matrix unit busy with one load of the keys."""
        total = self.q.shape[1]
        size = 256 if total > 256 else 128
        return [pl.ds(first, min(size, total - first)) for first in range(0, total, size)]

    @property
    def least(self) -> int:
        """The keys of the shortest steps: two score matrices, so that one's products run beside the other's exponentials."""
        return self.key_tile if len(self.row_blocks) > 1 else 2 * self.key_tile


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
    if refs.long is not None:
        # every item's, so it is computed once, while the first copies are under way
        refs.long.order[...] = lax.div(lax.broadcasted_iota(jnp.int32, refs.long.order.shape, 0), cfg.group)
    groups = [(rows, _item_ops(cfg, refs, loads, rows)) for rows in (refs.single, refs.long) if rows is not None]
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
            loads.arrive(i, b, slot, everything=True)
            _exact(cfg, refs, rows, MLAStep(item, slot, 0, first + b * cfg.kv_block, cfg.kv_block, True))

        _pages.start(ops.queries(i))
        _pages.wait(ops.queries(i))
        _reset(rows)
        lax.fori_loop(0, loads.field(_plan.BLOCKS, i), block, None)
        _finish(cfg, refs, rows, item)
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


def _item_ops(cfg: MLAConfig, refs: MLARefs, loads: _pages.Loads, rows: RowRefs) -> _pages.ItemOps:
    def item_rows(ref: Ref, i: jax.Array) -> Ref:
        row = refs.items[_plan.ROW * cfg.num_items + i]
        if rows is refs.single:
            return ref.at[row]
        return ref.at[pl.ds(pl.multiple_of(row * cfg.group, cfg.align * cfg.group), rows.q.shape[1])]

    def queries(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        return [copy(item_rows(rows.query, i), rows.q.at[slot], refs.q_sem.at[slot])]

    def outputs(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        copies = [copy(rows.o.at[slot], item_rows(rows.out, i), refs.o_sem)]
        return copies + ([copy(rows.lse_rows.at[slot], item_rows(rows.lse, i), refs.o_sem)] if cfg.lse else [])

    least = min(rows.least, cfg.kv_block)

    def is_clear(item: Item, stop: jax.Array) -> jax.Array:
        """Whether every row sees all keys before `stop`: a decode's sees those below `high`, the first of others fewest."""
        clear = stop <= item.high
        return clear & (stop <= item.position + 1) if cfg.mask.causal and rows is refs.long else clear

    def attend(item: Item, begin: jax.Array, slot: jax.Array, start_next: Callable[[], None] | None = None) -> None:
        def process(start: jax.Array | int, size: int, masked: bool, first: bool | None = None) -> None:
            at_end = start_next if size == cfg.kv_block and not masked else None
            _stream(cfg, refs, rows, MLAStep(item, slot, start, begin + start, size, masked), first, at_end)

        def step(start: jax.Array | int, size: int) -> None:
            """Keys that every row sees at once, and others by halves."""
            clear = is_clear(item, begin + start + size)
            pl.when(clear)(lambda: process(start, size, False))
            pl.when(jnp.logical_not(clear))(lambda: masked(start) if size == least else halves(start, size // 2))

        def halves(start: jax.Array | int, size: int) -> None:
            def half(n: jax.Array, _: None) -> None:
                at = pl.multiple_of(start + n * size, size)
                pl.when(begin + at < item.high)(lambda: step(at, size))

            lax.fori_loop(0, 2, half, None)

        def masked(start: jax.Array | int) -> None:
            tiles = lax.div(start, cfg.tile) + least // cfg.tile
            _pages.clean(cfg, refs, slot, item.low - begin, item.loaded - begin, tiles)
            if rows is refs.single:
                process(start, least, True)
            else:
                for first in (True, False):
                    pl.when((begin + start == 0) == first)(functools.partial(process, start, least, True, first))

        if start_next is not None:
            pl.when(jnp.logical_not(is_clear(item, begin + cfg.kv_block)))(start_next)
        step(0, cfg.kv_block)

    def reset() -> None:
        if refs.lost is not None:
            refs.lost[...] = jnp.zeros(refs.lost.shape, jnp.int32)

    def finish(i: jax.Array) -> None:
        """The results of an item without keys, or with a last step that did not write them."""
        item = loads.item(i)
        without = item.high == 0
        pl.when(without)(lambda: _reset(rows))
        if rows is refs.long:
            without |= is_clear(item, lax.div(item.high + (least - 1), least) * least)
        pl.when(without)(lambda: _finish(cfg, refs, rows, item))

    # Of decodes alone: other launches process few blocks as a whole.
    return _pages.ItemOps(queries, outputs, reset, attend, finish, not cfg.large and loads.in_straight_code)


def _reset(rows: RowRefs) -> None:
    rows.m[...] = jnp.full(rows.m.shape, -jnp.inf, jnp.float32)
    rows.l[...] = jnp.zeros(rows.l.shape, jnp.float32)
    rows.acc[...] = jnp.zeros(rows.acc.shape, jnp.float32)


def _seen(cfg: MLAConfig, rows: RowRefs, step: MLAStep, at: Any, start: Any) -> jax.Array:
    """Whether the rows `at` see the keys of the tile at `start`: [rows, keys]."""
    item, first = step.item, step.begin + start
    j, stop = lax.broadcasted_iota(jnp.int32, (at.size, rows.key_tile), 1), item.high - first
    if cfg.mask.causal and rows.order is not None:
        return j < widen(jnp.minimum(rows.order[at, :] + (item.position + 1 - first), stop), rows.key_tile)
    return j < stop


def _scores(cfg: MLAConfig, rows: RowRefs, step: MLAStep, at: Any, keys: jax.Array) -> jax.Array:
    """Products of the queries of rows `at` and keys, without masks. Their factor multiplies differences from the maximum, so
    that the largest has a weight of 1 also where the compiler contracts a product and a difference into one operation."""
    return dot(rows.q[step.item.q_slot, at, :], keys, 1, 1)


def _all(rows: RowRefs) -> Any:
    return pl.ds(0, rows.q.shape[1])


@dataclasses.dataclass
class _Sums:
    """What a step computes of the rows `at`, in registers; m, l and acc: `RowRefs`."""

    at: Any
    m: jax.Array
    sums: jax.Array  # of each lane's exponentials
    acc: jax.Array
    l: jax.Array  # noqa: E741


def _stream(
    cfg: MLAConfig, refs: MLARefs, rows: RowRefs, step: MLAStep, first: bool | None, at_end: Callable[[], None] | None
) -> None:
    """Process a step in one pass, and write the results of one that may be its item's last.

    first: whether it is its item's first; None: known at run time only. at_end: work for the scalar unit, for which there is
    time while the results of the last products arrive.

    Products of keys run a score matrix ahead of the exponentials, and products of values one behind them. Exponentials are
    relative to the maximum of the rows' scores so far and of the step's first keys, so that none waits for the scores of all.
    An item is marked if a sum shows that later scores are much larger, or is not finite.
    """
    dtype, factor, item = rows.q.dtype, refs.factors[SCORES], step.item
    tiles = [pl.ds(step.start + first, rows.key_tile) for first in range(0, step.size, rows.key_tile)]
    row_blocks = rows.row_blocks
    units = [(at, n) for at in row_blocks for n in range(len(tiles))]  # rows of each score matrix, and its keys
    starts = step.begin + step.start == 0
    scores: list[jax.Array] = []
    weights: list[jax.Array] = []
    row_sums: list[_Sums] = []
    spoilt: list[jax.Array] = []

    def keys(at: Any, tile: Any) -> jax.Array:
        if cfg.staged and at is not row_blocks[0]:
            return refs.wide[tile, :]  # type: ignore[no-any-return]
        codes = rows_at(cfg, refs, step.slot, 0, 0, tile)
        if not cfg.staged:
            return codes
        ready = rebiased(codes, refs.lost) if cfg.rebiased else codes.astype(refs.wide.dtype)
        refs.wide[tile, :] = ready
        return ready

    def values(tile: Any) -> jax.Array:
        return refs.wide[tile, : cfg.values] if cfg.staged else refs.kv[step.slot, 0, 0, tile, : cfg.values]

    def begin(at: Any, s: jax.Array) -> _Sums:
        top, none = jnp.max(s, axis=1, keepdims=True), jnp.zeros((at.size, LANES), jnp.float32)
        sums = none[:, : min(rows.key_tile, LANES)]
        if first:
            return _Sums(at, jnp.broadcast_to(top, none.shape), sums, jnp.zeros((at.size, cfg.values), jnp.float32), none)
        m = rows.m[at, :]
        if first is None:
            m = jnp.where(starts, -jnp.inf, m)
        base = jnp.maximum(m, top)
        rescale = jnp.exp2((m - base) * factor)
        total, acc = rows.l[at, :] * rescale, rows.acc[at, :] * widen(rescale, cfg.values)
        if first is None:  # what another item has left may be NaN
            total, acc = jnp.where(starts, 0.0, total), jnp.where(starts, 0.0, acc)
        return _Sums(at, base, sums, acc, total)

    for n in range(len(units) + 2):
        if n < len(units):
            at, tile = units[n]
            s = _scores(cfg, rows, step, at, keys(at, tiles[tile]))
            if step.masked:
                # Keys that are not finite, which some row may not see: no row's product with them is.
                if at is row_blocks[0]:
                    spoilt.append(s[:8])
                s = jnp.where(_seen(cfg, rows, step, at, tile * rows.key_tile), s, -jnp.inf)
            scores.append(s)
        if 1 <= n <= len(units):
            at, tile = units[n - 1]
            if tile == 0:
                row_sums.append(begin(at, scores[n - 1]))
            one = row_sums[-1]
            p = jnp.exp2((scores[n - 1] - widen(one.m, rows.key_tile)) * factor)
            for lane in range(0, rows.key_tile, LANES):
                one.sums += p[:, lane : lane + LANES]
            weights.append(p.astype(dtype))
            if tile == len(tiles) - 1:
                one.l += jnp.sum(one.sums, axis=1, keepdims=True)
                rows.m[at, :], rows.l[at, :] = one.m, one.l
        if n >= 2:
            at, tile = units[n - 2]
            one = row_sums[(n - 2) // len(tiles)]
            one.acc += dot(weights[n - 2], values(tiles[tile]), 1, 0)
            if tile == len(tiles) - 1:
                rows.acc[at, :] = one.acc
                if step.masked or rows is refs.single:
                    _result(cfg, refs, rows, item, one, refs.factors[OUTPUTS] / one.l)  # which is at least 1
    if at_end is not None:
        at_end()
    _mark(refs, item, row_sums, spoilt)


def _exact(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, step: MLAStep) -> None:
    """The same relative to the maximum of all scores, where no row is affected by numbers that it does not see."""
    dtype, factor = rows.q.dtype, refs.factors[SCORES]

    def tile(n: jax.Array, _: None) -> None:
        start = pl.multiple_of(n * rows.key_tile, rows.key_tile)
        keys = widened_exactly(cfg, rows_at(cfg, refs, step.slot, 0, 0, pl.ds(start, rows.key_tile)))
        seen = _seen(cfg, rows, step, _all(rows), start)
        s = jnp.where(seen, _scores(cfg, rows, step, _all(rows), keys.astype(dtype)), -jnp.inf)
        m = rows.m[...]
        new_m = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        safe = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        p, rescale = jnp.exp2((s - widen(safe, rows.key_tile)) * factor), jnp.exp2((m - safe) * factor)
        rows.m[...], rows.l[...] = new_m, rows.l[...] * rescale + jnp.sum(p, axis=1, keepdims=True)
        pv = _select(p.astype(dtype), seen, keys[:, : cfg.values])
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


def _result(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, item: Item, one: _Sums, normaliser: jax.Array) -> None:
    """Write the item's rows into `o`, and the natural log-sum-exp into `lse_rows`."""
    rows.o[item.q_slot, one.at, :] = (one.acc * widen(normaliser, cfg.values)).astype(rows.o.dtype)
    if cfg.lse:
        rows.lse_rows[item.q_slot, one.at, :] = (one.m * refs.factors[SCORES] + jnp.log2(one.l)) * (1 / LOG2_E)


def _mark(refs: MLARefs, item: Item, row_sums: list[_Sums], spoilt: list[jax.Array]) -> None:
    """Mark an item that must be repeated with `_exact`. spoilt: products with keys that some row may not see."""
    total = functools.reduce(jnp.add, [jnp.sum(one.l.reshape(-1, 8, LANES), axis=0) for one in row_sums])
    zero = sum(jnp.sum(x * 0.0, axis=1, keepdims=True) for x in spoilt)
    lost = 0 if refs.lost is None else refs.lost[...]
    good = (total <= 2.0**_MAX_LOG2_SUM) & (zero == 0.0)
    refs.failed[pl.ds(item.number, 1), :] |= jnp.max(jnp.where(good, lost, 1), axis=0, keepdims=True)


def _finish(cfg: MLAConfig, refs: MLARefs, rows: RowRefs, item: Item) -> None:
    """The results of the sums so far."""
    m, total, acc = rows.m[...], rows.l[...], rows.acc[...]
    normaliser = jnp.where(total == 0.0, 0.0, refs.factors[OUTPUTS] / jnp.where(total == 0.0, 1.0, total))
    _result(cfg, refs, rows, item, _Sums(_all(rows), m, m, acc, total), normaliser)
