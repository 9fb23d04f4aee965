"""The ragged kernel's body: singles are processed in a line (`_line`), and then the items of longer requests.

`cache` is the aliased output, so reads after the writing loop see the new tokens. Scores are in units of log2: exp2 is the
hardware's exponential. m (running maximum), l (sum) and acc are float32. Only blocks with a masked score compute masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu import _line, _long, _pages, _plan
from attn.jax.kernels.tpu._line import Line
from attn.jax.kernels.tpu._pages import Item, copy
from attn.jax.kernels.tpu._refs import RaggedConfig, RaggedRefs


def run(cfg: RaggedConfig, refs: RaggedRefs) -> None:
    """The whole launch."""
    _pages.start(_line.rules(cfg, refs))
    loads = _pages.Loads(cfg, refs, refs.counts[0])
    line = Line(cfg, refs, loads)
    if cfg.large:  # its queries depend on nothing that is written, and are the longest copy that the first item waits for
        pl.when(loads.count > line.count)(lambda: _pages.start(_longs(cfg, refs).queries(line.count)))
    _pages.writing(cfg, refs, lambda: _attend(line))


def _attend(line: Line) -> None:
    cfg, refs, loads = line.cfg, line.refs, line.loads
    if not cfg.large:
        _line.attend(line, (jnp.int32(0),) * 3)
        return
    _long.begin(cfg, refs)
    _pages.attend(cfg, refs, loads, _longs(cfg, refs), after=(line.count, functools.partial(_line.attend, line)))


def _longs(cfg: RaggedConfig, refs: RaggedRefs) -> _pages.ItemOps:
    def rows(i: jax.Array) -> Any:
        # a slice of HBM must begin at a whole tile, so long requests' rows begin at multiples of `align` tokens (`_plan`)
        row = refs.items[_plan.ROW * cfg.num_items + i]
        return pl.ds(pl.multiple_of(row * cfg.group, cfg.align * cfg.group), cfg.rows)

    def queries(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        copies = [copy(refs.query.at[:, rows(i), :], refs.q.at[slot], refs.q_sem.at[slot])]
        copies += [copy(refs.tree.at[rows(i), :], refs.edges.at[slot], refs.q_sem.at[slot])] if cfg.tree else []
        return copies + ([copy(refs.ranges.at[i], refs.seen.at[slot], refs.q_sem.at[slot])] if cfg.ranges else [])

    def outputs(i: jax.Array) -> list[Any]:
        slot = lax.rem(i, 2)
        copies = [copy(refs.o.at[slot], refs.out.at[:, rows(i), :], refs.o_sem)]
        return copies + ([copy(refs.lse_rows.at[slot], refs.lse.at[:, rows(i), :], refs.o_sem)] if cfg.lse else [])

    def attend(item: Item, begin: jax.Array, slot: jax.Array) -> None:
        def step(first: jax.Array, size: Any, clear: int = 0) -> _long.StepKeys:
            return _long.StepKeys(slot, first, begin + first, size, clear)

        def is_clear(first: jax.Array, size: int) -> jax.Array:
            return _long.is_clear(cfg, item, begin + first, begin + first + size)

        def whole(first: jax.Array, size: int, split: Callable[[jax.Array], None]) -> None:
            """Process keys that every row sees in one step; call split(first) for others."""
            # One step of many keys costs less than several, but compares none of them.
            clear = is_clear(first, size)

            @pl.when(clear)
            def _() -> None:
                _long.attend(cfg, refs, item, step(first, size), 0)
                _long.recompute(cfg, refs, item, step(first, size))

            pl.when(jnp.logical_not(clear))(lambda: split(first))

        def edge(first: jax.Array) -> None:
            """The same keys in smaller steps, with masks for those that need them."""
            stop = jnp.minimum(item.high - begin - first, cfg.chunk)
            has_unseen = (stop < cfg.chunk) | (begin + first < item.low)

            @pl.when((stop > 0) & has_unseen)
            def _() -> None:
                tiles = lax.div(first, cfg.tile) + lax.div(stop + (cfg.least - 1), cfg.least) * (cfg.least // cfg.tile)
                _pages.clean(cfg, refs, slot, item.low - begin, item.loaded - begin, tiles)

            def one(done: jax.Array) -> jax.Array:
                at = pl.multiple_of(first + done, cfg.key_tile)
                clears = [is_clear(at, (n + 1) * cfg.key_tile) for n in range(cfg.fused)]
                size: Any = cfg.key_tile
                fused = None
                if cfg.fused > 1:
                    # how many tiles every row sees, if a masked one after them is in the same step; otherwise 0
                    count = sum(clear.astype(jnp.int32) for clear in clears)
                    fused = jnp.where((count < cfg.fused) & (stop - done > count * size), count, 0)
                    size *= fused + 1
                item.where_seen(lambda: begin + at, cfg.key_tile, lambda: small(at, size, clears[0], fused))
                return done + size

            def small(at: jax.Array, size: Any, clear: jax.Array, fused: jax.Array | None) -> None:
                left, masked = item.high - begin - at, jnp.logical_not(clear)
                if fused is not None:
                    clear &= fused == 0
                    is_short = left - (size - cfg.key_tile) <= cfg.last
                    # a step's size is static, so there is code for each number of tiles and both lengths of the last one
                    for count in range(1, cfg.fused):
                        for last, here in ((cfg.last, is_short), (cfg.key_tile, jnp.logical_not(is_short))):
                            if last:
                                all_keys = step(at, count * cfg.key_tile + last, clear=count * cfg.key_tile)
                                pl.when(here & (fused == count))(functools.partial(_long.attend, cfg, refs, item, all_keys, 1))
                pl.when(clear)(lambda: _long.attend(cfg, refs, item, step(at, cfg.key_tile), 0))
                # most items have no row with more ranges than the first, and are spared the other comparisons
                if item.more is not None and cfg.ranges > 1:
                    pl.when(masked & (item.more > 0))(lambda: _long.attend(cfg, refs, item, step(at, cfg.key_tile), cfg.ranges))
                    masked &= item.more == 0
                if cfg.last:
                    is_short = masked & (left <= cfg.last)
                    pl.when(is_short)(lambda: _long.attend(cfg, refs, item, step(at, cfg.last), 1))
                    masked &= jnp.logical_not(is_short)
                pl.when(masked)(lambda: _long.attend(cfg, refs, item, step(at, cfg.key_tile), 1))
                _long.recompute(cfg, refs, item, step(at, size))

            lax.while_loop(lambda done: done < stop, one, jnp.int32(0))

        def chunk(first: jax.Array) -> None:
            whole(first, cfg.chunk, edge) if cfg.chunk > cfg.key_tile else edge(first)

        def chunks(_: jax.Array) -> None:
            count = lax.div(jnp.clip(item.high - begin, 0, cfg.kv_block) + (cfg.chunk - 1), cfg.chunk)
            lax.fori_loop(0, count, lambda n, _: chunk(pl.multiple_of(n * cfg.chunk, cfg.chunk)), None)

        # A block is tried as one step where that is not longer than an unrolled stretch of code may be.
        if cfg.chunk == cfg.kv_block:
            chunk(jnp.int32(0))
        elif cfg.num_kv_heads * cfg.rows * cfg.kv_block <= cfg.stretch:  # with more heads, longer steps gain nothing
            whole(jnp.int32(0), cfg.kv_block, chunks)
        else:
            chunks(jnp.int32(0))

    return _pages.ItemOps(queries, outputs, lambda: _long.reset(refs), attend, lambda i: _long.finish(cfg, refs, lax.rem(i, 2)))
