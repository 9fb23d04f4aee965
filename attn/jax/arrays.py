"""The jax side of the border: arrays of torch and NumPy in, NumPy out, sharing memory wherever both sides can.

Without its 64-bit mode JAX would narrow int64 and float64 without a word: here int64 crosses when its values fit, the others
not at all. Memory may be shared, so that a later in-place write by its owner shows through. torch is not imported: its
tensors speak DLPack, and are asked by their own methods.
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
    """A torch tensor or NumPy array as a jax array, on the device of `like` (None: where it is).

    Raises ValueError for a tensor that requires grad, `DTypeError` for values or a dtype that JAX cannot hold,
    `DeviceError` for memory on a device that JAX does not drive.
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
        tensor = tensor.int()
    try:
        return jnp.from_dlpack(tensor.resolve_conj().resolve_neg().contiguous())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = DTypeError if tensor.device.type == "cpu" else DeviceError
        raise kind(f"a tensor of dtype {name} on {tensor.device} cannot cross to jax: {error}") from error


def _from_numpy(array: "np.ndarray[Any, Any]") -> jax.Array:
    dtype = np.dtype(np.int32) if _must_narrow(array.dtype.name, array) else array.dtype.newbyteorder("=")
    try:
        return jnp.asarray(array.astype(dtype, copy=False))
    except TypeError as error:
        raise DTypeError(f"a NumPy array of dtype {array.dtype} has no counterpart in jax") from error


def _must_narrow(name: str, array: Any) -> bool:
    """Whether `array` is an int64 one that has to become int32, and may. Raises `DTypeError` where JAX would lose values."""
    if name not in _WIDE or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return False
    way_out = 'or switch JAX to 64 bits: jax.config.update("jax_enable_x64", True)'
    if name != "int64":
        raise DTypeError(f"an array of dtype {name} would be narrowed by jax: cast it yourself, {way_out}")
    if all(array.shape):
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise DTypeError(f"an int64 array with values from {low} to {high} does not fit jax's int32: rescale it, {way_out}")
    return True


def to_numpy(x: jax.Array, like: Any = None) -> "np.ndarray[Any, Any]":
    """An array as a NumPy array of the same dtype, sharing its memory (read-only) when it is on the CPU.

    `like` is accepted for the sake of the border's one signature; NumPy has no devices. Raises TypeError for a tracer.
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            "a JAX tracer has no memory and cannot cross to NumPy: call outside of jax.jit, jax.grad and jax.vmap, or use a "
            "backend of the jax wing"
        )
    return np.asarray(x)
