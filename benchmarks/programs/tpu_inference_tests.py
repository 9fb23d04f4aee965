"""A pytest plugin for `benchmarks/tpu_inference_cpu.py`: tpu-inference's tests of its kernels, run by `attn`.

In the modules of those tests, a kernel becomes a call of this library's backend over the test's cache, converted to this
library's shape and back. The tests compare the result with the package's own reference, and the cache element for element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        for name in ("ragged_paged_attention", "ragged_paged_attention_hd64"):
            if hasattr(module, name) and module.__name__.rpartition(".")[2].startswith("ragged_paged_attention_kernel_v3"):
                setattr(module, name, run)


@pytest.fixture(autouse=True)
def as_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' tests skip themselves elsewhere."""
    monkeypatch.setattr("jax._src.test_util.is_device_tpu_at_least", lambda version: True)


def run(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    lens: Any,
    tables: Any,
    starts: Any,
    distribution: Any,
    sinks: Any = None,
    **options: Any,
) -> Any:
    """Take a kernel's arguments, return its results: (output, cache)."""
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata

    from attn.integrations import tpu_inference as integration

    backend = integration.create()
    if options.get("q_scale") is not None:
        pytest.skip("quantised queries are refused (q_scale)")
    if options.get("sliding_window") is not None and options["sliding_window"] <= 0:
        raise ValueError("sliding_window must be positive")
    kv_heads, size = k.shape[1:]
    pages, page = kv_cache.shape[:2]
    shape = backend.get_kv_cache_shape(pages, page, kv_heads, size, kv_cache.dtype)
    axes = ("data", "model")
    batch = AttentionMetadata(
        input_positions=jnp.zeros(0, jnp.int32),
        block_tables=tables,
        seq_lens=lens,
        query_start_loc=starts,
        request_distribution=distribution,
    )
    with jax.numpy_rank_promotion("allow"):  # the tests forbid it
        cache, out = backend.attention(
            ours(kv_cache, shape, kv_heads),
            q,
            k,
            v,
            batch,
            batch,
            jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), axes),
            head_dim_original=size,
            sm_scale=options.get("sm_scale", 1.0),
            attention_chunk_size=options.get("sliding_window"),
            q_scale=None,
            k_scale=options.get("k_scale"),
            v_scale=options.get("v_scale"),
            sinks=sinks,
            update_kv_cache=options.get("update_kv_cache", True),
            use_causal_mask=options.get("use_causal_mask", True),
            attn_logits_soft_cap=options.get("soft_cap"),
            decode_query_size=1,
        )
    return out, theirs(cache, kv_cache, kv_heads)


def ours(kv_cache: Any, shape: tuple[int, ...], kv_heads: int) -> Any:
    """[N, P, rows / packing, packing, lanes] -> [N, planes, K, P, lanes]; a row is a head's key, its value, or both."""
    pages, page, *_, lanes = kv_cache.shape
    rows = kv_cache.reshape(pages, page, -1, lanes)[:, :, : kv_heads * shape[1]]
    return rows.reshape(pages, page, kv_heads, shape[1], lanes).transpose(0, 3, 2, 1, 4)


def theirs(cache: Any, kv_cache: Any, kv_heads: int) -> Any:
    """The inverse; rows that only pad the engine's shape keep their values."""
    pages, page, *_, lanes = kv_cache.shape
    rows = cache.transpose(0, 3, 2, 1, 4).reshape(pages, page, -1, lanes)
    flat = kv_cache.reshape(pages, page, -1, lanes)
    return flat.at[:, :, : rows.shape[2]].set(rows).reshape(kv_cache.shape)
