"""Attention of a ragged batch over a paged cache: one kernel for prefill, chunked prefill, decode and mixed batches.

A program computes one tile: up to BLOCK_Q query tokens of one request times the G query heads of one kv head, packed as
rows, over that request's keys, BLOCK_N at a time, with an online softmax in base 2 (Dao et al., FlashAttention-2, 2023).
Tokens and heads share rows, so one pass over the keys serves the whole group. It is launched in two ways:

    prefill  1-D grid, tiles x K, found by bisection in query_start_loc; longest rows of a request first.
    decode   1-D grid, items x K, one tile of rows per request. Requests are cut into parts of their keys so that all
             multiprocessors end together; each program computes this plan from the lengths on the device (`plan.item_of`)
             and takes one item. Partial results are merged by `_merge` (Flash-Decoding); a request in one part is finished
             at once.

A mixed batch uses both launches, each skipping the other's requests, so that a decode never runs on a prefill's large tile.
They run one after the other, except on Hopper where `hopper_prefill` handles 16-bit caches: there they run concurrently,
the decode launched early onto the multiprocessors that the prefill leaves free. No lengths are fetched from the device and
grids depend only on extents, max_query_len and max_seq_len: a captured launch serves any batch within those bounds.

Masked scores are selected away, never multiplied: they become -inf, and keys and values that no row sees are not loaded. If
a tile's sums are not finite at the end, it is recomputed in a slower way, so that a NaN or infinity among values that some
rows see affects only those rows. Masks are computed only for the tiles of keys that need one; blocks outside every window
are never read. Offsets into a cache of 2^31 elements or more are 64-bit.

Layouts: query, output [T, H, D]; caches [N, P, K, D] of any strides (last dimension dense); lse [H, T] float32, natural
log. Rows of tokens beyond query_start_loc[R] are not written: they are undefined.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import library

from attn.torch.kernels import hopper
from attn.torch.kernels.codes import fp8_code, number_in
from attn.torch.kernels.direct import Direct
from attn.torch.kernels.launch import (
    FUSED,
    TUNED,
    Cut,
    Launch,
    arch,
    can_launch_early,
    check_stride,
    converts_e4m3,
    cut_for,
    decode_launch,
    multiprocessors,
    power_of_two,
    prefill_launch,
    rows_of_speculation,
)
from attn.torch.kernels.plan import UNBOUNDED, item_of, visible

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
_BATCH = (
    "left",
    "right",
    "tree_right",
    "span_right",
    "chunk",
    "min_query",
    "max_query",
    "num_reqs",
    "share",
    "parts",
    "enough",
    "tree_w",
    "lse_h",
    "sparse_local",
    "sparse_stride",
    "sparse_shift",
    "sparse_offset",
    "table_r",
)  # fmt: skip  (changes between batches do not recompile)


@triton.jit
def _request_of(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The request of a prefill tile, where request r's tiles start at query_start_loc[r] // BLOCK_Q + r."""
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _infinite_where(values, allowed, infinity):  # type: ignore[no-untyped-def]
    """[rows, D]: `infinity` where a row sees a value that is NaN or that infinity, else 0 (both together: NaN)."""
    wild = ((values != values) | (values == infinity)).to(tl.float16)
    hits = tl.dot(allowed.to(tl.float16), wild)
    return tl.where(hits > 0, infinity, 0.0)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc, norm, top, start, MASKED: tl.constexpr, CAREFUL: tl.constexpr, q, low, high, upper, table, k_base, v_base, tree_row,
    position, head, token, context, q_len, slope, span_low, span_high, prefix_end, chunk, left, is_tree, k_block, k_slot,
    v_block, v_slot, factor, cap, tree_w, sparse_local, sparse_stride, sparse_shift, k_scale, v_scale, scale_block, scale_slot,
    PER_TOKEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_SPANS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_CHUNK:
    tl.constexpr, PAGED: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_CAP:
    tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_TREE: tl.constexpr, SPARSE: tl.constexpr, SAME: tl.constexpr, WIDE:
    tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, IN_HALF: tl.constexpr, LATE: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys: scores, running maximum, weighted values. Without MASKED every row sees every key of it."""
    by = factor[:, None] if IN_HALF else factor
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    j = start + n
    # past either end the nearest visible key is loaded again: memory there is not read and needs no mask
    at = tl.minimum(tl.maximum(j, low), high - 1) if MASKED else j
    if PAGED:
        if P % BLOCK_N == 0:
            page = tl.load(table + start // P)
            place = at % P
        elif BLOCK_N % P == 0 and not MASKED:
            page = tl.load(table + start // P + n // P)
            place = n % P  # known before the loop
        else:
            page = tl.load(table + at // P)
            place = at % P
        if WIDE:
            page = page.to(tl.int64)
        k_rows = page * k_block + place * k_slot
        v_rows = k_rows if SAME else page * v_block + place * v_slot
    else:
        at = at.to(tl.int64)
        k_rows = at * k_slot
        v_rows = k_rows if SAME else at * v_slot
    k_at = k_base + k_rows[:, None] + d[None, :]
    v_at = v_base + v_rows[:, None] + d[None, :]
    if D != BLOCK_D:
        k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    s = tl.dot(q, tl.trans(number_in(k, q.dtype)), input_precision=PRECISION)
    if PER_TOKEN:
        scale_rows = page * scale_block + place * scale_slot
        s = s * tl.load(k_scale + scale_rows)[None, :]
        v_by = tl.load(v_scale + scale_rows)

    # Scores in base 2. Plain ones are not scaled yet: the factor is applied inside the exponent, where the product is
    # fused.
    if HAS_CAP:
        s = cap * _tanh(s * by)
    elif HAS_ALIBI:
        s = s * by
    if HAS_ALIBI:
        s = s - slope[:, None] * tl.abs(j[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        allowed = _allowed(
            j, low, upper, position, head, token, context, q_len, left, is_tree, tree_row, tree_w,
            sparse_local, sparse_stride, sparse_shift, span_low, span_high, prefix_end, chunk, HAS_LEFT, HAS_TREE, SPARSE,
            HAS_SPANS, HAS_PREFIX, HAS_CHUNK,
        )  # fmt: skip
        s = tl.where(allowed, s, float("-inf"))
    if HAS_CAP or HAS_ALIBI:
        above = tl.maximum(top, tl.max(s, 1))
        guard = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2((s - guard[:, None]) + LIFT) if LIFT else tl.exp2(s - guard[:, None])
        shrink = tl.exp2(top - guard)
    elif LATE:
        # subtracted before scaling, so that the largest score is exactly 0 and a single key's value is returned exactly
        above = tl.maximum(top, tl.max(s, 1))
        guard = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2((s - guard[:, None]) * by + LIFT) if LIFT else tl.exp2((s - guard[:, None]) * by)
        shrink = tl.exp2((top - guard) * factor)
    else:
        above = tl.maximum(top, tl.max(s, 1) * factor)
        guard = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2(s * factor - guard[:, None])
        shrink = tl.exp2(top - guard)
    norm = norm * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if PER_TOKEN and q.dtype == tl.float16:
        v = v.to(tl.float32) * v_by[:, None]  # weights times a small scale would be subnormal in float16
    elif PER_TOKEN:
        # selected, since a token with a NaN has a scale of NaN
        p = tl.where(allowed, p * v_by[None, :], 0.0) if MASKED else p * v_by[None, :]
    v = number_in(v, q.dtype)
    p = p.to(v.dtype)
    if CAREFUL:
        wide = v.to(tl.float32)
        v = tl.where((wide - wide) != 0.0, 0.0, wide).to(v.dtype)
        acc += _infinite_where(wide, allowed, float("inf"))
        acc += _infinite_where(wide, allowed, float("-inf"))
    acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc, norm, above


@triton.jit
def _allowed(  # type: ignore[no-untyped-def]
    j, low, upper, position, head, token, context, q_len, left, is_tree, tree_row, tree_w,
    sparse_local, sparse_stride, sparse_shift, span_low, span_high, prefix_end, chunk, HAS_LEFT: tl.constexpr,
    HAS_TREE: tl.constexpr, SPARSE: tl.constexpr, HAS_SPANS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """[rows, keys]: window and causality, the draft tree among new tokens, the block-sparse pattern; spans, prefix, chunk."""
    allowed = j[None, :] <= upper[:, None]
    if HAS_LEFT:
        allowed = allowed & (j[None, :] >= position[:, None] - left)
    if HAS_TREE:
        new = j[None, :] - context
        inside = (new >= 0) & (new < q_len) & (token < q_len)[:, None] & is_tree
        seen = tl.load(tree_row + token[:, None] * tree_w + new, mask=inside, other=1)
        allowed = allowed & (seen != 0)
    if SPARSE > 0:
        far = position[:, None] // SPARSE - j[None, :] // SPARSE
        column = j[None, :] // SPARSE + head[:, None] * sparse_shift + 1
        allowed = allowed & ((far < sparse_local) | (column % sparse_stride == 0))
    if HAS_SPANS:
        allowed = allowed | ((j[None, :] >= span_low[:, None]) & (j[None, :] <= span_high[:, None]))
    if HAS_PREFIX:
        allowed = allowed | (j < prefix_end)[None, :]
    if HAS_CHUNK:
        allowed = allowed & (j[None, :] >= (position // chunk * chunk)[:, None])
    return allowed


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh: a series where the quotient would cancel; saturates on both sides where exp overflows."""
    y = x * x
    series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949))))
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit(do_not_specialize=_BATCH)
def _attention(  # type: ignore[no-untyped-def]
    output, lse, partial, partial_lse, plan, query, key_cache, value_cache, query_start_loc, seq_lens, block_table,
    slopes, sinks, tree, spans, prefix, is_causal, k_scale, v_scale, output_scale,
    factor, v_factor, cap, left, right, tree_right, span_right, chunk, min_query, max_query, num_reqs, share, parts, enough,
    tree_w,
    sparse_local, sparse_stride, sparse_shift, sparse_offset,
    o_t, o_h, lse_h, q_t, q_h, k_block, k_slot, k_head, v_block, v_slot, v_head, table_r,
    kscale_h, vscale_h, scale_block, scale_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    DECODE: tl.constexpr, BLOCK_R: tl.constexpr, PAGED: tl.constexpr, NEGATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_SPANS: tl.constexpr, HAS_PREFIX: tl.constexpr, MIXED: tl.constexpr, HAS_CHUNK: tl.constexpr,
    SPAN_LEFT: tl.constexpr, HAS_LSE: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    SPARSE: tl.constexpr, MAY_BE_WILD: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, BESIDE: tl.constexpr, IN_HALF: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = H // G
    # Rows may see keys that neither causality nor the window bounds. A decode's plan then counts all keys.
    FREE: tl.constexpr = HAS_SPANS or HAS_PREFIX
    if EARLY:
        # the merge may already be launched: it waits for the end of this grid before it reads
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if BESIDE:  # noqa: SIM102  (one is known when compiling)
        # Launched while the same batch's prefill still runs. An extra program keeps this grid from ending before the
        # prefill.
        if pid == tl.num_programs(0) - 1:
            if tl.program_id(1) == 0:
                tl.extra.cuda.gdc_wait()
            return
    kv_head = pid % K
    if DECODE:
        if BLOCK_R > 0:
            r, begin_tile, end_tile, s, count = item_of(
                pid // K, query_start_loc, seq_lens, num_reqs, min_query, max_query, 1 << 30 if FREE else left,
                1 << 30 if FREE else right, 1 << 30 if FREE else tree_right, tree_w, chunk, share, parts, enough, BLOCK_N,
                BLOCK_R, HAS_TREE, HAS_CHUNK,
            )  # fmt: skip
            if r >= num_reqs:
                return
            if (s == 0) & (kv_head == 0):
                tl.store(plan + 2 * r, pid // K)
                tl.store(plan + 2 * r + 1, count)
        else:
            r = pid // K
        begin = tl.load(query_start_loc + r)
        q_len = tl.load(query_start_loc + r + 1) - begin
        tile = 0
    else:
        r = _request_of(query_start_loc, pid // K, num_reqs, BLOCK_Q)
        begin = tl.load(query_start_loc + r)
        q_len = tl.load(query_start_loc + r + 1) - begin
        # the last rows are the longest: start them first, so that they do not end last
        tile = tl.cdiv(q_len, BLOCK_Q) - 1 - (pid // K - (begin // BLOCK_Q + r))
    if (q_len <= min_query) | (q_len > max_query) | (tile < 0):
        return
    seq_len = tl.load(seq_lens + r) if PAGED else q_len
    context = seq_len - q_len

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = tile * BLOCK_Q + row // G
    head = kv_head * G + row % G
    live = (row < BLOCK_Q * G) & (token < q_len)
    position = context + token
    first = context + tile * BLOCK_Q
    last = context + tl.minimum(tile * BLOCK_Q + BLOCK_Q, q_len) - 1
    is_tree = False
    if HAS_TREE:
        is_tree = q_len <= tree_w
        right = tl.where(is_tree, tree_right, right)
    if MIXED and not DECODE:
        right = tl.where(tl.load(is_causal + r), 0, right)
    if FREE and DECODE:
        aligned, low, high = visible(first, last, seq_len, 1 << 30, 1 << 30, chunk, BLOCK_N, HAS_CHUNK)
    else:
        aligned, low, high = visible(first, last, seq_len, left, right, chunk, BLOCK_N, HAS_CHUNK)
    if MIXED and DECODE:  # after the bounds, which are those of the plan
        right = tl.where(tl.load(is_causal + r), 0, right)
    at = (begin + token).to(tl.int64)
    span_low, span_high, prefix_end = position, position, 0
    if HAS_SPANS:
        span_low = tl.load(spans + 2 * at, mask=live, other=-1)
        span_high = tl.load(spans + 2 * at + 1, mask=live, other=-1)
        if not DECODE:
            there = span_high >= 0
            low = tl.minimum(low, tl.min(tl.where(there, span_low, low)))
            high = tl.maximum(high, tl.minimum(tl.max(span_high) + 1, seq_len))
        if SPAN_LEFT:  # the window cuts the span
            span_low = tl.maximum(span_low, position - left)
            span_high = tl.minimum(span_high, position + span_right)
        span_high = tl.minimum(span_high, seq_len - 1)
    if HAS_PREFIX:
        prefix_end = tl.minimum(tl.load(prefix + r), seq_len)
        if not DECODE:
            low = tl.where(prefix_end > 0, 0, low)
            high = tl.maximum(high, prefix_end)
    if FREE and not DECODE:
        if HAS_CHUNK:
            low = tl.maximum(low, tl.maximum(first, 0) // chunk * chunk)
        low = tl.maximum(low, 0)
        aligned = tl.where(low < high, low // BLOCK_N * BLOCK_N, high)
    stop = high
    if BLOCK_R > 0:
        stop = tl.minimum(high, aligned + end_tile * BLOCK_N)
        aligned += begin_tile * BLOCK_N

    lanes = live[:, None] & (d < D)[None, :]
    q = tl.load(query + at[:, None] * q_t + head[:, None] * q_h + d[None, :], mask=lanes, other=0.0)
    if NEGATE:
        q = (0.0 - q.to(tl.float32)).to(q.dtype)
    if IN_HALF:
        # One-byte codes convert to float16 with one instruction per pair, to bfloat16 with three, two of them slow. Queries
        # are converted as well: a power of two scales each row so that float16 holds every bit of values down to 2**-31 of
        # the row's largest.
        wide_q = q.to(tl.float32)
        peak = tl.max(tl.where(tl.abs(wide_q) < float("inf"), tl.abs(wide_q), 0.0), 1)
        power = tl.maximum((peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 8.673617379884035e-19)
        q = (wide_q * (16384.0 / power)[:, None]).to(tl.float16)
        factor = factor * (power * 6.103515625e-05)
    if HAS_K_SCALE:
        factor = factor * tl.load(k_scale + kv_head * kscale_h)
    if HAS_V_SCALE:
        v_factor = v_factor * tl.load(v_scale + kv_head * vscale_h)
    if PER_TOKEN:
        k_scale += kv_head
        v_scale += kv_head
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes + head, mask=live, other=0.0) * 1.4426950408889634
    if PAGED:
        table = block_table + r.to(tl.int64) * table_r
        k_base = key_cache + kv_head.to(tl.int64) * k_head
        v_base = value_cache + kv_head.to(tl.int64) * v_head
    else:
        table = block_table
        k_base = key_cache + kv_head.to(tl.int64) * k_head + begin.to(tl.int64) * k_slot
        v_base = value_cache + kv_head.to(tl.int64) * v_head + begin.to(tl.int64) * v_slot
    tree_row = tree
    if HAS_TREE:
        tree_row = tree + r.to(tl.int64) * tree_w * tree_w
    shifted = head + sparse_offset

    # Weights in float16 reach 2**15 instead of 1: from 2**-39 of the largest on they are not 0, from 2**-29 on exact. None
    # may exceed the largest by much, as rounding causes when scores of 2**24 are scaled before it is subtracted.
    LIFT: tl.constexpr = 15 if q.dtype == tl.float16 else 0
    LATE: tl.constexpr = EXACT or q.dtype == tl.float16
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    upper = tl.minimum(position + right, high - 1)
    # The keys from full to rest are visible to every row: their tiles need no mask. Where finding them does not pay, both
    # are `aligned`, so that every tile is masked. In float32 every tile of several tokens takes the careful path, so that
    # one row's values change no bit of another row.
    CLEAR: tl.constexpr = not (SPARSE > 0 or DECODE or EXACT)
    full, rest = aligned, aligned
    if CLEAR:
        rest = tl.minimum(first + right + 1, high)
        if HAS_TREE:
            rest = tl.where(is_tree, tl.minimum(rest, context), rest)
        if HAS_LEFT or HAS_CHUNK:
            since = tl.maximum(last - left, aligned)
            if HAS_CHUNK:
                since = tl.maximum(since, tl.maximum(last, 0) // chunk * chunk)
            full = tl.minimum(tl.cdiv(since, BLOCK_N), tl.cdiv(high, BLOCK_N)) * BLOCK_N
        rest = tl.maximum(full, tl.maximum(rest, 0) // BLOCK_N * BLOCK_N)
    for part in tl.static_range(3):
        if part == 2 or (CLEAR and (part == 1 or HAS_LEFT or HAS_CHUNK)):
            begin_at = aligned if part == 0 else full if part == 1 else rest
            end_at = full if part == 0 else rest if part == 1 else stop
            for start in tl.range(begin_at, end_at, BLOCK_N):
                if SPARSE == 0 or _sparse_tile(
                    start, first, shifted, live, sparse_local, sparse_stride, sparse_shift, BLOCK_N, SPARSE
                ):
                    acc, norm, top = _step(
                        acc, norm, top, start, part != 1, EXACT and BLOCK_Q > 1 and SPARSE == 0, q, low, high, upper, table,
                        k_base, v_base, tree_row, position, shifted, token, context, q_len, slope, span_low, span_high,
                        prefix_end, chunk, left, is_tree, k_block, k_slot, v_block, v_slot, factor, cap, tree_w, sparse_local,
                        sparse_stride, sparse_shift, k_scale, v_scale, scale_block, scale_slot, PER_TOKEN, HAS_LEFT, HAS_SPANS,
                        HAS_PREFIX, HAS_CHUNK, PAGED, P, D, BLOCK_N, BLOCK_D, HAS_CAP, HAS_ALIBI, HAS_TREE, SPARSE, SAME, WIDE,
                        EXACT, PRECISION, IN_HALF, LATE, LIFT,
                    )  # fmt: skip
    if MAY_BE_WILD and (DECODE or SPARSE > 0 or not EXACT):  # noqa: SIM102  (one is known when compiling)
        # 0 * NaN: a non-finite value may have reached rows that do not see it, or, loaded again past an end, have made an
        # infinity NaN. Rare enough to start over; a decode in small tiles, which need no more registers than its own.
        CAREFUL_N: tl.constexpr = 16 if DECODE else BLOCK_N
        if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            norm = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            for start in tl.range(aligned, stop, CAREFUL_N, num_stages=1):
                acc, norm, top = _step(
                    acc, norm, top, start, True, True, q, low, high, upper, table, k_base, v_base, tree_row, position, shifted,
                    token, context, q_len, slope, span_low, span_high, prefix_end, chunk, left, is_tree, k_block, k_slot,
                    v_block, v_slot, factor, cap, tree_w, sparse_local, sparse_stride, sparse_shift, k_scale, v_scale,
                    scale_block, scale_slot, PER_TOKEN, HAS_LEFT, HAS_SPANS, HAS_PREFIX, HAS_CHUNK, PAGED, P, D, CAREFUL_N,
                    BLOCK_D, HAS_CAP, HAS_ALIBI, HAS_TREE, SPARSE, SAME, WIDE, EXACT, PRECISION, IN_HALF, LATE, LIFT,
                )  # fmt: skip

    if LATE and not (HAS_CAP or HAS_ALIBI):
        top = top * factor
    if LIFT:
        top = top - LIFT
    log = tl.where(norm == 0, float("-inf"), top + tl.log2(norm))
    result = tl.where(norm[:, None] == 0, 0.0, acc / norm[:, None])
    if BLOCK_R > 0:  # noqa: SIM102
        if count > 1:
            state = (pid // K * BLOCK_Q + token).to(tl.int64) * H + head
            tl.store(partial + state[:, None] * D + d[None, :], result, mask=lanes)
            tl.store(partial_lse + state, log, mask=live)
            return
    _finish(
        output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h,
        HAS_SINKS, HAS_LSE, TO_FP8,
    )  # fmt: skip


@triton.jit
def _sparse_tile(  # type: ignore[no-untyped-def]
    start, first, head, live, sparse_local, sparse_stride, sparse_shift, BLOCK_N: tl.constexpr, SPARSE: tl.constexpr
):  # fmt: skip
    """Whether some row of the tile may attend to keys start..start + BLOCK_N: the block-sparse pattern, before any load."""
    near = first // SPARSE - (start + BLOCK_N - 1) // SPARSE < sparse_local
    wanted = 0
    if not near:
        for block in tl.range(start // SPARSE, (start + BLOCK_N - 1) // SPARSE + 1):
            column = (block + head * sparse_shift + 1) % sparse_stride == 0
            wanted += tl.max((column & live).to(tl.int32), 0)
    return near | (wanted > 0)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    """Scale, apply the sink, and store rows (or their e4m3 codes); `log` is the log-sum-exp in base 2."""
    result = result * v_factor
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0) * 1.4426950408889634
        # a row without keys is 0 whatever its sink
        share = 1.0 / (1.0 + tl.exp2(sink - log))
        result = tl.where((log == float("-inf"))[:, None], 0.0, result * share[:, None])
    if TO_FP8:
        result = fp8_code(tl.math.div_rn(result, tl.zeros_like(result) + tl.load(output_scale)), 3, 7, 448.0)
    tl.store(output + at[:, None] * o_t + head[:, None] * o_h + d[None, :], result.to(output.dtype.element_ty), mask=lanes)
    if HAS_LSE:
        tl.store(lse + head * lse_h + at, log * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=_BATCH)
def _merge(  # type: ignore[no-untyped-def]
    output, lse, partial, partial_lse, plan, query_start_loc, sinks, v_scale, output_scale,
    v_factor, min_query, max_query, o_t, o_h, lse_h, vscale_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_V_SCALE: tl.constexpr, EARLY: tl.constexpr,
    TO_FP8: tl.constexpr,
):  # fmt: skip
    """The second stage: grid R x BLOCK_Q x H, one program merges the parts of one row."""
    r = tl.program_id(0) // (BLOCK_Q * H)
    token = tl.program_id(0) // H % BLOCK_Q
    h = tl.program_id(0) % H
    head = h + tl.zeros((1,), tl.int32)
    begin = tl.load(query_start_loc + r)
    q_len = tl.load(query_start_loc + r + 1) - begin
    if (token >= q_len) | (q_len <= min_query) | (q_len > max_query):
        return
    if EARLY:
        tl.extra.cuda.gdc_wait()
    item = tl.load(plan + 2 * r)
    count = tl.load(plan + 2 * r + 1)
    if count <= 1:
        return
    d = tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_S)
    state = (item * BLOCK_Q + token).to(tl.int64) * H + h
    # in one pass, so that no load waits for another; every part has a result, and one without keys has weight 0
    top = -float("inf")
    acc = tl.zeros((BLOCK_D,), tl.float32)
    norm = 0.0
    for s in tl.range(0, count, BLOCK_S, num_stages=1):
        rows = state + (s + part) * (BLOCK_Q * H)
        logs = tl.load(partial_lse + rows, mask=s + part < count, other=float("-inf"))
        own = (s + part < count)[:, None] & (d < D)[None, :]
        values = tl.load(partial + rows[:, None] * D + d[None, :], mask=own, other=0.0)
        above = tl.maximum(top, tl.max(logs, 0))
        guard = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(logs - guard)
        shrink = tl.exp2(top - guard)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        norm = norm * shrink + tl.sum(weight, 0)
        top = above
    log = tl.where(norm == 0, float("-inf"), top + tl.log2(norm)) + tl.zeros((1,), tl.float32)
    result = tl.where(norm == 0, 0.0, acc / norm)[None, :]
    if HAS_V_SCALE:
        v_factor = v_factor * tl.load(v_scale + h // G * vscale_h)
    at = (begin + token).to(tl.int64) + tl.zeros((1,), tl.int64)
    live = head >= 0
    lanes = live[:, None] & (d < D)[None, :]
    _finish(
        output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h,
        HAS_SINKS, HAS_LSE, TO_FP8,
    )  # fmt: skip


_LAUNCH, _MERGE = Direct(_attention), Direct(_merge)


@hopper.or_general
def _paged_attention(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    tree_right: int | None = None,
    soft_cap: float = 0.0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    is_causal: torch.Tensor | None = None,
    chunk_size: int | None = None,
    span_window: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_factor: float = 1.0,
    v_factor: float = 1.0,
    fixed_split: int = 0,
    sparse: list[int] | None = None,
    output_scale: torch.Tensor | None = None,
    prefill_programs: int = 0,
    whole: bool = False,
) -> None:
    """Compute output [T, H, D] and, unless None, lse [H, T] for every token of every request.

    query: [T, H, D]; caches: [N, P, K, D]; query_start_loc: [R + 1], seq_lens: [R], block_table: [R, B], int32. Caches may also
    be [S, K, D], with each request's keys in a row: block_table is then [R, 1], the row of its first key. Without a block
    table, they are this call's own keys and values [T, K, D], and a request sees its own rows (encoders). A row at position p
    sees keys p - left <= j <= p + right; None means no bound (right = 0 is causal). tree: [R, W, W] bool; for
    requests of at most W tokens, it and `tree_right` replace `right`. spans: [T, 2] int32, prefix: [R] int32, chunk_size and
    span_window: docs/semantics.md §18; is_causal: [R] bool, the requests for which right = 0. k_scale, v_scale: float32 on the
    device: 0-d, [K], or [N, P, K] with equal strides and adjacent heads, one per token and head; k_factor, v_factor: the same
    if the host has the values. fixed_split: keys per split of a decode, a multiple of the keys per tile; a request's bits then
    depend on its own lengths, queries and keys only (`_tuned`). 0 lets the rules choose by the batch. sparse: [block_size,
    local_blocks, vert_stride, shift per head, first head] (docs/semantics.md §13). output_scale: 0-d float32 on the device;
    output is then float8_e4m3fn and holds result / output_scale, saturated and rounded to nearest even. prefill_programs:
    number of multiprocessors for the prefill of a mixed batch that runs concurrently with the decode (Hopper); 0 for all.
    whole: do not cut the keys of decodes into parts (`launch.are_whole`).
    """
    if to_fp8 := output_scale is not None:
        output = output.view(torch.uint8)
    num_reqs, heads, head_size = query_start_loc.shape[0] - 1, query.shape[1], query.shape[2]
    if num_reqs < 1 or query.shape[0] == 0 or max_query_len == 0:
        return
    for name, tensor in (("output", output), ("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        check_stride(name, tensor)
    paged = block_table is not None
    in_row = paged and key_cache.ndim == 3
    page = UNBOUNDED if in_row else key_cache.shape[1] if paged else 1
    kv_heads = key_cache.shape[-2]
    group, block_d = heads // kv_heads, power_of_two(head_size)
    itemsize, stored, name = query.element_size(), key_cache.element_size(), arch()
    shape = (name, group, head_size, itemsize, stored)
    packed = 0 if fixed_split or not paged else rows_of_speculation(name, group, max_query_len, itemsize)
    tuned = _tuned("decode", shape, fixed_split)
    decode = decode_launch(name, packed, *shape[2:]) if packed else tuned or decode_launch(*shape)
    # three tf32 products give float32's accuracy on tensor cores; without them the tiles would not fit in registers
    precision = "tf32x3" if itemsize == 4 and name.startswith("sm") else "ieee"
    early = can_launch_early(name)
    prefill = _tuned("prefill", shape, fixed_split) or prefill_launch(*shape)
    # tokens of a request that fit in one decode tile; one alone needs no mask between rows
    most = decode.block_m // group if paged else 0
    if paged and not fixed_split and not 1 < max_query_len <= most:
        most = 1
    factor, cap = abs(scale) * k_factor * LOG2E, 0.0
    if soft_cap:
        factor, cap = factor / LOG2E / soft_cap, soft_cap * LOG2E
    unbounded = [UNBOUNDED if side is None else side for side in (left, right, tree_right)]
    pattern = sparse or [0, 0, 1, 0, 0]
    # one scale per token and head: [N, P, K]
    per_token = k_scale is not None and k_scale.ndim == 3
    scale_block, scale_slot = k_scale.stride()[:2] if per_token else (0, 0)  # type: ignore[union-attr]
    if per_token:
        assert v_scale is not None and v_scale.stride() == k_scale.stride()  # type: ignore[union-attr]
    # keys in a row: the page of a request begins at its first key, so pages are as far apart as keys
    k_strides, v_strides = ((x.stride()[:1] * in_row or (0,) * (not paged)) + x.stride() for x in (key_cache, value_cache))
    lse_h = lse.stride(0) if lse is not None else 0
    tree_w = tree.shape[1] if tree is not None else 0
    # 64-bit offsets cost a tenth of a prefill's instructions, so only caches that need them use them
    wide = any(x.shape[0] * x.stride(0) >= 2**31 for x in (key_cache, value_cache))

    free = spans is not None or prefix is not None
    plain = slopes is None and tree is None and sparse is None and not (free or is_causal is not None or chunk_size)
    by_hand = not (fixed_split or in_row or to_fp8) and plain and name == "sm_90"
    if by_hand := by_hand and k_scale is None and v_scale is None and hopper.is_on("hopper_prefill"):
        from attn.torch.kernels import hopper_prefill

        by_hand = hopper_prefill.serves(query, key_cache, value_cache, num_reqs, group, page if paged else 128)
    wild = per_token or key_cache.dtype != torch.int8
    if key_cache.dtype == torch.float8_e4m3fn and not converts_e4m3(name):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    half = query.dtype == torch.bfloat16 and stored == 1 and not per_token
    beside = by_hand and paged and max_query_len > most
    if beside and ("decode", *shape) not in TUNED:
        decode = decode_launch(*shape, beside=True)

    def launch(
        rule: Launch, block_q: int, programs: int, is_decode: bool, cut: Cut | None, least: int, limit: int
    ) -> list[torch.Tensor]:
        partial = partial_lse = plan = output
        if cut is not None:
            rows = cut.items * block_q * heads
            partial = torch.empty(rows * head_size, dtype=torch.float32, device=query.device)
            partial_lse = torch.empty(rows, dtype=torch.float32, device=query.device)
            plan = torch.empty(2 * num_reqs, dtype=torch.int32, device=query.device)
        _LAUNCH.launch(
            programs,
            changing=dict(
                output=output,
                lse=lse,
                partial=partial,
                partial_lse=partial_lse,
                plan=plan,
                query=query,
                key_cache=key_cache,
                value_cache=value_cache,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=block_table,
                slopes=slopes,
                sinks=sinks,
                tree=tree,
                spans=spans,
                prefix=prefix,
                is_causal=is_causal,
                k_scale=k_scale,
                v_scale=v_scale,
                output_scale=output_scale,
                factor=factor,
                v_factor=v_factor,
                cap=cap,
                left=unbounded[0],
                right=unbounded[1],
                tree_right=unbounded[2],
                span_right=unbounded[2] or UNBOUNDED,
                chunk=chunk_size or UNBOUNDED,
                min_query=least,
                max_query=limit,
                num_reqs=num_reqs,
                share=cut.share if cut else 0,
                parts=cut.parts if cut else 0,
                enough=cut.enough if cut else 0,
                tree_w=tree_w,
                sparse_local=pattern[1],
                sparse_stride=pattern[2],
                sparse_shift=pattern[3],
                sparse_offset=pattern[4],
                lse_h=lse_h,
                table_r=block_table.stride(0) if block_table is not None else 0,
            ),
            strides=dict(
                o_t=output.stride(0),
                o_h=output.stride(1),
                q_t=query.stride(0),
                q_h=query.stride(1),
                k_block=k_strides[0],
                k_slot=k_strides[1],
                k_head=k_strides[2],
                v_block=v_strides[0],
                v_slot=v_strides[1],
                v_head=v_strides[2],
                kscale_h=_step_of(k_scale),
                vscale_h=_step_of(v_scale),
                scale_block=scale_block,
                scale_slot=scale_slot,
            ),
            constants=dict(
                H=heads,
                G=group,
                D=head_size,
                P=page,
                PER_TOKEN=per_token,
                BLOCK_M=rule.block_m,
                BLOCK_N=rule.block_n,
                BLOCK_D=block_d,
                BLOCK_Q=block_q,
                DECODE=is_decode,
                BLOCK_R=cut.block_r if cut else 0,
                PAGED=paged,
                NEGATE=scale < 0,
                HAS_LEFT=left is not None,
                HAS_CAP=soft_cap != 0,
                HAS_ALIBI=slopes is not None,
                HAS_SINKS=sinks is not None,
                HAS_TREE=tree is not None,
                HAS_SPANS=spans is not None,
                HAS_PREFIX=prefix is not None,
                MIXED=is_causal is not None,
                HAS_CHUNK=chunk_size is not None,
                SPAN_LEFT=span_window,
                HAS_LSE=lse is not None,
                HAS_K_SCALE=k_scale is not None and not per_token,
                HAS_V_SCALE=v_scale is not None and not per_token,
                SPARSE=pattern[0],
                MAY_BE_WILD=wild,
                SAME=k_strides == v_strides,
                WIDE=wide,
                EXACT=itemsize == 4,
                PRECISION=precision,
                EARLY=early and cut is not None,
                BESIDE=beside,
                IN_HALF=half,
                TO_FP8=to_fp8,
                **rule.options(),
                **{"launch_pdl": True} if beside else {},
            ),
        )
        return [partial, partial_lse, plan]

    if max_query_len > most and by_hand:
        hopper_prefill.prefill(
            output=output,
            lse=lse,
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            sinks=sinks,
            factor=factor,
            v_factor=v_factor,
            cap=cap,
            negate=scale < 0,
            left=unbounded[0],
            right=unbounded[1],
            has_left=left is not None,
            min_query=most,
            programs=prefill_programs or multiprocessors(query.device),
        )
    elif max_query_len > most:
        block_q = prefill.block_m // group
        tiles = query.shape[0] // block_q + num_reqs
        launch(prefill, block_q, tiles * kv_heads, False, None, most, UNBOUNDED)
    if not paged:
        return
    keys = max_seq_len
    if chunk_size is not None:
        keys = min(keys, chunk_size + most + decode.block_n)
    if left is not None and not free:
        keys = min(keys, left + most + min(unbounded[1], most) + decode.block_n)
    if fixed_split % decode.block_n:
        raise ValueError(f"fixed_split={fixed_split} must be a multiple of {decode.block_n}, the keys per tile")
    tiles = max(1, -(-keys // decode.block_n))
    cut = None
    if fixed_split or not whole:
        cut = cut_for(num_reqs, kv_heads, tiles, fixed_split // decode.block_n, multiprocessors(query.device))
    if cut is not None and not (fixed_split or beside) and ("decode", *shape) not in TUNED:
        decode = decode_launch(name, packed or group, *shape[2:], True)
    programs = ((cut.items if cut else num_reqs) * kv_heads) + beside
    partial, partial_lse, plan = launch(decode, most, programs, True, cut, 0, most)
    if cut is not None:
        _MERGE.launch(
            num_reqs * most * heads,
            changing=dict(
                output=output,
                lse=lse,
                partial=partial,
                partial_lse=partial_lse,
                plan=plan,
                query_start_loc=query_start_loc,
                sinks=sinks,
                v_scale=v_scale,
                output_scale=output_scale,
                v_factor=v_factor,
                min_query=0,
                max_query=most,
                lse_h=lse_h,
            ),
            constants=dict(
                o_t=output.stride(0),
                o_h=output.stride(1),
                vscale_h=_step_of(v_scale),
                H=heads,
                G=group,
                D=head_size,
                BLOCK_D=block_d,
                BLOCK_Q=most,
                BLOCK_S=32,
                HAS_SINKS=sinks is not None,
                HAS_LSE=lse is not None,
                HAS_V_SCALE=v_scale is not None and not per_token,
                EARLY=early,
                TO_FP8=to_fp8,
                num_warps=4,
                **FUSED,
                **{"launch_pdl": True} if early else {},
            ),
        )


def _tuned(kind: str, shape: tuple[str | int, ...], fixed_split: int) -> Launch | None:
    """The measured launch of a kind, or None where the rule decides.

    With a fixed split, each choice depends on the layer's shape and the request's own number of tokens (at most `most`:
    decode) only. Measured launches change when another batch is timed, and the Hopper kernel serves a limited number of
    requests, so neither is used then. The number of requests selects BLOCK_R, which changes integers of the plan only.
    """
    return None if fixed_split else TUNED.get((kind, *shape))


def _step_of(scale: torch.Tensor | None) -> int:
    """The number of elements between the scales of adjacent kv heads."""
    return 1 if scale is not None and scale.ndim else 0


_op = library.custom_op("attn::triton_paged_attention", _paged_attention, mutates_args=("output", "lse"))


@_op.register_fake
def _(*args, **kwargs) -> None:  # type: ignore[no-untyped-def]
    return None


@functools.wraps(_paged_attention)
def paged_attention(output: torch.Tensor, lse: torch.Tensor | None, query: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    # the operator is for tracing; its dispatch costs an eager call about 50 us
    eager = type(query) is torch.Tensor and not torch.compiler.is_compiling()
    (_paged_attention if eager else _op)(output, lse, query, *args, **kwargs)
