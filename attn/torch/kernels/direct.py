"""Kernel launches by the host: with little work per call, on the device of the tensors, in a graph as custom operators.

Triton examines every argument at every launch. `Prepared` passes a compiled kernel its arguments itself (`driver`), from the
second launch of a kind on; `operator` makes the functions that launch kernels.
"""

import ctypes
import functools
import inspect
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import or_
from threading import get_ident, local
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from torch import library

from attn.kernels.hopper import CannotCompile
from attn.kernels.launch import power_of_two
from attn.torch.kernels.driver import Bound, Launcher, launcher

_P = ParamSpec("_P")
_T = TypeVar("_T")
_UNEVEN = ~0x7FFFFFF0  #: bits that are 0 in every multiple of 16 below 2**31


@functools.cache
def _arch(driver: Any, device: int) -> str:
    """`arch` of the driver's current device, `device`: asking the driver for its properties costs some microseconds."""
    # AMD's targets have features behind a colon, as gfx942:sramecc+:xnack-, which no launch rule asks about.
    target = driver.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).partition(":")[0]


def arch() -> str:
    """`sm_90`, `gfx942`, or `interpreter`: Triton's current target (queried from Triton, so a placeholder driver counts)."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    driver = triton.runtime.driver.active
    return _arch(driver, driver.get_current_device())


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA or ROCm device; 8 for tensors on the host (interpreter, compiling without a device)."""
    return _multiprocessors(device) if device.type == "cuda" else 8


def check_stride(name: str, tensor: Any) -> None:
    """Assert that rows of D elements are contiguous, as kernels require; anything else is a bug in this package."""
    assert tensor.stride(-1) == 1, f"{name} has strides {tensor.stride()}: the last dimension must be dense"


def is_eager(tensor: Any) -> bool:
    """Whether to launch directly: operators are for tracing, and their dispatch costs an eager call about 50 us."""
    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling()


#: The arguments that Triton specialises a kernel on besides its constants: see `signature_of`.
Signature = tuple[torch.device, tuple[torch.dtype | None, ...], tuple[int, ...] | None]


def signature_of(arrays: Sequence[torch.Tensor | None], strides: tuple[int, ...] = (0,)) -> Signature:
    """(device, dtypes of the arrays, None for absent ones, and strides unless all are multiples of 16 below 2**31).

    The first array must be there.
    """
    # `tuple` of a list takes two thirds of the time that it takes of a generator
    dtypes = tuple([None if x is None else x.dtype for x in arrays])
    return arrays[0].device, dtypes, strides_that_count(strides)  # type: ignore[union-attr]


def strides_that_count(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides for which Triton compiles kernels of their own; None if all are multiples of 16 below 2**31."""
    # Triton specialises an integer on being 1, divisible by 16, and of 32 or 64 bits. One OR of all strides tells whether they
    # are all of the common kind; kernels of strides that are not are kept by the strides themselves.
    return strides if functools.reduce(or_, strides) & _UNEVEN else None


#: (query, key, value, and sinks if there are any) -> output.
Repeated = Callable[..., torch.Tensor]


class Compiled(NamedTuple):
    """A compiled kernel, its launcher (None: Triton's), and its last arguments, which are constants."""

    kernel: Any
    launcher: Launcher | None
    last: tuple[Any, ...]

    def __call__(self, programs: int, columns: int, device: int, addresses: Sequence[int], numbers: Sequence[Any]) -> None:
        arguments = *addresses, *numbers, *self.last
        if is_profiled():  # Triton prepares more for a profiler
            self.kernel[programs, columns, 1](*arguments)
            return
        stream = triton.runtime.driver.active.get_current_stream(device)
        # False: this thread has no CUDA context yet, which Triton's own launch makes.
        if self.launcher is None or not self.launcher(programs, columns, stream, arguments):
            self._run(programs, columns, stream, arguments)

    def bind(
        self, programs: int, columns: int, arguments: Sequence[Any], changing: Sequence[tuple[int, int]], slots: int
    ) -> Bound:
        """Return the launch of such a grid with these arguments, of which some are values of each call: see `Launcher.bind`."""
        if self.launcher is not None:
            return self.launcher.bind(programs, columns, (*arguments, *self.last), changing, slots)
        # One list that each launch writes its addresses into: the caller lets one thread at a time have it
        # (`KeptLaunches._idle`).
        passed = [*arguments, *self.last]

        def run(stream: int, values: Sequence[Any]) -> bool:
            for at, n in changing:
                passed[at] = values[n]
            self._run(programs, columns, stream, passed)
            return True

        return run

    def _run(self, programs: int, columns: int, stream: int, arguments: Sequence[Any]) -> None:
        kernel = self.kernel
        handles = kernel.function, kernel.packed_metadata, None, None, None  # no profiler's data and hooks
        kernel.run(programs, columns, 1, stream, *handles, *arguments)


def is_profiled() -> bool:
    """Whether a profiler's hooks are called at each of Triton's launches."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    # a hook is a function or None in some releases of Triton, a chain with a list of calls in others
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


#: By thread, the `kept.Keeper` that collects the launches of its current call.
keepers: dict[int, Any] = {}


class Prepared:
    """A Triton kernel for launches that differ in addresses, in numbers that it does not specialize, and in even strides.

    The kernel's parameters are arrays, then numbers, then constants. All launches of one are of the same `Signature`.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """constants: the kernel's last arguments, and the options of its launch."""
        self._kernel, self._constants = kernel, constants
        self._device = 0  #: of the launches, as Triton numbers it
        #: by the alignment of arrays; None: all to 16 bytes
        self._kept: dict[tuple[bool, ...] | None, Compiled] = {}
        #: Launches of `again` that no thread has: each with its buffer, and the arguments in it and the memory that they name.
        self._idle: list[list[Any]] | None = None

    def __call__(self, programs: int, arrays: Sequence[torch.Tensor | None], *numbers: Any, columns: int = 1) -> None:
        """Launch a grid of `programs` x `columns`. numbers: floats, and integers that are not specialized or strides."""
        addresses = [0 if x is None else x.data_ptr() for x in arrays]
        # Triton compiles another kernel for an argument that does not begin at a multiple of 16. Nearly all do, so the common
        # kind has the key None, and is found without asking each address.
        uneven = functools.reduce(or_, addresses) & 15
        alignment = tuple([address & 15 == 0 for address in addresses]) if uneven else None
        kept = self._kept.get(alignment)
        if kept is not None:
            kept(programs, columns, self._device, addresses, numbers)
        else:
            compiled = self._kernel[programs, columns](*arrays, *numbers, **self._constants)
            # The first launch is Triton's own: it compiles the kernel and examines arguments. Later ones have arguments
            # of the same types and alignment.
            if isinstance(compiled, triton.compiler.CompiledKernel):  # else it is interpreted, or still being compiled
                names = self._kernel.arg_names[len(addresses) + len(numbers) :]
                last = tuple(self._constants[name] for name in names)
                # now, when it is the current one; it may be another where a kernel is only prepared (`Decoder.bound`)
                self._device = triton.runtime.driver.active.get_current_device()
                kept = self._kept[alignment] = Compiled(compiled, launcher(compiled), last)
        # `keepers` is empty unless a call is being recorded, so that most launches ask nothing else.
        if keepers and (keeper := keepers.get(get_ident())) is not None:
            keeper.launched(kept, programs, columns, self._device, addresses, numbers)

    def again(
        self,
        general: Repeated,
        device: torch.device,
        shape: tuple[int, ...],
        grid: tuple[int, int],
        arguments: Sequence[Any],
        changing: Sequence[tuple[int, int]],
        held: Any,
    ) -> Repeated:
        """Return `general` for arrays of the same shapes, strides and dtypes at any place, by one launch that is prepared once.

        shape: of the output; grid: programs and columns; arguments: the launch's; changing: the index of each that has an
        address, or a tensor map, of the output (0), query (1), key (2), value (3) or sinks (4); held: memory that it uses.
        Calls that it does not serve are made by `general`: of arrays aligned to less than 16 bytes, on a stream of the caller's
        or another device than the current one, and all before the first launch of such arrays, where a profiler looks, or
        where Triton's own launcher is needed.
        """
        # Only the common kind, of arrays at multiples of 16 bytes, and only what an earlier launch has compiled.
        compiled, index = self._kept.get(None), device.index if device.type == "cuda" else None
        launcher = None if compiled is None or is_profiled() else compiled.launcher
        if compiled is None or launcher is None or (index is not None and torch._C._cuda_getCurrentRawStream(index)):
            return general
        arguments = *arguments, *compiled.last
        # Steps of one kernel share a buffer, which is bound once: binding a launch costs more than repeating it. A step that
        # finds the arguments of another step in it packs its own.
        if self._idle is None:
            slots, buffer = (ctypes.c_uint64 * 5)(), launcher.buffer()
            bound = launcher.bind(*grid, arguments, changing, ctypes.addressof(slots), buffer)
            self._idle = [[bound, buffer, slots, arguments, held]]
        idle, pack = self._idle, struct.Struct("=5Q").pack_into

        def again(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None, runs: None = None
        ) -> torch.Tensor:
            output = query.new_empty(*shape)
            q, k, v, s = query.data_ptr(), key.data_ptr(), value.data_ptr(), 0 if sinks is None else sinks.data_ptr()
            places = output.data_ptr(), q, k, v, s
            on = index is None or (torch._C._cuda_getDevice() == index and not torch._C._cuda_getCurrentRawStream(index))
            here = on and not is_profiled()  # one may have been attached since
            try:
                # A pop of a list is atomic, so one thread at a time has the buffer; another finds none and takes the general
                # way.
                free = idle.pop() if here and not (places[0] | q | k | v | s) & 15 else None
            except IndexError:
                free = None
            if free is not None:
                launch, buffer, slots, packed, _ = free
                if packed is not arguments:  # of another step
                    launcher.pack(buffer, *grid, 0, arguments)
                    free[3:] = arguments, held
                # The driver copies arguments during the launch, so the buffer is free again when this returns.
                pack(slots, 0, *places)
                launched = launch(0, places)
                idle.append(free)
                if launched:
                    return output
            return general(query, key, value) if sinks is None else general(query, key, value, sinks)

        return again


def temporary(memory: torch.Tensor) -> torch.Tensor:
    """Return `memory`, marked as scratch of this call: a repetition of its launches passes scratch memory of its own."""
    if keepers and (keeper := keepers.get(get_ident())) is not None:
        keeper.temporary(memory)
    return memory


def operate(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Call a function of torch's operators between launches; a repetition of the launches calls it with its own tensors.

    An argument that is a tensor of the call itself, not a view of one, must have this shape in all such calls.
    """
    function(*tensors)
    if keepers and (keeper := keepers.get(get_ident())) is not None:
        keeper.operated(function, tensors)


def on_device(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make the device of a function's first argument, a tensor, the current one while it runs; it launches kernels.

    A call in which a Hopper kernel failed to compile is repeated: that kernel is now disabled, so general kernels are used.
    """
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return _run(function, args[0] if args else kwargs[first], args, kwargs)

    return call


def _run(function: Callable[..., _T], first: Any, args: Any, kwargs: Any) -> _T:
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            return _run(function, first, args, kwargs)
    try:
        return function(*args, **kwargs)
    except CannotCompile:
        return function(*args, **kwargs)


def operator(name: str, *mutated: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function as by `on_device`; in a traced graph it is the custom operator `attn::name`.

    Eager calls do without the operator, whose dispatch costs about 50 us. mutated: names of the tensors that the function
    writes to.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        traced: Any = library.custom_op(f"attn::{name}", on_device(function), mutates_args=mutated)
        # The operator writes to its arguments and returns nothing, so tracing has no shape to compute.
        traced.register_fake(lambda *args, **kwargs: None)
        first = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            tensor: Any = args[0] if args else kwargs[first]
            if is_eager(tensor):
                _run(function, tensor, args, kwargs)
            else:
                traced(*args, **kwargs)

        return call

    return decorate


class Scratch(NamedTuple):
    """Memory for what launches leave each other: states, float32, and counters, int32; how many; where they begin."""

    memory: tuple[torch.Tensor, torch.Tensor]
    floats: int
    counters: int
    addresses: tuple[int, int]


class _Scratches(local):
    """A thread's memory by device and stream, the least recently allocated first. It ends with its thread."""

    def __init__(self) -> None:
        self.kept = dict[tuple[torch.device, int], Scratch]()


_scratches = _Scratches()
#: Streams of a thread whose memory is kept. Nothing says when a stream is destroyed, so its memory is freed when as many others
#: have got theirs; until then a new stream of the same address takes it over.
_STREAMS = 8
#: float32 numbers, 16 MiB: more are not kept after a call.
_MOST_KEPT = 1 << 22
_captured: list[torch.Tensor] = []
#: Counters for captured launches, all 0, and how many are taken: none is given twice, since graphs may run at the same time.
_of_graphs: dict[torch.device, tuple[torch.Tensor, int]] = {}
_MOST_OF_GRAPHS = 1 << 20


def scratch(like: torch.Tensor, floats: int) -> torch.Tensor:
    """Return float32 memory, [floats] or more, on the device of `like`, for what the launches of one call leave each other."""
    # Another device's launches of one thread may be on several streams.
    if floats > _MOST_KEPT or like.device.type not in ("cuda", "cpu"):
        return temporary(like.new_empty(floats, dtype=torch.float32))
    return memory_of_stream(like.device, floats, 0)[0]


def memory_of_stream(device: torch.device, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 memory, and int32 counters that are 0 and that a kernel leaves at 0; both are kept per stream, whose
    launches run one after the other, and per thread, between whose launches others' may come. A CUDA graph has its own, since
    it may be replayed on any stream."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    # the default stream, 0, cannot be captured
    captured = stream != 0 and torch.cuda.is_current_stream_capturing()
    memory = memory_of(device, stream, captured, floats, counters).memory
    if keepers and (keeper := keepers.get(get_ident())) is not None:
        keeper.of_stream(memory, floats, counters)
    return memory


def memory_of(device: torch.device, stream: int, captured: bool, floats: int, counters: int) -> Scratch:
    """Return `memory_of_stream` of the current stream, which is captured or not."""
    if captured:  # states are in the graph's own memory, and counters elsewhere
        states, counts = torch.empty(floats, dtype=torch.float32, device=device), _counters_of_graph(device, counters)
        return Scratch((states, counts), floats, counters, (states.data_ptr(), counts.data_ptr()))
    place, scratches = (device, stream), _scratches.kept
    kept = scratches.get(place)
    if kept is not None and kept.floats >= floats and kept.counters >= counters:
        return kept
    # At least 4 MiB of states and 4,096 counters, and powers of two from there on, so that a step with more requests seldom
    # allocates again. Earlier memory is freed in the order of its stream, after the launches that use it.
    sizes = max(1 << 20, power_of_two(floats)), max(1 << 12, power_of_two(counters))
    states, counts = _apart(_memory, device, *sizes)
    scratches.pop(place, None)
    kept = scratches[place] = Scratch((states, counts), *sizes, (states.data_ptr(), counts.data_ptr()))
    if len(scratches) > _STREAMS:
        del scratches[next(iter(scratches))]
    # torch captures on streams other than the default one, so only who uses such a stream may capture soon. Allocated before
    # that, outside of a graph's pool: 4 MiB for each device.
    if stream and device not in _of_graphs:
        _of_graphs[device] = _apart(_memory, device, 0, _MOST_OF_GRAPHS)[1], 0
    return kept


def _counters_of_graph(device: torch.device, count: int) -> torch.Tensor:
    """Return counters of one launch in a graph. They are not in the graph's pool, where cudagraph trees allow outputs alone to
    outlive a call; only a graph that is captured without a call before has them there."""
    counters, taken = _of_graphs.get(device, (None, 0))
    if counters is None or taken + count > counters.numel():
        # kept: a kernel that is launched early runs beside the one that counts, and could be given the same memory
        _captured.append(torch.zeros(count, dtype=torch.int32, device=device))
        return _captured[-1]
    _of_graphs[device] = counters, taken + count + -count % 4  # each aligned to 16 bytes
    return counters[taken : taken + count]


def _apart(make: Callable[..., _T], device: torch.device, *sizes: int) -> _T:
    """Return the memory that `make` allocates in another thread, on this one's stream: cudagraph trees that warm up take what
    their thread allocates from their pool, in which nothing may outlive the call."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def made() -> _T:
        with torch.cuda.stream(stream):  # of None: does nothing
            memory = make(device, *sizes)
        if stream is not None:
            stream.synchronize()  # graphs on other streams count with it
        return memory

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def _memory(device: torch.device, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.empty(floats, dtype=torch.float32, device=device)
    return states, torch.zeros(counters, dtype=torch.int32, device=device)
