"""Compile a Triton kernel for a GPU, present or not: no framework, no driver and no toolchain but Triton's own is needed.

The arguments are specialised as Triton's launches do (multiples of 16 and the number 1 are known when compiling), so that a
program is the one that `kernel[grid](...)` would compile. Triton keeps programs on disk, by a hash of everything that makes
them (TRITON_CACHE_DIR).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Triton's types of elements.
TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "u16",
    "int32": "i32",
    "int64": "i64",
    "bool": "u1",
}
_ALIGNED = [["tt.divisibility", 16]]


class Pointer(NamedTuple):
    """An array as an argument of a kernel, which begins at a multiple of 16 bytes; dtype: the name of its elements' type."""

    dtype: str


class Boxes(NamedTuple):
    """An array as an argument from which the bulk tensor engine copies boxes (`gluon.descriptor`): the name of its elements'
    type, of 16 bits; its shape, its strides in elements, and a box."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


#: A parameter of a launch: an array's name, a number with its type, or boxes of an array.
Parameter = str | tuple[str, int | float] | Boxes


class Program(NamedTuple):
    """A compiled kernel: its name in `image`, the code for one architecture (a cubin or an hsaco); threads in units of the
    device's warps; bytes of shared memory.

    parameters: of a launch, in order.
    """

    name: str
    image: bytes
    num_warps: int
    num_ctas: int
    shared: int
    parameters: tuple[Parameter, ...]


class Specialised(NamedTuple):
    """A kernel's parameters as Triton's compiler takes them: their types, the values of constants, and attributes."""

    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[list[Any]]]
    parameters: tuple[Parameter, ...]


def specialise(kernel: Any, arguments: Mapping[str, Any]) -> Specialised:
    """Return the specialisation of a Triton function for `arguments`: `Pointer`, `Boxes`, numbers, constants and None.

    Raises TypeError for a parameter without an argument, or the reverse, and for an argument of another type.
    """
    names = [parameter.name for parameter in kernel.params]
    if missing := [*set(names).symmetric_difference(arguments)]:
        raise TypeError(f"{kernel.__name__}: {', '.join(sorted(missing))}: must be parameters, each with one argument")
    made = Specialised({}, {}, {}, ())
    passed: list[Parameter] = []
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        # Triton makes an integer 1 a constant, which is no parameter of the program.
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
            made.signature[name], made.constants[at,] = "constexpr", value
            continue
        if isinstance(value, Pointer):
            made.signature[name] = "*" + TYPES[value.dtype]
            passed.append(name)
        elif isinstance(value, Boxes):
            # here, as Gluon is not in every Triton, and no other kernel needs it
            from attn.kernels.gluon import layout_of

            made.signature[name] = f"tensordesc<{TYPES[value.dtype]}{[*value.box]},{layout_of(value.box)!r}>"
            # the map, then what it is made of
            passed += [value, *(("i32", n) for n in value.shape), *(("i64", n) for n in value.strides)]
        elif type(value) in (int, float):
            type_name = "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"
            made.signature[name] = type_name
            passed.append((type_name, value))
        else:
            raise TypeError(f"{kernel.__name__}: {name}={value!r}: must be an array, an int, a float or None")
        if isinstance(value, Pointer) or (special and isinstance(value, int) and value % 16 == 0):
            made.attributes[at,] = _ALIGNED
    return made._replace(parameters=tuple(passed))


def compile_kernel(kernel: Any, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Program:
    """Compile `kernel` for `arch` (`sm_90`, `gfx942`). arguments: as in `specialise`; options: of Triton's launches.

    Compiled once per process and arguments. Raises what Triton's compiler raises.
    """
    # as tuples, which `lru_cache` can hash
    specialised = specialise(kernel, arguments)
    constants, attributes = tuple(specialised.constants.items()), tuple(specialised.attributes)
    made = _compiled(kernel, arch, tuple(specialised.signature.items()), constants, attributes, tuple(options.items()))
    return made._replace(parameters=specialised.parameters)


@functools.lru_cache(maxsize=512)  # of up to half a megabyte
def _compiled(
    kernel: Any,
    arch: str,
    signature: tuple[Any, ...],
    constants: tuple[Any, ...],
    aligned: tuple[Any, ...],
    options: tuple[Any, ...],
) -> Program:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if arch.startswith("sm_"):
        target, form = GPUTarget("cuda", int(arch[3:]), 32), "cubin"
    else:
        # RDNA's waves have 32 lanes, CDNA's 64
        target, form = GPUTarget("hip", arch, 32 if arch.startswith("gfx1") else 64), "hsaco"
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(kernel, dict(signature), dict(constants), dict.fromkeys(aligned, _ALIGNED))
    made = triton.compile(source, target=target, options=dict(options))
    about = made.metadata
    # A launcher without Triton's runtime, as XLA's, would have to allocate that memory.
    if size := getattr(about, "global_scratch_size", 0):  # AMD's kernels have none
        raise NotImplementedError(f"{about.name} needs {size} bytes of memory per program")
    return Program(about.name, made.asm[form], about.num_warps, about.num_ctas, about.shared, ())
