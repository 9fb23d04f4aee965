"""The jax side of `attn.recording`: read a call's arrays."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.jax import kv_cache as caches
from attn.jax.kernels.xla_mla import numbers

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
    def array(values: Any, like: jax.Array) -> jax.Array:
        return jnp.asarray(values)

    @staticmethod
    def keys(layer: Any, kv_cache: jax.Array, blocks: jax.Array) -> jax.Array:
        """Return the keys [n * P, K, D] of blocks [n] as the layer reads them; latents expanded, [n * P, H, Dn + Dr]."""
        impl, stored = layer.impl, _key_blocks(layer.backend, kv_cache, blocks)
        if getattr(impl, "kv_lora_rank", None) is None:
            stored = stored[..., : impl.head_size].reshape(-1, impl.num_kv_heads, impl.head_size)
            return stored.astype(jnp.float32) * layer._k_scale[..., None] if caches.is_quantised(stored.dtype) else stored
        stored = stored.reshape(-1, stored.shape[-1])
        rows = numbers(stored, jnp.float32, layer._k_scale if caches.is_quantised(stored.dtype) else 1.0)
        rank, end = impl.kv_lora_rank, impl.kv_lora_rank + impl.qk_rope_head_dim
        nope = impl.weights(layer.kv_b_proj)[0].astype(jnp.float32)
        latent, rotary = rows[:, :rank], rows[:, None, rank:end]
        each = (len(rows), impl.num_heads, end - rank)
        heads = jnp.einsum("ml,lhd->mhd", latent, nope, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([heads, jnp.broadcast_to(rotary, each)], -1)

    @staticmethod
    def up_projection(layer: Any) -> jax.Array:
        """Return an MLA layer's weights [L, H, Dn + Dv]."""
        return jnp.concatenate(layer.impl.weights(layer.kv_b_proj), -1)


@functools.partial(jax.jit, static_argnums=0)  # without jit, a view of the whole cache may be a copy
def _key_blocks(backend: Any, kv_cache: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return the stored keys [n, P, K, D] of blocks [n]."""
    return backend.logical_kv_cache(kv_cache)[0][blocks]  # type: ignore[no-any-return]


def bits_of(host: Array) -> Array:
    """Return an array as `attn.testing.bits` stores its dtype."""
    kinds = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
    return host.view(kinds[host.dtype.name]) if host.dtype.name in kinds else host
