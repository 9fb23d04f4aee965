"""Attention of a ragged batch over a paged cache: one kernel for prefill, chunked prefill, decode and mixed batches.

A program computes one tile: up to BLOCK_Q query tokens of one request times the G query heads of one kv head, packed as
rows, over that request's keys, BLOCK_N at a time, with an online softmax in base 2 (Dao et al., FlashAttention-2, 2023): m_i is
a row's running maximum, l_i the sum of its weights, alpha the factor that rescales earlier sums to a new maximum.
Tokens and heads share rows, so one pass over the keys serves the whole group. It is launched in three ways:

    prefill  1-D grid, tiles x K, found by bisection in query_start_loc; longest rows of a request first.
    decode   1-D grid, items x K, one tile of rows per request. The keys of requests are split (split-KV) so that
             all multiprocessors end together; each program computes this plan from the lengths on the device (`plan.item_of`)
             and takes one item. Partial results are merged by `merge` (Flash-Decoding); a request of one split is
             finished at once. Where bits must be the request's, both add the results of stretches of its keys (`_stretches`).
    together as a decode, but a request has several tiles, and splits of each: few rows of any number of tokens, in one launch.

A mixed batch uses the first two, each skipping the other's requests, so that a decode never runs on a prefill's large tile, or
the last if that takes less time than its prompts alone would (`launch.run_together`).
They run one after the other, except on Hopper where `hopper_prefill` handles 16-bit caches: there they run concurrently,
the decode launched early onto the multiprocessors that the prefill leaves free. No lengths are fetched from the device and
grids depend only on extents, max_query_len and max_seq_len: a captured launch serves any batch within those bounds.

Decodes, and batches in one launch, may write their new tokens to the cache before they read it: each program writes those among
the keys that it reads, of its request and kv head. So the caller ensures that no two requests share a page that is written.

Masked scores are selected away, never multiplied: they become -inf, and keys and values that no row sees are not loaded. If
a tile's sums are not finite at the end, it is recomputed in a slower way, so that a NaN or infinity among values that some
rows see affects only those rows. Masks are computed only for the tiles of keys that need one; blocks outside every window
are never read. Offsets into a cache of 2^31 elements or more are 64-bit.

Layouts: query, output [T, H, D]; caches [N, P, K, D] of any strides (last dimension dense); lse [H, T] float32, natural
log. Rows of tokens beyond query_start_loc[R] are not written: they are undefined.
"""

import triton
import triton.language as tl

from attn.kernels.codes import fp8_code, number_in
from attn.kernels.kv_write import code_in
from attn.kernels.launch import TOGETHER
from attn.kernels.plan import item_of, stretch_of, visible

_TOGETHER = tl.constexpr(TOGETHER)
#: Changes of these do not recompile.
_SIZES = ("num_reqs", "min_query", "max_query", "states", "lse_h", "table_r", "tree_w")
_SPLITS = ("split_tiles", "max_splits", "whole_from")
_BOUNDS = ("left", "right", "tree_right", "span_right", "chunk")
_SPARSE = ("sparse_local", "sparse_stride", "sparse_shift", "sparse_offset")
_BATCH = _SIZES + _SPLITS + _BOUNDS + _SPARSE


@triton.jit
def request_of(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The request of a prefill tile, where request r's tiles start at query_start_loc[r] // BLOCK_Q + r."""
    # The sum of ceil(q_len / BLOCK_Q) over earlier requests is at most their tokens // BLOCK_Q + r, so tiles of requests never
    # overlap, and the host sizes the grid by tokens and requests alone. Surplus tiles have no rows.
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
    nonfinite = ((values != values) | (values == infinity)).to(tl.float16)
    # Counted by a product, as no [rows, keys, D] fits in registers. A NaN counts for both infinities, whose sum is NaN again.
    hits = tl.dot(allowed.to(tl.float16), nonfinite)
    return tl.where(hits > 0, infinity, 0.0)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    sums, start, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, q, rows, low, high, mask, scores, sparse, table, keys, scales,
    PAGED: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPARSE: tl.constexpr,
    SAME: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, IN_HALF: tl.constexpr,
    LATE: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys: scores, running maximum, weighted values. Without MASKED every row sees every key of it.

    In the tuples, None stands for what a layer does not have: a cap, slopes, scales of each token, parts of the mask.
    """
    acc, l_i, m_i = sums
    factor, cap, slope = scores
    k_base, v_base, k_block, k_slot, v_block, v_slot = keys
    # rows whose queries were scaled by a power of two have a factor each
    by = factor[:, None] if IN_HALF else factor
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    j = start + n
    # past either end the nearest visible key is loaded again: memory there is not read and needs no mask
    at = tl.minimum(tl.maximum(j, low), high - 1) if MASKED else j
    if PAGED:
        if P % BLOCK_N == 0:
            # the whole tile lies in one page
            page = tl.load(table + start // P)
            slot = at % P
        elif BLOCK_N % P == 0 and not MASKED:
            # whole pages, all of them visible: start is a multiple of P
            page = tl.load(table + start // P + n // P)
            slot = n % P  # known before the loop
        else:
            # one look-up a key: a tile that begins or ends within a page, of clamped keys
            page = tl.load(table + at // P)
            slot = at % P
        if WIDE:
            # before the multiplication, which would overflow: the table is int32
            page = page.to(tl.int64)
            if P == 1 << 30:  # keys in a row, of which a request may have as many
                slot = slot.to(tl.int64)
        k_rows = page * k_block + slot * k_slot
        v_rows = k_rows if SAME else page * v_block + slot * v_slot
    else:
        at = at.to(tl.int64)
        k_rows = at * k_slot
        v_rows = k_rows if SAME else at * v_slot
    k_at = k_base + k_rows[:, None] + d[None, :]
    v_at = v_base + v_rows[:, None] + d[None, :]
    # Loads of a mask cost a fifth more instructions, so only padded heads have one.
    if D != BLOCK_D:
        k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    s = tl.dot(q, tl.trans(number_in(k, q.dtype)), input_precision=PRECISION)
    if scales is not None:
        # the first two point at this kv head's scales of the first page
        scale_rows = page * scales[2] + slot * scales[3]
        s = s * tl.load(scales[0] + scale_rows)[None, :]
        v_by = tl.load(scales[1] + scale_rows)

    # Scores in base 2. Plain ones are not scaled yet: the factor is applied inside the exponent, where the product is
    # fused.
    if cap is not None:
        s = cap * tanh(s * by)
    elif slope is not None:
        s = s * by
    if slope is not None:
        s = s - slope[:, None] * tl.abs(j[None, :] - rows[1][:, None]).to(tl.float32)
    if MASKED:
        allowed = _allowed(j, rows, mask, sparse, SPARSE)
        s = tl.where(allowed, s, float("-inf"))
    if cap is not None or slope is not None:
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # while a row has seen no key, its maximum is -inf, and -inf - -inf would be NaN
        guard = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - guard[:, None]) + LIFT) if LIFT else tl.exp2(s - guard[:, None])
        alpha = tl.exp2(m_i - guard)
    elif LATE:
        # subtracted before scaling, so that the largest score is exactly 0 and a single key's value is returned exactly
        m_new = tl.maximum(m_i, tl.max(s, 1))
        guard = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - guard[:, None]) * by + LIFT) if LIFT else tl.exp2((s - guard[:, None]) * by)
        alpha = tl.exp2((m_i - guard) * factor)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        guard = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - guard[:, None])
        alpha = tl.exp2(m_i - guard)
    # weights are added up before they are rounded to the product's dtype
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if scales is not None and q.dtype == tl.float16:
        v = v.to(tl.float32) * v_by[:, None]  # weights times a small scale would be subnormal in float16
    elif scales is not None:
        # selected, since a token with a NaN has a scale of NaN
        p = tl.where(allowed, p * v_by[None, :], 0.0) if MASKED else p * v_by[None, :]
    v = number_in(v, q.dtype)
    p = p.to(v.dtype)
    if NAN_SAFE:
        # A weight of 0 times NaN is NaN, so non-finite values leave the product, and are added to the rows that see them.
        wide = v.to(tl.float32)
        v = tl.where((wide - wide) != 0.0, 0.0, wide).to(v.dtype)
        acc += _infinite_where(wide, allowed, float("inf"))
        acc += _infinite_where(wide, allowed, float("-inf"))
    acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc, l_i, m_new


@triton.jit
def _allowed(j, rows, mask, sparse, SPARSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, keys]: window and causality, the draft tree among new tokens, the block-sparse pattern; spans, prefix, chunk."""
    upper, position, token, head = rows
    left, tree, span, prefix_end, chunk = mask
    # In the order of docs/semantics.md §18: what a span or prefix adds escapes causality and window, but not the chunk.
    allowed = j[None, :] <= upper[:, None]
    if left is not None:
        allowed = allowed & (j[None, :] >= position[:, None] - left)
    if tree is not None:
        # The tree says which of the request's new tokens see each other; keys of the context are outside it and stay allowed.
        tree_row, tree_w, is_tree, context, q_len = tree
        new = j[None, :] - context
        inside = (new >= 0) & (new < q_len) & (token < q_len)[:, None] & is_tree
        seen = tl.load(tree_row + token[:, None] * tree_w + new, mask=inside, other=1)
        allowed = allowed & (seen != 0)
    if SPARSE > 0:
        # docs/semantics.md §13; `head` is the head in the whole model, whose pattern a rank's heads continue
        sparse_local, sparse_stride, sparse_shift = sparse
        far = position[:, None] // SPARSE - j[None, :] // SPARSE
        column = j[None, :] // SPARSE + head[:, None] * sparse_shift + 1
        allowed = allowed & ((far < sparse_local) | (column % sparse_stride == 0))
    if span is not None:
        allowed = allowed | ((j[None, :] >= span[0][:, None]) & (j[None, :] <= span[1][:, None]))
    if prefix_end is not None:
        allowed = allowed | (j < prefix_end)[None, :]
    if chunk is not None:
        allowed = allowed & (j[None, :] >= (position // chunk * chunk)[:, None])
    return allowed


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh: a series where the quotient would cancel; saturates on both sides where exp overflows."""
    y = x * x
    series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949))))
    # tanh x = 1 - 2 / (e^2x + 1), where e^2x = 2^(2 x log2 e). Near 0 the difference loses the digits that the series keeps.
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit
def _stretches(  # type: ignore[no-untyped-def]
    aligned, stop, first_key, stretch, partial, q, rows, low, high, mask, scores, sparse, table, keys, scales, first, live,
    SAFE: tl.constexpr, PAGED: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SPARSE: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, IN_HALF: tl.constexpr, LATE: tl.constexpr, LIFT: tl.constexpr, SPLIT: tl.constexpr,
    MAY_BE_NONFINITE: tl.constexpr,
):  # fmt: skip
    """(weighted sum of values, sum of weights, maximum) over the keys from `aligned` to `stop`: of each stretch of keys, and
    these added in order, so that a row's bits do not depend on which programs have its stretches.

    partial: if SPLIT, whether to store the result of each stretch, and where: `merge` adds those.
    """
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total_l = tl.zeros((BLOCK_M,), tl.float32)
    total_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, l_i, m_i = total, total_l, total_m
    # one loop, whose loads are on their way while a stretch ends
    for start in tl.range(aligned, stop, BLOCK_N):
        if SPARSE == 0 or _sparse_tile(start, first, rows[3], live, sparse[0], sparse[1], sparse[2], BLOCK_N, SPARSE):
            acc, l_i, m_i = _step(
                (acc, l_i, m_i), start, True, SAFE, q, rows, low, high, mask, scores, sparse, table, keys, scales, PAGED, P, D,
                BLOCK_N, BLOCK_D, SPARSE, SAME, WIDE, EXACT, PRECISION, IN_HALF, LATE, LIFT,
            )  # fmt: skip
        end = start + BLOCK_N - first_key
        if (end % stretch == 0) | (start + BLOCK_N >= stop):
            if MAY_BE_NONFINITE:  # noqa: SIM102  (one is known when compiling)
                # as `attention` does, but of this stretch alone
                if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:
                    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                    l_i = tl.zeros((BLOCK_M,), tl.float32)
                    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                    since = first_key + (end - 1) // stretch * stretch
                    for at in tl.range(since, tl.minimum(start + BLOCK_N, stop), 16, num_stages=1):
                        acc, l_i, m_i = _step(
                            (acc, l_i, m_i), at, True, True, q, rows, low, high, mask, scores, sparse, table, keys, scales,
                            PAGED, P, D, 16, BLOCK_D, SPARSE, SAME, WIDE, EXACT, PRECISION, IN_HALF, LATE, LIFT,
                        )  # fmt: skip
            # The selection also ends the product, which compilers might fuse with a subtraction here and not in `merge`.
            peak = _scaled(m_i, scores[0], LATE and scores[1] is None and scores[2] is None, LIFT)
            peak = tl.where(l_i == 0, float("-inf"), peak)
            if SPLIT:  # noqa: SIM102
                if partial[0]:
                    at = partial[3] + (end - 1) // stretch
                    _store(partial[1], partial[2], at, acc, l_i, peak, live, D, BLOCK_D)
            total, total_l, total_m = _joined(total, total_l, total_m, acc, l_i, peak)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return total, total_l, total_m


@triton.jit
def _scaled(m_i, factor, BY: tl.constexpr, LIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Maxima in base 2. BY: whether those of plain scores were kept before scaling."""
    m_i = m_i * factor if BY else m_i
    return m_i - LIFT if LIFT else m_i


@triton.jit
def _joined(acc, l_i, m_i, sums, weights, peak):  # type: ignore[no-untyped-def]
    """(weighted sum of values, sum of weights, maximum) of keys, and of further ones: of both."""
    m_new = tl.maximum(m_i, peak)
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, by = tl.exp2(m_i - guard), tl.exp2(peak - guard)
    # `attention` and `merge` compute the same bits: what is fused is written, not left to the compiler
    return tl.fma(sums, by[:, None], acc * alpha[:, None]), tl.fma(weights, by, l_i * alpha), m_new


@triton.jit
def _store(scratch, states, state, acc, l_i, m_i, live, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a partial result of each row, which `merge` reads."""
    d = tl.arange(0, BLOCK_D)[None, :]
    sums_at = scratch + states.to(tl.int64) * D + state
    tl.store(scratch + state[:, None] * D + d, acc, mask=live[:, None] & (d < D))
    tl.store(sums_at, m_i, mask=live)
    tl.store(sums_at + states, l_i, mask=live)


@triton.jit(do_not_specialize=_BATCH)
def attention(  # type: ignore[no-untyped-def]
    scratch, output, lse, query_start_loc, sinks, v_scale, output_scale, query, key_cache, value_cache, seq_lens, block_table,
    slopes, tree, spans, prefix, is_causal, k_scale, key, value, slots,
    factor, k_factor, v_factor, num_reqs, states, lse_h, table_r, tree_w, split_tiles, max_splits, whole_from,
    o_t, o_h, q_t, q_h, k_block, k_slot, k_head, v_block, v_slot, v_head, key_t, value_t,
    cap, left, right, tree_right, span_right, chunk, min_query, max_query, sparse_local, sparse_stride, sparse_shift,
    sparse_offset, kscale_h, vscale_h, scale_block, scale_slot, values_at,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    DECODE: tl.constexpr, TILED: tl.constexpr, BLOCK_R: tl.constexpr, PAGED: tl.constexpr, NEGATE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_SPANS: tl.constexpr, HAS_PREFIX: tl.constexpr, MIXED: tl.constexpr, HAS_CHUNK: tl.constexpr,
    SPAN_LEFT: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    SPARSE: tl.constexpr, MAY_BE_NONFINITE: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, BESIDE: tl.constexpr, IN_HALF: tl.constexpr,
    FORMAT: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = H // G
    if value_cache is None:
        value_cache = key_cache + values_at  # one array holds the keys, and the values behind them
    # Rows may see keys that neither causality nor the window bounds. A decode's plan then counts all keys.
    FREE: tl.constexpr = HAS_SPANS or HAS_PREFIX
    if PDL:
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
    # kv heads vary fastest, so that programs that run together read the same pages
    kv_head = pid % K
    if DECODE and (BLOCK_R > 0 or not TILED):
        tile = 0
        if BLOCK_R > 0:
            r, tile, begin_tile, end_tile, split_index, num_splits, place = item_of(
                pid // K, query_start_loc, seq_lens, num_reqs, min_query, max_query, 1 << 30 if FREE else left,
                1 << 30 if FREE else right, 1 << 30 if FREE else tree_right, tree_w, chunk, split_tiles, max_splits, whole_from,
                BLOCK_N,
                BLOCK_R, BLOCK_Q if TILED else 0, HAS_TREE, HAS_CHUNK, STRETCH, STRETCHES,
            )  # fmt: skip
            if r >= num_reqs:
                return
            if STRETCH == 0:  # noqa: SIM102
                if (split_index == 0) & (tile == 0) & (kv_head == 0):
                    # Behind the partial results: the place of the request's first one, and how many there are. One program
                    # writes them, so that `merge` need not repeat the search.
                    plan = (scratch + states.to(tl.int64) * (D + 1)).to(tl.pointer_type(tl.int32)) + 2 * r
                    tl.store(plan, place)
                    tl.store(plan + 1, num_splits)
        else:
            r = pid // K
        begin = tl.load(query_start_loc + r)
        q_len = tl.load(query_start_loc + r + 1) - begin
    else:
        # prefill, and whole decodes of several tiles: the program's tile is one of rows
        r = request_of(query_start_loc, pid // K, num_reqs, BLOCK_Q)
        begin = tl.load(query_start_loc + r)
        q_len = tl.load(query_start_loc + r + 1) - begin
        # the last rows are the longest: start them first, so that they do not end last
        tile = tl.cdiv(q_len, BLOCK_Q) - 1 - (pid // K - (begin // BLOCK_Q + r))
    # another launch has this request, or the tile is a surplus one (`request_of`)
    if (q_len <= min_query) | (q_len > max_query) | (tile < 0):
        return
    seq_len = tl.load(seq_lens + r) if PAGED else q_len
    context = seq_len - q_len

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = tile * BLOCK_Q + row // G
    head = kv_head * G + row % G
    # BLOCK_M is a power of two and G may not be: the last rows of a tile can be no token's
    live = (row < BLOCK_Q * G) & (token < q_len)
    position = context + token
    first = context + tile * BLOCK_Q
    last = context + tl.minimum(tile * BLOCK_Q + BLOCK_Q, q_len) - 1
    is_tree = False
    if HAS_TREE:
        is_tree = q_len <= tree_w
        right = tl.where(is_tree, tree_right, right)
    # Causality of its own narrows a prefill's range. A decode's must stay the plan's, which does not know it.
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
        # spans and prefixes may reach beyond the window; a decode's range already has all keys
        if not DECODE:
            has_span = span_high >= 0
            low = tl.minimum(low, tl.min(tl.where(has_span, span_low, low)))
            high = tl.maximum(high, tl.minimum(tl.max(span_high) + 1, seq_len))
        if SPAN_LEFT:  # the window bounds the span
            span_low = tl.maximum(span_low, position - left)
            span_high = tl.minimum(span_high, position + span_right)
        span_high = tl.minimum(span_high, seq_len - 1)
    if HAS_PREFIX:
        prefix_end = tl.minimum(tl.load(prefix + r), seq_len)
        if not DECODE:
            low = tl.where(prefix_end > 0, 0, low)
            high = tl.maximum(high, prefix_end)
    # again, as a span or prefix may have moved `low` before the chunk's beginning or below 0
    if FREE and not DECODE:
        if HAS_CHUNK:
            low = tl.maximum(low, tl.maximum(first, 0) // chunk * chunk)
        low = tl.maximum(low, 0)
        aligned = tl.where(low < high, low // BLOCK_N * BLOCK_N, high)
    stop, first_key = high, aligned
    if BLOCK_R > 0:
        stop = tl.minimum(high, aligned + end_tile * BLOCK_N)
        # after `stop`, which counts from the first visible tile as the plan does
        aligned += begin_tile * BLOCK_N

    lanes = live[:, None] & (d < D)[None, :]
    # heads may be outermost, as far apart as all tokens of one
    q = tl.load(query + at[:, None] * q_t + head[:, None].to(tl.int64) * q_h + d[None, :], mask=lanes, other=0.0)
    if NEGATE:
        q = (0.0 - q.to(tl.float32)).to(q.dtype)
    if IN_HALF:
        # One-byte codes convert to float16 with one instruction per pair, to bfloat16 with three, two of them slow. Queries
        # are converted as well: a power of two scales each row so that float16 holds every bit of values down to 2**-31 of
        # the row's largest.
        wide_q = q.to(tl.float32)
        peak = tl.max(tl.where(tl.abs(wide_q) < float("inf"), tl.abs(wide_q), 0.0), 1)
        # The exponent's bits alone are the largest power of two up to the peak, at least 2**-60 so that its inverse is finite.
        # The row's largest query is then below 2**15, within float16, and the factor takes 2**-14 of that power back.
        power = tl.maximum((peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 8.673617379884035e-19)
        q = (wide_q * (16384.0 / power)[:, None]).to(tl.float16)
        factor = factor * (power * 6.103515625e-05)
    if HAS_K_SCALE:
        k_factor = k_factor * tl.load(k_scale + kv_head * kscale_h)
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
        # no pages: keys are rows of this call, counted from the request's first
        k_base = key_cache + kv_head.to(tl.int64) * k_head + begin.to(tl.int64) * k_slot
        v_base = value_cache + kv_head.to(tl.int64) * v_head + begin.to(tl.int64) * v_slot
    tree_row = tree
    if HAS_TREE:
        tree_row = tree + r.to(tl.int64) * tree_w * tree_w
    shifted = head + sparse_offset
    if slots is not None:
        # Each program writes the new rows among its keys and reads no others, so it waits for no other program. Blocks of a
        # request's rows share keys: their programs write the same bytes, each before it reads. No branch, which would make
        # programs of e4m3 spill registers. TOKENS are as many as a program may have (`launch.writes_rows`).
        TOKENS: tl.constexpr = _TOGETHER if TILED else 1 if BLOCK_Q == 1 else 4 if BLOCK_Q <= 4 else 8 if BLOCK_Q <= 8 else 16
        new = slots, key, value, key_t, value_t
        caches = k_base, v_base, k_block, k_slot, v_block, v_slot
        since = tl.maximum(aligned, context) - context
        _write(new, caches, (k_factor, v_factor), begin, since, stop - context, kv_head, P, D, BLOCK_D, FORMAT, TOKENS)
        tl.debug_barrier()  # every thread has stored before one reads what another stored

    # Weights in float16 reach 2**15 instead of 1: from 2**-39 of the largest on they are not 0, from 2**-29 on exact. None
    # may exceed the largest by much, as rounding causes when scores of 2**24 are scaled before it is subtracted.
    LIFT: tl.constexpr = 15 if q.dtype == tl.float16 else 0
    LATE: tl.constexpr = EXACT or q.dtype == tl.float16
    upper = tl.minimum(position + right, high - 1)
    # The keys from full to tail are visible to every row: their tiles need no mask. Where finding them does not pay, both
    # are `aligned`, so that every tile is masked. In float32 every tile of several tokens takes the NaN-safe path, so that
    # one row's values change no bit of another row.
    CLEAR: tl.constexpr = not (SPARSE > 0 or DECODE or EXACT)
    full, tail = aligned, aligned
    if CLEAR:
        tail = tl.minimum(first + right + 1, high)
        if HAS_TREE:
            tail = tl.where(is_tree, tl.minimum(tail, context), tail)
        if HAS_LEFT or HAS_CHUNK:
            since = tl.maximum(last - left, aligned)
            if HAS_CHUNK:
                since = tl.maximum(since, tl.maximum(last, 0) // chunk * chunk)
            full = tl.minimum(tl.cdiv(since, BLOCK_N), tl.cdiv(high, BLOCK_N)) * BLOCK_N
        tail = tl.maximum(full, tl.maximum(tail, 0) // BLOCK_N * BLOCK_N)
    # what every step takes besides its tile; None where the layer or the batch does not have it
    rows = upper, position, token, shifted
    mask = (
        left if HAS_LEFT else None,
        (tree_row, tree_w, is_tree, context, q_len) if HAS_TREE else None,
        (span_low, span_high) if HAS_SPANS else None,
        prefix_end if HAS_PREFIX else None,
        chunk if HAS_CHUNK else None,
    )
    scores = factor, cap if HAS_CAP else None, slope if HAS_ALIBI else None
    sparse = sparse_local, sparse_stride, sparse_shift
    keys = k_base, v_base, k_block, k_slot, v_block, v_slot
    scales = (k_scale, v_scale, scale_block, scale_slot) if PER_TOKEN else None
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if STRETCH > 0:
        stretch = stretch_of(tl.cdiv(high - first_key, BLOCK_N), STRETCH, STRETCHES) * BLOCK_N
        partial = None
        if BLOCK_R > 0:
            # results of a row: that of the first split, which adds its stretches, and of each later stretch
            count = tl.cdiv(high - first_key, stretch)
            stored = count - count // tl.maximum(num_splits, 1) + 1
            state = (place * BLOCK_Q).to(tl.int64) * H + (row // G * H + head) * stored
            if (split_index == 0) & (kv_head == 0):
                plan = (scratch + states.to(tl.int64) * (D + 2)).to(tl.pointer_type(tl.int32)) + 2 * r
                tl.store(plan, place)
                tl.store(plan + 1, stored)
            partial = split_index > 0, scratch, states, state + stored - count
        # Splits look for values that are not finite at each stretch's end, whole requests once, behind their loop, which then
        # needs no registers for them. A stretch's result is the same.
        for again in tl.static_range(1 + (MAY_BE_NONFINITE and BLOCK_R == 0)):
            if again == 0 or tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:
                acc, l_i, m_i = _stretches(
                    aligned, stop, first_key, stretch, partial, q, rows, low, high, mask, scores, sparse, table, keys, scales,
                    first, live, EXACT and BLOCK_Q > 1 and SPARSE == 0, PAGED, P, D, BLOCK_M, BLOCK_N, BLOCK_D, SPARSE, SAME,
                    WIDE, EXACT, PRECISION, IN_HALF, LATE, LIFT, BLOCK_R > 0, MAY_BE_NONFINITE and (BLOCK_R > 0 or again > 0),
                )  # fmt: skip
        if BLOCK_R > 0:  # noqa: SIM102
            if num_splits > 1:
                if split_index == 0:
                    _store(scratch, states, state, acc, l_i, m_i, live, D, BLOCK_D)
                return
    else:
        for phase in tl.static_range(3):
            if phase == 2 or (CLEAR and (phase == 1 or HAS_LEFT or HAS_CHUNK)):
                begin_at = aligned if phase == 0 else full if phase == 1 else tail
                end_at = full if phase == 0 else tail if phase == 1 else stop
                for start in tl.range(begin_at, end_at, BLOCK_N):
                    if SPARSE == 0 or _sparse_tile(
                        start, first, shifted, live, sparse_local, sparse_stride, sparse_shift, BLOCK_N, SPARSE
                    ):
                        acc, l_i, m_i = _step(
                            (acc, l_i, m_i), start, phase != 1, EXACT and BLOCK_Q > 1 and SPARSE == 0, q, rows, low, high, mask,
                            scores, sparse, table, keys, scales, PAGED, P, D, BLOCK_N, BLOCK_D, SPARSE, SAME, WIDE, EXACT,
                            PRECISION, IN_HALF, LATE, LIFT,
                        )  # fmt: skip
        if MAY_BE_NONFINITE and (DECODE or SPARSE > 0 or not EXACT):  # noqa: SIM102  (one is known when compiling)
            # 0 * NaN: a non-finite value may have reached rows that do not see it, or, loaded again past an end, have made an
            # infinity NaN. Rare enough to start over; a decode in small tiles, which need no more registers than its own.
            NAN_SAFE_N: tl.constexpr = 16 if DECODE else BLOCK_N
            # x - x is 0 for every finite x, and NaN for the others
            if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                l_i = tl.zeros((BLOCK_M,), tl.float32)
                m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                for start in tl.range(aligned, stop, NAN_SAFE_N, num_stages=1):
                    acc, l_i, m_i = _step(
                        (acc, l_i, m_i), start, True, True, q, rows, low, high, mask, scores, sparse, table, keys, scales,
                        PAGED, P, D, NAN_SAFE_N, BLOCK_D, SPARSE, SAME, WIDE, EXACT, PRECISION, IN_HALF, LATE, LIFT,
                    )  # fmt: skip
        m_i = _scaled(m_i, factor, LATE and not (HAS_CAP or HAS_ALIBI), LIFT)
    log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i))
    # docs/semantics.md §1: a row without keys is 0, with a log-sum-exp of -inf
    result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    if BLOCK_R > 0 and STRETCH == 0:  # noqa: SIM102
        if num_splits > 1:
            # The splits of a row side by side, so that its merge reads one piece of memory; all kv heads of a block of rows
            # share the place of its items.
            state = (place * BLOCK_Q).to(tl.int64) * H + (row // G * H + head) * num_splits + split_index
            tl.store(scratch + state[:, None] * D + d[None, :], result, mask=lanes)
            tl.store(scratch + states.to(tl.int64) * D + state, log, mask=live)
            return
    _finish(output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    new, caches, scales, begin, first, end, kv_head, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store keys and values of one kv head at the slots of TOKENS new tokens, those that have none (-1) left out, as
    `kv_write.write` does: from number `first` of a request, which begins at `begin`, to before number `end`."""
    slots, key, value, key_t, value_t = new
    k_base, v_base, k_block, k_slot, v_block, v_slot = caches
    k_scale, v_scale = scales
    d = tl.arange(0, BLOCK_D)[None, :]
    number = first + tl.arange(0, TOKENS)
    token = begin.to(tl.int64) + number
    # 64 bits: a slot times its stride may exceed 32
    slot = tl.load(slots + token, mask=number < end, other=-1).to(tl.int64)[:, None]
    there = (d < D) & (number < end)[:, None]  # without a look at the slots, which are on their way
    k = tl.load(key + token[:, None] * key_t + kv_head * D + d, mask=there)
    v = tl.load(value + token[:, None] * value_t + kv_head * D + d, mask=there)
    live = there & (slot >= 0)
    k_at = k_base + slot // P * k_block + slot % P * k_slot + d
    v_at = v_base + slot // P * v_block + slot % P * v_slot + d
    if FORMAT == "":
        k, v = k.to(k_base.dtype.element_ty), v.to(v_base.dtype.element_ty)
    else:
        k, v = k.to(tl.float32), v.to(tl.float32)
        codes: tl.constexpr = tl.uint16 if FORMAT == "bf16" else tl.uint8
        if FORMAT != "bf16":
            # Division rounded to nearest, as the host's: the default is approximate on GPUs and would change codes in the last
            # bit.
            k, v = tl.math.div_rn(k, tl.zeros_like(k) + k_scale), tl.math.div_rn(v, tl.zeros_like(v) + v_scale)
        k, v = code_in(k, FORMAT), code_in(v, FORMAT)
        k_at, v_at = k_at.to(tl.pointer_type(codes)), v_at.to(tl.pointer_type(codes))
    tl.store(k_at, k, mask=live)
    tl.store(v_at, v, mask=live)


@triton.jit
def _sparse_tile(  # type: ignore[no-untyped-def]
    start, first, head, live, sparse_local, sparse_stride, sparse_shift, BLOCK_N: tl.constexpr, SPARSE: tl.constexpr
):
    """Whether some row of the tile may attend to keys start..start + BLOCK_N: the block-sparse pattern, before any load."""
    # The first row is nearest to the tile's last key, and all heads share the local blocks; only the columns depend on the
    # head.
    near = first // SPARSE - (start + BLOCK_N - 1) // SPARSE < sparse_local
    rows_seen = 0
    if not near:
        for block in tl.range(start // SPARSE, (start + BLOCK_N - 1) // SPARSE + 1):
            column = (block + head * sparse_shift + 1) % sparse_stride == 0
            rows_seen += tl.max((column & live).to(tl.int32), 0)
    return near | (rows_seen > 0)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h
):
    """Scale, apply the sink, and store rows (or their e4m3 codes); `log` is the log-sum-exp in base 2."""
    # after the merge of splits, so that a state is independent of scales, sinks and the output's format
    result = result * v_factor
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0)
        # a row without keys is 0 whatever its sink
        weight = 1.0 / (1.0 + tl.exp2(tl.fma(sink, 1.4426950408889634, -log)))
        result = tl.where((log == float("-inf"))[:, None], 0.0, result * weight[:, None])
    if output_scale is not None:
        result = fp8_code(tl.math.div_rn(result, tl.zeros_like(result) + tl.load(output_scale)), 3, 7, 448.0)
    head = head.to(tl.int64)
    tl.store(output + at[:, None] * o_t + head[:, None] * o_h + d[None, :], result.to(output.dtype.element_ty), mask=lanes)
    if lse is not None:
        tl.store(lse + head * lse_h + at, log * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=_BATCH)
def merge(  # type: ignore[no-untyped-def]
    scratch, output, lse, query_start_loc, sinks, v_scale, output_scale, v_factor, num_reqs, states, lse_h, o_t, o_h, vscale_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    TILED: tl.constexpr, HAS_V_SCALE: tl.constexpr, PDL: tl.constexpr, STRETCHED: tl.constexpr,
):  # fmt: skip
    """The second stage: one program merges BLOCK_C columns of the splits of one row, or, if STRETCHED, of its stretches.

    Grid (tiles of rows x BLOCK_Q x H x blocks of columns): one tile for each request, or, if TILED, several (`request_of`).
    """
    BLOCKS: tl.constexpr = (D + BLOCK_C - 1) // BLOCK_C
    row = tl.program_id(0) // BLOCKS
    r = row // (BLOCK_Q * H)
    h = row % H
    head = h + tl.zeros((1,), tl.int32)
    # The lengths are older than both stages, so they may be read before the wait for the splits.
    tile = 0
    if TILED:
        tile = r
        r = request_of(query_start_loc, tile, num_reqs, BLOCK_Q)
        tile -= tl.load(query_start_loc + r) // BLOCK_Q + r
    begin = tl.load(query_start_loc + r)
    q_len = tl.load(query_start_loc + r + 1) - begin
    of_tile = row // H % BLOCK_Q
    token = tile * BLOCK_Q + of_tile
    # requests of more rows were the prefill's, and left no plan
    if (token >= q_len) | ((not TILED) & (q_len > BLOCK_Q)):
        return
    if PDL:
        # until every program of the first stage has ended and its stores are visible
        tl.extra.cuda.gdc_wait()
    logs_at = scratch + states.to(tl.int64) * D
    plan = (logs_at + states * (2 if STRETCHED else 1)).to(tl.pointer_type(tl.int32)) + 2 * r
    place = tl.load(plan)
    count = tl.load(plan + 1)
    if count <= 1:
        return
    d = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_S)
    # splits of a block of rows are adjacent items (`plan.item_of`), and those of a row adjacent states
    state = ((place + tile * count) * BLOCK_Q).to(tl.int64) * H + (of_tile * H + h) * count
    # in one pass, so that no load waits for another; every split has a result, and one without keys has weight 0
    if STRETCHED:
        # in the order of keys, as `attention` adds them; what is loaded in place of none changes no bit, nor the sign of a zero
        acc = tl.zeros((1, BLOCK_C), tl.float32)
        l_i = tl.zeros((1,), tl.float32)
        m_i = tl.full((1,), float("-inf"), tl.float32)
        for s in tl.range(0, count, BLOCK_S, num_stages=1):
            for i in tl.static_range(BLOCK_S):
                at = state + s + i + tl.zeros((1,), tl.int64)
                present = s + i + tl.zeros((1,), tl.int32) < count
                sums_at = scratch + at[:, None] * D + d[None, :]
                sums = tl.load(sums_at, mask=present[:, None] & (d < D)[None, :], other=-0.0)
                peak = tl.load(logs_at + at, mask=present, other=float("-inf"))
                weights = tl.load(logs_at + states + at, mask=present, other=0.0)
                acc, l_i, m_i = _joined(acc, l_i, m_i, sums, weights, peak)
        log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i))
        result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    else:
        m_i = -float("inf")
        acc = tl.zeros((BLOCK_C,), tl.float32)
        l_i = 0.0
        for s in tl.range(0, count, BLOCK_S, num_stages=1):
            rows = state + s + lane
            logs = tl.load(logs_at + rows, mask=s + lane < count, other=float("-inf"))
            present = (s + lane < count)[:, None] & (d < D)[None, :]
            values = tl.load(scratch + rows[:, None] * D + d[None, :], mask=present, other=0.0)
            m_new = tl.maximum(m_i, tl.max(logs, 0))
            guard = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.exp2(logs - guard)
            alpha = tl.exp2(m_i - guard)
            acc = acc * alpha + tl.sum(values * weight[:, None], 0)
            l_i = l_i * alpha + tl.sum(weight, 0)
            m_i = m_new
        log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i)) + tl.zeros((1,), tl.float32)
        result = tl.where(l_i == 0, 0.0, acc / l_i)[None, :]
    if HAS_V_SCALE:
        v_factor = v_factor * tl.load(v_scale + h // G * vscale_h)
    at = (begin + token).to(tl.int64) + tl.zeros((1,), tl.int64)
    live = head >= 0
    lanes = live[:, None] & (d < D)[None, :]
    _finish(output, lse, sinks, output_scale, result, log, v_factor, at, head, d, live, lanes, o_t, o_h, lse_h)
