"""The jax side of `attn.functional`: array operations for its formula, and running one batch over a temporary cache."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Ops:
    """Array operations under the names that `attn.functional` uses; all can be traced."""

    where = staticmethod(jnp.where)
    # HIGHEST: a TPU would otherwise multiply float32 in bfloat16 passes
    einsum = staticmethod(functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST))
    exp = staticmethod(jnp.exp)
    log = staticmethod(jnp.log)
    tanh = staticmethod(jnp.tanh)
    sigmoid = staticmethod(jax.nn.sigmoid)
    isfinite = staticmethod(jnp.isfinite)
    broadcast_to = staticmethod(jnp.broadcast_to)
    moveaxis = staticmethod(jnp.moveaxis)
    concat = staticmethod(jnp.concatenate)
    any = staticmethod(jnp.any)

    @staticmethod
    @functools.cache
    def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return `formula(xp, rules, *arrays)` jitted: one program for each set of rules and shapes.

        On a TPU a kernel computes the result where it supports the call: no mask, dtype bfloat16 or float32.
        """
        jitted = jax.jit(formula, static_argnums=(0, 1))

        def run(xp: Any, rules: Any, *arrays: Any) -> Any:
            return _by_kernel(rules, *arrays) if _kernel_supports(*arrays) else jitted(xp, rules, *arrays)

        return run

    @staticmethod
    def asarray(x: Any, like: jax.Array) -> jax.Array:
        return jnp.asarray(x)

    @staticmethod
    def arange(start: int, stop: int, like: jax.Array) -> jax.Array:
        return jnp.arange(start, stop)

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
        return jax.lax.stop_gradient(x).max(-1, initial=-jnp.inf)

    @staticmethod
    def add_if(condition: jax.Array, x: jax.Array, more: Callable[[], jax.Array]) -> jax.Array:
        """x + more() if the (0-d) condition holds, else x."""
        return jax.lax.cond(condition, lambda: x + more(), lambda: x)  # type: ignore[no-any-return]

    @staticmethod
    def rows_at_once(n: int, row: int) -> int:
        """All of them: a Python loop over slices would be unrolled into the compiled program."""
        return max(1, n)


def on_tpu(x: jax.Array) -> bool:
    """Whether x is on a TPU; for a tracer, whether the default backend is."""
    if isinstance(x, jax.core.Tracer):
        return jax.default_backend() == "tpu"
    return {device.platform for device in x.devices()} == {"tpu"}


def _kernel_supports(*arrays: Any) -> bool:
    """Whether these are q, k, v and extras for which the TPU kernel computes the formula."""
    if len(arrays) != 4:
        return False
    q, _, _, extras = arrays
    return extras.mask is None and q.dtype in (jnp.bfloat16, jnp.float32) and on_tpu(q)


@functools.partial(jax.jit, static_argnums=0)
def _by_kernel(rules: Any, q: jax.Array, k: jax.Array, v: jax.Array, extras: Any) -> tuple[jax.Array, jax.Array]:
    from attn.jax.kernels.tpu import flash_attention as kernel

    result: tuple[jax.Array, jax.Array] = kernel.flash_attention(
        q,
        k,
        v,
        causal=rules.causal,
        sliding_window=rules.window,
        scale=rules.scale,
        logits_soft_cap=rules.cap,
        alibi_slopes=extras.slopes,
        sinks=extras.sinks,
        return_lse=True,
    )
    return result


def through_backend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: Any,
    batch: Any,
    num_blocks: int,
    arguments: dict[str, Any],
    features: Sequence[str],
) -> tuple[jax.Array, jax.Array | None]:
    """Run one batch through `Attention(**arguments)`. Returns (out [T, H, D], lse [H, T] or None).

    query: [T, H, D]; key, value: [S, K, D], every key of every request, first written at `slots` [S] of a new cache.
    """
    from attn.jax.layer import Attention

    layer = Attention(**arguments, dtype=query.dtype, features=tuple(features))
    cache = layer.new_kv_cache(num_blocks)
    cache = layer.impl.do_kv_cache_update(layer, key, value, cache, jnp.asarray(slots, jnp.int32))
    metadata = layer.builder(config={"bucket": False}).build(0, batch)
    result, _ = jax.jit(layer.impl.apply)(query, None, None, cache, metadata)
    return result if arguments["return_lse"] else (result, None)
