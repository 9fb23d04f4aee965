"""The launches of a call, kept to be repeated: by layers of the same shape, over batches of the same kind.

A call examines its arguments, chooses kernels and compiles them. Where only the tensors' addresses differ in the next call,
a `Keeper` collects the launches of the first one, and `KeptLaunches` repeats them with other addresses, as a CUDA graph would
on the device. It is kept by everything else that calls depend on (`attn.torch.metadata.shared_calls`).
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import or_
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import triton

from attn.torch.kernels.direct import Compiled, is_profiled, keepers, memory_of
from attn.torch.kernels.driver import Bound

_ALIGNED = 16  #: bytes, of a call's tensors and of every part of its temporary memory
Origin = tuple[str, Any]  #: what is at an address, see `_Step`


class _Step(NamedTuple):
    """A launch; changing: the index of each argument that differs from call to call, and its place, of a tensor map that of its
    array: ("tensor", index), ("inside", (index of a tensor, offset)), ("temporary", index) or ("stream", 0 or 1)."""

    compiled: Compiled
    programs: int
    columns: int
    arguments: tuple[Any, ...]
    changing: tuple[tuple[int, Origin], ...]


class _Operation(NamedTuple):
    """A call of a function of torch's between launches. views: of each argument, which tensor it is in, of the call's or (with
    -1 - i) of temporary memory, its shape and strides, and its offset there, in elements; no shape: it is the call's tensor."""

    function: Callable[..., Any]
    views: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...], int], ...]

    def bind(self, begins: Sequence[int], now: list[Any]) -> Bound:
        """Return the call as a launch. begins: of temporary memory, in elements; now: it, and then the call's tensors."""
        function, as_strided = self.function, torch.as_strided
        # a view of the call's tensor begins where that does
        views = [
            (max(0, i + 1), shape, strides, begins[-1 - i] + offset if i < 0 else None)
            for i, shape, strides, offset in self.views
        ]

        def run(stream: int, values: Sequence[Any]) -> bool:
            function(*[now[i] if shape is None else as_strided(now[i], shape, strides, at) for i, shape, strides, at in views])
            return True

        return run


class Keeper:
    """Collects the launches of a call while it is entered; after that, `kept` repeats them, or is None if that is impossible.

    It is if a launch was interpreted, or reads memory that belongs neither to the call nor to the batch and is not
    temporary: a copy that the call made, which the launches alone would not make again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """tensors: of the call, then of the batch, as `KeptLaunches` takes them, without None; the first is on the device."""
        self._tensors = [x for x in tensors if x is not None]
        # Addresses are all that a launch shows of its arguments, so they must tell the tensors apart. An empty tensor has
        # address 0.
        self._places: dict[int, Origin] = {x.data_ptr(): ("tensor", i) for i, x in enumerate(self._tensors)}
        # two tensors in one place may be in two the next time
        self._complete = len(self._places) == len(self._tensors) and 0 not in self._places
        # Triton compiles other kernels for other alignments, and a repeated call asks only whether all are aligned.
        self._complete &= not functools.reduce(or_, self._places) % _ALIGNED
        self._temporary, self._of_stream = list[torch.Tensor](), (0, 0)
        self._steps, self._device = list[_Step | _Operation](), 0
        self.kept: KeptLaunches | None = None

    def __enter__(self) -> Self:
        # By thread: layers may run in several threads at once, and each must collect its own launches only.
        keepers[get_ident()] = self
        return self

    def __exit__(self, raised: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del keepers[get_ident()]
        # A call that raised may have launched a part of its work only.
        if raised is None and self._complete and self._steps:
            sizes = [memory.nbytes for memory in self._temporary]
            self.kept = KeptLaunches(self._tensors, self._device, self._steps, sizes, self._of_stream)

    def temporary(self, memory: torch.Tensor) -> None:
        self._places[memory.data_ptr()] = "temporary", len(self._temporary)
        self._temporary.append(memory)  # kept alive, so that no other tensor gets its address during the call

    def of_stream(self, memory: tuple[torch.Tensor, torch.Tensor], floats: int, counters: int) -> None:
        for i, x in enumerate(memory):
            self._places[x.data_ptr()] = "stream", i
        # The extents, not the memory: a repeated call asks for it again, since it grows, and differs by stream and in captures.
        # Once, for all of its launches, which run one after the other.
        self._of_stream = max(floats, self._of_stream[0]), max(counters, self._of_stream[1])

    def launched(
        self, compiled: Compiled | None, programs: int, columns: int, device: int, addresses: Sequence[int], numbers: Any
    ) -> None:
        """Add a launch. compiled: None if it was interpreted."""
        changing = list[tuple[int, Origin]]()
        for i, address in enumerate(addresses):
            # absent arrays are passed as address 0, in every such call
            if address:
                changing.append((i, self._places.get(address) or self._inside(address)))
        for i, number in enumerate(numbers, len(addresses)):
            # NumPy's scalars and bools would be taken for maps: launches pass plain numbers
            if type(number) not in (int, float):  # a tensor map
                at = number.base.data_ptr()
                changing.append((i, self._places.get(at) or self._inside(at)))
                self._complete &= compiled is not None and compiled.launcher is not None  # Triton's encodes a map itself
        self._complete &= compiled is not None
        self._device = device
        if compiled is not None and self._complete:
            self._steps.append(_Step(compiled, programs, columns, (*addresses, *numbers), tuple(changing)))

    def operated(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        """Add a call of a function of torch's."""
        views = list[tuple[int, tuple[int, ...] | None, tuple[int, ...], int]]()
        # Negative indices are of temporary memory: see `_Operation.views`.
        known = [*enumerate(self._tensors), *((-1 - i, x) for i, x in enumerate(self._temporary))]
        for x in tensors:
            owners = [(i, base) for i, base in known if 0 <= x.data_ptr() - base.data_ptr() < _extent(base)]
            self._complete &= len(owners) == 1
            for i, base in owners[:1]:
                offset = (x.data_ptr() - base.data_ptr()) // x.itemsize
                # temporary memory is of the first tensor's dtype, and an offset would be relative to the tensor's storage
                self._complete &= x.dtype == base.dtype == (self._tensors[0] if i < 0 else x).dtype and (i < 0 or not offset)
                views.append((i, None if x is base else tuple(x.shape), x.stride(), offset))
        self._steps.append(_Operation(function, tuple(views)))

    def _inside(self, address: int) -> Origin:
        owners = [(i, address - begin) for i, (begin, end) in enumerate(self._extents) if begin < address < end]
        # In no tensor: a copy that the call made. In several: the next call's tensors may lie elsewhere relative to one
        # another.
        self._complete &= len(owners) == 1
        return "inside", owners[0] if owners else (0, 0)

    @functools.cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """The addresses of each tensor's first byte, and of the one after its last."""
        return [(x.data_ptr(), x.data_ptr() + _extent(x)) for x in self._tensors]


class Stages:
    """The launches of a call's stages."""

    def __init__(self, kept: dict[Any, Any], batch: Sequence[torch.Tensor], alone: bool = False) -> None:
        """kept: of calls of the same kind, by stage; batch: its tensors; alone: whether one stage is all of such a call."""
        self.alone = alone
        self._kept, self._batch = kept, batch
        self._addresses = [x.data_ptr() for x in batch]

    def __call__(self, name: Any, run: Callable[[], Any], *tensors: torch.Tensor | None) -> None:
        """Do what `run` does for `tensors`: call it the first time, repeat its launches later."""
        # A stage that cannot be repeated is kept as None, so that it is not recorded at each call.
        if name not in self._kept:
            with Keeper((*tensors, *self._batch)) as keeper:
                run()
            self._kept[name] = keeper.kept
        elif not self.repeat(name, tensors):
            run()

    def repeat(self, name: Any, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Repeat a stage's launches for tensors that begin where those of an equal call would. Returns whether it did."""
        kept = self._kept.get(name)
        return kept is not None and kept(tensors, self._addresses)


@contextmanager
def unkept() -> Iterator[None]:
    """Collect no launches in this block: a call makes them to measure kernels, not to compute its result."""
    keeper = keepers.pop(get_ident(), None)
    try:
        yield
    finally:
        if keeper is not None:
            keepers[get_ident()] = keeper


class KeptLaunches:
    """Launches that can be repeated for tensors of the same shapes, strides and dtypes at other addresses.

    of_batch: whether they serve batches of one kind only, so that no captured graph, which serves others too, may use them.
    """

    of_batch = False

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        device: int,
        steps: Sequence[_Step | _Operation],
        temporary: Sequence[int],
        of_stream: tuple[int, int],
    ) -> None:
        """like: the tensors of the call; device: of the launches, as Triton numbers it; temporary: bytes of each; of_stream:
        the most that launches ask `memory_of_stream` for, (0, 0) if none does."""
        self._device, self._number, self._of_stream = like[0].device, device, of_stream if any(of_stream) else None
        # None for tensors on the host, where tests run launches of a placeholder for the driver.
        self._index = self._device.index if self._device.type == "cuda" else None
        self._stream = triton.runtime.driver.active.get_current_stream
        # All temporary memory of a call is one allocation, whose parts begin at multiples of 16 bytes.
        ends = [0, *accumulate(size + -size % _ALIGNED for size in temporary)]
        self._begins, self._elements = ends[:-1], ends[-1] // like[0].itemsize
        # `dict.fromkeys` keeps their order and leaves out what several launches share.
        places = list(dict.fromkeys(origin for step in steps if isinstance(step, _Step) for _, origin in step.changing))
        self._inside = [origin[1] for origin in places if origin[0] == "inside"]
        # the addresses of a call, in the order in which `__call__` finds them
        order: list[tuple[str, Any]] = [("tensor", i) for i in range(len(like))]
        order += [("inside", index) for index in self._inside] + [("temporary", i) for i in range(len(temporary))]
        order += [("stream", i) for i in (0, 1) if self._of_stream]
        at = {origin: i for i, origin in enumerate(order)}
        addresses = struct.Struct(f"={len(order)}Q")
        slots = ctypes.create_string_buffer(addresses.size)
        self._pack = functools.partial(addresses.pack_into, slots, 0)
        bound, now, size = list[Bound](), list[Any](), like[0].itemsize
        for step in steps:
            if isinstance(step, _Operation):
                bound.append(step.bind([begin // size for begin in self._begins], now))
                continue
            changing = [(i, at[origin]) for i, origin in step.changing]
            bound.append(step.compiled.bind(step.programs, step.columns, step.arguments, changing, ctypes.addressof(slots)))
        # Whether there are operations at all: without any, a call need not pass its tensors on.
        self._operates = len(bound) > sum([isinstance(step, _Step) for step in steps])
        # memory that launches read, and kernels with their code
        self._held = slots, [step.compiled for step in steps if isinstance(step, _Step)]
        #: The launches, and what operations between them work on. One thread has them at a time.
        self._idle = [(bound, now)]

    def __call__(self, tensors: Sequence[torch.Tensor | None], batch: Sequence[int]) -> bool:
        """Repeat the launches for tensors of a call, and of a batch at these addresses. Returns whether it did; False: a tensor
        is aligned to less than 16 bytes, another device is the current one, a profiler wants to see each launch, another
        thread is launching them, or a graph is captured that may not have them. tensors: those that the `Keeper` got, with
        None where such a call has none."""
        values: list[Any] = [x.data_ptr() for x in tensors if x is not None]
        values += batch
        # One OR of all addresses: its low bits are 0 only if those of all are.
        if functools.reduce(or_, values) % _ALIGNED or is_profiled():
            return False
        if self._index is not None and torch._C._cuda_getDevice() != self._index:
            return False
        stream = self._stream(self._number)
        # the default stream, 0, cannot be captured
        asks = stream != 0 and (self.of_batch or self._of_stream is not None)
        captured = asks and torch.cuda.is_current_stream_capturing()
        if captured and self.of_batch:
            return False
        try:
            launches, now = idle = self._idle.pop()
        except IndexError:
            return False
        memory = None
        try:
            for i, offset in self._inside:
                values.append(values[i] + offset)
            if self._begins:
                # Allocated in each call, so that the allocator orders its reuse by streams, and a captured graph gets its own.
                memory = tensors[0].new_empty(self._elements)  # type: ignore[union-attr]  # the first is there
                address = memory.data_ptr()
                values += [address + begin for begin in self._begins]
            if self._of_stream is not None:
                scratch = memory_of(self._device, stream, captured, *self._of_stream)
                values += scratch.addresses
            self._pack(*values)
            if self._operates:
                now[:] = memory, *[x for x in tensors if x is not None]
            # a list: where the thread has no context, every launch fails alike, and the caller makes the call again
            return all([launch(stream, values) for launch in launches])
        finally:
            # No tensor of the call may live on in the record.
            now.clear()
            self._idle.append(idle)


def _extent(x: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last one, both included."""
    if x.is_contiguous():
        return x.nbytes
    return (sum([(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)]) + 1) * x.itemsize
