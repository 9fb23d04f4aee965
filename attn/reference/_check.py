"""Convert arguments to float64, int64 or bool arrays, or raise a ValueError with the argument's name.

Unsigned integers are rejected where values are expected: they are fp8 codes or bf16 bits, and reading
them as values would be silently wrong. Signed int8 is accepted (code times scale is its dequantised value).
"""

import operator
from typing import SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_numeric(name: str, array: npt.NDArray[np.generic]) -> None:
    """Reject everything but real floating point and signed integers (bfloat16 has kind `V`)."""
    # ml_dtypes' bfloat16 and fp8 are of kind V to NumPy, as structured types are, which have names.
    if array.dtype.kind not in "fiV" or array.dtype.names is not None:
        raise ValueError(
            f"{name} has dtype={array.dtype} (a float or signed integer dtype; "
            "decode codes with dequantize or from_bf16_bits first)"
        )


def floats(name: str, value: npt.ArrayLike, ndim: int | None = None) -> F64:
    """Convert `value` to float64 and check its rank; may return the argument itself, so never write to it."""
    array = np.asarray(value)
    check_numeric(name, array)
    check_ndim(name, array, ndim)
    # Exact for every accepted dtype but int64 beyond 2^53.
    return array.astype(np.float64, copy=False)


def ints(name: str, value: npt.ArrayLike, ndim: int | None = None) -> I64:
    """Convert `value` to int64; an empty list counts as integers."""
    array = np.asarray(value)
    # NumPy makes an empty list an array of float64.
    require(array.dtype.kind in "iu" or array.size == 0, f"{name} has dtype={array.dtype} (an integer dtype)")
    check_ndim(name, array, ndim)
    return array.astype(np.int64, copy=False)


def bools(name: str, value: npt.ArrayLike, shape: tuple[int, ...]) -> Bool:
    """Return `value` as a read-only bool view broadcast to `shape`."""
    array = np.asarray(value)
    require(array.dtype == np.bool_, f"{name} has dtype={array.dtype} (bool; additive terms belong in bias)")
    return broadcast(name, array.astype(np.bool_, copy=False), shape)


def broadcast(name: str, array: npt.NDArray[Scalar], shape: tuple[int, ...]) -> npt.NDArray[Scalar]:
    """Return a read-only view of `array` broadcast to `shape`."""
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} has shape={array.shape} (broadcastable to {shape})") from None


def check_ndim(name: str, array: npt.NDArray[np.generic], ndim: int | None) -> None:
    require(ndim is None or array.ndim == ndim, f"{name} has shape={array.shape} ({ndim} dimensions)")


def check_shape(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> None:
    require(array.shape == shape, f"{name} has shape={array.shape} (expected {shape})")


def whole(name: str, value: SupportsIndex, least: int = 0, most: int | None = None) -> int:
    """Return `value` as a Python int within [least, most]."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} (an integer)") from None
    if number < least or (most is not None and number > most):
        limit = f">= {least}" if most is None else f"{least}..{most}"
        raise ValueError(f"{name}={number} ({limit})")
    return number


def heads_per_group(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads per kv head; head h reads kv head h // group."""
    require(num_kv_heads >= 1, f"num_kv_heads={num_kv_heads} (>= 1)")
    require(num_heads % num_kv_heads == 0, f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    return num_heads // num_kv_heads


def finite(name: str, value: float) -> float:
    """Return `value` as a finite Python float."""
    number = np.asarray(value)
    # Kind "b" is left out: scale=True is a mistake.
    require(
        number.ndim == 0 and number.dtype.kind in "fi" and bool(np.isfinite(number)), f"{name}={value!r} (one finite number)"
    )
    return float(number)
