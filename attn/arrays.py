"""The border between frameworks: whose array is this, and how does it become another's.

Arrays cross by DLPack, without a copy where both sides agree on the memory. What a crossing cannot do it refuses by
name: a tracer has no memory, and gradients do not cross. The wings do the converting (`attn.torch.arrays`,
`attn.jax.arrays`), found by dotted name, so that asking costs no import.
"""

from typing import Any

from attn.imports import resolve_obj_by_qualname

FRAMEWORKS = ("torch", "jax", "numpy")


def framework_of(array: Any) -> str:
    """`"torch"`, `"jax"` or `"numpy"`, by the type's ancestry; imports nothing.

    Subclasses, `nn.Parameter` and tracers count as their framework's arrays. Raises TypeError for anything else.
    """
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("jax", "jaxlib"):
            return "jax"
        if root == "torch" and cls.__name__ == "Tensor":
            return "torch"
        if root == "numpy" and cls.__name__ in ("ndarray", "generic"):
            return "numpy"
    raise TypeError(f"expected an array of torch, jax or numpy, got {type(array).__module__}.{type(array).__qualname__}")


def to_framework(array: Any, framework: str, *, like: Any = None) -> Any:
    """`array` as an array of `framework`, zero-copy where it can be.

    `like` is an array of the target framework whose device the result takes; dtypes are kept. Raises TypeError for a
    tracer, `attn.errors.DTypeError` for values that the target cannot hold (an int64 beyond int32, a float64)
    unless JAX's 64-bit mode is on, ValueError for a torch tensor that requires grad.
    """
    source = framework_of(array)
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r} (supports {', '.join(FRAMEWORKS)})")
    if source == framework:
        return array
    if framework == "numpy":
        return resolve_obj_by_qualname(f"attn.{source}.arrays.to_numpy")(array, like=like)
    return resolve_obj_by_qualname(f"attn.{framework}.arrays.from_foreign")(array, like=like)
