"""Detect an array's framework; convert between frameworks.

Arrays are converted by DLPack, without a copy where both frameworks support the memory. Impossible conversions raise an
error: a tracer has no memory, and gradients do not cross. The frameworks' modules convert (`attn.torch.arrays`,
`attn.jax.arrays`); they are resolved by dotted name, so that detection imports neither.
"""

import functools
from collections.abc import Sequence
from typing import Any

from attn.errors import DTypeError, ShapeError
from attn.imports import resolve_obj_by_qualname

FRAMEWORKS = ("torch", "jax", "numpy")


def framework_of(array: Any) -> str:
    """Return "torch", "jax" or "numpy", by the type's base classes; imports nothing.

    Subclasses, `nn.Parameter` and tracers are their framework's arrays. Raises TypeError for anything else.
    """
    # Names instead of isinstance: the classes could be compared only after importing their framework. The base classes
    # are searched because a Parameter's own module is torch.nn.parameter, and a subclass's is its author's.
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        # Arrays are of jaxlib and tracers of several modules of jax, so the package decides; torch's and NumPy's arrays
        # have one base class each, whose name tells them from dtypes and devices.
        if root in ("jax", "jaxlib"):
            return "jax"
        if root == "torch" and cls.__name__ == "Tensor":
            return "torch"
        if root == "numpy" and cls.__name__ in ("ndarray", "generic"):
            return "numpy"
    raise TypeError(f"expected an array of torch, jax or numpy, got {type(array).__module__}.{type(array).__qualname__}")


def ops_of(framework: str) -> Any:
    """Return a framework's operations (`attn.torch.ops.Ops`, `attn.jax.ops.Ops`), for code that is written once for both."""
    _load(framework)
    return _OPS[framework]


_OPS: dict[str, Any] = {}


def _load(framework: str) -> None:
    if framework not in _OPS:
        _OPS[framework] = resolve_obj_by_qualname(f"attn.{framework}.ops.Ops")


# As `torch.compiler.assume_constant_result` does, without torch: Dynamo cannot trace an import, and calls a marked function.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def to_framework(array: Any, framework: str, *, like: Any = None) -> Any:
    """Convert `array` to an array of `framework`, without a copy where possible.

    `like` is an array of the target framework whose device the result takes; dtypes are kept. Raises TypeError for a
    tracer, ValueError for a torch tensor that requires grad, and `attn.errors.DTypeError` for values that the target cannot
    represent: with JAX's 64-bit mode off, an int64 beyond int32 or a float64.
    """
    source = framework_of(array)
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r} (supports {', '.join(FRAMEWORKS)})")
    # On its own device, whatever `like` is: the layer's check reports another device (`check_placed`), where a move
    # would hide a transfer in every call.
    if source == framework:
        return array
    if framework == "numpy":
        return resolve_obj_by_qualname(f"attn.{source}.arrays.to_numpy")(array, like=like)
    return resolve_obj_by_qualname(f"attn.{framework}.arrays.from_foreign")(array, like=like)


def on_host(array: Any) -> Any:
    """Return `array` if it is a NumPy array, else None."""
    import numpy as np

    return array if isinstance(array, np.ndarray) else None


def check_array(name: str, array: Any, extents: tuple[int | None, ...], dtypes: tuple[str, ...]) -> None:
    """Check rank, the extents that are not None, and dtype, by attributes that every framework's arrays have.

    Raises `ShapeError` or `DTypeError`.
    """
    shape = getattr(array, "shape", None)
    if shape is None:
        raise DTypeError(f"{name} is a {type(array).__name__}: must be an array of {' or '.join(dtypes)}")
    if shape != extents and not _has_extents(shape, extents):
        words = ", ".join("*" if extent is None else str(extent) for extent in extents)
        raise ShapeError(f"{name} has shape {list(shape)}: must be [{words}]")
    if _dtype_text(array.dtype) not in dtypes:
        raise DTypeError(f"{name} has dtype {_dtype_text(array.dtype)}: must be {' or '.join(dtypes)}")


@functools.cache
def _dtype_text(dtype: Any) -> str:
    """Return a dtype's name; cached, since NumPy takes a microsecond to format one."""
    return str(dtype).removeprefix("torch.")


def _has_extents(shape: Sequence[int], extents: Sequence[int | None]) -> bool:
    # a loop, since every batch passes here: a generator would take half a microsecond longer
    if len(shape) != len(extents):
        return False
    for extent, required in zip(shape, extents, strict=True):  # noqa: SIM110
        if required is not None and required != extent:
            return False
    return True
