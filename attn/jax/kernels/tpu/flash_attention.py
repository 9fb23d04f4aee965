"""Dense attention for TPUs, differentiable: encoders, cross attention, diffusion, training.

The algorithm is FlashAttention's (arXiv 2205.14135, 2307.08691): scores are never stored, and the backward pass recomputes
them from the log-sum-exp. On a TPU the keys of a kv head are all in VMEM and are fetched once. The grid is (sequences,
heads that share a unit, groups of rows), and all arrays are transposed (see `_flash`); XLA transposes them before and
after, at no cost if the producer of the queries can write them in that layout. Contexts too long for VMEM take several
launches, merged by their log-sum-exps.

Shape letters: B sequences, S rows, M keys, H query heads, K kv heads, G = H / K, D head size, Dv head size of values.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _flash_backward, _flash_forward, _launch
from attn.jax.kernels.tpu._chips import chip_of
from attn.jax.kernels.tpu._flash import TILE, FlashParams, Masks, Static
from attn.jax.kernels.tpu._flash_layout import Extras, Layout, layout_of, masks_of
from attn.jax.kernels.tpu._refs import LOG2_E
from attn.visibility import Visibility

__all__ = ["Extras", "FlashParams", "flash_attention"]

Arrays = tuple[jax.Array, jax.Array, jax.Array]


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rules: FlashParams,
    extras: Extras,
    *,
    return_lse: bool = False,
    chip: str | None = None,
    interpret: Any = None,
) -> Any:
    """Compute out [B, S, H, Dv] in the dtype of q, or (out, lse [B, H, S] float32, natural log, without the sink).

    q: [B, S, H, D]; k: [B, M, K, D]; v: [B, M, K, Dv]; all bfloat16 or all float32. Head h reads kv head h // (H / K). Row i of
    sequence b is at position p = i + kv_lens[b] - S: the last row is aligned with the last key. So right-padded rows and keys
    under causality need no kv_lens: no real row sees a padding key. chip: v5e, v6e, ... and interpret: False or
    `pltpu.InterpretParams`; by default the TPU that is compiled for, or else the interpreter.

    A row that sees no key is 0 and its lse -inf. Masked keys have no effect, NaN included; a NaN that is seen affects the
    rows that see it. Differentiable once, in reverse mode, with respect to q, k, v and sinks, through out and lse. Raises
    ValueError for invalid shapes and arguments, TypeError for dtypes, for the gradient of `alibi_slopes` and for second
    derivatives.
    """
    _check(q, k, v, extras)
    mask, cap = rules.mask.within_int32(), rules.logits_soft_cap
    if any(side is not None and side < 0 for side in mask.window) or mask.chunk_size is not None:
        raise ValueError(f"{mask}: each side of the window must be None or at least 0, and chunk_size None")
    if cap is not None and not (math.isfinite(cap) and cap >= 0):
        raise ValueError(f"logits_soft_cap={cap}: must be finite and at least 0 (0 or None: off)")
    device = _launch.device(chip, interpret)
    chip_of(device.chip)
    scale = q.shape[3] ** -0.5 if rules.scale is None else float(rules.scale)
    if scale < 0:  # the kernels bound scores by a positive scale
        q, scale = -q, -scale
    out, lse = _attention(Static(mask, scale, cap or None, rules.block_sizes, device), q, k, v, extras)
    return (out, lse) if return_lse else out


def _check(q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if {q.ndim, k.ndim, v.ndim} != {4}:
        raise ValueError(f"{shapes}: must be [B, S, H, D], [B, M, K, D], [B, M, K, Dv]")
    batch, rows, num_heads, head_size = q.shape
    keys, num_kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_size or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{shapes}: sequences must agree, k and v in keys and heads, q and k in head size")
    if num_kv_heads == 0 or num_heads % num_kv_heads or head_size == 0:
        raise ValueError(f"{shapes}: {num_heads} query heads must be a multiple of {num_kv_heads} kv heads, head size positive")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}: must be all bfloat16 or all float32")
    if (extras.q_segment_ids is None) != (extras.kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids: give both or neither")
    expected = Extras((batch, rows), (batch, keys), (num_heads,), (num_heads,), (batch,))  # type: ignore[arg-type]
    for name, array, shape in zip(Extras._fields, extras, expected, strict=True):
        if array is None:
            continue
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {list(array.shape)}: must be {list(shape)}")  # type: ignore[arg-type]
        integral = name not in ("alibi_slopes", "sinks")
        if jnp.issubdtype(array.dtype, jnp.integer) != integral:
            raise TypeError(f"{name} has dtype {array.dtype}: must be {'int32' if integral else 'float32'}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> tuple[jax.Array, jax.Array]:
    """(out [B, S, H, Dv], lse [B, H, S])."""
    if 0 in (*q.shape, *v.shape):
        shape = (q.shape[0], q.shape[2], q.shape[1])
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(shape, -jnp.inf, jnp.float32)
    # A weight of 0 times NaN is NaN in a product, so values enter it finite, and what they lack is added to the rows that see
    # it. The check costs a pass over the values; the repair runs only if one is not finite.
    out, lse = _forward(static, q, k, _finite(v), extras)
    return lax.cond(jnp.isfinite(v).all(), lambda: out, lambda: _with_nonfinite(static, out, v, extras)), lse


def _attention_fwd(static: Static, q: Any, k: Any, v: Any, extras: Any) -> tuple[Any, Any]:
    slopes = extras.alibi_slopes
    # with `symbolic_zeros` the rule knows which arguments are differentiated
    if slopes is not None and slopes.perturbed:
        raise TypeError("alibi_slopes have no gradient: pass jax.lax.stop_gradient(alibi_slopes)")
    q, k, v = q.value, k.value, v.value
    extras = Extras(*(x if x is None else x.value for x in extras))
    out, lse = _attention(static, q, k, v, extras)
    return (out, lse), ((q, k, v), extras, (out, lse))


def _attention_bwd(static: Static, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    qkv, extras, results = residuals
    dense = tuple(
        # a result that does not enter the loss has a symbolic zero, which a kernel cannot read
        jnp.zeros(like.shape, like.dtype) if isinstance(x, jax.custom_derivatives.SymbolicZero) else x
        for x, like in zip(cotangents, results, strict=True)
    )
    dq, dk, dv, d_sinks = _gradients(static, qkv, extras, results, dense)
    return dq, dk, dv, Extras(None, None, None, d_sinks, None)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    static: Static, qkv: Arrays, extras: Extras, results: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients with respect to q, k, v and sinks; results, cotangents: of out and lse.

    Let f = sigmoid(lse - sink) be the fraction of a row's weight that is not the sink's, and p the probabilities
    without a sink. Then dS = p * (f * dO . v - (f * dO . out - dlse)): the effect of the sink stays outside the
    kernel.
    """
    (q, k, v), (out, lse), (d_out, d_lse) = qkv, results, cotangents
    if 0 in (*q.shape, *v.shape):
        zeros: Any = jax.tree.map(jnp.zeros_like, (q, k, v, extras.sinks))
        return zeros  # type: ignore[no-any-return]
    # dO . out, which is each row's sum of p dP (arXiv 2205.14135): nothing of the size of the scores is needed for it
    wide = d_out.astype(jnp.float32)
    delta = jnp.sum(wide * out.astype(jnp.float32), axis=3).swapaxes(1, 2)  # [B, H, S]
    d_sinks = None
    if extras.sinks is not None:
        fraction = jax.nn.sigmoid(lse - extras.sinks[:, None])
        d_sinks = -jnp.sum(delta * (1 - fraction), axis=(0, 2)).astype(extras.sinks.dtype)
        # f enters the kernel through dO and delta, so that it computes without a sink
        d_out = (wide * fraction.swapaxes(1, 2)[..., None]).astype(d_out.dtype)
        delta *= fraction
    # a row without keys: its log-sum-exp is a constant, whatever cotangent it has
    d_lse = jnp.where(lse == -jnp.inf, 0.0, d_lse)
    return *_backward(static, qkv, extras, lse, d_out, delta - d_lse), d_sinks


@_gradients.defjvp
def _no_second_derivative(static: Static, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "flash_attention is differentiable once: for second derivatives give attn.attention a mask, which takes its formula"
    )


# Launches.


def _each_launch(layout: Layout, step: Any, stacked: Any) -> Any:
    """Call step(its slice of `stacked`) for each launch, and stack the results."""
    # no loop around a single launch
    if layout.launches == 1:
        return jax.tree.map(lambda x: x[None], step(jax.tree.map(lambda x: x[0], stacked)))
    return lax.map(step, stacked)


def _split(masks: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(arrays specific to each launch, arrays that launches share)."""
    per_launch = {name: x for name, x in masks.items() if name in ("bounds", "spans", "key_segments")}
    return per_launch, {name: x for name, x in masks.items() if name not in per_launch}


def _forward(static: Static, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> tuple[jax.Array, jax.Array]:
    layout = layout_of(static, q, v, extras, backward=False)
    per_launch, shared = _split(masks_of(layout, extras))
    single = layout.launches == 1
    # A sink is applied once (docs/semantics.md §7): by the kernel if it sees all keys, else after the merge.
    layout = dataclasses.replace(layout, cfg=dataclasses.replace(layout.cfg, sinks=single and extras.sinks is not None))
    query = layout.columns(q)
    # partial results are merged before they are rounded
    out_dtype = q.dtype if single else jnp.float32

    def step(operands: Any) -> Any:
        keys, values, masks = operands
        arrays = {**masks, **shared, "query": query, "keys": keys, "values": values}
        return _launch_forward(layout, arrays, out_dtype)

    # [launches, B, K, keys, D] and [launches, B, K, Dv, keys]: as the two products take them (`_flash_forward`)
    keys, values = layout.of_keys(k), layout.of_keys(v).swapaxes(3, 4)
    outs, lses = _each_launch(layout, step, (keys, values, per_launch))
    if single:
        out, lse = outs[0], lses[0]
    else:
        m = jnp.max(lses, axis=0)
        # a row that no launch has a key for
        m = jnp.where(m == -jnp.inf, 0.0, m)
        weights = jnp.exp(lses - m)
        total = jnp.sum(weights, axis=0)
        lse = m + jnp.log(total)
        if extras.sinks is not None:
            total += jnp.exp(layout.by_rule(extras.sinks)[None, :, None, None] - m)
        out = jnp.sum(weights * outs, axis=0) / jnp.where(total == 0, 1.0, total)
    lse = layout.of_columns(lse)[..., 0].swapaxes(1, 2)
    return layout.of_columns(out).astype(q.dtype), lse


def _launch_forward(layout: Layout, arrays: dict[str, jax.Array], out_dtype: Any) -> Any:
    cfg, query, values = layout.cfg, arrays["query"], arrays["values"]
    out_shapes = {
        "out": jax.ShapeDtypeStruct((*query.shape[:3], values.shape[2], cfg.rows), out_dtype),
        "lse": jax.ShapeDtypeStruct((*query.shape[:3], 1, cfg.rows), jnp.float32),
    }
    scratch = {
        "total": pltpu.VMEM((cfg.units, 8, cfg.rows), jnp.float32),
        "acc": pltpu.VMEM((cfg.units, values.shape[2], cfg.rows), jnp.float32),
        "m": pltpu.VMEM((8, cfg.rows), jnp.float32),
    }

    def run(refs: dict[str, Any]) -> None:
        _flash_forward.run(cfg, _flash_forward.ForwardRefs(**refs))

    results = _call(layout, run, arrays, out_shapes, scratch, "flash_attention")
    return results["out"], results["lse"]


def _backward(static: Static, qkv: Arrays, extras: Extras, lse: jax.Array, d_out: jax.Array, delta: jax.Array) -> Arrays:
    """(dq, dk, dv); lse, delta: [B, H, S] float32.

    Non-finite values take effect through lse and delta, and are zero in the products, which masks do not guard.
    """
    q, k, v = qkv
    layout = layout_of(static, q, v, extras, backward=True)
    cfg = layout.cfg
    per_launch, shared = _split(masks_of(layout, extras))
    q, k, v, d_out = (_finite(x) for x in (q, k, v, d_out))
    # exp2(s - inf) is 0: rows without keys, and padding rows, add nothing to any gradient
    exponent = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    shared |= {
        "query": layout.columns(q),
        "d_out": layout.columns(d_out),
        "lse": layout.columns(exponent.swapaxes(1, 2)[..., None], constant_values=jnp.inf),
        "delta": layout.columns(delta.swapaxes(1, 2)[..., None]),
    }
    # launches add up to one gradient, in float32
    dq_dtype = q.dtype if layout.launches == 1 else jnp.float32

    def step(operands: Any) -> Any:
        keys, values, masks = operands
        # keys in both orders, as two products take them: by rows for the scores, by columns for dq
        arrays = {**masks, **shared, "keys": keys, "key_columns": keys.swapaxes(2, 3), "values": values}
        out_shapes = {
            "dq": jax.ShapeDtypeStruct(arrays["query"].shape, dq_dtype),
            "dk": jax.ShapeDtypeStruct(keys.swapaxes(2, 3).shape, jnp.float32),
            "dv": jax.ShapeDtypeStruct(values.swapaxes(2, 3).shape, jnp.float32),
        }
        scratch = {
            "p_ds": pltpu.VMEM((2, 2, TILE, cfg.rows), q.dtype),
            "acc": pltpu.VMEM((cfg.units, q.shape[3], cfg.rows), jnp.float32),
        }

        def run(refs: dict[str, Any]) -> None:
            _flash_backward.run(cfg, layout.split, _flash_backward.BackwardRefs(**refs))

        return _call(layout, run, arrays, out_shapes, scratch, "flash_attention_backward")

    gradients = _each_launch(layout, step, (layout.of_keys(k), layout.of_keys(v), per_launch))
    dq = gradients["dq"][0] if layout.launches == 1 else jnp.sum(gradients["dq"], axis=0).astype(q.dtype)
    dk, dv = (layout.from_keys(gradients[name].swapaxes(3, 4)) for name in ("dk", "dv"))
    # dq is scaled in the kernel, where it is finished; dk only here, after the last group
    return layout.of_columns(dq), (dk * static.scale).astype(k.dtype), dv.astype(v.dtype)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _call(
    layout: Layout, run: Any, arrays: dict[str, jax.Array], out_shapes: dict[str, Any], scratch: dict[str, Any], name: str
) -> dict[str, jax.Array]:
    """The pallas_call: run(inputs and outputs, by name), on the blocks that `_spec` defines by name."""
    cfg, scalars = layout.cfg, [n for n in ("bounds", "spans") if n in arrays]
    vectors = [n for n in arrays if n not in scalars]
    names = [*scalars, *vectors, *out_shapes, *scratch]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        run({"masks": Masks(*(named.pop(n, None) for n in Masks._fields)), **named})

    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(layout.batch, layout.unit_heads, cfg.groups),
            in_specs=[_spec(layout, n, arrays[n].shape) for n in vectors],
            out_specs=[_spec(layout, n, x.shape) for n, x in out_shapes.items()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(out_shapes.values()),
        # Sequences may run on several cores. Heads and groups are in order: gradients of keys add up over them
        # (`_flash_backward`).
        compiler_params=_launch.compiler_params(cfg.device.chip, "parallel", "arbitrary", "arbitrary"),
        interpret=cfg.device.interpret,
        name=name,
    )(*(arrays[n] for n in (*scalars, *vectors)))
    return dict(zip(out_shapes, results, strict=True))


def _spec(layout: Layout, name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
    """The block of an array that a grid step (sequence b, heads' unit h, group g) works on."""
    cfg, split = layout.cfg, layout.split
    if name == "rules":
        return pl.BlockSpec((1, *shape[1:]), lambda b, h, g, *_: (h, 0, 0))
    if name == "row_segments":
        return pl.BlockSpec((1, cfg.units, 1, cfg.rows), lambda b, h, g, *_: (b, g, 0, 0))
    if name == "key_segments":
        return pl.BlockSpec((1, *shape[1:]), lambda b, h, g, *_: (b, 0, 0))
    # `split` heads' units share a kv head: its keys stay in VMEM while the index is the same
    if len(shape) == 4:  # of keys
        return pl.BlockSpec((1, 1, *shape[2:]), lambda b, h, g, *_: (b, h // split, 0, 0))
    return pl.BlockSpec((1, 1, cfg.units, *shape[3:]), lambda b, h, g, *_: (b, h, g, 0, 0))


# Non-finite values.


def _with_nonfinite(static: Static, out: jax.Array, v: jax.Array, extras: Extras) -> jax.Array:
    """Add to out the effect of NaN and infinite values, zeros so far, on the rows that see them."""
    batch, rows, num_heads, size = out.shape
    num_keys, num_kv_heads = v.shape[1:3]
    # rows at a time: a mask of all rows and keys may be larger than any other array
    step = min(rows, 256)
    nonfinite = jnp.stack([v == jnp.inf, v == -jnp.inf, jnp.isnan(v)]).astype(jnp.bfloat16)

    def hits(first: jax.Array) -> jax.Array:
        # the last step repeats its last row, and the surplus is cut off
        row = jnp.minimum(first + jnp.arange(step), rows - 1)
        seen = _seen(static, row, rows, num_keys, batch, extras).astype(jnp.bfloat16)
        return jnp.einsum("brm,nbmkd->nbrkd", seen, nonfinite, preferred_element_type=jnp.float32) > 0

    starts = jnp.arange(0, rows, step)
    affected = lax.map(hits, starts).transpose(1, 2, 0, 3, 4, 5).reshape(3, batch, -1, num_kv_heads, 1, size)[:, :, :rows]
    grouped = out.reshape(batch, rows, num_kv_heads, -1, size)
    for is_affected, value in zip(affected, (jnp.inf, -jnp.inf, jnp.nan), strict=True):
        grouped = grouped + jnp.where(is_affected, value, 0).astype(out.dtype)  # both infinities make NaN, as they should
    return grouped.reshape(out.shape)


def _seen(static: Static, row: jax.Array, rows: int, num_keys: int, batch: int, extras: Extras) -> jax.Array:
    """[B, R, M]: which keys the rows [R] see."""
    lens = jnp.full(batch, num_keys) if extras.kv_lens is None else extras.kv_lens
    position = (row + lens[:, None] - rows)[..., None]
    j = jnp.arange(num_keys)
    seen = (j < lens[:, None, None]) & Visibility(static.mask).allowed(position, j)
    seen = jnp.broadcast_to(seen, (batch, row.size, num_keys))
    if extras.q_segment_ids is not None and extras.kv_segment_ids is not None:
        seen &= extras.q_segment_ids[:, row, None] == extras.kv_segment_ids[:, None]
    return seen
