"""The jax side of `attn.recording`: read a call's arrays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.jax import kv_cache as caches

Array = npt.NDArray[Any]


class Ops:
    """Operations on arrays under the names that `attn.recording` uses."""

    @staticmethod
    def valueless(*arguments: Any) -> str:
        """Return where a call with these arguments has no values, "" if it has them."""
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        return "under a transformation of JAX (jit, grad, vmap, scan)" if traced else ""

    @staticmethod
    def is_finite(out: jax.Array, tokens: Any) -> bool:
        return bool(jnp.isfinite(out[: int(tokens)]).all())

    @staticmethod
    def bits(array: Any) -> tuple[Array, str]:
        """Return an array as `attn.testing.bits` stores its dtype, and the dtype's name."""
        host = np.asarray(array)
        return bits_of(host), str(host.dtype)

    @staticmethod
    def rows(x: jax.Array, total: int, shape: tuple[int, ...]) -> jax.Array:
        """Return the first `total` rows as [total, *shape]; rows of another size unchanged."""
        x = x[:total]
        return x.reshape(-1, *shape) if math.prod(x.shape[1:]) == math.prod(shape) else x

    @staticmethod
    def joined(parts: list[jax.Array]) -> jax.Array:
        return jnp.concatenate(parts, -1)

    @staticmethod
    def num_blocks(layer: Any, kv_cache: jax.Array) -> int:
        return caches.extent(layer.backend, kv_cache)[0]

    @staticmethod
    def pages(layer: Any, kv_cache: jax.Array, ids: Array) -> list[Array]:
        """Return the stored keys and values [n, P, K, D] of blocks `ids` [n]. A view may be wider than the head: it is cut."""
        width = layer.impl.head_size if kv_cache.dtype != jnp.uint8 else None  # packed rows are wider than what they hold
        taken = jax.jit(lambda cache, at: [x[at][..., :width] for x in layer.backend.logical_kv_cache(cache)])
        return [bits_of(np.asarray(x)) for x in taken(kv_cache, jnp.asarray(ids, jnp.int32))]

    @staticmethod
    def up_projection(layer: Any) -> jax.Array:
        """Return an MLA layer's weights [L, H, Dn + Dv]."""
        return jnp.concatenate(layer.impl.weights(layer.kv_b_proj), -1)


def bits_of(host: Array) -> Array:
    """Return an array as `attn.testing.bits` stores its dtype."""
    kinds = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
    return host.view(kinds[host.dtype.name]) if host.dtype.name in kinds else host
