"""Quotients are those of IEEE 754 (NumPy's), whatever approximation they start from. About 3 s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn.jax.kernels.division import corrected, divide

#: Significands at and beside powers of two, and where products carry far.
_EDGES = (0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x555555, 0x7FFFFD, 0x7FFFFE, 0x7FFFFF)


def _operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    edges = np.array(_EDGES, np.uint32)
    pairs = np.stack(np.meshgrid(edges, edges)).reshape(2, -1)
    significands = np.concatenate([pairs, rng.integers(0, 1 << 23, (2, 200_000))], 1)
    exponents = rng.integers(90, 160, significands.shape)
    signs = rng.integers(0, 2, significands.shape)
    bits = (signs << 31 | exponents << 23 | significands.astype(np.int64)).astype(np.uint32)
    return tuple(bits.view(np.float32))


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_a_quotient_that_is_off_by_units_is_made_exact(off):
    x, y = _operands()
    want = x / y
    approximate = (want.view(np.int32) + off).view(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(corrected)(x, y, approximate)).view(np.int32), want.view(np.int32))


def test_division_by_a_constant_is_exact_too():
    x, _ = _operands()
    got = jax.jit(lambda x: divide(x, jnp.float32(448)))(x)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), (x / np.float32(448)).view(np.int32))


def test_what_is_not_normal_is_left_as_it_was():
    tiny, inf, nan = np.float32(1e-40), np.float32(np.inf), np.float32(np.nan)
    x = np.array([0, -0.0, inf, -inf, nan, 1, 1, 3e38, 1e-30], np.float32)
    y = np.array([3, 3, 3, 3, 3, inf, nan, 1e-5, 1e30], np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = x / y
    got = np.asarray(divide(jnp.asarray(x), jnp.asarray(y)))
    finite = np.isfinite(want) & (np.abs(want) > tiny)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[finite | np.isinf(want) | (x == 0)], want[finite | np.isinf(want) | (x == 0)])
