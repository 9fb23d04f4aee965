"""The operations of jax behind framework-neutral code: `attn.arrays.ops_of("jax")`. Those of formulas can be traced."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.jax import kv_cache as caches
from attn.jax.kernels.xla import unpacked
from attn.jax.kernels.xla_mla import numbers
from attn.jax.platforms import platform
from attn.visibility import LayerMask

Array = npt.NDArray[Any]


class Ops:
    """Operations, a namespace without instances, under the names that `attn.torch.ops.Ops` has too."""

    where, stack, concat = jnp.where, jnp.stack, jnp.concatenate
    exp, log, tanh, sigmoid = jnp.exp, jnp.log, jnp.tanh, jax.nn.sigmoid
    isfinite, isinf, isnan = jnp.isfinite, jnp.isinf, jnp.isnan
    any, amax = jnp.any, jnp.max
    broadcast_to, moveaxis, zeros_like = jnp.broadcast_to, jnp.moveaxis, jnp.zeros_like
    # HIGHEST: a TPU would otherwise multiply float32 in bfloat16 passes
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    @staticmethod
    @functools.cache
    def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return `formula(xp, rules, *arrays)` jitted: one program for each set of rules and shapes.

        On a TPU a kernel computes the result where it supports the call: no mask, dtype bfloat16 or float32.
        """
        jitted = jax.jit(formula, static_argnums=(0, 1))

        def run(xp: Any, rules: Any, *arrays: Any) -> Any:
            # positions are int32 under jax, and `rules` may have bounds of any size
            if hasattr(rules, "window"):
                rules = dataclasses.replace(rules, window=LayerMask(window=rules.window).within_int32().window)
            return _by_kernel(rules, *arrays) if _kernel_supports(*arrays) else jitted(xp, rules, *arrays)

        return run

    @staticmethod
    def asarray(x: Any, like: jax.Array) -> jax.Array:
        return jnp.asarray(x)

    @staticmethod
    def arange(start: int, stop: int, like: jax.Array) -> jax.Array:
        return jnp.arange(start, stop)

    @staticmethod
    def ones(like: jax.Array) -> jax.Array:
        """True, of the first two dimensions of `like`."""
        return jnp.ones(like.shape[:2], bool)

    @staticmethod
    def cast(x: jax.Array, like: jax.Array) -> jax.Array:
        return x.astype(like.dtype)

    @staticmethod
    def wide(x: jax.Array) -> jax.Array:
        """`x` in the dtype of the computation: float64 stays, others become float32."""
        return x if x.dtype == jnp.float64 else x.astype(jnp.float32)

    @staticmethod
    def fixed_max(x: jax.Array) -> jax.Array:
        """The maximum over the last axis, without a gradient; -inf over an empty axis."""
        # what is subtracted changes no weight, so it needs no gradient
        return jax.lax.stop_gradient(x).max(-1, initial=-jnp.inf)

    @staticmethod
    def add_if(condition: jax.Array, x: jax.Array, more: Callable[[], jax.Array]) -> jax.Array:
        """x + more() if the (0-d) condition holds, else x."""
        return jax.lax.cond(condition, lambda: x + more(), lambda: x)

    @staticmethod
    def rows_at_once(n: int, row: int) -> int:
        """All of them: a Python loop over slices would be unrolled into the compiled program."""
        return max(1, n)

    @staticmethod
    def needs_gradients(*arrays: jax.Array) -> bool:
        """Whether a call with these arguments must be differentiable: a transformation says so later, and no argument."""
        return False

    @staticmethod
    def valueless(*arguments: Any) -> str:
        """Return the context in which a call with these arguments has no values, or ""."""
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        return "under a transformation of JAX (jit, grad, vmap, scan)" if traced else ""

    @staticmethod
    def bits(array: Any) -> tuple[Array, str]:
        """Return an array as `attn.testing.bits` stores its dtype, and the dtype's name."""
        host = np.asarray(array)
        return bits_of(host), str(host.dtype)

    # a layer and its cache

    @staticmethod
    def attend_once(
        layer: Any, query: jax.Array, key: jax.Array, value: jax.Array, slots: Any, batch: Any, num_blocks: int
    ) -> Any:
        """Run a batch over a new cache that holds key, value [S, K, D] at `slots` [S]. Returns out [T, H, D], or with lse."""
        cache = layer.new_kv_cache(num_blocks)
        cache = layer.impl.do_kv_cache_update(layer, key, value, cache, jnp.asarray(slots, jnp.int32))
        # a batch that is computed once: padding would only add work
        metadata = layer.builder(config={"bucket": False}).build(0, batch)
        return jax.jit(layer.impl.apply)(query, None, None, cache, metadata)[0]

    @staticmethod
    def pages(layer: Any, kv_cache: jax.Array, ids: Array) -> list[Array]:
        """Return the stored keys and values [n, P, K, D] of blocks `ids` [n]. A view may be wider than the head: it is cut."""
        width = layer.impl.head_size if kv_cache.dtype != jnp.uint8 else None  # packed rows are wider than what they hold
        gather = jax.jit(lambda cache, index: [x[index][..., :width] for x in layer.backend.logical_kv_cache(cache)])
        return [bits_of(np.asarray(x)) for x in gather(kv_cache, jnp.asarray(ids, jnp.int32))]

    @staticmethod
    def keys(layer: Any, kv_cache: jax.Array, blocks: jax.Array) -> jax.Array:
        """Return the keys [n * P, K, D] of blocks [n] as the layer reads them; of an MLA layer its rows [n * P, L + Dr]."""
        impl, stored = layer.impl, _key_blocks(layer.backend, kv_cache, blocks)
        if getattr(impl, "kv_lora_rank", None) is None:
            quantised = caches.is_quantised(stored.dtype)
            stored = unpacked(stored, jnp.float32 if quantised else stored.dtype)[..., : impl.head_size]
            stored = stored.reshape(-1, impl.num_kv_heads, impl.head_size)
            return stored * layer._k_scale[..., None] if quantised else stored
        rows = stored.reshape(-1, stored.shape[-1])
        return numbers(rows, jnp.float32, layer._k_scale if caches.is_quantised(rows.dtype) else 1.0)

    @staticmethod
    def up_projection(layer: Any) -> jax.Array:
        """Return an MLA layer's weights [L, H, Dn + Dv]."""
        return jnp.concatenate(layer.impl.weights(layer.kv_b_proj), -1)


@functools.partial(jax.jit, static_argnums=0)  # without jit, a view of the whole cache may be a copy
def _key_blocks(backend: Any, kv_cache: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return the stored keys [n, P, K, D] of blocks [n]."""
    return backend.logical_kv_cache(kv_cache)[0][blocks]


def bits_of(host: Array) -> Array:
    """Return an array as `attn.testing.bits` stores its dtype."""
    # NumPy itself has no such dtypes, only ml_dtypes': files of bits need neither
    kinds = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
    return host.view(kinds[host.dtype.name]) if host.dtype.name in kinds else host


def on_tpu(x: jax.Array) -> bool:
    """Whether x is on a TPU; for a tracer, whether the default device is."""
    # a tracer is on no device yet
    if isinstance(x, jax.core.Tracer):
        return platform().name == "tpu"
    return {device.platform for device in x.devices()} == {"tpu"}


def _kernel_supports(*arrays: Any) -> bool:
    """Whether these are q, k, v and extras for which the TPU kernel computes the formula."""
    if len(arrays) != 4 or not hasattr(arrays[3], "mask"):
        return False
    q, _, _, extras = arrays
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return False  # a kernel's scalars are int32, and its gradient is traced where it is taken
    return extras.mask is None and q.dtype in (jnp.bfloat16, jnp.float32) and on_tpu(q)


@functools.partial(jax.jit, static_argnums=0)
def _by_kernel(rules: Any, q: jax.Array, k: jax.Array, v: jax.Array, extras: Any) -> tuple[jax.Array, jax.Array]:
    from attn.jax.kernels.tpu import flash_attention as kernel

    # the formula aligns the last row with the last key, as the kernel does
    its = kernel.FlashParams(LayerMask(rules.causal, rules.window), rules.scale, rules.cap)
    arrays = kernel.Extras(alibi_slopes=extras.slopes, sinks=extras.sinks)
    return kernel.flash_attention(q, k, v, its, arrays, return_lse=True)
