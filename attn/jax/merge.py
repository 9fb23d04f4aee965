"""Merge partial attention in jax, by the formula of `attn.merge`."""

from collections.abc import Sequence

import jax

from attn.jax.ops import Ops
from attn.merge import check_states, merged


def merge_attn_states(
    outputs: Sequence[jax.Array], lses: Sequence[jax.Array], *, nan_is_empty: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention over all keys from partial results, each over some of them.

    outputs: [T, H, D] each; lses: [H, T] each, natural log, sinks excluded; sequences, or stacked. One with an lse of
    -inf, +inf or NaN is empty and its output is never read; with `nan_is_empty=False` NaN propagates. If all are empty,
    the result is 0 and -inf.
    Returns (output [T, H, D] in the first output's dtype, lse [H, T] float32, or float64 if all are). Raises `ShapeError`.
    """
    check_states(outputs, lses)
    return merged(Ops, outputs, lses, nan_is_empty)
