"""Encode and decode codes of quantised caches by their bits: the same on every architecture, even without fp8 conversions."""

import triton
import triton.language as tl


@triton.jit
def nearest(x):  # type: ignore[no-untyped-def]
    """x rounded to an integer, ties to even, for |x| < 2^22: after adding 1.5 * 2^23 no bits remain for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def fp8_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The byte of float32 x in an fp8 format of MANTISSA explicit bits, saturating at MAX; any NaN becomes 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), MAX)
    magnitude = size.to(tl.uint32, bitcast=True)
    shift: tl.constexpr = 23 - MANTISSA
    # Half a unit of the last kept bit less one, and one more if that bit is odd: ties go to even. A carry into the exponent is
    # the next power of two, as it should be.
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    # the exponent's bias of float32, 127, becomes the format's
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # below the smallest normal number the code counts steps of 2^(1 - BIAS - MANTISSA)
    least: tl.constexpr = 2.0 ** (1 - BIAS)
    steps: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)
    subnormal = nearest(tl.minimum(size, least) * steps).to(tl.uint32)
    code = tl.where(size < least, subnormal, normal) | sign
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def number_in(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert elements of a cache to the dtype of a product.

    Bytes are e4m3 codes on architectures without a hardware conversion (`launch.converts_e4m3`). int8 becomes float16
    through its bits: 1024 + code + 128, minus 1152.
    """
    if x.dtype == tl.uint8:
        # the bits of a float16 that is 2^-8 of the number, also if subnormal: the exponent's bias is 15 in float16, 7 in
        # e4m3
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)
    elif x.dtype == tl.int8 and dtype == tl.float16:
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(dtype)
