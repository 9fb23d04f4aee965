"""`attn.jax.dot_product_attention` gives `jax.nn`'s results with every backend, and flax's layers accept it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attn.jax
from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.jax import dot_product
from attn.tools.fuzz import entries as fuzz_entries
from attn.tools.fuzz import on_jax
from tests.levels import sampled

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
    [
        *(pytest.param(name, None) for name in CALLS),
        *sampled(
            [pytest.param(name, "PALLAS") for name in ("causal", "lengths", "negative scale")],
            1,
            "jax.nn on PALLAS",
            lambda case: case.values[0] == "lengths",  # jax.nn's own implementations leave rows past a length 0 themselves
        ),
    ],
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


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (2, 1)}, {}], ids=str)
@pytest.mark.parametrize("lens", [[5, 8], [20, 1]])
def test_lengths_move_no_row(options, lens):
    """Rows count from the first key whatever the number of keys; a length beyond the keys is all of them."""
    inputs, lens = arrays(), jnp.array(lens, jnp.int32)

    def run(backend):
        def loss(q, k, v):
            of = {"key_value_seq_lengths": lens, "backend": backend, "return_residual": True, **options}
            out, lse = attn.jax.dot_product_attention(q, k, v, **of)
            return (out**2).sum(), (out, lse)

        (_, results), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return *results, *grads

    for got, want in zip(run("PALLAS"), run("XLA_ATTN"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("backend", ["XLA_ATTN", "PALLAS"])
@pytest.mark.parametrize("side", [2**31 - 1, 2**40])
def test_a_window_beyond_every_key_hides_none(side, backend):
    """jax.nn's own sums of positions and bounds overflow."""
    q, k, v = arrays()
    want = attn.jax.dot_product_attention(q, k, v, backend=backend)
    got = attn.jax.dot_product_attention(q, k, v, backend=backend, local_window_size=side)
    np.testing.assert_array_equal(got, want)


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


def test_a_traced_scale_is_not_for_a_kernel(monkeypatch):
    """PALLAS is the first backend on TPUs; its programs have the scale in them, and jax.nn takes one of any kind."""
    q, k, v = arrays()
    want = attn.jax.dot_product_attention(q, k, v, scale=0.3)
    real = dot_product._chosen

    def choose(call, backend, *features):
        return "PALLAS" if backend is None and not features else real(call, backend, *features)

    monkeypatch.setattr(dot_product, "_chosen", choose)
    got = jax.jit(lambda scale: attn.jax.dot_product_attention(q, k, v, scale=scale))(0.3)
    np.testing.assert_allclose(got, want, atol=2e-5)
    with pytest.raises(UnsupportedError, match="PALLAS: scale is traced"):
        jax.jit(lambda scale: attn.jax.dot_product_attention(q, k, v, scale=scale, backend="PALLAS"))(0.3)


def test_a_kernel_is_refused_under_64_bit_types():
    """Its scalars are int32. Gradients are traced when they are taken, so no call can leave the mode for them."""
    q, k, v = arrays()
    want = attn.jax.dot_product_attention(q, k, v)
    with jax.enable_x64(True):
        np.testing.assert_allclose(attn.jax.dot_product_attention(q, k, v), want, atol=1e-6)
        with pytest.raises(UnsupportedError, match=r"PALLAS +JAX.s 64-bit mode"):
            attn.jax.dot_product_attention(q, k, v, backend="PALLAS")


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


def zeros(*shapes):
    return [jnp.zeros(shape) for shape in shapes]


Q = (2, 8, 4, 32)
#: Calls with wrong arguments that gave a result, or an error that depended on the backend.
FIVE, NINE = (2, 5, 4, 32), (2, 9, 4, 32)
WRONG = {
    "causal, more values than keys": (zeros(Q, (2, 9, 4, 32), (2, 10, 4, 32)), {"is_causal": True}),
    "causal, a mask of more keys": (zeros(FIVE, NINE, NINE), {"is_causal": True, "mask": jnp.ones((2, 1, 5, 12), bool)}),
    "causal, a bias of more keys": (zeros(FIVE, NINE, NINE), {"is_causal": True, "bias": jnp.ones((2, 1, 5, 12))}),
    "a mask of other heads": (zeros(Q, Q, Q), {"mask": jnp.ones((2, 8, 8), bool)}),
    "a mask of a larger batch": (zeros(Q, Q, Q), {"mask": jnp.ones((3, 4, 8, 8), bool)}),
    "values of another width": (zeros(Q, Q, (2, 8, 4, 16)), {}),
    "lengths of one entry": (zeros(Q, Q, Q), {"query_seq_lengths": jnp.ones(1, jnp.int32)}),
    "lengths of two dimensions": (zeros(Q, Q, Q), {"query_seq_lengths": jnp.ones((2, 1), jnp.int32)}),
    "no kv heads": (zeros(Q, (2, 8, 0, 32), (2, 8, 0, 32)), {}),
}


@pytest.mark.parametrize("backend", [None, "PALLAS"])
@pytest.mark.parametrize("name", WRONG)
def test_shapes_are_checked_before_they_are_changed(name, backend):
    given, options = WRONG[name]
    with pytest.raises(ShapeError, match="must be|must broadcast"):
        attn.jax.dot_product_attention(*given, **options, backend=backend)


@pytest.mark.parametrize("backend", [None, "PALLAS"])
def test_dtypes_and_options_are_checked_for_every_backend(backend):
    q, k, v = arrays()
    with pytest.raises(DTypeError, match="query_seq_lengths has dtype float32: must be int32"):
        attn.jax.dot_product_attention(q, k, v, query_seq_lengths=jnp.ones(2), backend=backend)
    with pytest.raises(DTypeError, match="key_value_seq_lengths has dtype float32"):
        attn.jax.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.ones(2), backend=backend)
    with pytest.raises(DTypeError, match="bfloat16: must be equal"):
        attn.jax.dot_product_attention(q, k, v.astype(jnp.bfloat16), backend=backend)
    with pytest.raises(DTypeError, match="mask has dtype float32"):
        attn.jax.dot_product_attention(q, k, v, mask=jnp.ones((8, 8)), backend=backend)
    for window in ((1, 2, 3), (None, 2), "ab", 1.5):
        with pytest.raises(ValueError, match="local_window_size"):
            attn.jax.dot_product_attention(q, k, v, local_window_size=window, backend=backend)
    with pytest.raises(ValueError, match="implementation='PALLAS' is unknown; known: \"xla\""):
        attn.jax.dot_product_attention(q, k, v, implementation="PALLAS")


def test_what_jax_refuses_is_refused():
    """Random shapes near those of a call. What `jax.nn` accepts has its shape, or is an error of this library."""
    subject = fuzz_entries.subject_of("JAX_ENTRY")
    cases = [case.replace(run=False) for case in fuzz_entries.program(subject, 0, 0, 120)]
    ends = collections.Counter(map(subject.check, cases))
    assert ends["refused"] > 25 and ends["served"] > 25


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"extra": "mask", "more": (1, 4, 8, 8)}])
def test_values_are_compared_too(options, monkeypatch):
    case = fuzz_entries.CallCase("", *[(1, 8, 4, 16)] * 3, **options)
    assert on_jax.call_entry(case) == "served"
    monkeypatch.setattr(on_jax, "dot_product_attention", lambda query, key, value, **options: value)
    with pytest.raises(AssertionError, match="another result"):
        on_jax.call_entry(case)
    with pytest.raises(AssertionError, match="a result where the framework refuses"):
        on_jax.call_entry(case.replace(key=(1, 9, 4, 16), run=False))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": True}, {"bias": True}])
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 0, 4, 32), (2, 8, 4, 32)),
        ((2, 8, 4, 32), (2, 0, 4, 32)),
        ((2, 8, 0, 32), (2, 8, 4, 32)),
        ((0, 8, 4, 32), (0, 8, 4, 32)),
        ((2, 8, 4, 0), (2, 8, 4, 0)),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")  # jax.nn's own, for a head size of 0
def test_an_empty_dimension_gives_jaxs_result(query, key, options):
    extra = {name: x if name == "is_causal" else jnp.ones((1, 1, query[1], key[1]), bool) for name, x in options.items()}
    if "bias" in extra:
        extra["bias"] = extra["bias"].astype(jnp.float32)
    q, k = zeros(query, key)
    want = jax.nn.dot_product_attention(q, k, k, **extra)
    got = attn.jax.dot_product_attention(q, k, k, **extra)
    assert got.shape == want.shape and not np.asarray(got).any()


@pytest.mark.parametrize("form", [(2, 4, 8, 8), (1, 1, 8, 8), (8, 8)])
def test_a_bias_of_minus_infinity_hides_its_keys(form):
    """A row without keys is 0 and has no gradients, as with a mask; `jax.nn` returns NaN, which spreads to every gradient."""
    q, k, v = arrays()
    hidden = np.array(jax.random.bernoulli(jax.random.key(2), 0.3, form))
    hidden[..., 0] = False
    hidden[..., 3, :] = True
    number = jax.random.normal(jax.random.key(3), form)
    bias = jnp.where(hidden, -jnp.inf, number)

    def run(bias, mask):
        def loss(q, k, v, bias):
            out, lse = attn.jax.dot_product_attention(q, k, v, bias, mask, return_residual=True)
            return (out**2).sum(), (out, lse)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    (_, (want, want_lse)), want_grads = run(number, jnp.asarray(~hidden))
    (_, (got, got_lse)), got_grads = run(bias, None)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(got_lse, want_lse, atol=1e-6)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert not np.asarray(got[:, 3]).any() and np.isneginf(np.asarray(got_lse[:, 3])).all()


def test_flax_batches_are_checked_before_they_are_flattened():
    q, k = zeros((2, 3, 8, 4, 16), (3, 2, 8, 4, 16))
    with pytest.raises(ShapeError, match="must have equal batch dimensions"):
        attn.jax.attention_fn(q, k, k)
    with pytest.raises(ShapeError, match="mask has shape"):
        attn.jax.attention_fn(q, q, q, mask=jnp.ones((3, 3, 4, 8, 8)))
    mask = jnp.tril(jnp.ones((8, 8)))
    got = attn.jax.attention_fn(q, q, q + jnp.arange(8)[:, None, None], mask=mask)
    np.testing.assert_allclose(got[0, 0, :, 0, 0], np.arange(8) / 2, atol=1e-6)
