"""Write new keys and values into a paged cache, quantising them if needed.

Grid [T]: one program stores one token's keys and values, all heads. fp8 codes are computed with integers (round to nearest
even, saturating, NaN kept), so that their bits are the same on every architecture, including those without fp8 conversions.
Either a scale is passed (one, or one per kv head), or each token and head gets its own: absmax / the largest code, stored
beside the codes; 0 for a token of zeros, NaN for one with a non-finite element. A slot of -1 stores nothing.
"""

from typing import Any

import triton
import triton.language as tl

from attn.kernels.codes import fp8_code, nearest
from attn.kernels.launch import FUSED, power_of_two


@triton.jit
def bf16_code(x):  # type: ignore[no-untyped-def]
    """The bits of float32 x in bfloat16, also by integers: not every conversion rounds (the interpreter's truncates)."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def code_in(x, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert float32 x, already divided by its scale, to a code of this format, which is not ""."""
    if FORMAT == "int8":
        clipped = tl.minimum(tl.maximum(x, -127.0), 127.0)
        # int8 has no NaN: a number that is none becomes 0. -127 to 127, so that no code is without its opposite.
        return nearest(tl.where(x != x, 0.0, clipped)).to(tl.int32).to(tl.uint8)
    elif FORMAT == "e4m3":
        return fp8_code(x, 3, 7, 448.0)
    elif FORMAT == "e5m2":
        return fp8_code(x, 2, 15, 57344.0)
    else:
        return bf16_code(x)


@triton.jit
def _scaled_by_itself(x, live, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(codes, scales) of float32 x [heads, D]."""
    most: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    x = tl.where(live, x, 0.0)
    # NaN as the scale makes the whole token NaN when it is read, whatever its codes are
    nonfinite = tl.max(((x - x) != 0.0).to(tl.int32), 1) > 0
    largest = tl.max(tl.where((x - x) != 0.0, 0.0, tl.abs(x)), 1)
    scale = tl.where(nonfinite, float("nan"), tl.math.div_rn(largest, tl.zeros_like(largest) + most))
    # a token of zeros: 0 / 0 would be NaN
    by = tl.where(scale == 0.0, 1.0, scale)
    return code_in(tl.math.div_rn(x, tl.zeros_like(x) + by[:, None]), FORMAT), scale


@triton.jit
def write(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots, k_scale, v_scale,
    key_t, value_t, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head, kscale_h, vscale_h,
    scale_block, scale_slot, values_at,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):  # fmt: skip
    if value_cache is None:
        value_cache = key_cache + values_at  # one array holds the keys, and the values behind them
    # 64 bits throughout: slots of a large cache and rows of a large batch exceed 2**31 elements
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
        live = (h < HEADS) & (d < D)
        block, offset = slot // P, slot % P
        k = tl.load(key + token * key_t + h * D + d, mask=live)
        v = tl.load(value + token * value_t + h * D + d, mask=live)
        if PER_TOKEN:
            k, k_by_token = _scaled_by_itself(k.to(tl.float32), live, FORMAT)
            v, v_by_token = _scaled_by_itself(v.to(tl.float32), live, FORMAT)
            at = block * scale_block + offset * scale_slot + tl.arange(0, BLOCK_H)
            tl.store(k_scale + at, k_by_token, mask=tl.arange(0, BLOCK_H) < HEADS)
            tl.store(v_scale + at, v_by_token, mask=tl.arange(0, BLOCK_H) < HEADS)
        elif FORMAT == "bf16":
            k, v = code_in(k.to(tl.float32), FORMAT), code_in(v.to(tl.float32), FORMAT)
        elif FORMAT != "":
            # one scale has a stride of 0
            k_by = tl.load(k_scale + h * kscale_h, mask=h < HEADS, other=1.0)
            v_by = tl.load(v_scale + h * vscale_h, mask=h < HEADS, other=1.0)
            k = code_in(tl.math.div_rn(k.to(tl.float32), tl.broadcast_to(k_by, (BLOCK_H, BLOCK_D))), FORMAT)
            v = code_in(tl.math.div_rn(v.to(tl.float32), tl.broadcast_to(v_by, (BLOCK_H, BLOCK_D))), FORMAT)
        # a head's stride is that of most of the cache where heads are outermost
        k_at = key_cache + block * kc_block + offset * kc_slot + h.to(tl.int64) * kc_head + d
        v_at = value_cache + block * vc_block + offset * vc_slot + h.to(tl.int64) * vc_head + d
        tl.store(k_at, k.to(key_cache.dtype.element_ty), mask=live)
        tl.store(v_at, v.to(value_cache.dtype.element_ty), mask=live)


#: The strides of both scales, () for a number or none.
Scales = tuple[tuple[int, ...], ...]


def constants(heads: int, size: int, page: int, code: str, scales: Scales, per_token: bool) -> dict[str, Any]:
    """The constants and options of `write`. code: `format_of`. per_token: whether each token and head gets its own scale."""
    (k_scales, v_scales), block_h, block_d = scales, power_of_two(heads), power_of_two(size)
    # both arrays of scales have the same strides, with heads adjacent (`attn.torch.kernels.kv_write`)
    scale_block, scale_slot = k_scales[:2] if per_token else (0, 0)
    return {
        "kscale_h": 1 if k_scales else 0,
        "vscale_h": 1 if v_scales else 0,
        "scale_block": scale_block,
        "scale_slot": scale_slot,
        "values_at": 0,
        "HEADS": heads,
        "D": size,
        "P": page,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "FORMAT": code,
        "PER_TOKEN": per_token,
        "num_warps": min(8, max(1, block_h * block_d // 256)),
        **FUSED,
    }
