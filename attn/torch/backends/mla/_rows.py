"""Latent cache rows for torch: encoding and decoding of the three formats.

A row is [kv_c L | k_pe Dr] in the model's dtype, or its fp8 codes with one scale for all rows, or the 656 bytes of
`fp8_ds_mla`: 512 e4m3 codes, one float32 scale per 128 codes (amax / 448), and k_pe in bfloat16, unquantised (the layout of
FlashMLA's and vLLM's caches). A packed row equals the result of `attn.reference.pack_fp8_ds_mla` bit for bit.
"""

import torch

from attn.backends.mla.common import DS_MLA_BYTES, DS_MLA_LATENT, DS_MLA_TILE
from attn.torch import kv_cache as caches

PACKED = "fp8_ds_mla"
_ROPE_AT = DS_MLA_LATENT + 4 * (DS_MLA_LATENT // DS_MLA_TILE)
_TINY = torch.finfo(torch.float32).tiny


def pack(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Encode kv_c [T, 512] and k_pe [T, 64] as `fp8_ds_mla` rows: [T, 656] uint8."""
    tiles = kv_c.float().unflatten(1, (-1, DS_MLA_TILE))
    # per token and tile of 128 latents
    largest = tiles.abs().amax(-1)
    # divided by a tensor: by a number, a GPU multiplies with its reciprocal, which is another scale now and then
    scale = (largest / torch.full_like(largest, 448.0)).clamp(min=_TINY)
    codes = (tiles / scale[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    rope = k_pe.to(torch.bfloat16).clone(memory_format=torch.contiguous_format)  # `contiguous` keeps an empty view's strides
    return torch.cat([codes.view(torch.uint8).flatten(1), scale.view(torch.uint8), rope.view(torch.uint8)], 1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """Decode `fp8_ds_mla` rows [m, 656] to float32 [m, 576]."""
    # views of other dtypes below need rows that are dense
    rows = rows.contiguous()
    assert rows.shape[1] == DS_MLA_BYTES
    codes = rows[:, :DS_MLA_LATENT].view(torch.float8_e4m3fn).float().unflatten(1, (-1, DS_MLA_TILE))
    scale = rows[:, DS_MLA_LATENT:_ROPE_AT].contiguous().view(torch.float32)
    rope = rows[:, _ROPE_AT:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(codes * scale[..., None]).flatten(1), rope], 1)


def encode(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache_dtype: str, element: torch.dtype, k_scale: torch.Tensor | float
) -> torch.Tensor:
    """Encode kv_c [T, L] and k_pe [T, Dr] as cache rows: [T, W] of the cache's element type."""
    if kv_cache_dtype == PACKED:
        return pack(kv_c, k_pe)
    row = torch.cat([kv_c, k_pe], 1)
    return caches.encode(row[:, None], element, k_scale)[:, 0]


def decode(rows: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor | float) -> torch.Tensor:
    """Decode stored rows [m, W] to [m, L + Dr]: float32 if the cache is quantised, otherwise unchanged."""
    if kv_cache_dtype == PACKED:
        return unpack(rows)
    if not caches.is_quantised(rows.dtype):
        return rows
    return rows.float() * torch.as_tensor(k_scale, dtype=torch.float32, device=rows.device)


def gather(kv_cache: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the rows [m, W] of cache [N, P, W] at pages [m] and offsets [m], as stored."""
    if kv_cache.itemsize != 1:
        return kv_cache[pages, offsets]
    # as bytes: not every release of torch indexes fp8
    return kv_cache.view(torch.uint8)[pages, offsets].view(kv_cache.dtype)
