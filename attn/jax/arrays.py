"""Convert torch tensors and NumPy arrays to jax arrays and jax arrays to NumPy, sharing memory where both sides can.

Without its 64-bit mode JAX would silently narrow int64 and float64. This module converts int64 if its values fit in int32
and rejects the others. Memory may be shared, so a later in-place write by its owner is visible. This module does not import
torch: tensors support DLPack and are queried through their own methods.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn.arrays import framework_of
from attn.errors import DeviceError, DTypeError

_WIDE = ("int64", "uint64", "float64", "complex128")
_INT32 = np.iinfo(np.int32)


def from_foreign(x: Any, like: jax.Array | None = None) -> jax.Array:
    """Convert a torch tensor or NumPy array to a jax array, on the device of `like` (None: on the array's device).

    Raises ValueError for a tensor that requires grad, `DTypeError` for values or a dtype that JAX cannot represent,
    `DeviceError` for memory on a device that JAX does not support.
    """
    array = _from_torch(x) if framework_of(x) == "torch" else _from_numpy(np.asarray(x))
    if like is None or isinstance(like, jax.core.Tracer) or len(like.devices()) != 1:
        return array
    return jax.device_put(array, next(iter(like.devices())))


def _from_torch(tensor: Any) -> jax.Array:
    if tensor.requires_grad:
        raise ValueError("a tensor that requires grad cannot cross to jax, gradients do not cross: pass tensor.detach()")
    name = str(tensor.dtype).removeprefix("torch.")
    if _must_narrow(name, tensor):
        # the values fit: `_must_narrow` has looked
        tensor = tensor.int()
    try:
        # Lazy conjugates and negatives are bits of torch's tensor that DLPack does not carry.
        return jnp.from_dlpack(tensor.resolve_conj().resolve_neg().contiguous())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        error_type = DTypeError if tensor.device.type == "cpu" else DeviceError
        raise error_type(f"a tensor of dtype {name} on {tensor.device} cannot cross to jax: {error}") from error


def _from_numpy(array: "np.ndarray[Any, Any]") -> jax.Array:
    # in the machine's byte order: JAX has no other
    dtype = np.dtype(np.int32) if _must_narrow(array.dtype.name, array) else array.dtype.newbyteorder("=")
    try:
        return jnp.asarray(array.astype(dtype, copy=False))
    except TypeError as error:
        raise DTypeError(f"a NumPy array of dtype {array.dtype} has no counterpart in jax") from error


def _must_narrow(name: str, array: Any) -> bool:
    """Whether `array` is an int64 array that must and can become int32. Raises `DTypeError` where JAX would lose values."""
    if name not in _WIDE or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return False
    alternative = 'or enable 64-bit types in JAX: jax.config.update("jax_enable_x64", True)'
    if name != "int64":
        raise DTypeError(f"an array of dtype {name} would be narrowed by jax: cast it first, {alternative}")
    # an empty array has no least value
    if all(array.shape):
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise DTypeError(f"an int64 array with values from {low} to {high} does not fit in int32: scale it, {alternative}")
    return True


def to_numpy(x: jax.Array, like: Any = None) -> "np.ndarray[Any, Any]":
    """Convert an array to a NumPy array of the same dtype, sharing its memory (read-only) if it is on the CPU.

    `like` is unused, since NumPy has no devices; it keeps the signature common to both frameworks. Raises TypeError for a
    tracer.
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            "a JAX tracer has no memory and cannot cross to NumPy: call outside of jax.jit, jax.grad and jax.vmap, or use a "
            "jax backend"
        )
    return np.asarray(x)
