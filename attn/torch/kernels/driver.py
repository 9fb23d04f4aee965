"""Launches of compiled kernels by the CUDA driver's own function, with all arguments packed at once.

A launcher that Triton generates parses every argument of a call, also those that are constants of the kernel, and encodes
tensor maps again at each call. `launcher` makes one that packs the arguments that the kernel has into one buffer.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

#: `(stream, values of a call)` -> whether it launched; False if the thread has no CUDA context yet.
Bound = Callable[[int, Sequence[Any]], bool]

_CODES = {
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}
#: CUlaunchConfig: grid, block, bytes of shared memory; stream, attributes and their number
_CONFIG = "7I4xQQI4x"
_STREAM = 4  #: its place in units of 8 bytes
_SUCCESS, _INVALID_CONTEXT = 0, 201
#: An argument: its index, its format, bytes of the kernel's parameters for it.
_Field = tuple[int, str, tuple[int, ...]]
_MAP = 128  #: bytes of a CUtensorMap
_ALIGNED = 64  #: bytes, of a CUtensorMap


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value of one integer."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one ahead of it ends.
_EARLY = _Attribute(6, 0, 1)


@functools.cache
def _library() -> Any:
    """The CUDA driver; None if it is absent or too old to describe a kernel's parameters (before 12.4)."""
    try:
        # Loaded already wherever there is a CUDA context; CUDA's toolkit need not be installed.
        library = ctypes.CDLL("libcuda.so.1")
        launch, info, encode = library.cuLaunchKernelEx, library.cuFuncGetParamInfo, library.cuTensorMapEncodeTiled
        replace = library.cuTensorMapReplaceAddress
    except (OSError, AttributeError):
        return None
    address = ctypes.c_void_p
    launch.argtypes = [address] * 4
    info.argtypes = [address, ctypes.c_size_t, address, address]
    encode.argtypes = [address, ctypes.c_int, ctypes.c_uint, *[address] * 5, *[ctypes.c_int] * 4]
    replace.argtypes = [address] * 2
    return library


def launcher(compiled: Any) -> "Launcher | None":
    """Return a launcher of Triton's compiled kernel, which takes all of its arguments; None if the kernel needs Triton's own.

    The driver's own description of the kernel must match the parameters that the signature gives.
    """
    library, metadata = _library(), compiled.metadata
    # Clusters need an attribute of the launch, cooperative grids another, and scratch memory has to be allocated for each
    # launch: Triton's launcher does that.
    if library is None or metadata.target.backend != "cuda" or metadata.num_ctas != 1:
        return None
    if any(getattr(metadata, name, 0) for name in ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")):
        return None
    # One for each descriptor that the kernel reads as a tensor map; without them Triton passes addresses, shapes and strides
    # instead.
    maps = list(getattr(metadata, "tensordesc_meta", None) or ())
    fields, encodings = list[_Field](), dict[int, Any]()
    for i, type_name in enumerate(compiled.src.signature.values()):
        if type_name == "constexpr":
            continue
        code = "Q" if type_name[0] == "*" else _CODES.get(type_name)
        if code is not None:
            fields.append((i, code, (struct.calcsize("=" + code),)))
        elif type_name[:10] == "tensordesc" and maps and not (maps[0]["fp4_padded"] or maps[0].get("is_im2col")):
            encodings[i] = maps.pop(0)
            dims = len(encodings[i]["block_size"])
            # The kernel's parameters for a descriptor: the map, its shape of 32-bit numbers, and its strides of 64-bit ones, as
            # one string of bytes.
            fields.append((i, f"{_MAP + 12 * dims}s", (_MAP, *[4] * dims, *[8] * dims)))
        else:
            return None
    sizes = [size for _, _, sizes in fields for size in sizes]
    unused = _unused(library, compiled.function, sizes)
    return None if unused is None else Launcher(library, compiled, fields, encodings, unused)


def _unused(library: Any, function: int, sizes: Sequence[int]) -> int | None:
    """Return the number of addresses that the kernel takes after parameters of `sizes`: of scratch memory, which it does not
    use. None if the driver describes other parameters."""
    offset, size, count = ctypes.c_size_t(), ctypes.c_size_t(), 0
    while library.cuFuncGetParamInfo(function, count, ctypes.addressof(offset), ctypes.addressof(size)) == _SUCCESS:
        if size.value != (sizes[count] if count < len(sizes) else 8):
            return None
        count += 1
    # More than one, because `itemgetter` of a single index returns no tuple (`Launcher._pick`).
    return count - len(sizes) if count >= len(sizes) > 1 else None


class Launcher:
    """A compiled kernel's launches: `(programs, columns, stream, arguments)` -> whether it launched; False if the thread has no
    CUDA context yet."""

    def __init__(self, library: Any, compiled: Any, fields: Sequence[_Field], encodings: dict[int, Any], unused: int) -> None:
        metadata = compiled.metadata
        self._library, self._launch, self._function = library, library.cuLaunchKernelEx, compiled.function
        # The third dimension of the grid, then a block of threads: Triton's programs are one-dimensional, of 32 threads a warp.
        self._fixed = 1, 32 * metadata.num_warps, 1, 1, metadata.shared
        self._attributes = (ctypes.addressof(_EARLY), 1) if getattr(metadata, "launch_pdl", False) else (0, 0)
        self._encodings = encodings
        self._pick = itemgetter(*[i for i, _, _ in fields])
        code, at, self._offsets = "=" + _CONFIG, struct.calcsize("=" + _CONFIG), list[int]()
        self._places = dict[int, int]()  #: of arguments in the buffer, by index
        for i, form, sizes in fields:
            # 8 bytes for every other argument, whatever its size: `bind` writes their addresses by words of 8 bytes.
            pad = -at % (_ALIGNED if sizes[0] == _MAP else 8)
            code += f"{pad}x{form}"
            at += pad
            self._places[i] = at
            for size in sizes:
                self._offsets.append(at)
                at += size
        # The last 8 bytes stay 0: the address of scratch memory that the kernel is declared with and does not use.
        self._bytes = at + -at % 8 + 8
        self._offsets += [self._bytes - 8] * unused
        self._format = struct.Struct(code)
        #: buffers that no thread uses now: its arguments must not change until the driver has copied them
        self._free: list[tuple[Any, int, int, int]] = []

    def buffer(self) -> tuple[Any, int, int, int]:
        """(a buffer, where arguments start in it, the addresses of its configuration and of its list of parameters)."""
        count = len(self._offsets)
        # [configuration | arguments | addresses of the arguments], all in one block, so that packing is one call of `struct`.
        # The configuration begins at a multiple of 64, as tensor maps within the arguments have to.
        storage = (ctypes.c_char * (self._bytes + _ALIGNED + 8 * count))()
        skip = -ctypes.addressof(storage) % _ALIGNED
        config = ctypes.addressof(storage) + skip
        parameters = config + self._bytes
        struct.pack_into(f"={count}Q", storage, parameters - config + skip, *[config + at for at in self._offsets])
        return storage, skip, config, parameters

    def __call__(self, programs: int, columns: int, stream: int, arguments: Sequence[Any]) -> bool:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self.buffer()
        self.pack(buffer, programs, columns, stream, arguments)
        launched = self._launched(self._launch(buffer[2], self._function, buffer[3], None))
        self._free.append(buffer)
        return launched

    def bind(
        self,
        programs: int,
        columns: int,
        arguments: Sequence[Any],
        changing: Sequence[tuple[int, int]],
        slots: int,
        buffer: Any = None,
    ) -> Bound:
        """Return a launch of such a grid with these arguments, some of which are values of each call. Another grid and other
        arguments may be packed into its buffer later, if one is given.

        changing: the index of each of these, and which value it is: an address, of a tensor map that of its array. The driver
        reads an address where it is among the values that the caller has packed at address `slots`, as 8 bytes each; that of a
        tensor map is replaced. Threads must not call the launch at the same time.
        """
        buffer = buffer or self.buffer()
        storage, skip, config, parameters = buffer
        self.pack(buffer, programs, columns, 0, arguments)
        # A view of the buffer in words of 8 bytes, so that the stream and single addresses can be assigned.
        octets = memoryview(storage).cast("B")[skip : skip + self._bytes + 8 * len(self._offsets)]
        words, launch, function, replace = (
            octets.cast("Q"),
            self._launch,
            self._function,
            self._library.cuTensorMapReplaceAddress,
        )
        maps = [(n, config + self._places[i]) for i, n in changing if i in self._encodings]
        # The list of parameters then points to the caller's slot instead of the buffer: one pack of all slots changes every
        # launch.
        for i, n in changing:
            if i not in self._encodings:
                words[self._bytes // 8 + self._offsets.index(self._places[i])] = slots + 8 * n

        def run(stream: int, values: Sequence[Any]) -> bool:
            words[_STREAM] = stream
            for n, target in maps:
                # a map is opaque, so only the driver can exchange the address in it
                if status := replace(target, values[n]):
                    raise RuntimeError(f"CUDA error {status} in the address of a tensor map: {self._message(status)}")
            status = launch(config, function, parameters, None)
            return status == _SUCCESS or self._launched(status)

        return run

    def pack(
        self, buffer: tuple[Any, int, int, int], programs: int, columns: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        if self._encodings:
            arguments = list(arguments)
            for i in self._encodings:
                arguments[i] = self._packed(arguments[i], i)
        storage, at, *_ = buffer
        # `_pick` leaves out the kernel's constants, which it does not have as parameters.
        self._format.pack_into(storage, at, programs, columns, *self._fixed, stream, *self._attributes, *self._pick(arguments))

    def _packed(self, descriptor: Any, argument: int) -> bytes:
        return getattr(descriptor, "packed", None) or self._encode(descriptor, self._encodings[argument])

    def _launched(self, status: int) -> bool:
        if status not in (_SUCCESS, _INVALID_CONTEXT):
            raise RuntimeError(f"CUDA error {status} in the launch of a kernel: {self._message(status)}")
        return status == _SUCCESS

    def _encode(self, descriptor: Any, about: Any) -> bytes:
        """The tensor map of a descriptor, its shape and its strides, kept with it."""
        dims, size = len(descriptor.shape), about["elem_size"]
        # The engine counts dimensions from the innermost one, and strides in bytes, without that of the innermost, which is
        # dense.
        shape, strides, box = descriptor.shape[::-1], [n * size for n in descriptor.strides[-2::-1]], about["block_size"][::-1]
        storage = (ctypes.c_char * (_MAP + _ALIGNED))()
        skip = -ctypes.addressof(storage) % _ALIGNED
        address, arrays = ctypes.addressof(storage) + skip, (shape, strides, box, [1] * dims)
        kinds = [ctypes.c_uint64 * dims] * 2 + [ctypes.c_uint32 * dims] * 2
        lists = [make(*values) for make, values in zip(kinds, arrays, strict=True)]
        # as Triton encodes them: not interleaved, 128 bytes fetched into L2 at once, zeros out of bounds
        rules = 0, about["swizzle"], 2, 0
        tensor = _element(about["elem_type"]), dims, descriptor.base.data_ptr()
        status = self._library.cuTensorMapEncodeTiled(address, *tensor, *map(ctypes.addressof, lists), *rules)
        if status != _SUCCESS:
            raise RuntimeError(f"CUDA error {status} in a tensor map of {descriptor.shape}: {self._message(status)}")
        numbers = struct.pack(f"={dims}i{dims}q", *descriptor.shape, *descriptor.strides)
        descriptor.packed = storage.raw[skip : skip + _MAP] + numbers
        return descriptor.packed  # type: ignore[no-any-return]

    def _message(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


def _element(code: int) -> int:
    """CUtensorMapDataType of Triton's number of an element type."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return int(TMA_DTYPE_DEVICE_TO_HOST[code])
