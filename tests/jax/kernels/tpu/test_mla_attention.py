"""PALLAS_MLA and its TPU kernel in TPU interpret mode against the float64 oracle: races watched, uninitialised memory NaN
(about 40 s).

Every slot of the cache that no request owns is NaN before the launch, and so are the slots that it is to write.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from attn.jax.backends.mla import pallas_mla
from attn.jax.kernels.tpu import _mla_kernel
from attn.jax.kernels.tpu import mla_attention as kernel
from attn.jax.kernels.tpu._chips import CHIPS
from attn.jax.kernels.tpu._plan import Batch
from attn.jax.kernels.tpu._refs import PagedShape
from attn.jax.kernels.tpu.mla_attention import MLABlocks, MLAParams, blocks_for
from attn.jax.testing import DMAMode, interpreter
from attn.testing import run_case
from attn.testing.case import Case
from attn.testing.conformance import candidate_of
from tests.levels import sampled

#: decode over two kv blocks; a short chunk; a prefill over several; a request without rows; a decode within a block
LENS = (1, 5, 20, 0, 1), (70, 33, 80, 20, 40)
DECODES = (1, 1, 1), (70, 64, 3)
LAST_SEEN = (1, 5, 20, 1), (70, 33, 96, 40)  #: the rows of one see all keys of their last step, without causality
BLOCKS = MLABlocks(kv_block=64, large=8, single_tile=16, key_tile=16, slots=3)
WIDE = (144, 16, 24, 20)  #: values of two registers' lanes, rows of two as well

#: Of bfloat16 and 16 heads, where they do not say otherwise.
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "heads": 4, "mode": "eager"},
    "bfloat16": {"blocks": BLOCKS._replace(large=4), "dims": WIDE},
    "six heads, e5m2": {
        "kv_cache_dtype": "fp8_e5m2",
        "k_scale": 0.5,
        "heads": 6,
        "page": 32,
        "causal": False,
        "mode": "eager",
        "lens": LAST_SEEN,
    },
    "fp8": {"kv_cache_dtype": "fp8", "k_scale": 0.02, "page": 32, "chip": "v6e", "blocks": BLOCKS._replace(large=2)},
    "blocks of rows": {"kv_cache_dtype": "fp8", "page": 32, "chip": "v6e", "blocks": BLOCKS._replace(large=16)},
    "whole pages": {"page": 32, "lens": ((70, 1, 40), (70, 33, 100))},
    "decode": {"lens": DECODES, "blocks": BLOCKS._replace(large=0)},
    # blocks that are seen as a whole start the copies of the next one at their end
    "decodes of several blocks": {"lens": ((1, 1), (200, 130)), "mode": "eager", "blocks": BLOCKS._replace(large=0)},
    # items of as many tokens as the longest request has: score matrices of 256 rows and one of 64
    "rows of one request": {"lens": ((20, 3), (20, 60)), "page": 16, "blocks": BLOCKS._replace(large=20)},
    "deepseek": {"lens": ((4, 4), (40, 21)), "dims": (512, 64, 128, 128), "blocks": BLOCKS._replace(large=4)},
}


def make(make_mla: Any, lens: Any = LENS, **more: Any) -> Any:
    return make_mla(*lens, backend="PALLAS_MLA", **more)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """launched(blocks, mode, chip): the backend's kernel runs so."""

    def run(blocks: MLABlocks = BLOCKS, mode: DMAMode = "on_wait", chip: str = "v5e") -> None:

        def step(*arrays: Any, rules: MLAParams, k_scale: Any) -> Any:
            how = {"interpret": interpreter(mode), "chip": chip, "k_scale": k_scale}
            return kernel.mla_attention(*arrays, rules._replace(blocks=blocks), **how)

        step = jax.jit(step, static_argnames="rules")
        monkeypatch.setattr(pallas_mla, "_attend", lambda *args, k_scale: step(*args[:-1], rules=args[-1], k_scale=k_scale))

    return run


#: They notice the defects of `tests.testing.planted`.
KEPT = ("fp8", "decodes of several blocks")


@pytest.mark.parametrize("name", sampled(list(CASES), 1, "mla attention", lambda name: name in KEPT))
def test_against_the_oracle(make_mla: Any, launched: Any, name: str) -> None:
    case = {"dtype": "bfloat16", "heads": 16, **CASES[name]}
    launched(**{key: case.pop(key) for key in ("blocks", "mode", "chip") if key in case})
    batch = make(make_mla, **case)
    got, cache = batch.layer(*batch.arguments())
    assert not interpret_pallas_call.races.races_found
    batch.check(got, cache)


def test_slots_without_a_token_repeat_nothing(make_mla: Any, launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are NaN, and so a request that reads them without zeroing them is repeated, which is slow."""
    monkeypatch.setattr(_mla_kernel, "_exact", lambda *args: None)
    launched()
    batch = make(make_mla)
    batch.check(*batch.layer(*batch.arguments()))


def test_nan_reaches_the_rows_that_see_it(make_mla: Any, launched: Any) -> None:
    launched()
    batch = make(make_mla, ((5, 1, 3), (20, 9, 12)))
    batch.kv_c[2, 3], batch.kv_c[4, 5] = np.nan, np.inf
    (out, _), cache = batch.layer(*batch.arguments())
    got, want = np.asarray(out[:9]), batch.expected(cache)[0]
    lost = np.arange(9)[~np.isfinite(got).all(axis=(1, 2))]
    np.testing.assert_array_equal(lost, [2, 3, 4])
    seen = [0, 1, 5, 6, 7, 8]  # the last three are in the tile of rows that the first request's repetition writes
    np.testing.assert_allclose(got[seen], want[seen], atol=1e-3)


def test_nan_of_a_later_item_reaches_no_row_before(make_mla: Any, launched: Any) -> None:
    """Rows 0 to 7 are an item that reads the keys of the others."""
    launched()
    batch = make(make_mla, ((12,), (12,)))
    batch.kv_c[10, 3] = np.nan
    (out, _), cache = batch.layer(*batch.arguments())
    got, want = np.asarray(out[:12]), batch.expected(cache)[0]
    assert np.isnan(got[10:]).any(axis=(1, 2)).all()
    np.testing.assert_allclose(got[:10], want[:10], atol=1e-3)


def test_scores_that_grow(make_mla: Any, launched: Any) -> None:
    """Scores so much larger than the first tile's that sums of exponentials relative to those are infinite."""
    launched(BLOCKS._replace(large=8))
    batch = make(make_mla, ((1, 6), (60, 60)))
    last = np.concatenate([batch.slots_of(0)[40:59], batch.slots_of(1)[40:54]])
    batch.cache = batch.cache.reshape(-1, batch.cache.shape[-1]).at[last].multiply(300).reshape(batch.cache.shape)
    got, cache = batch.layer(*batch.arguments())
    out, lse = batch.expected(cache)
    assert np.max(lse) > 200
    np.testing.assert_allclose(np.asarray(got[1])[:, : len(batch.q)], lse, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(got[0])[: len(batch.q)], out, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v7x", marks=pytest.mark.full)])
def test_strange_codes(make_mla: Any, launched: Any, chip: str) -> None:
    """-0 is 0, and a NaN reaches the request that has it, whether the matrix unit reads codes as another format or not."""
    launched(BLOCKS._replace(large=0), chip=chip)
    batch = make(make_mla, DECODES, dtype="bfloat16", heads=16, page=32, kv_cache_dtype="fp8")
    codes = np.array(jax.lax.bitcast_convert_type(batch.cache, jnp.uint8)).reshape(-1, batch.cache.shape[-1])
    codes[batch.slots_of(0)[:40], ::3] = 0x80
    codes[batch.slots_of(1)[5], 7] = 0xFF
    batch.cache = jax.lax.bitcast_convert_type(jnp.asarray(codes.reshape(batch.cache.shape)), batch.cache.dtype)
    (out, _), cache = batch.layer(*batch.arguments())
    want, got = batch.expected(cache)[0], np.asarray(out, np.float32)[:3]
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[[0, 2]], want[[0, 2]], atol=2e-2)


def test_nothing_is_written_without_new_rows(make_mla: Any, launched: Any) -> None:
    """A layer that shares another's cache."""
    launched(BLOCKS._replace(large=0))
    batch = make(make_mla, DECODES)
    q, kv_c, k_pe, cache, metadata = batch.arguments()
    got, written = batch.layer(q, kv_c, k_pe, cache, metadata)
    again, kept = batch.layer(q, None, None, written, metadata)
    np.testing.assert_array_equal(kept, written)
    np.testing.assert_array_equal(again[0], got[0])


def test_the_defaults_run(make_mla: Any) -> None:
    """No chip, no blocks: the interpreter with the rule's sizes."""
    batch = make(make_mla, ((1, 3), (20, 9)))
    batch.check(*batch.layer(*batch.arguments()))


def test_what_is_planted_is_caught(make_mla: Any, launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is not waited for is a race, or NaN; a block id out of bounds raises."""
    real = kernel._plan.make

    def astray(*args: Any, **kwargs: Any) -> Any:
        plan = real(*args, **kwargs)
        return plan._replace(items=plan.items.at[0].add(4))  # the first item reads past its request's used columns

    launched(BLOCKS._replace(large=0))
    batch = make(make_mla, DECODES)
    batch.common.block_table[0, -1] = 10**6
    monkeypatch.setattr(kernel._plan, "make", astray)
    bad = batch.layer.backend.get_builder_cls()(batch.layer.kv_cache_spec).build(0, batch.common, fast_build=True)
    with pytest.raises(Exception, match="(?i)out.of.bounds"):
        batch.layer(*batch.arguments()[:4], bad)


def test_the_rule_of_block_sizes() -> None:
    """Every chip's default fits its memory, pages divide blocks and row tiles items."""
    for chip, limits in CHIPS.items():
        for heads in (16, 32, 64, 128):
            for page in (16, 256):
                blocks = blocks_for(chip, PagedShape(4096, 1, 4096 // page, 4096, 1, 1, page, 640, heads, 2, 2))
                assert blocks.slots * blocks.kv_block * 640 * 2 < limits.vmem // 2 or chip == "v4"
                for tile in (blocks.single_tile, blocks.key_tile):
                    assert blocks.kv_block % tile == 0 and tile % page == 0

    def keys(chip: str, cache_itemsize: int, requests: int = 64, max_query_len: int = 1) -> int:
        shape = PagedShape(64, requests, 64, max_query_len, 1, 1, 128, 640, 128, max(cache_itemsize, 2), cache_itemsize)
        return blocks_for(chip, shape).kv_block

    assert [keys(chip, 1) for chip in ("v4", "v6e", "v7x")] == [2048, 4096, 4096]
    assert [keys("v6e", 2), keys("v7x", 2), keys("v7x", 4)] == [2048, 4096, 2048]
    assert [keys("v7x", size, 7) for size in (1, 2)] == [keys("v7x", size, 64, 2) for size in (1, 2)] == [2048] * 2
    with pytest.raises(ValueError, match="chip='v3' is unknown"):
        blocks_for("v3", PagedShape(1, 1, 1, 1, 1, 1, 16, 640, 16, 2, 2))


def test_items_have_no_more_rows_than_requests() -> None:
    """Rows that no request has are loaded, multiplied and stored as others are."""
    shapes = [
        PagedShape(100, 1, 16, longest, 1, 1, 128, 640, heads, 2, 2)
        for longest, heads in ((17, 16), (3, 128), (5, 6), (99, 16))
    ]
    assert [blocks_for("v6e", shape).large for shape in shapes] == [17, 3, 8, 64]


def test_tables_that_overflow_smem() -> None:
    with pytest.raises(ValueError, match="bytes of SMEM"):
        jax.eval_shape(
            lambda q, kv, *batch: kernel.mla_attention(q, None, kv, Batch(*batch), MLAParams(512, 1.0, 1), chip="v6e"),
            *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 16, 576), (9, 16, 640))),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((257,), (256,), (256, 2048), (256,))),
        )


def test_equal_scores_far_below_zero_give_exact_values() -> None:
    """Steps that every row sees whole have no mask between the scale of scores and the subtraction of their maximum."""
    mla = {"head_size": 192, "num_heads": 16, "num_kv_heads": 1, "mla": (128, 32, 64, 32), "block_size": 128, "lse": True}
    case = Case("far", dtype="bfloat16", query_lens=(40, 1), seq_lens=(1400, 700), inputs="far", **mla)  # type: ignore[arg-type]
    assert list(run_case(candidate_of("PALLAS_MLA").backend, case)) == []
