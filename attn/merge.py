"""The formula of `merge_attn_states`, over the operations of either framework (`attn.torch.merge`, `attn.jax.merge`).

(output, lse) pairs over disjoint sets of keys form a commutative monoid (docs/semantics.md §6). The state is fp32 for outputs
of any dtype. Sinks are not part of it: they are applied once, after the last merge.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from attn.errors import ShapeError


def check_states(outputs: Sequence[Any], lses: Sequence[Any]) -> None:
    """Raise `ShapeError` unless there is one lse [H, T] for each output [T, H, D], and at least one of both."""
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ShapeError(f"got {len(outputs)} outputs and {len(lses)} lses: needs equal numbers of both, at least one")
    tokens, heads, _ = shape = outputs[0].shape
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or lse.shape != (heads, tokens):
            raise ShapeError(
                f"outputs[{i}] has shape {list(output.shape)} and lses[{i}] {list(lse.shape)}: "
                f"must be {list(shape)} and {[heads, tokens]}"
            )


def merged(xp: Any, outputs: Sequence[Any], lses: Sequence[Any], nan_is_empty: bool) -> tuple[Any, Any]:
    """Return (output, lse) of all states by the operations `xp`; arguments and result are those of `merge_attn_states`."""
    logs = xp.wide(xp.stack(list(lses)))  # [states, H, T]
    # An infinite log-sum-exp of either sign is an empty result: FlashAttention 2 returns +inf for a row without keys,
    # FlashAttention 3 -inf (vLLM's merge_attn_states treats both alike).
    empty = xp.isinf(logs) | (xp.isnan(logs) & nan_is_empty)
    logs = xp.where(empty, -math.inf, logs)
    max_lse = xp.amax(logs, 0)
    # All empty: -inf - -inf would be NaN; with 0 every weight is exp(-inf) = 0, and log(0) at the end is -inf again.
    max_lse = xp.where(max_lse == -math.inf, 0, max_lse)
    weights = xp.exp(logs - max_lse)
    norm = weights.sum(0)
    # select, do not multiply: the output of an empty state may contain anything
    weighted = (
        xp.where(nothing.T[..., None], 0, xp.cast(output, like=logs)) * weight.T[..., None]
        for output, weight, nothing in zip(outputs, weights, empty, strict=True)
    )
    # In place under torch: the first product is new memory that nothing else refers to. A generator, so that one
    # product exists beside the sum, not all of them.
    total = functools.reduce(operator.iadd, weighted)
    total = xp.where(norm.T[..., None] == 0, 0, total / norm.T[..., None])
    return xp.cast(total, like=outputs[0]), max_lse + xp.log(norm)
