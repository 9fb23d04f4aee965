"""The line of singles: the keys of all requests of one row, end to end, in segments that share blocks.

A single's keys are padded to whole segments of `cfg.segment` keys only, and a block is the next `cfg.segments` segments of the
line, whosever they are. So several short requests are one block, whose copies, products and exponentials run beside each
other, and a long one wastes less than a segment at its end. Each segment has its owner's queries, mask and sums; a block of
one request that sees all of it is processed as a whole.

Keys that a request does not see have a weight of 0 and values that are finite, unless a page has a NaN in a slot without a key
or a number that another request sees: then the sums are not finite, and the request is processed again, exactly.

The queries of a request arrive with the block of its first segment. There are as many buffers of sums as a block has segments,
since a block has at most that many owners and requests finish in their order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu import _pages, _plan, _single
from attn.jax.kernels.tpu._refs import RaggedConfig, RaggedRefs
from attn.jax.kernels.tpu._single import Keys

#: The index of a segment in the line: that of its owner, and its index among the owner's.
SegmentIndex = tuple[jax.Array, jax.Array]


class Segment(NamedTuple):
    """The scalars of a segment. `live` is false past the line's end, where a segment has no keys."""

    keys: Keys
    owner: jax.Array
    number: jax.Array
    live: jax.Array
    owner_segments: jax.Array  # how many its owner has
    pages: jax.Array  # that hold a visible key
    table: jax.Array  # the block table's entry of the first one

    @property
    def starts(self) -> jax.Array:
        """Whether it is its owner's first."""
        return self.live & (self.number == 0)


@dataclasses.dataclass(frozen=True)
class Line:
    """The operations on the line of a launch."""

    cfg: RaggedConfig
    refs: RaggedRefs
    loads: _pages.Loads

    @property
    def count(self) -> jax.Array:
        return self.refs.counts[2]  # type: ignore[no-any-return]

    @property
    def blocks(self) -> jax.Array:
        return self.refs.counts[3]  # type: ignore[no-any-return]

    def segment(self, index: SegmentIndex) -> Segment:
        """The segment at an index; past the end, one without keys."""
        cfg, (owner, number) = self.cfg, index
        # Past the line's end scalars are read of an item that exists, and `high` of 0 leaves it without keys.
        live, i = owner < self.count, jnp.minimum(owner, cfg.num_items - 1)
        item, origin = self.loads.item(i), self.loads.first_page(i) * cfg.page
        begin = origin + number * cfg.segment
        high = jnp.where(live, item.high, 0)
        pages = jnp.clip(lax.div(jnp.maximum(high - begin, 0) + (cfg.page - 1), cfg.page), 0, cfg.segment // cfg.page)
        for low, stop in item.gaps:
            pages = jnp.where((begin >= low) & (begin + cfg.segment <= stop), 0, pages)
        # A request's sums are free again once it has ended, which is before `segments` later requests begin; its queries arrive
        # with its first block, so they also need room for the blocks that are being loaded.
        query, state = lax.rem(owner, cfg.query_slots), lax.rem(owner, cfg.segments)
        keys = Keys(query, state, begin, item.low, high, item.position, item.gaps)
        table = self.loads.field(_plan.TABLE, i) + lax.div(begin, cfg.page)
        return Segment(keys, owner, number, live, self.loads.field(_plan.BLOCKS, i), pages, table)

    def after(self, segment: Segment, number: int) -> SegmentIndex:
        """The index `number` segments after one, all of its owner. Segments in a gap are skipped."""
        cfg, keys, next_number = self.cfg, segment.keys, segment.number + number
        # Past the line's end the owner stays, and its segments hold nothing.
        ends = segment.live & (next_number >= segment.owner_segments)
        origin = keys.begin - segment.number * cfg.segment
        for low, stop in keys.gaps:
            # segments that lie in the gap as a whole: the plan counts blocks without them (`_plan._items`)
            first = lax.div(jnp.maximum(low - origin, 0) + (cfg.segment - 1), cfg.segment)
            beyond = lax.div(jnp.maximum(stop - origin, 0), cfg.segment)
            next_number = jnp.where((next_number >= first) & (next_number < beyond), beyond, next_number)
        return jnp.where(ends, segment.owner + 1, segment.owner), jnp.where(ends, 0, next_number)

    def segments(self, index: SegmentIndex) -> tuple[list[Segment], SegmentIndex]:
        """(those of the block that begins at `index`, the index after them)."""
        segments = []
        for _ in range(self.cfg.segments):
            segments.append(self.segment(index))
            index = self.after(segments[-1], 1)
        return segments, index

    def is_whole(self, segment: Segment) -> jax.Array:
        """Whether the block that begins with a segment is all its owner's, who sees all of it.

        Never so if bits must not depend on where in the line a request is: segments are the same anywhere.
        """
        if self.cfg.invariant:
            return jnp.bool_(False)
        (_, _, begin, low, high, _, gaps), stop = segment.keys, segment.keys.begin + self.cfg.kv_block
        whole = segment.live & (begin >= low) & (stop <= high)
        for low, high in gaps:
            whole &= (stop <= low) | (begin >= high)
        return whole

    def row(self, owner: jax.Array) -> jax.Array:
        return self.loads.field(_plan.ROW, owner)

    def queries(self, segment: Segment, slot: jax.Array) -> Any:
        refs, row = self.refs, self.row(jnp.minimum(segment.owner, self.cfg.num_items - 1))
        # on the semaphore of the block: both are waited for before the block is processed
        return _pages.copy(refs.query1.at[row], refs.q1.at[segment.keys.query], refs.kv_sem.at[slot])

    def outputs(self, owner: jax.Array) -> list[Any]:
        refs, at = self.refs, lax.rem(owner, self.cfg.segments)
        pairs = [(refs.o1, refs.out1), *([(refs.lse_rows1, refs.lse1)] if self.cfg.lse else [])]
        return [_pages.copy(made.at[at], out.at[self.row(owner)], refs.o1_sem.at[at]) for made, out in pairs]

    def clear(self) -> None:
        """Zero what segments may hold that is no page: numbers that are not finite would make requests fail."""
        cfg, kv = self.cfg, self.refs.kv
        # Scores of unseen keys are replaced, so only values matter, but a rebiased key that is NaN has its request repeated.
        first = 0 if cfg.rebiased else cfg.planes - 1
        per_slot = (cfg.planes - first) * cfg.num_kv_heads

        def head(n: jax.Array, _: None) -> None:
            at = lax.rem(n, per_slot)
            plane = first + lax.div(at, cfg.num_kv_heads)
            index = lax.div(n, per_slot), plane, lax.rem(at, cfg.num_kv_heads)
            kv[index] = jnp.zeros(kv.shape[3:], kv.dtype)

        lax.fori_loop(0, jnp.where(self.blocks > 0, cfg.slots * per_slot, 0), head, None)

    def start(self, index: SegmentIndex, slot: jax.Array) -> SegmentIndex:
        """Start loading the block at an index into `slot`; return the index after it."""
        cfg, first = self.cfg, self.segment(index)
        per_segment, per_block = cfg.segment // cfg.page, cfg.kv_block // cfg.page

        def whole() -> SegmentIndex:
            pl.when(first.starts)(self.queries(first, slot).start)
            for n in range(per_block):
                self.loads.page(first.table + n, n, slot).start()
            return self.after(first, cfg.segments)

        def shared() -> SegmentIndex:
            segments, next_index = self.segments(index)
            for t, segment in enumerate(segments):
                pl.when(segment.starts)(self.queries(segment, slot).start)
                for n in range(per_segment):
                    pl.when(n < segment.pages)(self.loads.page(segment.table + n, t * per_segment + n, slot).start)
            return next_index

        # The same choice as in `process`, by the same scalars: as many copies are waited for as were started.
        return lax.cond(self.is_whole(first), whole, shared)  # type: ignore[no-any-return]

    def wait(self, pages: jax.Array, slot: jax.Array) -> None:
        self.loads.wait_for(pages, lambda n: self.loads.page(jnp.int32(0), n, slot), slot)

    def renew(self, segment: Segment, slot: jax.Array, row: int) -> None:
        """Put new rows among the keys of a segment in `slot`, the first of which is in row `row`."""
        owner = jnp.minimum(segment.owner, self.cfg.num_items - 1)
        self.loads.renew(owner, segment.keys.begin, segment.pages * self.cfg.page, slot, row)

    def process(self, index: SegmentIndex, slot: jax.Array) -> SegmentIndex:
        """Process the block at an index, and finish the requests that end in it; return the index after it."""
        cfg, refs, first = self.cfg, self.refs, self.segment(index)

        def whole() -> SegmentIndex:
            pl.when(first.starts)(self.queries(first, slot).wait)
            self.loads.whole(slot).wait()
            self.loads.renew(first.owner, first.keys.begin, cfg.kv_block, slot)
            size = min(cfg.kv_block, _single.KEYS_AT_ONCE)
            _single.attend(cfg, refs, slot, [(first.keys, at, size) for at in range(0, cfg.kv_block, size)], False)
            return self.after(first, cfg.segments)

        def shared() -> SegmentIndex:
            segments, next_index = self.segments(index)
            for segment in segments:
                pl.when(segment.starts)(self.queries(segment, slot).wait)
            self.wait(functools.reduce(jnp.add, [segment.pages for segment in segments]), slot)
            for t, segment in enumerate(segments):
                self.renew(segment, slot, t * cfg.segment)
            tiles = [(segment.keys, t * cfg.segment, cfg.segment) for t, segment in enumerate(segments)]
            _single.attend(cfg, refs, slot, tiles, True)
            return next_index

        next_index = lax.cond(self.is_whole(first), whole, shared)

        @pl.when(next_index[0] > first.owner)
        def _() -> None:
            # one question for all of the block's requests first, whose answer is almost always no
            @pl.when(_single.failed(cfg, refs))
            def _() -> None:
                lax.fori_loop(first.owner, next_index[0], lambda owner, _: self.recompute(owner, slot), None)

            lax.fori_loop(first.owner, next_index[0], lambda owner, _: self.finish(owner), None)

        return next_index

    def finish(self, owner: jax.Array) -> None:
        cfg, refs, at = self.cfg, self.refs, lax.rem(owner, self.cfg.segments)
        # the buffer of results that this request takes, that of one `segments` before, must have been copied
        pl.when(owner >= cfg.segments)(lambda: _pages.wait(self.outputs(owner - cfg.segments)))
        _single.finish(cfg, refs, at)
        _pages.start(self.outputs(owner))
        _single.reset(cfg, refs, at)

    def recompute(self, owner: jax.Array, slot: jax.Array) -> None:
        """If a request's sums are not right, process its segments again, one at a time in a slot whose block is done with."""
        cfg, at = self.cfg, lax.rem(owner, self.cfg.segments)

        def again(number: jax.Array, _: None) -> None:
            segment = self.segment((owner, number))
            for n in range(cfg.segment // cfg.page):
                pl.when(n < segment.pages)(self.loads.page(segment.table + n, n, slot).start)
            self.wait(segment.pages, slot)
            self.renew(segment, slot, 0)
            _single.attend(cfg, self.refs, slot, [(segment.keys, 0, cfg.segment)], True, exact=True)

        @pl.when(_single.failed(cfg, self.refs, at))
        def _() -> None:
            _single.reset(cfg, self.refs, at)
            lax.fori_loop(0, self.loads.field(_plan.BLOCKS, owner), again, None)


def rules(cfg: RaggedConfig, refs: RaggedRefs) -> list[Any]:
    """The copies of what heads multiply and add. As operands in VMEM the launch would wait for them before anything else."""
    pairs = [(refs.rules1_in, refs.rules1), *([(refs.rules_in, refs.rules)] if cfg.large else [])]
    return [_pages.copy(source, target, refs.rules_sem) for source, target in pairs]


def attend(line: Line, next_load: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Process the line. `next_load` and what is returned: see `after` of `_pages.attend`."""
    cfg, loads, zero = line.cfg, line.loads, jnp.int32(0)

    @pl.when(line.blocks > 0)
    def _() -> None:
        for at in range(cfg.segments):
            _single.reset(cfg, line.refs, at)

    line.clear()

    def start_next(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        owner, number, i, b, slot = state

        def of_line() -> tuple[jax.Array, ...]:
            return *line.start((owner, number), slot), i, b

        def of_items() -> tuple[jax.Array, ...]:
            return owner, number, *(loads.start_next(i, b, slot)[:2] if cfg.large else (i, b))

        # behind the line's last block the first blocks of long items are loaded, so that those need not wait
        return *lax.cond(block < line.blocks, of_line, of_items), loads.after(slot)

    def process(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot, owner, number = state[:3]
        next_load = start_next(block + cfg.slots - 1, state[3:])
        return loads.after(slot), *line.process((owner, number), slot), *next_load

    state = _pages.begin(cfg, line.refs, start_next, (zero, zero, *next_load))
    _pages.wait(rules(cfg, line.refs))
    slot, _, _, _, _, *next_load = lax.fori_loop(0, line.blocks, process, (zero, zero, zero, *state))

    def drain(owner: jax.Array, _: None) -> None:
        _pages.wait(line.outputs(owner))

    def outputs() -> None:
        # `finish` has waited for the others
        lax.fori_loop(jnp.maximum(line.count - cfg.segments, 0), line.count, drain, None)

    if cfg.late:
        is_last = loads.count == line.count
        pl.when(is_last)(lambda: _pages.end(cfg, line.refs, outputs))
        pl.when(jnp.logical_not(is_last))(outputs)
    else:
        outputs()
    return slot, *next_load
