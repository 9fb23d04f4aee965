"""Merging partial attention under torch and jax."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn import reference
from attn.errors import ShapeError
from attn.imports import resolve_obj_by_qualname
from attn.torch import merge as merge_module
from attn.torch.merge import merge_attn_states, merge_into

T, H, D = 5, 4, 16

Makes = tuple[Any, Any]  # (the framework's merge, the framework's array from NumPy)


@pytest.fixture(params=["torch", "jax"])
def made(request: pytest.FixtureRequest) -> Makes:
    merge = resolve_obj_by_qualname(f"attn.{request.param}.merge_attn_states")
    if request.param == "torch":
        return merge, torch.from_numpy
    return jax.jit(merge, static_argnames="nan_is_empty"), jnp.asarray


def parts(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, T, H, D), np.float32), 3 * rng.standard_normal((count, H, T)).astype(np.float32)


@pytest.mark.parametrize("nan_is_empty", [True, False])
def test_merge_is_the_oracles(nan_is_empty: bool, made: Makes) -> None:
    """Parts that are empty, by any of their marks, may hold anything."""
    outputs, lses = parts(3)
    lses[0, :, 0], lses[:, 1, 1], lses[1, 2, 2], lses[2, 3, 3] = -np.inf, -np.inf, np.inf, np.nan
    outputs[0, 0], outputs[:, 1, 1], outputs[1, 2, 2] = np.nan, np.inf, np.nan
    want = reference.merge_states(outputs, lses, nan_is_empty=nan_is_empty)
    merge, array = made
    got = merge(list(map(array, outputs)), list(map(array, lses)), nan_is_empty=nan_is_empty)
    assert "float32" in str(got[1].dtype)
    for actual, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_one_part_and_any_order(made: Makes) -> None:
    merge, array = made
    outputs, lses = (list(map(array, x)) for x in parts(4))
    for alone, whole in zip(merge(outputs[:1], lses[:1]), (outputs[0], lses[0]), strict=True):
        np.testing.assert_allclose(alone, whole, rtol=1e-6)
    left, right = merge(outputs[:2], lses[:2]), merge(outputs[:1:-1], lses[:1:-1])
    halves = merge([right[0], left[0]], [right[1], left[1]])
    for once, other in zip(merge(outputs, lses), halves, strict=True):
        np.testing.assert_allclose(other, once, rtol=1e-5, atol=1e-6)


def test_outputs_keep_their_dtype(made: Makes) -> None:
    merge, array = made
    half = torch.ones(T, H, D, dtype=torch.bfloat16) if array is torch.from_numpy else jnp.ones((T, H, D), jnp.bfloat16)
    out, lse = merge([half, 3 * half], [array(np.zeros((H, T), np.float32))] * 2)
    assert out.dtype == half.dtype and (out == 2).all()
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    if array is torch.from_numpy:
        assert merge([half.double()], [torch.zeros(H, T).double()])[1].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_into_some_rows(dtype: torch.dtype) -> None:
    """By the formula, as `merge_attn_states`; a state may be wider than what is merged into it, and NaN propagates."""
    (one, two), (log, other) = (torch.from_numpy(x) for x in parts(2))
    two, other = two.to(dtype), other.clone()
    other[0, 1], other[1, 2] = -torch.inf, torch.nan
    want = merge_attn_states([one, two], [log, other], nan_is_empty=False)
    output, lse = torch.cat([one, one]), torch.cat([log, log], 1)
    merge_into(output[T:], lse[:, T:], two, other.T.contiguous().T)
    for got, expected in zip((output[T:], lse[:, T:], output[:T], lse[:, :T]), (*want, one, log), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    assert output[T + 2, 1].isnan().all() and torch.equal(output[T + 1, 0], one[1, 0])


def test_no_kernel_reads_states_of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read one's addresses on the other, which ends the process's use of the GPU; torch names both."""
    monkeypatch.setattr(merge_module, "installed", lambda package: True)

    def on(*devices: str) -> list[Any]:
        facts = {"is_cuda": True, "stride": lambda dim: 1, "requires_grad": False, "dtype": torch.float32}
        return [SimpleNamespace(**facts, device=torch.device(device)) for device in devices]

    assert merge_module._has_kernel(on("cuda:1", "cuda:1"), on("cuda:1", "cuda:1"))
    assert not merge_module._has_kernel(on("cuda:0", "cuda:1"), on("cuda:0", "cuda:1"))
    assert not merge_module._has_kernel(on("cuda:0", "cuda:0"), on("cuda:0", "cuda:1"))


def test_shapes_are_checked(made: Makes) -> None:
    merge, array = made
    output = array(np.zeros((T, H, D), np.float32))
    with pytest.raises(ShapeError, match="got 1 outputs and 0 lses"):
        merge([output], [])
    with pytest.raises(ShapeError, match=r"lses\[0\] \[5, 4\]: must be \[5, 4, 16\] and \[4, 5\]"):
        merge([output], [output[..., 0]])
