"""`attn.jax.dot_product_attention` gives `jax.nn`'s results with every backend, and flax's layers accept it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attn.jax
from attn.errors import ShapeError, UnsupportedError

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"query_seq_lengths": [5, 8], "key_value_seq_lengths": [3, 8]},
    "window": {"local_window_size": (2, 1)},
    "causal window": {"is_causal": True, "local_window_size": 3},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3, "is_causal": True},
}


def arrays(rows=8, keys=8, heads=4, kv_heads=2, size=32):
    keyed = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, rows, heads, size), (2, keys, kv_heads, size), (2, keys, kv_heads, size))
    return [jax.random.normal(k, shape) for k, shape in zip(keyed, shapes, strict=True)]


@pytest.mark.parametrize(
    ("call", "backend"),
    [*((name, None) for name in CALLS), ("causal", "PALLAS"), ("lengths", "PALLAS"), ("negative scale", "PALLAS")],
)
def test_values_residuals_and_gradients_are_jaxs(call, backend):
    options = {name: jnp.array(x) if isinstance(x, list) else x for name, x in CALLS[call].items()}
    inputs = arrays()

    def run(function, **more):
        def loss(q, k, v):
            out, residual = function(q, k, v, return_residual=True, **options, **more)
            return (out**2).sum(), (out, residual)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

    (_, (want, want_lse)), want_grads = run(jax.nn.dot_product_attention)
    (_, (got, got_lse)), got_grads = run(attn.jax.dot_product_attention, backend=backend)
    np.testing.assert_allclose(got, want, atol=2e-5)
    real = np.isfinite(np.asarray(got_lse))
    np.testing.assert_allclose(np.asarray(got_lse)[real], np.asarray(want_lse)[real], atol=2e-5)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)


@pytest.mark.parametrize(("rows", "keys", "extra"), [(5, 9, "mask"), (5, 9, "bias"), (9, 5, "none")])
def test_causality_counts_from_the_first_row(rows, keys, extra):
    q, k, v = arrays(rows, keys)
    options = {}
    if extra == "mask":
        options["mask"] = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 1, rows, keys)).at[..., 0].set(True)
    if extra == "bias":
        options["bias"] = jax.random.normal(jax.random.key(1), (2, 4, rows, keys))
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, **options)
    np.testing.assert_allclose(attn.jax.dot_product_attention(q, k, v, is_causal=True, **options), want, atol=2e-5)


@pytest.mark.parametrize("backend", [None, "PALLAS"])
def test_a_row_without_keys_is_zero(backend):
    q, k, v = arrays()
    lens = jnp.array([0, 8])
    out, lse = attn.jax.dot_product_attention(q, k, v, key_value_seq_lengths=lens, return_residual=True, backend=backend)
    assert not np.asarray(out[0]).any()
    assert np.isneginf(np.asarray(lse[0])).all()
    assert np.isfinite(np.asarray(lse[1])).all()


def test_export_for_any_batch_and_other_platforms():
    pytest.importorskip("flatbuffers", reason="jax.export needs it and does not depend on it")
    from jax import export

    (batch,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, 8, heads, 32), jnp.float32) for heads in (4, 2, 2)]
    run = jax.jit(lambda *a: attn.jax.dot_product_attention(*a, is_causal=True))
    exported = export.deserialize(export.export(run, platforms=("cpu", "tpu", "cuda"))(*shapes).serialize())
    inputs = [jnp.concatenate([x, x[:1]]) for x in arrays()]
    np.testing.assert_allclose(exported.call(*inputs), run(*inputs), atol=2e-6)


def test_without_a_batch_and_under_jit():
    q, k, v = (x[0] for x in arrays())
    run = jax.jit(lambda *a: attn.jax.dot_product_attention(*a, is_causal=True))
    np.testing.assert_allclose(run(q, k, v), jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=2e-5)


def test_a_choice_is_obeyed_or_refused():
    q, k, v = arrays()
    with pytest.raises(UnsupportedError, match="mask not supported"):
        attn.jax.dot_product_attention(q, k, v, bias=jnp.zeros((1, 1, 8, 8)), backend="PALLAS")
    with pytest.raises(UnsupportedError, match="platform=cpu"):
        attn.jax.dot_product_attention(q, k, v, backend="CUDNN")
    with pytest.raises(ValueError, match="exclude each other: pass only one"):
        attn.jax.dot_product_attention(q, k, v, backend="XLA_ATTN", implementation="xla")
    with pytest.raises(ShapeError, match=r"\[2, 8\], \[2, 8"):
        attn.jax.dot_product_attention(q[:, :, 0, 0], k, v)


def test_nnx_and_linen_layers():
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    mask = linen.make_causal_mask(jnp.ones((2, 8)))  # float32, as flax makes it
    layers = [
        nnx.MultiHeadAttention(4, 32, 32, decode=False, rngs=nnx.Rngs(0), **more)
        for more in ({}, {"attention_fn": attn.jax.attention_fn})
    ]
    want, got = (layer(x, mask=mask) for layer in layers)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(np.asarray(layers[1](x) - got)).max() > 1e-3  # the mask did something
    theirs, ours = (
        linen.MultiHeadDotProductAttention(4),
        linen.MultiHeadDotProductAttention(4, attention_fn=attn.jax.attention_fn),
    )
    weights = theirs.init(jax.random.key(1), x)
    np.testing.assert_allclose(ours.apply(weights, x, mask=mask), theirs.apply(weights, x, mask=mask), atol=1e-5)


def test_dropout_is_refused_not_dropped():
    q, k, v = arrays()
    with pytest.raises(UnsupportedError, match=r"dropout_rate=0\.1"):
        attn.jax.attention_fn(q, k, v, dropout_rate=0.1, dropout_rng=jax.random.key(0))
