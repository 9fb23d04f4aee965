"""Dense attention of one sequence in float64: the definition that every backend is checked against.

Masked scores become IEEE -inf and the maximum is guarded, so a row without keys is exactly (0, -inf).
A masked value is *selected away*: the matrix product has only finite values, and non-finite values are
added afterwards, only to the rows that see them. A visible NaN therefore reaches exactly those rows, and a
NaN or inf in a masked slot reaches none.
Rows are computed in slices, so that memory stays bounded at long context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, I64, Bool, bools, broadcast, check_shape, finite, floats, heads_per_group, ints, require
from attn.reference._masks import check_window, row_positions
from attn.reference._states import apply_sinks

# 16 MiB of float64 per array of scores, of which a few exist at once.
_SCORES_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class _ScoreParams:
    """The rules that turn dot products into masked scores, for all H heads, n rows and m keys of a sequence."""

    scale: float
    cap: float
    causal: bool
    left: int | None
    right: int | None
    slopes: F64 | None
    mask: Bool | None
    bias: F64 | None
    query_positions: I64
    key_positions: I64

    def scores(self, dots: F64, heads: slice, rows: slice) -> tuple[F64, Bool]:
        """Return scores with -inf where not allowed, and the allowed mask, both [heads, rows, m]."""
        # [rows, 1] and [1, m]: rules of positions are the same for all heads, and broadcast over them.
        p, j = self.query_positions[rows, None], self.key_positions[None, :]
        allowed = np.ones(dots.shape, dtype=np.bool_)
        if self.causal:
            allowed &= j <= p
        if self.left is not None:
            allowed &= j >= p - self.left
        if self.right is not None:
            allowed &= j <= p + self.right
        if self.mask is not None:
            allowed &= self.mask[heads, rows]
        scores = dots * self.scale
        # The order is docs/semantics.md §2: scale, cap, bias, mask. A cap after the bias would bound the bias too.
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        if self.slopes is not None:
            scores -= self.slopes[heads, None, None] * np.abs(p - j)
        if self.bias is not None:
            # A score of -inf and a key that is not allowed are different where a row has no other: the latter has
            # weight 0 whatever the value is, and is never multiplied.
            allowed &= ~np.isneginf(self.bias[heads, rows])
            scores += self.bias[heads, rows]
        return np.where(allowed, scores, -np.inf), allowed


def attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[SupportsIndex | None] = (None, None),
    logits_soft_cap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    query_positions: npt.ArrayLike | None = None,
    key_positions: npt.ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Compute attention of one sequence (docs/semantics.md §1 to §8).

    query: [n, H, D]; key: [m, K, D]; value: [m, K, Dv]; any float dtype. Head h reads kv head h // (H/K).
    Row i is at position p = i + (m - n) and key j at j, unless `query_positions` [n] and `key_positions`
    [m] (int) are given.

        s_ij  = scale * <q_i, k_j>                  scale defaults to 1 / sqrt(D)
        s_ij  = cap * tanh(s_ij / cap)              logits_soft_cap; None or 0 is off
        s_ij += -slope_h * |p - j|, and the bias    alibi_slopes; under causal that is slope_h * (j - p)
        s_ij  = -inf where not allowed
        lse_i = log sum_j exp(s_ij)
        out_i = sum_j exp(s_ij - lse_i) v_j         then * sigmoid(lse_i - sink_h)

    Allowed is the AND of: causal, j <= p (bottom-right when positions are the default); window
    (left, right), p - left <= j <= p + right, None = unbounded; mask, bool broadcastable to [H, n, m] with
    True = attend; bias (float, broadcastable to [H, n, m]) not equal to -inf, so that an additive mask selects
    like a bool one. alibi_slopes, sinks: [H].

    Returns (out [n, H, Dv], lse [H, n]) in float64; lse is the natural log and excludes the sink. A row with
    no allowed key has out 0 and lse -inf, also with a sink. Masked values are never read: NaN, inf and huge
    values there have no effect. A NaN in a visible key or value makes the rows that see it NaN.
    """
    require(isinstance(causal, bool | np.bool_), f"causal={causal!r} must be True or False")
    q, k, v = floats("query", query, 3), floats("key", key, 3), floats("value", value, 3)
    n, num_heads, head_size = q.shape
    m, num_kv_heads, _ = k.shape
    # Heads h // group share a key: the products below are one matrix product for each kv head, [group, rows, m].
    group = heads_per_group(num_heads, num_kv_heads)
    check_shape("key", k, (m, num_kv_heads, head_size))
    check_shape("value", v, (m, num_kv_heads, v.shape[2]))
    left, right = check_window(window)
    shape = (num_heads, n, m)
    rules = _ScoreParams(
        scale=default_scale(scale, head_size),
        cap=_soft_cap(logits_soft_cap),
        causal=bool(causal),
        left=left,
        right=right,
        slopes=None if alibi_slopes is None else per_head("alibi_slopes", alibi_slopes, num_heads),
        mask=None if mask is None else bools("mask", mask, shape),
        bias=None if bias is None else broadcast("bias", floats("bias", bias), shape),
        query_positions=_positions("query_positions", query_positions, row_positions(n, m)),
        key_positions=_positions("key_positions", key_positions, np.arange(m, dtype=np.int64)),
    )
    out, lse = np.zeros((n, num_heads, v.shape[2])), np.full((num_heads, n), -np.inf)
    # At least one row, and one key in the quotient, so that empty sequences pass through the loop as others do.
    step = max(1, _SCORES_AT_ONCE // max(1, group * m))
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            # Huge or NaN masked values overflow here before they are selected away.
            with np.errstate(all="ignore"):
                # [group, rows, D] @ [D, m].
                dots = q[rows, heads].transpose(1, 0, 2) @ k[:, kv_head].T
                scores, allowed = rules.scores(dots, heads, rows)
                result, lse[heads, rows] = _softmax_sum(scores, allowed, v[:, kv_head])
            out[rows, heads] = result.transpose(1, 0, 2)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def _softmax_sum(scores: F64, allowed: Bool, value: F64) -> tuple[F64, F64]:
    """Return the softmax of scores [h, r, m] over keys times value [m, Dv]: ([h, r, Dv], lse [h, r])."""
    row_max = scores.max(axis=-1, initial=-np.inf)
    # A row without keys: -inf - -inf would be NaN, exp(-inf - 0) is 0. A maximum of +inf is left, and makes the row
    # NaN, as the formula does.
    row_max = np.where(np.isneginf(row_max), 0.0, row_max)
    weights = np.exp(scores - row_max[..., None])
    total = weights.sum(axis=-1)
    is_finite = np.isfinite(value)
    summed = weights @ np.where(is_finite, value, 0.0)
    # Keys with a NaN or an infinity that any row sees; few, so a loop over them costs nothing.
    nonfinite = ~is_finite.all(axis=1) & allowed.any(axis=(0, 1))
    for j in np.flatnonzero(nonfinite):
        attends = allowed[..., j]
        # The finite elements of value j are in the product already. A weight that underflowed to 0 times infinity is
        # NaN, as in IEEE arithmetic: the row does see the key.
        summed[attends] += weights[attends, j][:, None] * np.where(is_finite[j], 0.0, value[j])
    norm = total[..., None]
    # log(0) is -inf: the log-sum-exp of a row without keys.
    return np.where(norm == 0, 0.0, summed / norm), row_max + np.log(total)


def default_scale(scale: float | None, head_size: int) -> float:
    """Return `scale`, or 1 / sqrt(head_size) if it is None."""
    if scale is not None:
        return finite("scale", scale)
    # 0 ** -0.5 raises ZeroDivisionError; heads of no columns have scores of 0 under any explicit scale.
    require(head_size >= 1, f"head_size={head_size} (>= 1, or an explicit scale)")
    return float(head_size**-0.5)


def per_head(name: str, value: npt.ArrayLike, num_heads: int) -> F64:
    """Convert `value` to float64 [H]."""
    array = floats(name, value, 1)
    check_shape(name, array, (num_heads,))
    return array


def _soft_cap(logits_soft_cap: float | None) -> float:
    cap = 0.0 if logits_soft_cap is None else finite("logits_soft_cap", logits_soft_cap)
    require(cap >= 0, f"logits_soft_cap={cap} (> 0; None or 0 is off)")
    return cap


def _positions(name: str, value: npt.ArrayLike | None, default: I64) -> I64:
    if value is None:
        return default
    array = ints(name, value, 1)
    check_shape(name, array, default.shape)
    return array
