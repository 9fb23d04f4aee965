"""flax: a layer of ours as the `attention_fn` of nnx's and linen's attention, with its own rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attn.jax
from attn.errors import UnsupportedError
from attn.integrations.flax import attention_fn

RULES = {"logits_soft_cap": 2.0, "sinks": [0.5, -1.0, 2.0, 0.0], "scale": 0.7}


@pytest.fixture(scope="module")
def layer():
    return attn.jax.Attention(4, 8, num_kv_heads=2, features=["non_causal"], sliding_window=3, **RULES)


@pytest.fixture(scope="module")
def arrays():
    keyed = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (2, 8, heads, 8)) for k, heads in zip(keyed, (4, 2, 2), strict=True)]


def test_nnx_with_a_layers_rules(layer):
    """Through the backend (causal) and past it (a drawn mask): one answer, and not that of attention without the rules."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 32)) * 3
    causal = linen.make_causal_mask(jnp.ones((2, 8)))  # float32, as flax makes it
    shape = {"num_heads": 4, "in_features": 32, "num_kv_heads": 2, "decode": False}
    block = nnx.MultiHeadAttention(**shape, attention_fn=attention_fn(layer), rngs=nnx.Rngs(0))
    drawn = block(x, mask=causal)
    through = nnx.jit(lambda block, x: block(x, is_causal=True))(block, x)
    np.testing.assert_allclose(through, drawn, atol=5e-6)
    plain = nnx.MultiHeadAttention(**shape, attention_fn=attn.jax.attention_fn, rngs=nnx.Rngs(0))
    assert np.abs(np.asarray(plain(x, mask=causal) - drawn)).max() > 1e-2


def test_linen_with_a_layer():
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    theirs = linen.MultiHeadDotProductAttention(4)
    ours = linen.MultiHeadDotProductAttention(4, attention_fn=attention_fn(attn.jax.Attention(4, 8)))
    weights = theirs.init(jax.random.key(1), x)
    for options in ({}, {"mask": linen.make_causal_mask(jnp.ones((2, 8)))}):
        np.testing.assert_allclose(ours.apply(weights, x, **options), theirs.apply(weights, x, **options), atol=1e-5)


def test_unequal_lengths_count_from_the_first_row(arrays):
    q, k, v = arrays
    other = attn.jax.Attention(4, 8, num_kv_heads=2, **RULES)
    want = attn.attention(q[:, :5], k, v, mask=jnp.tril(jnp.ones((5, 8), bool)), **RULES)
    np.testing.assert_allclose(attention_fn(other)(q[:, :5], k, v, is_causal=True), want, atol=2e-6)
    mask = jnp.arange(8) != 1
    want = attn.attention(q[:, :5], k, v, mask=jnp.tril(jnp.ones((5, 8), bool)) & mask, **RULES)
    got = attention_fn(other)(q[:, :5], k, v, mask=mask[None, None, None], is_causal=True)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_an_encoders_layer(arrays):
    encoder = attention_fn(attn.jax.Attention(4, 8, num_kv_heads=2, attn_type="encoder_only"))
    np.testing.assert_allclose(encoder(*arrays), attn.attention(*arrays), atol=2e-6)
    with pytest.raises(UnsupportedError, match="encoder_only is not causal"):
        encoder(*arrays, is_causal=True)


@pytest.mark.parametrize("size", [(0, 8), (2, 0)])
def test_an_empty_batch(layer, arrays, size):
    batch, rows = size
    q, k, v = (x[:batch, :rows] for x in arrays)
    assert attention_fn(layer)(q, k, v, is_causal=True).shape == q.shape


def test_what_has_no_place_is_refused(layer, arrays):
    q, k, v = arrays
    attend = attention_fn(layer)
    with pytest.raises(UnsupportedError, match="sliding_window needs as many queries as keys"):
        attend(q[:, :5], k, v)
    with pytest.raises(UnsupportedError, match="bias"):
        attend(q, k, v, bias=jnp.zeros((1, 1, 8, 8)))
    with pytest.raises(UnsupportedError, match=r"dropout_rate=0\.1"):
        attend(q, k, v, dropout_rate=0.1)
    with pytest.raises(UnsupportedError, match="sow_weights=False"):
        attend(q, k, v, module=object())
    with pytest.raises(UnsupportedError, match="backward not supported"):
        jax.grad(lambda q: attend(q, k, v, is_causal=True).sum())(q)
