"""The framework-neutral batch from which every backend's metadata is built, and its consistency checks.

A batch is R requests with T new tokens in total, packed without padding between them; each request's keys are in blocks of
a paged cache, listed in its row of the block table. The arrays may belong to any framework (or NumPy); the caller owns them
and may reuse them for the next batch once the step is done. Checks read only host data (NumPy arrays, and the mirrors that
the caller passed): they never copy from a device, unless ATTN_DEBUG requests it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from operator import is_
from typing import TYPE_CHECKING, Any, Self

from attn.arguments import as_flag
from attn.arrays import check_array, on_host, to_framework
from attn.backends.block_table import INT32_MAX, LONG, PAD_SLOT_ID, Pages, as_int32, as_pages, fits_int32, slots_of
from attn.errors import DTypeError, MetadataError, ShapeError
from attn.visibility import BatchMask

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.integer[Any]]

#: Most new tokens of a request that counts as a decode where prompts have a backend of their own: speculated tokens too, as in
#: this package's decode kernels, since a few rows read as many bytes as one.
FEW_ROWS = 16


class AttentionMetadata:
    """Base of every backend's metadata.

    mask: what the batch lets its rows see, besides causality.
    """

    mask: BatchMask = BatchMask()


@dataclass
class CommonAttentionMetadata:
    """One batch, independent of the framework.

    query_start_loc: [R + 1] int32, cumulative number of new tokens; request r owns rows [r], [r + 1).
    seq_lens: [R] int32, tokens in the cache once this batch is written (context plus new).
    block_table: [R, B] int32, physical block ids in order; entries past ceil(seq_len / P) are never read. Rows passed to
        `from_lens` are padded when the table is first read; builders for a GPU copy them without padding (`pages`).
    slot_mapping: [T] int64 (int32 under jax), block * P + offset of each new token; -1 writes nothing.
    num_actual_tokens: rows of the packed arrays that hold tokens; the rest is padding and is not touched.
    max_query_len, max_seq_len: host ints, at least the true maxima (upper bounds, as for a captured graph).
    causal: bottom-right causal masking, True or False; False for encoder-like use of a paged cache, and cross attention. Or a
        NumPy array, [R] bool, one per request.
    query_start_loc_cpu, seq_lens_cpu: NumPy mirrors (the arrays themselves, if they are NumPy's); without them, lengths are
        not checked on the host.
    tree_mask: [R, W, W] bool or None. For a request with q_len <= W, the top-left q_len x q_len part says which of its own
        new tokens each new token sees; all earlier context stays visible; requests with q_len > W are causal. A token sees
        itself and its ancestors, which come before it: the part in use is lower triangular with a true diagonal.
        W = 0 is the same as None.
    spans: [T, 2] int32 or None: keys that a row sees besides those that causality and the window allow, (first, last) as
        positions in its request, inclusive; (-1, -1) for none. For image tokens that see each other in both directions, and
        for block-causal models (`spans_of`). The keys must be in the cache once this batch is written: last < seq_len.
    prefix: [R] int32 or None: every row of request r sees the keys before prefix[r].
    dcp_local_seq_lens: [R] int32, this rank's share of seq_lens under decode context parallelism.
    block_size: P that the table and the slots were made for, if known; a layer with another P rejects the batch.
    """

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: Any = True
    query_start_loc_cpu: "IntArray | None" = None
    seq_lens_cpu: "IntArray | None" = None
    tree_mask: Any = None
    spans: Any = None
    prefix: Any = None
    dcp_local_seq_lens: Any = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        # Taken out of the instance, so that the first read of `block_table` reaches `__getattr__` below.
        if isinstance(self.block_table, Pages):
            self._pages = self.__dict__.pop("block_table")
        if self.query_start_loc_cpu is None:
            # A NumPy array is its own mirror; a tensor on a device is not copied, since that would wait for all work
            # before it.
            self.query_start_loc_cpu = on_host(self.query_start_loc)
        if self.seq_lens_cpu is None:
            self.seq_lens_cpu = on_host(self.seq_lens)
        self._checked: Checked | None = None

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Pad the block table when it is first read: its reader may write to it, so it is what counts from then on."""
            if name != "block_table" or "_pages" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            # `setdefault` is one operation: of two threads that read the table first, both get the same array.
            return self.__dict__.setdefault(name, self._pages.padded())

    @property
    def pages(self) -> "Pages | None":
        """The block table as rows without padding; None if `block_table` was given as an array, or was read."""
        return None if "block_table" in self.__dict__ else self._pages

    @classmethod
    def from_lens(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: "Sequence[Sequence[int]] | Sequence[IntArray] | IntArray",
        block_size: int,
        *,
        causal: "bool | Sequence[bool]" = True,
        tree_mask: Any = None,
        spans: Any = None,
        prefix: Any = None,
        strict: bool = True,
        writes: bool = True,
    ) -> Self:
        """Create a checked batch of NumPy arrays from lengths; slots are computed from the block table.

        query_lens, seq_lens: [R] ints, the new tokens of each request, and all of its tokens, *including the new ones*.
        block_table: [R, B] ints, or ragged (a list of ids per request); shorter rows are padded with -1.
        causal: one bool, or one per request. spans: [T, 2] ints. prefix: [R] ints. As in the class.
        strict: reject a causal request with more new tokens than tokens in total. False keeps what is defined for it: the
            leading rows see no key, return 0, and write nothing (slot -1). Cross attention is `causal=False`.
        writes: whether the new tokens' keys and values are written. False: they are in the cache already, or belong to a
            layer whose cache is shared; every slot is -1, and requests may share any page, including their last one.

        Raises `MetadataError`, `ShapeError` or `DTypeError`, with the argument and the position in it.
        """
        import numpy as np

        q, s = as_int32("query_lens", query_lens), as_int32("seq_lens", seq_lens)
        _check_int("block_size", block_size, 1)
        # Before the sums, so that an error names the row of the table and not a length computed from it.
        table = as_pages(block_table, s, block_size)
        # In int64, because the sum of valid int32 lengths may not fit, and would wrap to a negative number of tokens.
        ends = q.cumsum(dtype=np.int64)
        if len(q) and ends[-1] > INT32_MAX:
            i = int((ends > INT32_MAX).argmax())
            raise MetadataError("query_start_loc", i + 1, int(ends[i]), f"at most {INT32_MAX}")
        num_tokens = int(ends[-1]) if len(q) else 0
        checked = Checked(len(q) + 1, len(s), num_tokens)
        # Slots are placeholders: they are computed once the table is known to have a block for every token.
        start, lens, slots = checked.arrays
        start[1:], lens[:] = ends, s
        batch = cls(
            query_start_loc=start,
            seq_lens=lens,
            block_table=table,
            slot_mapping=slots,
            num_reqs=len(q),
            num_actual_tokens=num_tokens,
            # `max` takes 2 us more
            max_query_len=int(q[q.argmax()]) if len(q) else 0,
            max_seq_len=int(s[s.argmax()]) if len(s) else 0,
            causal=_flags(causal, len(q)),
            tree_mask=tree_mask,
            spans=None if spans is None else _rows_of_ints("spans", spans),
            prefix=None if prefix is None else as_int32("prefix", prefix),
            block_size=block_size,
        )
        batch.validate(block_size, strict=_flag("strict", strict))
        # The number of blocks is not known here, so any int32 id of at least 0 passes; padding of -1 in use does not.
        batch._check_blocks(block_size, INT32_MAX + 1)
        slots[:] = slots_of(table, *_rows_of(start, s), block_size) if _flag("writes", writes) else PAD_SLOT_ID
        largest = batch._check_slots(None)
        # Arrays of flags and masks are not compared with what they were: a batch with such is checked by each builder.
        if type(causal) is bool and tree_mask is spans is prefix is None:
            batch._checked = checked.keep(batch, largest)
        return batch

    def known(self) -> "Checked | None":
        """Return what is known of a batch that is as `from_lens` has checked it, else None."""
        if self._checked is not None and not self._checked.holds(self):
            self._checked = None
        return self._checked

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked": None}  # the arrays of a copy have memory of their own

    def query_lens_cpu(self) -> "IntArray | None":
        """New tokens per request, [R], from the host mirror."""
        start = self.query_start_loc_cpu
        return None if start is None else start[1:] - start[:-1]

    def writes_apart(self, block_size: int) -> bool:
        """Whether the host knows that each new token of a valid batch is written at its position or not at all, to a page that
        the tables contain once.

        Then no request sees the new tokens of another. Requests that share a page may: several drafts of one text, for example.
        False also for long tables, where this check takes longer than a launch in each layer.
        """
        import numpy as np

        start, seq_lens, slots, tokens = self.query_start_loc_cpu, self.seq_lens_cpu, self.slot_mapping, self.num_actual_tokens
        table: Any = self.pages or self.block_table
        if start is None or seq_lens is None or not tokens or start[-1] != tokens:
            return False
        ids = table.ids if isinstance(table, Pages) else table
        # Measured on a CPU: 11 us for 64 requests of 1,000 keys and 22 for 200 of 1,500, where the launch that is saved
        # takes 3 to 5 in each layer.
        if not (isinstance(slots, np.ndarray) and isinstance(ids, np.ndarray)) or not 0 < ids.size <= LONG:
            return False
        single = self.max_query_len == 1 and tokens == self.num_reqs
        rows, position = (np.arange(tokens), seq_lens - 1) if single else _rows_of(start, seq_lens)
        if position[position.argmin()] < 0:
            return False
        # The page is column position // P of the request's row, the slot page * P + position % P.
        column = position // block_size
        page_id = table[rows, column]
        places, slots = position + (page_id.astype(np.int64) - column) * block_size, slots[:tokens]
        # The first count decides the usual batch, in which every token is written; -1 writes nothing, which cannot be
        # seen by another.
        if np.count_nonzero(slots == places) < tokens and not ((slots == places) | (slots == PAD_SLOT_ID)).all():
            return False
        n = tokens  # pages of each request, added up: tokens of a request are adjacent, and so are those of one page
        if not single:
            entry = rows * table.shape[1] + column
            n = 1 + int(np.count_nonzero(entry[1:] != entry[:-1]))
        # One entry more than the largest written page, which stays False: `take` clips all other ids of the tables to
        # it. n such pages, of which n are marked, and n entries of all tables that name one, are n pages in one table each.
        is_used = np.zeros(int(page_id[page_id.argmax()]) + 2, np.bool_)
        is_used[page_id] = True
        # other ids, negative ones too, count as the last one, which no request has
        return bool(np.count_nonzero(is_used) == n == np.count_nonzero(is_used.take(ids.view(np.uint32), mode="clip")))

    def positions(self) -> "npt.NDArray[np.int32]":
        """Return the position of each new token in its request, as for rotary embeddings: [T] int32, 0 in padding rows.

        Computed on the host from the mirrors. Raises `MetadataError` without them.
        """
        import numpy as np

        start, seq_lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if start is None or seq_lens is None:
            name = "query_start_loc_cpu" if start is None else "seq_lens_cpu"
            raise MetadataError(name, None, None, "a NumPy mirror of the lengths, from which positions are computed")
        positions = np.zeros(self.slot_mapping.shape[0], np.int32)
        positions[: start[-1]] = _rows_of(start, seq_lens)[1]
        return positions

    @property
    def mask(self) -> BatchMask:
        """What the batch lets its rows see. A tree mask without nodes, [R, 0, 0], counts as none."""
        # Equal flags are not "mixed": such a batch needs no backend with that feature (`all_causal` says which they are).
        causal = None if type(self.causal) is bool else on_host(self.causal)
        is_causal = causal if causal is not None and (causal != causal[:1]).any() else None
        tree = self.tree_mask if self.tree_mask is not None and self.tree_mask.shape[1] else None
        return BatchMask(tree, self.spans, self.prefix, is_causal)

    @property
    def all_causal(self) -> bool:
        """Whether every request is causal (True for a batch without requests)."""
        causal = self.causal
        return causal if type(causal) is bool else bool(causal if on_host(causal) is None else causal.all())

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. NumPy's lengths are their own mirrors, unless mirrors are passed too."""
        import numpy as np

        for name in ("query_start_loc", "seq_lens"):
            if isinstance(changes.get(name), np.ndarray):
                changes.setdefault(f"{name}_cpu", changes[name])
        if self.pages is not None:
            # `dataclasses.replace` would read the field, and so pad a table whose copy may never be read.
            changes.setdefault("block_table", self.pages)
        return replace(self, **changes)

    def select(self, first: int, last: int) -> Self:
        """Return the requests first..last, last excluded, as a batch of their own: slices of this one's arrays.

        Raises `MetadataError` without mirrors of the lengths on the host.
        """
        start, seq_lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if start is None or seq_lens is None:
            name = "query_start_loc_cpu" if start is None else "seq_lens_cpu"
            raise MetadataError(name, None, None, "a NumPy mirror of the lengths, by which a batch is divided")
        if not 0 <= first <= last <= self.num_reqs:
            bound = f"first, last with 0 <= first <= last <= {self.num_reqs}"
            raise MetadataError("requests", None, (first, last), bound)
        # Slices of all arrays, also of tensors on a device, which are not copied; only the starts are shifted to begin at 0.
        requests, rows = slice(first, last), slice(int(start[first]), int(start[last]))
        # If the array is its own mirror, the shifted mirror serves as both. A tensor of requests from 0 on needs no
        # subtraction, which would be a launch.
        starts = self.query_start_loc[first : last + 1]
        own_starts, own_lens = start[first : last + 1] - start[first], seq_lens[requests]
        per_request = {name: getattr(self, name) for name in ("tree_mask", "prefix", "dcp_local_seq_lens")}
        return self.replace(
            query_start_loc=own_starts if self.query_start_loc is start else starts - rows.start if rows.start else starts,
            seq_lens=self.seq_lens[requests],
            block_table=(self.pages or self.block_table)[requests],
            slot_mapping=self.slot_mapping[rows],
            num_reqs=last - first,
            num_actual_tokens=rows.stop - rows.start,
            max_query_len=int((own_starts[1:] - own_starts[:-1]).max(initial=0)),
            max_seq_len=int(own_lens.max(initial=0)),
            causal=self.causal[requests] if getattr(self.causal, "ndim", 0) else self.causal,
            query_start_loc_cpu=own_starts,
            seq_lens_cpu=own_lens,
            spans=None if self.spans is None else self.spans[rows],
            **{name: array if array is None else array[requests] for name, array in per_request.items()},
        )

    def on_host(self) -> Self:
        """Return a copy with every array copied to the host, so that `validate` sees all values. Waits for the device."""
        arrays = {
            f.name: to_framework(value, "numpy")
            for f in fields(self)
            if not f.name.endswith("_cpu") and hasattr(value := getattr(self, f.name), "shape")
        }
        # None lets `__post_init__` take the copies as mirrors; the caller's could be of other values than the device has.
        return self.replace(**arrays, query_start_loc_cpu=None, seq_lens_cpu=None)

    def validate(self, block_size: int, num_blocks: int | None = None, *, strict: bool = False) -> Self:
        """Check the batch for consistency; returns it.

        Ranks, integer dtypes and matching extents are always checked; values only where they are on the host; block tables
        and slots on the host also against `num_blocks`, if given. `strict` rejects q_len > seq_len in a causal batch, as
        `from_lens` does; otherwise it is allowed (the leading rows see no key). Raises `ShapeError`, `DTypeError` or
        `MetadataError` (field, index, value, bound). O(R) on the host, no device access.
        """
        _check_int("block_size", block_size, 1)
        if self.block_size not in (None, block_size):
            raise MetadataError("block_size", None, self.block_size, f"{block_size}, as in the layer")
        known = None if strict else self.known()  # which `from_lens(strict=False)` may have made
        # In this order: values are read only once ranks and dtypes are known to be right, and lengths before what they index.
        if known is None:
            self._check_static()
            # Values are those of the mirrors, by which builders plan too: the arrays on a device are never read here.
            if self.query_start_loc_cpu is not None:
                self._check_query_start_loc(self.query_start_loc_cpu)
            if self.seq_lens_cpu is not None:
                self._check_seq_lens(self.seq_lens_cpu, block_size, strict)
            if not self.tree_mask is self.spans is self.prefix is None:
                masks = BatchMask(self.tree_mask, self.spans, self.prefix)  # `causal` was checked beside the lengths
                masks.validate(self.num_reqs, self.num_actual_tokens, self.query_lens_cpu(), self.seq_lens_cpu)
        if num_blocks is not None:
            self.check_ids(block_size, num_blocks, known=known)
        return self

    def check_ids(self, block_size: int, num_blocks: int, pages: "Pages | None" = None, known: "Checked | None" = None) -> None:
        """Check the block ids and slots of a valid batch, where they are on the host, against `num_blocks`; `validate` does it.

        pages: the rows of the table, where the caller has read them (`Pages.of`). known: what `known` returned. Raises
        `MetadataError`.
        """
        table = None if known is None else self.pages
        if table is None or table.largest >= num_blocks:
            self._check_blocks(block_size, num_blocks, pages)
        if known is None or known.largest >= num_blocks * block_size:
            self._check_slots(num_blocks * block_size)

    def _check_static(self) -> None:
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            _check_int(name, getattr(self, name), 0)
        _check_causal(self.causal, self.num_reqs)
        check_array("query_start_loc", self.query_start_loc, (self.num_reqs + 1,), _INT32)
        check_array("seq_lens", self.seq_lens, (self.num_reqs,), _INT32)
        check_array("block_table", self.pages or self.block_table, (self.num_reqs, None), _INT32)
        check_array("slot_mapping", self.slot_mapping, (None,), _INT32_OR_64)
        if self.slot_mapping.shape[0] < self.num_actual_tokens:
            raise ShapeError(
                f"slot_mapping has {self.slot_mapping.shape[0]} entries: "
                f"must be at least num_actual_tokens={self.num_actual_tokens}"
            )
        if self.dcp_local_seq_lens is not None:
            check_array("dcp_local_seq_lens", self.dcp_local_seq_lens, (self.num_reqs,), _INT32)
        start, seq = self.query_start_loc_cpu, self.seq_lens_cpu
        if start is not None and start is not self.query_start_loc:
            _check_mirror("query_start_loc_cpu", start, self.num_reqs + 1)
        if seq is not None and seq is not self.seq_lens:
            _check_mirror("seq_lens_cpu", seq, self.num_reqs)

    def _check_query_start_loc(self, start: "IntArray") -> None:
        if start[0] != 0:
            raise MetadataError("query_start_loc", 0, int(start[0]), "0")
        if len(start) == 1:
            return
        # `x[x.argmin()]` is the minimum in a quarter of the time of `x.min()`, which goes through Python (0.35 and 1.5
        # us for 64 numbers, NumPy 2); the same for `count_nonzero` beside `any`. A batch is checked before every step.
        lens, low = start[1:] - start[:-1], start.argmin()  # of numbers above 0, which cannot overflow
        if start[low] < 0 or lens[lens.argmin()] < 0:
            # Compared instead of subtracted, since a difference of arbitrary int32 numbers may overflow.
            i = int((start[1:] < start[:-1]).argmax())
            raise MetadataError("query_start_loc", i + 1, int(start[i + 1]), f"at least {start[i]}, the entry before it")
        if start[-1] > self.num_actual_tokens:
            bound = f"at most num_actual_tokens={self.num_actual_tokens}"
            raise MetadataError("query_start_loc", len(start) - 1, int(start[-1]), bound)
        longest = int(lens[lens.argmax()])
        if longest > self.max_query_len:
            raise MetadataError("max_query_len", None, self.max_query_len, f"at least {longest}, the longest query")

    def _check_seq_lens(self, seq: "IntArray", block_size: int, strict: bool) -> None:
        if not seq.size:
            return
        low, high = int(seq.argmin()), int(seq.argmax())
        if seq[low] < 0:
            raise MetadataError("seq_lens", low, int(seq[low]), "at least 0")
        longest, columns = int(seq[high]), int((self.pages or self.block_table).shape[1])
        if longest > self.max_seq_len:
            raise MetadataError("max_seq_len", None, self.max_seq_len, f"at least {longest}, the longest sequence")
        # Else a kernel would read block ids past the end of the table's row, of the next request or of other memory.
        if longest > columns * block_size:
            bound = f"at most {columns * block_size} ({columns} blocks of {block_size} in its table row)"
            raise MetadataError("seq_lens", high, longest, bound)
        query_lens = self.query_lens_cpu() if strict else None
        if query_lens is None:
            return
        # `causal` is one flag or [R] of them.
        short = (query_lens > seq) & self.causal
        if short.any():
            i = int(short.argmax())
            bound = f"at least query_lens[{i}] = {query_lens[i]} (seq_lens counts the new tokens too)"
            raise MetadataError("seq_lens", i, int(seq[i]), bound)

    def _check_blocks(self, block_size: int, num_blocks: int, pages: "Pages | None" = None) -> None:
        """Check the block ids in use against the number of blocks, if the table is on the host. pages: as in `check_ids`."""
        import numpy as np

        own, seq_lens = self.pages, self.seq_lens_cpu
        if own is pages is None and isinstance(self.block_table, np.ndarray):  # else a lot of padding is read
            pages = Pages.of(self.block_table, seq_lens, block_size)
        rows = own or pages
        # Rows without padding are checked in one pass over their ids; only if that fails is the padded table searched
        # for the entry to report. Those that were read from a table end where their tokens do.
        is_within = rows is not None and rows.largest < num_blocks
        if seq_lens is None or (is_within and (own is None or own.hold(seq_lens, block_size))):
            return
        if isinstance(self.block_table, np.ndarray) and self.block_table.size:
            table = self.block_table.view(np.uint32)  # one comparison: a negative id is a large unsigned one
            if pages is None and int(table.max()) < num_blocks:
                return
            used, (rows, columns) = -(-seq_lens // block_size), table.shape
            # The largest id in use, by which most tables with padding pass, takes a fifth of the time of the search below.
            if pages is None and table.flags.c_contiguous:
                begins = np.arange(0, rows * columns, columns)
                if Pages(table.reshape(-1), used, columns, begins).largest < num_blocks:
                    return
            # Ids of padding may be anything: an engine's table has stale ones.
            bad = (table >= num_blocks) & (np.arange(table.shape[1]) < used[:, None])
            if not bad.any():  # it is not in use
                return
            r, c = (int(x) for x in np.argwhere(bad)[0])
            why = f"{used[r]} blocks of {block_size} hold {seq_lens[r]} tokens"
            bound = f"between 0 and {num_blocks - 1} ({why})"
            raise MetadataError("block_table", (r, c), int(self.block_table[r, c]), bound)

    def _check_slots(self, num_slots: int | None) -> int:
        """Check the slots for duplicates and, if known, against the number of slots, if they are on the host; return the
        largest, -1 for none."""
        import numpy as np

        if isinstance(self.slot_mapping, np.ndarray):
            slots = self.slot_mapping[: self.num_actual_tokens]
            if not slots.size:
                return PAD_SLOT_ID
            # Sorted, extremes stand at the ends and duplicates beside each other (`np.unique` takes 7 us for 64 slots,
            # the sort 0.6). A stable sort merges runs: 8,192 slots of consecutive pages take 12 us for the default's
            # 40, but of shuffled pages of 16 104 for 38.
            ordered = slots.copy()
            ordered.sort(kind="stable")  # shows extremes and duplicates; it is fast for runs, which pages are
            last = ordered[-1] if num_slots is None else num_slots - 1
            if ordered[0] < PAD_SLOT_ID or ordered[-1] > last:
                i = int(((slots < PAD_SLOT_ID) | (slots > last)).argmax())
                bound = "-1 or at least 0" if num_slots is None else f"-1 or between 0 and {last}"
                raise MetadataError("slot_mapping", i, int(slots[i]), bound)
            twice = ordered[1:] == ordered[:-1]
            if np.count_nonzero(twice):
                # -1 may stand any number of times: it is looked at only if there is any duplicate.
                twice &= ordered[1:] >= 0
                if np.count_nonzero(twice):
                    slot = int(ordered[1:][twice.argmax()])
                    i = int(np.flatnonzero(slots == slot)[1])
                    raise MetadataError("slot_mapping", i, slot, "written by one token only")
            return int(ordered[-1])
        return PAD_SLOT_ID


_INT32, _INT32_OR_64, _BOOL = ("int32",), ("int32", "int64"), ("bool",)


def _check_int(name: str, value: Any, least: int) -> None:
    integral = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if not integral or not least <= value <= INT32_MAX:
        raise MetadataError(name, None, value, f"an int between {least} and {INT32_MAX}{_no_string(value)}")


def _no_string(value: Any) -> str:
    """What an error adds for a string, which reads as the number or the word that it spells."""
    return ", not a string" if isinstance(value, str) else ""


def _flag(name: str, value: Any) -> bool:
    # Types are compared first here and above: `isinstance` with NumPy's and abstract classes takes longer, in every build.
    flag = value if type(value) is bool else as_flag(value)
    if flag is None:
        raise MetadataError(name, None, value, f"True or False{_no_string(value)}")
    return flag


def _flags(causal: Any, num_reqs: int) -> Any:
    """Return `causal` as it is, or [R] bool for a list or tuple of flags."""
    import numpy as np

    if not isinstance(causal, list | tuple):
        return causal
    flags = [as_flag(value) for value in causal]
    if None in flags or len(flags) != num_reqs:
        raise MetadataError("causal", None, causal, f"True, False, or a list of {num_reqs} of them, one per request")
    # A list of equal flags stays [R]: `mask` finds out whether it is mixed.
    return np.array(flags, np.bool_)


def _check_causal(causal: Any, num_reqs: int) -> None:
    import numpy as np

    if isinstance(causal, np.ndarray) and causal.ndim:
        check_array("causal", causal, (num_reqs,), _BOOL)
    else:
        _flag("causal", causal)


def _check_mirror(name: str, array: Any, extent: int) -> None:
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise DTypeError(f"{name} is a {type(array).__name__}: must be a NumPy array")
    check_array(name, array, (extent,), _INT32_OR_64)


def _rows_of_ints(name: str, values: Any) -> "IntArray":
    """Convert [T, 2] integers to int32; reject others."""
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ShapeError(f"{name} has shape {list(array.shape)}: must be [T, 2]")
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"{name} has dtype {array.dtype}: must be integers")
    if not fits_int32(array):
        raise MetadataError(name, None, "an entry", f"between {-INT32_MAX - 1} and {INT32_MAX}")
    return array.astype(np.int32)


def spans_of(groups: "Sequence[Sequence[int]] | Sequence[IntArray]", query_lens: Sequence[int]) -> "IntArray":
    """Return the `spans` of a batch, [T, 2] int32, in which adjacent tokens of one group see each other in both directions.

    groups: R sequences, one integer per token of the request that will be in the cache, new ones included: -1 for a token of
        no group (text); adjacent tokens with the same integer are one group (an image, or a block of a block-causal model).
    query_lens: [R] ints, the new tokens of each request, its last ones.

    A group must be whole: if a step has a part of an image's tokens only, its rows see that part only. The formula is in
    docs/semantics.md §18.

    >>> spans_of([[-1, 7, 7, 7, -1]], [4]).tolist()
    [[1, 3], [1, 3], [1, 3], [-1, -1]]
    """
    import numpy as np

    if len(groups) != len(query_lens):
        raise ShapeError(f"groups has {len(groups)} entries: must be {len(query_lens)}, one per request")
    spans = [np.empty((0, 2), np.int32)]
    for r, (token_groups, n) in enumerate(zip(groups, query_lens, strict=True)):
        ids = np.asarray(token_groups)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DTypeError(f"groups[{r}] must be a sequence of integers, one per token of the request")
        if not 0 <= n <= len(ids):
            raise MetadataError("query_lens", r, n, f"between 0 and len(groups[{r}]) = {len(ids)}")
        # Runs of equal numbers: where each begins and ends, and the run of each token (the last one that begins at or
        # before it).
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.empty(0, np.int64)
        ends = np.append(starts[1:], len(ids)) - 1
        of = np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
        pairs = np.stack([starts[of], ends[of]], 1) if len(ids) else np.empty((0, 2), np.int64)
        pairs[ids < 0] = -1
        # Positions count from the request's beginning, and only the new tokens, its last n, are rows of the batch.
        spans.append(pairs[len(ids) - n :].astype(np.int32))
    return np.concatenate(spans)


class Checked:
    """The starts, lengths and slots of a batch in one block of memory, each aligned to 16 bytes, as a device gets them in one
    copy; once the batch was checked, also how it was then.

    sizes: of each, in words: slots have two. size: of the block. largest: the largest slot.
    """

    def __init__(self, starts: int, lens: int, slots: int) -> None:
        """The number of each; all are 0."""
        import numpy as np

        self.sizes = starts, lens, 2 * slots
        second = starts + -starts % 4
        third = second + lens + -lens % 4
        self.size = third + 2 * slots + -2 * slots % 4
        block = self._block = np.zeros(self.size, np.int32)
        self.arrays = block[:starts], block[second : second + lens], block[third : third + 2 * slots].view(np.int64)

    def keep(self, batch: CommonAttentionMetadata, largest: int) -> "Checked":
        self.largest, self._content = largest, self._block.tobytes()
        self._fields = [*map(batch.__dict__.get, _FIELDS)]
        return self

    def holds(self, batch: CommonAttentionMetadata) -> bool:
        """Whether a batch is as it was: its fields by identity, and the values of its arrays, which their owner may change."""
        return all(map(is_, self._fields, map(batch.__dict__.get, _FIELDS))) and self._block.tobytes() == self._content

    def copy_to(self, out: "IntArray") -> None:
        """Write the block, [size] int32."""
        out[:] = self._block


#: What checks and copies of a batch without masks depend on.
_FIELDS = (*(f.name for f in fields(CommonAttentionMetadata)), "_pages")


def next_power_of_two(size: int) -> int:
    """Return the power of two at or above `size` (1 for 0)."""
    return 1 << max(size - 1, 0).bit_length()


def _rows_of(start: "IntArray", seq_lens: "IntArray") -> "tuple[IntArray, IntArray]":
    """Return the request of each new token, and its position in it; each [T]."""
    import numpy as np

    query_lens = start[1:] - start[:-1]
    if start[-1] == len(query_lens) and not np.count_nonzero(query_lens != 1):  # decodes, in a third of the time
        return np.arange(len(query_lens)), seq_lens - 1
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    # Row i of n has position i + (m - n), negative if there are more rows than keys (docs/semantics.md §3).
    return request, np.arange(len(request)) - start[request] + (seq_lens - query_lens)[request]
