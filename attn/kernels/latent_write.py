"""Write latents into a paged MLA cache, quantising them if needed, and copy the queries' rotary part in the same launch.

Grid [rows]: program t stores row t of the new tokens, [kv_c L | k_pe Dr], at its slot; -1 stores nothing. A row is stored in
the model's dtype, as fp8 codes of x / scale, or as the 656 bytes of `fp8_ds_mla`: 512 e4m3 codes, a float32 scale per 128
codes (their largest magnitude / 448, at least the smallest normal number), and k_pe in bfloat16. The bytes are those of
`attn.torch.backends.mla._rows` on every architecture, because codes are computed with integers (`codes.fp8_code`); any NaN
becomes the code 0x7F.

An absorbed decode needs each query's rotary part beside its absorbed part. Program t also copies it for token t, all heads: a
copy of its own would cost the host as much as this launch.

Layouts: kv_c [T, L], k_pe [T, Dr], query [T, H, D], absorbed [T, H, L + Dr], all with any strides but a dense last dimension;
cache [N, P, W], dense in the last dimension; rows of a packed cache are aligned to 4 bytes.
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.codes import fp8_code
from attn.kernels.kv_write import bf16_code
from attn.kernels.launch import FUSED, format_of, power_of_two


@triton.jit
def _code(x, k_scale, factor, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert elements x [n] to the bits of the cache's elements."""
    if FORMAT == "":
        return x
    elif FORMAT == "bf16":
        return bf16_code(x.to(tl.float32))
    else:
        by = tl.zeros_like(x.to(tl.float32)) + (factor if k_scale is None else tl.load(k_scale))
        x = tl.math.div_rn(x.to(tl.float32), by)
        return fp8_code(x, 3, 7, 448.0) if FORMAT == "e4m3" else fp8_code(x, 2, 15, 57344.0)


@triton.jit(do_not_specialize=("tokens", "copied"))
def write(  # type: ignore[no-untyped-def]
    kv_c, k_pe, cache, slots, k_scale, query, absorbed, factor, tokens, copied,
    kv_c_t, k_pe_t, c_block, c_slot, q_t, q_h, a_t, a_h,
    L: tl.constexpr, DR: tl.constexpr, P: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, FORMAT: tl.constexpr,
    NOPE: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # the grid has as many programs as the longer of the two lists of tokens
    if query is not None and token < copied:
        e = tl.arange(0, BLOCK_R)
        # some heads at a time: 2,048 elements, whatever the number of heads (`constants`)
        for first in tl.range(0, H, BLOCK_H):
            h = (first + tl.arange(0, BLOCK_H))[:, None].to(tl.int64)  # heads may be outermost, and far apart
            live = (h < H) & (e < DR)[None, :]
            rope = tl.load(query + token * q_t + h * q_h + NOPE + e[None, :], mask=live)
            tl.store(absorbed + token * a_t + h * a_h + L + e[None, :], rope, mask=live)
    if token < tokens:
        at = kv_c_t, k_pe_t, c_block, c_slot
        write_row(token, kv_c, k_pe, cache, slots, k_scale, factor, at, L, DR, P, BLOCK_L, BLOCK_R, FORMAT)


@triton.jit
def write_row(  # type: ignore[no-untyped-def]
    token, kv_c, k_pe, cache, slots, k_scale, factor, strides,
    L: tl.constexpr, DR: tl.constexpr, P: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store the row of a token, a 64-bit number. strides: of a row of kv_c and of k_pe, of a block of the cache, of a slot."""
    kv_c_t, k_pe_t, c_block, c_slot = strides
    slot = tl.load(slots + token).to(tl.int64)
    e = tl.arange(0, BLOCK_R)
    if slot >= 0:
        # in 64 bits: `slot` is
        row = cache + slot // P * c_block + slot % P * c_slot
        rope = tl.load(k_pe + token * k_pe_t + e, mask=e < DR)
        if FORMAT == "packed":
            tile = tl.arange(0, 4)
            at = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
            x = tl.load(kv_c + token * kv_c_t + at).to(tl.float32)
            # NaN as a scale makes the whole quarter NaN when it is read; so does an infinite one, times codes of 0 and NaN.
            nonfinite = tl.max((x != x).to(tl.int32), 1) > 0
            largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
            # 2**-126: a smaller scale would be subnormal, which GPUs may flush to 0, and zeros would be divided by 0
            scale = tl.maximum(tl.math.div_rn(largest, tl.zeros_like(largest) + 448.0), 1.1754943508222875e-38)
            scale = tl.where(nonfinite, float("nan"), scale)
            codes = fp8_code(tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None]), 3, 7, 448.0)
            tl.store(row + at, codes)
            # behind 512 bytes of codes: element 128 of four bytes, then element 264 of two
            tl.store(row.to(tl.pointer_type(tl.float32)) + 128 + tile, scale)
            if rope.dtype == tl.bfloat16:
                tl.store(row.to(tl.pointer_type(tl.bfloat16)) + 264 + e, rope)
            else:
                tl.store(row.to(tl.pointer_type(tl.uint16)) + 264 + e, bf16_code(rope.to(tl.float32)))
        else:
            d = tl.arange(0, BLOCK_L)
            latent = _code(tl.load(kv_c + token * kv_c_t + d, mask=d < L), k_scale, factor, FORMAT)
            rope = _code(rope, k_scale, factor, FORMAT)
            # the bits of a bfloat16 are stored as integers, so that no conversion rounds them again
            if FORMAT == "bf16":
                row = row.to(tl.pointer_type(tl.uint16))
            tl.store(row + d, latent.to(row.dtype.element_ty), mask=d < L)
            tl.store(row + L + e, rope.to(row.dtype.element_ty), mask=e < DR)


def code_of(dtype: str, stored: str) -> str:
    """The format of the codes of latents of `dtype` in a cache of dtype `stored`; codes are passed as unsigned integers."""
    return "packed" if stored == "uint8" else format_of(dtype, stored)


def constants(rank: int, rope: int, page: int, code: str, heads: int, nope: int) -> dict[str, Any]:
    """The constants and options of `write`. code: `code_of`; heads, nope: H and Dn of queries whose rotary part
    is copied, or 0."""
    block_l, block_r = power_of_two(rank), power_of_two(rope)
    return {
        "L": rank,
        "DR": rope,
        "P": page,
        "BLOCK_L": block_l,
        "BLOCK_R": block_r,
        "FORMAT": code,
        "NOPE": nope,
        "H": heads,
        "BLOCK_H": min(power_of_two(heads), max(1, 2048 // block_r)),
        "num_warps": min(4, max(1, block_l // 128)),
        **FUSED,
    }
