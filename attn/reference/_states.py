"""Merge partial attention results (out, lse), a commutative monoid; sinks are applied once, at the end.

`lse` is the natural log of the sum of exponentials over the keys seen, and an empty state has -inf.
Libraries also mark an empty state with +inf or NaN, so `merge_states` drops those by default; a visible NaN
key also gives a NaN lse, and a caller that must keep it passes `nan_is_empty=False`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, check_shape, floats, require


def merge_states(outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike], *, nan_is_empty: bool = True) -> tuple[F64, F64]:
    """Merge k partial results over disjoint sets of keys (docs/semantics.md §6).

    outs: k arrays [n, H, Dv]; lses: k arrays [H, n], natural log, sink excluded.
    w_i = exp(lse_i - max lse), out = sum w_i out_i / sum w_i, lse = max lse + log sum w_i.
    A state with lse of -inf or +inf (or NaN, unless `nan_is_empty=False`) is empty: its `out` is never
    read. All states empty: out 0, lse -inf. Returns (out [n, H, Dv], lse [H, n]) in float64.
    """
    require(len(outs) == len(lses) and len(outs) > 0, f"got {len(outs)} outs and {len(lses)} lses (equal, >= 1)")
    states = [floats(f"outs[{i}]", out, 3) for i, out in enumerate(outs)]
    logs = [floats(f"lses[{i}]", lse, 2) for i, lse in enumerate(lses)]
    rows, num_heads, _ = states[0].shape
    for i, (state, log) in enumerate(zip(states, logs, strict=True)):
        check_shape(f"outs[{i}]", state, states[0].shape)
        check_shape(f"lses[{i}]", log, (num_heads, rows))
    lse = np.stack(logs)
    # FlashAttention 2 returns +inf for a row without keys.
    empty = np.isinf(lse) | (np.isnan(lse) & nan_is_empty)
    lse = np.where(empty, -np.inf, lse)
    with np.errstate(all="ignore"):
        max_lse = lse.max(axis=0)
        max_lse = np.where(np.isneginf(max_lse), 0.0, max_lse)
        weights = np.exp(lse - max_lse)
        total = weights.sum(axis=0)
        # [k, H, n] -> [k, n, H, 1]. Selected, since the output of an empty part may be NaN, and 0 * NaN is NaN.
        outputs = np.where(empty.transpose(0, 2, 1)[..., None], 0.0, np.stack(states))
        summed = (outputs * weights.transpose(0, 2, 1)[..., None]).sum(axis=0)
        norm = total.T[..., None]
        return np.where(norm == 0, 0.0, summed / norm), max_lse + np.log(total)


def apply_sinks(out: npt.ArrayLike, lse: npt.ArrayLike, sinks: npt.ArrayLike) -> tuple[F64, F64]:
    """Add one logit per query head to the softmax denominator, with a value of zero (docs/semantics.md §7).

    out: [n, H, Dv]; lse: [H, n]; sinks: [H], raw logits (no scale, no cap, no mask).
    out * sigmoid(lse - sink). A sink of -inf is off, +inf takes all weight; an empty row (lse infinite) is 0.
    Returns (out, lse) with lse unchanged: it excludes the sink, so it can still be merged.
    """
    state, log = floats("out", out, 3), floats("lse", lse, 2)
    rows, num_heads, _ = state.shape
    sink = floats("sinks", sinks, 1)
    check_shape("lse", log, (num_heads, rows))
    check_shape("sinks", sink, (num_heads,))
    # An empty row is 0 with or without a sink (and -inf minus -inf would be NaN).
    empty = np.isinf(log).T[..., None]
    with np.errstate(all="ignore"):
        # sigmoid(lse - sink): a huge difference overflows to infinity, and 1 / infinity is the right 0.
        factor = 1.0 / (1.0 + np.exp(sink[:, None] - log))
        return np.where(empty, 0.0, state * factor.T[..., None]), log.copy()
