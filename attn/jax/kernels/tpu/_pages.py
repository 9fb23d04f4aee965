"""Memory traffic of the paged kernels: write new tokens into the cache, and load blocks of pages for items.

A kv block is `kv_block` tokens of one request, loaded page by page into one of the slots of `kv` while another is computed
on. The pipeline runs ahead across items, so a request's first blocks arrive during the last ones of the previous request.
The write of item i must finish before that of item i + 1 begins, because an item writes whole tiles and its last rows may
belong to the next one.

Pages are requested in straight code and whole blocks are waited for at once: with a loop over pages for either, a block of
eight pages spent a tenth of its time in it. Single-row and longer items share that code; only their computation is conditional.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _plan
from attn.jax.kernels.tpu._refs import PagedConfig, PagedRefs, Ref, rows_between

#: Pages that are requested without a branch.
_PAGES_AT_ONCE = 16


class Item(NamedTuple):
    """The scalars of an item, its number, and which half of the double buffers holds its queries.

    Keys before `loaded` are its request's own, also those that no row of the item sees.

    With the plan's ranges also the keys that all of its rows see, [clear[0], clear[1]), whether a row has more than one
    (above 0), and the keys of `gaps`, which no row sees.
    """

    number: jax.Array
    q_slot: jax.Array
    position: jax.Array
    low: jax.Array
    high: jax.Array
    context: jax.Array
    end: jax.Array
    loaded: jax.Array
    clear: tuple[jax.Array, ...] = ()
    more: jax.Array | None = None
    gaps: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def where_seen(self, first: Callable[[], jax.Array], size: int, do: Callable[[], None]) -> None:
        """Call do(), at run time unless the `size` keys from first() on are all in one gap."""
        # known when the kernel is traced: a launch without ranges has no branch here
        if not self.gaps:
            return do()
        start, visible = first(), jnp.bool_(True)
        for low, high in self.gaps:
            visible &= (start < low) | (start + size > high)
        pl.when(visible)(do)


class ItemOps(NamedTuple):
    """The operations on items: those of single-row requests, or the tiles of longer ones.

    `attend` processes a block: it receives the item, the position of the block's first key, and the slot that holds it; with
    `starts_next` also what starts the copies of the block that is loaded next, which it calls once.
    """

    queries: Callable[[jax.Array], list[Any]]  #: the copies that load an item's rows, by its number
    outputs: Callable[[jax.Array], list[Any]]  #: and those that store its results
    reset: Callable[[], None]
    attend: Callable[..., None]
    finish: Callable[[jax.Array], None]
    starts_next: bool = False


def copy(source: Ref, target: Ref, sem: Ref) -> Any:
    return pltpu.make_async_copy(source, target, sem)


def start(copies: list[Any]) -> None:
    for one in copies:
        one.start()


def wait(copies: list[Any]) -> None:
    for one in copies:
        one.wait()


def writing(cfg: PagedConfig, refs: PagedRefs, attend: Callable[[], None]) -> None:
    """Write the new rows into the cache, and attend.

    Pages that new rows fill, and tiles that they fill of a request's last page, are copied from HBM to HBM while items are
    processed, which read the new rows instead. Singles do not, so a page that one of them sees is waited for. Other rows are
    written before anything is attended, or, where all of their tiles fit the ring, after: pages are then loaded at once, and
    new rows are put among their keys in VMEM (`begin`, `Loads.renew`, `end`), unless all are of such last pages.
    """
    tiles = Tiles(cfg, refs)
    if cfg.num_runs:
        last = refs.counts.shape[0] - 1
        count, seen = refs.counts[last - 1], refs.counts[last] > 0

        def run(n: jax.Array) -> Any:
            page, first = (refs.runs[column * cfg.num_runs + n] for column in (_plan.PAGE, _plan.RUN_SOURCE))
            return copy(new_page(cfg, refs, first), refs.cache.at[page], refs.run_sem)

        def finish(do: jax.Array) -> None:
            lax.fori_loop(0, jnp.where(do, count, 0), lambda n, _: run(n).wait(), None)

        def of_lasts(do: Callable[[Any], None]) -> None:
            """Call do(copy) for the parts of all last pages: the sizes of copies are static."""
            per_page = cfg.page // cfg.tile

            def one(n: jax.Array, _: None) -> None:
                columns, base = (_plan.PAGE, _plan.RUN_SOURCE, _plan.RUN_TILES), 2 * cfg.num_runs
                page, first, number = (refs.runs[base + column * cfg.num_requests + n] for column in columns)
                for bit in range((per_page - 1).bit_length() - 1, -1, -1):
                    before = (number >> (bit + 1)) << (bit + 1)
                    to, source = (pl.multiple_of(x + before * cfg.tile, cfg.tile) for x in (0, first))
                    size = cfg.tile << bit
                    rows = refs.fresh.at[:, :, pl.ds(source, size), :]
                    part = copy(rows, refs.cache.at[page, :, :, pl.ds(to, size), :], refs.run_sem)
                    pl.when((number >> bit) & 1 > 0)(functools.partial(do, part))

            lax.fori_loop(0, refs.counts[last - 3], one, None)

        # Before the tiles, so that these long copies run beside the tiles' short ones.
        lax.fori_loop(0, count, lambda n, _: run(n).start(), None)
        finish(seen)
        of_lasts(lambda part: part.start())
        tiles.each(tiles.read, tiles.alone)
    if cfg.late:
        tiles.each(tiles.read)
    elif cfg.write:
        tiles.write_all()
    attend()
    if cfg.num_runs:
        finish(jnp.logical_not(seen))
        of_lasts(lambda part: part.wait())


def new_page(cfg: PagedConfig, refs: PagedRefs, first: jax.Array) -> Ref:
    """A page of new rows, from `first` on."""
    return refs.fresh.at[:, :, pl.ds(pl.multiple_of(first, cfg.tile), cfg.page), :]


def begin(cfg: PagedConfig, refs: PagedRefs, start_next: Callable[[Any, Any], Any], state: Any) -> Any:
    """Load all slots but one ahead, with start_next(number of the block, state); return the state after them."""
    # the last slot is freed when the first block is done
    number = cfg.slots - 1
    if not cfg.late:
        return lax.fori_loop(0, number, start_next, state)
    tiles = Tiles(cfg, refs)

    def phase(n: jax.Array, state: Any) -> Any:
        @pl.when(n == 1)
        def _() -> None:
            tiles.each(tiles.merge)
            # a page that another request sees is written before any is loaded
            for do in (tiles.start_write, tiles.wait_for_write):
                tiles.each(do, tiles.seen > 0)

        return lax.fori_loop(0, jnp.where(n == tiles.seen, number, 0), start_next, state)

    return lax.fori_loop(0, 2, phase, state)


def end(cfg: PagedConfig, refs: PagedRefs, wait_for_outputs: Callable[[], None]) -> None:
    """After all keys have been loaded: write what is not written yet, beside the last outputs."""
    tiles = Tiles(cfg, refs)
    if cfg.late:
        tiles.each(tiles.start_write, tiles.seen == 0)
    if cfg.num_runs:
        for do in (tiles.merge, tiles.start_write):
            tiles.each(do, tiles.alone)
    wait_for_outputs()
    if cfg.late:
        tiles.each(tiles.wait_for_write, tiles.seen == 0)
    if cfg.num_runs:
        tiles.each(tiles.wait_for_write, tiles.alone)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of new rows, which keep the rows of the cache that are not new; tile t is in buffer t % ring."""

    cfg: PagedConfig
    refs: PagedRefs

    @property
    def count(self) -> jax.Array:
        return self.refs.counts[1]  # type: ignore[no-any-return]

    @property
    def seen(self) -> jax.Array:
        """Where writes are late, 1 if another request sees a page of a tile, and otherwise 0."""
        return self.refs.counts[self.refs.counts.shape[0] - 1]  # type: ignore[no-any-return]

    @property
    def alone(self) -> Any:
        """Where new rows fill pages, whether no key is read from the page of a tile, so that all may be written at the end."""
        return self.refs.counts[self.refs.counts.shape[0] - 3] > 0 if self.cfg.num_runs else False

    def field(self, column: int, t: jax.Array) -> jax.Array:
        return self.refs.tiles[column * self.cfg.num_tiles + t]  # type: ignore[no-any-return]

    def has_rows(self, t: jax.Array) -> jax.Array:
        return self.field(_plan.FIRST, t) < self.field(_plan.STOP, t)

    def is_partial(self, t: jax.Array) -> jax.Array:
        return self.field(_plan.STOP, t) - self.field(_plan.FIRST, t) < self.cfg.tile

    def in_cache(self, t: jax.Array) -> Ref:
        cfg, page = self.cfg, self.refs.cache.at[self.field(_plan.PAGE, t)]
        if cfg.narrow:
            return page
        return page.at[:, :, pl.ds(pl.multiple_of(self.field(_plan.OFFSET, t), cfg.tile), cfg.tile), :]

    def reads(self, t: jax.Array) -> tuple[Any, Any]:
        cfg, refs, slot = self.cfg, self.refs, lax.rem(t, self.cfg.ring)
        source = pl.multiple_of(self.field(_plan.SOURCE, t), cfg.tile)
        fresh = refs.fresh.at[lax.div(source, cfg.tile)] if cfg.narrow else refs.fresh.at[:, :, pl.ds(source, cfg.tile), :]
        return (
            copy(fresh, refs.new.at[slot], refs.read_sem.at[slot]),
            copy(self.in_cache(t), refs.old.at[slot], refs.read_sem.at[slot]),
        )

    def write(self, t: jax.Array) -> Any:
        slot = lax.rem(t, self.cfg.ring)
        return copy(self.refs.new.at[slot], self.in_cache(t), self.refs.write_sem.at[slot])

    def read(self, t: jax.Array) -> None:
        # a tile of new rows alone needs nothing of what the cache holds
        new, old = self.reads(t)
        new.start()
        pl.when(self.is_partial(t))(old.start)

    def merge(self, t: jax.Array) -> None:
        cfg, refs, slot = self.cfg, self.refs, lax.rem(t, self.cfg.ring)
        # a copy's description only: what was started for these buffers is waited for by their semaphore
        new, old = self.reads(t)
        new.wait()

        @pl.when(self.is_partial(t))
        def _() -> None:
            old.wait()
            first, stop = self.field(_plan.FIRST, t), self.field(_plan.STOP, t)
            heads = (slot, slice(None), slice(cfg.num_kv_heads))
            fresh, kept = (x[heads].reshape(-1, cfg.tile, cfg.lanes) for x in (refs.new, refs.old))
            refs.new[heads] = rows_between(fresh, kept, first, stop).reshape(cfg.planes, -1, cfg.tile, cfg.lanes)
            for head in range(cfg.num_kv_heads, cfg.stored_heads):  # a token's scales are in a lane
                fresh, kept = (pltpu.bitcast(x[slot, 0, head], jnp.int32) for x in (refs.new, refs.old))
                token = lax.rem(lax.broadcasted_iota(jnp.int32, fresh.shape, 1), cfg.page)
                merged = jnp.where((token >= first) & (token < stop), fresh, kept)
                refs.new[slot, 0, head] = pltpu.bitcast(merged, refs.new.dtype)

    def start_write(self, t: jax.Array) -> None:
        self.write(t).start()

    def wait_for_write(self, t: jax.Array) -> None:
        self.write(t).wait()

    def each(self, do: Callable[[jax.Array], None], when: jax.Array | bool = True) -> None:
        """Call do(t) for every tile that has new rows."""

        def one(t: jax.Array, _: None) -> None:
            pl.when(self.has_rows(t))(lambda: do(t))

        lax.fori_loop(0, jnp.where(when, self.count, 0), one, None)

    def write_all(self) -> None:
        """Write every tile into the cache, unless that is done at the end."""
        # Three stages share a ring of buffers: tile t is read, tile t - lag merged and its write started, tile t - ring waited
        # for. So a read has half a ring of steps to arrive, and a write the other half before its buffer is read into again.
        lag, count = self.cfg.ring // 2, self.count

        def step(t: jax.Array, _: None) -> None:
            u, w = t - lag, t - self.cfg.ring

            @pl.when((w >= 0) & (w < count))
            def _free_slot() -> None:
                pl.when(self.has_rows(w))(lambda: self.wait_for_write(w))

            @pl.when(t < count)
            def _read() -> None:
                pl.when(self.has_rows(t))(lambda: self.read(t))

            @pl.when((u >= 0) & (u < count))
            def _merge_and_write() -> None:
                @pl.when(self.has_rows(u))
                def _() -> None:
                    self.merge(u)
                    self.start_write(u)

        steps = count + self.cfg.ring
        lax.fori_loop(0, jnp.where(self.alone, 0, steps) if self.cfg.num_runs else steps, step, None)


@dataclasses.dataclass(frozen=True)
class Loads:
    """The copies that load the blocks of items into slots of `kv`."""

    cfg: PagedConfig
    refs: PagedRefs
    count: jax.Array  # of items

    def field(self, column: int, i: jax.Array) -> jax.Array:
        return self.refs.items[column * self.cfg.num_items + i]  # type: ignore[no-any-return]

    def item(self, i: jax.Array) -> Item:
        # while one item is computed, the next one's queries arrive in the other half
        slot = lax.rem(i, 2)
        position, low, high, context = (self.field(at, i) for at in (_plan.POSITION, _plan.LOW, _plan.HIGH, _plan.CONTEXT))
        end = self.field(_plan.END, i)
        loaded = jnp.minimum(end, lax.div(self.high(i) + (self.cfg.page - 1), self.cfg.page) * self.cfg.page)
        one = Item(i, slot, position, low, high, context, end, loaded)
        if not self.cfg.ranges:
            return one
        clear = self.field(_plan.CLEAR, i), self.field(_plan.CLEAR_STOP, i)
        return one._replace(clear=clear, more=self.field(_plan.MORE, i), gaps=self.gaps(i))

    def gaps(self, i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        return tuple(
            (self.field(at, i), self.field(at + 1, i)) for at in range(_plan.GAPS, _plan.GAPS + 2 * self.cfg.ranges - 2, 2)
        )

    def first_page(self, i: jax.Array) -> jax.Array:
        return lax.div(self.field(_plan.LOW, i), self.cfg.page)

    def group(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the last of the items that share a block with item i.

        Those are of one request, one after another, and their keys are all in one block, whose pages are loaded once: for the
        first of them, into a slot that is kept until the last one is done.
        """
        return (self.field(_plan.GROUP, i), self.field(_plan.GROUP_LAST, i)) if self.cfg.shares else (i, i)

    def high(self, i: jax.Array) -> jax.Array:
        """Where the keys end that are loaded for item i and those that share its block."""
        return self.field(_plan.HIGH, self.group(i)[1])

    def page(self, at: jax.Array, n: jax.Array | int, slot: jax.Array, signal: jax.Array | None = None) -> Any:
        """The copy of the page at entry `at` of the block table into `slot`, as its nth page; signal: its semaphore's index."""
        cfg, refs = self.cfg, self.refs
        sem = refs.kv_sem.at[slot if signal is None else signal]
        if cfg.narrow:
            return copy(refs.cache.at[refs.table[at]], refs.kv.at[slot, :, :, n], sem)
        first = n * cfg.page
        rows = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, cfg.page), cfg.page)
        return copy(refs.cache.at[refs.table[at]], refs.kv.at[slot, :, :, rows, :], sem)

    def new(self, entry: jax.Array, n: jax.Array | int, slot: jax.Array, signal: jax.Array | None = None) -> Any:
        """The copy of the new rows that an entry of the table names, like `page`."""
        cfg, refs = self.cfg, self.refs
        first = n * cfg.page
        rows = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, cfg.page), cfg.page)
        source, sem = new_page(cfg, refs, (-1 - entry) * cfg.tile), refs.kv_sem.at[slot if signal is None else signal]
        return copy(source, refs.kv.at[slot, :, :, rows, :], sem)

    def signal(self, n: jax.Array, slot: jax.Array) -> jax.Array:
        """The index of the semaphore of the nth page in `slot` if items share the block: that of its part."""
        return slot + (lax.div(n, self.cfg.per_part) + 1) * self.cfg.slots

    def first_entry(self, i: jax.Array, b: jax.Array) -> jax.Array:
        """Where the table names the first page of block b of item i; of no item, anywhere that has entries for a block."""
        per_block = self.cfg.kv_block // self.cfg.page
        entry = self.field(_plan.TABLE, i) + self.first_page(i) + b * per_block
        return jnp.minimum(entry, self.refs.table.shape[0] - per_block)

    def pages(self, i: jax.Array, b: jax.Array, slot: jax.Array) -> tuple[jax.Array, Callable[[jax.Array | int], Any]]:
        """(the number of pages of block b of item i, the copy of the nth of them into `slot`).

        They are those with a key that it sees, or one that shares its block.
        """
        cfg, per_block = self.cfg, self.cfg.kv_block // self.cfg.page
        # An item's blocks begin in the page of its first visible key, not at a multiple of a block.
        begin = self.first_page(i) + b * per_block
        stop = lax.div(self.high(i) + (cfg.page - 1), cfg.page)
        base = self.first_entry(i, b)

        def nth(n: jax.Array | int) -> Any:
            return self.page(base + n, n, slot)

        number = jnp.clip(stop - begin, 0, per_block)
        for low, high in self.gaps(i):
            first = begin * cfg.page
            number = jnp.where((first >= low) & (first + cfg.kv_block <= high), 0, number)
        return number, nth

    @property
    def in_straight_code(self) -> bool:
        """Whether all pages of a block are asked for at constant addresses: a loop takes half as long again."""
        return self.cfg.kv_block // self.cfg.page <= 2 * _PAGES_AT_ONCE

    def start(self, i: jax.Array, b: jax.Array, slot: jax.Array, valid: jax.Array | bool = True, branches: bool = True) -> None:
        """Start the copies of a block. branches: whether those of its second half are skipped as a whole if it has none."""
        number, base, per_block = self.pages(i, b, slot)[0], self.first_entry(i, b), self.cfg.kv_block // self.cfg.page
        number = jnp.where(valid, number, 0)
        at_once = min(_PAGES_AT_ONCE, per_block)

        def start_page(n: jax.Array | int, signal: jax.Array | None = None) -> None:
            is_used = n < number
            if self.cfg.num_runs:
                entry = self.refs.table[base + n]
                # a page that this launch fills is read from the new rows, since its copy into the cache may still run
                pl.when(is_used & (entry < 0))(self.new(entry, n, slot, signal).start)
                is_used &= entry >= 0
            # its id is read unconditionally, which is faster than a branch
            pl.when(is_used)(self.page(base + n, n, slot, signal).start)

        def start_pages(n: jax.Array | int, _: None = None) -> None:
            for k in range(at_once):
                start_page(n * at_once + k)

        def alone() -> None:
            if self.in_straight_code:
                start_pages(0)
                if per_block > at_once:
                    pl.when(number > at_once)(lambda: start_pages(1)) if branches else start_pages(1)
            else:
                lax.fori_loop(0, lax.div(number + (at_once - 1), at_once), start_pages, None)

        if not self.cfg.shares:
            return alone()
        first, last = self.group(i)
        lax.cond(
            first < last,
            lambda: lax.fori_loop(0, number, lambda n, _: start_page(n, self.signal(n, slot)), None),
            alone,
        )

    def arrive(self, i: jax.Array, b: jax.Array, slot: jax.Array, everything: bool = False) -> None:
        """Wait for what item i reads of its block b, or for all that was started, and put new rows among its keys."""
        cfg, (first, last) = self.cfg, self.group(i)
        begin = self.first_page(i) * cfg.page + b * cfg.kv_block

        def alone() -> None:
            self.wait_for(*self.pages(i, b, slot), slot)
            self.renew(i, begin, cfg.kv_block, slot)

        def shared() -> None:
            # what the items before this one read is there
            before, stop = jnp.where(i > first, self.field(_plan.READ, jnp.maximum(i - 1, 0)), 0), self.field(_plan.READ, i)
            if everything:
                before, stop = jnp.int32(0), self.pages(i, b, slot)[0]
            lax.fori_loop(before, stop, lambda n, _: self.page(jnp.int32(0), n, slot, self.signal(n, slot)).wait(), None)
            row = before * cfg.page
            self.renew(i, begin + row, (stop - before) * cfg.page, slot, row)

        lax.cond(first < last, shared, alone) if cfg.shares else alone()

    def whole(self, slot: jax.Array) -> Any:
        """A copy of as many bytes as all pages of a block."""
        return copy(self.refs.kv.at[slot], self.refs.kv.at[slot], self.refs.kv_sem.at[slot])

    def wait_for(self, number: jax.Array, nth: Callable[[jax.Array | int], Any], slot: jax.Array) -> None:
        """Wait for as many pages in `slot`, wherever in it they are; nth: the copies of so many pages."""
        per_block = self.cfg.kv_block // self.cfg.page
        # A semaphore counts bytes, so that one wait for a block's bytes stands for all of its pages.
        pl.when(number == per_block)(self.whole(slot).wait)

        @pl.when(number < per_block)
        def _() -> None:
            lax.fori_loop(0, number, lambda n, _: nth(n).wait(), None)

    def renew(self, i: jax.Array, first: jax.Array, size: Any, slot: jax.Array, row: Any = 0) -> None:
        """Put new rows that are not in the cache yet among the `size` keys from position `first` of item i on.

        These are in rows `row` and after of the block in `slot`.
        """
        cfg, refs, tiles = self.cfg, self.refs, Tiles(self.cfg, self.refs)
        if not cfg.late:
            return
        new_tile, new_at = (self.field(_plan.columns(cfg) + column, i) for column in (_plan.NEW_TILE, _plan.NEW_AT))
        low, stop = jnp.maximum(first, new_at), jnp.minimum(first + size, self.field(_plan.END, i))

        def tile(n: jax.Array, _: None) -> None:
            at = low + n * cfg.tile
            t, to = new_tile + lax.div(at - new_at, cfg.tile), row + at - first
            rows = lax.div(to, cfg.page) if cfg.narrow else pl.ds(pl.multiple_of(to, cfg.tile), cfg.tile)

            @pl.when(tiles.has_rows(t))
            def _put() -> None:
                refs.kv[slot, :, :, rows] = refs.new[t]

        lax.fori_loop(0, lax.div(jnp.maximum(stop - low, 0) + (cfg.tile - 1), cfg.tile), tile, None)

    def after(self, slot: jax.Array) -> jax.Array:
        return jnp.where(slot + 1 == self.cfg.slots, 0, slot + 1)

    def start_if(self, i: jax.Array, b: jax.Array, slot: jax.Array, branches: bool = True) -> None:
        """Start loading block b of item i into `slot`, if the item exists."""
        self.start(jnp.minimum(i, self.cfg.num_items - 1), b, slot, i < self.count, branches)

    def start_next(self, i: jax.Array, b: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same; return (item, block, slot) of the block after it."""
        self.start_if(i, b, slot)
        return self.next(i, b, slot)

    def next(self, i: jax.Array, b: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(item, block, slot) of the block after block b of item i in `slot`."""
        item = jnp.minimum(i, self.cfg.num_items - 1)
        last = b + 1 >= self.field(_plan.BLOCKS, item)
        after = self.group(item)[1] + 1 if self.cfg.shares else i + 1
        return jnp.where(last, after, i), jnp.where(last, 0, b + 1), self.after(slot)


def attend(
    cfg: PagedConfig,
    refs: PagedRefs,
    loads: Loads,
    ops: ItemOps,
    long: ItemOps | None = None,
    after: tuple[jax.Array, Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]] | None = None,
) -> None:
    """Process, for every item of the plan, the blocks that it may see.

    ops: of all items; with `long`, of singles, and `long` is of the others.
    after: the number of items that are processed before, with the same slots, and what does it. It receives the item, the block
        and the slot that are started next, starts the first blocks of the other items behind its own, and returns the slot of
        the first one, and what is started next then. The queries of the first other item are already on their way.
    """
    count, zero = loads.count, jnp.int32(0)
    first, before = (zero, None) if after is None else after

    def with_ops(i: jax.Array, do: Callable[[ItemOps], None]) -> None:
        """Call do(ops) with the operations of item i."""
        if long is None:
            do(ops)
        else:
            lax.cond(loads.field(_plan.SINGLE, i) == 1, lambda: do(ops), lambda: do(long))

    # The first item's queries are started here or by the caller; those of every other item are started an item ahead.
    if before is None:
        pl.when(count > first)(lambda: with_ops(first, lambda ops: start(ops.queries(first))))
        slot, load = zero, begin(cfg, refs, lambda _, load: loads.start_next(*load), (first, zero, zero))
    else:
        slot, *load = before((first, zero, zero))

    def item(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        blocks, scalars, shared = loads.field(_plan.BLOCKS, i), loads.item(i), loads.group(i)

        def origin(b: jax.Array) -> jax.Array:
            return loads.first_page(i) * cfg.page + b * cfg.kv_block

        @pl.when(i + 1 < count)
        def _() -> None:
            with_ops(i + 1, lambda ops: start(ops.queries(i + 1)))

        def begin_item(ops: ItemOps) -> None:
            wait(ops.queries(i))
            ops.reset()

        def block(b: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot, *load = state
            if ops.starts_next:
                loads.arrive(i, b, slot)
                ops.attend(scalars, origin(b), slot, lambda: loads.start_if(load[0], load[1], load[2], branches=False))
                return loads.after(slot), *loads.next(*load)
            # into the slot of the block before, whose products are done: code is in order, and a block ends with its sums
            if cfg.shares:  # only for the first item that has a block
                next_load = lax.cond(i == shared[0], lambda: loads.start_next(*load), lambda: tuple(load))
            else:
                next_load = loads.start_next(*load)
            loads.arrive(i, b, slot)
            scalars.where_seen(
                lambda: origin(b), cfg.kv_block, lambda: with_ops(i, lambda ops: ops.attend(scalars, origin(b), slot))
            )
            return (jnp.where(i < shared[1], slot, loads.after(slot)) if cfg.shares else loads.after(slot)), *next_load

        def end_item(ops: ItemOps) -> None:
            ops.finish(i)
            start(ops.outputs(i))

        with_ops(i, begin_item)
        state_after = lax.fori_loop(0, blocks, block, state)

        # results of successive items may share a tile of HBM (see the module's docstring), and they share a semaphore
        @pl.when(i > first)
        def _() -> None:
            with_ops(i - 1, lambda ops: wait(ops.outputs(i - 1)))

        with_ops(i, end_item)
        return state_after

    lax.fori_loop(first, count, item, (slot, *load))

    @pl.when(count > first)
    def _() -> None:
        end(cfg, refs, lambda: with_ops(count - 1, lambda ops: wait(ops.outputs(count - 1))))


def clean(
    cfg: PagedConfig, refs: PagedRefs, slot: jax.Array, first: jax.Array, stop: jax.Array, tiles: jax.Array | int
) -> None:
    """Zero the values in rows of the block outside [first, stop), in its first `tiles` tiles."""
    if cfg.packed:  # a code is finite, and scales of such keys are replaced (`_long._scales`)
        return
    # Only values: scores of unseen keys are replaced by -inf, but a weight of 0 times a value that is NaN would be NaN.
    plane = cfg.planes - 1

    def tile(t: jax.Array, _: None) -> None:
        start = pl.multiple_of(t * cfg.tile, cfg.tile)
        at = (slot, plane, slice(None), t if cfg.narrow else pl.ds(start, cfg.tile), slice(None))
        refs.kv[at] = rows_between(refs.kv[at], None, first - start, stop - start)

    # a block begins in the first page that is seen, so there is less than a page before `first`
    lax.fori_loop(0, lax.div(jnp.maximum(first, 0) + (cfg.tile - 1), cfg.tile), tile, None)
    lax.fori_loop(lax.div(jnp.clip(stop, 0, cfg.kv_block), cfg.tile), tiles, tile, None)
