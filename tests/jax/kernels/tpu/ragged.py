"""Calls of the ragged kernel in TPU interpret mode, judged by the float64 oracle: races watched, uninitialised memory NaN.

Every slot of the cache that no request owns is NaN before the launch, and so are the slots that it is to write.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from attn import reference
from attn.jax.kernels.tpu import ragged_paged_attention as kernel
from attn.jax.kernels.tpu._chips import RaggedBlocks
from attn.jax.testing import DMAMode, compiling_fast, interpreter
from attn.visibility import BatchMask, LayerMask

#: decode over two kv blocks; a short chunk; a prefill over several; a request without rows; a decode within a block
QUERY_LENS, SEQ_LENS = (1, 5, 40, 0, 1), (70, 33, 100, 20, 16)
BLOCKS = RaggedBlocks(kv_block=64, large=64, chunk=32, key_tile=16, row_tile=128, segment=16)


SLOPES = reference.alibi_slopes(8).astype(np.float32)
SINKS = np.linspace(-2, 6, 8, dtype=np.float32)


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


def check_case(case: dict[str, Any]) -> None:
    """Launch a case, arguments of `launch` with arrays of NumPy, and check what came back."""
    arrays = {k: jnp.asarray(v) for k, v in case.items() if isinstance(v, np.ndarray | np.float32)}
    rules = {k: v for k, v in case.items() if k in reference.paged_attention.__kwdefaults__}
    check(launch(**{**case, **arrays}), **rules)
