"""What rows see, what a cache holds and which numbers reach a row: the TPU kernel in TPU interpret mode against the float64
oracle (about 30 s).

Its blocks, steps and pages are `test_pages.py`'s, its plan and the rule of its block sizes `test_plan.py`'s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn import reference
from attn.jax.kernels.tpu import _pages, _plan
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.kernels.tpu._refs import RaggedConfig, widened, widened_exactly
from tests.jax.kernels.tpu.ragged import BLOCKS, SINKS, SLOPES, as_float, check, check_case, launch, requests
from tests.levels import sampled

MIXED, PREFIX = np.array([True, False, True, False, False]), np.array([40, 3, 70, 30, 9], np.int32)
#: Of the rows of QUERY_LENS, and of a single more: two of a request's images meet, and rows between see nothing of the last.
SPANS = np.full((48, 2), -1, np.int32)
SPANS[0], SPANS[2:5], SPANS[8:20], SPANS[20:22], SPANS[30:46] = (41, 50), (29, 32), (62, 73), (74, 75), (84, 99)
SPANS[46:48] = (3, 9), (0, 15)
CASES: dict[str, dict[str, Any]] = {
    "leaping": {"mode": "eager", "gain": 60.0, "blocks": BLOCKS._replace(chunk=64)},
    "float32": {"dtype": "float32", "alibi_slopes": SLOPES, "sinks": SINKS},
    "window": {
        "window": (30, None),
        "logits_soft_cap": 5.0,
        "heads": (4, 4, 64),
        "sinks": SINKS[::2],
        "blocks": BLOCKS._replace(large=128),
    },
    "bidirectional": {
        "causal": False,
        "window": (30, 9),
        "heads": (6, 2, 80),
        "page": 32,
        "alibi_slopes": SLOPES[:6],
        "return_lse": False,
        "blocks": BLOCKS._replace(large=128),
    },
    # of four pages; cut by a window, some rows of an item in the next one; of less than a block, with later keys
    "chunks": {"chunk_size": 64, "alibi_slopes": SLOPES},
    "chunks_of_a_window": {"chunk_size": 100, "window": (90, None), "lens": ((1, 64), (70, 130)), "mode": "eager"},
    "chunks_both_ways": {"chunk_size": 48, "causal": False, "blocks": BLOCKS._replace(chunk=64)},
    "mixed_causality": {"causal": MIXED, "window": (20, 4), "alibi_slopes": SLOPES},
    # singles with three ranges, two of which meet only through the third; between the others are whole blocks, steps and pages
    "spans": {
        "spans": SPANS,
        "prefix": PREFIX,
        "window": (5, None),
        "alibi_slopes": SLOPES,
        "lens": ((1, 5, 40, 1, 1), (170, 33, 260, 300, 16)),
        "blocks": BLOCKS._replace(large=32),
    },
    "spans_of_a_window": {"spans": SPANS, "window": (30, 7), "span_window": True, "causal": MIXED, "mode": "eager"},
    "spans_in_chunks": {"spans": SPANS, "prefix": PREFIX, "chunk_size": 24, "blocks": BLOCKS._replace(large=32, chunk=16)},
    "shared": {"write": False, "heads": (2, 1, 256), "alibi_slopes": SLOPES[:2], "causal": False},
    "held_back": {"hold_back": 5, "heads": (8, 1, 192), "page": 64, "sinks": SINKS},
    "fp8": {
        "cache_dtype": "float8_e5m2",
        "blocks": BLOCKS._replace(key_tile=32),
        "k_scale": np.float32([0.5, 0.25]),
        "v_scale": np.float32([2, 3]),
    },
    "fp8_by_hand": {
        "cache_dtype": "float8_e4m3fn",
        "chip": "v6e",
        "lens": ((1, 1), (100, 70)),
        "window": (40, None),
        "alibi_slopes": SLOPES,
        "blocks": BLOCKS._replace(large=0),
    },
    "wide": {"heads": (4, 1, 512), "sinks": SINKS[:4], "logits_soft_cap": 5.0, "mode": "eager", "window": (60, None)},
    "wide_fp8": {"heads": (4, 2, 512), "cache_dtype": "float8_e4m3fn", "chip": "v6e", "blocks": BLOCKS._replace(key_tile=32)},
    "wide_int8": {
        "heads": (2, 2, 512),
        "cache_dtype": "int8",
        "page": 32,
        "causal": False,
        "alibi_slopes": SLOPES[:2],
        "blocks": BLOCKS._replace(large=128),
    },
    "wide_by_the_rule": {"heads": (8, 1, 512), "lens": ((1, 30, 3), (70, 300, 40)), "blocks": None},
    "fp8_of_one_page": {"cache_dtype": "float8_e5m2", "lens": ((1, 3), (5, 9)), "blocks": None, "padding": 1},
    "int8": {"cache_dtype": "int8", "page": 32, "k_scale": np.float32(0.05), "v_scale": np.float32(0.03), "hold_back": 5},
}


#: Each alone notices a defect of `tests.testing.planted`.
KEPT = ("window", "bidirectional", "leaping", "fp8_by_hand", "int8", "chunks_of_a_window", "spans", "spans_of_a_window")


@pytest.mark.parametrize("name", sampled(list(CASES), 1, "ragged paged attention", lambda name: name in KEPT))
def test_against_the_oracle(name: str) -> None:
    check_case(CASES[name])


#: Of blocks that several requests share: ends within a segment, at its end and at the block's; windows that begin in its
#: first segment and in a later one; requests without keys; more requests than places for their sums; a block that is of one
#: request, which begins in the middle of it; pages less than a hardware tile, and a request that is done again. If unused
#: slots are not NaN no other request is, and masks alone hide them. "full" has as many requests as the plan has items, in a
#: program for long requests too, which asks for blocks of items after the line's.
LINES: dict[str, dict[str, Any]] = {
    "bfloat16": {"lens": ((1, 1, 1, 0, 1, 1, 1), (70, 33, 32, 20, 128, 1, 16)), "sinks": SINKS},
    "packed": {"lens": ((1, 1, 1), (97, 31, 64)), "heads": (8, 4, 64), "window": (40, None), "unused": 50.0},
    "narrow": {
        "lens": ((1, 1, 1), (40, 97, 31)),
        "cache_dtype": "float8_e4m3fn",
        "chip": "v6e",
        "strange": ((0, 1, 95, np.nan),),
    },
    "int8": {"lens": ((1, 1, 1), (100, 200, 64)), "cache_dtype": "int8", "page": 32, "window": (150, None)},
    "float32": {
        "lens": ((1,) * 7, (16, 3, 17, 100, 1, 30, 33)),
        "dtype": "float32",
        "mode": "eager",
        "alibi_slopes": SLOPES,
        "unused": 50.0,
    },
    "full": {"lens": ((1, 1, 1), (16, 16, 32)), "padding": 0, "blocks": BLOCKS},
}


@pytest.mark.parametrize("name", sampled(list(LINES), 1, "lines of singles", lambda name: name not in ("bfloat16", "narrow")))
def test_requests_that_share_blocks(name: str) -> None:
    case = LINES[name]
    arrays = {k: jnp.asarray(v) for k, v in case.items() if isinstance(v, np.ndarray)}
    rules = {k: v for k, v in case.items() if k in reference.paged_attention.__kwdefaults__}
    got = launch(**{"blocks": BLOCKS._replace(large=0, kv_block=128 if name == "int8" else 64), **case, **arrays})
    if "strange" not in case:
        return check(got, **rules)
    assert np.isnan(got.out[1]).any()
    assert np.isfinite(got.out[[0, 2]]).all()


STRANGE: dict[str, dict[str, Any]] = {
    # keys and values of a single and of a long request, hidden from some of the rows of its step
    "bfloat16": {"strange": ((0, 0, 3, np.nan), (1, 4, 2, -np.inf), (1, 2, 75, np.nan), (0, 2, 80, np.inf))},
    "packed": {"heads": (8, 4, 64), "strange": ((0, 0, 40, np.nan), (1, 4, 2, np.inf), (1, 2, 70, np.inf), (0, 2, 85, np.nan))},
    "e4m3": {
        "cache_dtype": "float8_e4m3fn",
        "chip": "v6e",
        "strange": ((0, 0, 3, np.nan), (1, 4, 2, np.nan), (1, 2, 75, np.nan)),
        "blocks": BLOCKS._replace(key_tile=32),
    },
    # in keys between a row's ranges: within a block that it sees a part of, and in one that is not loaded
    "gaps": {
        "lens": ((1, 1, 20), (170, 33, 90)),
        "strange": ((1, 0, 43, np.nan), (0, 0, 100, np.nan), (1, 1, 20, np.inf), (1, 2, 15, np.nan), (1, 2, 75, -np.inf)),
        "prefix": np.array([40, 21, 9], np.int32),
        "window": (5, None),
    },
}


@pytest.mark.parametrize("name", sampled(list(STRANGE), 1, "numbers that are not finite", lambda name: name == "gaps"))
def test_nonfinite_values_reach_only_the_rows_that_attend_to_them(name: str) -> None:
    """NaN and infinity reach exactly the rows and heads that see them; the others are as accurate as ever."""
    case = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in STRANGE[name].items()}
    got = launch(**case, write=False, scale=0.1)
    arrays, rules = got.arrays, {"window": case.get("window", (None, None)), **{k: np.asarray(x) for k, x in got.seen.items()}}
    out, lse = reference.paged_attention(as_float(arrays["query"]), *got.after, **requests(got), **rules, scale=0.1)
    rows = int(arrays["query_start_loc"][-1])
    fine = np.isfinite(out[:rows]).all(axis=-1)
    assert not fine.all()
    np.testing.assert_array_equal(np.isfinite(got.out[:rows]).all(axis=-1), fine)
    np.testing.assert_allclose(got.out[:rows][fine], out[:rows][fine], atol=2e-2)
    clear = np.isfinite(lse[:, :rows])
    np.testing.assert_allclose(got.lse[:, :rows][clear], lse[:, :rows][clear], atol=1e-4, rtol=1e-5)


def test_trees() -> None:
    """Requests no longer than the tree obey it, a single row included; a longer one is causal."""
    rng = np.random.default_rng(1)
    lens = ((5, 1, 30, 1), (40, 33, 30, 20))
    tree = np.tril(rng.random((7, 5, 5)) < 0.5) | np.eye(5, dtype=bool)
    tree[3, 0, 0] = False
    check(launch(lens=lens, tree_mask=jnp.asarray(tree)), tree_mask=tree)


def test_trees_with_spans() -> None:
    """A span adds keys to those of the tree, and the tree's edges stay in force outside of it."""
    tree = np.broadcast_to(np.eye(5, dtype=bool) | (np.arange(5) == 0), (7, 5, 5)).copy()
    tree[3, 0, 0] = False
    spans = np.full((37, 2), -1, np.int32)
    spans[1], spans[2], spans[5], spans[10:20], spans[36] = (37, 39), (3, 4), (2, 8), (4, 13), (19, 19)
    lens, prefix = ((5, 1, 30, 1), (40, 33, 30, 20)), np.array([3, 0, 2, 0], np.int32)
    rules = {"tree_mask": tree, "spans": spans, "prefix": prefix, "window": (9, None)}
    check(launch(lens=lens, **{k: v if k == "window" else jnp.asarray(v) for k, v in rules.items()}), **rules)


def test_a_bound_beyond_every_key_is_none() -> None:
    """Added to a position in 32 bits it would overflow."""
    case = {"lens": ((5, 1), (33, 16)), "causal": False}
    got, want = (launch(**case, window=window) for window in ((2**31 - 1, 2**31 - 1), (None, None)))
    np.testing.assert_array_equal(got.out, want.out)


def test_e4m3_codes_as_another_format() -> None:
    """Every code is 16 times less, exactly; the two NaN codes, and no other, are reported."""
    codes = np.arange(256, dtype=np.uint8)
    rows = np.repeat(codes.reshape(8, 32)[:, :, None], 128, axis=2)
    as_e4m3 = jax.lax.bitcast_convert_type(jnp.asarray(rows), jnp.float8_e4m3fn)
    cfg = RaggedConfig(**{**dict.fromkeys(RaggedConfig.__dataclass_fields__, 1), "rebiased": True})

    def body(x: Any, y: Any, exact: Any, lost: Any) -> None:
        for n in range(8):
            lost[n] = jnp.zeros((8, 128), jnp.int32)
            y[n] = widened(cfg, x[n], jnp.bfloat16, lost.at[n])
            exact[n] = widened_exactly(cfg, x[n])

    shapes = [jax.ShapeDtypeStruct((8, 32, 128), x) for x in (jnp.bfloat16, jnp.float32)]
    shapes.append(jax.ShapeDtypeStruct((8, 8, 128), jnp.int32))
    got, exact, lost = pl.pallas_call(body, out_shape=shapes, interpret=pltpu.InterpretParams())(as_e4m3)
    want = as_float(as_e4m3) / 16
    is_nan = np.isnan(want)
    np.testing.assert_array_equal(as_float(got)[~is_nan], want[~is_nan])
    np.testing.assert_array_equal(np.asarray(exact), want)
    np.testing.assert_array_equal(np.asarray(lost).any(axis=(1, 2)), is_nan.any(axis=(1, 2)))


def test_what_is_planted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is not waited for is a race, or NaN; a block id out of bounds raises."""
    lens, decode = ((1, 1), (100, 70)), BLOCKS._replace(large=0)
    real = _pages.wait
    with monkeypatch.context() as planted:
        planted.setattr(_pages, "wait", lambda copies: None if len(copies) == 1 else real(copies))
        with pytest.raises(AssertionError):
            check(launch(lens=lens, blocks=decode, return_lse=False))
    assert _plan.TABLE == 0
    real_make = _plan.make

    def astray(*args: Any, **kwargs: Any) -> Any:
        plan = real_make(*args, **kwargs)
        return plan._replace(items=plan.items.at[0].add(3))  # the first item reads past its request's used columns

    monkeypatch.setattr(_plan, "make", astray)
    with pytest.raises(Exception, match="(?i)out.of.bounds"):
        launch(lens=lens, blocks=decode)


def test_as_many_rows_as_the_query_has() -> None:
    """Where nothing is written, as in cross attention, the number of slots does not matter."""
    query, cache = jax.ShapeDtypeStruct((5, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 16, 128), jnp.bfloat16)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (2,), (2, 1), (8,)))
    step = functools.partial(kernel.ragged_paged_attention, scale=1.0, max_query_len=4, return_lse=True)
    out, lse, _ = jax.eval_shape(lambda q, kv, *rest: step(q, None, None, kv, *rest), query, cache, *arrays)
    assert (out.shape, lse.shape) == (query.shape, (4, 5))


def test_tables_that_overflow_smem() -> None:
    with pytest.raises(ValueError, match="bytes of SMEM"):
        jax.eval_shape(
            lambda q, kv, starts, lens, table, slots: kernel.ragged_paged_attention(
                q, None, None, kv, starts, lens, table, slots, scale=1.0, chip="v6e", max_query_len=1
            ),
            *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 8, 128), (9, 2, 2, 16, 128))),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((257,), (256,), (256, 2048), (256,))),
        )
