"""Dense attention by `jax.nn.dot_product_attention`, by either of its implementations; shared by XLA_ATTN and CUDNN."""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from attn.diffusion.backends.dense import Keys
from attn.jax.diffusion.backends._dense import DenseImpl


class DotProductImpl(DenseImpl):
    """The call, its masks, and rows without keys."""

    implementation: ClassVar[Literal["xla", "cudnn"]]

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> jax.Array:
        mask = keys.mask
        if keys.present is not None:
            # what is not there may hold anything, and would be multiplied by 0
            there = keys.present[:, :, None, None]
            key, value = jnp.where(there, key, 0), jnp.where(there, value, 0)
            mask = keys.present[:, None, None, :]
        rows, length = query.shape[1], key.shape[1]
        square = self.causal and rows == length
        if self.causal and not square:  # its own causality is top-left
            triangle = jnp.tril(jnp.ones((rows, length), bool), length - rows)[None, None]
            mask = triangle if mask is None else mask & triangle
        out = jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=square, scale=self.scale,
            implementation=self.implementation,
        )  # fmt: skip
        if mask is None:
            return out
        seen = mask.any(-1) if not square else (mask & jnp.tril(jnp.ones((rows, length), bool))).any(-1)
        return jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], out, 0)
