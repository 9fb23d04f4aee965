"""`attn.jax.DiffusionAttention`: dense attention as an nnx module, whose backend is chosen once, on construction."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.layer import BaseDiffusionAttention


class DiffusionAttention(BaseDiffusionAttention, nnx.Module):
    __doc__ = BaseDiffusionAttention.__doc__

    framework = "jax"

    @staticmethod
    def _default_dtype() -> Any:
        return jnp.float32

    def __nnx_repr__(self) -> Iterator[reprlib.Object]:
        """Show the module in one line, by itself and within a model, as under torch."""
        # nnx would otherwise print every attribute of the module, one a line
        yield reprlib.Object(type=type(self), empty_repr=f"{self.selection.name}, {self.selection.request}")

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> jax.Array:
        """query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D]; see `DiffusionAttentionImpl.forward`."""
        return self.impl.forward(query, key, value, attn_metadata)
