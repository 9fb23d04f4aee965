"""Attention on several devices: heads over a mesh axis, and the partition of the cache.

Tensor parallelism is `shard_map` over heads with a layer of the local heads: a query head needs only its own kv head, so
devices do not communicate. If the axis has more devices than there are kv heads, neighbours hold the same kv head, each in
its own cache. Keys and values are then repeated once, in the weights that produce them, not at every step:

    shards = HeadShards(num_heads=32, num_kv_heads=4, size=8)       # size: devices of the axis
    wk = jnp.take(wk, jnp.asarray(shards.kv_heads), axis=1)         # [E, 4, D] -> [E, 8, D], to be sharded over its heads
    layer = Attention(shards.local_heads, D, num_kv_heads=shards.local_kv_heads, ...)
    rows, pages = P(None, "heads"), cache_partition(layer.backend, "heads")
    step = jax.shard_map(
        layer, mesh=mesh, in_specs=(rows, rows, rows, pages, P()), out_specs=(rows, pages), check_vma=False
    )   # check_vma: a Pallas kernel does not declare which of its results vary over which axes

Per-head parameters (ALiBi slopes, sinks, per-head scales) are sharded too: build the layer inside the mapped function from
its local part, which may be traced.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from attn.errors import ShapeError


@dataclass(frozen=True)
class HeadShards:
    """The distribution of H query heads and K kv heads over the `size` devices of a mesh axis, in order.

    Raises `ShapeError` if the query heads or the kv heads do not divide: every device runs one program, so all must hold
    equal numbers of both, and a kv head for each of their query heads.
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
                "each device holds whole kv heads or a replica of one"
            )

    @property
    def local_heads(self) -> int:
        """Query heads per device."""
        return self.num_heads // self.size

    @property
    def local_kv_heads(self) -> int:
        """kv heads per device."""
        # with more devices than kv heads each holds a replica of one
        return max(self.num_kv_heads // self.size, 1)

    @property
    def replicas(self) -> int:
        """Number of devices that hold the same kv head."""
        return max(self.size // self.num_kv_heads, 1)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The index of each kv head held, [size * local_kv_heads]: 0, 1, 2, ..., or 0, 0, 1, 1, ... with replicas."""
        # neighbours share a head: query heads are sharded in order, and those of one kv head are adjacent
        return tuple(k for k in range(self.num_kv_heads) for _ in range(self.replicas))

    def heads_of(self, rank: int) -> range:
        """The query heads of device `rank` of the axis."""
        return range(rank * self.local_heads, (rank + 1) * self.local_heads)

    def kv_heads_of(self, rank: int) -> tuple[int, ...]:
        """The kv heads of device `rank`."""
        return self.kv_heads[rank * self.local_kv_heads : (rank + 1) * self.local_kv_heads]


def cache_partition(backend: Any, axis: str) -> PartitionSpec:
    """The `PartitionSpec` of a backend's cache, in its own layout, with kv heads over mesh axis `axis`.

    To allocate a cache over all devices, call `new_kv_cache(num_blocks, NamedSharding(mesh, ...))` of a layer that has size
    * local_kv_heads kv heads.
    """
    # The dimension that grows with the number of heads is theirs, wherever a layout has it. 128: a size that no layout pads.
    one, two = (backend.get_kv_cache_shape(1, 128, kv_heads, 128) for kv_heads in (1, 2))
    return PartitionSpec(*(axis if a != b else None for a, b in zip(one, two, strict=True)))
