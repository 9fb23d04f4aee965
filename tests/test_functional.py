"""`attn.attention` in each framework against the float64 oracle; gradients; poison; jit; errors."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn
from attn import reference
from attn.errors import DTypeError, ShapeError, UnsupportedError

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

MAKERS = {"torch": torch.tensor, "jax": jnp.asarray, "numpy": np.asarray}
B, H, K, D, DV = 2, 4, 2, 8, 6

#: (n, m, arguments): every rule of the signature, more queries than keys, no keys, no queries.
CASES = {
    "full": (5, 7, {}),
    "causal": (5, 7, {"causal": True}),
    "causal, rows before the first key": (7, 5, {"causal": True}),
    "decode": (1, 9, {"causal": True}),
    "no keys": (3, 0, {}),
    "no queries": (0, 3, {"causal": True}),
    "scale": (4, 4, {"scale": -0.3}),
    "window of W keys": (6, 9, {"causal": True, "window": 3}),
    "window both ways": (6, 9, {"window": (2, 1)}),
    "window around nothing": (9, 4, {"window": (0, 0)}),
    "window ahead": (5, 5, {"window": (None, 2)}),
    "soft cap": (5, 7, {"logits_soft_cap": 1.5}),
    "alibi": (5, 7, {"causal": True, "alibi_slopes": [0.5, 0.25, 0.1, 0.05]}),
    "alibi, both ways": (5, 7, {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}),
    "sinks": (7, 5, {"causal": True, "sinks": [1.0, 0.0, -math.inf, 3.0]}),
    "mask": (5, 7, {"mask": "random"}),
    "all at once": (
        7,
        6,
        {
            "causal": True,
            "window": (3, 0),
            "logits_soft_cap": 2.0,
            "alibi_slopes": [0.1] * 4,
            "sinks": [0.5] * 4,
            "mask": "random",
        },
    ),
}


def attention(framework, qkv, **arguments):
    """`attn.attention` on arrays of a framework, as NumPy."""
    return jax.tree.map(np.asarray, attn.attention(*map(MAKERS[framework], qkv), **arguments))


def arrays(n, m, arguments, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((B, n, H, D), (B, m, K, D), (B, m, K, DV)))
    arguments = dict(arguments)
    if arguments.get("mask") == "random":
        arguments["mask"] = rng.random((B, H, n, m)) < 0.6
    return (q, k, v), arguments


def oracle(qkv, *, mask=None, window=None, **arguments):
    if isinstance(window, int):
        window = reference.sliding_window_to_pair(window, "decoder" if arguments.get("causal") else "encoder_only")
    masks = [None] * B if mask is None else mask
    arguments["window"] = window or (None, None)
    results = [reference.attention(*(x[b] for x in qkv), mask=masks[b], **arguments) for b in range(B)]
    return [np.stack(part) for part in zip(*results, strict=True)]


#: One formula serves both frameworks: jax, which compiles every case, is spared those that use no operation of their own.
NOT_UNDER_JAX = ("full", "decode", "scale", "window of W keys", "window around nothing", "window ahead", "alibi", "mask")


@pytest.mark.parametrize(("framework", "case"), [(f, c) for f in MAKERS for c in CASES if f != "jax" or c not in NOT_UNDER_JAX])
def test_agrees_with_the_oracle(framework, case):
    n, m, arguments = CASES[case]
    qkv, arguments = arrays(n, m, arguments)
    want_out, want_lse = oracle(qkv, **arguments)
    out, lse = attention(framework, qkv, return_lse=True, **arguments)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want_out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-6)


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def exported(f):
    module = torch.nn.Module()
    module.forward = f
    keys = torch.export.Dim("keys")
    return lambda *qkv: torch.export.export(module, qkv, dynamic_shapes=[None, {1: keys}, {1: keys}]).module()(*qkv)


def autocast(f):
    return torch.autocast("cpu", torch.bfloat16)(f)


@pytest.mark.parametrize("transform", [compiled, exported, torch.func.vmap, autocast])
@pytest.mark.parametrize("wild", [False, True])
def test_transforms_of_torch(transform, wild, monkeypatch):
    """With finite values, whose program is shorter outside of transforms, and with others."""
    monkeypatch.setattr(attn.arrays, "_OPS", {})  # a graph may hold the first call of a process
    torch.compiler.reset()
    arguments = {"causal": True, "window": (3, 0), "sinks": [1.0, 0.0, -math.inf, 3.0], "alibi_slopes": [0.5, 0.25, 0.1, 0.0]}
    qkv, _ = arrays(5, 7, {})
    if wild:
        qkv[2][0, 4, 1, 2] = math.inf
    want = oracle(qkv, **arguments)
    got = transform(lambda q, k, v: attn.attention(q, k, v, return_lse=True, **arguments))(*map(torch.from_numpy, qkv))
    for x, y in zip(want, got, strict=True):
        assert y.dtype == torch.float32
        np.testing.assert_allclose(y, x, rtol=2e-5, atol=2e-6)


def test_shapes_without_values():
    q, k, v = (torch.empty(2, s, h, D, device="meta") for s, h in ((5, H), (7, K), (7, K)))
    out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 5, H, D), (2, H, 5), "meta")


def test_jax_never_promotes_ranks():
    (q, k, v), _ = arrays(5, 7, {})
    with jax.numpy_rank_promotion("raise"):
        attn.attention(*map(jnp.asarray, (q, k, v)), causal=True, alibi_slopes=[0.5] * H, sinks=[0.0] * H)


@pytest.mark.parametrize("framework", MAKERS)
def test_without_a_batch_dimension(framework):
    qkv, _ = arrays(5, 7, {})
    mask = np.random.default_rng(1).random((H, 5, 7)) < 0.6
    out, lse = attention(framework, [x[0] for x in qkv], mask=mask, return_lse=True)
    assert out.shape == (5, H, DV) and lse.shape == (H, 5)
    np.testing.assert_allclose(out, attention(framework, qkv, mask=mask)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_torch_dtypes(dtype):
    qkv, _ = arrays(5, 7, {})
    low = [torch.tensor(x).to(dtype) for x in qkv]
    out, lse = attn.attention(*low, causal=True, return_lse=True)
    want, want_lse = oracle([x.double().numpy() for x in low], causal=True)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    one_rounding = torch.finfo(dtype).eps / 2 * 1.01 + (1e-6 if dtype != torch.float64 else 1e-14)
    np.testing.assert_allclose(out.double().numpy(), want, rtol=one_rounding, atol=one_rounding * 1e-1)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5 if dtype != torch.float64 else 1e-14)


def test_jax_and_numpy_low_precision():
    low = [np.asarray(x, jnp.bfloat16) for x in arrays(5, 7, {})[0]]
    out, exact = (attention(framework, low, causal=True) for framework in ("jax", "numpy"))
    assert out.dtype == exact.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), exact.astype(np.float32), rtol=2**-8, atol=1e-6)


def test_torch_rows_go_through_in_slices(monkeypatch):
    from attn.torch import ops

    qkv, arguments = arrays(9, 8, {"causal": True, "mask": "random", "sinks": [0.5] * H})
    whole = attn.attention(*map(torch.tensor, qkv), return_lse=True, **arguments)
    monkeypatch.setattr(ops, "_SCORES_AT_ONCE", 2 * B * H * 8)
    sliced = attn.attention(*map(torch.tensor, qkv), return_lse=True, **arguments)
    for a, b in zip(whole, sliced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_inside_a_jitted_function():
    qkv, _ = arrays(5, 7, {})
    eager = attn.attention(*map(jnp.asarray, qkv), causal=True)
    jitted = jax.jit(functools.partial(attn.attention, causal=True))(*qkv)
    assert isinstance(eager, jax.Array) and isinstance(jitted, jax.Array)
    np.testing.assert_allclose(eager, jitted, rtol=1e-6, atol=1e-6)


def test_jax_compiles_once_for_equal_rules():
    from attn.functional import DenseParams
    from attn.jax.ops import Ops

    traced = []

    def formula(xp, rules, q):
        traced.append(rules.scale)
        return q * rules.scale

    for scale in (0.5, 0.5, 0.25):
        Ops.compiled(formula)(Ops, DenseParams(True, scale, (3, 0), None), jnp.zeros(2))
    assert traced == [0.5, 0.25]


# gradients


def scalar(out, lse):
    """A loss that touches out and lse; rows without keys (lse -inf) count through out only."""
    finite = lse > -math.inf
    where = torch.where if isinstance(lse, torch.Tensor) else jnp.where
    return (out * out).sum() + where(finite, lse, 0.0).sum()


@pytest.mark.parametrize("case", ["full", "causal, rows before the first key", "all at once"])
def test_torch_gradients_are_finite_differences(case):
    n, m, arguments = CASES[case]
    qkv, arguments = arrays(n, m, arguments, dtype=np.float64)
    learnt = [torch.tensor(x[:1], requires_grad=True) for x in qkv]
    if "mask" in arguments:
        arguments["mask"] = arguments["mask"][:1]
    if "sinks" in arguments:
        learnt.append(torch.tensor(arguments.pop("sinks"), dtype=torch.float64, requires_grad=True))

    def f(q, k, v, sinks=None):
        return scalar(*attn.attention(q, k, v, sinks=sinks, return_lse=True, **arguments))

    assert torch.autograd.gradcheck(f, learnt)


@pytest.mark.parametrize("case", ["causal, rows before the first key", "all at once"])
def test_jax_gradients_are_those_of_torch(case):
    n, m, arguments = CASES[case]
    qkv, arguments = arrays(n, m, arguments)
    sinks = np.asarray(arguments.pop("sinks", [0.0] * H), np.float32)
    tensors = [torch.tensor(x, requires_grad=True) for x in (*qkv, sinks)]
    scalar(*attn.attention(*tensors[:3], sinks=tensors[3], return_lse=True, **arguments)).backward()

    def loss(q, k, v, sinks):
        return scalar(*attn.attention(q, k, v, sinks=sinks, return_lse=True, **arguments))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, (*qkv, sinks)))
    for tensor, grad in zip(tensors, grads, strict=True):
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


# poison


@pytest.mark.parametrize("framework", MAKERS)
def test_what_is_masked_is_harmless(framework):
    (q, k, v), _ = arrays(3, 8, {})
    mask = np.ones((3, 8), bool)
    mask[:, 5:] = False
    clean = attention(framework, (q, k, v), mask=mask)
    k[:, 5:] = v[:, 5:] = np.array([math.nan, math.inf, 3e38], np.float32)[:, None, None]
    np.testing.assert_array_equal(attention(framework, (q, k, v), mask=mask), clean)


@pytest.mark.parametrize("framework", MAKERS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_live_nan_reaches_exactly_the_rows_that_attend_it(framework, which):
    (q, k, v), _ = arrays(6, 6, {})
    clean = attention(framework, (q, k, v), causal=True)
    (k if which == "k" else v)[0, 3, 1, 2] = math.nan  # kv head 1: query heads 2 and 3
    out = attention(framework, (q, k, v), causal=True)
    hit = np.zeros(out.shape, bool)
    hit[0, 3:, 2:, slice(None) if which == "k" else 2] = True
    np.testing.assert_array_equal(np.isnan(out), hit)
    np.testing.assert_allclose(out[~hit], clean[~hit], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("framework", MAKERS)
def test_infinite_values_stay_infinite(framework):
    (q, k, v), _ = arrays(4, 4, {})
    v[0, 1, 0, 0], v[0, 2, 0, 1], v[0, 1, 1, 0], v[0, 2, 1, 0] = math.inf, -math.inf, math.inf, -math.inf
    out, want = attention(framework, (q, k, v), causal=True), oracle((q, k, v), causal=True)[0]
    wild = ~np.isfinite(want)
    np.testing.assert_array_equal(out[wild], want[wild])
    np.testing.assert_allclose(out[~wild], want[~wild], rtol=2e-5, atol=2e-6)
    assert np.isposinf(out[0, 1:, :2, 0]).all() and np.isneginf(out[0, 2:, :2, 1]).all()
    assert np.isnan(out[0, 2:, 2:, 0]).all()


def test_gradients_ignore_unattended_keys():
    (q, k, v), _ = arrays(3, 8, {})
    k[:, 5:], v[:, 5:] = math.nan, math.inf
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    attn.attention(*tensors, window=(0, 0), mask=np.arange(8) < 5).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in tensors)
    f = jax.grad(lambda *qkv: attn.attention(*qkv, mask=np.arange(8) < 5).sum(), argnums=(0, 1, 2))
    grads = jax.jit(f)(*map(jnp.asarray, (q, k, v)))
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


# mistakes


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": jnp.zeros((B, 7, K, D))}, TypeError, "q, k, v belong to torch, jax, torch: must be one framework"),
        ({"q": [1.0]}, TypeError, "expected an array of torch, jax or numpy, got builtins.list"),
        ({"k": torch.zeros(2, 7, 3, 8)}, ShapeError, "k and v in keys and heads"),
        ({"q": torch.zeros(2, 5, 8)}, ShapeError, "all without B"),
        ({"q": torch.zeros(2, 5, 3, 8)}, ValueError, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"q": torch.zeros(2, 5, 4, 8).half()}, DTypeError, "q, k, v have dtypes float16, float32, float32"),
        ({"scale": 0.0}, ValueError, "scale=0.0 must be finite and not zero"),
        ({"window": -1}, ValueError, "must be at least 1"),
        ({"logits_soft_cap": -2.0}, ValueError, "logits_soft_cap=-2.0 must be finite and at least 0"),
        ({"sinks": "abcd"}, ValueError, "sinks='abcd' must be numbers, one per head"),
        ({"alibi_slopes": [1, 2, 3, "x"]}, ValueError, "alibi_slopes=.* must be numbers, one per head"),
        ({"sinks": [1.0]}, ShapeError, r"sinks has shape \[1\]: must be \[4\]"),
        ({"mask": np.ones((5, 6), bool)}, ShapeError, r"mask has shape \[5, 6\]: must broadcast to .* \[2, 4, 5, 7\]"),
        ({"mask": np.zeros((5, 7))}, DTypeError, "must be bool, True = attend"),
        ({"backend": "NOPE"}, ValueError, "Unknown attention backend: 'NOPE'. Valid options are: FLASH_ATTN"),
    ],
)
def test_mistakes_are_named(change, error, words):
    call = {"q": torch.zeros(B, 5, H, D), "k": torch.zeros(B, 7, K, D), "v": torch.zeros(B, 7, K, DV), **change}
    with pytest.raises(error, match=words):
        attn.attention(**call)


# through a real backend


def built(name):
    member = attn.AttentionBackendEnum[name]
    candidate = member.candidate()
    if candidate.problem or candidate.missing:
        pytest.skip(f"{name}: {candidate.problem or candidate.missing}")
    return name


@pytest.mark.parametrize(
    ("backend", "framework"),
    [("TORCH_SDPA", "torch"), ("TORCH_SDPA", "jax"), ("CPU_ATTN", "torch"), ("CPU_ATTN", "numpy")]
    + [("XLA_ATTN", "jax"), ("XLA_ATTN", "torch")],
)
def test_a_backend_gives_the_same_answer(backend, framework):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((B, s, h, 32)).astype(np.float32) for s, h in ((5, H), (21, K), (21, K)))
    arguments = {"causal": True, "window": 4, "return_lse": True}
    exact = attention("numpy", (q, k, v), **arguments)
    through = attn.attention(*map(MAKERS[framework], (q, k, v)), backend=built(backend), **arguments)
    for want, got in zip(exact, through, strict=True):
        assert isinstance(got, type(MAKERS[framework](q))) and tuple(got.shape) == want.shape
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)
    assert str(through[0].dtype).endswith("float32")


def test_a_backend_that_cannot_run_is_refused_with_its_reasons(make_backend):
    q, kv = torch.zeros(1, 5, H, 32), torch.zeros(1, 7, K, 32)
    with pytest.raises(UnsupportedError, match="XFORMERS  xformers is not installed"):
        attn.attention(q, kv, kv, backend="XFORMERS")
    attn.register_backend("MINE", make_backend("MINE", packages=("no_such_package",)))
    with pytest.raises(UnsupportedError, match="MINE  no_such_package is not installed"):
        attn.attention(q, kv, kv, backend="MINE")


def test_a_backend_refuses_what_it_would_drop():
    q, k, v = torch.zeros(1, 5, H, 32), torch.zeros(1, 7, K, 32), torch.zeros(1, 7, K, 32)
    name = built("CPU_ATTN")
    with pytest.raises(UnsupportedError, match="CPU_ATTN: mask not supported over a paged cache"):
        attn.attention(q, k, v, mask=torch.ones(5, 7, dtype=torch.bool), backend=name)
    with pytest.raises(UnsupportedError, match="CPU_ATTN: head_size_v not supported"):
        attn.attention(q, k, v[..., :16], backend=name)
    with pytest.raises(UnsupportedError, match="backward not supported"):
        attn.attention(q.requires_grad_(), k, v, causal=True, backend=name)


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_heads_may_come_before_rows(kind):
    """layout="BHSD" is the same attention of transposed arrays, the result transposed too; lse and masks are as they were."""
    rng = np.random.default_rng(0)
    make = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[kind]
    q, k, v = (rng.standard_normal((2, n, heads, 8), np.float32) for n, heads in ((5, 4), (7, 2), (7, 2)))
    rules = {"causal": True, "window": (3, 0), "mask": rng.random((2, 4, 5, 7)) > 0.2, "return_lse": True}
    want, want_lse = attn.attention(make(q), make(k), make(v), **rules, layout="BSHD")
    swapped = [make(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    out, lse = attn.attention(*swapped, **rules, layout="BHSD")
    np.testing.assert_allclose(np.asarray(out).swapaxes(1, 2), want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)
    alone = attn.attention(*(x[0] for x in swapped), causal=True, layout="BHSD")
    np.testing.assert_allclose(
        np.asarray(alone).swapaxes(0, 1), attn.attention(*map(make, (q[0], k[0], v[0])), causal=True), atol=1e-6
    )
    with pytest.raises(ShapeError, match=r"have shapes \[4, 5, 8\], \[2, 2, 7, 8\], .*: must be \[B, heads, S, head_size\]"):
        attn.attention(swapped[0][0], *swapped[1:], layout="BHSD")


@pytest.mark.parametrize("layout", ["bshd", "BSDH", 3, ["BSHD"]])
def test_a_layout_is_one_of_two(layout):
    x = np.ones((1, 2, 2, 4))
    with pytest.raises(ValueError, match="layout=.* is unknown; known: BSHD, BHSD"):
        attn.attention(x, x, x, layout=layout)


#: (q, k) as [rows or heads, heads or rows]; what only the other layout explains, and what is ordinary.
SWAPPED = [((32, 100), (8, 100)), ((4, 5), (2, 5)), ((8, 512), (8, 512)), ((71, 300), (1, 300))]
ORDINARY = [
    ((1, 8), (1, 8)), ((1, 8), (512, 8)), ((1, 32), (100, 8)), ((5, 8), (5, 8)), ((8, 64), (8, 64)), ((5, 128), (5, 128)),
    ((2, 128), (2, 128)), ((4096, 16), (77, 16)), ((512, 8), (512, 2)), ((9, 4), (9, 2)), ((1, 200), (1, 200)),
    ((64, 16), (8, 16)), ((3, 8), (8, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("q", "k"), SWAPPED)
def test_a_swapped_shape_is_reported(q, k):
    query, key = np.ones((1, *q, 2), np.float32), np.ones((1, *k, 2), np.float32)
    with pytest.warns(UserWarning, match=r'look like \[B, heads, S, head_size\]: pass layout="BHSD"') as seen:
        attn.attention(query, key, key)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attn.attention(query, key, key, layout="BSHD")
        attn.attention(query, key, key, layout="BHSD")


@pytest.mark.parametrize(("q", "k"), ORDINARY)
def test_an_ordinary_shape_is_not(q, k):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        query, key = np.ones((1, *q, 2), np.float32), np.ones((1, *k, 2), np.float32)
        attn.attention(query, key, key)


def test_heads_that_do_not_divide_name_the_other_layout():
    query, key = np.ones((1, 8, 1, 4)), np.ones((1, 8, 64, 4))  # a decode of eight heads
    with pytest.raises(ValueError, match=r'num_heads=1 is not a multiple of num_kv_heads=64 .*layout="BHSD"'):
        attn.attention(query, key, key)
    attn.attention(query, key, key, layout="BHSD")
    with pytest.raises(ValueError, match=r"num_heads=3 is not a multiple of num_kv_heads=2$"):
        attn.attention(np.ones((1, 5, 3, 4)), np.ones((1, 7, 2, 4)), np.ones((1, 7, 2, 4)))


@pytest.mark.parametrize("side", [2**31 - 1, 2**40])
def test_a_window_beyond_every_key_hides_none(side):
    """Under jax positions are int32, to which a window's bounds are added."""
    q, k, v = (jnp.asarray(np.random.default_rng(n).standard_normal((9, 2, 8)), jnp.float32) for n in range(3))
    window = {"window": (side, side), "causal": False}
    np.testing.assert_array_equal(attn.attention(q, k, v, **window), attn.attention(q, k, v, causal=False))


def test_a_window_is_called_by_its_name():
    x = np.ones((1, 2, 2, 4))
    told = {
        (-2, 0): r"window=\(-2, 0\): left=-2 must be an int of at least 0, or None",
        0: "window=0 must be at least 1",
        "3": r"window='3' must be an int, a \(left, right\) pair",
    }
    for window, message in told.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            attn.attention(x, x, x, window=window)


IMAGES = [[-1, 0, 0, 0, 5, 5, -1], [3, 3, -1, -1, -1, 0, 0]]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(
    "rules",
    [
        {"causal": True, "spans": True},
        {"causal": True, "spans": True, "window": (1, 0), "span_window": False, "prefix": [2, 0]},
        {"causal": True, "spans": True, "window": (1, 0), "span_window": True, "chunk_size": 3, "sinks": [0.5, -1.0]},
        {"causal": True, "prefix": 3, "chunk_size": 4},
        {"window": (2, 1), "prefix": 2},
    ],
)
def test_what_a_row_sees_besides(framework, rules):
    """The formula and a backend, against the oracle's own rows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 5 if i == 0 else 7, 2, 16)).astype(np.float32) for i in range(3))
    spans = attn.spans_of(IMAGES, [5, 5]).reshape(2, 5, 2) if rules.get("spans") else None
    given = {**rules, "spans": spans}
    seen = np.stack(
        [
            reference.visible_mask(
                5,
                7,
                causal=rules.get("causal", False),
                window=rules.get("window", (None, None)),
                spans=None if spans is None else spans[b],
                prefix=int(np.broadcast_to(rules.get("prefix", 0), 2)[b]),
                chunk_size=rules.get("chunk_size"),
                span_window=rules.get("span_window", False),
            )
            for b in range(2)
        ]
    )[:, None]
    want = attn.attention(q, k, v, mask=seen, sinks=rules.get("sinks"))
    plain = attn.attention(q, k, v, causal=rules.get("causal", False), window=rules.get("window"), sinks=rules.get("sinks"))
    assert np.abs(want - plain).max() > 0.1, "the rules change the result"
    arrays = [attn.arrays.to_framework(x, framework) for x in (q, k, v)]
    for more in ({}, {"backend": "XLA_ATTN" if framework == "jax" else "CPU_ATTN"}):
        out = attn.attention(*arrays, **given, **more)
        np.testing.assert_allclose(np.asarray(out), want, atol=2e-6)


def test_spans_are_checked():
    x = np.ones((1, 3, 2, 4))
    for given, message in (
        ({"spans": [[0, 1]] * 2}, r"spans has shape \[2, 2\], dtype int64: must be integers \[1, 3, 2\]"),
        ({"spans": [[0, 3]] * 3}, r"spans\[0, 0\] = \[0, 3\]: must be 0 <= first <= last < 3, or \(-1, -1\) for none"),
        ({"spans": [[0, 1]] * 3, "window": 2}, "spans with a window: pass span_window=True if the window cuts spans too"),
        ({"spans": [[0, 1]] * 3, "window": (None, 2)}, "spans with a window: pass span_window=True"),
        ({"prefix": 4}, "prefix=4 must be integers between 0 and 3"),
        ({"prefix": [1, 2]}, r"prefix=\[1, 2\] must be integers between 0 and 3"),
        ({"chunk_size": 0}, "chunk_size=0 must be a positive int"),
    ):
        with pytest.raises(ValueError, match=message):
            attn.attention(x, x, x, causal=True, **given)


@pytest.mark.parametrize("framework", [torch.ones, jnp.ones])
def test_a_mask_of_numbers_is_refused_beside_spans_too(framework):
    x = framework((1, 3, 2, 4))
    with pytest.raises(DTypeError, match="mask has dtype .*float32: must be bool"):
        attn.attention(x, x, x, mask=framework((3, 3)), chunk_size=2)


@pytest.mark.parametrize("per_head", [list, np.asarray, torch.tensor], ids=["list", "NumPy", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_per_head_numbers_take_the_dtype_of_the_computation(per_head, dtype):
    """`reference.alibi_slopes` and NumPy's own arrays are float64; lists have all digits of Python's numbers."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, 4, 8))).to(dtype)
    slopes, sinks = reference.alibi_slopes(4) / 3, np.arange(4) / 7
    options = {"alibi_slopes": per_head(slopes.tolist()), "sinks": per_head(sinks.tolist())}
    out, lse = attn.attention(x, x, x, return_lse=True, **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    if per_head is torch.tensor:
        return  # float32, so fewer digits are right
    wide = x[0].double().numpy()
    want = reference.attention(wide, wide, wide, alibi_slopes=slopes, sinks=sinks)[1]
    np.testing.assert_allclose(lse[0], want, rtol=0, atol=1e-13 if dtype == torch.float64 else 2e-6)


def test_per_head_numbers_of_float64_under_jax():
    x = jnp.ones((1, 3, 4, 8), jnp.float32)
    out, lse = attn.attention(x, x, x, return_lse=True, alibi_slopes=reference.alibi_slopes(4), sinks=np.zeros(4))
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
