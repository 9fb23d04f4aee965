"""The TPU kernel in TPU interpret mode against the float64 oracle: races watched, uninitialised memory NaN (about 60
s).

Every slot of the cache that no request owns is NaN before the launch, and so are the slots that it is to write.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn import reference
from attn.jax.kernels.tpu import _pages, _plan
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.kernels.tpu._chips import CHIPS, RaggedBlocks, blocks_for
from attn.jax.kernels.tpu._refs import PagedConfig, PagedShape, RaggedConfig, widened, widened_exactly
from attn.jax.testing import DMAMode, compiling_fast, interpreter
from attn.visibility import BatchMask, LayerMask, Visibility
from tests.levels import sampled

#: decode over two kv blocks; a short chunk; a prefill over several; a request without rows; a decode within a block
QUERY_LENS, SEQ_LENS = (1, 5, 40, 0, 1), (70, 33, 100, 20, 16)
#: 8 kv heads of 4 query heads, pages of 128 tokens
SHAPE = PagedShape(2048, 1, 256, 1, 2, 8, 128, 128, 4, 2, 2)
BLOCKS = RaggedBlocks(kv_block=64, large=64, chunk=32, key_tile=16, row_tile=128, segment=16)


@dataclass
class Launch:
    """What a case gives the kernel, and what came back."""

    arrays: dict[str, Any]
    out: Any
    lse: Any
    before: tuple[Any, Any]
    after: tuple[Any, Any]
    seen: dict[str, Any]  # what rows see, with those of padding, as the oracle takes it


def launch(
    *,
    heads: tuple[int, int, int] = (8, 2, 128),
    page: int = 16,
    lens: tuple[tuple[int, ...], tuple[int, ...]] = (QUERY_LENS, SEQ_LENS),
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    gain: float = 1.0,
    mode: DMAMode = "on_wait",
    write: bool = True,
    blocks: RaggedBlocks = BLOCKS,
    padding: int = 3,
    hold_back: int = 0,
    same_page: tuple[tuple[int, int, int, int], ...] = (),
    chip: str = "v5e",
    seed: int = 0,
    strange: tuple[tuple[int, int, int, float], ...] = (),
    unused: float = np.nan,
    **rules: Any,
) -> Launch:
    num_heads, num_kv_heads, head_size = heads
    rng = np.random.default_rng(seed)
    query_lens, seq_lens = (np.array([*x, *[0] * padding], np.int32) for x in lens)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows, columns = int(starts[-1]) + padding, max(-(-m // page) for m in seq_lens) + 1
    num_blocks = len(seq_lens) * columns + 1
    ids = rng.permutation(num_blocks)
    table = np.full((len(seq_lens), columns), num_blocks + 7, np.int32)  # what is not used is not followed
    slots, live = np.full(rows, -1, np.int32), np.zeros((num_blocks, page), bool)
    for r, length in enumerate(seq_lens):
        used = -(-length // page)
        table[r, :used], ids = ids[:used], ids[used:]
        for _, column, other, place in [x for x in same_page if x[0] == r]:
            table[r, column] = table[other, place]
        position = np.arange(length)
        own = table[r, position // page] * page + position % page
        live.reshape(-1)[own] = True
        slots[starts[r] : starts[r + 1]] = own[length - query_lens[r] :]
    slots[int(starts[2]) : int(starts[2]) + hold_back] = -1

    element = jnp.dtype(cache_dtype or dtype)
    shape = kernel.cache_shape(num_blocks, page, num_kv_heads, head_size)
    spread = {"int8": 30.0}.get(element.name, 1.0)

    def draw(*extents: int) -> jax.Array:
        return jnp.asarray((rng.standard_normal(extents, np.float32) * spread).astype(element))

    key, value = draw(rows, num_kv_heads, head_size), draw(rows, num_kv_heads, head_size)
    flat = kernel.write(
        draw(num_blocks * page, num_kv_heads, head_size),
        draw(num_blocks * page, num_kv_heads, head_size),
        jnp.zeros(shape, element),
        jnp.arange(num_blocks * page),
    )
    if write:
        live.reshape(-1)[slots[slots >= 0]] = False
    if element.itemsize > 1:
        flat = jnp.asarray(np.where(live[:, None, None, :, None], flat, np.array(unused, element)))
    for plane, r, position, number in strange:  # in the last kv head
        place = int(table[r, position // page]), position % page
        if flat.shape[1] == 1:
            flat = flat.at[place[0], 0, -1, place[1], 5 + plane * head_size].set(number)
        else:
            flat = flat.at[place[0], plane, -1, place[1], 5].set(number)
    query = jnp.asarray((rng.standard_normal((rows, num_heads, head_size), np.float32) * gain).astype(jnp.dtype(dtype)))
    arrays = {"query": query, "key": key if write else None, "value": value if write else None, "kv_cache": flat}
    arrays |= {"query_start_loc": starts, "seq_lens": seq_lens, "block_table": table, "slot_mapping": slots}
    rules = {"scale": head_size**-0.5, "return_lse": True, **rules}
    by_request = {name: rules.pop(name) for name in ("causal", "prefix") if isinstance(rules.get(name), jax.Array)}
    seen = {name: jnp.pad(x, (0, padding)) for name, x in by_request.items()}
    if "spans" in rules:
        spans = rules.pop("spans")[:rows]
        seen["spans"] = jnp.pad(spans, ((0, rows - len(spans)), (0, 0)), constant_values=-1)
    causal = "causal" not in seen and rules.pop("causal", True)
    names = ("window", "chunk_size", "span_window")
    of_layer = LayerMask(causal, **{name: rules.pop(name) for name in names if name in rules})
    of_batch = BatchMask(rules.pop("tree_mask", None), *(seen.get(name) for name in ("spans", "prefix", "causal")))
    step = functools.partial(
        kernel.ragged_paged_attention,
        chip=chip,
        max_query_len=int(query_lens.max()),
        mask=of_layer,
        batch_mask=of_batch,
        blocks=blocks and blocks._replace(segment=max(page, blocks.segment)),
        interpret=interpreter(mode),
        **rules,
    )
    with compiling_fast():
        out, lse, cache = jax.jit(lambda arrays: step(**arrays))(arrays)
    assert not interpret_pallas_call.races.races_found
    views = (tuple(as_float(x)[..., :head_size] for x in kernel.keys_and_values(c)) for c in (flat, cache))
    return Launch(arrays, as_float(out), None if lse is None else np.asarray(lse), *views, seen)


def as_float(x: jax.Array) -> Any:
    return np.asarray(x).astype(np.float32)


def requests(got: Launch) -> dict[str, Any]:
    return {name: got.arrays[name] for name in ("query_start_loc", "seq_lens", "block_table")}


def check(got: Launch, **rules: Any) -> None:
    """The cache bit for bit; out and lse by the rules of the conformance suite; padding rows 0 and -inf."""
    arrays = got.arrays
    written = got.before
    if arrays["key"] is not None:
        new = (as_float(arrays[name]) for name in ("key", "value"))
        written = reference.write_kv(*new, *got.before, arrays["slot_mapping"])
    for cache, want in zip(got.after, written, strict=True):
        np.testing.assert_array_equal(cache, want)
    rules.pop("return_lse", None)
    rules |= {name: np.asarray(x) for name, x in got.seen.items()}
    out, lse = reference.paged_attention(as_float(arrays["query"]), *got.after, **requests(got), **rules)
    rows = int(arrays["query_start_loc"][-1])
    error = np.sqrt(np.mean((got.out[:rows] - out[:rows]) ** 2, axis=-1))
    size = np.sqrt(np.mean(out[:rows] ** 2, axis=-1))
    limit = 1e-5 if arrays["query"].dtype == jnp.float32 else 2.0**-7
    assert (error <= limit * (size + 1e-3)).all(), np.max(error / (size + 1e-3))
    assert not got.out[rows:].any()
    if got.lse is not None:
        np.testing.assert_allclose(got.lse[:, :rows], lse[:, :rows], atol=1e-4, rtol=1e-5)
        assert np.isneginf(got.lse[:, rows:]).all()


SLOPES = reference.alibi_slopes(8).astype(np.float32)
SINKS = np.linspace(-2, 6, 8, dtype=np.float32)
MIXED, PREFIX = np.array([True, False, True, False, False]), np.array([40, 3, 70, 30, 9], np.int32)
#: Of the rows of QUERY_LENS, and of a single more: two of a request's images meet, and rows between see nothing of the last.
SPANS = np.full((48, 2), -1, np.int32)
SPANS[0], SPANS[2:5], SPANS[8:20], SPANS[20:22], SPANS[30:46] = (41, 50), (29, 32), (62, 73), (74, 75), (84, 99)
SPANS[46:48] = (3, 9), (0, 15)
CASES: dict[str, dict[str, Any]] = {
    "leaping": {"mode": "eager", "gain": 60.0, "blocks": BLOCKS._replace(chunk=64)},
    # two blocks that every row sees, each in one step; one whose second half holds the diagonal
    "whole_blocks": {"mode": "eager", "lens": ((1, 40), (70, 201))},
    "float32": {"dtype": "float32", "alibi_slopes": SLOPES, "sinks": SINKS},
    # items whose last steps see 62, 30, 36, 64 and 8 keys
    "short_steps": {
        "lens": ((1, 70, 40), (70, 100, 72)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=64, last=32),
        "alibi_slopes": SLOPES,
    },
    # steps of two tiles, the second of which has masks: items end in either half of it, in the first tile and with a chunk; the
    # last one has a row that sees all keys of its steps
    "pairs": {
        "lens": ((1, 70, 40, 33), (70, 150, 100, 64)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=32, last=16, fused=2),
        "sinks": SINKS,
    },
    "pairs_repeated": {
        "mode": "eager",
        "gain": 60.0,
        "lens": ((64, 3), (96, 61)),
        "blocks": BLOCKS._replace(large=32, chunk=64, key_tile=32, fused=2),
    },
    # steps of up to four tiles, the last of which has masks, alone and after whole ones; items begin in a tile and between two
    "fused": {
        "lens": ((200, 40, 70), (200, 150, 155)),
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=128, key_tile=32, last=16, fused=4),
        "sinks": SINKS,
    },
    "fused_wide": {
        "mode": "eager",
        "heads": (4, 1, 512),
        "gain": 20.0,
        "lens": ((96, 1, 40), (116, 20, 64)),
        "blocks": BLOCKS._replace(kv_block=128, large=64, chunk=128, key_tile=32, fused=3),
    },
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
    # new rows fill two pages of the first request, which the last one sees too, none of the third, and two of the fourth
    "whole_pages": {
        "page": 32,
        "lens": ((70, 1, 40, 66, 3), (70, 33, 100, 100, 40)),
        "hold_back": 6,
        "same_page": ((4, 0, 0, 1),),
        "blocks": BLOCKS._replace(large=32),
    },
    # last pages that are read from the new rows: two tiles of them and a part, one, and whole tiles alone
    "last_pages": {
        "page": 64,
        "lens": ((150, 100, 112), (150, 164, 112)),
        "blocks": BLOCKS._replace(large=32, kv_block=128),
    },
    # one that another request sees, some of whose rows are older, beside a single whose own row is read from the cache
    "last_page_of_another": {
        "page": 32,
        "lens": ((90, 1, 32), (90, 33, 64)),
        "same_page": ((2, 0, 0, 2),),
        "mode": "eager",
        "blocks": BLOCKS._replace(large=32),
    },
    # items that share a block: the last step of the first one ends in a page that only the second one sees; two of a request
    # whose third has two blocks
    "shared_blocks": {
        "mode": "eager",
        "heads": (4, 1, 128),
        "lens": ((1, 70, 70), (70, 73, 130)),
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32),
    },
    "shared_blocks_of_a_window": {
        "heads": (4, 1, 128),
        "lens": ((70, 3), (73, 40)),
        "window": (60, None),
        "sinks": SINKS[:4],
        "blocks": BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32, last=16),
    },
    # tiles that all fit the ring, and are written after every key is loaded; a tile in the middle of a block, one in two pages,
    # and rows that are not written
    "late": {
        "page": 32,
        "lens": ((3, 1, 20, 1), (70, 33, 100, 129)),
        "padding": 1,
        "hold_back": 2,
        "blocks": BLOCKS._replace(large=32),
    },
    # a page with new rows that another request sees, whose keys are asked for before anything is attended
    "late_of_another": {
        "lens": ((20, 3), (36, 40)),
        "padding": 1,
        "same_page": ((1, 0, 0, 1),),
        "mode": "eager",
        "sinks": SINKS,
    },
    "whole_pages_of_a_single": {
        "page": 32,
        "lens": ((70, 1, 3), (70, 33, 40)),
        "same_page": ((1, 0, 0, 0), (2, 0, 0, 1)),
    },
}


#: Each alone notices a defect of `tests.testing.planted`.
KEPT = ("window", "bidirectional", "leaping", "fp8_by_hand", "int8", "chunks_of_a_window", "spans", "spans_of_a_window")
KEPT += (
    "short_steps",
    "pairs",
    "pairs_repeated",
    "fused",
    "whole_blocks",
    "whole_pages",
    "whole_pages_of_a_single",
    "last_pages",
    "last_page_of_another",
    "late",
    "late_of_another",
    "shared_blocks",
)


@pytest.mark.parametrize("name", sampled(list(CASES), 1, "ragged paged attention", lambda name: name in KEPT))
def test_against_the_oracle(name: str) -> None:
    case = CASES[name]
    arrays = {k: jnp.asarray(v) for k, v in case.items() if isinstance(v, np.ndarray | np.float32)}
    rules = {k: v for k, v in case.items() if k in reference.paged_attention.__kwdefaults__}
    check(launch(**{**case, **arrays}), **rules)


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


def test_rows_before_the_first_key_see_a_prefix_and_a_span() -> None:
    """No range by causality, and the prefix, which has none of its own without a window, does not give way to the span."""
    starts, lens, slots = jnp.array([0, 7]), jnp.array([5]), jnp.zeros(7, jnp.int32)
    seen = BatchMask(spans=jnp.tile(jnp.array([[3, 4]], jnp.int32), (7, 1)), prefix=jnp.array([1], jnp.int32))
    batch = _plan.Batch(starts, lens, jnp.zeros((1, 2), jnp.int32), slots, seen)
    query, cache = jax.ShapeDtypeStruct((7, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 16, 128), jnp.bfloat16)
    shape = _plan.shape_of(query, cache, batch, 7, LayerMask(), lse=False, write=False)
    cfg = PagedConfig(**vars(shape), kv_block=16, large=8, key_tile=16, slots=3)
    ranges = jax.jit(functools.partial(_plan.make, cfg))(batch).ranges
    np.testing.assert_array_equal(ranges[0, :4, 0], [0, 1, 3, 5])


def test_a_bound_beyond_every_key_is_none() -> None:
    """Added to a position in 32 bits it would overflow."""
    case = {"lens": ((5, 1), (33, 16)), "causal": False}
    got, want = (launch(**case, window=window) for window in ((2**31 - 1, 2**31 - 1), (None, None)))
    np.testing.assert_array_equal(got.out, want.out)


@pytest.mark.parametrize("seed", range(12))
def test_the_ranges_of_the_plan_are_what_rows_see(seed: int) -> None:
    """Rows before the first key and rows of no request included; what all rows of an item see, and what none does."""
    rng = np.random.default_rng(seed)
    lens, query_lens = rng.integers(0, 24, 5), rng.integers(0, 9, 5)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows = max(int(starts[-1]), 1) + 2
    first = rng.integers(0, np.maximum(np.repeat(lens, query_lens), 1))
    last = np.minimum(first + rng.integers(0, 6, len(first)), np.repeat(lens, query_lens) - 1)
    spans = np.full((rows, 2), -1, np.int32)
    spans[: len(first)] = np.where((rng.random(len(first)) < 0.6)[:, None], np.stack([first, last], axis=1), -1)
    window = [(None, None), (3, None), (3, 2), (None, 2)][seed % 4]
    layer = LayerMask(bool(rng.random() < 0.5), window, [None, None, 5][seed % 3], bool(seed % 2))
    prefix, flags = rng.integers(0, 20, 5).astype(np.int32), rng.random(5) < 0.5
    seen = BatchMask(None, spans, prefix if seed % 5 else None, None if layer.causal else flags)
    batch = _plan.Batch(
        *map(jnp.asarray, (starts, lens.astype(np.int32), np.zeros((5, 2), np.int32))), jnp.zeros(rows, jnp.int32)
    )
    batch = batch._replace(mask=seen.map(jnp.asarray))
    query, cache = jax.ShapeDtypeStruct((rows, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 16, 128), jnp.bfloat16)
    shape = _plan.shape_of(query, cache, batch, 8, layer, lse=False, write=False)
    cfg = PagedConfig(**vars(shape), kv_block=16, large=4, key_tile=16, slots=3)
    plan = jax.jit(functools.partial(_plan.make, cfg))(batch)
    items = np.asarray(plan.items).reshape(-1, cfg.num_items)
    assert len(items) == _plan.GAPS + 2 * (cfg.ranges - 1) and plan.ranges is not None
    key, met = np.arange(24), 0
    for i in range(int(plan.counts[0])):
        r = int(items[_plan.TABLE, i]) // cfg.columns
        offset = int(items[_plan.POSITION, i]) - (lens[r] - query_lens[r])
        number = min(4, query_lens[r] - offset)
        row, position = int(starts[r]) + offset + np.arange(number), int(items[_plan.POSITION, i]) + np.arange(number)
        want = Visibility(layer, seen).allowed(position[:, None], key, r, row[:, None]) & (key < lens[r])
        low, high = np.asarray(plan.ranges[i])[: 2 * cfg.ranges].reshape(-1, 2, 4).transpose(1, 2, 0)[:, :, :, None]
        got = ((key >= low) & (key < high)).any(axis=1)
        np.testing.assert_array_equal(got, np.pad(want, ((0, 4 - number), (0, 0))))
        bound = items[:, i]
        gaps = bound[_plan.GAPS :].reshape(-1, 2)
        inside = (key >= bound[_plan.LOW]) & (key < bound[_plan.HIGH])
        hidden = ~inside | ((key >= gaps[:, :1]) & (key < gaps[:, 1:])).any(axis=0)
        assert not got[:, hidden].any()
        assert want[:, (key >= bound[_plan.CLEAR]) & (key < bound[_plan.CLEAR_STOP])].all()
        assert bound[_plan.MORE] == (((key >= low) & (key < high))[:, 1:].any())
        met += number
    assert met == query_lens.sum()


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


def test_pages_are_loaded_once_for_items_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from HBM to VMEM of a page's size, counted where the interpreter executes them.

    Items of 32 rows see 1, 2 and 3 pages of the first request, and 4 and 5 of the second, whose last one has two blocks.
    """
    moved, real = {}, interpret_pallas_call.DMA.execute_read

    def read(dma: Any) -> None:
        real(dma)
        moved[dma.id] = dma.data_size if dma.src_memory_space != dma.dst_memory_space else 0

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", read)
    blocks = BLOCKS._replace(kv_block=128, large=32, chunk=64, key_tile=32, last=16)
    check(launch(heads=(4, 1, 128), page=32, lens=((70, 40), (70, 130)), blocks=blocks))
    page = 2 * 32 * 128 * 2
    assert list(moved.values()).count(page) == 3 + 4 + 5


def test_what_prompts_move() -> None:
    """16 prompts of 500 rows at the bandwidth of a v6e: 140 us, where 171 are too many for the goal of 150."""
    query_lens = jnp.full(16, 500, jnp.int32)
    starts = jnp.arange(17, dtype=jnp.int32) * 500
    table, slots = jnp.arange(16 * 16, dtype=jnp.int32).reshape(16, 16), jnp.zeros(8000, jnp.int32)
    batch = _plan.Batch(starts, query_lens, table, slots + 1)
    query, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8000, 32, 128), (256, 2, 8, 128, 128)))
    shape = _plan.shape_of(query, cache, batch, 500, LayerMask(), lse=False, write=True)
    sizes = vars(shape) | blocks_for("v6e", shape)._asdict()
    cfg = RaggedConfig(**(dict.fromkeys(RaggedConfig.__dataclass_fields__, False) | sizes))
    plan = jax.jit(functools.partial(_plan.make, cfg))(batch)
    items = np.asarray(plan.items).reshape(_plan.columns(cfg), -1)[:, : int(plan.counts[0])]
    number = np.arange(items.shape[1])
    # a block that items share is loaded for the first of them
    loads = number[items[_plan.GROUP] == number]
    pages = -(-items[_plan.HIGH, items[_plan.GROUP_LAST, loads]] // 128)
    row = 2 * 8 * 128 * 2
    moved = 2 * 8000 * 32 * 128 * 2 + 2 * 8000 * row + pages.sum() * 128 * row
    assert len(number) == 64 and pages.tolist() == [4] * 16
    assert 139 < moved / 1640e9 * 1e6 < 141


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


def test_the_rule_of_block_sizes() -> None:
    """Every chip's default fits its memory, and pages divide blocks."""
    for chip, limits in CHIPS.items():
        for heads, group, lanes in ((8, 4, 128), (32, 1, 128), (1, 71, 128), (8, 8, 256), (16, 1, 256)):
            for page in (16, 256):
                blocks = blocks_for(chip, PagedShape(4096, 1, 4096 // page, 4096, 2, heads, page, lanes, group, 2, 2, lse=True))
                kv = blocks.slots * 2 * heads * blocks.kv_block * lanes * 2
                assert kv < limits.vmem and blocks.kv_block % page == 0 and blocks.kv_block % blocks.chunk == 0
                assert blocks.large * group % blocks.row_tile == 0 and blocks.chunk % blocks.key_tile == 0
    with pytest.raises(ValueError, match="chip='v3' is unknown"):
        blocks_for("v3", SHAPE)


def test_blocks_of_decodes() -> None:
    """4,096 keys over all heads; 2,048 on a v7x where they fit and all requests have one row; of one byte on every chip, but
    not where heads are wider."""

    def keys(chip: str, max_query_len: int, heads: int, cache_itemsize: int = 2, lanes: int = 128) -> int:
        sizes = {"num_kv_heads": heads, "max_query_len": max_query_len, "cache_itemsize": cache_itemsize, "lanes": lanes}
        blocks = blocks_for(chip, dataclasses.replace(SHAPE, **sizes))
        assert blocks.slots * 2 * heads * blocks.kv_block * lanes * cache_itemsize < CHIPS[chip].vmem
        return blocks.kv_block

    assert [keys("v7x", 1, heads) for heads in (1, 2, 8, 32)] == [4096, 2048, 2048, 1024]
    assert [keys("v6e", n, heads) for n in (1, 2) for heads in (1, 2, 3, 4, 8)] == [4096, 2048, 1024, 1024, 1024] * 2
    assert [keys("v7x", 2, 8), keys("v6e", 1, 8), keys("v5e", 1, 8)] == [1024] * 3
    assert [keys(chip, n, 8, 1) for chip in ("v5e", "v7x") for n in (1, 2)] == [2048] * 4
    assert [keys("v6e", n, heads, 1, 256) for n in (1, 2) for heads in (1, 2, 8)] == [4096, 2048, 1024] * 2


def test_blocks_of_wide_heads() -> None:
    """Heads of 512 take no more bytes a block than those of 256, and no more products a stretch of code."""
    for chip in ("v5e", "v6e", "v7x"):
        for itemsize, heads, rows in itertools.product((2, 4), (1, 2, 8), (1, 300, 2048)):
            shape = dataclasses.replace(
                SHAPE, num_kv_heads=heads, max_query_len=rows, itemsize=itemsize, cache_itemsize=itemsize
            )
            narrow, wide = (blocks_for(chip, dataclasses.replace(shape, lanes=lanes)) for lanes in (256, 512))
            assert wide.kv_block == SHAPE.page or wide.kv_block * 512 <= narrow.kv_block * 256
            assert wide.stretch * 512 <= narrow.stretch * 256
            assert wide.slots * 2 * heads * wide.kv_block * 512 * itemsize < CHIPS[chip].vmem


def test_blocks_of_short_requests() -> None:
    """Singles share blocks, which are no longer than all of them; a block of others is no longer than what one may see."""

    def sizes(requests: int, max_query_len: int = 1, **more: Any) -> tuple[int, int, int]:
        shape = dataclasses.replace(SHAPE, num_requests=requests, max_query_len=max_query_len, **more)
        blocks = blocks_for("v6e", shape)
        return blocks.kv_block, blocks.segment, blocks.slots

    page, window = SHAPE.page, {"mask": LayerMask(window=(127, None)), "columns": 4096 // SHAPE.page}
    assert [sizes(n, **window) for n in (32, 2, 1)] == [(1024, 128, 3), (512, 128, 6), (256, 128, 8)]
    assert sizes(32, 2, **window)[0] == 512
    assert [sizes(n, columns=128 // page)[0] for n in (1, 4, 64)] == [128, 512, 1024]


def test_items_of_the_longest_requests() -> None:
    """1,024 rows on the chips that take them, and 2,048 there of one head, for queries of two bytes: in float32 a stretch
    that long compiles for minutes."""

    def blocks(chip: str, itemsize: int) -> RaggedBlocks:
        return blocks_for(chip, dataclasses.replace(SHAPE, max_query_len=2048, itemsize=itemsize, cache_itemsize=itemsize))

    for chip, rows in (("v5e", 512), ("v6e", 1024), ("v7x", 1024)):
        assert (blocks(chip, 2).large * 4, blocks(chip, 4).large * 4) == (rows, 512)
        assert blocks(chip, 4).stretch == blocks("v5e", 4).stretch
    one_head = dataclasses.replace(SHAPE, max_query_len=2048, num_kv_heads=1, group=8)
    assert [blocks_for(chip, one_head).large * 8 for chip in ("v5e", "v6e", "v7x")] == [512, 2048, 2048]
    # from sixteen smaller items on, and of wide heads from eight on, if their queries are at most 4 MiB
    for heads, lanes, rows in (
        (1, 256, (512, 512, 1024, 2048)),
        (1, 512, (512, 1024, 2048, 2048)),
        (2, 512, (512, 1024, 1024, 1024)),
        (4, 512, (512, 1024, 1024, 1024)),
        (8, 512, (512, 512, 1024, 1024)),
    ):
        shape = dataclasses.replace(one_head, num_kv_heads=heads, lanes=lanes)
        lengths = (448, 512, 1000, 2048)
        assert tuple(blocks_for("v6e", dataclasses.replace(shape, max_query_len=n)).large * 8 for n in lengths) == rows
        assert {blocks_for("v5e", dataclasses.replace(shape, max_query_len=n)).large * 8 for n in lengths} == {512}


def test_short_last_steps() -> None:
    """Of prompts of up to 16 items in two bytes: longer ones, single rows and float32 compile no other step."""

    def last(max_query_len: int, itemsize: int = 2, group: int = 4) -> int:
        sizes = {"max_query_len": max_query_len, "itemsize": itemsize, "group": group}
        return blocks_for("v6e", dataclasses.replace(SHAPE, **sizes)).last

    assert [last(n) for n in (1, 8, 512, 1024, 2048)] == [0, 128, 128, 128, 0]
    assert [last(512, itemsize=4), last(512, group=1)] == [0, 0]


def test_steps_of_several_tiles() -> None:
    """Where each row sees all before it: two where eight heads have 512 rows, up to four where fewer have as many or more."""

    def fused(max_query_len: int, **sizes: Any) -> int:
        return blocks_for("v6e", dataclasses.replace(SHAPE, max_query_len=max_query_len, **sizes)).fused

    assert [fused(n) for n in (1, 512, 2048)] == [1, 2, 1]
    assert [fused(2048, num_kv_heads=heads, group=8) for heads in (1, 2, 4)] == [4, 4, 2]
    masks = (LayerMask(False), LayerMask(True, window=(600, None)), LayerMask(True, chunk_size=600))
    assert {fused(512, mask=mask) for mask in masks} == {1} and fused(512, ranges=1) == 1
    assert [fused(1000, num_kv_heads=heads, lanes=512, group=8) for heads in (1, 2, 4)] == [4, 4, 2]
    assert fused(1000, num_kv_heads=1, lanes=512, group=8, itemsize=4, cache_itemsize=4) == 2


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
