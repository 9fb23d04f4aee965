"""Sequences too long for one chip: Ulysses and ring attention (`attn.diffusion.parallel`) over a mesh axis.

For use inside `jax.shard_map`. XLA overlaps a ring's exchanges with attention, which does not wait for them.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from attn.arguments import positive_int
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.parallel import BaseSequenceParallel


class SequenceParallelAttention(BaseSequenceParallel, nnx.Module):
    """`DiffusionAttention` over a sequence that is sharded over the devices of a mesh axis.

    Arguments are those of `DiffusionAttention` (num_heads and num_kv_heads of the whole layer), and:
        axis_name: the mesh axis; axis_size: its number of devices.
        strategy: "ulysses" or "ring"; a ring's layer is chosen among backends that return the log-sum-exp.

    Raises ValueError for an unknown strategy, `ShapeError` for heads that the devices do not divide, `UnsupportedError` for
    causal rings and, with every candidate's reasons, for a layer that no backend serves.
    """

    framework, members = "jax", "devices"

    def _join(self, *, axis_name: str, axis_size: int, **choice: Any) -> dict[str, Any]:  # type: ignore[override]
        # The axis' size is an argument, because a layer is made outside of `shard_map`, where the axis has none yet.
        self.axis, self.size = axis_name, positive_int("axis_size", axis_size)
        return choice

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> jax.Array:
        """query: [B, S / W, H, D]; key, value: [B, M / W, K, D]: this device's rows.

        attn_mask: bool [B, M / W], this device's keys. Joint streams are replicated on every device, as are their rows in
        the result: [B, J + S / W, H, D]. Returns this device's rows.
        """
        return self._attend(query, key, value, attn_metadata)

    def _exchanged(self, x: jax.Array, split: int, join: int) -> jax.Array:
        # tiled: the dimensions stay where they are, one is cut and the other joined
        return lax.all_to_all(x, self.axis, split, join, tiled=True)

    def _gathered(self, x: jax.Array, dim: int) -> jax.Array:
        return lax.all_gather(x, self.axis, axis=dim, tiled=True)

    def _own_heads(self, x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        # joint streams are replicated with all heads, of which Ulysses leaves each device its own
        heads = x.shape[2] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * heads, heads, 2)

    def _passed(self, arrays: list[Any]) -> Callable[[], list[Any]]:
        # XLA starts the exchange as soon as its operands exist, so that it overlaps with what does not use the result: nothing
        # has to be waited for here.
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        arrived: list[Any] = jax.tree.map(lambda x: lax.ppermute(x, self.axis, to_next), arrays)
        return lambda: arrived
