"""Merging partial attention under torch."""

import numpy as np
import pytest
import torch

from attn import reference
from attn.errors import ShapeError
from attn.torch import merge_attn_states

T, H, D = 5, 4, 16


@pytest.mark.parametrize("nan_is_empty", [True, False])
def test_merge_is_the_oracles(nan_is_empty: bool) -> None:
    """Parts that are empty, by any of their marks, may hold anything."""
    rng = np.random.default_rng(0)
    outputs, lses = rng.standard_normal((3, T, H, D), np.float32), 3 * rng.standard_normal((3, H, T)).astype(np.float32)
    lses[0, :, 0], lses[:, 1, 1], lses[1, 2, 2], lses[2, 3, 3] = -np.inf, -np.inf, np.inf, np.nan
    outputs[0, 0], outputs[:, 1, 1], outputs[1, 2, 2] = np.nan, np.inf, np.nan
    want = reference.merge_states(outputs, lses, nan_is_empty=nan_is_empty)
    got = merge_attn_states(
        [torch.from_numpy(x) for x in outputs], [torch.from_numpy(x) for x in lses], nan_is_empty=nan_is_empty
    )
    assert got[1].dtype == torch.float32
    for actual, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_one_part_and_any_order() -> None:
    outputs, lses = torch.randn(4, T, H, D), torch.randn(4, H, T)
    alone = merge_attn_states(outputs[:1], lses[:1])
    torch.testing.assert_close(alone, (outputs[0], lses[0]))
    once = merge_attn_states(list(outputs), list(lses))
    left = merge_attn_states(list(outputs[:2]), list(lses[:2]))
    right = merge_attn_states(list(outputs[2:].flip(0)), list(lses[2:].flip(0)))
    torch.testing.assert_close(merge_attn_states([right[0], left[0]], [right[1], left[1]]), once)


def test_outputs_keep_their_dtype() -> None:
    half = torch.ones(T, H, D, dtype=torch.bfloat16)
    out, lse = merge_attn_states([half, 3 * half], [torch.zeros(H, T), torch.zeros(H, T)])
    assert out.dtype == torch.bfloat16 and (out == 2).all()
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    assert merge_attn_states([half.double()], [torch.zeros(H, T).double()])[1].dtype == torch.float64


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="got 1 outputs and 0 lses"):
        merge_attn_states([torch.zeros(T, H, D)], [])
    with pytest.raises(ShapeError, match=r"lses\[0\] \[5, 4\]: must be \[5, 4, 16\] and \[4, 5\]"):
        merge_attn_states([torch.zeros(T, H, D)], [torch.zeros(T, H)])
