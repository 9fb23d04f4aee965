"""Attention on several devices: heads over a mesh axis, and which dimension of a cache that is.

Tensor parallelism is `shard_map` over heads with a layer of the local ones: a query head needs its own kv head and no
other, so nothing is communicated. Where the axis has more devices than there are kv heads, neighbours hold the same one,
each in a cache of its own. Keys and values are then repeated once, in the weights that make them, and not at every step:

    shards = HeadShards(num_heads=32, num_kv_heads=4, size=8)       # size: devices of the axis
    wk = jnp.take(wk, jnp.asarray(shards.kv_heads), axis=1)         # [E, 4, D] -> [E, 8, D], to be sharded over its heads
    layer = Attention(shards.local_heads, D, num_kv_heads=shards.local_kv_heads, ...)
    rows, pages = P(None, "heads"), cache_partition(layer.backend, "heads")
    step = jax.shard_map(
        layer, mesh=mesh, in_specs=(rows, rows, rows, pages, P()), out_specs=(rows, pages), check_vma=False
    )   # check_vma: a Pallas kernel does not say which of its results vary over which axes

What differs from head to head (ALiBi slopes, sinks, per-head scales) is sharded too: build the layer inside the mapped
function from its local part, which may be traced.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from attn.errors import ShapeError


@dataclass(frozen=True)
class HeadShards:
    """How H query heads that share K kv heads lie over the `size` devices of a mesh axis, in order.

    Raises `ShapeError` when the query heads, or the kv heads, do not divide: every device runs one program, so all must
    hold as many of either, and a kv head for each of their query heads.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.num_heads % self.size:
            raise ShapeError(f"num_heads={self.num_heads} over {self.size} devices: must be a multiple of {self.size}")
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise ShapeError(
                f"num_kv_heads={self.num_kv_heads} over {self.size} devices: one must be a multiple of the other, so that "
                "each device holds whole kv heads, or shares one with its neighbours"
            )

    @property
    def local_heads(self) -> int:
        """Query heads a device."""
        return self.num_heads // self.size

    @property
    def local_kv_heads(self) -> int:
        """kv heads a device."""
        return max(self.num_kv_heads // self.size, 1)

    @property
    def replicas(self) -> int:
        """Devices that hold the same kv head."""
        return max(self.size // self.num_kv_heads, 1)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Which kv head each one that is held is, [size * local_kv_heads]: 0, 1, 2, ..., or 0, 0, 1, 1, ... with replicas."""
        return tuple(k for k in range(self.num_kv_heads) for _ in range(self.replicas))

    def heads_of(self, rank: int) -> range:
        """The query heads of device `rank` of the axis."""
        return range(rank * self.local_heads, (rank + 1) * self.local_heads)

    def kv_heads_of(self, rank: int) -> tuple[int, ...]:
        """The kv heads of device `rank`."""
        return self.kv_heads[rank * self.local_kv_heads : (rank + 1) * self.local_kv_heads]


def cache_partition(backend: Any, axis: str) -> PartitionSpec:
    """The partition of a backend's cache whose kv heads lie over mesh axis `axis`, in whatever layout it has.

    A cache of all devices is `layer.new_kv_cache(num_blocks, NamedSharding(mesh, ...))` of a layer that has
    size * local_kv_heads kv heads.
    """
    one, two = (backend.get_kv_cache_shape(1, 128, kv_heads, 128) for kv_heads in (1, 2))
    return PartitionSpec(*(axis if a != b else None for a, b in zip(one, two, strict=True)))
