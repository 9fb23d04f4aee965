"""Sequences too long for one chip: Ulysses and ring attention over a mesh axis, for use inside `jax.shard_map`.

The counterpart of `attn.torch.diffusion.parallel`: Ulysses (arXiv 2309.14509) exchanges rows for heads with two
all-to-alls; a ring (arXiv 2310.01889) passes keys and values around with `ppermute` and merges partial results by
log-sum-exp.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from attn.arguments import positive_int
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.parallel import share_heads, wanted_features
from attn.errors import UnsupportedError
from attn.jax.diffusion.layer import DiffusionAttention
from attn.jax.merge import merge_attn_states


class SequenceParallelAttention(nnx.Module):
    """`DiffusionAttention` over a sequence that is sharded over the devices of a mesh axis.

    Arguments are those of `DiffusionAttention` (num_heads and num_kv_heads of the whole layer), and:
        axis_name: the mesh axis; axis_size: its number of devices.
        strategy: "ulysses" or "ring"; a ring's layer is chosen among backends that return the log-sum-exp.

    Raises ValueError for an unknown strategy, `ShapeError` for heads that the devices do not divide, `UnsupportedError` for
    causal rings and, with every candidate's reasons, for a layer that no backend serves.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        *,
        axis_name: str,
        axis_size: int,
        strategy: str = "ulysses",
        features: Collection[str] = (),
        **choice: Any,
    ) -> None:
        self.axis, self.devices, self.strategy = axis_name, positive_int("axis_size", axis_size), strategy
        num_heads, num_kv_heads, head_size = share_heads(
            num_heads, num_kv_heads, head_size, strategy=strategy, causal=causal, size=self.devices, members="devices"
        )
        wanted = wanted_features(strategy, features)
        self.local = DiffusionAttention(num_heads, head_size, softmax_scale, causal, num_kv_heads, features=wanted, **choice)

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> jax.Array:
        """query: [B, S / W, H, D]; key, value: [B, M / W, K, D]: this device's rows.

        attn_mask: bool [B, M / W], this device's keys. Joint streams are replicated on every device, as are their rows in
        the result: [B, J + S / W, H, D]. Returns this device's rows.
        """
        meta = attn_metadata or DiffusionAttentionMetadata()
        if meta.kv_lens is not None or (meta.attn_mask is not None and meta.attn_mask.ndim != 2):
            raise UnsupportedError(f"{self.strategy}: supports only masks of keys [B, M / W] (others span the devices)")
        return (self._ulysses if self.strategy == "ulysses" else self._ring)(query, key, value, meta)

    def _ulysses(self, query: jax.Array, key: jax.Array, value: jax.Array, meta: DiffusionAttentionMetadata) -> jax.Array:
        def exchanged(x: jax.Array, split: int, join: int) -> jax.Array:
            return lax.all_to_all(x, self.axis, split, join, tiled=True)

        def own_heads(x: jax.Array | None) -> jax.Array | None:
            if x is None:
                return None
            heads = x.shape[2] // self.devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * heads, heads, 2)

        mask = None if meta.attn_mask is None else lax.all_gather(meta.attn_mask, self.axis, axis=1, tiled=True)
        whole = DiffusionAttentionMetadata(
            attn_mask=mask,
            joint_query=own_heads(meta.joint_query),
            joint_key=own_heads(meta.joint_key),
            joint_value=own_heads(meta.joint_value),
            joint_attn_mask=meta.joint_attn_mask,
            joint_strategy=meta.joint_strategy,
        )
        query, key, value = (exchanged(x, 2, 1) for x in (query, key, value))
        out = self.local(query, key, value, whole)
        joint = 0 if meta.joint_query is None else meta.joint_query.shape[1]
        if not joint:
            return exchanged(out, 1, 2)
        front = meta.joint_strategy == "front"
        text, image = (out[:, :joint], out[:, joint:]) if front else (out[:, -joint:], out[:, :-joint])
        parts = [lax.all_gather(text, self.axis, axis=2, tiled=True), exchanged(image, 1, 2)]
        return jnp.concatenate(parts if front else parts[::-1], 1)

    def _ring(self, query: jax.Array, key: jax.Array, value: jax.Array, meta: DiffusionAttentionMetadata) -> jax.Array:
        impl, front = self.local.impl, meta.joint_strategy == "front"
        if meta.joint_query is not None:  # its rows see every key on every device, so the results are equal
            query = jnp.concatenate([meta.joint_query, query] if front else [query, meta.joint_query], 1)
        states = []
        if meta.joint_key is not None:  # replicated on every device: it counts once
            part = DiffusionAttentionMetadata(attn_mask=meta.joint_attn_mask)
            states.append(impl.forward_lse(query, meta.joint_key, meta.joint_value, part))
        current = (key, value, meta.attn_mask)
        to_next = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        for step in range(self.devices):
            states.append(impl.forward_lse(query, current[0], current[1], DiffusionAttentionMetadata(attn_mask=current[2])))
            if step < self.devices - 1:  # does not wait for the attention above: XLA overlaps them
                current = jax.tree.map(lambda x: lax.ppermute(x, self.axis, to_next), current)
        batch, rows, heads, size = query.shape
        merged, _ = merge_attn_states(
            [out.astype(jnp.float32).reshape(batch * rows, heads, size) for out, _ in states],
            [jnp.swapaxes(lse, 0, 1).reshape(heads, batch * rows) for _, lse in states],
        )
        return merged.astype(query.dtype).reshape(batch, rows, heads, size)
