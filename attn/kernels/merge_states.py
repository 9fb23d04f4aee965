"""Merge attention over disjoint sets of keys on the device: states (output, lse) become the state over all keys.

One program merges all states of one token for some heads, in one pass: a running maximum of the log-sum-exps, and weights
relative to it (docs/semantics.md §6; the merge step of Flash-Decoding). The state is float32 for outputs of any dtype. A
state whose lse is -inf or +inf, or NaN with `nan_is_empty`, is empty: its output is not loaded, so its content does not
matter.

Layouts: outputs [S, T, H, D] (or two of [T, H, D]), any strides with D dense; lses [S, H, T] float32, natural log, T dense.
"""

import triton
import triton.language as tl


@triton.jit
def _joined(acc, l_i, m_i, rows, logs, live, lanes, NAN_IS_EMPTY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add one more state: acc [heads, D] and l_i [heads] are sums relative to exp(m_i)."""
    log = tl.load(logs, mask=live, other=float("-inf"))
    # FlashAttention's libraries mark a state without keys by +inf or -inf, other kernels by NaN.
    empty = (log == float("inf")) | (log == float("-inf"))
    if NAN_IS_EMPTY:
        empty = empty | (log != log)
    log = tl.where(empty, float("-inf"), log)
    values = tl.load(rows, mask=lanes & (log != float("-inf"))[:, None], other=0.0).to(tl.float32)
    m_new = tl.maximum(m_i, log)
    # -inf - -inf would be NaN while no state has keys
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, weight = tl.exp(m_i - guard), tl.exp(log - guard)
    return acc * alpha[:, None] + values * weight[:, None], l_i * alpha + weight, m_new


@triton.jit(do_not_specialize=["states", "heads", "out_lse_h", "lse_s", "lse_h", "other_lse_h"])
def merge(  # type: ignore[no-untyped-def]
    output, lse, outputs, lses, other, other_lse,
    states, heads, out_lse_h, lse_s, lse_h, other_lse_h, out_t, out_h, in_s, in_t, in_h, other_t, other_h,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, STACKED: tl.constexpr, NAN_IS_EMPTY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # 64 bits: a head's row of log-sum-exps has as many elements as there are tokens
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    live = head < heads
    lanes = live[:, None] & (d < D)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    rows, logs = outputs + token * in_t + head[:, None] * in_h + d, lses + head * lse_h + token
    if STACKED:
        for _ in range(states):
            acc, l_i, m_i = _joined(acc, l_i, m_i, rows, logs, live, lanes, NAN_IS_EMPTY)
            rows += in_s
            logs += lse_s
    else:
        acc, l_i, m_i = _joined(acc, l_i, m_i, rows, logs, live, lanes, NAN_IS_EMPTY)
        rows = other + token * other_t + head[:, None] * other_h + d
        acc, l_i, m_i = _joined(acc, l_i, m_i, rows, other_lse + head * other_lse_h + token, live, lanes, NAN_IS_EMPTY)
    merged = tl.where(l_i[:, None] == 0.0, 0.0, acc / l_i[:, None])
    log = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_i))
    tl.debug_barrier()  # a state merged in place is read by every thread before one of them writes it
    tl.store(output + token * out_t + head[:, None] * out_h + d, merged.to(output.dtype.element_ty), mask=lanes)
    tl.store(lse + head * out_lse_h + token, log, mask=live)
