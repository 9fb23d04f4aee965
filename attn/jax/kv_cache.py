"""The paged cache in jax: allocated, and written functionally as a new value.

A write is one scatter; if the cache is donated to the jitted step, it happens in place. Two pitfalls of JAX are handled: a
scatter at -1 would write the *last* slot, so PAD is mapped out of range and dropped; and a cast to fp8 overflows to NaN, so
codes are clipped first. A quantised cache (one-byte elements) stores x / scale, saturated and rounded to nearest even: NaN
stays NaN in fp8 and becomes 0 in int8. Any other cache stores x itself and ignores scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn.backends.abstract import AttentionBackend, KVCacheSpec
from attn.dtypes import DTYPES, dtype_name, kv_cache_element
from attn.errors import ShapeError
from attn.jax.kernels.division import divide


def element_type(kv_cache_dtype: str, dtype: Any) -> Any:
    """The dtype of a cache's elements for a model of `dtype`. Raises `DTypeError` for an unknown name."""
    return jnp.dtype(kv_cache_element(kv_cache_dtype, dtype_name(dtype)))


def is_quantised(element: Any) -> bool:
    """Whether a cache of this element type stores codes that a scale multiplies."""
    return jnp.dtype(element).itemsize == 1


def allocate(backend_cls: type[AttentionBackend], kv_cache_spec: KVCacheSpec, num_blocks: int, device: Any = None) -> jax.Array:
    """Return a zeroed cache of `num_blocks` blocks in the backend's layout; `device` may be a sharding (None: the default)."""
    spec = kv_cache_spec
    shape = backend_cls.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype)
    return jnp.zeros(shape, element_type(spec.kv_cache_dtype, spec.dtype), device=device)


def constant(value: Any) -> Any:
    """Convert `value` to float32 for a layer to keep.

    The result is a NumPy array: an array created while JAX traces (a module built under jit or `nnx.eval_shape`) would be a
    tracer, which must not outlive the trace. A tracer that is passed in stays one. Raises TypeError for an `nnx.Variable`: its
    later values (a checkpoint that is loaded into the model) would not reach the layer.
    """
    if isinstance(value, nnx.Variable):
        kind = f"an nnx.{type(value).__name__} of shape {list(value.shape)}"
        raise TypeError(
            f"{kind}: a layer keeps sinks, slopes and scales as constants, which do not follow a variable: pass its value, "
            "variable[...], and make the layer once it is loaded, or within the function that is jitted"
        )
    return value.astype(jnp.float32) if isinstance(value, jax.core.Tracer) else np.asarray(value, np.float32)


def check_scale(name: str, value: Any, num_kv_heads: int) -> Any:
    """Return a scale as float32, 0-d or [K].

    Raises `ShapeError`, and ValueError unless finite and positive (a tracer's values are not checked).
    """
    scale = constant(value)
    if scale.shape not in ((), (num_kv_heads,)):
        raise ShapeError(f"{name} has shape {list(scale.shape)}: must be a scalar or [{num_kv_heads}], one per kv head")
    if isinstance(scale, np.ndarray) and not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"{name}={scale.tolist()} must be finite and above 0")
    return scale


def encode(x: jax.Array, element: Any, scale: Any = 1.0) -> jax.Array:
    """Convert x [..., K, D] to the elements of a cache of `element`. Elements that already have that type are unchanged."""
    if not is_quantised(element) or x.dtype == element:
        return x.astype(element)
    if element == jnp.uint8:
        return with_own_scale(divide(x.astype(jnp.float32), jnp.asarray(scale, jnp.float32)[..., None]))
    # a NaN passes through the clip
    limit = DTYPES[dtype_name(element)].max
    # [..., None]: a scale of each kv head meets [K, D], one number both
    codes = jnp.clip(divide(x.astype(jnp.float32), jnp.asarray(scale, jnp.float32)[..., None]), -limit, limit)
    if element == jnp.int8:
        # int8 has no NaN, and a cast would give any number; `jnp.round` rounds ties to even, as the cast to fp8 does
        codes = jnp.where(jnp.isnan(codes), 0.0, jnp.round(codes))
    return codes.astype(element)


def with_own_scale(x: jax.Array) -> jax.Array:
    """The row [..., D / 2 + 4] of x [..., D] float32 in an int4_per_token_head cache: two codes a byte, then the float32 scale.

    A row whose largest number is not finite has a scale of NaN: an infinite one would make zeros of its other numbers.
    """
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(jnp.isfinite(largest), divide(largest, jnp.float32(7)), jnp.nan)
    codes = jnp.round(divide(x, jnp.where(scale > 0, scale, 1.0)[..., None]))
    low, high = jnp.split((jnp.clip(jnp.nan_to_num(codes), -7, 7) + 8).astype(jnp.uint8), 2, axis=-1)
    return jnp.concatenate([low | high << 4, jax.lax.bitcast_convert_type(scale, jnp.uint8)], axis=-1)


def drop_pads(slot_mapping: jax.Array, num_slots: int) -> jax.Array:
    """Map negative entries of `slot_mapping` out of range, for a scatter with mode="drop"."""
    return jnp.where(slot_mapping < 0, num_slots, slot_mapping)


def write(
    key: jax.Array,
    value: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    slot_mapping: jax.Array,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Write key, value [T, K, D] at `slot_mapping` [T] (-1: nowhere). Returns new caches (keys, values), each [N, P, K, D]."""

    def one(x: jax.Array, cache: jax.Array, scale: Any) -> jax.Array:
        # [slots, K, D]: a view, since blocks and their tokens are the outer dimensions
        flat = cache.reshape(-1, *cache.shape[2:])
        slots = drop_pads(slot_mapping, flat.shape[0])
        return flat.at[slots].set(encode(x, cache.dtype, scale), mode="drop").reshape(cache.shape)

    return one(key, key_cache, k_scale), one(value, value_cache, v_scale)


def write_pair(
    key: jax.Array, value: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array, k_scale: Any = 1.0, v_scale: Any = 1.0
) -> jax.Array:
    """`write` for keys and values in one array [2, N, P, K, D]: one scatter, so that a donated cache is never copied."""
    # [2, slots, K, D], in which one list of slots serves keys and values
    flat = kv_cache.reshape(2, -1, *kv_cache.shape[3:])
    codes = jnp.stack([encode(key, kv_cache.dtype, k_scale), encode(value, kv_cache.dtype, v_scale)])
    return flat.at[:, drop_pads(slot_mapping, flat.shape[1])].set(codes, mode="drop").reshape(kv_cache.shape)


def extent(backend: type[AttentionBackend], kv_cache: jax.Array) -> tuple[int, int]:
    """(blocks, tokens per block) of a cache in the backend's layout."""
    num_blocks, block_size = jax.eval_shape(backend.logical_kv_cache, kv_cache)[0].shape[:2]
    return num_blocks, block_size


def load(layer: Any, kv_cache: jax.Array, slots: Any, keys: jax.Array, values: jax.Array, codes: bool) -> jax.Array:
    """Implement `BaseLayer.load_pages` after its checks: rows [T, ...] at slots [T]. `encode` does not change codes."""
    return layer.impl.do_kv_cache_update(layer, keys, values, kv_cache, jnp.asarray(slots, jnp.int32))
