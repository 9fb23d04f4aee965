"""`attn.jax.Attention` on the CPU: the oracle's answers, under jit, donation, scan and sharding."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attn
from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Request
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.jax import Attention, DiffusionAttention
from attn.jax.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.visibility import BatchMask

H, K, D, P, N = 4, 2, 16, 8, 40
ROOT = Path(__file__).parents[2]


def new_layer(**more: Any) -> Attention:
    return Attention(H, D, num_kv_heads=K, block_size=P, **more)


def call_arguments(layer: Attention, batch: Any, **config: Any) -> tuple[Any, ...]:
    """(q, k, v, kv_cache, attn_metadata), rows that the builder adds filled with NaN."""
    metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec, config=config or None).build(0, batch.common)
    rows = metadata.slot_mapping.shape[0] - batch.common.num_actual_tokens
    pad = [np.concatenate([x, np.full((rows, *x.shape[1:]), np.nan, x.dtype)]) for x in (batch.q, batch.k, batch.v)]
    return *map(jnp.asarray, pad), jnp.asarray(batch.cache), metadata


@pytest.fixture(scope="module")
def layer() -> Attention:
    plain = new_layer()
    plain.impl.need_to_return_lse_for_decode = True
    return plain


@pytest.fixture(scope="module")
def step(layer: Attention) -> Any:
    return jax.jit(layer.__call__, donate_argnums=3)


def test_a_mixed_batch_in_place(layer: Attention, step: Any, make_batch: Any, close: Any) -> None:
    """The oracle's output and cache, bit for bit; the donated cache keeps its memory; padding is zeros."""
    batch = make_batch()
    arguments = call_arguments(layer, batch)
    rows, cache = batch.common.num_actual_tokens, arguments[3]
    where = cache.unsafe_buffer_pointer()
    (out, lse), after = step(*arguments)
    assert cache.is_deleted() and after.unsafe_buffer_pointer() == where
    close((out[:rows], lse[:, :rows]), batch.expected())
    np.testing.assert_array_equal(after, np.stack(batch.written()))
    assert not out[rows:].any() and jnp.isneginf(lse[:, rows:]).all()


def test_one_compilation_serves_a_bucket(layer: Attention, step: Any, make_batch: Any, close: Any) -> None:
    step(*call_arguments(layer, make_batch()))
    size = step._cache_size()
    for lens in (((2, 25, 1, 1, 1), (2, 40, 1, 9, 17)), ((17, 1, 1, 1, 1, 1, 1, 1), (40, 1, 2, 3, 4, 5, 6, 7))):
        batch = make_batch(*lens, seed=1)
        (out, lse), _ = step(*call_arguments(layer, batch))
        rows = batch.common.num_actual_tokens
        close((out[:rows], lse[:, :rows]), batch.expected())
    assert step._cache_size() == size


def test_garbage_in_a_buckets_padding_changes_nothing(layer: Attention, step: Any, make_batch: Any) -> None:
    """Tables, slots and lengths past the batch's own: only `num_reqs` rows and `num_actual_tokens` slots count."""
    batch = make_batch()
    q, k, v, cache, metadata = call_arguments(layer, batch)
    (clean, _), kept = step(q, k, v, jnp.array(cache), metadata)
    rows, requests = batch.common.num_actual_tokens, batch.common.num_reqs
    arrays = {
        **vars(metadata),
        "block_table": metadata.block_table.at[requests:].set(10**6),
        "slot_mapping": metadata.slot_mapping.at[rows:].set(3),
        "seq_lens": metadata.seq_lens.at[requests:].set(50),
    }
    (out, _), after = step(q, k, v, cache, type(metadata)(**arrays))
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(after, kept)


def test_eager_exact_extents_and_nnx_jit_agree(layer: Attention, make_batch: Any, close: Any) -> None:
    batch = make_batch()
    rows = batch.common.num_actual_tokens
    (eager, lse), after = layer(*call_arguments(layer, batch, bucket=False))
    close((eager, lse), batch.expected())
    np.testing.assert_array_equal(after, np.stack(batch.written()))

    @nnx.jit(donate_argnames="kv_cache")
    def run(layer: Attention, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> Any:
        return layer(q, k, v, kv_cache, metadata)

    arguments = call_arguments(layer, batch)
    (out, _), _ = run(layer, *arguments)
    assert arguments[3].is_deleted()
    np.testing.assert_allclose(out[:rows], eager, atol=1e-6)


def test_scan_over_layers(layer: Attention, make_batch: Any, close: Any) -> None:
    """Each step of a scan has a cache of its own and attends with the output of the one before."""
    batch = make_batch()
    q, k, v, cache, metadata = call_arguments(layer, batch)

    @jax.jit
    def model(x: jax.Array, caches: jax.Array) -> Any:
        def one(x: jax.Array, cache: jax.Array) -> Any:
            (out, lse), cache = layer(x, k, v, cache, metadata)
            return out, (cache, lse)

        return jax.lax.scan(one, x, caches)

    out, (caches, lse) = model(q, jnp.stack([cache, 2 * cache]))
    rows = batch.common.num_actual_tokens
    batch.q = np.asarray(batch.expected()[0], np.float32)
    keys, values = reference.write_kv(batch.k, batch.v, 2 * batch.cache[0], 2 * batch.cache[1], batch.common.slot_mapping)
    close((out[:rows], lse[1][:, :rows]), batch.expected(keys, values))
    np.testing.assert_array_equal(caches[1], np.stack([keys, values]))


def test_the_seeds_shape_rebinds_a_variable(make_batch: Any, close: Any) -> None:
    layer = new_layer()
    batch = make_batch()
    q, k, v, cache, metadata = call_arguments(layer, batch)
    held = nnx.Variable(cache)
    out = layer.impl.forward(layer, q, k, v, held, metadata)
    np.testing.assert_array_equal(held[...], np.stack(batch.written()))
    want = batch.expected()
    close((out[: batch.common.num_actual_tokens], want[1]), want)

    flat = [np.asarray(x).reshape(len(x), -1) for x in (q, k, v)]
    from_numpy = layer.impl(layer, *flat, nnx.Variable(cache), metadata)
    assert isinstance(from_numpy, np.ndarray)
    np.testing.assert_array_equal(from_numpy, out)
    with pytest.raises(TypeError, match=r"forward\(\) cannot change: pass an nnx.Variable, or call apply"):
        layer.impl.forward(layer, q, k, v, cache, metadata)
    with pytest.raises(ValueError, match="output= cannot be filled"):
        layer.impl.forward(layer, q, k, v, held, metadata, output=out)
    with pytest.raises(UnsupportedError, match="output_scale not supported"):
        layer.impl.forward(layer, q, k, v, held, metadata, output_scale=1.0)


def test_a_profiling_run_is_zeros() -> None:
    layer = new_layer()
    layer.impl.need_to_return_lse_for_decode = True
    cache = layer.new_kv_cache(1)
    out, after = layer(jnp.ones((3, H * D)), None, None, cache, None)
    assert out.shape == (3, H, D) and not out.any() and after is cache


def test_a_layer_that_shares_a_cache_does_not_write(layer: Attention, step: Any, make_batch: Any, close: Any) -> None:
    sharing = new_layer(kv_sharing_target_layer_name="other")
    sharing.impl.need_to_return_lse_for_decode = True
    batch = make_batch()
    q, k, v, _, metadata = call_arguments(layer, batch)
    shared = jnp.asarray(np.stack(batch.written()))
    for key, value in ((k * jnp.nan, v * jnp.nan), (None, None)):
        (out, lse), after = jax.jit(sharing.__call__)(q, key, value, shared, metadata)
        rows = batch.common.num_actual_tokens
        close((out[:rows], lse[:, :rows]), batch.expected())
        np.testing.assert_array_equal(after, shared)


def test_cross_attention_writes_the_encoders_rows_once(make_batch: Any, close: Any) -> None:
    """Keys have rows and slots of their own number; every query row sees all of them."""
    cross = new_layer(attn_type="encoder_decoder")
    cross.impl.need_to_return_lse_for_decode = True
    encoder = make_batch((12, 20), (12, 20))
    decoder = make_batch((1, 3), (12, 20), causal=False)
    decoder.common.block_table = encoder.common.block_table
    rows = np.zeros((32, K, D), np.float32)
    key, value = (np.concatenate([x, rows])[:32] for x in (encoder.k, encoder.v))
    both = decoder.common.replace(slot_mapping=encoder.common.slot_mapping, causal=True)
    metadata = cross.backend.get_builder_cls()(cross.kv_cache_spec).build(0, both)
    run = jax.jit(cross.__call__)
    (out, lse), cache = run(jnp.asarray(decoder.q), jnp.asarray(key), jnp.asarray(value), cross.new_kv_cache(N), metadata)
    zeros = np.zeros((N, P, K, D), np.float32)
    keys, values = reference.write_kv(encoder.k, encoder.v, zeros, zeros, encoder.common.slot_mapping)
    np.testing.assert_array_equal(cache, np.stack([keys, values]))
    close((out, lse), decoder.expected(keys, values))
    (again, _), _ = run(jnp.asarray(decoder.q), None, None, cache, metadata)
    np.testing.assert_allclose(again, out, atol=1e-6)


def test_an_encoder_needs_no_cache(make_batch: Any, close: Any) -> None:
    encoder = new_layer(attn_type="encoder_only", sliding_window=4, dtype=jnp.bfloat16)
    encoder.impl.need_to_return_lse_for_decode = True
    batch = make_batch((12, 20), (12, 20), dtype="bfloat16")
    q, k, v, _, metadata = call_arguments(encoder, batch)
    (out, lse), cache = encoder(q, k, v, None, metadata)
    own = [
        reference.attention(*(x[batch.rows(r)].astype(np.float32) for x in (batch.q, batch.k, batch.v)), window=(3, 3))
        for r in (0, 1)
    ]
    assert cache is None
    close((out, lse), (np.concatenate([o for o, _ in own]), np.concatenate([s for _, s in own], axis=1)), "bfloat16")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": lambda x: x.astype(jnp.int8)}, DTypeError, "query has dtype int8 (supports float32, bfloat16, float16)"),
        ({"k": lambda x: x.astype(jnp.bfloat16)}, DTypeError, "key has dtype bfloat16, query float32"),
        ({"q": lambda x: x[:-1]}, ShapeError, "query has shape [31, 4, 16]: must be [32, 4, 16], as many rows as"),
        ({"v": lambda x: x[:, :1]}, ShapeError, "value has shape [32, 1, 16]: must be [32, 2, 16]"),
        ({"v": lambda x: None}, ShapeError, "value is None"),
        ({"cache": lambda x: x[0]}, ShapeError, "kv_cache has shape [40, 8, 2, 16]: must have 5 dimensions"),
        ({"cache": lambda x: x[:, :, :, :1]}, ShapeError, "kv_cache holds [K, D] = [1, 16], the layer has [2, 16]"),
        ({"cache": lambda x: x.astype("float16")}, DTypeError, "kv_cache has dtype float16: kv_cache_dtype=auto needs float32"),
        ({"cache": nnx.Variable}, TypeError, "kv_cache must be a jax.Array, got Variable (only forward() takes"),
    ],
)
def test_calls_are_checked(layer: Attention, make_batch: Any, change: dict[str, Any], error: type, said: str) -> None:
    names = ("q", "k", "v", "cache", "metadata")
    arguments = dict(zip(names, call_arguments(layer, make_batch()), strict=True))
    for name, make in change.items():
        arguments[name] = make(arguments[name])
    with pytest.raises(error) as caught:
        layer(*arguments.values())
    assert said in str(caught.value)


def test_a_tree_needs_a_causal_batch(layer: Attention, make_batch: Any) -> None:
    arguments = call_arguments(layer, make_batch())
    changed = {**vars(arguments[4]), "mask": BatchMask(jnp.ones((8, 4, 4), bool)), "causal": False}
    with pytest.raises(MetadataError, match="tree_mask = a mask: must be None for decoder attention, causal=False"):
        layer(*arguments[:4], type(arguments[4])(**changed))


def test_rows_of_padding_are_written_nowhere(layer: Attention, step: Any, make_batch: Any) -> None:
    """Also if their slots are not -1: an engine's buffers may hold those of an earlier step."""
    batch = make_batch()
    unused = next(block for block in range(N) if block not in batch.common.block_table) * P
    slots = np.append(batch.common.slot_mapping, unused).astype(np.int64)
    batch.common = batch.common.replace(slot_mapping=slots)
    *arrays, cache, metadata = call_arguments(layer, batch)
    before = np.asarray(cache)[:, unused // P]
    np.testing.assert_array_equal(step(*arrays, cache, metadata)[1][:, unused // P], before)


def test_a_call_passes_both_scales(make_batch: Any) -> None:
    layer = new_layer(kv_cache_dtype="int8", k_scale=0.5, v_scale=[0.25, 2.0])
    q, k, v, _, metadata = call_arguments(layer, make_batch())
    cache = layer.new_kv_cache(N)
    (got, written), (want, after) = (
        layer(q, k, v, cache, metadata),
        layer.impl.apply(q, k, v, cache, metadata, k_scale=jnp.float32(0.5), v_scale=jnp.float32([0.25, 2.0])),
    )
    np.testing.assert_array_equal(written, after)
    np.testing.assert_array_equal(got, want)


def test_scales_are_arrays_of_the_layer() -> None:
    layer = new_layer(kv_cache_dtype="int8", k_scale=0.5, v_scale=[0.25, 2.0])
    assert layer._k_scale_float == 0.5 and layer._v_scale.tolist() == [0.25, 2.0]
    assert layer.new_kv_cache(3).dtype == jnp.int8 and str(layer.selection.name) == "XLA_ATTN"
    with pytest.raises(ValueError, match="^k_scale=0.0 must be finite and above 0"):
        new_layer(kv_cache_dtype="int8", k_scale=0.0)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "k_scale", "v_scale"])
def test_a_variable_is_no_constant_of_a_layer(name: str) -> None:
    """The layer would keep its first values when a checkpoint is loaded into the model."""
    given = nnx.Param(jnp.ones(2))
    with pytest.raises(TypeError, match=r"nnx.Param of shape \[2\].*pass its value"):
        Attention(2, 16, **{name: given})
    Attention(2, 16, **{name: given[...]})


@pytest.mark.parametrize(
    ("hooks", "error", "said"),
    [
        ({}, NotImplementedError, r"has no _attend\(call\)"),
        ({"_attend": lambda self, call: call.query}, TypeError, r"_attend\(\) returned .*: must return \(out, lse or None\)"),
    ],
)
def test_a_hook_that_is_missing_or_returns_its_output_alone_is_named(
    make_batch: Any, hooks: dict[str, Any], error: type, said: str
) -> None:
    record = attn.Capabilities(framework="jax", platforms=("cpu",), dtypes=("float32",))
    backend = type("Mine", (PagedAttentionBackend,), {"name": "MINE", "capabilities": record})
    type("MineImpl", (PagedAttentionImpl,), hooks, backend=backend)  # type: ignore[call-overload]
    with attn.registered_backend("MINE", backend), pytest.raises(error, match=f"MineImpl.*{said}"):
        layer = new_layer(backend="MINE")
        layer(*call_arguments(layer, make_batch()))


def test_do_kv_cache_update_alone(layer: Attention, make_batch: Any) -> None:
    batch = make_batch()
    scales: Any = SimpleNamespace(_k_scale=1.0, _v_scale=1.0)
    slots = jnp.asarray(batch.common.slot_mapping, jnp.int32)
    after = layer.impl.do_kv_cache_update(scales, jnp.asarray(batch.k), jnp.asarray(batch.v), jnp.asarray(batch.cache), slots)
    np.testing.assert_array_equal(after, np.stack(batch.written()))


def test_export_round_trip(layer: Attention, step: Any, make_batch: Any) -> None:
    """A step can be serialised and served elsewhere, for other platforms too."""
    pytest.importorskip("flatbuffers", reason="jax.export needs it and does not depend on it")
    from jax import export

    arguments = call_arguments(layer, make_batch())
    exported = export.export(jax.jit(layer.__call__), platforms=("cpu", "tpu", "cuda"))(*arguments)
    loaded = export.deserialize(exported.serialize())
    (got, _), _ = loaded.call(*arguments)
    (want, _), _ = step(*arguments)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_heads_shard_over_devices(layer: Attention, step: Any, make_batch: Any, tmp_path: Path) -> None:
    """Tensor parallelism is `shard_map` over heads with a layer of the local ones; two host devices stand in for chips."""
    arguments = call_arguments(layer, make_batch())
    np.savez(tmp_path / "in.npz", **{f"x{i}": np.asarray(x) for i, x in enumerate(arguments[:4])})
    script = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from attn.jax import Attention
from tests.jax.conftest import Batch
layer = Attention(2, 16, num_kv_heads=1, block_size=8)
batch = Batch([1, 5, 20, 0, 3, 1], [33, 40, 20, 9, 2, 8])
metadata = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch.common)
data = np.load(sys.argv[1] + "/in.npz")
mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
rows, pages = P(None, "heads"), P(None, None, None, "heads")
step = jax.shard_map(layer.__call__, mesh=mesh, in_specs=(rows, rows, rows, pages, P()), out_specs=(rows, pages))
put = [jax.device_put(data[f"x{i}"], NamedSharding(mesh, s)) for i, s in enumerate((rows, rows, rows, pages))]
out, cache = jax.jit(step, donate_argnums=3)(*put, metadata)
assert len(out.devices()) == len(cache.devices()) == 2
np.savez(sys.argv[1] + "/out.npz", out=out, cache=cache)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = np.load(tmp_path / "out.npz")
    (out, _), cache = step(*arguments)
    np.testing.assert_allclose(got["out"], out, atol=1e-6)
    np.testing.assert_array_equal(got["cache"], cache)


def test_a_layer_may_be_built_under_a_trace() -> None:
    """Nothing of it is a tracer that outlives the trace, nor a leaf that a checkpoint would have to hold."""
    arguments = {"k_scale": [0.5, 2.0], "v_scale": 0.5, "sinks": [0.0] * H, "alibi_slopes": [1.0] * H}
    layer = nnx.eval_shape(lambda: new_layer(kv_cache_dtype="int8", **arguments))
    assert not jax.tree.leaves(nnx.state(layer))
    assert layer._k_scale.tolist() == [0.5, 2.0] and layer.impl.sinks.tolist() == [0.0] * H


def test_the_shape_of_a_cache_is_known_without_allocating_it() -> None:
    layer = new_layer()
    shape = jax.eval_shape(lambda: layer.new_kv_cache(N, layers=3))
    assert isinstance(shape, jax.ShapeDtypeStruct) and layer.kv_cache_spec.num_blocks == N
    cache = layer.new_kv_cache(N, layers=3)
    assert (shape.shape, shape.dtype) == (cache.shape, cache.dtype)
    with pytest.raises(MetadataError, match="block_table"):
        layer.build(CommonAttentionMetadata.from_lens([1], [1], [[N]], P))


def test_xlas_backends_declare_no_batch_invariance() -> None:
    """XLA compiles a program for each padded shape, and two programs may round differently."""
    with pytest.raises(UnsupportedError, match="XLA_ATTN +batch_invariant not supported: XLA compiles products"):
        new_layer(features=["batch_invariant"])
    assert not new_layer().impl.batch_invariant
    for kind, names in (("mla", "XLA_MLA PALLAS_MLA TRITON_MLA_JAX"), ("sparse_mla", "XLA_MLA_SPARSE PALLAS_MLA_SPARSE")):
        request = Request(576, "bfloat16", features=frozenset({kind, "batch_invariant"}))
        for name in names.split():
            why = AttentionBackendEnum[name].get_class().why_not(request)
            assert any("two programs may sum in different orders" in reason for reason in why), name


def test_a_layer_is_shown_in_one_line_by_itself_and_within_a_model() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.attend = Attention(8, 64, num_kv_heads=2)

    line = "Attention(XLA_ATTN, head_size=64 dtype=float32 block_size=16 num_heads=8 num_kv_heads=2)"
    assert repr(Model().attend) == line and f"attend={line}" in repr(Model())
    assert repr(DiffusionAttention(4, 64)).startswith("DiffusionAttention(XLA_ATTN, head_size=64 dtype=float32")
    assert "\n" not in repr(DiffusionAttention(4, 64))
