"""Numbers as a device stores them: rounding to a dtype, bit patterns, and the poison that fills unused memory.

NumPy has no bfloat16 or fp8, so arrays of these dtypes are passed as their bits (uint16, uint8), which a framework's driver
reinterprets. Values are float32 throughout: it represents every 16-bit and 8-bit value exactly.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from attn.dtypes import DTYPES, KV_CACHE_DTYPES, PER_TOKEN_HEAD
from attn.reference import (
    dequantize,
    pack_fp8_ds_mla,
    pack_int4,
    per_token_head_scales,
    quantize,
    unpack_fp8_ds_mla,
    unpack_int4,
)

Array = npt.NDArray[Any]

#: Element type of a quantised cache -> its name in `attn.reference.quantize`.
CODES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e4m3fnuz": "fp8_e4m3fnuz", "int8": "int8"}

#: Caches whose codes are scaled by the layer's k_scale and v_scale.
SCALED = frozenset(name for name, element in KV_CACHE_DTYPES.items() if element in CODES) - PER_TOKEN_HEAD
#: Elements whose rows contain their own scale -> the name of their codes in `attn.reference.quantize`. A row is the bytes of D
#: codes, two to a byte for int4, and the four of a float32.
SELF_SCALED = {name: CODES.get(str(KV_CACHE_DTYPES[name]), "int4") for name in sorted(PER_TOKEN_HEAD)}

#: Element type of `fp8_ds_mla`, whose rows of 576 numbers take 656 bytes, scales included.
PACKED = "uint8"
_PACKED_POISONS = {"mixed": (0x7F, 0xFF, 0xFF, 0x7F, 0xFF), "huge": (0x7E, 0xFE, 0x7E), "zero": (0,)}

_PAIRS = (0x0F, 0x00, 0xF0, 0x8F, 0x37)

FP8 = "float8_e4m3fn"  #: dtype of an output that has a scale

#: Contents of memory that a backend must not read.
# Seven entries in "mixed": coprime to the powers of two that rows have as sizes, so that each lane gets each value in some
# slot.
POISONS = {
    "mixed": (np.nan, np.inf, -np.inf, 3.0e38, -3.0e38, np.nan, 1.0e4),
    "huge": (3.4e38, -3.4e38, 3.4e38),
    "zero": (0.0,),
}


def encode(values: npt.ArrayLike, element: str, scale: npt.ArrayLike = 1.0, nudge: float = 1.0) -> Array:
    """Encode `values` as a cache of `element` stores them: divided by `scale`, rounded to nearest even, saturating when 8-bit.

    `nudge` multiplies the values after their scale is computed, as if the division had been rounded differently.
    """
    if element == "float64":
        return np.asarray(values, np.float64)
    array = np.asarray(values, np.float32)
    if element == PACKED:
        # 512 latent numbers become codes and scales, 64 rotary ones stay bfloat16: 512 + 4 * 4 + 64 * 2 = 656 bytes.
        rows = array.reshape(-1, array.shape[-1])
        return pack_fp8_ds_mla(rows[:, :512], rows[:, 512:]).reshape(*array.shape[:-1], 656)
    if element in SELF_SCALED:
        code = SELF_SCALED[element]
        row_scales = per_token_head_scales(array, code).astype(np.float32)
        # The scale is that of the unchanged values: `nudge` imitates another rounding of the division, not another row.
        codes = quantize(array * np.float32(nudge), code, row_scales)
        return _joined(pack_int4(codes) if code == "int4" else codes, row_scales)
    array = array * np.float32(nudge)
    if element in CODES:
        return quantize(array, CODES[element], scale)
    # A number beyond the largest becomes an infinity, as in a device's conversion.
    with np.errstate(over="ignore"):
        if element == "float16":
            return array.astype(np.float16)
        if element == "bfloat16":
            bits = array.view(np.uint32)
            # Round to nearest even on the bits of a float32, of which bfloat16 is the upper half: adds just below a half, and
            # the lowest kept bit, so that a tie rounds up only from an odd number. A NaN could carry into the sign bit and
            # become a number.
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(array), np.uint16(0x7FC0), nearest)
    return array.astype(element)


def decode(stored: Array, element: str) -> Array:
    """Return the values of stored bits in float32 (float64 for float64), before the layer's scale is applied."""
    if element == "float64":
        return stored.astype(np.float64)
    if element == PACKED:
        with np.errstate(all="ignore"):
            joined = np.concatenate(unpack_fp8_ds_mla(stored.reshape(-1, stored.shape[-1])), 1)
            return joined.reshape(*stored.shape[:-1], joined.shape[1]).astype(np.float32)
    if element in SELF_SCALED:
        # A view as another element size needs contiguous bytes, which the two parts of a row are not.
        codes, row_scales = np.ascontiguousarray(stored[..., :-4]), np.ascontiguousarray(stored[..., -4:]).view(np.float32)
        code = SELF_SCALED[element]
        codes = unpack_int4(codes) if code == "int4" else codes.view(np.int8 if code == "int8" else np.uint8)
        with np.errstate(all="ignore"):
            return dequantize(codes, code).astype(np.float32) * row_scales
    if element in CODES:
        return dequantize(stored, CODES[element]).astype(np.float32)
    if element == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def drawn(values: Array, dtype: str) -> Array:
    """Convert random float32 values to values of `dtype`; for float64, to values that float32 cannot represent."""
    # A backend that stores float64 as float32 loses the factor, an error of 1e-9 where 1e-11 is allowed.
    return values.astype(np.float64) * (1 + 2.0**-30) if dtype == "float64" else rounded(values, dtype)


def rounded(values: npt.ArrayLike, dtype: str) -> Array:
    """Return `values` rounded to `dtype`, as float32 (float64 for float64)."""
    return decode(encode(values, dtype), dtype)


def _joined(codes: Array, row_scales: Array) -> Array:
    """Join codes [..., D] and their float32 scales [...] into rows of D + 4 bytes."""
    return np.concatenate([as_bytes(codes), np.ascontiguousarray(row_scales[..., None]).view(np.uint8)], -1)


def raw(element: str) -> np.dtype[Any]:
    """Return the NumPy dtype that represents an element's bits."""
    # Both store bytes of several kinds; any other element's dtype is what `encode` makes of no numbers.
    return np.dtype(np.uint8) if element == PACKED or element in SELF_SCALED else encode(np.zeros(0), element).dtype


def as_bytes(stored: Array) -> Array:
    """View bits as unsigned integers, so that equality means identity, for NaN and signed zero too."""
    return stored.view(f"u{stored.dtype.itemsize}")


def poisoned(shape: tuple[int, ...], element: str, poison: str) -> Array:
    """Return storage filled with poison; elements without NaN or inf use their largest finite value instead."""
    if element == PACKED:
        return np.resize(np.array(_PACKED_POISONS[poison], np.uint8), shape)
    if element in SELF_SCALED:
        stored, of_codes = str(KV_CACHE_DTYPES[element]), (*shape[:-1], shape[-1] - 4)
        # pairs of int4 codes between -8, which no write stores, and 7
        codes = np.resize(np.array(_PAIRS, np.uint8), of_codes) if stored == PACKED else poisoned(of_codes, stored, poison)
        row_scales = poisoned(shape[:-1], "float32", poison)
        # keeps the product of code and scale finite
        return _joined(codes, row_scales / np.float32(8 if stored == PACKED else DTYPES[stored].max))
    values = np.array(POISONS[poison])
    # e4m3 has a NaN but no infinity, and int8 has neither: their largest number stands in. e5m2 has both.
    if element in CODES and element != "float8_e5m2":
        values = np.where(np.isnan(values) & (element != "int8"), values, np.nan_to_num(values, nan=3e38))
    limit = DTYPES[element].max
    # Clipped before it is encoded, where 3e38 would become an infinity in float16: "huge" must stay finite for backends that
    # multiply by 0.
    pattern = encode(np.where(np.isfinite(values), np.clip(values, -limit, limit), values), element)
    run = np.resize(pattern, min(math.prod(shape), len(pattern) << 12))  # `resize` concatenates copies: keep them few
    return np.resize(run, shape)
