"""flax: an `attn` layer as the `attention_fn` of `nnx.MultiHeadAttention` and of linen's.

    layer = attn.jax.Attention(8, 64, num_kv_heads=2, sliding_window=128, sinks=sinks)
    block = nnx.MultiHeadAttention(8, 512, num_kv_heads=2, attention_fn=attention_fn(layer), decode=False, rngs=rngs)

A layer provides its scale, window, cap, sinks and backend; `attn.jax.attention_fn` has none of these, and is differentiable
in every call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attn
import attn.jax
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import ENCODER_TYPES
from attn.errors import UnsupportedError
from attn.jax.kv_cache import allocate
from attn.jax.layer import Attention


def attention_fn(layer: Attention) -> Callable[..., jax.Array]:
    """Return a function for flax: takes query [..., T, H, D], key and value [..., S, K, D], returns [..., T, H, D].

    Calls with T == S, causal or not, use the layer's backend over a cache created for the call, without gradients, like every
    call of the layer. A mask array (of any dtype, non-zero = attend), and causality with T != S, which flax counts from the
    first row, use `attn.attention`: the same result in float32, differentiable. A window needs T == S. The function raises
    `UnsupportedError` for dropout, biases, sown weights, and a causal call of an encoder's layer.
    """

    def of_layer(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any, mask: Any, *, is_causal: bool) -> jax.Array:
        return _dense(layer, q, k, v, bias, mask, is_causal)

    return functools.partial(attn.jax.attention_fn, attend=of_layer)


def _dense(
    layer: Attention, query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, mask: Any, causal: bool
) -> jax.Array:
    impl, name = layer.impl, layer.backend.get_name()
    (batch, rows, heads, size), keys = query.shape, key.shape[1]
    encoder = impl.attn_type in ENCODER_TYPES
    if bias is not None:
        raise UnsupportedError(f"{name}: bias is not supported (attn.jax.attention_fn supports it)")
    if causal and encoder:
        raise UnsupportedError(f"{name}: is_causal=True, but a layer of type {impl.attn_type} is not causal")
    # a window needs positions: flax counts them from the first row, this library from the last
    if rows != keys and impl.window != (None, None):
        need = "sliding_window needs as many queries as keys"
        raise UnsupportedError(f"{name}: {need} (got {rows} and {keys}): query positions are ambiguous")
    # the layer's backend has neither masks of arrays nor rows that are not the keys' own tokens
    if mask is not None or rows != keys:
        if causal and rows != keys:
            triangle = jnp.tril(jnp.ones((1, 1, rows, keys), bool))
            mask, causal = triangle if mask is None else mask & triangle, False
        rules = {name: getattr(impl, name) for name in ("window", "logits_soft_cap", "alibi_slopes", "sinks")}
        return attn.attention(query, key, value, causal=causal, scale=impl.signed_scale, mask=mask, layout="BSHD", **rules)
    if batch * rows == 0:
        return jnp.zeros_like(query)
    spec, lens, blocks = layer.kv_cache_spec, [rows] * batch, -(-rows // layer.kv_cache_spec.block_size)
    table = np.arange(batch * blocks).reshape(batch, blocks)
    described = CommonAttentionMetadata.from_lens(lens, lens, table, spec.block_size, causal=causal)
    # shapes are flax's own and static: padding to a bucket would compile no fewer programs
    metadata = layer.backend.get_builder_cls()(spec, config={"bucket": False}).build(0, described)
    # made for this call: its keys are those of the call, and nothing is read later
    cache = None if encoder else allocate(layer.backend, spec, max(1, batch * blocks))
    query, key, value = (x.reshape(batch * rows, -1, size) for x in (query, key, value))
    out, _ = layer(query, key, value, cache, metadata)
    return out.reshape(batch, rows, heads, size)
