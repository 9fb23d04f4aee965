"""8-bit KV codes and bf16 bits, computed from their definitions: tables of 256 values, no vendor casts.

Storing divides by the scale, saturates to the largest finite value and rounds to nearest even; reading is
code value times scale. An all-zero token has scale 0 and stores zeros, never NaN.
The division is exact to float64, so a kernel that divides in fp32 may differ by one code on a tie.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, broadcast, floats, require


class _Format(NamedTuple):
    """decoded: value of each code, float64 [256]; positive: the finite ones >= 0, where code = index."""

    decoded: F64
    positive: F64
    nan_code: int
    has_negative_zero: bool


def _fp8(mantissa_bits: int, bias: int, nonfinite_from: int, infinity: int | None, fnuz: bool = False) -> _Format:
    """Build an fp8 format whose positive codes from `nonfinite_from` on are NaN, except `infinity`."""
    code = np.arange(128)
    exponent, fraction = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    # IEEE: exponent 0 is subnormal, fraction * 2^(1 - bias), all others (1 + fraction) * 2^(exponent - bias).
    positive = np.where(exponent == 0, fraction, 1 + fraction) * np.exp2(np.maximum(exponent, 1) - float(bias))
    positive[nonfinite_from:] = np.nan
    if infinity is not None:
        positive[infinity] = np.inf
    decoded = np.concatenate([positive, -positive])
    # "fnuz": finite, unsigned zero. The code of -0 is the only NaN.
    if fnuz:
        decoded[0x80] = np.nan
    decoded.setflags(write=False)
    # Codes of non-negative finite values are their own order, so the table is sorted and a code is its index.
    return _Format(decoded, decoded[:nonfinite_from], 0x80 if fnuz else 0x7F, not fnuz)


_FP8: Final = {
    "fp8_e4m3": _fp8(mantissa_bits=3, bias=7, nonfinite_from=0x7F, infinity=None),
    "fp8_e5m2": _fp8(mantissa_bits=2, bias=15, nonfinite_from=0x7C, infinity=0x7C),
    "fp8_e4m3fnuz": _fp8(mantissa_bits=3, bias=8, nonfinite_from=0x80, infinity=None, fnuz=True),
}
#: The largest code of each integer format. The most negative number of its bits is left out, so that a value and its
#: negative have codes of one size.
_INTEGER_MAX: Final = {"int8": 127.0, "int4": 7.0}


def quantize(x: npt.ArrayLike, dtype: str, scale: npt.ArrayLike = 1.0) -> npt.NDArray[np.uint8] | npt.NDArray[np.int8]:
    """Return the codes of x / scale: uint8 for fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz; int8 for int8, int4 (docs/semantics.md §10).

    x: [..., K, D], any float dtype. scale, finite and >= 0: a scalar; [K], one per kv head;
    x.shape[:-1], one per token and head; or broadcastable to x (not from one dimension). Rounds to
    nearest even and saturates at the largest finite value (448, 57344, 240, +-127, +-7), inf too. NaN is
    kept in fp8 and raises in int8 and int4. `pack_int4` puts two codes of int4 in a byte.
    """
    values = floats("x", x)
    factor = _aligned_scale(scale, values.shape)
    require(bool(np.isfinite(factor).all() and (factor >= 0).all()), "scale contains a value that is not finite and >= 0")
    with np.errstate(all="ignore"):
        # 0 / 0 would be NaN: an all-zero token has a scale of 0, and stores zeros (with their signs).
        scaled = np.where(values == 0, values, values / factor)
    if dtype in _INTEGER_MAX:
        require(not np.isnan(scaled).any(), f"x contains NaN, which {dtype} cannot store")
        # `rint` rounds ties to even
        return np.clip(np.rint(scaled), -_INTEGER_MAX[dtype], _INTEGER_MAX[dtype]).astype(np.int8)
    return _encode(scaled, _format(dtype))


def dequantize(codes: npt.ArrayLike, dtype: str, scale: npt.ArrayLike = 1.0) -> F64:
    """Return value(code) * scale in float64; `scale` as in `quantize`. codes: uint8 for fp8, int8 for int8 and int4."""
    array = np.asarray(codes)
    code_dtype = np.dtype(np.int8 if dtype in _INTEGER_MAX else np.uint8)
    decoded = None if dtype in _INTEGER_MAX else _format(dtype).decoded
    require(array.dtype == code_dtype, f"codes have dtype={array.dtype} ({code_dtype} for {dtype})")
    values = array.astype(np.float64) if decoded is None else decoded[array]
    factor = _aligned_scale(scale, values.shape)
    with np.errstate(all="ignore"):
        product: F64 = values * factor
    return product


def per_token_head_scales(x: npt.ArrayLike, dtype: str = "int8") -> F64:
    """Return the absmax of each [D] / the dtype's largest value: [..., K] for x [..., K, D]; 0 for a zero token."""
    largest = _INTEGER_MAX.get(dtype) or float(_format(dtype).positive[-1])
    return np.abs(floats("x", x)).max(axis=-1, initial=0.0) / largest


def pack_int4(codes: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Return the bytes [..., D / 2] of int4 codes [..., D]: byte i has code i + 8 in its low half, code i + D / 2 + 8 above."""
    array = np.asarray(codes)
    require(array.shape[-1] % 2 == 0, f"codes have shape={list(array.shape)} (an even number of them shares bytes)")
    low, high = np.split((array + 8).astype(np.uint8), 2, axis=-1)
    return low | high << np.uint8(4)


def unpack_int4(pairs: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Return the codes of `pack_int4`; a half of a byte that it does not make, 0, is -8."""
    return np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.int8) - np.int8(8)


def to_bf16_bits(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bits nearest to x, ties to even; NaN stays NaN, overflow becomes inf."""
    values = floats("x", x)
    with np.errstate(all="ignore"):
        single = values.astype(np.float32)
        bits = single.view(np.uint32)
        # float64 -> float32 -> bfloat16 rounds twice, which is wrong near ties of the second. So the first rounds to odd,
        # towards zero with the last bit set if anything was cut off (S. Boldo and G. Melquiond, "Emulation of a FMA and
        # correctly rounded sums", IEEE Trans. Computers 57, 2008).
        inexact = (single.astype(np.float64) != values) & ~np.isnan(values)
        too_far = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    # Bits of floats of one sign are ordered as their magnitudes, so `bits - 1` is the next one towards zero, from
    # infinity too.
    odd = np.where(inexact, (bits - too_far) | 1, bits).astype(np.uint64)
    # Half of the last kept place, and 1 more if that place is odd: ties to even. In 64 bits, since the carry may leave 32.
    rounded = (odd + 0x7FFF + ((odd >> 16) & 1)) >> 16
    # The payload may be in the lower half alone, and its upper half would then be an infinity.
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def from_bf16_bits(bits: npt.ArrayLike) -> F64:
    """Return the float64 values of bfloat16 bits (uint16)."""
    array = np.asarray(bits)
    require(array.dtype == np.uint16, f"bits have dtype={array.dtype} (uint16)")
    with np.errstate(all="ignore"):
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _encode(values: F64, fmt: _Format) -> npt.NDArray[np.uint8]:
    """Return the nearest code, ties to even, saturating."""
    magnitude = np.abs(values)
    # A magnitude above the k-th middle is nearer to value k + 1, one above all is the largest: `searchsorted` gives the
    # code and saturates. The middles of 8-bit values are exact in float64.
    middles = (fmt.positive[1:] + fmt.positive[:-1]) / 2
    lower = np.searchsorted(middles, magnitude)
    # On a middle, `searchsorted` gives the lower neighbour, whose code is rounded up if it is odd.
    tie = middles[np.minimum(lower, len(middles) - 1)] == magnitude
    code = np.where(np.isnan(values), fmt.nan_code, lower + (tie & (lower % 2 == 1)))
    # In fnuz formats the sign bit alone is NaN, so a small negative number that rounds to 0 becomes 0.
    negative = np.signbit(values) & (fmt.has_negative_zero | (code > 0))
    return np.where(negative, code | 0x80, code).astype(np.uint8)


def _format(dtype: str) -> _Format:
    require(dtype in _FP8, f"dtype={dtype!r} ({', '.join([*_FP8, *_INTEGER_MAX])})")
    return _FP8[dtype]


def _aligned_scale(scale: npt.ArrayLike, shape: tuple[int, ...]) -> F64:
    """Reshape `scale` to broadcast to x [..., K, D]."""
    array = floats("scale", scale)
    per_kv_head = array.ndim == 1 and array.shape == shape[-2:-1]
    if array.ndim and (per_kv_head or array.shape == shape[:-1]):
        return array[..., None]
    # One dimension always means [K]: it would be ambiguous if [D] were allowed.
    meant = array.ndim != 1 or array.size == 1 or len(shape) == 1
    return broadcast("scale", array, shape if meant else shape[:-1])
