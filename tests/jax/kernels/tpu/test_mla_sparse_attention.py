"""PALLAS_MLA_SPARSE and its TPU kernel in TPU interpret mode against the float64 oracle: races watched, uninitialised memory
NaN (about 40 s).

Every slot of the cache that no request owns is NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from attn.jax.backends.mla import pallas_mla_sparse
from attn.jax.kernels import xla
from attn.jax.kernels.tpu import mla_sparse_attention as kernel
from attn.jax.testing import DMAMode, interpreter
from tests.jax.backends.mla.test_xla_mla_sparse import choose
from tests.levels import sampled

SPARSE = {"backend": "PALLAS_MLA_SPARSE", "options": {"indexer": object()}, "dtype": "bfloat16"}

#: topk, keys of a stage at most and the batch, where it is not that of `Batch`.
CASES: dict[str, dict[str, Any]] = {
    "steps": {"topk": 150, "stage_keys": 16, "query_lens": (1, 2, 0, 1), "seq_lens": (200, 9, 20, 140), "mode": "eager"},
    "tiles": {"topk": 104, "stage_keys": 32, "query_lens": (1, 2), "seq_lens": (33, 9), "tile": 16},
    "deepseek": {
        "topk": 40,
        "stage_keys": 16,
        "query_lens": (1, 2),
        "seq_lens": (70, 21),
        "dims": (512, 64, 128, 128),
        "heads": 16,
    },
    "wide values": {
        "topk": 20,
        "stage_keys": 16,
        "query_lens": (3,),
        "seq_lens": (30,),
        "dims": (272, 16, 24, 20),
        "mode": "eager",
    },
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """launched(stage_keys, mode): the backend's kernel runs so."""

    def run(stage_keys: int = 16, mode: DMAMode = "on_wait") -> None:
        interpret = interpreter(mode)
        monkeypatch.setattr(kernel, "STAGE_KEYS", stage_keys)
        call = functools.partial(kernel.mla_sparse_attention, interpret=interpret)
        static = ("kv_lora_rank", "scale")
        monkeypatch.setattr(pallas_mla_sparse, "_attend", jax.jit(call, static_argnames=static))

    return run


#: They notice every defect of `tests.testing.planted`.
KEPT = ("steps", "tiles")


@pytest.mark.parametrize("name", sampled(list(CASES), 2, "sparse mla attention", lambda name: name in KEPT))
def test_against_the_oracle(make_mla: Any, launched: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows attend what their indices name: in no order, with gaps, over several steps, or nothing."""
    case = dict(CASES[name])
    monkeypatch.setattr(kernel, "TILE", case.pop("tile", kernel.TILE))
    topk = case.pop("topk")
    launched(**{key: case.pop(key) for key in ("stage_keys", "mode") if key in case})
    batch = make_mla(**SPARSE, **case)
    indices, mask_of = choose(batch, topk)
    got, cache = batch.layer(*batch.arguments(), indices=indices)
    assert not interpret_pallas_call.races.races_found
    batch.check(got, cache, mask_of)


def test_a_key_that_is_listed_twice_counts_twice_and_no_other_is_read(make_mla: Any, launched: Any) -> None:
    """What no row names is NaN. The lists of a row go on after one without keys."""
    launched()
    batch = make_mla(**SPARSE, query_lens=(1, 1, 1), seq_lens=(20, 9, 12))
    indices = np.full((batch.metadata.slot_mapping.shape[0], 20), -1, np.int32)
    indices[0, [3, 9, 19]], indices[2, [0, 1]] = (4, 4, 11), (7, 2)
    named = np.concatenate([batch.slots_of(0)[[4, 11]], batch.slots_of(2)[[7, 2]]])
    assert not (named == 0).any()
    rows = batch.cache.reshape(-1, *batch.cache.shape[2:])
    batch.cache = jnp.full_like(rows, jnp.nan).at[named].set(rows[named]).reshape(batch.cache.shape)
    (out, lse), _ = batch.layer(*batch.arguments(), indices=jnp.asarray(indices))
    once = np.where(np.arange(20) == 9, -1, indices)
    (other, other_lse), _ = batch.layer(*batch.arguments(), indices=jnp.asarray(once))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert (np.asarray(lse)[:, 0] > np.asarray(other_lse)[:, 0] + 1e-3).all()
    assert not np.asarray(out[1], np.float32).any() and np.isneginf(np.asarray(lse)[:, 1]).all()
    np.testing.assert_array_equal(np.asarray(out[2], np.float32), np.asarray(other[2], np.float32))


def test_rows_that_overflow_smem() -> None:
    def attend(query: Any, cache: Any, indices: Any, *requests: Any) -> Any:
        rules: dict[str, Any] = {"kv_lora_rank": 512, "scale": 1.0, "chip": "v6e", "interpret": False}
        return kernel.mla_sparse_attention(query, cache, indices, xla.Requests(*requests), **rules)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((200_000, 16, 576), (9, 16, 3, 2, 128))]
    of_batch = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((200_000, 64), (2,), (1,), (1, 9))]
    with pytest.raises(ValueError, match="indices of 200000 rows take 1600004 bytes of SMEM"):
        jax.eval_shape(attend, *arrays, *of_batch)
