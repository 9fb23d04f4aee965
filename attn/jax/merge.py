"""Merge partial attention: (output, lse) pairs over disjoint sets of keys form a commutative monoid (docs/semantics.md §6).

The state is fp32 whatever the dtype of the outputs. Sinks are not part of it: they are applied once, after the last merge.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attn.errors import ShapeError


def merge_attn_states(
    outputs: Sequence[jax.Array], lses: Sequence[jax.Array], *, nan_is_empty: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention over all keys from the attention over parts of them.

    outputs: [T, H, D] each; lses: [H, T] each, natural log, sinks excluded. A part with an lse of -inf, +inf or NaN is
    empty and its output is never read; with `nan_is_empty=False` NaN propagates. If all parts are empty, the result is 0
    and -inf.

    Returns (output [T, H, D] in the first output's dtype, lse [H, T] float32, or float64 if all are). Raises `ShapeError`.
    """
    if not outputs or len(outputs) != len(lses):
        raise ShapeError(f"got {len(outputs)} outputs and {len(lses)} lses: needs equal numbers of both, at least one")
    tokens, heads, _ = shape = outputs[0].shape
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or lse.shape != (heads, tokens):
            raise ShapeError(
                f"outputs[{i}] has shape {list(output.shape)} and lses[{i}] {list(lse.shape)}: "
                f"must be {list(shape)} and {[heads, tokens]}"
            )
    logs = jnp.stack(list(lses))  # [parts, H, T]
    logs = logs.astype(jnp.promote_types(logs.dtype, jnp.float32))
    empty = jnp.isinf(logs) | (jnp.isnan(logs) & nan_is_empty)
    logs = jnp.where(empty, -jnp.inf, logs)
    top = logs.max(0)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(logs - top)
    norm = weights.sum(0)

    def rows(x: jax.Array) -> jax.Array:
        """[..., H, T] -> [..., T, H, 1], to broadcast against outputs."""
        return x.swapaxes(-1, -2)[..., None]

    # select, do not multiply: the output of an empty part may contain anything
    parts = jnp.where(rows(empty), 0, jnp.stack(list(outputs)).astype(logs.dtype))
    merged = (parts * rows(weights)).sum(0)
    merged = jnp.where(rows(norm) == 0, 0, merged / rows(norm))
    return merged.astype(outputs[0].dtype), top + jnp.log(norm)
