"""Multi-head latent attention: its two equivalent forms, its sparse form, and its fp8 cache row.

A token is cached as one latent c [L] and one rotary key [Dr]. Unabsorbed, both are expanded to ordinary
heads; absorbed, the up-projections move onto the query and the output, and all heads share the latent.
The two agree in exact arithmetic, and `scale` is that of the unabsorbed head size in both.
Legend: L kv_lora_rank, Dn nope size, Dr rope size, Dv v_head_dim. The caller applies RoPE.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, check_shape, floats, ints, require, whole
from attn.reference._dense import attention
from attn.reference._quant import dequantize, from_bf16_bits, quantize, to_bf16_bits

_LATENT: Final = 512
_ROPE: Final = 64
_TILE: Final = 128
_SCALES_AT: Final = _LATENT
_ROPE_AT: Final = _SCALES_AT + 4 * (_LATENT // _TILE)
_ROW: Final = _ROPE_AT + 2 * _ROPE


def mla_unabsorbed(
    q_nope: npt.ArrayLike,
    q_pe: npt.ArrayLike,
    kv_c: npt.ArrayLike,
    k_pe: npt.ArrayLike,
    w_uk: npt.ArrayLike,
    w_uv: npt.ArrayLike,
    *,
    scale: float,
    causal: bool = True,
    **further: Any,
) -> tuple[F64, F64]:
    """Compute MLA as ordinary attention with H heads, the prefill form (docs/semantics.md §9).

    q_nope: [n, H, Dn]; q_pe: [n, H, Dr]; kv_c: [m, L]; k_pe: [m, Dr]; w_uk: [L, H, Dn]; w_uv: [L, H, Dv].
    k_h = [c W_UK_h | k_pe], v_h = c W_UV_h. `further` arguments (`logits_soft_cap`, `sinks`, `mask`, ...) are those
    of `attention`.
    Returns (out [n, H, Dv], lse [H, n]).
    """
    nope, rope, latent, key_rope, up_k, up_v = _checked(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv)
    # Latents of keys that no row sees may hold anything; their products are selected away by `attention`.
    with np.errstate(all="ignore"):
        key_nope, value = np.tensordot(latent, up_k, axes=1), np.tensordot(latent, up_v, axes=1)
    # [m, Dr] -> [m, H, Dr]: one rotary key for all heads.
    shared_rope = np.broadcast_to(key_rope[:, None, :], (*key_nope.shape[:2], key_rope.shape[1]))
    query, key = np.concatenate([nope, rope], axis=2), np.concatenate([key_nope, shared_rope], axis=2)
    return attention(query, key, value, scale=scale, causal=causal, **further)


def mla_absorbed(
    q_nope: npt.ArrayLike,
    q_pe: npt.ArrayLike,
    kv_c: npt.ArrayLike,
    k_pe: npt.ArrayLike,
    w_uk: npt.ArrayLike,
    w_uv: npt.ArrayLike,
    *,
    scale: float,
    causal: bool = True,
    **further: Any,
) -> tuple[F64, F64]:
    """Compute MLA over the latent, one kv head of size L + Dr, the decode form (docs/semantics.md §9).

    Arguments and result are as in `mla_unabsorbed`: q'_h = [q_nope_h W_UK_h^T | q_pe_h], k = [c | k_pe], v = c,
    out_h = (P c) W_UV_h.
    """
    nope, rope, latent, key_rope, up_k, up_v = _checked(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv)
    with np.errstate(all="ignore"):
        # For each head [n, Dn] @ [Dn, L]: <q, c W_UK> = <q W_UK^T, c>.
        absorbed = (nope.transpose(1, 0, 2) @ up_k.transpose(1, 2, 0)).transpose(1, 0, 2)
    # One kv head that all query heads share: [m, 1, L + Dr].
    query, key = np.concatenate([absorbed, rope], axis=2), np.concatenate([latent, key_rope], axis=1)[:, None]
    latent_out, lse = attention(query, key, latent[:, None], scale=scale, causal=causal, **further)
    with np.errstate(all="ignore"):
        # W_UV is linear, so it is applied once to the weighted latent instead of to every key.
        return (latent_out.transpose(1, 0, 2) @ up_v.transpose(1, 0, 2)).transpose(1, 0, 2), lse


def sparse_mla(
    query: npt.ArrayLike,
    kv: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    scale: float,
    kv_lora_rank: int,
    sinks: npt.ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Compute absorbed MLA in which row i attends only the keys listed in `indices` (docs/semantics.md §9, sparse).

    query: [n, H, L + Dr]; kv: [m, L + Dr] (or [m, 1, L + Dr]), whose first kv_lora_rank columns are the
    value too; indices: int [n, topk] into kv, -1 or >= m = none. Their order does not matter; an index
    listed twice in a row would count twice, so it raises ValueError. No causal rule: the indices include it.
    Returns (out [n, H, L], lse [H, n]).
    """
    q, chosen = floats("query", query, 3), ints("indices", indices, 2)
    cache = floats("kv", kv)
    cache = cache.reshape(len(cache), -1) if cache.ndim == 3 and cache.shape[1] == 1 else cache
    check_shape("kv", cache, (len(cache), q.shape[2]))
    require(len(chosen) == len(q), f"indices have {len(chosen)} rows (expected {len(q)}, as query)")
    require(bool((chosen >= -1).all()), f"indices contain {chosen.min(initial=0)} (>= -1)")
    rank = whole("kv_lora_rank", kv_lora_rank, least=1, most=q.shape[2])
    row, column = np.nonzero((chosen >= 0) & (chosen < len(cache)))
    # Counted, not set: a key listed twice would have twice the weight in a kernel that gathers rows by index, and once
    # in a mask.
    hits = np.zeros((len(q), len(cache)), dtype=np.int64)
    np.add.at(hits, (row, chosen[row, column]), 1)
    twice = np.argwhere(hits > 1)
    if len(twice):
        raise ValueError(f"indices row {twice[0][0]} lists key {twice[0][1]} more than once")
    return attention(q, cache[:, None], cache[:, None, :rank], scale=scale, sinks=sinks, mask=hits > 0)


def pack_fp8_ds_mla(kv_c: npt.ArrayLike, k_pe: npt.ArrayLike, *, ue8m0: bool = False) -> npt.NDArray[np.uint8]:
    """Pack 656-byte cache rows: uint8 [T, 656] = 512 e4m3 | 4 fp32 scales | 64 bf16 (docs/semantics.md §9).

    kv_c: [T, 512]; k_pe: [T, 64]. Each 128 latent elements share scale = amax / 448, in fp32 and at least the
    smallest normal number, and are stored as x / scale in fp32. With `ue8m0` (DeepSeek-V3.2) the scale is
    max(amax / 448, 1e-4) rounded up to a power of two. Numbers are little-endian.
    """
    latent, rope = floats("kv_c", kv_c, 2), floats("k_pe", k_pe, 2)
    check_shape("kv_c", latent, (len(latent), _LATENT))
    check_shape("k_pe", rope, (len(latent), _ROPE))
    tiles = latent.astype(np.float32).reshape(len(latent), _LATENT // _TILE, _TILE)
    with np.errstate(all="ignore"):
        scale = np.abs(tiles).max(axis=-1) / np.float32(448)
        if ue8m0:
            # scale = fraction * 2^exponent with fraction in [0.5, 1), so 2^exponent is the next power of two above,
            # except where scale is a power of two itself (fraction 0.5). The floor of 1e-4 is DeepSeek-V3.2's.
            fraction, exponent = np.frexp(np.maximum(scale, np.float32(1e-4)))
            scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        # A tile of zeros would be divided by 0, and a denormal scale is 0 on devices that flush denormals.
        scale = np.maximum(scale, np.finfo(np.float32).tiny)
        scaled = tiles / scale[..., None]
    codes = quantize(scaled, "fp8_e4m3").view(np.uint8).reshape(len(latent), _LATENT)
    tail = (scale.astype("<f4").view(np.uint8), to_bf16_bits(rope).astype("<u2").view(np.uint8))
    return np.concatenate([codes, *tail], axis=1)


def unpack_fp8_ds_mla(rows: npt.ArrayLike) -> tuple[F64, F64]:
    """Unpack rows, uint8 [T, 656], to (kv_c [T, 512], k_pe [T, 64]) in float64."""
    packed = np.ascontiguousarray(rows)
    require(packed.dtype == np.uint8, f"rows have dtype={packed.dtype} (uint8)")
    check_shape("rows", packed, (len(packed), _ROW))
    # A view of other items needs a contiguous last dimension.
    scale = np.ascontiguousarray(packed[:, _SCALES_AT:_ROPE_AT]).view("<f4").astype(np.float64)
    tiles = packed[:, :_LATENT].reshape(len(packed), _LATENT // _TILE, _TILE)
    latent = dequantize(tiles, "fp8_e4m3", scale[..., None]).reshape(len(packed), _LATENT)
    rope = np.ascontiguousarray(packed[:, _ROPE_AT:]).view("<u2").astype(np.uint16)
    return latent, from_bf16_bits(rope)


#: The arrays of both forms, with their ranks.
_ARRAYS: Final = {"q_nope": 3, "q_pe": 3, "kv_c": 2, "k_pe": 2, "w_uk": 3, "w_uv": 3}


def _checked(*arrays: npt.ArrayLike) -> list[F64]:
    """Convert the arrays of `_ARRAYS` to float64 and check that their shapes agree."""
    converted = [floats(name, x, rank) for (name, rank), x in zip(_ARRAYS.items(), arrays, strict=True)]
    nope, rope, latent, key_rope, up_k, up_v = converted
    rows, num_heads, nope_size = nope.shape
    check_shape("q_pe", rope, (rows, num_heads, rope.shape[2]))
    check_shape("k_pe", key_rope, (len(latent), rope.shape[2]))
    check_shape("w_uk", up_k, (latent.shape[1], num_heads, nope_size))
    check_shape("w_uv", up_v, (latent.shape[1], num_heads, up_v.shape[2]))
    return converted
