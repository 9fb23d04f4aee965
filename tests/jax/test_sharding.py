"""Heads sharded over a mesh axis: which device has which, and both paged backends on simulated host devices (about 25 s)."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import ShapeError
from attn.jax import Attention, MLAAttention
from attn.jax.backends.pallas import PallasAttentionBackend
from attn.jax.backends.xla_attn import XLAAttentionBackend
from attn.jax.sharding import HeadShards, cache_partition

ROOT = Path(__file__).parents[2]
H, K, D, P, N, SIZE = 8, 2, 64, 16, 6, 4


def test_whole_kv_heads() -> None:
    shards = HeadShards(32, 8, 4)
    assert (shards.local_heads, shards.local_kv_heads, shards.replicas) == (8, 2, 1)
    assert shards.kv_heads == tuple(range(8)) and shards.kv_heads_of(3) == (6, 7)
    assert list(shards.heads_of(1)) == list(range(8, 16))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 4, 8), (8, 1, 8), (12, 6, 2), (6, 3, 6), (4, 4, 4)])
def test_each_query_head_finds_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    shards = HeadShards(heads, kv_heads, size)
    assert len(shards.kv_heads) == size * shards.local_kv_heads
    for rank in range(size):
        for i, head in enumerate(shards.heads_of(rank)):
            local = i // (shards.local_heads // shards.local_kv_heads)  # as the device's layer reads it
            assert shards.kv_heads_of(rank)[local] == head // (heads // kv_heads)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((32, 8, 3), "num_heads=32 over 3 devices: must be a multiple of 3"),
        ((24, 6, 4), "num_kv_heads=6 over 4 devices: one must be a multiple of the other"),
        ((32, 5, 2), "num_heads=32 is not a multiple of num_kv_heads=5"),
        ((32, 0, 2), "num_kv_heads=0 must be at least 1"),
    ],
)
def test_what_does_not_divide(numbers: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        HeadShards(*numbers)


def test_the_partition_follows_the_layout() -> None:
    assert tuple(cache_partition(XLAAttentionBackend, "x")) == (None, None, None, "x", None)
    assert tuple(cache_partition(PallasAttentionBackend, "x")) == (None, None, "x", None, None)


SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from attn.backends.metadata import CommonAttentionMetadata
from attn.jax import Attention
from attn.jax.sharding import HeadShards, cache_partition

folder, backend = sys.argv[1:]
H, K, D, PAGE, N, SIZE = 8, 2, 64, 16, 6, 4
shards = HeadShards(H, K, SIZE)
whole = Attention(H, D, num_kv_heads=len(shards.kv_heads), block_size=PAGE, backend=backend)
mesh = jax.make_mesh((SIZE,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:SIZE])
rows, pages, heads = P(None, "heads"), cache_partition(whole.backend, "heads"), P("heads")
common = CommonAttentionMetadata.from_lens([1, 3], [20, 9], [[4, 1], [2]], PAGE)
meta = whole.backend.get_builder_cls()(whole.kv_cache_spec).build(0, common)
data = np.load(folder + "/in.npz")
mine = jnp.asarray(shards.kv_heads)

def step(q, k, v, cache, slopes, sinks, meta):
    local = Attention(
        shards.local_heads, D, num_kv_heads=shards.local_kv_heads, block_size=PAGE, backend=backend, alibi_slopes=slopes,
        sinks=sinks,
    )
    local.impl.need_to_return_lse_for_decode = True
    return local(q, k, v, cache, meta)

specs = (rows, rows, rows, pages, heads, heads)
mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(*specs, P()), out_specs=((rows, P("heads", None)), pages), check_vma=False
)
cache = whole.new_kv_cache(N, NamedSharding(mesh, pages))
given = [meta.pad(data["q"]), meta.pad(data["k"])[:, mine], meta.pad(data["v"])[:, mine], cache, data["slopes"], data["sinks"]]
put = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs)]
compiled = jax.jit(mapped, donate_argnums=3).lower(*put, meta).compile()
text = compiled.as_text()
assert not any(word in text for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
(out, lse), cache = compiled(*put, meta)
assert len(out.devices()) == len(cache.devices()) == SIZE
keys, values = whole.backend.logical_kv_cache(cache)
np.savez(folder + "/out.npz", out=out, lse=lse, keys=keys, values=values)
"""


@pytest.mark.parametrize("backend", ["XLA_ATTN", "PALLAS"])
def test_more_devices_than_kv_heads(backend: str, tmp_path: Path) -> None:
    """Four devices share two kv heads; slopes and sinks are sharded with the query heads; nothing is communicated."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, heads, D), np.float32) for heads in (H, K, K))
    slopes, sinks = reference.alibi_slopes(H).astype(np.float32), np.linspace(-1, 2, H, dtype=np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v, slopes=slopes, sinks=sinks)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), backend]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = np.load(tmp_path / "out.npz")

    common = CommonAttentionMetadata.from_lens([1, 3], [20, 9], [[4, 1], [2]], P)
    zeros = np.zeros((N, P, K, D), np.float32)
    keys, values = reference.write_kv(k, v, zeros, zeros, common.slot_mapping)
    held = HeadShards(H, K, SIZE).kv_heads
    for name, want in (("keys", keys), ("values", values)):
        np.testing.assert_array_equal(got[name], np.asarray(want)[:, :, held])
    requests = {name: getattr(common, name) for name in ("query_start_loc", "seq_lens", "block_table")}
    out, lse = reference.paged_attention(q, keys, values, **requests, alibi_slopes=slopes, sinks=sinks)
    np.testing.assert_allclose(got["out"][:4], out, atol=1e-5)
    np.testing.assert_allclose(got["lse"][:, :4], lse, atol=1e-5)


@pytest.mark.parametrize(("backend", "return_lse"), [("XLA_ATTN", True), ("PALLAS", False), ("XLA_MLA", True)])
def test_arrays_over_explicit_axes(backend: str, return_lse: bool) -> None:
    """`jax.make_mesh` makes explicit axes: without a `shard_map` XLA partitions the call, and results keep their shardings."""
    mesh, common = jax.make_mesh((1,), ("heads",)), CommonAttentionMetadata.from_lens([1, 3], [20, 9], [[4, 1], [2]], P)
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    draw = functools.partial(jax.random.normal, jax.random.key(0))
    layer: Any
    if "MLA" in backend:
        layer = MLAAttention(H, 128, 64, 64, 64, draw((128, H, 128)), block_size=P, backend=backend, return_lse=return_lse)
        shapes, specs = ((4, H, 128), (4, 128), (4, 64)), (Spec(None, "heads"), Spec(), Spec())
        pages = Spec()
    else:
        layer = Attention(H, D, num_kv_heads=K, block_size=P, backend=backend, return_lse=return_lse)
        shapes, specs = ((4, H, D), (4, K, D), (4, K, D)), (Spec(None, "heads"),) * 3
        pages = cache_partition(layer.backend, "heads")
    rows, cache, meta = [draw(shape) for shape in shapes], layer.new_kv_cache(N), layer.build(common)
    want = jax.jit(layer.__call__)(*rows, cache, meta)
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((*rows, cache), (*specs, pages), strict=True)]
    out, after = got = jax.jit(layer.__call__)(*put, meta)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert jax.typeof(after).sharding.spec == jax.typeof(put[3]).sharding.spec
    heads = [tuple(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(out)]
    assert heads == [(None, "heads", None), ("heads", None)][: 1 + return_lse]
