"""The oracle's stored bytes: fp8 tables, int8, scales, bf16 bits and the fp8 MLA row."""

import struct

import numpy as np
import pytest

from attn import reference

FP8 = {"fp8_e4m3": (448.0, 0x7F), "fp8_e5m2": (57344.0, 0x7F), "fp8_e4m3fnuz": (240.0, 0x80)}
CODES = np.arange(256, dtype=np.uint8)


def in_range(dtype):
    """Every representable value, every midpoint, the floats next to both, and random ones: float32."""
    largest = FP8[dtype][0]
    values = np.unique(reference.dequantize(CODES, dtype))
    values = values[np.isfinite(values)]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    rng = np.random.default_rng(0)
    random = rng.standard_normal(5000) * np.exp2(rng.integers(-20, 16, 5000))
    points = np.concatenate([points, random.astype(np.float32), np.float32([-0.0, 0.0])])
    return points[np.abs(points) <= largest]


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_table_is_torchs(dtype):
    torch = pytest.importorskip("torch")
    theirs = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    }[dtype]
    decoded = torch.from_numpy(CODES).view(theirs).to(torch.float64).numpy()
    np.testing.assert_array_equal(reference.dequantize(CODES, dtype), decoded)
    points = in_range(dtype)
    encoded = torch.from_numpy(points).to(theirs).view(torch.uint8).numpy()
    np.testing.assert_array_equal(reference.quantize(points, dtype), encoded)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_table_is_ml_dtypes(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = {
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
        "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    }[dtype]
    np.testing.assert_array_equal(reference.dequantize(CODES, dtype), CODES.view(theirs).astype(np.float64))
    points = in_range(dtype)
    np.testing.assert_array_equal(reference.quantize(points, dtype), points.astype(theirs).view(np.uint8))


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_and_keeps_nan(dtype):
    largest, nan_code = FP8[dtype]
    codes = reference.quantize([largest, largest * 1.01, 1e300, np.inf, -1e300, -np.inf, np.nan], dtype)
    np.testing.assert_array_equal(reference.dequantize(codes[:-1], dtype), [largest] * 4 + [-largest] * 2)
    assert codes[-1] == nan_code
    assert np.isnan(reference.dequantize(codes[-1:], dtype)).all()


@pytest.mark.parametrize("dtype", [*FP8, "int8"])
def test_codes_round_trip(dtype):
    codes = CODES.view(np.int8)[CODES.view(np.int8) != -128] if dtype == "int8" else CODES
    decoded = reference.dequantize(codes, dtype, 0.37)
    keep = np.isfinite(decoded)
    np.testing.assert_array_equal(reference.quantize(decoded[keep], dtype, 0.37), codes[keep])


def test_int8_rounds_to_even_and_clips():
    codes = reference.quantize([0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 127.5, 300.0, -128.0, -np.inf], "int8")
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, [0, 2, 2, 0, -2, 127, 127, 127, -127, -127])


def test_scale_shapes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 2, 8))
    per_head, per_token = np.array([0.01, 0.02]), reference.per_token_head_scales(x)
    assert per_token.shape == (5, 2)
    for given, full in (
        (0.01, np.full(x.shape, 0.01)),
        (per_head, per_head[None, :, None]),
        (per_token, per_token[..., None]),
    ):
        codes = reference.quantize(x, "int8", given)
        np.testing.assert_array_equal(codes, np.clip(np.rint(x / full), -127, 127))
        np.testing.assert_array_equal(reference.dequantize(codes, "int8", given), codes * np.broadcast_to(full, x.shape))
    with pytest.raises(ValueError, match="scale has shape"):
        reference.quantize(x, "int8", np.ones(8))


@pytest.mark.parametrize("dtype", [*FP8, "int8"])
def test_a_zero_token_stores_zeros(dtype):
    x = np.zeros((2, 3, 4))
    x[1, 2] = [1.0, -2.0, 0.5, 0.0]
    scales = reference.per_token_head_scales(x, dtype)
    largest = 127.0 if dtype == "int8" else FP8[dtype][0]
    np.testing.assert_array_equal(scales, [[0, 0, 0], [0, 0, 2 / largest]])
    restored = reference.dequantize(reference.quantize(x, dtype, scales), dtype, scales)
    np.testing.assert_array_equal(restored[scales == 0], 0)
    np.testing.assert_allclose(restored[1, 2], x[1, 2], atol=2 * 2**-4)
    assert restored[1, 2, 1] == -2.0


def test_quantised_values_stay_within_half_a_step():
    x = np.random.default_rng(0).standard_normal((50, 2, 16)).clip(-4, 4)
    scale = reference.per_token_head_scales(x)
    assert (
        abs(reference.dequantize(reference.quantize(x, "int8", scale), "int8", scale) - x) <= scale[..., None] * 0.5000001
    ).all()
    scale = reference.per_token_head_scales(x, "fp8_e4m3")
    restored = reference.dequantize(reference.quantize(x, "fp8_e4m3", scale), "fp8_e4m3", scale)
    assert (abs(restored - x) <= np.maximum(abs(x) * 2**-4, scale[..., None] * 2**-10) * 1.0000001).all()


def test_int4_rounds_to_even_saturates_and_packs_halves_of_a_head():
    codes = reference.quantize([0.5, 1.5, -2.5, 6.5, 7.5, -np.inf, -0.2, 3.49], "int4")
    np.testing.assert_array_equal(codes, [0, 2, -2, 6, 7, -7, 0, 3])
    pairs = reference.pack_int4(codes)
    # element 0 and element 4 share byte 0: 0 + 8 below, 7 + 8 above
    np.testing.assert_array_equal(pairs, [0xF8, 0x1A, 0x86, 0xBE])
    np.testing.assert_array_equal(reference.unpack_int4(pairs), codes)
    x = np.random.default_rng(2).standard_normal((50, 2, 16)).astype(np.float32)
    scale = reference.per_token_head_scales(x, "int4")
    restored = reference.dequantize(reference.quantize(x, "int4", scale), "int4", scale)
    assert (abs(restored - x) <= scale[..., None] * 0.5000001).all()
    assert abs(restored - x).max() > 0.4 * scale.min()


def test_errors_of_caches_are_those_that_the_guide_states():
    """The table of docs/how-to/tpu-serving.md: 4,096 random normal keys and values, heads of 128."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((128, 128), (4096, 1, 128), (4096, 1, 128)))

    def attend(k, v):
        p = np.exp(q @ k[:, 0].T / np.sqrt(128))
        return p @ v[:, 0] / p.sum(1, keepdims=True)

    def stored(x, dtype):
        if dtype == "bfloat16":
            return reference.from_bf16_bits(reference.to_bf16_bits(x))
        scale = reference.per_token_head_scales(x, dtype)
        return reference.dequantize(reference.quantize(x, dtype, scale), dtype, scale)

    def error(got, want):
        return np.sqrt(((got - want) ** 2).mean() / (want**2).mean())

    stated = {"bfloat16": (0.0017, 0.0024), "int8": (0.0065, 0.0094), "fp8_e4m3": (0.026, 0.037), "int4": (0.117, 0.17)}
    for dtype, figures in stated.items():
        keys, values = (stored(x, dtype) for x in (k, v))
        got = error(keys, k), error(attend(keys, values), attend(k, v))
        np.testing.assert_allclose(got, figures, rtol=0.05, err_msg=dtype)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "dtype='fp4' (fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz, int8, int4)": lambda: reference.quantize([1.0], "fp4"),
        "codes have dtype=int8 (uint8 for fp8_e4m3)": lambda: reference.dequantize(np.int8([1]), "fp8_e4m3"),
        "x contains NaN, which int8 cannot store": lambda: reference.quantize([np.nan], "int8"),
        "x contains NaN, which int4 cannot store": lambda: reference.quantize([np.nan], "int4"),
        "codes have shape=[1, 3] (an even number of them": lambda: reference.pack_int4(np.zeros((1, 3), np.int8)),
        "scale contains a value": lambda: reference.quantize([1.0], "int8", -1.0),
        "bits have dtype=int64 (uint16)": lambda: reference.from_bf16_bits([1]),
        "kv_c has shape=(2, 511) (expected (2, 512))": lambda: reference.pack_fp8_ds_mla(np.zeros((2, 511)), np.zeros((2, 64))),
        "rows has shape=(2, 655) (expected (2, 656))": lambda: reference.unpack_fp8_ds_mla(np.zeros((2, 655), np.uint8)),
    }.items(),
)
def test_invalid_arguments_raise_value_error(message, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


# --- bf16


def test_bf16_bits_of_every_code_round_trip():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = reference.from_bf16_bits(bits)
    back = reference.to_bf16_bits(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(reference.from_bf16_bits(back[nan])).all()


def test_bf16_rounding_is_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint32)
    bits[:5000] = (bits[:5000] & 0xFFFF0000) | 0x8000
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(reference.to_bf16_bits(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_bf16_rounds_once():
    """Just above a tie in float64: by way of float32 it would fall back onto the tie and round down."""
    assert reference.to_bf16_bits(1 + 2.0**-8) == 0x3F80
    assert reference.to_bf16_bits(1 + 2.0**-8 + 2.0**-40) == 0x3F81
    assert reference.to_bf16_bits(-(1 + 2.0**-8 + 2.0**-40)) == 0xBF81
    assert reference.to_bf16_bits(1 + 3 * 2.0**-8 - 2.0**-40) == 0x3F81
    np.testing.assert_array_equal(reference.to_bf16_bits([1e300, -1e300, 1e-300, 0.0, -0.0]), [0x7F80, 0xFF80, 0, 0, 0x8000])
    assert reference.from_bf16_bits(reference.to_bf16_bits(3.39e38)) == reference.from_bf16_bits(np.uint16(0x7F7F))


# --- the 656-byte row


def test_mla_row_byte_for_byte():
    latent, rope = np.zeros((2, 512)), np.zeros((2, 64))
    latent[0, 0], latent[0, 1], latent[0, 127] = 448.0, -1.0, 0.5
    latent[0, 128], latent[0, 129] = 896.0, 3.0
    latent[0, 511] = -7.0
    rope[0, :3] = [1.0, -2.0, 1 + 2.0**-8]
    rows = reference.pack_fp8_ds_mla(latent, rope)
    assert rows.shape == (2, 656) and rows.dtype == np.uint8
    row = rows[0].tobytes()
    tiny = float(np.finfo(np.float32).tiny)
    assert row[0] == 0x7E and row[1] == 0xB8 and row[127] == 0x30 and set(row[2:127]) == {0}
    assert row[128] == 0x7E and row[129] == 0x3C and row[511] == 0xFE
    assert struct.unpack("<4f", row[512:528]) == (1.0, 2.0, tiny, 1 / 64)
    assert struct.unpack("<3H", row[528:534]) == (0x3F80, 0xC000, 0x3F80) and not any(row[534:])
    assert struct.unpack("<4f", rows[1, 512:528].tobytes()) == (tiny,) * 4 and not any(rows[1, :512])


@pytest.mark.parametrize(("largest", "scale"), [(448, 1), (449, 2), (896, 2), (7, 1 / 64), (7.01, 1 / 32)])
def test_mla_row_power_of_two_scales_round_up(largest, scale):
    row = reference.pack_fp8_ds_mla(np.full((1, 512), largest), np.zeros((1, 64)), ue8m0=True)
    np.testing.assert_array_equal(row[:, 512:528].copy().view("<f4"), scale)


def test_no_mla_row_is_no_row():
    assert reference.unpack_fp8_ds_mla(np.zeros((0, 656), np.uint8))[0].shape == (0, 512)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_mla_row_round_trip(ue8m0):
    rng = np.random.default_rng(0)
    latent, rope = (
        rng.standard_normal((7, 512)) * np.exp2(rng.integers(-5, 5, (7, 1))),
        rng.standard_normal((7, 64)),
    )
    latent[3] = 0
    rows = reference.pack_fp8_ds_mla(latent, rope, ue8m0=ue8m0)
    kv_c, k_pe = reference.unpack_fp8_ds_mla(rows)
    np.testing.assert_array_equal(k_pe, reference.from_bf16_bits(reference.to_bf16_bits(rope)))
    np.testing.assert_array_equal(kv_c[3], 0)
    largest = abs(latent).reshape(7, 4, 128).max(axis=2, keepdims=True)
    error = abs(kv_c - latent).reshape(7, 4, 128)
    assert (error <= np.maximum(abs(latent).reshape(7, 4, 128) * 2**-4, largest / 448 * 2**-8)).all()
    scales = rows[:, 512:528].copy().view("<f4")
    powers = np.exp2(np.round(np.log2(scales)))
    assert (scales == powers).all() == ue8m0
    assert not ue8m0 or (scales[3] == 2.0**-13).all()
    assert (largest[..., 0] <= 448 * scales.astype(float) * (1 + 1e-6)).all()
    np.testing.assert_array_equal(reference.unpack_fp8_ds_mla(reference.pack_fp8_ds_mla(kv_c, k_pe, ue8m0=ue8m0))[1], k_pe)
