"""The kernel's body: two loops over the plan, one that writes tiles and one that attends items.

`cache` is the aliased output, so reads after the writing loop see the new tokens. A kv block is `kv_block` tokens of
one request, brought page by page into one of the slots of `kv` while another is computed on; the pipeline runs ahead
across items, so a request's first blocks arrive during the last ones of the request before. One output buffer
suffices: the write of item i must be over before that of item i + 1 begins, because an item writes whole tiles and its
last rows may belong to the next one.

Scores are in units of log2: exp2 is the hardware's exponential. m (running maximum), l (sum) and acc are float32. Only
blocks that hold a masked score pay for masks; what lies in unused slots may be NaN, so there the values are zeroed
first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _long, _plan, _single
from attn.jax.kernels.tpu._refs import Config, Ref, Refs, rows_between


def run(cfg: Config, refs: Refs) -> None:
    """The whole launch."""
    if cfg.write:
        _write(cfg, refs)
    _attend(cfg, refs)


def _copy(source: Ref, target: Ref, sem: Ref) -> Any:
    return pltpu.make_async_copy(source, target, sem)


def _start(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()


def _write(cfg: Config, refs: Refs) -> None:
    """Put every tile of new rows into the cache, keeping the rows of a tile that are not new."""
    lag = cfg.ring // 2
    count = refs.counts[1]

    def field(column: int, t: jax.Array) -> jax.Array:
        return refs.tiles[column * cfg.num_tiles + t]

    def wanted(t: jax.Array) -> jax.Array:
        return field(_plan.FIRST, t) < field(_plan.STOP, t)

    def partial(t: jax.Array) -> jax.Array:
        return field(_plan.STOP, t) - field(_plan.FIRST, t) < cfg.tile

    def place(t: jax.Array) -> Ref:
        offset = pl.multiple_of(field(_plan.OFFSET, t), cfg.tile)
        return refs.cache.at[field(_plan.PAGE, t), :, :, pl.ds(offset, cfg.tile), :]

    def reads(t: jax.Array) -> tuple[Any, Any]:
        slot = lax.rem(t, cfg.ring)
        source = pl.multiple_of(field(_plan.SOURCE, t), cfg.tile)
        fresh = refs.fresh.at[:, :, pl.ds(source, cfg.tile), :]
        return (
            _copy(fresh, refs.new.at[slot], refs.read_sem.at[slot]),
            _copy(place(t), refs.old.at[slot], refs.read_sem.at[slot]),
        )

    def write(t: jax.Array) -> Any:
        slot = lax.rem(t, cfg.ring)
        return _copy(refs.new.at[slot], place(t), refs.write_sem.at[slot])

    def step(t: jax.Array, _: None) -> None:
        u, w = t - lag, t - cfg.ring

        @pl.when((w >= 0) & (w < count))
        def _free_slot() -> None:
            pl.when(wanted(w))(lambda: write(w).wait())

        @pl.when(t < count)
        def _read() -> None:
            @pl.when(wanted(t))
            def _() -> None:
                new, old = reads(t)
                new.start()
                pl.when(partial(t))(old.start)

        @pl.when((u >= 0) & (u < count))
        def _merge_and_write() -> None:
            @pl.when(wanted(u))
            def _() -> None:
                slot = lax.rem(u, cfg.ring)
                new, old = reads(u)
                new.wait()

                @pl.when(partial(u))
                def _() -> None:
                    old.wait()
                    flat = (cfg.planes * cfg.num_kv_heads, cfg.tile, cfg.lanes)
                    fresh, kept = refs.new[slot].reshape(flat), refs.old[slot].reshape(flat)
                    merged = rows_between(fresh, kept, field(_plan.FIRST, u), field(_plan.STOP, u))
                    refs.new[slot] = merged.reshape(refs.new.shape[1:])

                write(u).start()

    lax.fori_loop(0, count + cfg.ring, step, None)


def _attend(cfg: Config, refs: Refs) -> None:
    count, zero = refs.counts[0], jnp.int32(0)

    def field(column: int, i: jax.Array) -> jax.Array:
        return refs.items[column * cfg.num_items + i]

    def long_rows(i: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(field(_plan.ROW, i) * cfg.group, cfg.align * cfg.group), cfg.rows)

    def query_copies(i: jax.Array, single: bool) -> list[Any]:
        slot = lax.rem(i, 2)
        sem = refs.q_sem.at[slot]
        if single:
            return [_copy(refs.query1.at[field(_plan.ROW, i)], refs.q1.at[slot], sem)]
        copies = [_copy(refs.query.at[:, long_rows(i), :], refs.q.at[slot], sem)]
        if cfg.tree:
            copies.append(_copy(refs.tree.at[long_rows(i), :], refs.edges.at[slot], sem))
        return copies

    def out_copies(i: jax.Array, single: bool) -> list[Any]:
        row = field(_plan.ROW, i)
        if single:
            copies = [_copy(refs.o1, refs.out1.at[row], refs.o_sem)]
            return copies + ([_copy(refs.lse_rows1, refs.lse1.at[row], refs.o_sem)] if cfg.lse else [])
        copies = [_copy(refs.o, refs.out.at[:, long_rows(i), :], refs.o_sem)]
        return copies + ([_copy(refs.lse_rows, refs.lse.at[:, long_rows(i), :], refs.o_sem)] if cfg.lse else [])

    def by_kind(i: jax.Array, do: Callable[[bool], Any]) -> Any:
        """do(True) if item i is a single, else do(False)."""
        if not cfg.large:
            return do(True)
        return lax.cond(field(_plan.SINGLE, i) == 1, lambda: do(True), lambda: do(False))

    def first_page(i: jax.Array) -> jax.Array:
        return lax.div(field(_plan.LOW, i), cfg.page)

    def each_page(i: jax.Array, b: jax.Array, slot: jax.Array, do: Callable[[Any], None]) -> None:
        """do(copy) for each page of block b of item i that holds a visible key."""
        per_block = cfg.kv_block // cfg.page
        begin = first_page(i) + b * per_block
        stop = lax.div(field(_plan.HIGH, i) + (cfg.page - 1), cfg.page)
        base = field(_plan.TABLE, i) + begin

        def one(n: jax.Array, _: None) -> None:
            target = refs.kv.at[slot, :, :, pl.ds(pl.multiple_of(n * cfg.page, cfg.page), cfg.page), :]
            do(_copy(refs.cache.at[refs.table[base + n]], target, refs.kv_sem.at[slot]))

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
        by_kind(zero, lambda single: _start(query_copies(zero, single)))

    ahead = (zero, zero, zero)
    for _slot in range(cfg.slots - 1):
        ahead = fetch_next(*ahead)

    def item(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        blocks = field(_plan.BLOCKS, i)
        low, high, position = (field(column, i) for column in (_plan.LOW, _plan.HIGH, _plan.POSITION))
        scalars = _long.Item(lax.rem(i, 2), position, low, high, field(_plan.CONTEXT, i))

        @pl.when(i + 1 < count)
        def _() -> None:
            by_kind(i + 1, lambda single: _start(query_copies(i + 1, single)))

        def work(single: bool) -> tuple[jax.Array, ...]:
            kind = _single if single else _long
            _wait(query_copies(i, single))
            kind.reset(cfg, refs)

            def block(b: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot, *ahead = state
                after = fetch_next(*ahead)
                each_page(i, b, slot, lambda copy: copy.wait())
                begin = first_page(i) * cfg.page + b * cfg.kv_block
                compute = single_block if single else long_block
                compute(begin, slot, (begin >= low) & (begin + cfg.kv_block <= high))
                return jnp.where(slot + 1 == cfg.slots, 0, slot + 1), *after

            def single_block(begin: jax.Array, slot: jax.Array, whole: jax.Array) -> None:
                bounds = (low, high, position)
                pl.when(whole)(lambda: _single.attend(cfg, refs, slot, scalars.q_slot, begin, bounds, False))

                @pl.when(jnp.logical_not(whole))
                def _() -> None:
                    _clean(cfg, refs, slot, low - begin, high - begin)
                    _single.attend(cfg, refs, slot, scalars.q_slot, begin, bounds, True)

            def long_block(begin: jax.Array, slot: jax.Array, whole: jax.Array) -> None:
                pl.when(jnp.logical_not(whole))(lambda: _clean(cfg, refs, slot, low - begin, high - begin))

                visible = jnp.clip(high - begin, 1, cfg.kv_block)

                def steps(size: int, start: jax.Array, stop: jax.Array) -> None:
                    """All of rows [start, stop), by steps of `size` where they are clear and else by smaller ones."""

                    def one(n: jax.Array, _: None) -> None:
                        first = pl.multiple_of(start + n * size, size)
                        step = _long.Step(slot, first, begin + first, size)
                        clear = _long.is_clear(cfg, scalars, begin + first, begin + first + size)
                        pl.when(clear)(lambda: _long.attend(cfg, refs, scalars, step, False))

                        @pl.when(jnp.logical_not(clear))
                        def _at_the_edge() -> None:
                            if size > cfg.key_tile:
                                steps(cfg.key_tile, first, jnp.minimum(first + size, stop))
                            else:
                                _long.attend(cfg, refs, scalars, step, True)

                    lax.fori_loop(0, lax.div(stop - start + (size - 1), size), one, None)

                steps(cfg.chunk, jnp.int32(0), visible)

            state_after = lax.fori_loop(0, blocks, block, state)
            if single:
                spent = jnp.where(state_after[0] == 0, cfg.slots, state_after[0]) - 1

                @pl.when(_single.failed(cfg, refs))
                def _() -> None:
                    _single.reset(cfg, refs)

                    def again(b: jax.Array, _: None) -> None:
                        each_page(i, b, spent, lambda copy: copy.start())
                        each_page(i, b, spent, lambda copy: copy.wait())
                        begin = first_page(i) * cfg.page + b * cfg.kv_block
                        _clean(cfg, refs, spent, low - begin, high - begin)
                        _single.attend(cfg, refs, spent, scalars.q_slot, begin, (low, high, position), True, exact=True)

                    lax.fori_loop(0, blocks, again, None)

            @pl.when(i > 0)
            def _() -> None:
                by_kind(i - 1, lambda was_single: _wait(out_copies(i - 1, was_single)))

            kind.finish(cfg, refs)
            _start(out_copies(i, single))
            return state_after

        return by_kind(i, work)

    lax.fori_loop(0, count, item, (zero, *ahead))

    @pl.when(count > 0)
    def _() -> None:
        by_kind(count - 1, lambda single: _wait(out_copies(count - 1, single)))


def _clean(cfg: Config, refs: Refs, slot: jax.Array, first: jax.Array, stop: jax.Array) -> None:
    """Zero the values in rows of the block outside [first, stop)."""
    plane = cfg.planes - 1

    def tile(t: jax.Array, _: None) -> None:
        start = pl.multiple_of(t * cfg.tile, cfg.tile)
        at = (slot, plane, slice(None), pl.ds(start, cfg.tile), slice(None))
        refs.kv[at] = rows_between(refs.kv[at], None, first - start, stop - start)

    # a block begins in the first page that is seen, so what lies before `first` is less than a page
    lax.fori_loop(0, lax.div(jnp.maximum(first, 0) + (cfg.tile - 1), cfg.tile), tile, None)
    lax.fori_loop(lax.div(jnp.clip(stop, 0, cfg.kv_block), cfg.tile), cfg.kv_block // cfg.tile, tile, None)
