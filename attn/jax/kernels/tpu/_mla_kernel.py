"""The MLA kernel's body: the ragged kernel's plan and write, and a loop in which a page is both keys and values.

A kv block is `kv_block` cache rows of one request, brought page by page into one of the slots of `kv` while another is
computed on; the pipeline runs ahead across items, so a request's first blocks arrive during the last ones of the request
before. Every row of an item, one a head and token, reads all of it: rows lie on sublanes, keys on lanes in the scores, and
the block is the stationary side of both products. That costs the same whether 16 rows pass it or 256, and is what decides
the kernel's speed.

There are two kinds of item, which differ in nothing but their number of rows and where those come from: one token of a
request that has just one (a decode), or up to `large` tokens of a longer one. Scores are in units of log2; m (running
maximum), l (sum) and acc are float32. Only blocks that hold a masked score pay for masks, and what lies in unused slots may
be NaN, so there it is zeroed first.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _kernel, _plan
from attn.jax.kernels.tpu._refs import LOG2_E, Ref, dot, rows_between, widen, widen_e4m3

#: Keys that are widened at a time.
_WIDENED = 128

#: What the scalars of `factors` multiply: scores (into units of log2), and outputs.
SCORES, OUTPUTS = range(2)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is static. A row of the cache is `lanes` wide, its first `values` columns are the value."""

    heads: int
    lanes: int
    values: int
    page: int
    tile: int  # rows of the cache that are written together
    align: int  # a long request's query tokens begin at multiples of this
    large: int  # query tokens of a long item; 0 where every request has one
    kv_block: int
    key_tile: int  # keys of a score matrix
    row_tile: int  # and its rows, at most
    slots: int
    causal: bool
    lse: bool
    write: bool
    widened: bool  # the cache holds codes
    even_odd: bool  # widened with `widen_e4m3`, which changes the order of keys
    num_items: int
    num_tiles: int
    ring: int = 8
    planes: int = 1
    num_kv_heads: int = 1


@dataclasses.dataclass(frozen=True)
class Kind:
    """Where the items of one kind lie. S: their rows; the first three are in HBM, by request or packed."""

    tokens: int
    query: Ref  # [R, S, lanes] or [rows of all, lanes]
    out: Ref  # the same of `values` lanes
    q: Ref  # [2, S, lanes] in VMEM
    o: Ref  # [S, values]
    m: Ref  # [S, 128] float32, as is what follows
    l: Ref  # noqa: E741
    acc: Ref  # [S, values]
    lse: Ref = None  # [R, S, 128] or [rows of all, 128] in HBM
    lse_rows: Ref = None  # [S, 128]
    order: Ref = None  # [S, 128] int32: a row's token within the item


@dataclasses.dataclass(frozen=True)
class Refs:
    """Where everything lies; None where this launch has no such thing."""

    items: Ref
    tiles: Ref
    counts: Ref
    table: Ref
    factors: Ref  # [2] float32 in SMEM
    cache: Ref  # [N, 1, 1, P, lanes] in HBM
    kv: Ref  # [slots, kv_block, lanes] in VMEM
    kv_sem: Ref
    q_sem: Ref
    o_sem: Ref
    single: Kind
    long: Kind | None = None
    wide: Ref = None  # [kv_block, lanes]: a block's codes as numbers
    # the write
    fresh: Ref = None  # [1, 1, X * tile, lanes] in HBM
    old: Ref = None  # [ring, 1, 1, tile, lanes] in VMEM
    new: Ref = None
    read_sem: Ref = None
    write_sem: Ref = None


def run(cfg: Config, refs: Refs) -> None:
    """The whole launch."""
    if cfg.write:
        _kernel._write(cfg, refs)  # type: ignore[arg-type]
    _attend(cfg, refs)


def _attend(cfg: Config, refs: Refs) -> None:
    count, zero = refs.counts[0], jnp.int32(0)

    def field(column: int, i: jax.Array) -> jax.Array:
        return refs.items[column * cfg.num_items + i]

    def by_kind(i: jax.Array, do: Any) -> Any:
        """do(kind) for the kind of item i."""
        if refs.long is None:
            return do(refs.single)
        return lax.cond(field(_plan.SINGLE, i) == 1, lambda: do(refs.single), lambda: do(refs.long))

    def place(ref: Ref, kind: Kind, i: jax.Array) -> Ref:
        row = field(_plan.ROW, i)
        if kind is refs.single:
            return ref.at[row]
        return ref.at[pl.ds(pl.multiple_of(row * cfg.heads, cfg.align * cfg.heads), kind.q.shape[1])]

    def query_copy(i: jax.Array, kind: Kind) -> Any:
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(place(kind.query, kind, i), kind.q.at[slot], refs.q_sem.at[slot])

    def out_copies(i: jax.Array, kind: Kind) -> list[Any]:
        copies = [pltpu.make_async_copy(kind.o, place(kind.out, kind, i), refs.o_sem)]
        if cfg.lse:
            copies.append(pltpu.make_async_copy(kind.lse_rows, place(kind.lse, kind, i), refs.o_sem))
        return copies

    def wait_out(i: jax.Array) -> None:
        def each(kind: Kind) -> None:
            for copy in out_copies(i, kind):
                copy.wait()

        by_kind(i, each)

    def each_page(i: jax.Array, b: jax.Array, slot: jax.Array, do: Any) -> None:
        """do(copy) for each page of block b of item i that holds a visible key."""
        per_block = cfg.kv_block // cfg.page
        begin = b * per_block
        stop = lax.div(field(_plan.HIGH, i) + (cfg.page - 1), cfg.page)
        base = field(_plan.TABLE, i) + begin

        def one(n: jax.Array, _: None) -> None:
            target = refs.kv.at[slot, pl.ds(pl.multiple_of(n * cfg.page, cfg.page), cfg.page), :]
            do(pltpu.make_async_copy(refs.cache.at[refs.table[base + n], 0, 0], target, refs.kv_sem.at[slot]))

        lax.fori_loop(0, jnp.clip(stop - begin, 0, per_block), one, None)

    def fetch_next(i: jax.Array, b: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Start block b of item i, if there is such an item, into `slot`; the same three of the block after it."""

        @pl.when(i < count)
        def _() -> None:
            each_page(i, b, slot, lambda copy: copy.start())

        last = b + 1 >= field(_plan.BLOCKS, jnp.minimum(i, cfg.num_items - 1))
        return jnp.where(last, i + 1, i), jnp.where(last, 0, b + 1), jnp.where(slot + 1 == cfg.slots, 0, slot + 1)

    @pl.when(count > 0)
    def _() -> None:
        by_kind(zero, lambda kind: query_copy(zero, kind).start())

    ahead = (zero, zero, zero)
    for _slot in range(cfg.slots - 1):
        ahead = fetch_next(*ahead)

    def item(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        blocks, high, position = (field(column, i) for column in (_plan.BLOCKS, _plan.HIGH, _plan.POSITION))

        @pl.when(i + 1 < count)
        def _() -> None:
            by_kind(i + 1, lambda kind: query_copy(i + 1, kind).start())

        def work(kind: Kind) -> tuple[jax.Array, ...]:
            query_copy(i, kind).wait()
            _reset(kind)

            def block(b: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot, *ahead = state
                after = fetch_next(*ahead)
                each_page(i, b, slot, lambda copy: copy.wait())
                begin = b * cfg.kv_block
                stop = begin + cfg.kv_block
                # whether every row sees every key
                clear = stop <= high
                if cfg.causal and kind is refs.long:
                    clear &= stop <= position + 1

                def meet(masked: bool) -> None:
                    if masked:
                        _clean(cfg, refs, slot, high - begin)
                    if cfg.widened:
                        _widen(cfg, refs, slot)
                    _meet(cfg, refs, kind, slot, lax.rem(i, 2), begin, high, position, masked)

                pl.when(clear)(lambda: meet(False))
                pl.when(jnp.logical_not(clear))(lambda: meet(True))
                return jnp.where(slot + 1 == cfg.slots, 0, slot + 1), *after

            state_after = lax.fori_loop(0, blocks, block, state)
            pl.when(i > 0)(lambda: wait_out(i - 1))
            _finish(cfg, refs, kind)
            for copy in out_copies(i, kind):
                copy.start()
            return state_after

        return by_kind(i, work)  # type: ignore[no-any-return]

    lax.fori_loop(0, count, item, (zero, *ahead))
    pl.when(count > 0)(lambda: wait_out(count - 1))


def _reset(kind: Kind) -> None:
    kind.m[...] = jnp.full(kind.m.shape, -jnp.inf, jnp.float32)
    kind.l[...] = jnp.zeros(kind.l.shape, jnp.float32)
    kind.acc[...] = jnp.zeros(kind.acc.shape, jnp.float32)


def _clean(cfg: Config, refs: Refs, slot: jax.Array, stop: jax.Array) -> None:
    """Zero the rows of a block from `stop` on."""

    def tile(t: jax.Array, _: None) -> None:
        start = pl.multiple_of(t * cfg.tile, cfg.tile)
        at = (pl.ds(slot, 1), pl.ds(start, cfg.tile), slice(None))
        refs.kv[at] = rows_between(refs.kv[at], None, jnp.int32(0), stop - start)

    lax.fori_loop(lax.div(jnp.clip(stop, 0, cfg.kv_block), cfg.tile), cfg.kv_block // cfg.tile, tile, None)


def _widen(cfg: Config, refs: Refs, slot: jax.Array) -> None:
    """A block's codes as numbers of the query's dtype, into `wide`."""
    size = min(cfg.kv_block, _WIDENED)

    def part(n: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(n * size, size), size)
        codes = refs.kv[slot, at, :]
        refs.wide[at, :] = widen_e4m3(codes) if cfg.even_odd else codes.astype(refs.wide.dtype)

    lax.fori_loop(0, cfg.kv_block // size, part, None)


def _meet(
    cfg: Config, refs: Refs, kind: Kind, slot: jax.Array, q_slot: jax.Array, begin: jax.Array, high: jax.Array,
    position: jax.Array, masked: bool,
) -> None:  # fmt: skip
    """All rows of an item meet the block in `slot`, whose first key is `begin`."""
    rows = kind.q.shape[1]
    row_tile = cfg.row_tile if rows % cfg.row_tile == 0 else rows

    def tile(n: jax.Array, _: None) -> None:
        top = pl.multiple_of(n * row_tile, row_tile)
        _tile(cfg, refs, kind, slot, q_slot, begin, high, position, masked, top, row_tile)

    lax.fori_loop(0, rows // row_tile, tile, None, unroll=rows == row_tile)


def _tile(
    cfg: Config, refs: Refs, kind: Kind, slot: jax.Array, q_slot: jax.Array, begin: jax.Array, high: jax.Array,
    position: jax.Array, masked: bool, top: jax.Array, row_tile: int,
) -> None:  # fmt: skip
    at = pl.ds(top, row_tile)
    dtype = kind.q.dtype
    starts = range(0, cfg.kv_block, cfg.key_tile)

    def keys(start: Any, width: int) -> jax.Array:
        at = pl.ds(start, cfg.key_tile)
        return refs.wide[at, :width] if cfg.widened else refs.kv[slot, at, :width]

    def seen(start: Any) -> jax.Array:
        j = start + lax.broadcasted_iota(jnp.int32, (row_tile, cfg.key_tile), 1)
        if cfg.even_odd:  # within each `_WIDENED` keys, the even ones come first
            size = min(cfg.kv_block, _WIDENED)
            within = j & (size - 1)
            j += jnp.where(within < size // 2, within, within - size + 1)
        j += begin
        visible = j < high
        if cfg.causal and kind.order is not None:
            visible &= j <= position + widen(kind.order[at, :], cfg.key_tile)
        return visible

    def scores(start: Any) -> jax.Array:
        s = dot(kind.q[q_slot, at, :], keys(start, cfg.lanes), 1, 1) * refs.factors[SCORES]
        return jnp.where(seen(start), s, -jnp.inf) if masked else s

    parts = [scores(start) for start in starts]
    m = kind.m[at, :]
    top_of = parts[0]
    for s in parts[1:]:
        top_of = jnp.maximum(top_of, s)
    new_m = jnp.maximum(m, jnp.max(top_of, axis=1, keepdims=True))
    safe = jnp.where(new_m == -jnp.inf, 0.0, new_m) if masked else new_m
    base = widen(safe, cfg.key_tile)
    fade = jnp.exp2(m - safe)
    total = kind.l[at, :] * fade
    kept = kind.acc[at, :] * widen(fade, cfg.values)
    added = jnp.zeros_like(kept)
    for start, s in zip(starts, parts, strict=True):
        p = jnp.exp2(s - base)
        total += jnp.sum(p, axis=1, keepdims=True)
        added += dot(p.astype(dtype), keys(start, cfg.values), 1, 0)
    kind.m[at, :], kind.l[at, :], kind.acc[at, :] = new_m, total, kept + added

    if masked and cfg.causal and kind.order is not None:
        # a weight of 0 does not keep NaN out of a sum: where one came in, every row gets just what it sees

        @pl.when(jnp.max(jnp.where(added != added, 1.0, 0.0)) > 0)
        def _() -> None:
            def one(n: jax.Array, total: jax.Array) -> jax.Array:
                start = pl.multiple_of(n * cfg.key_tile, cfg.key_tile)
                p = jnp.exp2(scores(start) - base).astype(dtype)
                return total + _select(p, seen(start), keys(start, cfg.values))

            kind.acc[at, :] = kept + lax.fori_loop(0, len(starts), one, jnp.zeros_like(kept))


def _select(p: jax.Array, seen: jax.Array, values: jax.Array) -> jax.Array:
    """p [rows, keys] times values [keys, n], where a row meets only the values it sees, NaN and inf included."""
    wide = values.astype(jnp.float32)
    part = dot(p, jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(p.dtype), 1, 0)
    attends = jnp.where(seen, 1.0, 0.0).astype(p.dtype)
    for what, mark in ((wide == jnp.inf, jnp.inf), (wide == -jnp.inf, -jnp.inf), (wide != wide, jnp.nan)):
        part += jnp.where(dot(attends, jnp.where(what, 1.0, 0.0).astype(p.dtype), 1, 0) > 0, mark, 0.0)
    return part


def _finish(cfg: Config, refs: Refs, kind: Kind) -> None:
    """acc / l into `o`, and the natural log-sum-exp into `lse_rows`."""
    m, total = kind.m[...], kind.l[...]
    share = jnp.where(total == 0.0, 0.0, refs.factors[OUTPUTS] / jnp.where(total == 0.0, 1.0, total))
    kind.o[...] = (kind.acc[...] * widen(share, cfg.values)).astype(kind.o.dtype)
    if cfg.lse:
        kind.lse_rows[...] = (m + jnp.log2(total)) * (1 / LOG2_E)
