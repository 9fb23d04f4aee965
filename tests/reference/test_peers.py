"""The oracle against other libraries' functions, where their semantics agree.

They differ in known places, each with a test that says which: top-left causal masks, and what an empty
row gives.
"""

import numpy as np
import pytest

from attn import reference

pytestmark = pytest.mark.usefixtures("jax_compiles_fast")

N, M, H, K, D = 6, 10, 4, 2, 8


def inputs(n=N, m=M, dtype=np.float64):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, heads, D)).astype(dtype) for length, heads in ((n, H), (m, K), (m, K))]


def sdpa(query, key, value, **kwargs):
    torch = pytest.importorskip("torch")
    arrays = (torch.from_numpy(x).transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*arrays, enable_gqa=True, **kwargs)
    return out[0].transpose(0, 1).numpy()


def as_torch(array):
    return pytest.importorskip("torch").from_numpy(np.ascontiguousarray(array))


def test_torch_sdpa_full_and_scaled():
    for kwargs in ({}, {"scale": 0.11}):
        np.testing.assert_allclose(
            reference.attention(*inputs(), **kwargs)[0], sdpa(*inputs(), **kwargs), rtol=1e-10, atol=1e-12
        )


def test_torch_sdpa_causal_agrees_when_square():
    square = inputs(n=M)
    np.testing.assert_allclose(
        reference.attention(*square, causal=True)[0], sdpa(*square, is_causal=True), rtol=1e-10, atol=1e-12
    )


def test_torch_sdpa_causal_is_top_left_otherwise():
    theirs = sdpa(*inputs(), is_causal=True)
    top_left = reference.attention(*inputs(), causal=True, query_positions=np.arange(N))[0]
    np.testing.assert_allclose(top_left, theirs, rtol=1e-10, atol=1e-12)
    assert not np.allclose(reference.attention(*inputs(), causal=True)[0], theirs)


def test_torch_causal_lower_right_is_ours():
    bias = pytest.importorskip("torch.nn.attention.bias")
    theirs = sdpa(*inputs(), attn_mask=bias.causal_lower_right(N, M))
    np.testing.assert_allclose(reference.attention(*inputs(), causal=True)[0], theirs, rtol=1e-10, atol=1e-12)


def test_torch_sdpa_masks():
    rng = np.random.default_rng(1)
    mask = rng.random((H, N, M)) < 0.6
    mask[:, 2] = False
    ours, _ = reference.attention(*inputs(), mask=mask)
    np.testing.assert_allclose(ours, sdpa(*inputs(), attn_mask=as_torch(mask[None])), rtol=1e-10, atol=1e-12)
    bias = np.where(mask, rng.standard_normal((H, N, M)), -np.inf)
    ours, _ = reference.attention(*inputs(), bias=bias)
    np.testing.assert_allclose(ours, sdpa(*inputs(), attn_mask=as_torch(bias[None])), rtol=1e-10, atol=1e-12)
    assert not ours[2].any()


def test_torch_logsumexp_is_our_lse():
    torch = pytest.importorskip("torch")
    query, key, _ = inputs()
    scores = np.einsum("nhd,mhd->hnm", query, key.repeat(H // K, axis=1)) * D**-0.5
    scores[:, ~np.tri(N, M, M - N, dtype=bool)] = -np.inf
    lse = torch.logsumexp(torch.from_numpy(scores), dim=-1).numpy()
    np.testing.assert_allclose(reference.attention(*inputs(), causal=True)[1], lse, rtol=1e-12)


def jax_attention(query, key, value, **kwargs):
    jax = pytest.importorskip("jax")
    return np.asarray(jax.nn.dot_product_attention(query, key, value, implementation="xla", **kwargs))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"scale": 0.2}, {"scale": 0.2}),
        ({"is_causal": True}, {"causal": True}),
        ({"local_window_size": 2}, {"window": (2, 2)}),
        ({"local_window_size": (3, 1)}, {"window": (3, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [N, M])
def test_jax_nn_counts_positions_from_the_top_left(theirs, ours, n):
    arrays = inputs(n=n, dtype=np.float32)
    expected = jax_attention(*arrays, **theirs)
    out, _ = reference.attention(*arrays, **ours, query_positions=np.arange(n))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_jax_nn_bias_and_mask():
    rng = np.random.default_rng(1)
    mask, bias = rng.random((H, N, M)) < 0.6, rng.standard_normal((H, N, M)).astype(np.float32)
    mask[..., 0] = True
    arrays = inputs(dtype=np.float32)
    out, _ = reference.attention(*arrays, mask=mask, bias=bias)
    np.testing.assert_allclose(out, jax_attention(*arrays, mask=mask, bias=bias), rtol=1e-4, atol=1e-5)
    mask[:, 2] = False
    # An empty row is the mean of V there (a finite mask value), and 0 here.
    theirs, (ours, _) = jax_attention(*arrays, mask=mask), reference.attention(*arrays, mask=mask)
    mean = arrays[2].mean(axis=0).repeat(H // K, axis=0)
    np.testing.assert_allclose(theirs[2], mean, rtol=1e-4, atol=1e-5)
    assert not ours[2].any()
