"""Scales of quantised caches, and the warning for an int8 cache without them."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn
import attn.jax
import attn.torch
from attn.errors import DTypeError, ShapeError

RNG = np.random.default_rng(0)
KEYS = (0.4 * RNG.standard_normal((200, 2, 16))).astype(np.float32)
VALUES = (np.array([3.0, 0.05])[:, None] * RNG.standard_normal((200, 2, 16))).astype(np.float32)
MAKERS: dict[str, Any] = {"torch": torch.from_numpy, "jax": jnp.asarray, "numpy": np.asarray}


def error(kv_cache_dtype: str, **scales: Any) -> float:
    """The relative RMS error of a layer's output with such a cache."""
    q = RNG.standard_normal((200, 2, 16)).astype(np.float32) * 4
    batch, results = attn.CommonAttentionMetadata.from_lens([200], [200], [list(range(13))], 16), []
    for stored in (kv_cache_dtype, "auto"):
        layer = attn.torch.Attention(2, 16, backend="TORCH_SDPA", kv_cache_dtype=stored, **(scales if stored != "auto" else {}))
        arrays = (torch.from_numpy(x) for x in (q, KEYS, VALUES))
        results.append(layer(*arrays, layer.new_kv_cache(13), layer.build(batch)).double())
    return float((results[0] - results[1]).square().mean().sqrt() / results[1].square().mean().sqrt())


@pytest.mark.parametrize("framework", MAKERS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("kv_cache_dtype", "largest"), [("int8", 127), ("fp8", 448), ("fp8_e5m2", 57344)])
def test_the_largest_number_is_the_largest_code(framework: str, per_head: bool, kv_cache_dtype: str, largest: float) -> None:
    make, axes = MAKERS[framework], (0, 2) if per_head else None
    found = attn.kv_cache_scales(make(KEYS), make(VALUES[None]), kv_cache_dtype, per_head=per_head)
    for got, sample in zip(found, (KEYS, VALUES), strict=True):
        np.testing.assert_allclose(got, np.abs(sample).max(axes) / largest, rtol=1e-6)
        assert isinstance(got, np.ndarray if per_head else float)
    narrow = torch.from_numpy(KEYS).bfloat16().requires_grad_()
    assert abs(attn.kv_cache_scales(narrow, narrow, kv_cache_dtype)[0] * largest - np.abs(KEYS).max()) < 0.02
    assert attn.kv_cache_scales(make(0 * KEYS), make(VALUES), kv_cache_dtype)[0] == 1.0


def test_int8_with_these_scales_is_close() -> None:
    k_scale, v_scale = attn.kv_cache_scales(KEYS, VALUES, "int8")
    assert error("int8", k_scale=k_scale, v_scale=v_scale) < 0.03
    assert error("int8", k_scale=1.0, v_scale=1.0) > 0.2, "what the warning is about"
    assert error("fp8") < 0.06
    k_scale, v_scale = attn.kv_cache_scales(KEYS, VALUES, "int8", per_head=True)
    assert error("int8", k_scale=k_scale, v_scale=v_scale) < 0.03


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((KEYS, VALUES, "auto"), DTypeError, "'auto' has no k_scale and v_scale; with scales: fp8, fp8_e4m3, fp8_e5m2, int8"),
        ((KEYS, VALUES, "int8_per_token_head"), DTypeError, "'int8_per_token_head' has no"),
        ((KEYS, VALUES.astype(np.int8)), DTypeError, "values has dtype int8: must be floats"),
        ((KEYS[:0], VALUES), ShapeError, r"keys has shape \[0, 2, 16\]"),
        ((KEYS[0, 0], VALUES), ShapeError, r"keys has shape \[16\]: must be \[..., K, D\]"),
        ((KEYS, np.where(np.arange(2)[:, None] == 1, np.nan, VALUES)), ValueError, "values has numbers .* in kv head 1"),
        (([1.0], VALUES), TypeError, "expected an array"),
    ],
)
def test_what_has_no_scale_is_refused(arguments: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        attn.kv_cache_scales(*arguments)


@pytest.mark.parametrize("framework", MAKERS)
def test_a_scale_is_a_normal_number(framework: str) -> None:
    """Numbers so small that their share of a code rounds to 0 have the smallest scale; too large ones are refused."""
    tiny = MAKERS[framework](np.full((1, 1, 8), 1e-37, np.float32))
    smallest = float(np.finfo(np.float32).tiny)
    assert attn.kv_cache_scales(tiny, tiny, "fp8") == (smallest, smallest)


def test_numbers_whose_scale_is_infinite_are_refused() -> None:
    with pytest.raises(ValueError, match="keys has numbers of up to 1e\\+300: their scale exceeds float32"):
        attn.kv_cache_scales(np.full((1, 1, 8), 1e300), VALUES)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_an_int8_cache_without_scales_warns_once_per_layer(framework: str) -> None:
    layer_cls: Any = getattr(attn, framework).Attention if framework == "torch" else attn.jax.Attention
    said = r"kv_cache_dtype='int8' without k_scale and v_scale: .* set k_scale and v_scale .*attn\.kv_cache_scales"
    for _ in range(2):
        with pytest.warns(UserWarning, match=said) as found:
            layer = layer_cls(2, 16, kv_cache_dtype="int8")
        assert len(found) == 1 and layer._k_scale_float == 1.0
        assert framework == "jax" or found[0].filename == __file__  # flax calls a module's constructor itself
    with pytest.warns(UserWarning, match=r"without v_scale:"):
        layer_cls(2, 16, kv_cache_dtype="int8", k_scale=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.new_kv_cache(2)
        layer_cls(2, 16, kv_cache_dtype="int8", k_scale=1.0, v_scale=1.0)  # 1 is what was asked for
        layer_cls(2, 16, kv_cache_dtype="fp8")
        layer_cls(2, 16)
        if framework == "torch":
            layer_cls(2, 16, kv_cache_dtype="int8_per_token_head")
