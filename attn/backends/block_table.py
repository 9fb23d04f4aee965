"""The block table of a batch: rows of block ids as callers give them, without their padding, and the slots of tokens in them.

Rows may be lists, arrays or one padded array; `Pages` has them in one array of ids. Everything here is on the host.
"""

import functools
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from attn.errors import DTypeError, MetadataError, ShapeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.integer[Any]]

PAD_SLOT_ID = -1  #: marks a token that is not written to the cache
INT32_MAX = 2**31 - 1
#: Tables of fewer entries are copied with their padding, others by chunks of 2**_CHUNK entries: shorter ones are more, longer
#: ones have more padding.
LONG, _CHUNK = 1 << 15, 6


class Pages:
    """The rows of a block table [R, B] without most of its padding, never written to. `pages[rows, columns]` reads like it.

    ids: int32, the block ids of all requests in turn; anything may be between two rows, unless they are `packed`. counts: [R]
    int64, how many each has; begins: [R] int64, where they begin. size: of a copy, in which the last row has B entries.
    """

    #: A table's memory as chunks, and which of them have the rows before the last one, which is `ids`; None once it is copied.
    _source: "tuple[IntArray, IntArray] | None" = None

    def __init__(self, ids: "IntArray", counts: "IntArray", columns: int, begins: "IntArray | None" = None) -> None:
        """columns: B; begins: None of rows that follow one another."""
        self.ids, self.counts, self.packed = ids, counts, begins is None
        self.begins = counts.cumsum() - counts if begins is None else begins
        self.shape, self.dtype = (len(counts), columns), ids.dtype
        self.size = int(self.begins[-1]) + columns if len(counts) else 0

    @classmethod
    def of(cls, table: "IntArray", seq_lens: "IntArray | None", block_size: int) -> "Pages | None":
        """Return the rows of a long table [R, B] that is mostly padding; None of any other. They are in the table until
        `copy_to` was called.

        A row ends where the blocks of its tokens do, if a negative id or nothing follows them; a row that goes on, as one with
        blocks of tokens to come does, makes a table that is copied as it is.
        """
        import numpy as np

        (rows, columns), (step, of_entries), size = table.shape, table.strides, table.itemsize
        if seq_lens is None or len(seq_lens) != rows or table.size < LONG or columns < 1 << _CHUNK:
            return None
        # Entries must be adjacent and rows in order, apart by whole entries: transposed, reversed and broadcast tables
        # are copied as they are, and so are unsigned ones and those of 16 bits, whose ids the caller converts.
        if of_entries != size or step < size * columns or step % size or table.dtype.kind != "i" or size < 4:
            return None
        # In int64: int32 lengths near 2^31 would overflow when they are rounded up.
        counts = seq_lens + np.int64(block_size - 1)
        counts //= block_size
        step //= size
        if table.flags.c_contiguous:
            memory = table.reshape(-1)
        else:  # with what is between its rows
            memory = np.lib.stride_tricks.as_strided(table, ((rows - 1) * step + columns,), (size,))
        # Where rows begin and end, in entries. The entry after a row's last used one tells whether it goes on (any id of
        # at least 0 does).
        starts = np.arange(0, rows * step, step)
        ends = starts + counts
        goes_on = (memory.take(ends, mode="clip") >= 0) & (counts < columns)
        if goes_on[goes_on.argmax()] or counts[counts.argmax()] > columns or 2 * int(np.add.reduce(counts)) > table.size:
            return None
        # The memory is read as chunks of 64 entries: row r needs `number` of them from chunk `first` on. `index` lists the
        # chunks of all rows in turn (first, first + 1, ...), `skipped` how many chunks before a row's are not among them.
        first = starts >> _CHUNK
        number = (ends + ((1 << _CHUNK) - 1) >> _CHUNK) - first
        number[-1] = 0  # the last row is longer than a chunk, so that those of other rows are all whole
        skipped = first - number.cumsum() + number
        index = skipped.repeat(number)
        index += np.arange(index.size)
        begins = starts - (skipped << _CHUNK)
        # The last row is copied whole behind the chunks, since its last chunk may end past the table's memory; so the
        # rows of equal lengths that a device makes again end within the copy.
        begins[-1] = index.size << _CHUNK
        chunks = memory[: memory.size >> _CHUNK << _CHUNK].reshape(-1, 1 << _CHUNK)
        pages = cls(table[-1], counts, columns, begins)
        pages._source = chunks, index
        return pages

    def copy_to(self, out: "IntArray") -> None:
        """Write the ids, [size] of their dtype. Those of a table are in `out` from then on."""
        if self._source is not None:
            chunks, index = self._source
            room = index.size << _CHUNK
            chunks.take(index, 0, out[:room].reshape(-1, 1 << _CHUNK), "clip")  # none is out of range
            out[room:] = self.ids
            # The table may change after its batch is built; from here on the ids are those of the copy.
            self.ids, self._source = out, None
        else:
            n = self.ids.size
            out[:n] = self.ids
            out[n:] = -1

    @functools.cached_property
    def largest(self) -> int:
        """The largest id as an unsigned number, so that a negative one is larger than any other."""
        import numpy as np

        if self._source is not None:
            self.copy_to(np.empty(self.size, self.dtype))
        ids, n = self.ids.view(np.uint32 if self.dtype.itemsize == 4 else np.uint64), len(self.counts)
        if self.packed:
            return int(ids.max(initial=0))
        # [begin, end) of each row, interleaved: `reduceat` gives the maximum of each slice between two of them, of
        # which every second is a row. An end at the end of the ids is left out, as `reduceat` has no empty slice there.
        bounds = np.empty((n, 2), np.int64)
        bounds[:, 0] = self.begins
        np.add(self.begins, self.counts, out=bounds[:, 1])
        of_rows = np.maximum.reduceat(ids, bounds.reshape(-1)[: 2 * n - (bounds[-1, 1] == ids.size)])[::2]
        # Where a slice is empty `reduceat` returns its first entry, which is another row's.
        of_rows[self.counts == 0] = 0
        return int(of_rows[of_rows.argmax()])

    def __getitem__(self, at: Any) -> Any:
        """Return the ids [n] at (rows [n], columns [n]); for a slice, rows as `Pages`."""
        if isinstance(at, tuple):
            rows, columns = at
            return self.ids.take(self.begins[rows] + columns, mode="clip")  # a request without blocks has no place
        counts, begins = self.counts[at], self.begins[at]
        columns = self.shape[1]
        if not len(begins):
            return Pages(self.ids[:0], counts, columns)
        # Rows between chunks keep `columns` entries after the last one's begin, as `size` says.
        first, end = int(begins[0]), int(begins[-1] + (counts[-1] if self.packed else columns))
        return Pages(self.ids[first:end], counts, columns, None if self.packed else begins - first)

    def hold(self, seq_lens: "IntArray", block_size: int) -> bool:
        """Return whether every request has blocks for its tokens."""
        room = self.counts * block_size - seq_lens
        return not room.size or bool(room[room.argmin()] >= 0)

    def padded(self) -> "IntArray":
        """Return the table, [R, B] int32, short rows padded with -1."""
        import numpy as np

        table = np.full(self.shape, -1, np.int32)
        if self.packed and table.size == self.ids.size:
            table[:] = self.ids.reshape(self.shape)
        else:
            for row, begin, n in zip(table, self.begins.tolist(), self.counts.tolist(), strict=True):
                row[:n] = self.ids[begin : begin + n]
        return table


def as_pages(
    rows: "Sequence[Sequence[int]] | Sequence[IntArray] | IntArray", seq_lens: "IntArray", block_size: int
) -> "IntArray | Pages":
    """Convert a block table to int32: rows, and an array [R, B] that is mostly padding, to `Pages`; always a copy.

    Integers are converted at once. Other input is converted row by row, so that the error states the position.
    """
    import numpy as np

    if isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.dtype.kind in "iu":
        pages = Pages.of(rows, seq_lens, block_size)
        # `largest` copies the ids, so the batch never refers to the caller's table.
        if pages is not None and pages.largest <= INT32_MAX:
            pages.ids, pages.dtype = pages.ids.astype(np.int32, copy=False), np.dtype(np.int32)
            return pages
        if fits_int32(rows):
            return rows.astype(np.int32)
    try:
        rows = list(rows)
    except TypeError:
        raise ShapeError(f"block_table is {rows!r}: must be rows of block ids, one per request") from None
    flat = _joined(rows)
    if flat is None:
        flat = np.concatenate([np.empty(0, np.int32), *(as_int32("block_table", row, i) for i, row in enumerate(rows))])
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return Pages(flat, counts, int(counts.max(initial=0)))


_ndim, _dtype = attrgetter("ndim"), attrgetter("dtype")


def _joined(rows: list[Any]) -> "IntArray | None":
    """Concatenate the entries of all rows as int32; None if they are not all integers of 32 bits."""
    import numpy as np

    types = {*map(type, rows)}
    if types == {np.ndarray}:
        if {*map(_ndim, rows)} != {1} or not all(dtype.kind in "iu" for dtype in {*map(_dtype, rows)}):
            return None
        flat = np.concatenate(rows)
        return flat.astype(np.int32, copy=False) if flat.dtype.kind in "iu" and fits_int32(flat) else None
    # `struct` takes True for 1; the slow path rejects rows of bools with their position.
    if not types <= {list, tuple, range} or any(type(row[0]) is bool for row in rows if row):
        return None
    try:  # the fastest conversion of a list that accepts only integers within range
        # Row by row: one flat pass over 125,000 ids takes 2.3 ms and more, where this takes 1.1: a list of as many
        # pointers leaves the cache between its passes. A copy, because Dynamo fails on an array over bytes.
        return np.frombuffer(b"".join([_pack(len(row))(*row) for row in rows]), np.int32).copy()
    except struct.error:
        return None


@functools.lru_cache(maxsize=4096)
def _pack(count: int) -> Any:
    """Return what packs `count` ints; reading its format takes as long as packing a hundred."""
    return struct.Struct(f"{count}i").pack


def fits_int32(numbers: "IntArray") -> bool:
    return (
        not numbers.size
        or (numbers.dtype.kind == "i" and numbers.itemsize <= 4)
        # As Python's ints: a comparison of uint64 with a negative number would convert both to float64.
        or (int(numbers.min()) > -INT32_MAX - 2 and int(numbers.max()) <= INT32_MAX)
    )


def as_int32(name: str, values: Any, row: int | None = None) -> "IntArray":
    """Convert lengths (or, with `row`, one row of a block table) to int32; reject values that would round or overflow."""
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1:
        argument, letter = (name, "R") if row is None else (f"{name}[{row}]", "B")
        raise ShapeError(f"{argument} has shape {list(array.shape)}: must be [{letter}]")
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"{name} has dtype {array.dtype}: must be integers")
    # Compared in the input's own dtype: `astype(np.int32)` would wrap 2**32 + 5 to 5 without a word.
    least = 0 if row is None else -INT32_MAX - 1  # entries of a table that are never read may have any value
    if array.size and not least <= array[array.argmin()] <= array[array.argmax()] <= INT32_MAX:
        i = int(((array < least) | (array > INT32_MAX)).argmax())
        raise MetadataError(name, i if row is None else (row, i), int(array[i]), f"between {least} and {INT32_MAX}")
    return array.astype(np.int32)


def slots_of(block_table: "IntArray | Pages", request: "IntArray", position: "IntArray", block_size: int) -> "IntArray":
    """Return the [T] int64 slots of tokens at `position` of `request` (each [T]); -1 for a position before the sequence."""
    import numpy as np

    if not len(position) or not block_table.shape[1]:  # without columns every sequence is empty
        return np.full(len(position), PAD_SLOT_ID, np.int64)
    page, offset = np.divmod(position, block_size)
    inside = position[position.argmin()] >= 0
    # A row before its sequence's first key reads any page and is then not written; int64, as block * P may exceed int32.
    slots = block_table[request, page if inside else np.maximum(page, 0)].astype(np.int64)
    slots *= block_size
    slots += offset
    return slots if inside else np.where(position < 0, PAD_SLOT_ID, slots)
