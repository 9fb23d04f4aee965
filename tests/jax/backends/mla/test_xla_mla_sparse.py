"""XLA_MLA_SPARSE against the oracle, and the lightning indexer apart from it (about 12 s)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import reference
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.jax.backends.mla.xla_mla_sparse import XLAMLASparseBackend
from attn.jax.kernels import xla, xla_mla
from attn.testing import Case, check_conformance
from tests.levels import sampled

SPARSE = {"backend": "XLA_MLA_SPARSE", "options": {"indexer": object()}}
DEEPSEEK = (512, 64, 128, 128)


def choose(batch: Any, topk: int, seed: int = 0) -> tuple[Any, Any]:
    """(indices [T padded, topk], mask_of): some of each row's own past in no order, -1 and positions past the end between."""
    rng = np.random.default_rng(seed)
    rows = batch.metadata.slot_mapping.shape[0]
    indices = np.full((rows, topk), -1, np.int32)
    masks = [np.zeros((q, m), bool) for q, m in zip(batch.query_lens, batch.seq_lens, strict=True)]
    for r, (n, m) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for i in range(n):
            past = max(m - n + i + 1, 0)
            count = int(rng.integers(0, min(past, topk) + 1))
            names = rng.permutation(past)[:count]
            masks[r][i, names] = True
            row = indices[batch.common.query_start_loc[r] + i]
            row[rng.permutation(topk)[:count]] = names
            row[row < 0] = rng.choice([-1, m, m + 3], int((row < 0).sum()))
    return jnp.asarray(indices), lambda r: masks[r]


FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "k_scale": 0.02},
    "fp8_ds_mla": {"dims": DEEPSEEK, "kv_cache_dtype": "fp8_ds_mla"},
}


@pytest.mark.parametrize("name", sampled(list(FORMATS), 1, "formats of sparse latents", lambda name: name == "float32"))
def test_against_the_oracle(make_mla: Any, name: str) -> None:
    """Rows attend what their indices name, whatever the order; a row with none is 0 and -inf."""
    batch = make_mla(**SPARSE, **FORMATS[name])
    indices, mask_of = choose(batch, 24)
    got, cache = jax.jit(batch.layer.__call__, donate_argnums=3)(*batch.arguments(), indices=indices)
    batch.check(got, cache, mask_of)


def test_all_keys_are_dense_attention(make_mla: Any) -> None:
    sparse, dense = make_mla(**SPARSE), make_mla()
    request = np.repeat(np.arange(6), sparse.query_lens)
    indices = np.full((sparse.metadata.slot_mapping.shape[0], 48), -1, np.int32)
    for t, r in enumerate(request):
        own = sparse.seq_lens[r] - sparse.query_lens[r] + t - sparse.common.query_start_loc[r]
        indices[t, : max(own + 1, 0)] = np.arange(max(own + 1, 0))[::-1]
    (out, lse), _ = sparse.layer(*sparse.arguments(), indices=jnp.asarray(indices))
    (want, want_lse), _ = dense.layer(*dense.arguments())
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_what_is_refused(make_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_mla(**SPARSE)
    arguments, rows = batch.arguments(), batch.metadata.slot_mapping.shape[0]
    with pytest.raises(ShapeError, match="indices has shape None"):
        batch.layer(*arguments)
    with pytest.raises(DTypeError, match="must be int32"):
        batch.layer(*arguments, indices=jnp.zeros((rows, 4)))
    monkeypatch.setenv("ATTN_DEBUG", "device")
    with pytest.raises(MetadataError, match="listed at most once per row"):
        batch.layer(*arguments, indices=jnp.full((rows, 4), 2, jnp.int32))
    dense = make_mla()
    with pytest.raises(UnsupportedError, match="sparse_mla not supported"):
        dense.layer(*dense.arguments(), indices=jnp.zeros((rows, 4), jnp.int32))


@pytest.mark.parametrize(("scored", "topk"), [(2048, 8), (16, 7)])
def test_the_indexer(make_mla: Any, monkeypatch: pytest.MonkeyPatch, scored: int, topk: int) -> None:
    """Scores by the formula, in one step and in several; the chosen set is the top k of each row's past, but for ties."""
    monkeypatch.setattr(xla_mla, "_SCORED", scored)  # read when a program is traced: each has its own topk
    batch = make_mla()
    heads, width, page = 6, 16, batch.page
    rng = np.random.default_rng(3)
    rows = batch.metadata.slot_mapping.shape[0]
    query, weights = rng.standard_normal((rows, heads, width), np.float32), rng.standard_normal((rows, heads), np.float32)
    keys = rng.standard_normal((batch.num_blocks, page, width), np.float32)
    meta = batch.metadata
    indices, scores = xla_mla.lightning_indexer(*map(jnp.asarray, (query, weights, keys)), meta.requests, topk=topk)
    start = batch.common.query_start_loc
    for r, (n, m) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        own = keys.reshape(-1, width)[batch.slots_of(r)].astype(np.float64)
        for i in range(n):
            t, past = start[r] + i, max(m - n + i + 1, 0)
            dots = np.maximum(query[t].astype(np.float64) @ own.T, 0)
            want = weights[t].astype(np.float64) @ dots
            np.testing.assert_allclose(scores[t, :past], want[:past], rtol=1e-4, atol=1e-4)
            assert np.isneginf(np.asarray(scores[t, past:])).all()
            chosen = np.asarray(indices[t])
            named = chosen[chosen >= 0]
            assert len(named) == min(past, topk) == len(set(named.tolist())) and (named < past).all()
            if len(named) == topk:
                assert want[named].min() >= np.sort(want[:past])[-topk] - 1e-4
    assert (np.asarray(indices[start[-1] :]) == -1).all()


def test_indices_feed_the_sparse_oracle(make_mla: Any) -> None:
    """The oracle's own sparse form, on the absorbed query: the same numbers as `sparse_attention`."""
    batch = make_mla(**SPARSE)
    indices, _ = choose(batch, 24, seed=5)
    rng = np.random.default_rng(1)
    rows, rank, width = indices.shape[0], 32, 48
    query = rng.standard_normal((rows, 4, width), np.float32)
    cache = rng.standard_normal(batch.cache.shape, np.float32)
    meta = batch.metadata
    arrays = jnp.asarray(query), jnp.asarray(cache), indices, meta.requests
    out, lse = xla_mla.sparse_attention(*arrays, kv_lora_rank=rank, scale=0.2)
    for r in range(len(batch.query_lens)):
        mine = slice(batch.common.query_start_loc[r], batch.common.query_start_loc[r + 1])
        own = cache.reshape(-1, width)[batch.slots_of(r)]
        chosen = np.asarray(indices[mine])
        want, want_lse = reference.sparse_mla(query[mine], own, chosen, scale=0.2, kv_lora_rank=rank)
        np.testing.assert_allclose(out[mine], want, atol=1e-5)
        np.testing.assert_allclose(lse[:, mine], want_lse, atol=1e-4)


def test_a_long_prompt_attends_the_chosen_keys_alone():
    """Of as many rows as the dense backends expand: expanded heads would attend every key."""
    case = Case(
        "long prompt",
        (200,),
        (200,),
        num_heads=2,
        num_kv_heads=1,
        head_size=576,
        mla=(512, 128, 64, 128),
        topk=64,
        poison="zero",
    )
    check_conformance(XLAMLASparseBackend, case)


def test_the_indexer_without_pages() -> None:
    requests = xla.Requests(jnp.array([0, 2]), jnp.array([0]), jnp.zeros((1, 0), jnp.int32))
    indices, scores = xla_mla.lightning_indexer(jnp.ones((2, 1, 8)), jnp.ones((2, 1)), jnp.ones((3, 16, 8)), requests, topk=4)
    assert indices.tolist() == [[-1] * 4] * 2 and scores.shape == (2, 0)
