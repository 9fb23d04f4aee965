"""Base classes of the diffusion backends for jax: array operations.

Everything but shapes may be traced, so a layer works under jit, grad and shard_map; unsupported calls raise while tracing. Key
masks stay masks, because a shape cannot depend on the number of present keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn.arrays import to_framework
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseAttentionImpl


class DenseBackend(DiffusionAttentionBackend):
    """Base of the diffusion backends for jax."""


class DenseImpl(DenseAttentionImpl):
    framework = "jax"

    def _as_mask(self, given: Any, like: jax.Array) -> jax.Array:
        mask: jax.Array = to_framework(given, "jax")
        return mask

    def _prefixes(self, lens: tuple[int, ...], like: jax.Array) -> jax.Array:
        return jnp.asarray(np.arange(like.shape[1]) < np.array(lens)[:, None])

    def _all_present(self, like: jax.Array) -> jax.Array:
        return jnp.ones(like.shape[:2], bool)

    def _concatenated(self, arrays: list[jax.Array]) -> jax.Array:
        return jnp.concatenate(arrays, 1)

    def _zeros_like(self, array: jax.Array) -> jax.Array:
        return jnp.zeros_like(array)
