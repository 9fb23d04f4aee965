"""Compile a whole serving step for four TPUs ahead of time, and check that XLA does not copy the cache.

Heads are sharded over a mesh axis of four v6e (32 query heads on 2 kv heads, so two devices hold the same kv head). The step is
jitted with its cache donated: alone, in a scan over a stack of caches, and in a scan that carries them as one array
(`PagedAttentionMetadata.of_layer`). For each it prints the bytes that the results share with the donated arguments (the whole
cache, unless it is copied at the program's boundary) and the bytes of temporaries per device (which show copies inside).

    PYTHONPATH=<folder with libtpu 0.0.51> python -m benchmarks.pallas_serving [--json FILE]
"""

import argparse
import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

CHIP, DEVICES, LAYERS = "v6e", 4, 4
HEADS, KV_HEADS, HEAD_SIZE, PAGE, BLOCKS = 32, 2, 128, 128, 256
#: A decode of 7 requests and a chunk of 100 tokens.
LENS = (1,) * 7 + (100,), (500,) * 7 + (400,)


def rows_of(backend: str) -> list[dict[str, Any]]:
    """Return the rows of a backend's three programs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from attn.backends.metadata import CommonAttentionMetadata
    from attn.jax import Attention
    from attn.jax.sharding import HeadShards, cache_partition
    from attn.tools.aot.libtpu import CHIPS

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[CHIP].topology).devices[:DEVICES]
    mesh = Mesh(np.array(devices), ("heads",))
    shards = HeadShards(HEADS, KV_HEADS, DEVICES)
    layer = Attention(
        shards.local_heads, HEAD_SIZE, num_kv_heads=shards.local_kv_heads, block_size=PAGE, backend=backend, dtype=jnp.bfloat16
    )
    batch = CommonAttentionMetadata.from_lens(*LENS, np.arange(64).reshape(8, 8), PAGE)
    meta = layer.build(batch)
    rows, pages = P(None, "heads"), cache_partition(layer.backend, "heads")
    stack, kv_heads = P(None, *pages), len(shards.kv_heads)

    def carried(q: Any, k: Any, v: Any, cache: Any, meta: Any) -> Any:
        def one(state: Any, i: Any) -> Any:
            return layer(state[0], k, v, state[1], meta.of_layer(i, BLOCKS)), None

        return jax.lax.scan(one, (q, cache), jnp.arange(LAYERS))[0]

    def stacked(q: Any, k: Any, v: Any, caches: Any, meta: Any) -> Any:
        return jax.lax.scan(lambda x, cache: layer(x, k, v, cache, meta), q, caches)

    def spec(shape: Sequence[int], partition: Any, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition))

    def compiled(what: str, step: Callable[..., Any], shape: Sequence[int], partition: Any) -> dict[str, Any]:
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(rows, rows, rows, partition, P()), out_specs=(rows, partition), check_vma=False
        )
        tokens = meta.slot_mapping.shape[0]
        q, k = (spec((tokens, heads, HEAD_SIZE), rows) for heads in (HEADS, kv_heads))
        described = jax.tree.map(lambda x: spec(x.shape, P(), x.dtype), meta)
        program = jax.jit(mapped, donate_argnums=3).lower(q, k, k, spec(shape, partition), described).compile()
        memory, text = program.memory_analysis(), program.as_text()
        return {
            "backend": backend,
            "program": what,
            "cache_bytes": 2 * int(np.prod(shape)) // DEVICES,
            "shared_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "kernels": text.count("tpu_custom_call"),
            "collectives": sum(text.count(f" {word}(") for word in ("all-reduce", "all-gather", "all-to-all")),
        }

    def shape(blocks: int) -> tuple[int, ...]:
        return layer.backend.get_kv_cache_shape(blocks, PAGE, kv_heads, HEAD_SIZE)

    return [
        compiled("one layer", layer, shape(BLOCKS), pages),
        compiled("scan, one array carried", carried, shape(LAYERS * BLOCKS), pages),
        compiled("scan over a stack", stacked, (LAYERS, *shape(BLOCKS)), stack),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the rows to this file")
    chosen = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu cannot be imported: set PYTHONPATH=<folder with libtpu>")
        return
    from attn.tools.aot.libtpu import environment

    os.environ.update(environment(CHIP, tempfile.mkdtemp(), estimate=False))
    rows = [row for backend in ("PALLAS", "XLA_ATTN") for row in rows_of(backend)]
    print(f"{DEVICES} x {CHIP}, {HEADS}/{KV_HEADS}x{HEAD_SIZE}, MB per device")
    for row in rows:
        numbers = [row[name] / 1e6 for name in ("cache_bytes", "shared_bytes", "temporary_bytes")]
        print(
            f"{row['backend']:9} {row['program']:24} cache {numbers[0]:6.1f}  shared {numbers[1]:6.1f}  "
            f"temporaries {numbers[2]:6.1f}  collectives {row['collectives']}"
        )
    if chosen.json:
        from importlib.metadata import version

        versions, date = {name: version(name) for name in ("jax", "libtpu")}, datetime.now(UTC).date().isoformat()
        facts = {"date": date, "machine": platform.machine(), "versions": versions, "rows": rows}
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
