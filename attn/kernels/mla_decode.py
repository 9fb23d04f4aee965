"""Absorbed MLA over a paged cache of latents, over all keys or a list of selected keys: split keys, one merge.

All H heads attend to the same row [latent L | rotary Dr], and the latent is also the value. A program computes BLOCK_M
rows, each a (token, head) pair of one request, over a split of its keys, BLOCK_N at a time, with an online softmax in base 2
(Dao et al., FlashAttention-2, 2023; Flash-Decoding for the split). A tile of keys is loaded once and used twice, transposed
for the scores and unchanged for the values: this keeps the bytes per operation low, of which MLA has 2 (2 L + Dr) per key
and head.

    grid (requests x row tiles, splits); row tiles vary fastest, so that heads that share keys run together and share L2. In a
    batch of uneven lengths (groups x row tiles of a group), which have equally many tiles of keys (stream-K, `plan.stream_k`).
    dense   the rows of a request's tokens in order; row i sees its first seq_len - q_len + i + 1 keys (or limits[i]).
    sparse  a tile is one token's heads; its keys are those in `indices`, where -1 (or beyond the sequence) means no key.

On Hopper, programs of 64 rows over 16-bit latents run in `hopper_mla` (`mla_launch.prefers_hopper`), with the same grid, states
and merge.

A program that processes all keys of its rows writes the result, otherwise a float32 state that `merge` merges. No lengths
are fetched from the device and grids depend only on extents and maxima: a captured launch serves any batch within those
bounds.

Masked keys are selected away: their score is -inf, and the row loaded in their place is one that is seen (or zeros). Where
tokens differ in what they see, non-finite values are replaced by 0 (the score of a row that sees them is already NaN).
Offsets into a cache of 2^31 elements or more are 64-bit.

Layouts: q [T, H, L + Dr], or [T, H, L] with the rotary part of token t and head h from element ROPE_AT + t ROPE_T + h ROPE_H of
`rope` on; out [T, H, L]; cache [N, P, W], dense in the last dimension; lse [H, T] float32, natural log. Rows of a `packed`
cache are fp8_ds_mla's 656 bytes. Rows of tokens beyond query_start_loc[R] are not written: they are undefined.
"""

import triton
import triton.language as tl

from attn.kernels.codes import number_in
from attn.kernels.plan import FIELDS_OF_ITEM

_BATCH = ("max_splits", "split_size", "groups", "max_query", "lse_h", "table_r")  # changes between batches do not recompile


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    start, last, table, chosen, seq_len, MASKED: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr
):
    """(key indices j, whether a list's entry is valid, page, slot in it) of a tile; past the last key a valid one is read."""
    j = start + tl.arange(0, BLOCK_N)
    at = tl.minimum(j, last) if MASKED else j
    # `last` is the list's last entry where keys are selected (`chosen`), else the last key that a row of the tile sees
    real = j <= last
    if chosen is not None:
        position = tl.load(chosen + at)
        real = real & (position >= 0) & (position < seq_len)
        # missing keys read an existing address, the sequence's first key, and are masked
        at = tl.where(real, position, 0)
    if P % BLOCK_N == 0 and chosen is None:  # noqa: SIM108  (one is known when compiling)
        # one page for the tile, whose first key is below `last`; a listed key may be in any page
        page = tl.load(table + start // P)
    else:
        page = tl.load(table + at // P)
    if WIDE:
        page = page.to(tl.int64)
    return j, real, page, at % P


@triton.jit
def _softmax(s, l_i, m_i, factor):  # type: ignore[no-untyped-def]
    """(weights, alpha, l_i, m_i) after a tile of scores, named as in `paged_attention`."""
    m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
    # while a row has seen no key, its maximum is -inf, and -inf - -inf would be NaN
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - guard[:, None])
    alpha = tl.exp2(m_i - guard)
    return p, alpha, l_i * alpha + tl.sum(p, 1), m_new


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, q_rope, start, seen, last, cache, table, chosen, c_block, c_slot, seq_len, factor,
    MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, P: tl.constexpr, L: tl.constexpr, DR: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys.

    `seen` [M]: number of keys that each row sees; `last`: the last key that some row sees. Without MASKED every row sees
    every key of the tile.
    """
    j, real, page, slot = _places(start, last, table, chosen, seq_len, MASKED, P, BLOCK_N, WIDE)
    d = tl.arange(0, BLOCK_L)
    e = tl.arange(0, BLOCK_R)
    rows = cache + (page * c_block + slot * c_slot)[:, None]
    rope_at = rows + L + e[None, :]
    if chosen is not None:  # zeros where there is no key: arbitrary cache contents are never multiplied by a weight of 0
        k = tl.load(rows + d[None, :], mask=real[:, None] & (d < L)[None, :], other=0.0)
        k_rope = tl.load(rope_at, mask=real[:, None] & (e < DR)[None, :], other=0.0)
    else:
        k = tl.load(rows + d[None, :]) if L == BLOCK_L else tl.load(rows + d[None, :], mask=(d < L)[None, :], other=0.0)
        k_rope = tl.load(rope_at) if DR == BLOCK_R else tl.load(rope_at, mask=(e < DR)[None, :], other=0.0)
    k, k_rope = number_in(k, q.dtype), number_in(k_rope, q.dtype)
    # two products, since 576 is no power of two: one of 1,024 columns would nearly double the work
    s = tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
    s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
    if chosen is not None:
        s = tl.where(real[None, :], s, float("-inf"))
    elif MASKED:
        s = tl.where(j[None, :] < seen[:, None], s, float("-inf"))
    p, alpha, l_i, m_i = _softmax(s, l_i, m_i, factor)
    acc = acc * alpha[:, None]
    if NAN_SAFE:
        # after the scores: a row that sees the key has NaN as its score, and thus as its result, either way
        wide = k.to(tl.float32)
        k = tl.where((wide - wide) != 0.0, 0.0, wide).to(q.dtype)
    acc = tl.dot(p.to(q.dtype), k, acc, input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit
def _quarter(codes, scales, at):  # type: ignore[no-untyped-def]
    """(codes [N, 128] of one quarter as numbers, its scale [N]) of packed rows."""
    k = number_in(tl.load(codes[:, None] + at + tl.arange(0, 128)[None, :]), tl.float32)
    return k, tl.load(scales + at // 128)


@triton.jit
def _packed_step(  # type: ignore[no-untyped-def]
    a0, a1, a2, a3, l_i, m_i, q0, q1, q2, q3, q_rope, start, seen, last, cache, table, chosen, c_block, c_slot, seq_len,
    factor, P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """`_step` for rows of 656 bytes.

    A quarter's scale multiplies its scores and its weights, so that codes stay codes, which are exact in every dtype of a
    query.
    """
    # Always masked: rows of 656 bytes are loaded without a mask, so keys past the last one must be clamped.
    j, real, page, slot = _places(start, last, table, chosen, seq_len, True, P, BLOCK_N, WIDE)
    rows = cache + page * c_block + slot * c_slot
    # docs/semantics.md §9: bytes 0 to 511 are codes, 512 to 527 four float32 scales, 528 to 655 64 bfloat16 numbers.
    codes = rows if BYTES else rows.to(tl.pointer_type(tl.float8e4nv))
    scales = rows.to(tl.pointer_type(tl.float32)) + 128
    rope_at = (rows.to(tl.pointer_type(tl.bfloat16)) + 264)[:, None] + tl.arange(0, BLOCK_R)[None, :]
    dtype = q0.dtype
    s = tl.dot(q_rope, tl.trans(tl.load(rope_at).to(dtype)), input_precision=PRECISION)
    # Written out four times: Triton cannot index accumulators by a loop variable.
    k0, w0 = _quarter(codes, scales, 0)
    k1, w1 = _quarter(codes, scales, 128)
    k2, w2 = _quarter(codes, scales, 256)
    k3, w3 = _quarter(codes, scales, 384)
    s += tl.dot(q0, tl.trans(k0.to(dtype)), input_precision=PRECISION) * w0[None, :]
    s += tl.dot(q1, tl.trans(k1.to(dtype)), input_precision=PRECISION) * w1[None, :]
    s += tl.dot(q2, tl.trans(k2.to(dtype)), input_precision=PRECISION) * w2[None, :]
    s += tl.dot(q3, tl.trans(k3.to(dtype)), input_precision=PRECISION) * w3[None, :]
    s = tl.where(j[None, :] < seen[:, None] if chosen is None else real[None, :], s, float("-inf"))
    p, alpha, l_i, m_i = _softmax(s, l_i, m_i, factor)
    a0 = _weighed(a0, p, alpha, k0, w0, dtype, PRECISION)
    a1 = _weighed(a1, p, alpha, k1, w1, dtype, PRECISION)
    a2 = _weighed(a2, p, alpha, k2, w2, dtype, PRECISION)
    a3 = _weighed(a3, p, alpha, k3, w3, dtype, PRECISION)
    return a0, a1, a2, a3, l_i, m_i


@triton.jit
def _weighed(acc, p, alpha, k, scale, dtype, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a quarter's values to acc; non-finite values count as 0, since rows that see them have NaN as a weight."""
    scale = tl.where((scale - scale) != 0.0, 0.0, scale)
    values = tl.where(k != k, 0.0, k).to(dtype)
    return tl.dot((p * scale[None, :]).to(dtype), values, acc * alpha[:, None], input_precision=PRECISION)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, partial, acc, l_i, v_factor, at, head, live, column, o_t, o_h, state, L: tl.constexpr, WIDTH: tl.constexpr, IS_PARTIAL
):
    """Store the columns from `column` of the result: in the output, or in the state that `merge` merges."""
    d = column + tl.arange(0, WIDTH)
    result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None]) * v_factor
    lanes = live[:, None] & (d < L)[None, :]
    if IS_PARTIAL:
        tl.store(partial + state[:, None] * L + d[None, :], result, mask=lanes)
    else:
        tl.store(out + at[:, None] * o_t + head[:, None] * o_h + d[None, :], result.to(out.dtype.element_ty), mask=lanes)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    arrays, request, tile, begins, stop, state, factors, splits, strides,
    H: tl.constexpr, L: tl.constexpr, DR: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    SEVERAL: tl.constexpr, HAS_SPLITS: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr, PLANNED: tl.constexpr, ROPE_T: tl.constexpr, ROPE_H: tl.constexpr, ROPE_AT: tl.constexpr,
):  # fmt: skip
    """Compute one row tile of a request over a split of its keys: the program's, or keys begins..stop of an item.

    state: the first of the item's rows among all states, -1 if the item is all keys of its rows.
    """
    out, lse, partial, partial_lse, query, rope, cache, limits, block_table, indices, k_scale = arrays
    r, begin, q_len, seq_len = request
    factor, v_factor = factors
    max_splits, split_size = splits
    lse_h, table_r, topk, indices_t, o_t, o_h, q_t, q_h, c_block, c_slot = strides
    row = tl.arange(0, BLOCK_M)
    if indices is not None:  # a tile is BLOCK_M heads of one token
        # each token has keys of its own, so a tile never spans tokens; its last rows may have no head
        heads: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
        token = tile // heads + tl.zeros((BLOCK_M,), tl.int32)
        head = tile % heads * BLOCK_M + row
        first = tile // heads
    else:
        token = (tile * BLOCK_M + row) // H
        head = (tile * BLOCK_M + row) % H
        first = tile * BLOCK_M // H
    live = (token < q_len) & (head < H)
    at = (begin + token).to(tl.int64)
    chosen = indices
    if indices is not None:
        seen = tl.zeros((BLOCK_M,), tl.int32)
        low, high = topk, topk
        chosen = indices + (begin + first).to(tl.int64) * indices_t
    else:
        seen = seq_len - q_len + token + 1
        if limits is not None:
            seen = tl.load(limits + at, mask=live, other=0)
        # 0 for rows past the tile's end: they extend no range, and all of their keys are masked
        seen = tl.maximum(tl.where(live, seen, 0), 0)
        high = tl.minimum(tl.max(seen, 0), seq_len)  # keys that some row of the tile sees
        low = tl.min(tl.where(live, seen, high), 0)  # keys that every live row sees
    has_work = first < q_len
    is_partial = False
    partial_at = at * 0
    if PLANNED:
        stop = tl.minimum(high, stop)
        is_partial = state >= 0
        partial_at = state.to(tl.int64) + row
    elif HAS_SPLITS:
        split_index = tl.program_id(1)
        # a tile's rows have equally many splits, by the keys of the one that sees most: `merge` computes the same
        num_splits = tl.cdiv(high, split_size)
        has_work = has_work & (split_index < tl.maximum(num_splits, 1))
        is_partial = num_splits > 1
        partial_at = (at * H + head) * max_splits + split_index
        begins = split_index * split_size
        stop = tl.minimum(high, begins + split_size)
    else:
        stop = high
    if has_work:
        d = tl.arange(0, BLOCK_L)
        e = tl.arange(0, BLOCK_R)
        q_at = query + at[:, None] * q_t + head[:, None] * q_h
        if rope is None:  # noqa: SIM108  (known when compiling)
            rope_at = q_at + L
        else:
            rope_at = rope + at[:, None] * ROPE_T + head[:, None] * ROPE_H + ROPE_AT
        q_rope = tl.load(rope_at + e[None, :], mask=live[:, None] & (e < DR)[None, :], other=0.0)
        if k_scale is not None:
            scale = tl.load(k_scale)
            # keys and values are the same latents, so one scale serves both
            factor = factor * scale
            v_factor = v_factor * scale
        table = block_table + r.to(tl.int64) * table_r
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if indices is not None:  # a sequence without keys has none to read in place of a missing one
            stop = tl.where(seq_len > 0, stop, begins)
            last = topk - 1
        else:
            last = high - 1
        if PACKED:
            column = tl.arange(0, 128)
            # the four quarters of 512 latents, as the cache has a scale for each
            q0 = tl.load(q_at + column[None, :], mask=live[:, None], other=0.0)
            q1 = tl.load(q_at + 128 + column[None, :], mask=live[:, None], other=0.0)
            q2 = tl.load(q_at + 256 + column[None, :], mask=live[:, None], other=0.0)
            q3 = tl.load(q_at + 384 + column[None, :], mask=live[:, None], other=0.0)
            a0 = tl.zeros((BLOCK_M, 128), tl.float32)
            a1, a2, a3 = a0, a0, a0
            for start in tl.range(begins, stop, BLOCK_N):
                a0, a1, a2, a3, l_i, m_i = _packed_step(
                    a0, a1, a2, a3, l_i, m_i, q0, q1, q2, q3, q_rope, start, seen, last, cache, table, chosen, c_block, c_slot,
                    seq_len, factor, P, BLOCK_R, BLOCK_N, WIDE, PRECISION, BYTES,
                )  # fmt: skip
            _store(out, partial, a0, l_i, v_factor, at, head, live, 0, o_t, o_h, partial_at, L, 128, is_partial)
            _store(out, partial, a1, l_i, v_factor, at, head, live, 128, o_t, o_h, partial_at, L, 128, is_partial)
            _store(out, partial, a2, l_i, v_factor, at, head, live, 256, o_t, o_h, partial_at, L, 128, is_partial)
            _store(out, partial, a3, l_i, v_factor, at, head, live, 384, o_t, o_h, partial_at, L, 128, is_partial)
        else:
            q = tl.load(q_at + d[None, :], mask=live[:, None] & (d < L)[None, :], other=0.0)
            acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
            # every row sees the keys below `low`, so whole tiles below it need no mask; selected keys are all masked
            DENSE: tl.constexpr = indices is None
            tail = tl.maximum(begins, tl.minimum(low, stop) // BLOCK_N * BLOCK_N) if DENSE else begins
            # dense masked tiles are the last few, so their loop is not pipelined
            for phase in tl.static_range(0 if DENSE else 1, 2):
                end = stop if phase else tail
                for start in tl.range(tail if phase else begins, end, BLOCK_N, num_stages=1 if phase and DENSE else None):
                    acc, l_i, m_i = _step(
                        acc, l_i, m_i, q, q_rope, start, seen, last, cache, table, chosen, c_block, c_slot, seq_len, factor,
                        phase == 1, phase == 1 and DENSE and SEVERAL, P, L, DR, BLOCK_L, BLOCK_R, BLOCK_N, WIDE, PRECISION,
                    )  # fmt: skip
            _store(out, partial, acc, l_i, v_factor, at, head, live, 0, o_t, o_h, partial_at, L, BLOCK_L, is_partial)

        log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i))
        if is_partial:
            tl.store(partial_lse + partial_at, log, mask=live)
        elif lse is not None:
            tl.store(lse + head * lse_h + at, log * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=_BATCH)
def attend(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query, rope, cache, query_start_loc, seq_lens, limits, block_table, indices, items, k_scale,
    factor, v_factor, max_splits, split_size, lse_h, table_r, topk, indices_t, o_t, o_h, q_t, q_h, c_block, c_slot,
    H: tl.constexpr, L: tl.constexpr, DR: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
    SEVERAL: tl.constexpr, HAS_SPLITS: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, BYTES: tl.constexpr, PLANNED: tl.constexpr, ROPE_T: tl.constexpr, ROPE_H: tl.constexpr,
    ROPE_AT: tl.constexpr,
):  # fmt: skip
    if PDL:
        # the merge may already be launched: it waits for the end of this grid before it reads
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    arrays = out, lse, partial, partial_lse, query, rope, cache, limits, block_table, indices, k_scale
    factors, splits = (factor, v_factor), (max_splits, split_size)
    strides = lse_h, table_r, topk, indices_t, o_t, o_h, q_t, q_h, c_block, c_slot
    if PLANNED:
        # the items follow two numbers for each group (`attn.torch.kernels.plan.stream_k`)
        table = items + 2 * (tl.num_programs(0) // TILES)
        for i in tl.range(tl.load(items + 2 * group), tl.load(items + 2 * group + 1), num_stages=1):
            item = table + i * FIELDS_OF_ITEM
            begins = tl.load(item + 5)
            # a group's last item may begin a block that others end: it has the second of the group's two states
            state = ((2 * group + (begins == 0)) * TILES + tile) * BLOCK_M
            request = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
            _rows(
                arrays, request, tl.load(item + 4) * TILES + tile, begins, tl.load(item + 6),
                tl.where(tl.load(item + 7) > 1, state, -1), factors, splits, strides,
                H, L, DR, P, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R, SEVERAL, HAS_SPLITS, PACKED, WIDE, PRECISION, BYTES, PLANNED,
                ROPE_T, ROPE_H, ROPE_AT,
            )  # fmt: skip
    else:
        begin = tl.load(query_start_loc + group)
        request = group, begin, tl.load(query_start_loc + group + 1) - begin, tl.load(seq_lens + group)
        _rows(
            arrays, request, tile, 0, 0, -1, factors, splits, strides,
            H, L, DR, P, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R, SEVERAL, HAS_SPLITS, PACKED, WIDE, PRECISION, BYTES, PLANNED,
            ROPE_T, ROPE_H, ROPE_AT,
        )  # fmt: skip


@triton.jit(do_not_specialize=_BATCH)
def merge(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query_start_loc, seq_lens, limits, items, max_splits, split_size, groups, max_query, lse_h,
    topk, o_t, o_h,
    H: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
    SPARSE: tl.constexpr, PDL: tl.constexpr, PLANNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The second stage: one program merges the splits of one row. Splits without keys are not read.

    Grid (R x max_query, H), or, in a plan, (groups, ROWS) for the ROWS rows of the block that a group begins and does not end.
    """
    if PLANNED:
        group = tl.program_id(0)
        end = tl.load(items + 2 * group + 1)
        if end == tl.load(items + 2 * group):
            return
        # Only a group's last item can begin a block without ending it. Others' blocks are whole, or merged by the group that
        # began them.
        item = items + 2 * groups + (end - 1) * FIELDS_OF_ITEM
        num_splits = tl.load(item + 7)
        if (num_splits == 1) | (tl.load(item + 5) > 0):
            return
        r = tl.load(item)
        begin = tl.load(item + 1)
        q_len = tl.load(item + 2)
        row = tl.load(item + 4) * ROWS + tl.program_id(1)
        token = row // H
        head = row % H
    else:
        r = tl.program_id(0) // max_query
        token = tl.program_id(0) % max_query
        head = tl.program_id(1)
        begin = tl.load(query_start_loc + r)
        q_len = tl.load(query_start_loc + r + 1) - begin
    if token >= q_len:
        return
    at = (begin + token).to(tl.int64)
    if PLANNED:
        high = 0
    elif SPARSE:
        high = topk
    else:
        # the number of splits is that of the row's tile, which its last token determines
        tail = tl.minimum((((token * H + head) // BLOCK_M + 1) * BLOCK_M - 1) // H, q_len - 1)
        seq_len = tl.load(seq_lens + r)
        high = seq_len - q_len + tail + 1
        if limits is not None:
            head_token = (token * H + head) // BLOCK_M * BLOCK_M // H
            high = 0
            for i in tl.range(head_token, tail + 1, num_stages=1):
                high = tl.maximum(high, tl.load(limits + begin + i))
        high = tl.minimum(tl.maximum(high, 0), seq_len)
    if PLANNED:
        state = tl.program_id(1).to(tl.int64)
    else:
        num_splits = tl.cdiv(high, split_size)
        state = (at * H + head) * max_splits
    if num_splits <= 1:
        return
    d = tl.arange(0, BLOCK_L)
    lane = tl.arange(0, BLOCK_S)
    # The plan and the lengths are older than the first stage, which is not launched early, so they are read before the wait.
    if PDL:
        tl.extra.cuda.gdc_wait()
    m_i = -float("inf")
    # The maximum first: a second pass over few log-sum-exps costs less than multiplying L sums for each split.
    for s in tl.range(0, num_splits, BLOCK_S, num_stages=1):
        at_state = state + s + lane
        if PLANNED:
            # the block's first split is the second state of this group, its later ones are the first states of the groups that
            # follow
            at_state = state + (2 * (group + s + lane) + (s + lane == 0)).to(tl.int64) * ROWS
        logs = tl.load(partial_lse + at_state, mask=s + lane < num_splits, other=float("-inf"))
        m_i = tl.maximum(m_i, tl.max(logs, 0))
    guard = tl.where(m_i == float("-inf"), 0.0, m_i)
    acc = tl.zeros((BLOCK_L,), tl.float32)
    l_i = 0.0
    for s in tl.range(0, num_splits, BLOCK_S, num_stages=1):
        at_state = state + s + lane
        if PLANNED:
            at_state = state + (2 * (group + s + lane) + (s + lane == 0)).to(tl.int64) * ROWS
        logs = tl.load(partial_lse + at_state, mask=s + lane < num_splits, other=float("-inf"))
        full = logs != float("-inf")
        weight = tl.exp2(logs - guard)
        rows = at_state[:, None] * L + d[None, :]
        values = tl.load(partial + rows, mask=full[:, None] & (d < L)[None, :], other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
        l_i += tl.sum(weight, 0)
    result = tl.where(l_i == 0, 0.0, acc / l_i)
    tl.store(out + at * o_t + head * o_h + d, result.to(out.dtype.element_ty), mask=d < L)
    if lse is not None:
        log = tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i))
        tl.store(lse + head * lse_h + at, log * 0.6931471805599453)
