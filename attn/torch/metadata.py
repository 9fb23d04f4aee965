"""Metadata of the paged backends: a framework-neutral batch on a torch device, with host copies of the lengths."""

import functools
import itertools
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from attn import envs
from attn.arrays import to_framework
from attn.backends.abstract import AttentionMetadataBuilder
from attn.backends.block_table import PAD_SLOT_ID, Pages
from attn.backends.metadata import AttentionMetadata, Checked, CommonAttentionMetadata
from attn.errors import DeviceError, MetadataError
from attn.torch.alignment import aligned
from attn.torch.arrays import Facts, facts_of, from_foreign, static
from attn.torch.platforms import platform_of
from attn.visibility import BatchMask

if TYPE_CHECKING:
    from attn.backends.metadata import IntArray

#: The fields that are tensors on the device; those of `mask` follow.
ARRAYS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
_DTYPES = (torch.int32, torch.int32, torch.int32, torch.int64)
#: The fields of a batch that the metadata has as they are.
_BOUNDS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")
LAUNCHED_BY = (*ARRAYS, *_BOUNDS, "causal", "mask", "block_size")
#: The fields that plans made on the host depend on: an engine may write lengths in place, and assign their mirrors alone.
PLANNED_BY = (*LAUNCHED_BY, "query_start_loc_cpu", "seq_lens_cpu")
_MASK, _BLOCK_SIZE = LAUNCHED_BY.index("mask"), LAUNCHED_BY.index("block_size")
_bounds = attrgetter(*_BOUNDS)
_MOST = 64  #: calls of one kind of batch to keep
_counter = itertools.count(1)
#: Every live batch by its `handle`, for operators of a graph. A handle is never reused.
#: Weak, so that a graph keeps no batch alive.
alive: "weakref.WeakValueDictionary[int, PagedAttentionMetadata]" = weakref.WeakValueDictionary()


def exportable(cls: Any) -> Any:
    """Let `torch.export` take batches of a class as inputs: their tensors are inputs, the rest follows from shapes.

    Bounds such as `max_seq_len` are then those of the tensors (rows, and slots in a row of the block table), and the host's
    mirrors are dropped, so that one program serves every batch of its extents.
    """

    def flatten(batch: Any) -> tuple[list[Any], Any]:
        return batch.tensors(), [batch.causal, batch.block_size]

    def flatten_with_keys(batch: Any) -> tuple[list[Any], Any]:
        arrays, context = flatten(batch)
        return [(GetAttrKey(name), array) for name, array in zip(ARRAYS + BatchMask._fields, arrays, strict=True)], context

    def unflatten(arrays: Any, context: Any) -> Any:
        by_name = dict(zip(ARRAYS, arrays[: len(ARRAYS)], strict=True))
        rows, reqs, columns = (
            tuple(getattr(by_name[name], "shape", ())) for name in ("slot_mapping", "seq_lens", "block_table")
        )  # placeholders for tensors may have no shape
        size = rows[0] if rows else 0
        longest = columns[1] * (context[1] or 1) if columns else 0
        return cls(
            **by_name,
            mask=BatchMask(*arrays[len(ARRAYS) :]),
            num_reqs=reqs[0] if reqs else 0,
            num_actual_tokens=size,
            max_query_len=size,
            max_seq_len=longest,
            causal=context[0],
            block_size=context[1],
        )

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=json.dumps,
        from_dumpable_context=json.loads,
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


@functools.lru_cache(maxsize=1024)
def shared_calls(batch_key: tuple[Any, ...]) -> dict[Any, Any]:
    """Return what calls over batches with this key keep for later ones, the same dictionary each time. See `Kept`."""
    return {}


def keep(kept: dict[Any, Any], key: Any, value: Any) -> Any:
    """Add a value to what is kept of one kind of batch, which is bounded; return it."""
    # All at once: which of them would be needed again is unknown, and a record is made again by one call.
    if len(kept) >= _MOST:
        kept.clear()
    kept[key] = value
    return value


class Kept:
    """What layers keep of their calls over a batch while its fields are these, by everything else that calls depend on.

    calls: for this batch; shared_calls: for later batches too that are equal in what checks and launches depend on but
    addresses and the longest request; it holds no memory of theirs. None unless the batch's tensors are plain ones. plans: what
    layers derive from the lengths on the host. batch: the one that these fields were built from, if its builder tells.
    """

    batch: CommonAttentionMetadata | None = None

    def __init__(self, batch: "type[PagedAttentionMetadata]", fields: tuple[Any, ...]) -> None:
        """fields: those of `LAUNCHED_BY`, and what a subclass adds."""
        self.fields, self.calls, self._batch = fields, dict[Any, Any](), batch
        self.plans = dict[Any, Any]()
        self._facts: Facts | None = None

    def facts(self, tensors: Sequence[Any]) -> Facts | None:
        """Return `facts_of` the tensors of a call, which are probably those of the last one."""
        self._facts = facts = facts_of(tensors, self._facts)
        return facts

    @functools.cached_property
    def shared_calls(self) -> dict[Any, Any] | None:
        *arrays, num_reqs, num_tokens, most_rows, _, causal, mask, block_size = self.fields[: len(LAUNCHED_BY)]
        facts = static((*arrays, *mask))
        return (
            None if facts is None else shared_calls((self._batch, num_reqs, num_tokens, most_rows, causal, block_size, *facts))
        )

    @functools.cached_property
    def writes_apart(self) -> bool:
        """Whether the host knows that `CommonAttentionMetadata.writes_apart` is so of these fields."""
        return self.batch is not None and self.batch.writes_apart(self.fields[_BLOCK_SIZE])

    @functools.cached_property
    def addresses(self) -> list[int]:
        """The addresses of the batch's tensors, absent ones left out."""
        return [x.data_ptr() for x in (*self.fields[: len(ARRAYS)], *self.fields[_MASK]) if x is not None]


@exportable
@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """One batch on the device. Fields have the shapes and meanings of `CommonAttentionMetadata`.

    query_start_loc: [R + 1] int32 · seq_lens: [R] int32 · block_table: [R, B] int32 · slot_mapping: [T] int64, all on the
    device; `*_cpu` are NumPy mirrors (None if the caller passed none). causal: whether every request is causal. mask: what else
    the batch lets its rows see, on the device; mask_cpu: those of its arrays of which the caller passed NumPy arrays, the tree
    excepted. A caller may change a tensor in place, as between replays of a captured graph; calls outside of graphs then rely
    on the mirrors, and on no request having the page that another one writes to if none had when the batch was built.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool = True
    query_start_loc_cpu: "IntArray | None" = None
    seq_lens_cpu: "IntArray | None" = None
    mask: BatchMask = BatchMask()
    mask_cpu: BatchMask = BatchMask()
    block_size: int | None = None

    #: Reads the fields that launches depend on.
    _launched_by: ClassVar = attrgetter(*LAUNCHED_BY)

    def __post_init__(self) -> None:
        #: What `attn.torch.backends.pair` divides the batch into; empty: the layer's backend serves it whole.
        self.member_batches: tuple[Any, ...] = ()
        self.divided_by: tuple[Any, ...] = ()  # the values of `PLANNED_BY` that these are of
        self.handle = 0  # a batch built within a graph is only its tensors: it cannot be looked up
        if not torch.compiler.is_compiling():
            self.handle = next(_counter)
            alive[self.handle] = self

    def kept(self) -> Kept:
        """What layers keep of their calls over this batch, until a field is assigned; a tensor may be changed in place."""
        # Compared by identity: an engine that assigns a new tensor starts anew, one that writes in place does not.
        fields, kept = self._launched_by(self), self.__dict__.get("_kept")
        if kept is None or not all(map(is_, kept.fields, fields)):
            kept = self.__dict__["_kept"] = Kept(type(self), fields)
        return kept  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        # launches hold addresses of this process, and cannot be pickled
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    def tensors(self) -> list[torch.Tensor | None]:
        """The batch's tensors on the device, in the order of `ARRAYS` and of the mask's fields."""
        return [*(getattr(self, name) for name in ARRAYS), *self.mask]

    @property
    def has_own_keys(self) -> bool:
        """Whether the host knows that every new token's own key is in the cache, so that no row of a decoder sees no key."""
        starts, lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if starts is None or lens is None:
            return False
        if lens.size and lens[lens.argmin()] >= self.max_query_len:  # in most batches, and found in a fifth of the time
            return True
        return bool((starts[1:] - starts[:-1] <= lens).all())

    def host_lens(self) -> "tuple[IntArray, IntArray]":
        """(query_start_loc [R + 1], seq_lens [R]) on the host: the caller's mirrors, or fetched from the device.

        The fetch waits for the device. It happens only in backends that loop over requests on the host, and only if the caller
        passed no mirrors. The fetched lengths are then checked (`CommonAttentionMetadata.validate`).
        """
        if self.query_start_loc_cpu is None or self.seq_lens_cpu is None:
            fetched = {"query_start_loc_cpu": self.query_start_loc.cpu().numpy(), "seq_lens_cpu": self.seq_lens.cpu().numpy()}
            if self.block_size is not None:  # they were not on the host when the batch was built, so they are checked now
                names = {f.name for f in fields(CommonAttentionMetadata)} & {f.name for f in fields(PagedAttentionMetadata)}
                batch = {name: getattr(self, name) for name in names} | fetched
                CommonAttentionMetadata(**batch).validate(self.block_size)
            # only now: lengths that were refused must not be there for the next layer
            self.query_start_loc_cpu, self.seq_lens_cpu = fetched["query_start_loc_cpu"], fetched["seq_lens_cpu"]
        return self.query_start_loc_cpu, self.seq_lens_cpu

    def host_mask(self) -> BatchMask:
        """Return the mask with the tree on the device and everything else on the host; waits for the device without mirrors."""
        here = self.mask._replace(tree=None)
        if any(array is not None and mirror is None for array, mirror in zip(here, self.mask_cpu, strict=True)):
            self.mask_cpu = here.map(lambda array: array.cpu().numpy())
        return self.mask_cpu._replace(tree=self.mask.tree)

    def check_ids(self, num_blocks: int, block_size: int) -> None:
        """Raise `MetadataError` unless live block ids and slots are within a cache of that extent and no slot is written twice.

        Checks the tensors as they are on the device now: the owner of a captured graph may have changed them since the batch
        was built. Waits for the device, so it is for debugging (ATTN_DEBUG=device). Raises `DeviceError` during a capture.
        """
        if self.block_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise DeviceError("ATTN_DEBUG=device waits for the device: unset it while a CUDA graph is captured")
        table, seq_lens, slots = self.block_table, self.seq_lens, self.slot_mapping[: self.num_actual_tokens]
        columns, last = table.shape[1], num_blocks * block_size - 1
        long = seq_lens > columns * block_size
        if bool(long.any()):
            (r, *_) = long.nonzero().flatten().tolist()
            bound = f"at most {columns * block_size} ({columns} blocks of {block_size} in its table row)"
            raise MetadataError("seq_lens", r, int(seq_lens[r]), bound)
        # only entries for a request's tokens are read; what follows may be anything
        used = (seq_lens + block_size - 1) // block_size
        live = torch.arange(columns, device=table.device) < used[:, None]
        wild = live & ((table < 0) | (table >= num_blocks))
        if bool(wild.any()):
            r, c = wild.nonzero()[0].tolist()
            bound = (
                f"between 0 and {num_blocks - 1} (positions {c * block_size} on of request {r}, {int(seq_lens[r])} tokens long)"
            )
            raise MetadataError("block_table", (r, c), int(table[r, c]), bound)
        order = slots.sort(stable=True)
        twice = (order.values[1:] == order.values[:-1]) & (order.values[1:] >= 0)
        wild = (slots < PAD_SLOT_ID) | (slots > last)
        for bad, bound in ((wild, f"-1 or between 0 and {last}"), (twice, "written by one token only")):
            if bool(bad.any()):
                t = int(bad.nonzero()[0]) if bad is wild else int(order.indices[1:][bad][0])
                r = int((self.query_start_loc[1:] <= t).sum())
                raise MetadataError("slot_mapping", t, int(slots[t]), f"{bound} (a token of request {r})")


def check_device(backend: Any, batch: Any, query: torch.Tensor) -> None:
    """Raise `DeviceError` unless a batch is on the query's device, and Triton's kernels run there."""
    device, name = query.device, backend.get_name()
    if device.type != "cpu":
        elsewhere = platform_of(device.type) not in (None, *backend.capabilities.platforms)
    else:
        # Triton has kernels for tensors on a CPU only where it interprets them.
        is_interpreted = getattr(backend, "is_interpreted", None)
        elsewhere = not torch.compiler.is_compiling() and is_interpreted is not None and not is_interpreted()
    if elsewhere:
        platforms = ", ".join(backend.capabilities.platforms)
        raise DeviceError(
            f"{name}: query is on {device}: must be on a device of {platforms}, like the layer, its cache and its batch"
        )
    for field in ARRAYS:
        placed_on = getattr(batch, field).device
        if placed_on != device:
            raise DeviceError(
                f"{name}: {field} of the batch is on {placed_on}, query on {device}: move the layer before it builds batches "
                f'(layer.to("{device}")), or pass the device, layer.build(batch, device="{device}")'
            )


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Check the framework-neutral batch and move it to the device.

    A builder of another metadata class sets `metadata_cls` and fills the added fields in `extend`.
    """

    metadata_cls = PagedAttentionMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # once: a device and a word are never equal, so that tensors that are there would be moved in each build
        self.device = None if self.device is None else torch.device(self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """Return the batch on this builder's device. Raises `MetadataError` (see `CommonAttentionMetadata.validate`).

        Block ids and slots are also checked if the cache's extent is known and they are on the host, unless `fast_build`.
        """
        if torch.compiler.is_dynamo_compiling():  # which cannot trace all of NumPy
            return torch.compiler.disable(type(self).build)(self, common_prefix_len, common_attn_metadata, fast_build)
        batch, spec = common_attn_metadata, self.kv_cache_spec
        known = batch.known() if batch.block_size == spec.block_size else None
        if known is None:
            batch.validate(spec.block_size)
        arrays, pages = self._arrays(batch, known)
        if spec.num_blocks is not None and not fast_build:  # while a device copies the arrays
            batch.check_ids(spec.block_size, spec.num_blocks, pages, known)
        if envs.debug("device"):
            batch.on_host().validate(spec.block_size, spec.num_blocks)
        mask = batch.mask
        if not mask.is_plain:
            # in the order of its fields: tree, spans, prefix, is_causal
            mask = BatchMask(*map(self._put, mask, (torch.bool, torch.int32, torch.int32, torch.bool)))
            mask = mask.map(torch.Tensor.contiguous)  # kernels compute addresses from shapes
        return self._built(batch, arrays, mask, fast_build)

    def slice_of(
        self, whole: PagedAttentionMetadata, batch: CommonAttentionMetadata, first: int, last: int, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """Return requests first..last, last excluded, of a batch that was built, on the device at addresses for which kernels
        are compiled: others would need other programs.

        whole: what a builder for the same cache made of `batch`, whose mirrors of the lengths are on the host.
        """
        selected, requests = batch, slice(first, last)
        arrays, mask = [getattr(whole, name) for name in ARRAYS], whole.mask
        if last - first < batch.num_reqs:
            assert batch.query_start_loc_cpu is not None
            selected, begin = batch.select(first, last), int(batch.query_start_loc_cpu[first])
            starts, rows = arrays[0][first : last + 1], slice(begin, begin + selected.num_actual_tokens)
            # Views, unless an address is not a multiple of 16 bytes: only the starts are counted anew.
            arrays = [starts - begin if begin else starts, *(x[requests] for x in arrays[1:3]), arrays[3][rows]]
            arrays = [aligned(x, strides=False) for x in arrays]
            if not mask.is_plain:
                mask = mask.select(requests, rows).map(functools.partial(aligned, strides=False))
        return self._built(selected, arrays, mask, fast_build)

    def _built(
        self, batch: CommonAttentionMetadata, arrays: Sequence[Any], mask: BatchMask, fast_build: bool
    ) -> PagedAttentionMetadata:
        """Return the metadata of a batch whose `ARRAYS` and mask are on the device."""
        mirrors = batch.query_start_loc_cpu, batch.seq_lens_cpu
        mask_cpu = mask if mask.is_plain else batch.mask._replace(tree=None).map(_mirror)
        if not (table := arrays[_TABLE]).shape[1]:  # no request has a key; backends may read an entry past the last one
            arrays = [*arrays[:_TABLE], table.new_zeros(table.shape[0], 1), *arrays[_TABLE + 1 :]]
        fields = *arrays, *_bounds(batch), batch.all_causal, *mirrors, mask, mask_cpu, self.kv_cache_spec.block_size
        metadata = self.metadata_cls(*fields)
        self.extend(metadata, batch, fast_build)
        return metadata

    def extend(self, metadata: Any, batch: CommonAttentionMetadata, fast_build: bool) -> None:
        """Fill what `metadata_cls` adds to `PagedAttentionMetadata`, after the batch was validated."""

    def _arrays(self, batch: CommonAttentionMetadata, known: Checked | None = None) -> tuple[list[torch.Tensor], Pages | None]:
        """Return the batch's `ARRAYS` on the device, and the rows of the block table if they were read. NumPy arrays are
        sent in one asynchronous copy; tensors on the device are returned unchanged. known: what `batch.known` returned."""
        target = self.device
        # a CPU needs no staged copy: tensors share the arrays' memory
        if target is None or target.type == "cpu":
            return [self._put(getattr(batch, name), dtype) for name, dtype in zip(ARRAYS, _DTYPES, strict=True)], None
        arrays = batch.query_start_loc, batch.seq_lens, batch.pages or batch.block_table, batch.slot_mapping
        on_device, pages = _copies(arrays, batch.seq_lens_cpu, self.kv_cache_spec.block_size, target, known)
        return [self._put(x, _DTYPES[i]) if x is arrays[i] else x for i, x in enumerate(on_device)], pages

    def _put(self, array: Any, dtype: torch.dtype) -> Any:
        if array is None or (type(array) is torch.Tensor and array.dtype is dtype and array.device == self.device):
            return array
        tensor = from_foreign(array) if isinstance(array, np.ndarray) else to_framework(array, "torch")
        target = tensor.device if self.device is None else self.device
        # a copy to the host must complete before it is read; the device's stream orders a copy from the host
        return tensor.to(device=target, dtype=dtype, non_blocking=target.type != "cpu")


def _mirror(array: Any) -> "IntArray | None":
    return array if isinstance(array, np.ndarray) else None


#: What is on the host, where in `ARRAYS` the block table and the slots are, and behind them where the table's rows begin; where
#: the arrays of `Checked` are.
_ON_HOST, _TABLE, _SLOTS, _BEGINS = (np.ndarray, Pages), ARRAYS.index("block_table"), ARRAYS.index("slot_mapping"), len(ARRAYS)
_OF_CHECKED = (0, 1, _SLOTS)
#: Types of devices whose `index_select` reads rows that overlap where they are; others may make a copy of all of them first.
_STRIDED = ("cuda", "cpu", "meta")


def _table(ids: torch.Tensor, begins: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a table [R, columns] of rows that begin at `begins` [R] of `ids`, in which anything may follow a shorter row."""
    if ids.device.type in _STRIDED:
        return ids.unfold(0, columns, 1).index_select(0, begins)
    return ids[begins[:, None] + torch.arange(columns, device=ids.device)]


def _copies(
    arrays: Sequence[Any], seq_lens: "IntArray | None", block_size: int, device: torch.device, known: Checked | None = None
) -> tuple[list[Any], Pages | None]:
    """Return copies on `device` of those of a batch's `ARRAYS` that are on the host, others as they are, and the rows of its
    table, if they were read. known: what is known of the batch.

    Slots are copied as int64 and others as int32. A table that is mostly padding is copied without it; the device makes rows of
    equal lengths again.
    """
    table, pages, places, parts = arrays[_TABLE], None, list[int](), list[Any]()
    if known is not None:
        places += _OF_CHECKED
        parts.append(known)
    else:
        for i in _OF_CHECKED:
            if isinstance(arrays[i], np.ndarray):
                places.append(i)
                # Slots as two words each, so that all arrays are in one of int32.
                parts.append(np.ascontiguousarray(arrays[i], np.int64).view(np.int32) if i == _SLOTS else arrays[i])
    gathers = False
    if isinstance(table, _ON_HOST):
        pages = table if isinstance(table, Pages) else Pages.of(table, seq_lens, block_size)
        places.append(_TABLE)
        parts.append(pages or table.reshape(-1))  # type: ignore[union-attr]
        # Rows of which each begins where the last one's full width ends are the table itself, and need no gather.
        gathers = pages is not None and not (pages.packed and pages.size == table.shape[0] * table.shape[1])
        if gathers:
            places.append(_BEGINS)
            parts.append(pages.begins)  # type: ignore[union-attr]
    on_device = [*arrays, None]
    if parts:
        for i, copy in zip(places, put_together(parts, device), strict=True):
            on_device[i] = copy
    if gathers:
        on_device[_TABLE] = _table(on_device[_TABLE], on_device[_BEGINS], table.shape[1])
    elif _TABLE in places:
        on_device[_TABLE] = on_device[_TABLE].view(*table.shape)  # separate ints: a tuple takes 0.3 us more
    if _SLOTS in places:
        on_device[_SLOTS] = on_device[_SLOTS].view(torch.int64)
    return on_device[:_BEGINS], pages


def put_together(parts: "Sequence[IntArray | Pages | Checked]", device: torch.device) -> list[torch.Tensor]:
    """Return int32 copies on `device` of arrays [n], in one copy: one each would take as many times as long. They are parts of
    one tensor, each aligned to 16 bytes, because kernels are compiled for that.

    A GPU copies them from pinned memory while the host goes on; torch keeps that memory until the copy is done, and for later
    batches.
    """
    sizes, at, size = list[int](), list[int](), 0
    for part in parts:
        for n in part.sizes if type(part) is Checked else (part.size,):
            at.append(len(sizes))
            # The padding to 16 bytes is a part of its own: one `split_with_sizes` of all takes less time than a slice for each.
            sizes += (n, -n % 4) if n % 4 else (n,)
            size += n + -n % 4
    staged = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    host, begin = staged.numpy(), 0
    for part in parts:
        end = begin + part.size
        if isinstance(part, np.ndarray):
            host[begin:end] = part
        else:
            part.copy_to(host[begin:end])
        begin = end + -end % 4
    pieces = staged.to(device, non_blocking=True).split_with_sizes(sizes)
    return [pieces[i] for i in at]
