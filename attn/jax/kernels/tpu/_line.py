"""The line of singles: the keys of all requests of one row, end to end, in segments that share blocks.

A single's keys are padded to whole segments of `cfg.segment` keys only, and a block is the next `cfg.segments` segments of the
line, whosever they are. So several short requests are one block, whose copies, products and exponentials run beside each
other, and a long one wastes less than a segment at its end. Each segment has its owner's queries, mask and sums; a block of
one request that sees all of it is processed as a whole.

Keys that a request does not see have a weight of 0 and values that are finite, unless a page has a NaN in a slot without a key
or a number that another request sees: then the sums are not finite, and the request is processed again, exactly.

The queries of a request arrive with the block of its first segment. Its sums are in one of as many places as a block has
segments, since a block has at most that many owners and requests finish in their order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu import _pages, _plan, _single
from attn.jax.kernels.tpu._refs import Config, Refs
from attn.jax.kernels.tpu._single import Keys

#: The place of a segment in the line: the number of its owner, and its own among the owner's.
Place = tuple[jax.Array, jax.Array]


class Segment(NamedTuple):
    """The scalars of a segment. `live` is false past the line's end, where a segment has no keys."""

    keys: Keys
    owner: jax.Array
    number: jax.Array
    live: jax.Array
    of: jax.Array  # the number of its owner's
    pages: jax.Array  # that hold a visible key
    table: jax.Array  # the place of the first one's id

    @property
    def starts(self) -> jax.Array:
        """Whether it is its owner's first."""
        return self.live & (self.number == 0)


@dataclasses.dataclass(frozen=True)
class Line:
    """The operations on the line of a launch."""

    cfg: Config
    refs: Refs
    loads: _pages.Loads

    @property
    def count(self) -> jax.Array:
        return self.refs.counts[2]  # type: ignore[no-any-return]

    @property
    def blocks(self) -> jax.Array:
        return self.refs.counts[3]  # type: ignore[no-any-return]

    def segment(self, place: Place) -> Segment:
        """The segment at a place; past the end, one without keys."""
        cfg, (owner, number) = self.cfg, place
        live, i = owner < self.count, jnp.minimum(owner, cfg.num_items - 1)
        item, origin = self.loads.item(i), self.loads.first_page(i) * cfg.page
        begin = origin + number * cfg.segment
        high = jnp.where(live, item.high, 0)
        pages = jnp.clip(lax.div(jnp.maximum(high - begin, 0) + (cfg.page - 1), cfg.page), 0, cfg.segment // cfg.page)
        for low, stop in item.gaps:
            pages = jnp.where((begin >= low) & (begin + cfg.segment <= stop), 0, pages)
        query, state = lax.rem(owner, cfg.query_slots), lax.rem(owner, cfg.segments)
        keys = Keys(query, state, begin, item.low, high, item.position, item.gaps)
        table = self.loads.field(_plan.TABLE, i) + lax.div(begin, cfg.page)
        return Segment(keys, owner, number, live, self.loads.field(_plan.BLOCKS, i), pages, table)

    def after(self, one: Segment, number: int) -> Place:
        """The place `number` segments after one; they are of its owner. Segments in a gap are skipped."""
        cfg, keys, then = self.cfg, one.keys, one.number + number
        ends = one.live & (then >= one.of)
        origin = keys.begin - one.number * cfg.segment
        for low, stop in keys.gaps:
            first = lax.div(jnp.maximum(low - origin, 0) + (cfg.segment - 1), cfg.segment)
            beyond = lax.div(jnp.maximum(stop - origin, 0), cfg.segment)
            then = jnp.where((then >= first) & (then < beyond), beyond, then)
        return jnp.where(ends, one.owner + 1, one.owner), jnp.where(ends, 0, then)

    def segments(self, place: Place) -> tuple[list[Segment], Place]:
        """(those of the block that begins at `place`, the place after them)."""
        found = []
        for _ in range(self.cfg.segments):
            found.append(self.segment(place))
            place = self.after(found[-1], 1)
        return found, place

    def is_whole(self, one: Segment) -> jax.Array:
        """Whether the block that begins with a segment is all its owner's, who sees all of it.

        Never so if bits must not depend on where in the line a request is: segments are the same anywhere.
        """
        if self.cfg.invariant:
            return jnp.bool_(False)
        (_, _, begin, low, high, _, gaps), stop = one.keys, one.keys.begin + self.cfg.kv_block
        whole = one.live & (begin >= low) & (stop <= high)
        for low, high in gaps:
            whole &= (stop <= low) | (begin >= high)
        return whole

    def row(self, owner: jax.Array) -> jax.Array:
        return self.loads.field(_plan.ROW, owner)

    def queries(self, one: Segment, slot: jax.Array) -> Any:
        refs, row = self.refs, self.row(jnp.minimum(one.owner, self.cfg.num_items - 1))
        return _pages.copy(refs.query1.at[row], refs.q1.at[one.keys.query], refs.kv_sem.at[slot])

    def outputs(self, owner: jax.Array) -> list[Any]:
        refs, at = self.refs, lax.rem(owner, self.cfg.segments)
        pairs = [(refs.o1, refs.out1), *([(refs.lse_rows1, refs.lse1)] if self.cfg.lse else [])]
        return [_pages.copy(made.at[at], out.at[self.row(owner)], refs.o1_sem.at[at]) for made, out in pairs]

    def clear(self) -> None:
        """Zero what segments may hold that is no page: numbers that are not finite would make requests fail."""
        cfg, kv = self.cfg, self.refs.kv
        first = 0 if cfg.rebiased else cfg.planes - 1
        per_slot = (cfg.planes - first) * cfg.num_kv_heads

        def head(n: jax.Array, _: None) -> None:
            at = lax.rem(n, per_slot)
            plane = first + lax.div(at, cfg.num_kv_heads)
            place = lax.div(n, per_slot), plane, lax.rem(at, cfg.num_kv_heads)
            kv[place] = jnp.zeros(kv.shape[3:], kv.dtype)

        lax.fori_loop(0, jnp.where(self.blocks > 0, cfg.slots * per_slot, 0), head, None)

    def start(self, place: Place, slot: jax.Array) -> Place:
        """Start loading the block at a place into `slot`; return the place after it."""
        cfg, first = self.cfg, self.segment(place)
        per_segment, per_block = cfg.segment // cfg.page, cfg.kv_block // cfg.page

        def whole() -> Place:
            pl.when(first.starts)(self.queries(first, slot).start)
            for n in range(per_block):
                self.loads.page(first.table + n, n, slot).start()
            return self.after(first, cfg.segments)

        def shared() -> Place:
            found, after = self.segments(place)
            for t, one in enumerate(found):
                pl.when(one.starts)(self.queries(one, slot).start)
                for n in range(per_segment):
                    pl.when(n < one.pages)(self.loads.page(one.table + n, t * per_segment + n, slot).start)
            return after

        return lax.cond(self.is_whole(first), whole, shared)  # type: ignore[no-any-return]

    def wait(self, pages: jax.Array, slot: jax.Array) -> None:
        self.loads.wait_for(pages, lambda n: self.loads.page(jnp.int32(0), n, slot), slot)

    def process(self, place: Place, slot: jax.Array) -> Place:
        """Process the block at a place, and finish the requests that end in it; return the place after it."""
        cfg, refs, first = self.cfg, self.refs, self.segment(place)

        def whole() -> Place:
            pl.when(first.starts)(self.queries(first, slot).wait)
            self.loads.whole(slot).wait()
            size = min(cfg.kv_block, _single.KEYS_AT_ONCE)
            _single.attend(cfg, refs, slot, [(first.keys, at, size) for at in range(0, cfg.kv_block, size)], False)
            return self.after(first, cfg.segments)

        def shared() -> Place:
            found, after = self.segments(place)
            for one in found:
                pl.when(one.starts)(self.queries(one, slot).wait)
            self.wait(functools.reduce(jnp.add, [one.pages for one in found]), slot)
            parts = [(one.keys, t * cfg.segment, cfg.segment) for t, one in enumerate(found)]
            _single.attend(cfg, refs, slot, parts, True)
            return after

        after = lax.cond(self.is_whole(first), whole, shared)

        @pl.when(after[0] > first.owner)
        def _() -> None:
            @pl.when(_single.failed(cfg, refs))
            def _() -> None:
                lax.fori_loop(first.owner, after[0], lambda owner, _: self.recompute(owner, slot), None)

            lax.fori_loop(first.owner, after[0], lambda owner, _: self.finish(owner), None)

        return after

    def finish(self, owner: jax.Array) -> None:
        cfg, refs, at = self.cfg, self.refs, lax.rem(owner, self.cfg.segments)
        pl.when(owner >= cfg.segments)(lambda: _pages.wait(self.outputs(owner - cfg.segments)))
        _single.finish(cfg, refs, at)
        _pages.start(self.outputs(owner))
        _single.reset(cfg, refs, at)

    def recompute(self, owner: jax.Array, slot: jax.Array) -> None:
        """If a request's sums are not right, process its segments again, one at a time in a slot whose block is done with."""
        cfg, at = self.cfg, lax.rem(owner, self.cfg.segments)

        def again(number: jax.Array, _: None) -> None:
            one = self.segment((owner, number))
            for n in range(cfg.segment // cfg.page):
                pl.when(n < one.pages)(self.loads.page(one.table + n, n, slot).start)
            self.wait(one.pages, slot)
            _single.attend(cfg, self.refs, slot, [(one.keys, 0, cfg.segment)], True, exact=True)

        @pl.when(_single.failed(cfg, self.refs, at))
        def _() -> None:
            _single.reset(cfg, self.refs, at)
            lax.fori_loop(0, self.loads.field(_plan.BLOCKS, owner), again, None)


def attend(line: Line, ahead: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Process the line. `ahead` and what is returned: see `before` of `_pages.attend`."""
    cfg, loads, zero = line.cfg, line.loads, jnp.int32(0)
    for at in range(cfg.segments):
        _single.reset(cfg, line.refs, at)
    line.clear()

    def start_next(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        owner, number, i, b, slot = state

        def of_line() -> tuple[jax.Array, ...]:
            return *line.start((owner, number), slot), i, b

        def of_items() -> tuple[jax.Array, ...]:
            return owner, number, *(loads.start_next(i, b, slot)[:2] if cfg.large else (i, b))

        return *lax.cond(block < line.blocks, of_line, of_items), loads.after(slot)

    def process(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot, owner, number = state[:3]
        ahead = start_next(block + cfg.slots - 1, state[3:])
        return loads.after(slot), *line.process((owner, number), slot), *ahead

    state = lax.fori_loop(0, cfg.slots - 1, start_next, (zero, zero, *ahead))
    slot, _, _, _, _, *ahead = lax.fori_loop(0, line.blocks, process, (zero, zero, zero, *state))

    def drain(owner: jax.Array, _: None) -> None:
        _pages.wait(line.outputs(owner))

    lax.fori_loop(jnp.maximum(line.count - cfg.segments, 0), line.count, drain, None)
    return slot, *ahead
