"""Numbers as a device stores them: rounding to a dtype, its bit patterns, and the poison that fills unused memory.

NumPy has no bfloat16 nor fp8, so arrays of those travel as their bits (uint16, uint8) and a wing's driver reinterprets
them. Values are float32 throughout: every 16-bit and 8-bit value is one.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from attn.dtypes import DTYPES
from attn.reference import dequantize, quantize

Array = npt.NDArray[Any]

#: Element type of a quantised cache -> what `attn.reference.quantize` calls it.
CODES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e4m3fnuz": "fp8_e4m3fnuz", "int8": "int8"}

#: What lies in memory that nobody may read.
POISONS = {
    "mixed": (np.nan, np.inf, -np.inf, 3.0e38, -3.0e38, np.nan, 1.0e4),
    "huge": (3.4e38, -3.4e38, 3.4e38),
    "zero": (0.0,),
}


def encode(values: npt.ArrayLike, element: str, scale: npt.ArrayLike = 1.0) -> Array:
    """`values` as stored in a cache of `element`: divided by `scale`, rounded to nearest even, saturating when 8-bit."""
    array = np.asarray(values, np.float32)
    if element in CODES:
        return quantize(array, CODES[element], scale)
    with np.errstate(over="ignore"):
        if element == "float16":
            return array.astype(np.float16)
        if element == "bfloat16":
            bits = array.view(np.uint32)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(array), np.uint16(0x7FC0), nearest)
    return array.astype(element)


def decode(stored: Array, element: str) -> Array:
    """The float32 values of stored bits, before any scale."""
    if element in CODES:
        return dequantize(stored, CODES[element]).astype(np.float32)
    if element == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def rounded(values: npt.ArrayLike, dtype: str) -> Array:
    """`values` rounded to `dtype`, as float32."""
    return decode(encode(values, dtype), dtype)


def raw(element: str) -> np.dtype[Any]:
    """The NumPy dtype in which an element's bits travel."""
    return encode(np.zeros(0), element).dtype


def as_bytes(stored: Array) -> Array:
    """Bits as unsigned integers, so that equal means identical, NaN and signed zero included."""
    return stored.view(f"u{stored.dtype.itemsize}")


def poisoned(shape: tuple[int, ...], element: str, kind: str) -> Array:
    """Storage full of poison; an element that cannot hold NaN or inf takes its largest finite value instead."""
    values = np.array(POISONS[kind])
    if element in CODES and element != "float8_e5m2":
        values = np.where(np.isnan(values) & (element != "int8"), values, np.nan_to_num(values, nan=3e38))
    limit = DTYPES[element].max
    pattern = encode(np.where(np.isfinite(values), np.clip(values, -limit, limit), values), element)
    run = np.resize(pattern, min(math.prod(shape), len(pattern) << 12))  # `resize` concatenates copies: make them few
    return np.resize(run, shape)
