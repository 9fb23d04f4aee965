"""Gluon in NumPy, for tests: a Hopper kernel's source runs on a CPU, each partition of `warp_specialize` as a thread.

What it shows: which keys and pages are read, what is masked, and that barriers let every partition end. Memory that no mask
admits raises, shared memory begins as NaN, and a copy has zeros outside its array, as the engine's. What it does not: layouts,
fences and the asynchrony of copies and products, which end at once here. Elements of 16 bits are float32.
"""

import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SECONDS = 60  #: that a partition waits at a barrier before the test fails


class Tensor(np.ndarray[Any, Any]):
    """An array, or a number, of a partition."""

    def to(self, dtype: Any) -> "Tensor":
        return self.astype(dtype).view(Tensor)

    def __iadd__(self, other: Any) -> Any:
        return self + other  # a new value: the old one may have another name too

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __ixor__(self, other: Any) -> Any:
        return self ^ other

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> "Tensor":
        return np.asarray(array).view(Tensor)  # a number too keeps `to`

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def tensor(values: Any, dtype: Any = None) -> Tensor:
    return np.asarray(values, dtype).view(Tensor)


class Pointer:
    """An address in an array, or several."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.array, np.asarray(self.at) + np.asarray(offset))

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.array.dtype.type)

    def places(self, mask: Any) -> tuple[Any, Any]:
        """(offsets, which of them are accessed)."""
        at, there = np.broadcast_arrays(self.at, True if mask is None else np.asarray(mask, bool))
        assert not there.any() or (at[there].min() >= 0 and at[there].max() < self.array.size), "access outside of the array"
        return np.where(there, at, 0), there


class Apart:
    """An array in memory in which a dimension has a stride of its own, beyond all others: offsets are those of that memory, of
    which only the elements exist."""

    def __init__(self, array: Any, dimension: int, stride: int) -> None:
        self.array, self.stride, self.dtype = np.moveaxis(array, dimension, 0), stride, array.dtype
        self.within = self.array.shape[1:]
        dense = [int(np.prod(self.within[i + 1 :])) for i in range(len(self.within))]
        self.strides = (*dense[:dimension], stride, *dense[dimension:])
        self.size = len(self.array) * stride

    def reshape(self, *_: int) -> "Apart":
        return self

    def _index(self, at: Any) -> Any:
        first, rest = np.divmod(at, self.stride)
        return (first, *np.unravel_index(rest, self.within))

    def __getitem__(self, at: Any) -> Any:
        return self.array[self._index(at)]

    def __setitem__(self, at: Any, values: Any) -> None:
        self.array[self._index(at)] = values


def strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    return array.strides if isinstance(array, Apart) else tuple(s // array.itemsize for s in array.strides)


def integer(value: int) -> Tensor:
    """A kernel's argument: of 32 bits if it fits."""
    return tensor(value, np.int32 if -(2**31) <= value < 2**31 else np.int64)


class Shared:
    """Shared memory of a shape: rows of more than 64 columns lie as pieces of 64, as the engine writes them."""

    def __init__(self, flat: Any, shape: Sequence[int]) -> None:
        self.flat, self.shape, self.dtype = flat, list(shape), flat.dtype.type
        assert flat.size == np.prod(shape, dtype=int)

    def index(self, i: Any) -> "Shared":
        size = self.flat.size // self.shape[0]
        assert 0 <= i < self.shape[0]
        return Shared(self.flat[int(i) * size : (int(i) + 1) * size], self.shape[1:])

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.load().transpose(order)

    def slice(self, start: int, length: int, dim: int) -> "Columns":
        assert dim == 1 and start + length <= self.shape[1]
        return Columns(self, start, length)

    def _in_pieces(self) -> bool:
        return len(self.shape) == 2 and self.shape[1] > 64

    def load(self, layout: Any = None) -> Tensor:
        if self._in_pieces():
            rows, columns = self.shape
            return tensor(self.flat.reshape(columns // 64, rows, 64).transpose(1, 0, 2).reshape(rows, columns).copy())
        return tensor(self.flat.reshape(self.shape).copy())

    def store(self, values: Any) -> None:
        values = np.broadcast_to(np.asarray(values), self.shape)
        if self._in_pieces():
            values = values.reshape(self.shape[0], -1, 64).transpose(1, 0, 2)
        self.flat[:] = values.reshape(-1)


class Columns:
    """Some columns of a tile in shared memory."""

    def __init__(self, tile: Shared, start: int, length: int) -> None:
        self.tile, self.columns = tile, slice(start, start + length)

    def load(self, layout: Any = None) -> Tensor:
        return self.tile.load()[:, self.columns]

    def store(self, values: Any) -> None:
        whole = self.tile.load()
        whole[:, self.columns] = values
        self.tile.store(whole)

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.load().transpose(order)


class Boxes:
    """An array that the engine copies boxes of."""

    def __init__(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> None:
        flat = np.asarray(array).reshape(-1)
        self.array = np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides], writeable=False)
        self.box, self.layout = box, None

    def copy(self, at: Sequence[Any]) -> Any:
        box = np.zeros(self.box, self.array.dtype)
        first = [max(int(x), 0) for x in at]
        last = [min(int(x) + n, size) for x, n, size in zip(at, self.box, self.array.shape, strict=True)]
        if all(a < b for a, b in zip(first, last, strict=True)):
            part = self.array[tuple(slice(a, b) for a, b in zip(first, last, strict=True))]
            box[tuple(slice(a - int(x), b - int(x)) for a, b, x in zip(first, last, at, strict=True))] = part
        return box


class Barrier:
    """An mbarrier: a phase ends with the last arrival and the last byte."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.bytes, self.phase, self.changed = count, 0, 0, 0, threading.Condition()

    def add(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + nbytes
            assert self.arrived <= self.count and self.bytes >= 0, "more arrivals, or bytes, than the barrier awaits"
            if self.arrived == self.count and not self.bytes:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != int(parity) % 2, SECONDS), "a partition waits forever"


class Barriers:
    """The `mbarrier` module: an element of shared memory stands for its barrier."""

    MBarrierLayout = staticmethod(lambda *_: "barriers")

    def __init__(self) -> None:
        self.made: dict[int, Barrier] = {}

    def _of(self, place: Shared) -> Barrier:
        return self.made[place.flat.__array_interface__["data"][0]]

    def init(self, place: Shared, count: int) -> None:
        self.made[place.flat.__array_interface__["data"][0]] = Barrier(count)

    def wait(self, place: Shared, phase: Any) -> None:
        self._of(place).wait(phase)

    def arrive(self, place: Shared, count: int = 1) -> None:
        self._of(place).add(count, 0)

    def expect(self, place: Shared, nbytes: int) -> None:
        self._of(place).add(1, nbytes)

    def load_box(self, boxes: Boxes, at: Sequence[Any], place: Shared, to: Shared) -> None:
        box = boxes.copy(at)
        to.store(box.reshape(to.shape))
        self._of(place).add(0, -2 * box.size)


def _specialise(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    failed: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if failed:
        raise failed[0]


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    at, there = pointer.places(mask)
    return tensor(np.where(there, pointer.array.reshape(-1)[at], other).astype(pointer.array.dtype))


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    at, there = pointer.places(mask)
    pointer.array.reshape(-1)[at[there]] = np.broadcast_to(values, at.shape)[there]


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    old = _load(pointer)
    _store(pointer, old + value)
    return old


def _scan(values: Any, axis: int, add: Callable[[Any, Any], Any]) -> Tensor:
    made = list(values[:1])
    for value in values[1:]:
        made.append(add(made[-1], value))
    return tensor(made)


def _reduce(values: Any, axis: int, combine: Callable[[Any, Any], Any]) -> Tensor:
    return tensor(functools.reduce(combine, np.moveaxis(np.asarray(values), axis, 0)))


def _product(a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False) -> Tensor:
    left, right = (x.load() if isinstance(x, Shared | Columns) else x for x in (a, b))
    made = np.asarray(left, np.float32) @ np.asarray(right, np.float32)
    return tensor(made + acc if use_acc else made)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "le": np.less_equal,
    "ge": np.greater_equal,
    "or": np.logical_or,
    "selp": lambda yes, no, which: np.where(which, yes, no),
}


def _assembled(ptx: str, constraints: str, operands: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Interpret PTX that compares and selects element by element; any other, such as a launch's, does nothing."""
    if "selp" not in ptx:
        return None
    assert constraints.count(",") == len(operands)
    values: dict[str, Any] = {"0fFF800000": np.float32(-np.inf)}
    values |= {f"${i}": np.asarray(x) for i, x in enumerate(operands, 1)}
    for statement in ptx.strip("{ }").split(";")[1:-1]:  # after the declaration of predicates
        operation, names = statement.split(maxsplit=1)
        name, *kinds = operation.split(".")
        target, *given = names.split(", ")
        read = [values[x] for x in given]
        if name == "setp":
            values[target] = _OPERATIONS[kinds[0]](*read[:2]) & (read[2] if kinds[1] == "and" else True)
        else:
            values[target] = _OPERATIONS[name](*read)
    return tensor(values["$0"])


def _renewed(norm: Any, top: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`hopper_prefill._renewed`, whose PTX jumps."""
    most = np.asarray(norm).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        by = np.where(most > 2**32, np.minimum(np.floor(np.log2(most)), 126), 0)
    by = np.broadcast_to(by, norm.shape).astype(np.float32)
    return tensor(np.exp2(-by)), tensor(norm * np.exp2(-by)), tensor(top + by)


def _language(program: tuple[int, int], bfloat16: Any) -> types.SimpleNamespace:
    """The module `gluon.language`. bfloat16: what it is."""
    layouts = (
        "BlockedLayout",
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
    )
    same = {name: getattr(np, name) for name in ("exp2", "log2", "abs", "maximum", "minimum", "float32", "int32", "int64")}
    return types.SimpleNamespace(
        **{name: lambda *_, **__: None for name in (*layouts, "SwizzledSharedLayout")},
        **same,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            np.full(np.prod(shape, dtype=int), np.nan).astype(dtype)
            if dtype is np.float32
            else np.zeros(np.prod(shape), dtype),
            shape,
        ),
        arange=lambda start, end, layout: tensor(np.arange(start, end, dtype=np.int32)),
        associative_scan=_scan,
        atomic_add=_atomic_add,
        broadcast=lambda *values: [tensor(x) for x in np.broadcast_arrays(*values)],
        constexpr=lambda value: value,
        convert_layout=lambda value, layout: value,
        inline_asm_elementwise=_assembled,
        full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)),
        load=_load,
        max=lambda values, axis: tensor(np.asarray(values).max(axis)),
        min=lambda values, axis: tensor(np.asarray(values).min(axis)),
        num_programs=lambda axis: program[1],
        program_id=lambda axis: tensor(program[0], np.int32),
        bfloat16=bfloat16,
        reduce=_reduce,
        reshape=lambda values, shape: tensor(np.reshape(values, shape)),
        static_range=range,
        store=_store,
        sum=lambda values, axis: tensor(np.asarray(values).sum(axis, dtype=values.dtype)),  # 32 bits stay 32
        warp_specialize=_specialise,
        where=lambda condition, yes, no: tensor(np.where(condition, yes, no)),
        zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)),
    )


def module(name: str, program: tuple[int, int] = (0, 1), bfloat16: Any = np.float32) -> Any:
    """Return `attn.kernels.<name>`, read again with this Gluon. program: its number, and that of all programs; bfloat16: the
    dtype that stands for it, None if the arrays' does not."""
    import sys

    barriers = Barriers()
    language = types.ModuleType("attn.kernels.gluon")
    jit = lambda function=None, **_: function if function else lambda function: function  # noqa: E731
    language.__dict__.update(
        barrier=lambda: None, fence_async_shared=lambda: None, gl=_language(program, bfloat16), mbarrier=barriers,
        gluon=types.SimpleNamespace(jit=jit, constexpr_function=jit), load_box=barriers.load_box, warpgroup_mma=_product,
        reinterpret=lambda shared, dtype, shape, layout: Shared(shared.flat, shape),
        warpgroup_mma_wait=lambda number, deps: deps[0],
    )  # fmt: skip
    path = ROOT / "attn" / "kernels" / f"{name}.py"
    made = types.ModuleType(name)
    with _standing_in(sys.modules, "attn.kernels.gluon", language):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), made.__dict__)
    # pairs of 16-bit numbers in 32 bits: here they are float32, one by one
    for function in ("_pairs", "_of_pairs"):
        if hasattr(made, function):
            setattr(made, function, lambda values, *_: values)
    if hasattr(made, "_odd"):
        made._odd = lambda values, *_: tensor(~np.isfinite(values), np.int32)  # type: ignore[attr-defined]
    if hasattr(made, "_scaled"):  # a warp jumps over multiplications by 1
        made._scaled = lambda acc, factor: acc * factor.reshape(64, -1)[:, :1]  # type: ignore[attr-defined]
    if hasattr(made, "_uniform"):  # all lanes have the first one's number
        made._uniform = lambda x: x  # type: ignore[attr-defined]
    if hasattr(made, "_renewed"):
        made._renewed = _renewed  # type: ignore[attr-defined]
    return made


@contextmanager
def _standing_in(modules: dict[str, Any], name: str, stands_in: Any) -> Iterator[None]:
    kept = modules.get(name)
    modules[name] = stands_in
    try:
        yield
    finally:
        if kept is None:
            del modules[name]
        else:
            modules[name] = kept
