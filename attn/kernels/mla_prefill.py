"""Attention of ragged queries over ragged keys, where heads of queries and values differ in size: MLA's expanded prefill.

A program computes BLOCK_M query tokens of one head of one request over that request's own keys, BLOCK_N at a time, with an
online softmax in base 2 (Dao et al., FlashAttention-2, 2023). Queries and keys are read in two parts of a power of two
each, 192 = 128 + 64, so that no lane is padding. Causal calls align queries and keys at their ends; others see all keys.

On Hopper, 16-bit calls are `hopper_prefill`'s.

    grid (tiles, H); a tile's request is found by bisection in query_start_loc, longest rows of a request first.

Masked keys are selected away: their score is -inf, and on the diagonal a non-finite value counts as 0 (in MLA such a value
comes from a latent whose key is not finite either, so rows that see it have NaN as a score).

Layouts: q, k [T or m, H, D], v [m, H, Dv], out [T, H, Dv], dense in the last dimension, strided elsewhere; lse [H, T]
float32, natural log. Rows of tokens beyond query_start_loc[R] are not written: they are undefined.
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.launch import Launch, power_of_two
from attn.kernels.paged_attention import request_of


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, q_tail, start, upper, last, k_base, v_base, k_t, v_t, factor,
    MASKED: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys; row i sees keys up to upper[i]; `last` is the request's last key."""
    j = start + tl.arange(0, BLOCK_N)
    # Past the request's last key that key is loaded again: what follows it is another request's, or no memory of the array.
    at = (tl.minimum(j, last) if MASKED else j).to(tl.int64)
    one, two, dv = tl.arange(0, D1), tl.arange(0, D2), tl.arange(0, BLOCK_V)
    k = tl.load(k_base + at[:, None] * k_t + one[None, :])
    rest_at = k_base + at[:, None] * k_t + D1 + two[None, :]
    k_tail = tl.load(rest_at) if D1 + D2 == D else tl.load(rest_at, mask=(two < D - D1)[None, :], other=0.0)
    v_at = v_base + at[:, None] * v_t + dv[None, :]
    v = tl.load(v_at) if DV == BLOCK_V else tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
    # the sum over both parts of a head: columns past D are zeros in q_tail and k_tail
    s = tl.dot(q_tail, tl.trans(k_tail), input_precision=PRECISION)
    s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
    if MASKED:
        s = tl.where(j[None, :] <= upper[:, None], s, float("-inf"))
        wide = v.to(tl.float32)
        v = tl.where((wide - wide) != 0.0, 0.0, wide).to(v.dtype)
    m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
    # while a row has seen no key, its maximum is -inf, and -inf - -inf would be NaN
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - guard[:, None])
    alpha = tl.exp2(m_i - guard)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l_i, m_new


@triton.jit(do_not_specialize=("num_reqs", "lse_h"))
def attend(  # type: ignore[no-untyped-def]
    out, lse, query, key, value, query_start_loc, key_start_loc, factor, num_reqs, lse_h,
    o_t, o_h, q_t, q_h, k_t, k_h, v_t, v_h,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r = request_of(query_start_loc, tl.program_id(0), num_reqs, BLOCK_M)
    begin = tl.load(query_start_loc + r)
    q_len = tl.load(query_start_loc + r + 1) - begin
    # the last rows are the longest: start them first, so that they do not end last
    tile = tl.cdiv(q_len, BLOCK_M) - 1 - (tl.program_id(0) - (begin // BLOCK_M + r))
    if tile < 0:
        return
    k_begin = tl.load(key_start_loc + r)
    k_len = tl.load(key_start_loc + r + 1) - k_begin
    head = tl.program_id(1).to(tl.int64)  # heads may be outermost, and far apart
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < q_len
    at = (begin + token).to(tl.int64)
    one, two, dv = tl.arange(0, D1), tl.arange(0, D2), tl.arange(0, BLOCK_V)
    q_at = query + at[:, None] * q_t + head * q_h
    q = tl.load(q_at + one[None, :], mask=live[:, None], other=0.0)
    q_tail = tl.load(q_at + D1 + two[None, :], mask=live[:, None] & (two < D - D1)[None, :], other=0.0)
    k_base = key + k_begin.to(tl.int64) * k_t + head * k_h
    v_base = value + k_begin.to(tl.int64) * v_t + head * v_h
    if CAUSAL:
        # aligned at the ends (docs/semantics.md §3): negative for rows that see no key
        upper = tl.minimum(token + k_len - q_len, k_len - 1)
        full = tl.maximum(tl.minimum(tile * BLOCK_M + k_len - q_len + 1, k_len), 0)  # keys that every row sees
        stop = tl.maximum(tl.minimum(tl.minimum(tile * BLOCK_M + BLOCK_M, q_len) + k_len - q_len, k_len), 0)
    else:
        upper = token * 0 + k_len - 1
        full, stop = k_len, k_len
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # whole tiles that every row sees, without a mask; then the diagonal, or the last keys
    tail = full // BLOCK_N * BLOCK_N
    for phase in tl.static_range(2):
        for start in tl.range(tail if phase else 0, stop if phase else tail, BLOCK_N):
            acc, l_i, m_i = _step(
                acc, l_i, m_i, q, q_tail, start, upper, k_len - 1, k_base, v_base, k_t, v_t, factor,
                phase == 1, D, D1, D2, DV, BLOCK_V, BLOCK_N, PRECISION,
            )  # fmt: skip
    result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    lanes = live[:, None] & (dv < DV)[None, :]
    tl.store(out + at[:, None] * o_t + head * o_h + dv[None, :], result.to(out.dtype.element_ty), mask=lanes)
    if lse is not None:
        log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i))
        tl.store(lse + head * lse_h + at, log * 0.6931471805599453, mask=live)


def constants(rule: Launch, arch: str, sizes: tuple[int, int], itemsize: int, causal: bool) -> dict[str, Any]:
    """The constants and options of `attend`. sizes: of a head of queries, and of values; itemsize: bytes of an element."""
    size, width = sizes
    # the largest power of two below the size, so that the second part is never empty
    first = power_of_two(size) // 2
    return {
        **{"D": size, "D1": first, "D2": max(16, power_of_two(size - first)), "DV": width, "BLOCK_V": power_of_two(width)},
        **{"BLOCK_M": rule.block_m, "BLOCK_N": rule.block_n, "CAUSAL": causal},
        **{"PRECISION": "tf32x3" if itemsize == 4 and arch.startswith("sm") else "ieee", **rule.options()},
    }
