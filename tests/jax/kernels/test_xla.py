"""The XLA kernel against the float64 oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import reference
from attn.jax.kernels import xla
from attn.visibility import BatchMask

H, K, D, P, N = 4, 2, 16, 8, 40
SLOPES = reference.alibi_slopes(H).astype(np.float32)
SINKS = np.array([2.5, -1.0, 4.0, -np.inf], np.float32)
CHAIN = np.tril(np.ones((8, 8), bool))
FORK = CHAIN & ~(np.eye(8, k=-1).astype(bool)) | np.eye(8, dtype=bool)


def run(batch: Any, cache: Any = None, padding: int = 0, **rules: Any) -> tuple[Any, Any]:
    """The kernel on a batch whose rows are padded with NaN, its new tokens already in `cache` (the oracle's, if None)."""
    common = batch.common
    cache = np.stack(batch.written()) if cache is None else cache
    rows = common.num_actual_tokens
    query = np.concatenate([batch.q, np.full((padding, H, D), np.nan, batch.q.dtype)])
    out, lse = xla.paged_attention(
        jnp.asarray(query),
        jnp.asarray(cache),
        xla.Requests(*map(jnp.asarray, (common.query_start_loc, common.seq_lens, common.block_table))),
        scale=rules.pop("scale", D**-0.5),
        max_query_len=common.max_query_len,
        causal=batch.causal,
        batch=BatchMask(None if batch.tree is None else jnp.asarray(batch.tree)),
        **rules,
    )
    assert out.dtype == batch.q.dtype and lse.dtype == jnp.float32
    assert not np.asarray(out)[rows:].any() and np.isneginf(np.asarray(lse)[:, rows:]).all()
    return np.asarray(out)[:rows], np.asarray(lse)[:, :rows]


@pytest.mark.parametrize(
    ("dtype", "causal", "tree", "rules"),
    [
        ("float32", True, None, {}),
        ("bfloat16", True, None, {"window": (6, 0), "logits_soft_cap": 1.5, "sinks": SINKS}),
        ("float32", False, None, {"window": (9, 4), "alibi_slopes": SLOPES}),
        ("float16", True, None, {"alibi_slopes": SLOPES, "sinks": SINKS, "scale": -0.5}),
        ("float32", True, FORK, {"window": (11, None), "alibi_slopes": SLOPES, "logits_soft_cap": 2.0, "sinks": SINKS}),
        ("bfloat16", False, None, {"window": (None, 3), "sinks": SINKS}),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else None,
)
def test_features(make_batch: Any, close: Any, dtype: str, causal: bool, tree: Any, rules: dict[str, Any]) -> None:
    lens = {} if tree is None else {"query_lens": (1, 8, 20, 0, 3, 1), "seq_lens": (33, 40, 20, 9, 3, 8)}
    trees = None if tree is None else np.stack([tree] * 6)
    batch = make_batch(dtype=dtype, causal=causal, tree=trees, **lens)
    close(run(batch, padding=2, **rules), batch.expected(**rules), dtype)


def test_a_chain_is_causal(make_batch: Any, close: Any) -> None:
    lens = {"query_lens": (1, 8, 20, 0, 3, 1), "seq_lens": (33, 40, 20, 9, 3, 8)}
    rules = {"window": (11, None), "alibi_slopes": SLOPES, "logits_soft_cap": 2.0, "sinks": SINKS}
    batch = make_batch(tree=np.stack([CHAIN] * 6), **lens)
    close(run(batch, padding=2, **rules), make_batch(**lens).expected(**rules))


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("decode", [True, False])
def test_quantised_caches(make_batch: Any, close: Any, cache_dtype: str, decode: bool) -> None:
    """Codes are read as code times scale, scalar or one a kv head."""
    if decode and cache_dtype == "fp8_e5m2":
        pytest.skip("the same program but for one cast")
    batch = make_batch((1, 1, 1, 1), (33, 40, 7, 64)) if decode else make_batch(dtype="bfloat16")
    element = jnp.dtype({"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}[cache_dtype])
    scales = np.array([0.02, 0.05], np.float32), np.float32(0.03)
    codes = [reference.quantize(half, cache_dtype, scale) for half, scale in zip(batch.cache, scales, strict=True)]
    exact = [reference.dequantize(code, cache_dtype, scale) for code, scale in zip(codes, scales, strict=True)]
    got = run(batch, np.stack(codes).view(element), k_scale=jnp.asarray(scales[0]), v_scale=jnp.asarray(scales[1]))
    close(got, batch.expected(*exact), batch.dtype)


def test_what_is_unused_is_never_seen(make_batch: Any, close: Any) -> None:
    """NaN and inf past every sequence's end, in unused pages, and ids past the used columns."""
    batch = make_batch()
    keys, values = batch.written()
    live = np.zeros((N, P), bool)
    for row, length in zip(batch.common.block_table, batch.common.seq_lens, strict=True):
        for position in range(length):
            live[row[position // P], position % P] = True
    poison = np.where(np.arange(D) % 2, np.nan, np.inf)
    cache = np.stack([np.where(live[..., None, None], half, poison).astype(np.float32) for half in (keys, values)])
    expected = batch.expected(keys, values)
    table = batch.common.block_table
    table[np.arange(table.shape[1]) >= -(-batch.common.seq_lens[:, None] // P)] = 10**6
    close(run(batch, cache, padding=2), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_what_is_live_reaches_its_rows(make_batch: Any, close: Any, half: int, value: float) -> None:
    """A NaN or inf in the middle of the prefill: causal rows before it stay clean, and so do the other kv head's."""
    batch = make_batch()
    cache = np.stack(batch.written())
    cache[half, batch.common.block_table[2][1], 3, 1, 5] = value
    want = batch.expected(*cache)
    assert not np.isfinite(want[0][batch.rows(2)][11:, K:]).all() and np.isfinite(want[0][batch.rows(2)][:11]).all()
    got = run(batch, cache, padding=2)
    np.testing.assert_array_equal(np.isposinf(got[0]), np.isposinf(want[0]))
    finite = np.isfinite(want[0])
    close((np.where(finite, got[0], 0), got[1]), (np.where(finite, want[0], 0), want[1]))
    np.testing.assert_array_equal(np.isnan(got[0]), np.isnan(want[0]))


def test_a_live_page_outside_the_cache_is_no_answer(make_batch: Any) -> None:
    batch = make_batch()
    clean = run(batch, padding=2)[0]
    for wrong in (-1, N):
        broken = make_batch()
        broken.common.block_table[1, 0] = wrong
        out = run(broken, np.stack(batch.written()), padding=2)[0]
        assert np.isnan(out[batch.rows(1)]).all()
        others = np.ones(len(out), bool)
        others[batch.rows(1)] = False
        np.testing.assert_array_equal(out[others], clean[others])


def test_encoders(make_batch: Any, close: Any) -> None:
    lens = (5, 0, 20, 5)
    batch = make_batch(lens, lens)
    starts = batch.common.query_start_loc
    rules: dict[str, Any] = {"window": (7, 3), "alibi_slopes": SLOPES, "sinks": SINKS}
    got = xla.ragged_attention(
        *(jnp.asarray(x) for x in (batch.q, batch.k, batch.v, starts)), scale=D**-0.5, max_query_len=32, causal=False, **rules
    )
    own = [reference.attention(*(x[batch.rows(r)] for x in (batch.q, batch.k, batch.v)), **rules) for r in range(len(lens))]
    close(got, (np.concatenate([out for out, _ in own]), np.concatenate([lse for _, lse in own], axis=1)))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (3, 0, 3, 4), (3, 2, 0, 4), (3, 2, 3, 0)])
def test_nothing_to_attend(shape: tuple[int, int, int, int]) -> None:
    rows, requests, columns, blocks = shape
    out, lse = xla.paged_attention(
        jnp.ones((rows, H, D)),
        jnp.ones((2, blocks, P, K, D)),
        xla.Requests(*(jnp.zeros(shape, jnp.int32) for shape in (requests + 1, requests, (requests, columns)))),
        scale=1.0,
        max_query_len=1,
    )
    assert out.shape == (rows, H, D) and not out.any()
    assert lse.shape == (H, rows) and jnp.isneginf(lse).all()


def test_tiles_pad_a_batch_to_twice_its_rows_at_most() -> None:
    assert xla.tile_rows(16, 16, 1) == 1
    assert xla.tile_rows(512, 1, 512) == 64
    assert xla.tile_rows(128, 16, 128) == 8
    for rows in (1, 7, 32, 128, 4096):
        for requests in (1, 3, 16, 128):
            for longest in (1, 2, 9, 128):
                q = xla.tile_rows(rows, requests, longest)
                assert q == 1 or (q < 2 * longest and rows + requests * (q - 1) <= 2 * rows)


def test_chunks_shrink_before_scores_fill_memory() -> None:
    assert xla.chunk_pages(16, 1000, 64 * 32) == 16
    assert xla.chunk_pages(16, 5, 64 * 32) == 5
    assert xla.chunk_pages(512, 5, 1) == 1
    assert xla.chunk_pages(16, 1000, 1 << 20) == 4


def test_numbers_do_not_recompile(make_batch: Any) -> None:
    """Scale, cap and window are arguments: new ones reuse the program, a rule that was absent does not."""
    batch = make_batch()
    kernel = functools.partial(run, batch, padding=2)
    kernel(window=(6, 0), logits_soft_cap=1.0, scale=0.25)
    size = xla.paged_attention._cache_size()
    kernel(window=(9, 0), logits_soft_cap=3.0, scale=0.5)
    assert xla.paged_attention._cache_size() == size


@pytest.mark.parametrize("abreast", [3, 32])
def test_short_requests_do_not_wait_for_long_ones(abreast, monkeypatch):
    """Tiles in one loop are of similar lengths: with one request of eight chunks, and 69 of one, other loops have one step."""
    lens = np.full(70, 16)
    lens[40] = 2048
    ends = np.cumsum(lens // 16)
    table = np.full((70, 128), -1)
    for r, (end, n) in enumerate(zip(ends, lens // 16, strict=True)):
        table[r, :n] = np.arange(end - n, end)
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((2, ends[-1], 16, 1, 8)), jnp.float32)
    query = jnp.asarray(rng.standard_normal((70, 2, 8)), jnp.float32)
    steps = []

    def fetch(ids):
        jax.debug.callback(lambda ids: steps.append(len(ids)), ids)
        return tuple(jnp.moveaxis(part[ids], 3, 1) for part in pages)

    monkeypatch.setattr(xla, "ABREAST", abreast)
    requests = xla.Requests(jnp.arange(71), jnp.asarray(lens), jnp.asarray(table))
    out, _ = xla._attend(query, fetch, (int(ends[-1]), 16, 1), requests, scale=0.5, max_query_len=1)
    jax.effects_barrier()
    loops = -(-70 // abreast)
    assert steps == [abreast] * (8 + loops - 1)
    for r in (0, 39, 40, 69):
        own = slice(ends[r] - lens[r] // 16, ends[r])
        key, value = (np.asarray(part[own]).reshape(-1, 8) for part in pages)
        scores = np.exp(np.asarray(query[r]) @ key.T * 0.5)
        np.testing.assert_allclose(out[r], scores / scores.sum(1, keepdims=True) @ value, rtol=2e-5, atol=1e-5)
