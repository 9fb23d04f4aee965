"""The parts of tpu-inference's interface that `attn` uses, checked on the installed `tpu_inference`: the stand-in in tests, the
real one in `benchmarks/tpu_inference_cpu.py`.

The stand-in's signatures are the documentation. Batches go through the engine's own call, without an engine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attn import reference
from tests.integrations import vllm_interface

STANDIN = Path(__file__).parents[1] / "standins" / "tpu_inference_pkg"
_COMMON = "tpu_inference.layers.common"
MODULES = (
    f"{_COMMON}.attention_backend",
    f"{_COMMON}.attention_metadata",
    f"{_COMMON}.attention_interface",
    "tpu_inference.layers.vllm.backends.flash_attn",
    "tpu_inference.runner.tpu_runner",
)
PAGE, BLOCKS, SLOTS, COLUMNS = 16, 24, 4, 4
AXES = ("data", "attn_dp", "attn_dp_expert", "expert", "model", "dcp", "pcp")


def drift() -> list[str]:
    """What the installed tpu-inference has otherwise than documented."""
    return vllm_interface.drift(STANDIN, MODULES)


def mesh(**extents: int) -> Mesh:
    """A mesh of the engine's axes over this host's devices."""
    shape = [extents.get(axis, 1) for axis in AXES]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


class Case(NamedTuple):
    """A layer, and the reference's terms for it.

    heads: query heads, kv heads, head size. stored: the cache's dtype. call: arguments of `attention`. terms: those of the
    reference. without: the terms of the control, which drops the feature.
    """

    what: str
    heads: tuple[int, int, int] = (4, 2, 128)
    dtype: str = "float32"
    stored: str = "float32"
    call: dict[str, Any] = {}
    terms: dict[str, Any] = {}
    without: dict[str, Any] | None = None


SINKS = np.linspace(1, 4, 4, dtype=np.float32)
CASES = (
    Case("a causal layer", without={"causal": False}),
    Case("heads of 64", (4, 2, 64), terms={"scale": 64**-0.5}, without={"scale": 0.5 * 64**-0.5}),
    Case("heads of 80, one kv head", (4, 1, 80), without={"causal": False}),
    Case("a window of 7", call={"attention_chunk_size": 7}, terms={"window": (6, 0)}, without={}),
    Case("a soft cap", call={"attn_logits_soft_cap": 0.5}, terms={"logits_soft_cap": 0.5}, without={}),
    Case("sinks", call={"sinks": SINKS}, terms={"sinks": SINKS}, without={}),
    Case(
        "heads of 64, sinks, a window of 9",
        (4, 2, 64),
        call={"attention_chunk_size": 9, "sinks": SINKS},
        terms={"window": (8, 0), "sinks": SINKS},
        without={"window": (8, 0)},
    ),
    Case(
        "no causal mask, a window of 9",
        call={"use_causal_mask": False, "attention_chunk_size": 9},
        terms={"causal": False, "window": (8, None)},
        without={"window": (8, 0)},
    ),
    Case("a scale of the model", call={"sm_scale": 0.3}, terms={"scale": 0.3}, without={}),
    Case("bfloat16", dtype="bfloat16", stored="bfloat16", without={"causal": False}),
    Case("an fp8 cache", stored="float8_e4m3fn", call={"k_scale": 0.03, "v_scale": 0.02}, without={"causal": False}),
    Case("an int8 cache", stored="int8", call={"k_scale": 0.04, "v_scale": 0.02}, without={"causal": False}),
)


def metadata(query_lens: list[int], seq_lens: list[int], shards: int = 1, causal: bool = True) -> tuple[Any, np.ndarray]:
    """The engine's batch of the same requests on each of `shards` data shards, and its table [SLOTS, COLUMNS] of blocks.

    Entries past the requests hold garbage: `request_distribution` says how many there are.
    """
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata

    live = len(query_lens)
    table = np.full((SLOTS, COLUMNS), 7, np.int32)
    table[:live] = (np.arange(COLUMNS)[None] * live + np.arange(live)[:, None] + 1) % BLOCKS
    lens = np.array([*seq_lens, *[99] * (SLOTS - live)], np.int32)
    starts = np.array([*np.cumsum([0, *query_lens]), *[3] * (SLOTS - live)], np.int32)
    decodes = sum(n == 1 for n in query_lens)
    fields = {
        "block_tables": table.ravel(),
        "seq_lens": lens,
        "query_start_loc": starts,
        "request_distribution": np.array([decodes, decodes, live], np.int32),
    }
    batch = AttentionMetadata(
        input_positions=jnp.zeros(0, jnp.int32),
        use_causal_mask=causal,
        **{name: jnp.asarray(np.tile(array, shards)) for name, array in fields.items()},
    )
    return batch, table


def encode(x: np.ndarray, stored: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Keys or values in the cache's dtype, as the engine passes them, and the numbers that they stand for."""
    element = jnp.dtype(stored)
    if element.itemsize > 1:
        codes = x.astype(element)
        return codes, codes.astype(np.float32)
    limit = 127 if stored == "int8" else float(jnp.finfo(element).max)
    scaled = np.clip(x / scale, -limit, limit)
    codes = (np.round(scaled) if stored == "int8" else scaled).astype(element)
    return codes, codes.astype(np.float32) * scale


def differences(case: Case, on: Mesh | None = None, shards: int = 1, share: bool = False) -> tuple[float, float]:
    """The largest difference of two steps from the reference, and from the control's: prompts, then more of one beside a decode
    of the other, over one cache.

    Each data shard computes the same requests. share: repeat the second step for a layer that reads the first's cache and is
    passed other keys.
    """
    from tpu_inference.layers.common.attention_interface import attention

    from attn.integrations import tpu_inference as integration

    backend, on = integration.create(), on or mesh()
    heads, kv_heads, size = case.heads
    draw = np.random.default_rng(len(case.what)).standard_normal
    held = max(kv_heads, on.shape["model"])
    shape = list(backend.get_kv_cache_shape(BLOCKS, PAGE, held // on.shape["model"], size, jnp.dtype(case.stored)))
    shape[0], shape[2] = shape[0] * shards, held
    cache = np.zeros(shape, jnp.dtype(case.stored))
    scales = {name: case.call.get(name, 1.0) for name in ("k_scale", "v_scale")}
    pairs = [[encode(draw((n, kv_heads, size)), case.stored, scale) for scale in scales.values()] for n in (40, 19)]
    step = jax.jit(
        lambda q, k, v, cache, batch, **more: attention(cache, q, k, v, batch, on, attention_backend=backend, **more),
        static_argnames=[name for name in case.call if name != "sinks"] + ["update_kv_cache"],
        donate_argnums=3,
    )
    found = [0.0, 0.0]
    for query_lens, seq_lens, writes in (
        ([20, 18], [20, 18], True),
        ([20, 1], [40, 19], True),
        *[([20, 1], [40, 19], False)] * share,
    ):
        batch, _ = metadata(query_lens, seq_lens, shards)
        rows, live = 41, sum(query_lens)  # one program for all steps
        fresh = [slice(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]
        query = draw((rows, heads, size)).astype(jnp.dtype(case.dtype))
        new = [np.concatenate([pair[which][0][part] for pair, part in zip(pairs, fresh, strict=True)]) for which in (0, 1)]
        key, value = (np.pad(x if writes else -x, ((0, rows - live), (0, 0), (0, 0))) for x in new)
        key, value, all_rows = (np.tile(x, (shards, 1, 1)) for x in (key, value, query))
        cache, output = step(all_rows, key, value, cache, batch, **case.call, **({} if writes else {"update_kv_cache": False}))
        cache = np.asarray(cache)  # on no device: a cache that the mesh holds would be another program's
        assert output.shape == (shards * rows, heads, size) and output.dtype == case.dtype
        for shard in np.asarray(output, np.float64).reshape(shards, rows, heads, size):
            assert not shard[live:].any(), "rows of no request are 0"
            for r, (start, n) in enumerate(zip((0, query_lens[0]), seq_lens, strict=True)):
                mine = slice(start, start + query_lens[r])
                arrays = np.asarray(query, np.float64)[mine], *(pair[1][:n] for pair in pairs[r])
                for which, terms in enumerate((case.terms, case.without)):
                    if terms is not None:
                        want, _ = reference.attention(*arrays, **{"causal": True, **terms})
                        found[which] = max(found[which], float(np.abs(shard[mine] - want).max()))
    return found[0], found[1]


def tolerance(case: Case) -> float:
    return 0.03 if "bfloat16" in (case.dtype, case.stored) else 3e-5


def batches(cases: tuple[Case, ...] = CASES) -> Iterator[tuple[str, float, float, float]]:
    """(layer, difference, what is allowed, difference of the control)."""
    for case in cases:
        found, control = differences(case)
        yield case.what, found, tolerance(case), control
