"""Dense attention whose scores are products of 8-bit integers (Zhang et al., SageAttention, arXiv 2410.02367).

Queries and keys are rounded to int8, queries with a scale per row, keys with one per tile. First the keys' mean over the
sequence is subtracted: it adds the same number to every score of a row, which does not change the softmax, and it makes up
most of the outlying channels of keys, which would otherwise determine the tiles' scales. Products of codes are exact in
int32; scores, softmax and sums are float32; values are multiplied in their own 16-bit dtype.

    _quantize   grid tiles x H x B: codes [B, H, S', D'] (S' a multiple of the tile, D' a power of two, zeros beyond the array)
                and scales; for queries also their product with the keys' mean, which is added back to a log-sum-exp.
    _attend     grid tiles x H x B, heads that share keys next to one another: an online softmax in base 2.

Keys from `lens[b]` on do not exist: their codes are 0, their scores -inf, and their values are not loaded. A NaN or
infinity in a query's row affects that row; among a head's keys it affects all rows of that head (through the mean); among
values, all rows of the tiles that see it. Offsets are 64-bit wherever an array may have 2^31 elements.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn.kernels.launch import FUSED, int8_launch, power_of_two
from attn.torch.kernels.direct import arch, check_stride, on_device

LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows"])
def _quantize(  # type: ignore[no-untyped-def]
    codes, scales, shift, x, mean, lens, factor, rows, padded, x_b, x_s, x_h, mean_b, mean_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    IS_QUERY: tl.constexpr,
):  # fmt: skip
    """Quantise one tile.

    Queries are multiplied by `factor` and have a scale per row (`shift`: their product with the mean); keys have the mean
    subtracted and one scale.
    """
    # One dimension of the grid, since the others of CUDA's are limited to 65,535 programs.
    tiles = padded // BLOCK
    pid = tl.program_id(0)
    tile = pid % tiles
    unit = pid // tiles
    b = unit // H
    head = unit % H
    row = tile * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    live = row < rows
    if not IS_QUERY:
        # Queries are all there; keys end at the length of their batch entry, and are zeros from there on.
        live = row < tl.load(lens + b)
    at = x + b.to(tl.int64) * x_b + head.to(tl.int64) * x_h + row.to(tl.int64)[:, None] * x_s + d[None, :]
    lanes = live[:, None] & (d < D)[None, :]
    values = tl.load(at, mask=lanes, other=0.0).to(tl.float32)
    # codes are written for padding too: the attention loads whole tiles of them without a mask
    out = unit.to(tl.int64) * padded + row
    if mean is not None:
        # head // G is the kv head of a query's head; of keys, G is 1
        middle = tl.load(mean + b.to(tl.int64) * mean_b + head // G * mean_h + d, mask=d < D, other=0.0)
        if shift is not None:
            # What subtracting the mean took from every score of the row, in base 2: exact queries, before they are rounded.
            tl.store(shift + out, tl.sum(values * middle[None, :], 1) * factor)
        if not IS_QUERY:
            # columns and rows beyond the array stay 0, or the mean would enter their tile's scale
            values = tl.where(lanes, values - middle[None, :], 0.0)
    if IS_QUERY:
        values = values * factor
    # A maximum may ignore NaN. (x - x does not detect it: if x is a product, compilers fuse the two.)
    nonfinite = tl.max((tl.abs(values) < float("inf")).to(tl.int32) ^ 1, 1)
    peak = tl.max(tl.abs(values), 1)
    if not IS_QUERY:
        # one scale for a tile of keys, so that it multiplies whole columns of scores; as a vector, so that both kinds share the
        # rest
        peak = tl.max(peak, 0) + tl.zeros((BLOCK,), tl.float32)
        nonfinite = tl.max(nonfinite, 0) + tl.zeros((BLOCK,), tl.int32)
    inverse = tl.where(peak > 1e-30, 127.0 / peak, 0.0)  # smaller values would not change any score
    # between -127 and 127: the largest is scaled to 127. A conversion would truncate, so half is added before the floor.
    rounded = tl.floor(tl.where((nonfinite == 0)[:, None], values * inverse[:, None], 0.0) + 0.5)
    tl.store(codes + out[:, None] * BLOCK_D + d[None, :], rounded.to(tl.int8))
    # codes cannot be NaN; as the scale it makes every score of the row, or of the tile's keys, NaN
    scale = tl.where(nonfinite == 0, tl.where(peak > 1e-30, peak / 127.0, 0.0), float("nan"))
    if IS_QUERY:
        tl.store(scales + out, scale)
    else:
        tl.store(scales + pid + tl.arange(0, BLOCK), scale, mask=tl.arange(0, BLOCK) == 0)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, q_scale, k_at, k_scales, v_at, start, length, upper, v_s,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys. Without MASKED every row sees every key of it."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    j = start + n
    k = tl.load(k_at + j[:, None] * BLOCK_D + d[None, :])
    scale = q_scale * tl.load(k_scales + start // BLOCK_N)
    s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    if MASKED:
        allowed = (j < length)[None, :]
        if CAUSAL:
            allowed = allowed & (j[None, :] <= upper[:, None])
        s = tl.where(allowed, s, float("-inf"))
    # scores are scaled inside the exponent, where the product is fused; masked scores times a scale of 0 would be NaN
    m_new = tl.maximum(m_i, tl.where(tl.max(s, 1) == float("-inf"), float("-inf"), tl.max(s, 1) * scale))
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale[:, None] - guard[:, None])
    if MASKED:
        # a scale of NaN would make weights of masked keys NaN too
        p = tl.where(allowed, p, 0.0)
    alpha = tl.exp2(m_i - guard)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    at = tl.minimum(j, length - 1) if MASKED else j  # rows past the last key load it again
    if WIDE:
        at = at.to(tl.int64)
    # A value that is not there is loaded as the last one, with weight 0, instead of by a mask, which costs more instructions.
    v_rows = v_at + at[:, None] * v_s + d[None, :]
    v = tl.load(v_rows) if D == BLOCK_D else tl.load(v_rows, mask=(d < D)[None, :], other=0.0)
    return tl.dot(p.to(v.dtype), v, acc), l_i, m_new


@triton.jit(do_not_specialize=["rows", "lse_b", "lse_h"])
def _attend(  # type: ignore[no-untyped-def]
    output, lse, shift, q_codes, q_scales, k_codes, k_scales, value, lens, rows, q_padded, k_padded,
    o_b, o_s, o_h, lse_b, lse_h, v_b, v_s, v_h,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles = q_padded // BLOCK_M
    pid = tl.program_id(0)
    tile = pid % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the last rows are the longest: start them first, so that they do not end last
    unit = pid // tiles
    b = unit // H
    head = unit % H
    kv_unit = (b * (H // G) + head // G).to(tl.int64)
    length = tl.load(lens + b)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    # The last key that each row sees: both ends are aligned (docs/semantics.md §3), and rows before the first key see none.
    upper = row + length - rows
    high = length
    full = length
    if CAUSAL:
        high = tl.maximum(tl.minimum(length, (tile + 1) * BLOCK_M + length - rows), 0)
        full = tl.maximum(tl.minimum(tile * BLOCK_M + length - rows + 1, high), 0)
    # Tiles below `full` are seen whole by every row of the tile of queries; only those from there to `high` need a mask.
    full = full // BLOCK_N * BLOCK_N
    at = unit.to(tl.int64) * q_padded + row
    q = tl.load(q_codes + at[:, None] * BLOCK_D + d[None, :])
    q_scale = tl.load(q_scales + at)
    k_at = k_codes + kv_unit * k_padded * BLOCK_D
    scales_at = k_scales + kv_unit * (k_padded // BLOCK_N)
    v_at = value + b.to(tl.int64) * v_b + (head // G).to(tl.int64) * v_h
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # One loop in the source, two in the program: a mask under an `if` would become a select in every tile.
    for phase in tl.static_range(2):
        for start in tl.range(full if phase else 0, high if phase else full, BLOCK_N):
            acc, l_i, m_i = _step(
                acc, l_i, m_i, q, q_scale, k_at, scales_at, v_at, start, length, upper, v_s,
                phase == 1, CAUSAL, WIDE, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    live = row < rows
    result = tl.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    o_rows = output + b.to(tl.int64) * o_b + head.to(tl.int64) * o_h + row.to(tl.int64)[:, None] * o_s
    tl.store(o_rows + d[None, :], result.to(output.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if lse is not None:
        log = m_i + tl.log2(l_i)
        if shift is not None:
            # The mean's part of every score, which the softmax does not show but the log-sum-exp does.
            log = log + tl.load(shift + at)
        log = tl.where(l_i == 0, float("-inf"), log)
        tl.store(lse + b.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + row, log * 0.6931471805599453, mask=live)


class DenseKeys(NamedTuple):
    """The keys and values of a batch."""

    key: torch.Tensor  # [B, M, K, D], float16 or bfloat16, any strides with a dense last dimension
    value: torch.Tensor  # like key
    lens: torch.Tensor  # [B] int32: entry b has keys 0 .. lens[b] - 1; later rows may contain anything
    #: [B, K, D] float32, subtracted from the keys (their mean over the sequence: any vector gives the same attention, with
    #: another rounding error); None subtracts nothing.
    mean: torch.Tensor | None = None


@on_device
def int8_attention(
    output: torch.Tensor, lse: torch.Tensor | None, query: torch.Tensor, keys: DenseKeys, scale: float, causal: bool = False
) -> None:
    """Compute output [B, S, H, D] and, unless None, lse [B, H, S] float32 (natural log). Without keys they are 0 and -inf.

    query: [B, S, H, D], of the keys' dtype, any strides with a dense last dimension. causal: row i sees keys up to
    i + lens[b] - S.
    """
    batch, rows, heads, size = query.shape
    key, value, lens, mean = keys
    for name, tensor in (("output", output), ("query", query), ("key", key), ("value", value)):
        check_stride(name, tensor)
    # Only a log-sum-exp needs what the mean took from the scores.
    launch, has_shift = int8_launch(arch(), size), mean is not None and lse is not None
    keys = keys._replace(mean=None if mean is None else mean.contiguous())
    q_codes, shift = _quantised(query, keys, launch.block_m, scale, is_query=True, has_shift=has_shift)
    k_codes, _ = _quantised(key, keys, launch.block_n, scale)
    tiles = -(-rows // launch.block_m)
    # Codes have whole tiles of rows, so that every program loads without a mask.
    padded = tiles * launch.block_m, -(-key.shape[1] // launch.block_n) * launch.block_n
    strides = *output.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), *value.stride()[:3]
    _attend[(tiles * heads * batch,)](
        *(output, lse, shift, *q_codes, *k_codes, value, lens, rows, *padded, *strides),
        H=heads,
        G=heads // key.shape[2],
        D=size,
        BLOCK_D=power_of_two(size),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        CAUSAL=causal,
        WIDE=key.shape[1] * value.stride(1) >= 2**31,
        **launch.options(),
    )


def _quantised(
    x: torch.Tensor, keys: DenseKeys, block: int, scale: float, is_query: bool = False, has_shift: bool = False
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Return ((codes, scales), shift) of the queries or keys x [B, rows, heads, D], in tiles of `block` rows."""
    batch, rows, heads, size = x.shape
    tiles, block_d = -(-rows // block), power_of_two(size)
    # [B, H, S', D'], and a scale for each row of queries or tile of keys
    codes = torch.empty(batch * heads * tiles * block * block_d, dtype=torch.int8, device=x.device)
    scales = torch.empty(batch * heads * tiles * (block if is_query else 1), dtype=torch.float32, device=x.device)
    shift = torch.empty_like(scales) if has_shift else None
    mean_strides = (0, 0) if keys.mean is None else keys.mean.stride()[:2]
    _quantize[(tiles * heads * batch,)](
        *(codes, scales, shift, x, keys.mean, keys.lens, scale * LOG2E, rows, tiles * block, *x.stride()[:3], *mean_strides),
        H=heads,
        G=heads // keys.key.shape[2],
        D=size,
        BLOCK_D=block_d,
        BLOCK=block,
        IS_QUERY=is_query,
        num_warps=4 if block_d <= 128 else 8,
        **FUSED,
    )
    return (codes, scales), shift
