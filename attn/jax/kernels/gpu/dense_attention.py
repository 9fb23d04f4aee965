"""Dense attention, [B, S, H, D]: the kernels of paged attention over keys where they are, launched by XLA.

On Hopper `hopper_prefill` takes batches of 16-bit elements and of more rows than a decode has. A batch axis that `vmap` adds is
folded into B. Gradients are another function's (`differentiable`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from attn.jax.kernels.gpu.launch import target
from attn.kernels import hopper
from attn.kernels.paged_launch import LayerParams

_FEW = 16  #: rows of a decode


def dense_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, lens: jax.Array | None, layer: LayerParams, return_lse: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Return (output [B, S, H, D], lse [B, S, H] float32, natural log, or None unless `return_lse`).

    query: [B, S, H, D]; key, value: [B, M, K, D], of its dtype: float32, bfloat16 or float16; lens: [B] int32, the number of
    each entry's keys, or None for all. The last row is at the position of the last key. layer: a scale, a soft cap and a window
    (`right` = 0: causal); other rules are not supported.
    """
    return _batched(layer, return_lse)(query, key, value, lens)


def differentiable(attend: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return `attend` of (query, key, value, *more) where it is not differentiated; where it is, `fallback`, whose gradients
    and values are then used. Both return the same; nothing is differentiated by the arguments `more`."""
    # JAX would otherwise differentiate the kernel's call, which has no rule for that.
    function = jax.custom_vjp(attend)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, *more: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(lambda *arrays: fallback(*arrays, *more), query, key, value)
        return out, (pull, len(more))

    # None is a zero cotangent of any type: lengths are integers and have none
    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        pull, more = residuals
        return *pull(cotangent), *[None] * more

    function.defvjp(forward, backward)
    return function


@functools.lru_cache(maxsize=256)
def _batched(layer: LayerParams, return_lse: bool) -> Callable[..., Any]:
    """Return `_attend` for these rules, with its rule for `vmap`."""
    # JAX has no rule that batches a custom call. The cache keeps one function for a layer's rules, so that calls share a
    # program.
    attend = custom_vmap(functools.partial(_attend, layer=layer, return_lse=return_lse))

    @attend.def_vmap
    def _fold(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def flat(array: jax.Array, is_batched: bool) -> jax.Array:
            if not is_batched:
                array = jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(size * array.shape[1], *array.shape[2:])

        out = attend(*jax.tree.map(flat, arrays, tuple(batched)))
        # not -1, which an array without elements does not determine
        return jax.tree.map(lambda x: x.reshape(size, len(x) // size, *x.shape[1:]), out), jax.tree.map(lambda _: True, out)

    return attend


@functools.partial(jax.jit, static_argnames=("layer", "return_lse"))
def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, lens: jax.Array | None, *, layer: LayerParams, return_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    from attn.jax.kernels.gpu.paged_attention import BatchBounds, KVInputs, paged_attention  # Triton, once a call is traced

    (batch, rows, heads, _), (length, kv_heads, size) = query.shape, key.shape[1:]
    if 0 in query.shape or length == 0:
        return jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf) if return_lse else None
    # NumPy's arrays are constants of the program: nothing computes them at each call
    starts = np.arange(0, (batch + 1) * rows, rows, dtype=np.int32)
    flat = query.reshape(-1, heads, size)
    outputs = None
    if rows > _FEW and target()[0] == "sm_90" and hopper.is_on("hopper_prefill"):
        # few rows are a decode: its keys are split, which the prefill kernel cannot
        outputs = _on_hopper(flat, key, value, layer, return_lse, None if lens is None else starts, lens)
    if outputs is None:
        keys = KVInputs(keys=key.reshape(-1, kv_heads, size), values=value.reshape(-1, kv_heads, size))
        # With equal lengths each request sees its own rows' keys; otherwise a table says where its keys begin.
        if lens is not None or rows != length:
            whole = np.full(batch, length, np.int32) if lens is None else lens
            keys = keys._replace(lens=whole, table=np.arange(0, batch * length, length, dtype=np.int32)[:, None])
        outputs = paged_attention(flat, starts, keys, layer, BatchBounds(rows, length), return_lse=return_lse)
    out, lse = outputs
    return out.reshape(query.shape), None if lse is None else jnp.moveaxis(lse.reshape(heads, batch, rows), 0, -1)


def _on_hopper(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: LayerParams,
    return_lse: bool,
    starts: Any,
    lens: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None] | None:
    """Return the Hopper kernel's results; None if it does not support these arrays, or the installed Triton not it.

    starts, lens: None where each request attends all of its keys."""
    from attn.jax.kernels.gpu.hopper_prefill import Out, Prompts, prefill, serves

    table = None if lens is None else np.arange(key.shape[0], dtype=np.int32)[:, None]
    prompts = Prompts(query, starts, key, value, lens=lens, table=table, one_page=True)
    if not serves(prompts, layer.scale < 0):
        return None
    lse = jnp.empty((query.shape[1], query.shape[0]), jnp.float32) if return_lse else None
    out = Out(jnp.empty(query.shape, query.dtype), lse, jnp.zeros(2, jnp.int32))
    rules = layer.of_prompts(0).seeing(key.shape[1], query.shape[0] / key.shape[0])
    # a window or a chunk hides earlier keys, whose values are overwritten
    rules = rules._replace(ends=lens is None and layer.left is None and layer.chunk_size is None)
    try:
        outputs = prefill(out, prompts, rules, layer.factor(1.0), *target())
    except hopper.CannotCompile:
        return None
    return outputs.output, outputs.lse
