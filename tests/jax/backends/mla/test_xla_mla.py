"""XLA_MLA against the float64 oracle: cache formats, buckets, expanded prompts, ranks of a context-parallel group (about
35 s)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import distributed, reference
from attn.backends.mla.prefill.selector import get_mla_prefill_backend
from attn.distributed import DCPGroup
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.jax import MLAAttention, merge_attn_states
from attn.jax.backends.mla import _mla
from attn.jax.kernels import xla_mla
from tests.levels import sampled

DEEPSEEK = (512, 64, 128, 128)
FORMATS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "heads": 16},
    "float32 over bfloat16": {"kv_cache_dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "k_scale": 0.02},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.5},
    "fp8_ds_mla": {"dims": DEEPSEEK, "kv_cache_dtype": "fp8_ds_mla"},
    "non_causal": {"causal": False},
}


@pytest.mark.parametrize("name", sampled(list(FORMATS), 3, "formats of latents"))
def test_against_the_oracle(make_mla: Any, name: str) -> None:
    """A mixed batch: decodes, a chunk, a prefill, no rows, more rows than keys; the donated cache keeps its memory."""
    batch = make_mla(**FORMATS[name])
    arguments = batch.arguments()
    where = arguments[3].unsafe_buffer_pointer()
    got, cache = jax.jit(batch.layer.__call__, donate_argnums=3)(*arguments)
    assert arguments[3].is_deleted()
    assert name != "float32" or cache.unsafe_buffer_pointer() == where
    batch.check(got, cache)


def test_the_packed_row_byte_for_byte() -> None:
    rng = np.random.default_rng(0)
    kv_c = rng.standard_normal((40, 512), np.float32) * np.exp(5 * rng.standard_normal((40, 1), np.float32))
    kv_c[3], kv_c[4, :128], kv_c[5, 7] = 0, 1e-30, np.nan
    kv_c[6, :128], kv_c[6, 9] = 0, 448 / 8  # a scale that is a power of two
    kv_c[20:] = kv_c[20:].astype(jnp.bfloat16)  # few digits, so many ties
    k_pe = rng.standard_normal((40, 64), np.float32)
    for ue8m0 in (False, True):
        want = reference.pack_fp8_ds_mla(kv_c, k_pe, ue8m0=ue8m0)
        got = jax.jit(xla_mla.pack_fp8_ds_mla, static_argnames="ue8m0")(kv_c, k_pe, ue8m0=ue8m0)
        np.testing.assert_array_equal(got, want)
        for mine, theirs in zip(xla_mla.unpack_fp8_ds_mla(got), reference.unpack_fp8_ds_mla(want), strict=True):
            np.testing.assert_array_equal(mine, theirs.astype(np.float32))


def test_nan_reaches_the_rows_that_see_it(make_mla: Any) -> None:
    batch = make_mla((4, 1), (10, 9))
    batch.kv_c[1, 3] = np.nan  # the second new token of the first request
    (out, _), _ = batch.layer(*batch.arguments())
    lost = np.isnan(np.asarray(out[:5])).any(axis=(1, 2))
    np.testing.assert_array_equal(lost, [False, True, True, True, False])


@pytest.mark.parametrize("window", [512, 150])  # two windows of 150 overlap
def test_expanded_prompts(make_mla: Any, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Long prompts beside decodes, with and without context, which comes in several turns of the workspace."""
    monkeypatch.setattr(_mla, "WORKSPACE", 64)
    monkeypatch.setattr(_mla, "WINDOW", window)
    lens = (1, 80, 0, 90, 75, 5), (33, 80, 9, 100, 200, 40)
    batch = make_mla(*lens, kv_cache_dtype="fp8", k_scale=0.02)
    assert batch.layer.impl.expand_from == 71 and batch.layer.impl.expands(batch.metadata)
    got, cache = jax.jit(batch.layer.__call__)(*batch.arguments())
    batch.check(got, cache)
    batch = make_mla(*lens, options={"prefill_backend": "NOBODY"})
    with pytest.raises(ValueError, match="NOBODY"):
        batch.layer(*batch.arguments())


def test_rows_attend_their_own_context_only(make_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of rows and turns of the context are as many as the requests need, not all rows for each turn."""
    size, window = 128, 90
    monkeypatch.setattr(_mla, "WORKSPACE", size)
    monkeypatch.setattr(_mla, "WINDOW", window)
    calls: list[int] = []
    prefill = get_mla_prefill_backend(40, 20, "float32", framework="jax", num_heads=4)
    real = prefill.run_prefill_context_chunk

    def counted(self: Any, chunk: int, q: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda: calls.append(q.shape[0]))
        return real(self, chunk, q, *rest)

    monkeypatch.setattr(prefill, "run_prefill_context_chunk", counted)
    lens, context = (90, 3, 75, 200, 80, 71), (0, 50, 300, 40, 700, 128)
    batch = make_mla(lens, tuple(n + c for n, c in zip(lens, context, strict=True)))
    got, cache = jax.jit(batch.layer.__call__)(*batch.arguments())
    batch.check(got, cache)
    own = [(n, -(-c // size) + 1) for n, c in zip(lens, context, strict=True) if n >= 71 and c]
    turns = -(-sum(c for n, c in zip(lens, context, strict=True) if n >= 71) // size)
    assert sum(calls) < sum(n * often for n, often in own) + turns * window < turns * sum(lens)


@pytest.mark.full
def test_prompts_expanded_for_pallas(make_mla: Any) -> None:
    batch = make_mla((1, 75), (20, 90), options={"prefill_backend": "PALLAS"}, heads=2)
    batch.check(*jax.jit(batch.layer.__call__)(*batch.arguments()))


def test_the_prefill_backend_is_chosen_once(make_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every trace: a service compiles many buckets, and the platform or the environment may say otherwise by then."""
    asked = []

    def choose(*arguments: Any, **named: Any) -> Any:
        asked.append(named["framework"])
        return get_mla_prefill_backend(*arguments, **named)

    monkeypatch.setattr(_mla, "get_mla_prefill_backend", choose)
    batch = make_mla((1, 75), (20, 90))
    for _ in range(2):
        jax.eval_shape(lambda *arguments: batch.layer(*arguments), *batch.arguments())
    assert asked == ["jax"]


def test_a_layer_without_rotary_dimensions(make_mla: Any) -> None:
    """Decodes and a prompt long enough to be expanded; `k_pe` may be left out."""
    batch = make_mla((1, 130, 0), (33, 140, 9), dims=(32, 0, 24, 20))
    assert batch.layer.impl.expands(batch.metadata)
    q, kv_c, k_pe, cache, metadata = batch.arguments()
    got, written = batch.layer(q, kv_c, k_pe, cache, metadata)
    batch.check(got, written)
    again, _ = batch.layer(q, kv_c, None, cache, metadata)
    np.testing.assert_array_equal(again[0], got[0])


def test_nothing_is_written_without_new_rows(make_mla: Any) -> None:
    batch = make_mla()
    q, kv_c, k_pe, cache, metadata = batch.arguments()
    got, written = batch.layer(q, kv_c, k_pe, cache, metadata)
    again, kept = batch.layer(q, None, None, written, metadata)
    np.testing.assert_array_equal(kept, written)
    np.testing.assert_array_equal(again[0], got[0])


@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_of_a_context_parallel_group(make_mla: Any, interleave: int) -> None:
    """Each rank's cache holds its own tokens; the ranks' states merge to the whole, drafts of several tokens included."""
    whole = make_mla((1, 3, 1, 2), (33, 18, 1, 40))
    got, cache = whole.layer(*whole.arguments())
    rows, size, page = whole.rows_of(cache), 2, whole.page
    parts = []
    try:
        for rank in range(size):
            distributed.set_dcp_group(DCPGroup(size, rank, interleave))
            layer = MLAAttention(4, 32, 24, 16, 20, jnp.asarray(whole.w), block_size=page)
            assert layer.impl.need_to_return_lse_for_decode
            mine = [np.arange(length)[np.arange(length) // interleave % size == rank] for length in whole.seq_lens]
            slots = [page * 4 * r + np.arange(len(positions)) for r, positions in enumerate(mine)]
            content = np.full((16 * page, 48), np.nan, np.float32)
            written = []
            for r, positions in enumerate(mine):
                content[slots[r]] = rows[whole.slots_of(r)[positions]]
                new = np.arange(whole.seq_lens[r] - whole.query_lens[r], whole.seq_lens[r])
                at = {int(p): int(s) for p, s in zip(positions, slots[r], strict=True)}
                written += [at.get(int(p), -1) for p in new]
            content[[s for s in written if s >= 0]] = np.nan
            local = {"dcp_local_seq_lens": np.array([len(m) for m in mine], np.int32), "slot_mapping": np.array(written)}
            batch = whole.common.replace(block_table=np.arange(16, dtype=np.int32).reshape(4, 4), **local)
            metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch)
            pad = [metadata.pad(x) for x in (whole.q, whole.kv_c, whole.k_pe)]
            part, after = layer(*pad, jnp.asarray(content.reshape(16, page, 48)), metadata)
            parts.append(part)
            np.testing.assert_array_equal(
                np.asarray(after).reshape(-1, 48)[slots[1]], rows[whole.slots_of(1)[mine[1]]].astype(np.float32)
            )
    finally:
        distributed.set_dcp_group(None)
    out, lse = merge_attn_states([out for out, _ in parts], [lse for _, lse in parts])
    np.testing.assert_allclose(out[:7], got[0][:7], atol=1e-5)
    np.testing.assert_allclose(lse[:, :7], got[1][:, :7], atol=1e-5)


def test_what_is_refused(make_mla: Any) -> None:
    batch = make_mla()
    layer, (q, kv_c, k_pe, cache, metadata) = batch.layer, batch.arguments()
    w = {"w_uk": jnp.zeros((32, 4, 24)), "w_uv": jnp.zeros((32, 4, 20))}
    calls = {
        "q has shape": (ShapeError, (q[:, :3], kv_c, k_pe, cache, metadata)),
        "kv_c_normed has shape": (ShapeError, (q, kv_c[:, :8], k_pe, cache, metadata)),
        "pass both, or neither": (ShapeError, (q, None, k_pe, cache, metadata)),
        r"q has shape \[8, 4, 40\]: must be \[32, 4, 40\]": (ShapeError, (q[:8], kv_c, k_pe, cache, metadata)),
        r"kv_cache holds \[K, D\] = \[1, 64\], the layer has \[1, 48\]": (
            ShapeError,
            (q, kv_c, k_pe, jnp.zeros((9, 16, 64)), metadata),
        ),
        "blocks of 8 tokens": (ShapeError, (q, kv_c, k_pe, jnp.zeros((9, 8, 48)), metadata)),
        "kv_cache has dtype bfloat16": (DTypeError, (q, kv_c, k_pe, cache.astype(jnp.bfloat16), metadata)),
        "k_pe has dtype": (DTypeError, (q, kv_c, k_pe.astype(jnp.bfloat16), cache, metadata)),
        "must be a jax.Array": (TypeError, (q, kv_c, k_pe, None, metadata)),
        "attn_metadata is a": (TypeError, (q, kv_c, k_pe, cache, batch.common)),
    }
    for words, (error, arguments) in calls.items():
        with pytest.raises(error, match=words):
            layer(*arguments)
    with pytest.raises(ShapeError, match="w_uv has shape"):
        layer.impl.apply(q, kv_c, k_pe, cache, metadata, **{**w, "w_uv": w["w_uk"]})
    with pytest.raises(UnsupportedError, match="int8"):
        make_mla(kv_cache_dtype="int8")
    with pytest.raises(ShapeError, match="fp8_ds_mla needs"):
        make_mla(kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(MetadataError, match="NumPy mirror"):
        distributed.set_dcp_group(DCPGroup(2, 0))
        try:
            starts = {"query_start_loc": jnp.asarray(batch.common.query_start_loc), "query_start_loc_cpu": None}
            dcp = batch.common.replace(**starts, dcp_local_seq_lens=batch.common.seq_lens)
            layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, dcp)
        finally:
            distributed.set_dcp_group(None)


def test_a_profiling_run(make_mla: Any) -> None:
    batch = make_mla()
    q, kv_c, k_pe, cache, _ = batch.arguments()
    out, kept = batch.layer(q, kv_c, k_pe, cache, None)
    assert out.shape == (q.shape[0], 4, 20) and not out.any() and kept is cache
