"""Launch a compiled Triton kernel from a JAX program, by the custom call that jaxlib's GPU plugins have for such code.

The call (`triton_kernel_call_ffi`) takes one attribute, a message of jaxlib/gpu/triton.proto of jax-ml/jax, compressed: the
code, the grid, and the parameters in order. Pointers are the call's operands in order, then its results. Here every array is
an operand, and one that the kernel writes is aliased to a result: kernels have their parameters in any order, an array is
changed in place where nothing else reads it (XLA copies it otherwise), and what a kernel does not write keeps its value.
Numbers are part of the program, so that what changes from call to call must be an array.

The message is private to jaxlib: versions that were not tried are refused (`why_not`).
"""

import functools
import hashlib
import importlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import version as jaxlib

from attn.kernels.compiled import Boxes, Parameter, Pointer, Program, compile_kernel
from attn.kernels.launch import PROCESSORS
from attn.kernels.memory import group_reason

TARGET = "triton_kernel_call_ffi"
#: Versions of jaxlib, from the first that takes compiled code to the last that was tried; the bound is excluded.
SINCE, BEFORE = (0, 11, 1), (0, 13)


def why_not(version: str = jaxlib.__version__) -> str:
    """Return why programs cannot be launched under this jaxlib; "" if they can."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if SINCE <= numbers < BEFORE:
        return ""
    tried = f"{'.'.join(map(str, SINCE))} up to, not including, {'.'.join(map(str, BEFORE))}"
    return f"jaxlib={version} (its launch of compiled kernels is known from {tried})"


def reasons(request: Any, device: Any) -> list[str]:
    """Return why kernels cannot be launched for a `Request` on a `Device` (None: any); empty if they can."""
    on_gpu = device is not None and device.platform == "gpu"
    why = group_reason(device.arch if device else "", request), why_not() if on_gpu else ""
    return [reason for reason in why if reason]


def target() -> tuple[str, int]:
    """(architecture, multiprocessors) of the GPU that is compiled for: that of `attn.jax.platforms.compiling_for`, or the
    first present. Raises RuntimeError without one."""
    # Its kind is the architecture's own name where `compiling_for` made it; on a mesh of real devices it is a product's name.
    compiled_for = jax.sharding.get_abstract_mesh().abstract_device
    if compiled_for is not None and compiled_for.device_kind in PROCESSORS:
        return compiled_for.device_kind, PROCESSORS[compiled_for.device_kind]
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")
    if not capability:
        raise RuntimeError(f"{device.platform}: no GPU to compile Triton's kernels for (attn.jax.platforms.compiling_for)")
    # NVIDIA's "9.0" is sm_90; AMD's are names, of which features behind a colon are cut off
    arch = f"sm_{capability.replace('.', '')}" if capability[:1].isdigit() else str(capability).partition(":")[0]
    return arch, int(device.core_count)


# The wire format of protocol buffers (protobuf.dev, Encoding): a field's number shifted by three and its type, 0 for an integer
# of seven bits a byte, 2 for bytes with their length, 5 for 32 bits; then the value. jaxlib has no class for the message.
def _varint(n: int) -> bytes:
    n &= (1 << 64) - 1  # negative numbers are 64-bit two's complement
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _number(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


#: The driver's numbers of the types and of the swizzling of a tensor map (CUtensorMapDataType, CUtensorMapSwizzle).
_MAPPED, _SWIZZLED = {"float16": 6, "bfloat16": 9}, 3


def _parameter(parameter: Parameter) -> bytes:
    """A message `TritonKernelCall.Parameter`."""
    if isinstance(parameter, str):
        return _bytes(1, _number(2, 16))  # an array whose address is a multiple of 16
    if isinstance(parameter, Boxes):
        extents = (_bytes(3 + i, b"".join(map(_varint, part))) for i, part in enumerate(parameter[1:]))
        return _bytes(9, _bytes(1, _number(1, _MAPPED[parameter.dtype]) + _number(2, _SWIZZLED) + b"".join(extents)))
    type_name, value = parameter
    if type_name == "fp32":
        return _varint(7 << 3 | 5) + struct.pack("<f", value)
    return _number({"i32": 3, "i64": 5}[type_name], int(value))


@functools.lru_cache(maxsize=256)
def payload(program: Program, arch: str, grid: tuple[int, int, int]) -> bytes:
    """Return the call's attribute: a message `TritonAnyKernelCall`, compressed."""
    name = program.name.encode()
    # the field of PTX is a key of the loaded module, which kernels of one name would share
    key = hashlib.sha256(program.image).hexdigest().encode()
    kernel = _bytes(1, name) + _number(2, program.num_warps) + _number(3, program.shared) + _bytes(4, key)
    kernel += _number(6, int("".join(c for c in arch if c.isdigit()))) + _number(10, program.num_ctas)
    kernel += _bytes(11, _bytes(1, program.image) + _bytes(2, name) + _number(3, program.shared))
    call = _bytes(1, kernel) + b"".join(_number(2 + i, n) for i, n in enumerate(grid))
    call += b"".join(_bytes(5, _parameter(parameter)) for parameter in program.parameters)
    return zlib.compress(_bytes(1, call) + _bytes(4, name), 1)


class Boxed(NamedTuple):
    """An array as an argument of `launch` from which the bulk tensor engine copies boxes: shape, strides in elements, box."""

    array: jax.Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def launch(
    kernel: Any, arch: str, grid: Sequence[int], arguments: Mapping[str, Any], writes: Sequence[str], **types: str
) -> tuple[jax.Array, ...]:
    """Launch a Triton function, and return the arrays that it `writes`, in that order, as they are afterwards.

    arguments: one for each parameter, by name: arrays, `Boxed` ones, numbers, None for what a call does without; the others
    are options of the launch (`num_warps`). grid: up to three extents. types: names of elements' types that arrays are read
    as, where they are not the arrays' own.
    """
    parameters = {name: arguments[name] for name in kernel.arg_names}
    options = {name: value for name, value in arguments.items() if name not in parameters}
    # One array may be several operands: each parameter has a pointer of its own, and a map of boxes one besides.
    operands: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Boxed):
            operands[name], parameters[name] = value.array, Boxes(value.array.dtype.name, *value[1:])
        elif isinstance(value, jax.Array | np.ndarray):
            operands[name], parameters[name] = value, Pointer(types.get(name) or value.dtype.name)
    program = compile_kernel(kernel, arch, parameters, options)
    # The driver refuses a launch without programs; such a call writes nothing, so its output arrays are returned unchanged.
    extents = (*grid, 1, 1)[:3]
    if not math.prod(extents):
        return tuple(jnp.asarray(operands[name]) for name in writes)
    importlib.import_module("jaxlib.gpu_triton")  # registers the call
    places = [*operands]
    # results in the operands' own memory: XLA copies an operand first if something else reads it later
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in writes],
        input_output_aliases={places.index(name): nth for nth, name in enumerate(writes)},
    )
    # XLA would fuse a call with slices of its arrays, as a scan makes them, and forget that results are in operands' memory
    ready = jax.lax.optimization_barrier(tuple(operands.values()))
    return tuple(jax.lax.optimization_barrier(tuple(call(*ready, opaque=payload(program, arch, extents)))))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
