"""Rounding and bit patterns against the oracle's own definitions (under a second)."""

import numpy as np
import pytest

from attn.reference import dequantize, quantize, to_bf16_bits
from attn.testing import bits

VALUES = np.concatenate(
    [np.random.default_rng(0).standard_normal(4000) * 10.0 ** np.arange(-20, 20).repeat(100), [0.0, -0.0, np.inf]]
)


def test_bfloat16_rounds_as_the_oracle_does() -> None:
    values = VALUES.astype(np.float32)
    assert np.array_equal(bits.encode(values, "bfloat16"), to_bf16_bits(values))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_is_idempotent_and_keeps_nan(dtype: str) -> None:
    once = bits.rounded([*VALUES[:100], np.nan], dtype)
    assert np.array_equal(bits.rounded(once, dtype), once, equal_nan=True)
    assert np.isnan(once[-1])


@pytest.mark.parametrize("element", bits.CODES)
def test_codes_are_the_specified_ones(element: str) -> None:
    x = np.random.default_rng(1).standard_normal((5, 2, 8)).astype(np.float32) * 300
    scale = np.array([0.5, 3.0], np.float32)
    stored = bits.encode(x, element, scale)
    assert np.array_equal(stored, quantize(x, bits.CODES[element], scale))
    assert np.array_equal(bits.decode(stored, element), dequantize(stored, bits.CODES[element]).astype(np.float32))


@pytest.mark.parametrize("element", ["float64", "float32", "float16", "bfloat16", *bits.CODES])
def test_poison_is_as_wild_as_the_element_allows(element: str) -> None:
    values = bits.decode(bits.poisoned((50,), element, "mixed"), element)
    assert np.isnan(values).any() == (element != "int8")
    assert np.abs(values[np.isfinite(values)]).max() > 100
    assert np.isfinite(bits.decode(bits.poisoned((50,), element, "huge"), element)).all()
    assert not bits.decode(bits.poisoned((50,), element, "zero"), element).any()


@pytest.mark.parametrize("element", bits.SELF_SCALED)
def test_huge_poison_is_finite_when_multiplied_by_the_scale_of_its_row(element: str) -> None:
    rows = bits.poisoned((50, 8 + 4), element, "huge")
    assert np.isfinite(bits.decode(rows, element)).all() and np.abs(bits.decode(rows, element)).max() > 1e38


def test_bytes_distinguish_signed_zeros_and_nans() -> None:
    zeros = np.array([0.0, -0.0, np.nan], np.float32)
    assert np.array_equal(bits.as_bytes(zeros) == bits.as_bytes(zeros[[1, 0, 2]]), [False, False, True])
