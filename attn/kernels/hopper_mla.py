"""Absorbed MLA on Hopper for many rows, over all keys or selected keys: `mla_decode`'s first stage in Gluon for sm_90.

A program computes 64 (token, head) rows of one request over a split of its keys, with two consumers of four warps and a
producer that loads tiles for them. The result [64, 512] fills the registers of both consumers: consumer h holds columns 256
h to 256 h + 255. Consumer w computes the scores and weights of the tiles w, w + 2, ... of 64 keys. It shares the weights
through shared memory, and both consumers multiply them with their half of the tile's values, so that every product is
computed once (the split of DeepSeek's FlashMLA, 2025).

A tile has three pieces: latents 0-255, latents 256-511 and the rotary part. The producer looks up and copies each piece as
soon as its buffer is free: one warp with the bulk tensor engine for keys in pages, four warps row by row for keys selected
by a list (zeros for unused entries). Two tiles, the queries' latents and two tiles of weights fill shared memory (the
queries' rotary part stays in registers), so the copy of a tile can only start once both consumers have used the tile two
before it. This sets the order of a consumer's work: it uses the other consumer's tile and frees its buffer before it waits
for its own next tile. Overlapping the scores of one tile with the exponentials of another would need that tile earlier than
it can arrive.

The grid, the split of keys or the plan, the states and their merge are those of `mla_decode`. A program of a plan has several
items; while consumers end one, the producer loads the next one's tiles. Keys beyond what a row sees are masked. In tiles where
rows differ in what they see, non-finite latents are replaced by 0 (the score of a row that sees them is already NaN). No length
is fetched from the device.

Layouts: q [T, H, 576], or [T, H, 512] with the rotary part as in `mla_decode`, out [T, H, 512], both bf16 or float16; cache
[N, P, 576] of the same dtype, strides multiples of 16; lse [H, T] float32, natural log. All keys: P is a multiple of 16.
Selected keys: H is a multiple of 64, so that a program's rows are heads of one token.
"""

from typing import Any

from attn.kernels.gluon import (
    async_copy,
    barrier,
    copy_rows,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attn.kernels.launch import FUSED
from attn.kernels.mla_launch import BESIDE, KEYS, RopeFrom

_REGISTERS = ((240, 24), (232, 40))  #: per thread (consumers, producer), for a producer that copies boxes and one that gathers
_BATCH = ("row_tiles", "max_splits", "split_size", "topk", "num_pages", "lse_h", "table_r", "indices_t")


@gluon.jit
def _items_of(batch, row_tiles, PLANNED: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first item of the program, the one after its last); without a plan the program itself is its only item."""
    if PLANNED:
        entry = batch[3] + 2 * (gl.program_id(0) // row_tiles)
        first, last = gl.load(entry), gl.load(entry + 1)
    else:
        first, last = 0, 1
    return first, last


@gluon.jit
def _item(  # type: ignore[no-untyped-def]
    item,
    batch,
    row_tiles,
    split_size,
    topk,
    H: gl.constexpr,
    HAS_LIMITS: gl.constexpr,
    SPARSE: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """(request, its first token, tokens, keys, first row; keys that all rows, some row see, first key, tiles, state).

    The state is -1 for an item that is all keys of its rows. Without work there are no tokens.
    """
    query_start_loc, seq_lens, limits, items = batch
    group = gl.program_id(0) // row_tiles
    tile = gl.program_id(0) % row_tiles
    # With a plan, group g of `row_tiles` programs has the items of the table, each for one tile of 64 rows of the item's block.
    # Its numbers are loaded by every partition itself: they are few, and handing them over would need barriers of its own.
    entry = items
    if PLANNED:
        entry = items + gl.num_programs(0) // row_tiles * 2 + item * 8  # launch.FIELDS
        r = gl.load(entry)
        begin = gl.load(entry + 1)
        q_len = gl.load(entry + 2)
        seq_len = gl.load(entry + 3)
        first_row = (gl.load(entry + 4) * row_tiles + tile) * 64
    else:
        r = group
        begin = gl.load(query_start_loc + r)
        q_len = gl.load(query_start_loc + r + 1) - begin
        seq_len = gl.load(seq_lens + r)
        first_row = tile * 64
    first = first_row // H
    # a row sees the keys up to its token, so the tile's first and last token bound what its rows see
    last = gl.minimum((first_row + 63) // H, q_len - 1)
    low = seq_len - q_len + first + 1
    high = seq_len - q_len + last + 1
    if HAS_LIMITS:
        # limits need not ascend with the token, so all of the tile's are read
        low = seq_len
        high = seq_len * 0
        for i in range(first, last + 1):
            seen = gl.load(limits + begin + i)
            low = gl.minimum(low, seen)
            high = gl.maximum(high, seen)
    high = gl.minimum(gl.maximum(high, 0), seq_len)
    if SPARSE:
        high = topk
    if PLANNED:
        begins = gl.load(entry + 5)
        stop = gl.load(entry + 6)
        # A group has at most two splits of blocks: one that begins its block (place 1) and one that does not (place 0), see
        # `attn.torch.kernels.plan.stream_k`.
        slot = (2 * group + gl.where(begins == 0, 1, 0)) * row_tiles + tile
        state = gl.where(gl.load(entry + 7) > 1, slot, -1)
    else:
        begins = gl.program_id(1) * split_size
        stop = begins + split_size
        # Programs beyond the rows' last split do nothing, but the first one always writes: rows without keys are 0.
        num_splits = (high + split_size - 1) // split_size
        state = gl.where(num_splits > 1, gl.program_id(1), -1)
        q_len = gl.where(gl.program_id(1) < gl.maximum(num_splits, 1), q_len, 0)
    tiles = gl.where(first < q_len, (gl.maximum(gl.minimum(high, stop) - begins, 0) + 63) // 64, 0)
    return r, begin, q_len, seq_len, first_row, low, high, begins, tiles, state


@gluon.jit
def _rows(begin, q_len, first_row, H: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """[64] each: token in the request, token in the batch, head, whether the row exists."""
    row = first_row + gl.arange(0, 64, layout=LAYOUT)
    token = row // H
    return token, (begin + token).to(gl.int64), row % H, token < q_len


@gluon.jit
def _state(state, at, head, max_splits, H: gl.constexpr, PLANNED: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The index of a row's state: by the item of the plan, or by the row and the split."""
    slot = state.to(gl.int64) * 64 + gl.arange(0, 64, layout=LAYOUT)
    return slot if PLANNED else (at * H + head) * max_splits + state


@gluon.jit
def _gather(  # type: ignore[no-untyped-def]
    cache, rings, batch, block_table, indices, row_tiles, split_size, topk, strides,
    H: gl.constexpr, P: gl.constexpr, HAS_LIMITS: gl.constexpr, SPARSE: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """Producer of four warps: copy the tiles of selected keys in order, row by row; zeros for unused entries."""
    k_ring, r_ring, k_full, k_empty, r_full, r_empty = rings
    c_block, c_slot, table_r, indices_t = strides
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # 256 columns of 16 bits are four swizzled blocks of 64, each 64 rows of 128 bytes: 4 pieces of 4 blocks.
    blocks = reinterpret(k_ring, k_ring.dtype, [16, 64, 64], swizzled)
    first, last = _items_of(batch, row_tiles, PLANNED)
    used_0, used_1 = 0, 0  # how often each stage of the rings was used by earlier items
    for item in range(first, last):
        r, begin, q_len, seq_len, first_row, low, high, begins, tiles, state = _item(
            item, batch, row_tiles, split_size, topk, H, HAS_LIMITS, SPARSE, PLANNED
        )
        table = block_table + r.to(gl.int64) * table_r
        chosen = indices + (begin + first_row // H).to(gl.int64) * indices_t
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        for i in range(tiles):
            j = begins + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            position = gl.load(chosen + j, mask=j < topk, other=-1)
            real = (position >= 0) & (position < seq_len)
            # an unused entry may be any number, so it looks nothing up; the copy's mask then writes zeros
            page = gl.load(table + position // P, mask=real, other=0)
            rows = (cache + page.to(gl.int64) * c_block + (position % P) * c_slot)[:, None] + column[None, :]
            stage = i % 2
            # Barriers live longer than an item: their parity counts the uses by all items of the program. Tiles of an item
            # begin at stage 0 again, so the two stages are counted apart.
            phase = gl.where(stage == 0, used_0, used_1) + i // 2 & 1
            mbarrier.wait(r_empty.index(stage), phase ^ 1)
            copy_rows(r_ring.index(stage), rows + 512, mask=real[:, None])
            # each of the 128 threads arrives once its own copies are done (FILLERS)
            async_copy.mbarrier_arrive(r_full.index(stage), increment_count=False)
            for h in gl.static_range(2):
                piece = stage * 2 + h
                mbarrier.wait(k_empty.index(piece), phase ^ 1)
                # each half has a barrier of its own, so that products with the first start before the second is there
                for c in gl.static_range(4):
                    copy_rows(blocks.index(piece * 4 + c), rows + (h * 256 + c * 64), mask=real[:, None])
                async_copy.mbarrier_arrive(k_full.index(piece), increment_count=False)
        used_0 += (tiles + 1) // 2
        used_1 += tiles // 2


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    desc, rings, batch, block_table, row_tiles, split_size, topk, num_pages, table_r,
    H: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, HAS_LIMITS: gl.constexpr, SPARSE: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """Producer of one warp: copy the tiles of keys in order, piece by piece, each as soon as its buffer is free."""
    k_ring, r_ring, k_full, k_empty, r_full, r_empty = rings
    BOXES: gl.constexpr = 64 // BOX
    # A box is some rows of one block of 64 columns, contiguous there, and begins at a multiple of the swizzle's 8 rows.
    k_boxes = reinterpret(k_ring, k_ring.dtype, [16 * BOXES, 1, BOX, 64], desc.layout)
    r_boxes = reinterpret(r_ring, k_ring.dtype, [2 * BOXES, 1, BOX, 64], desc.layout)
    first, last = _items_of(batch, row_tiles, PLANNED)
    used_0, used_1 = 0, 0  # how often each stage of the rings was used by earlier items
    for item in range(first, last):
        r, begin, q_len, seq_len, first_row, low, high, begins, tiles, state = _item(
            item, batch, row_tiles, split_size, topk, H, HAS_LIMITS, SPARSE, PLANNED
        )
        table = block_table + r.to(gl.int64) * table_r
        for i in range(tiles):
            start = begins + i * 64
            pages = ()
            places = ()
            for b in gl.static_range(BOXES):
                at = start + b * BOX
                # not a valid page: the engine fills in zeros for accesses outside its tensor
                pages = pages + (gl.load(table + at // P, mask=at < high, other=num_pages),)  # type: ignore[assignment]
                places = places + (at % P,)  # type: ignore[assignment]
            stage = i % 2
            phase = gl.where(stage == 0, used_0, used_1) + i // 2 & 1
            mbarrier.wait(r_empty.index(stage), phase ^ 1)
            # bytes of all boxes, of zeros too
            mbarrier.expect(r_full.index(stage), 64 * 64 * 2)
            for b in gl.static_range(BOXES):
                load_box(desc, [pages[b], places[b], 512], r_full.index(stage), r_boxes.index(stage * BOXES + b))
            for h in gl.static_range(2):
                piece = stage * 2 + h
                mbarrier.wait(k_empty.index(piece), phase ^ 1)
                mbarrier.expect(k_full.index(piece), 64 * 256 * 2)
                for c in gl.static_range(4):
                    for b in gl.static_range(BOXES):
                        box = k_boxes.index((piece * 4 + c) * BOXES + b)
                        load_box(desc, [pages[b], places[b], h * 256 + c * 64], k_full.index(piece), box)
        used_0 += (tiles + 1) // 2
        used_1 += tiles // 2


@gluon.jit
def _scores(  # type: ignore[no-untyped-def]
    q_tile, q_rope, k_ring, r_ring, k_full, r_full, k, SPARSE: gl.constexpr, S_LAYOUT: gl.constexpr, CONSUMER: gl.constexpr
):
    """Start the products of this consumer's tile, each piece as it arrives; they are still running on return."""
    # always 0, but unknown to the compiler, which would otherwise keep the addresses of all operands in scarce registers
    far = gl.inline_asm_elementwise("shr.u32 $0, $1, 31;", "=r,r", [k], gl.int32, is_pure=True, pack=1)
    # This consumer's tiles are always in its own stage of the ring, so its number of tiles is the phase. The rotary part comes
    # first: it was copied first, and its product can start while the latents arrive.
    mbarrier.wait(r_full.index(CONSUMER), k & 1)
    if SPARSE:  # makes rows that threads copied visible to the tensor cores
        fence_async_shared()
    nothing = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_rope, r_ring.index(CONSUMER + far).permute((1, 0)), nothing, use_acc=False, is_async=True)
    for h in gl.static_range(2):
        mbarrier.wait(k_full.index(CONSUMER * 2 + h), k & 1)
        if SPARSE:
            fence_async_shared()
        s = warpgroup_mma(q_tile.index(far + h), k_ring.index(CONSUMER * 2 + h + far).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _join(acc, m_i, l_i, k_ring, p_ring, m_ring, k_empty, t_full, p_full, phase, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add the other consumer's tile. Returns (acc with its values, m_i, l_i rescaled to that maximum)."""
    OTHER: gl.constexpr = 1 - CONSUMER
    # Both consumers keep one common maximum: this one takes over the other's, which is at least its own, since the other has
    # joined all tiles before. So weights of both need no factor when they are added up.
    mbarrier.wait(t_full.index(OTHER), phase)
    m_new = m_ring.index(OTHER).load(m_i.type.layout)
    alpha = gl.exp2(m_i - gl.where(m_new == float("-inf"), 0.0, m_new))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    # also says that the other has replaced what is not finite in its tile (`_clean`)
    mbarrier.wait(p_full.index(OTHER), phase)
    acc = warpgroup_mma(p_ring.index(OTHER), k_ring.index(OTHER * 2 + CONSUMER), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # All four warps' products have read the piece. No other warp reads it: the other consumer's scores of it came before its
    # weights. So one arrival frees it.
    barrier()
    mbarrier.arrive(k_empty.index(OTHER * 2 + CONSUMER), count=1)
    return acc, m_new, l_i * alpha


@gluon.jit
def _clean(k_ring, least, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Replace non-finite latents of this consumer's tile by 0 from row `least` on, after its scores were computed."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Stage s has blocks 8 s to 8 s + 7 of 64 columns, each four groups of 16 rows: few values a thread at a time.
    boxes = reinterpret(k_ring, k_ring.dtype, [64, 16, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    for column in range(8):
        for i in range(gl.maximum(least, 0) // 16, 4):
            box = boxes.index(CONSUMER * 32 + column * 4 + i)
            x = box.load(LAYOUT)
            wide = x.to(gl.float32)
            box.store(gl.where((wide - wide) != 0.0, gl.zeros([16, 64], k_ring.dtype, LAYOUT), x))


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    acc, m_i, l_i, q, q_rope, rings, bars, chosen, k, start, seen, low, factor,
    MASKED: gl.constexpr, SPARSE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Process this consumer's tile: its scores, its weights, which the other consumer waits for, and its values.

    SPARSE: `low` is the list's length, `seen` the number of keys.
    """
    k_ring, r_ring, p_ring, m_ring = rings
    k_full, k_empty, r_full, r_empty, t_full, p_full = bars
    S_LAYOUT: gl.constexpr = q_rope.type.layout.parent
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    j = start + gl.arange(0, 64, layout=gl.SliceLayout(0, S_LAYOUT))
    # loaded before the wait for the tile, so that the two waits overlap
    if SPARSE:
        position = gl.load(chosen + j, mask=j < low, other=-1)
    s = _scores(q, q_rope, k_ring, r_ring, k_full, r_full, k, SPARSE, S_LAYOUT, CONSUMER)
    s = warpgroup_mma_wait(0, deps=[s])
    # every warp's scores have read the rotary part
    barrier()
    mbarrier.arrive(r_empty.index(CONSUMER), count=1)
    if SPARSE:
        s = gl.where(((position >= 0) & (position < seen))[None, :], s, float("-inf"))
    elif MASKED:
        s = gl.where(j[None, :] < seen[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * factor)
    # The other has read the last maximum and weights of this consumer: this tile's latents could only be copied after it had
    # multiplied those weights and freed their stage. The barrier is for this consumer's warps, whose stores must precede the
    # arrival.
    m_ring.index(CONSUMER).store(m_new)
    barrier()
    # the other consumer rescales its sums to this maximum while this one computes exponentials
    mbarrier.arrive(t_full.index(CONSUMER), count=1)
    guard = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(s * factor - guard[:, None])
    alpha = gl.exp2(m_i - guard)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    l_i = l_i * alpha + gl.sum(weights, 1)
    p = weights.to(k_ring.dtype)
    # for the other consumer's product; this one uses its registers
    p_ring.index(CONSUMER).store(p)
    if MASKED:
        _clean(k_ring, low - start, CONSUMER)
    # the weights, and zeros of `_clean`, before products of either consumer read them through the other proxy
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(CONSUMER), count=1)
    acc = warpgroup_mma(gl.convert_layout(p, P_LAYOUT), k_ring.index(CONSUMER * 2 + CONSUMER), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(k_empty.index(CONSUMER * 2 + CONSUMER), count=1)
    return acc, m_new, l_i


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query, rope, q_tile, rings, norms, bars, q_full, end, batch, factor, v_factor,
    indices, row_tiles, max_splits, split_size, topk, o_t, o_h, lse_h, q_t, q_h, indices_t,
    H: gl.constexpr, HAS_LIMITS: gl.constexpr, HAS_LSE: gl.constexpr, SPARSE: gl.constexpr,
    PLANNED: gl.constexpr, ROPE_T: gl.constexpr, ROPE_H: gl.constexpr, ROPE_AT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consumer of four warps: the scores of every other tile, and half of the columns of the result."""
    k_ring, r_ring, p_ring, m_ring = rings
    k_full, k_empty, r_full, r_empty, t_full, p_full = bars
    dtype: gl.constexpr = k_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROPE_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    first, last = _items_of(batch, row_tiles, PLANNED)
    k0, other, item_phase = 0, 0, 0  # tiles of earlier items, this consumer's and the other's; the item's number modulo 2
    for item in range(first, last):
        r, begin, q_len, seq_len, first_row, low, high, begins, tiles, state = _item(
            item, batch, row_tiles, split_size, topk, H, HAS_LIMITS, SPARSE, PLANNED
        )

        token, at, head, live = _rows(begin, q_len, first_row, H, gl.SliceLayout(1, ROPE_COPY))
        if rope is None:  # noqa: SIM108  (known when compiling)
            rope_at = query + (at * q_t + head * q_h + 512)
        else:
            rope_at = rope + (at * ROPE_T + head * ROPE_H + ROPE_AT)
        # The rotary part passes through the place of the weights, which no warp reads between items, into registers, where it
        # stays for the whole item: shared memory has no room for it.
        e = gl.arange(0, 64, layout=gl.SliceLayout(0, ROPE_COPY))
        p_ring.index(CONSUMER).store(gl.load(rope_at[:, None] + e[None, :], mask=live[:, None], other=0.0))
        copy_token, copy_at, copy_head, copy_live = _rows(begin, q_len, first_row, H, gl.SliceLayout(1, COPY))
        d = CONSUMER * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, COPY))
        q_offset = (copy_at * q_t + copy_head * q_h)[:, None] + d[None, :]
        q_tile.index(CONSUMER).store(gl.load(query + q_offset, mask=copy_live[:, None], other=0.0))
        fence_async_shared()
        barrier()
        # Each consumer loads half of the queries' latents, and both need all of them: the barrier counts two arrivals.
        mbarrier.arrive(q_full.index(0), count=1)
        q_rope = p_ring.index(CONSUMER).load(gl.DotOperandLayout(0, S_LAYOUT, 2))

        row_token, row_at, row_head, row_live = _rows(begin, q_len, first_row, H, ROW)
        chosen = indices
        if SPARSE:
            chosen = indices + (begin + first_row // H).to(gl.int64) * indices_t
            seen = seq_len
            low = topk
        elif HAS_LIMITS:
            seen = gl.load(batch[2] + row_at, mask=row_live, other=0)
        else:
            seen = seq_len - q_len + row_token + 1
        acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
        l_i = gl.zeros([64], gl.float32, ROW)
        m_i = gl.full([64], float("-inf"), gl.float32, ROW)
        # tiles 0, 2, ... are consumer 0's, and 1, 3, ... consumer 1's
        mine = (tiles + 1 - CONSUMER) // 2
        # every row sees the keys below `low`, so whole tiles below it need no mask
        plain = mine
        if not SPARSE:
            plain = (gl.minimum(gl.maximum(low - begins, 0) // 64, tiles) + 1 - CONSUMER) // 2
        mbarrier.wait(q_full.index(0), item_phase)
        # The order is tile 0, 1, 2, ... for both: consumer 1 begins by joining tile 0, and each then alternates.
        if CONSUMER == 1 and tiles > 0:
            acc, m_i, l_i = _join(acc, m_i, l_i, k_ring, p_ring, m_ring, k_empty, t_full, p_full, other & 1, CONSUMER)
        for k in range(0, plain):
            start = begins + (2 * k + CONSUMER) * 64
            acc, m_i, l_i = _step(
                acc, m_i, l_i, q_tile, q_rope, rings, bars, chosen, k0 + k, start, seen, low, factor, False, SPARSE, CONSUMER
            )
            if 2 * k + CONSUMER + 1 < tiles:
                phase = (other + k + CONSUMER) & 1
                acc, m_i, l_i = _join(acc, m_i, l_i, k_ring, p_ring, m_ring, k_empty, t_full, p_full, phase, CONSUMER)
        if not SPARSE:
            for k in range(plain, mine):
                start = begins + (2 * k + CONSUMER) * 64
                acc, m_i, l_i = _step(
                    acc, m_i, l_i, q_tile, q_rope, rings, bars, chosen, k0 + k, start, seen, low, factor, True, False, CONSUMER
                )
                if 2 * k + CONSUMER + 1 < tiles:
                    phase = (other + k + CONSUMER) & 1
                    acc, m_i, l_i = _join(acc, m_i, l_i, k_ring, p_ring, m_ring, k_empty, t_full, p_full, phase, CONSUMER)

        # both have the same maximum at the end; each has the sum of its own tiles' weights
        # `end` also says that the other has read this consumer's last weights and all of its queries, which the next lines and
        # the next item overwrite; the next item's `q_full` says that it has read these sums.
        norms.index(CONSUMER).store(l_i)
        barrier()
        mbarrier.arrive(end.index(CONSUMER), count=1)
        mbarrier.wait(end.index(1 - CONSUMER), item_phase)
        l_i += norms.index(1 - CONSUMER).load(ROW)
        sum_ = gl.convert_layout(l_i, gl.SliceLayout(1, O_LAYOUT))
        scale = v_factor / gl.where(sum_ == 0, 1.0, sum_)
        acc = gl.where((sum_ == 0)[:, None], 0.0, acc * scale[:, None])
        log = gl.where(l_i == 0, float("-inf"), m_i + gl.log2(l_i))
        # the state of a split is already divided by its sum, in float32: `merge` weighs it by its log-sum-exp alone
        if state >= 0:
            column = CONSUMER * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, O_LAYOUT))
            o_token, o_at, o_head, o_live = _rows(begin, q_len, first_row, H, gl.SliceLayout(1, O_LAYOUT))
            partial_at = _state(state, o_at, o_head, max_splits, H, PLANNED, gl.SliceLayout(1, O_LAYOUT)) * 512
            gl.store(partial + partial_at[:, None] + column[None, :], acc, mask=o_live[:, None])
            if CONSUMER == 0:
                gl.store(partial_lse + _state(state, row_at, row_head, max_splits, H, PLANNED, ROW), log, mask=row_live)
        else:
            # through the queries' buffer, which is no longer read, so that each thread writes 16 bytes of a row
            q_tile.index(CONSUMER).store(acc.to(dtype))
            barrier()
            o_offset = (copy_at * o_t + copy_head * o_h)[:, None] + d[None, :]
            gl.store(out + o_offset, q_tile.index(CONSUMER).load(COPY), mask=copy_live[:, None])
            if HAS_LSE and CONSUMER == 0:
                gl.store(lse + row_head * lse_h + row_at, log * 0.6931471805599453, mask=row_live)
        k0 += mine
        other += (tiles + CONSUMER) // 2
        item_phase ^= 1


@gluon.jit
def _fill(  # type: ignore[no-untyped-def]
    cache, desc, rings, batch, block_table, indices, row_tiles, split_size, topk, num_pages, strides,
    H: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, HAS_LIMITS: gl.constexpr, SPARSE: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """The keys' way in: gathered one by one, or page by page."""
    if SPARSE:
        _gather(
            cache, rings, batch, block_table, indices, row_tiles, split_size, topk, strides, H, P, HAS_LIMITS, SPARSE, PLANNED
        )
    else:
        _produce(
            desc,
            rings,
            batch,
            block_table,
            row_tiles,
            split_size,
            topk,
            num_pages,
            strides[2],
            H,
            P,
            BOX,
            HAS_LIMITS,
            SPARSE,
            PLANNED,
        )


@gluon.jit(do_not_specialize=_BATCH)
def attend(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query, rope, cache, query_start_loc, seq_lens, limits, items, block_table, indices, desc,
    factor, v_factor, row_tiles, max_splits, split_size, topk, num_pages, lse_h, table_r, indices_t, o_t, o_h, q_t, q_h,
    c_block, c_slot,
    H: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, HAS_LIMITS: gl.constexpr, HAS_LSE: gl.constexpr, SPARSE: gl.constexpr,
    PLANNED: gl.constexpr, ROPE_T: gl.constexpr, ROPE_H: gl.constexpr, ROPE_AT: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # 64 KiB of queries, 128 of latents (two tiles of two halves), 16 of rotary parts and 16 of weights: 224 of the 227 that a
    # program may have.
    q_tile = gl.allocate_shared_memory(dtype, [2, 64, 256], swizzled)
    k_ring = gl.allocate_shared_memory(dtype, [4, 64, 256], swizzled)
    r_ring = gl.allocate_shared_memory(dtype, [2, 64, 64], swizzled)
    p_ring = gl.allocate_shared_memory(dtype, [2, 64, 64], swizzled)
    m_ring = gl.allocate_shared_memory(gl.float32, [2, 64], lines)
    norms = gl.allocate_shared_memory(gl.float32, [2, 64], lines)
    k_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    r_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    r_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    t_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    end = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Arrivals that fill a stage: of each gathering thread, or of the one that expects the engine's bytes. A stage of latents is
    # freed by the consumer that multiplies its half, one of rotary parts by the one that computes its scores.
    FILLERS: gl.constexpr = 128 if SPARSE else 1
    for i in gl.static_range(4):
        mbarrier.init(k_full.index(i), count=FILLERS)
        mbarrier.init(k_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(r_full.index(i), count=FILLERS)
        mbarrier.init(r_empty.index(i), count=1)
        mbarrier.init(t_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(end.index(i), count=1)
    mbarrier.init(q_full.index(0), count=2)
    fence_async_shared()
    # the merge may already be launched: it waits for the end of this grid before it reads
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    batch, strides = (query_start_loc, seq_lens, limits, items), (c_block, c_slot, table_r, indices_t)
    rings, bars = (k_ring, r_ring, p_ring, m_ring), (k_full, k_empty, r_full, r_empty, t_full, p_full)
    filled = k_ring, r_ring, k_full, k_empty, r_full, r_empty
    # a tuple with a name would hold values alone, and lose what is known when the program is made: the two are written out
    gl.warp_specialize(
        [
            (_consume, (
                out, lse, partial, partial_lse, query, rope, q_tile, rings, norms, bars, q_full, end, batch, factor, v_factor,
                indices, row_tiles, max_splits, split_size, topk, o_t, o_h, lse_h, q_t, q_h, indices_t,
                H, HAS_LIMITS, HAS_LSE, SPARSE, PLANNED, ROPE_T, ROPE_H, ROPE_AT, 0,
            )),
            (_consume, (
                out, lse, partial, partial_lse, query, rope, q_tile, rings, norms, bars, q_full, end, batch, factor, v_factor,
                indices, row_tiles, max_splits, split_size, topk, o_t, o_h, lse_h, q_t, q_h, indices_t,
                H, HAS_LIMITS, HAS_LSE, SPARSE, PLANNED, ROPE_T, ROPE_H, ROPE_AT, 1,
            )),
            (_fill, (
                cache, desc, filled, batch, block_table, indices, row_tiles, split_size, topk, num_pages, strides, H, P, BOX,
                HAS_LIMITS, SPARSE, PLANNED,
            )),
        ],
        [4, 4 if SPARSE else 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


def map_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """(shape, strides, box) of the copies from a cache [N, P, 576]: no box is of two pages."""
    return shape, strides, (1, min(shape[1] & -shape[1], KEYS), 64)


def constants(
    heads: int, page: int, *, limits: bool, lse: bool, sparse: bool, planned: bool, rope_from: RopeFrom = BESIDE
) -> dict[str, Any]:
    """Constants and options of a launch. sparse: whether keys are selected by a list; planned: whether there is a plan."""
    consumers, producer = _REGISTERS[sparse]
    return {
        "H": heads, "P": page, "BOX": min(page & -page, KEYS), "HAS_LIMITS": limits, "HAS_LSE": lse, "SPARSE": sparse,
        "PLANNED": planned, **rope_from.constants(), "CONSUMER_REGS": consumers, "PRODUCER_REGS": producer,
        "num_warps": 4, **FUSED,
    }  # fmt: skip
