"""Merging partial attention under jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import reference
from attn.errors import ShapeError
from attn.jax import merge_attn_states

T, H, D = 5, 4, 16


@pytest.mark.parametrize("nan_is_empty", [True, False])
def test_merge_is_the_oracles(nan_is_empty: bool) -> None:
    """Parts that are empty, by any of their marks, may hold anything."""
    rng = np.random.default_rng(0)
    outputs, lses = rng.standard_normal((3, T, H, D), np.float32), 3 * rng.standard_normal((3, H, T)).astype(np.float32)
    lses[0, :, 0], lses[:, 1, 1], lses[1, 2, 2], lses[2, 3, 3] = -np.inf, -np.inf, np.inf, np.nan
    outputs[0, 0], outputs[:, 1, 1], outputs[1, 2, 2] = np.nan, np.inf, np.nan
    want = reference.merge_states(outputs, lses, nan_is_empty=nan_is_empty)
    merge = jax.jit(merge_attn_states, static_argnames="nan_is_empty")
    got = merge(list(map(jnp.asarray, outputs)), list(map(jnp.asarray, lses)), nan_is_empty=nan_is_empty)
    assert got[1].dtype == jnp.float32
    for actual, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_outputs_keep_their_dtype() -> None:
    half = jnp.ones((T, H, D), jnp.bfloat16)
    out, lse = merge_attn_states([half, 3 * half], [jnp.zeros((H, T)), jnp.zeros((H, T))])
    assert out.dtype == jnp.bfloat16 and (out == 2).all()
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="got 1 outputs and 0 lses"):
        merge_attn_states([jnp.zeros((T, H, D))], [])
    with pytest.raises(ShapeError, match=r"lses\[0\] \[5, 4\]: must be \[5, 4, 16\] and \[4, 5\]"):
        merge_attn_states([jnp.zeros((T, H, D))], [jnp.zeros((T, H))])
