"""Exact results of the oracle: single keys, empty rows, poison, and valid arguments."""

import math

import numpy as np
import pytest

from attn import reference


@pytest.mark.parametrize("score", [-524288.0, -1e4, 0.0, 1e4, 3e38], ids=str)
def test_one_key_gives_its_value(score):
    value = np.array([[[1.25, -3.0, 0.1]]])
    out, lse = reference.attention([[[score]]], [[[1.0]]], value, scale=1.0, causal=True)
    np.testing.assert_array_equal(out, value)
    np.testing.assert_array_equal(lse, [[score]])


def test_two_equal_keys_add_log_two():
    out, lse = reference.attention([[[3.0]]], [[[2.0]]] * 2, [[[1.0]], [[5.0]]], scale=1.0)
    assert out.item() == 3.0
    assert lse.item() == 6.0 + math.log(2)


def test_more_queries_than_keys_leaves_empty_rows():
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((34, 2, 4)),
        rng.standard_normal((1, 1, 4)),
        rng.standard_normal((1, 1, 4)),
    )
    for extra in ({}, {"sinks": [1.0, 5.0]}):
        out, lse = reference.attention(query, key, value, causal=True, **extra)
        np.testing.assert_array_equal(out[:33], 0)
        assert np.isneginf(lse[:, :33]).all() and np.isfinite(lse[:, 33]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38, np.finfo(np.float64).max], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_masked_poison_changes_no_bit(poison, where):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((3, 4, 5)),
        rng.standard_normal((9, 2, 5)),
        rng.standard_normal((9, 2, 5)),
    )
    mask = rng.random((4, 3, 9)) < 0.6
    mask[:, :, [0, 4, 8]] = False
    mask[:, 1] = False
    clean = reference.attention(query, key, value, mask=mask)
    for array, name in ((key, "key"), (value, "value")):
        if where in (name, "both"):
            array[[0, 4, 8]] = poison
    for result, expected in zip(reference.attention(query, key, value, mask=mask), clean, strict=True):
        np.testing.assert_array_equal(result, expected)
    bias = np.where(mask, 0.0, -np.inf)
    for result, expected in zip(reference.attention(query, key, value, bias=bias), clean, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("where", ["key", "value"])
def test_live_nan_reaches_the_rows_that_attend_it(where):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((6, 2, 4)),
        rng.standard_normal((6, 2, 4)),
        rng.standard_normal((6, 2, 4)),
    )
    clean, _ = reference.attention(query, key, value, window=(1, 0))
    {"key": key, "value": value}[where][3, 1, 2] = np.nan
    out, lse = reference.attention(query, key, value, window=(1, 0))
    hit = np.zeros(out.shape, dtype=bool)
    hit[3:5, 1, slice(None) if where == "key" else 2] = True
    np.testing.assert_array_equal(np.isnan(out), hit)
    np.testing.assert_array_equal(np.isnan(lse).T, hit.any(axis=2) & (where == "key"))
    np.testing.assert_array_equal(out[~hit], clean[~hit])


def test_live_infinity_is_ieee():
    out, _ = reference.attention(np.zeros((1, 1, 1)), np.zeros((2, 1, 1)), [[[np.inf]], [[1.0]]])
    assert out.item() == np.inf
    out, _ = reference.attention(np.zeros((1, 1, 1)), np.zeros((2, 1, 1)), [[[np.inf]], [[-np.inf]]])
    assert np.isnan(out.item())


def test_huge_scores_under_a_cap_are_finite():
    out, lse = reference.attention([[[3000.0]]], [[[1.0]], [[-1.0]]], [[[1.0]], [[2.0]]], scale=1.0, logits_soft_cap=30.0)
    np.testing.assert_allclose(out.item(), 1 + math.exp(-60), rtol=1e-15)
    np.testing.assert_allclose(lse.item(), 30.0)


def test_nothing_in_gives_nothing_out():
    out, lse = reference.paged_attention(
        np.zeros((0, 2, 4)),
        np.zeros((3, 2, 1, 4)),
        np.zeros((3, 2, 1, 4)),
        query_start_loc=[0],
        seq_lens=[],
        block_table=np.zeros((0, 3), dtype=np.int32),
    )
    assert out.shape == (0, 2, 4) and lse.shape == (2, 0)
    padding_only = reference.paged_attention(
        np.zeros((2, 2, 4)),
        np.zeros((3, 2, 1, 4)),
        np.zeros((3, 2, 1, 4)),
        query_start_loc=[0, 0, 0],
        seq_lens=[3, 0],
        block_table=np.zeros((2, 2), dtype=np.int32),
    )
    assert all(np.isnan(result).all() and result.size for result in padding_only)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_float_dtype_goes_in_and_is_not_written_to(dtype):
    arrays = [np.ones((2, 1, 2), dtype=dtype) for _ in range(3)]
    for array in arrays:
        array.setflags(write=False)
    out, lse = reference.attention(*arrays, causal=True, sinks=[0.0])
    assert out.dtype == lse.dtype == np.float64


def test_bfloat16_and_int8_caches_are_read_by_value():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    query, cache = rng.standard_normal((2, 2, 4)), rng.standard_normal((3, 4, 1, 4))
    batch = {"query_start_loc": [0, 2], "seq_lens": [6], "block_table": [[2, 0]]}
    short = cache.astype(ml_dtypes.bfloat16)
    assert (reference.to_bf16_bits(cache) == short.view(np.uint16)).all()
    codes = reference.quantize(cache, "int8", 0.03)
    for stored, values, scale in ((short, short.astype(np.float64), 1.0), (codes, codes * 0.03, 0.03)):
        actual = reference.paged_attention(query, stored, stored, **batch, k_scale=scale, v_scale=scale)
        expected = reference.paged_attention(query, values, values, **batch)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)
    key = rng.standard_normal((1, 1, 4))
    written, _ = reference.write_kv(key, key, short, short, [5])
    np.testing.assert_array_equal(written[1, 1].view(np.uint16), reference.to_bf16_bits(key[0]))
