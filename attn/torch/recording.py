"""The torch side of `attn.recording`: read a call's tensors."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.dtypes import PER_TOKEN_HEAD
from attn.torch import kv_cache as caches
from attn.torch.backends.mla import _rows

Array = npt.NDArray[Any]
Part = tuple[torch.Tensor, ...]


class Ops:
    """Operations on tensors under the names that `attn.recording` uses."""

    @staticmethod
    def valueless(query: Any, *others: Any) -> str:
        """Return where a call with these arguments has no values, "" if it has them."""
        capturing = isinstance(query, torch.Tensor) and query.is_cuda and torch.cuda.is_current_stream_capturing()
        return "during the capture of a CUDA graph" if capturing else ""

    @staticmethod
    def is_finite(out: torch.Tensor, tokens: int) -> bool:
        return bool(out[:tokens].isfinite().all())

    @staticmethod
    def bits(array: Any) -> tuple[Array, str]:
        """Return an array as `attn.testing.bits` stores its dtype, and the dtype's name."""
        tensor = torch.as_tensor(array)
        return bits_of(tensor), str(tensor.dtype).removeprefix("torch.")

    @staticmethod
    def rows(x: torch.Tensor, total: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the first `total` rows as [total, *shape]; rows of another size unchanged."""
        x = x[:total]
        return x.reshape(-1, *shape) if math.prod(x.shape[1:]) == math.prod(shape) else x

    @staticmethod
    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, -1)

    @staticmethod
    def num_blocks(layer: Any, kv_cache: torch.Tensor) -> int:
        return caches.extent(layer.backend, kv_cache)[0]

    @staticmethod
    def pages(layer: Any, kv_cache: torch.Tensor, ids: Array) -> list[Array]:
        """Return the stored keys and values [n, P, K, D] of blocks `ids` [n]."""
        at, impl = torch.from_numpy(ids).to(kv_cache.device), layer.impl
        found = parts_of(layer.backend, kv_cache, impl.kv_cache_dtype, impl.head_size)
        return [stored_bits(tuple(raw(x)[at].view(x.dtype) for x in part)) for part in found]

    @staticmethod
    def array(values: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values, device=like.device)

    @staticmethod
    def keys(layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys [n * P, K, D] of blocks [n] as the layer reads them; latents expanded, [n * P, H, Dn + Dr]."""
        impl, at = layer.impl, blocks.to(kv_cache.device, torch.int64)
        part = parts_of(layer.backend, kv_cache, impl.kv_cache_dtype, impl.head_size)[0]
        stored, *scales = (raw(x)[at].view(x.dtype).flatten(0, 1) for x in part)
        if getattr(impl, "kv_lora_rank", None) is not None:
            rows = _rows.decode(stored[:, 0], impl.kv_cache_dtype, layer._k_scale)
            nope = impl.up_projection()[..., : impl.qk_nope_head_dim].to(rows.dtype)
            latent, rotary = rows[:, : impl.kv_lora_rank], rows[:, None, impl.kv_lora_rank :]
            return torch.cat([torch.einsum("ml,lhd->mhd", latent, nope), rotary.expand(-1, impl.num_heads, -1)], -1)
        if not caches.is_quantised(stored.dtype):
            return stored
        return stored.float() * (scales[0] if scales else caches.per_head(layer._k_scale, stored.device))

    @staticmethod
    def up_projection(layer: Any) -> torch.Tensor:
        """Return an MLA layer's weights [L, H, Dn + Dv]."""
        return layer.impl.up_projection()  # type: ignore[no-any-return]


def parts_of(backend: Any, kv_cache: torch.Tensor, kv_cache_dtype: str, head_size: int) -> tuple[Part, Part]:
    """Return views of a cache's keys and values [N, P, K, D], each followed by its scales if each token and head has one."""
    if kv_cache_dtype in PER_TOKEN_HEAD:
        keys, values, key_scales, value_scales = caches.split(kv_cache, head_size)
        return (keys, key_scales[..., None]), (values, value_scales[..., None])
    keys, values = backend.logical_kv_cache(kv_cache)
    return (keys,), (values,)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory as integers, so that copying preserves the bits of NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def stored_bits(part: Part) -> Array:
    """Return rows as the suite stores them: a dtype's bits, or codes and the bytes of their scale."""
    if len(part) == 1:
        return bits_of(part[0])
    return np.concatenate([bits_of(tensor).view(np.uint8) for tensor in part], -1)


def bits_of(tensor: torch.Tensor) -> Array:
    """Return a tensor as `attn.testing.bits` stores its dtype."""
    host = tensor.detach().cpu().contiguous()
    kinds = {
        torch.bfloat16: (torch.int16, np.uint16),
        torch.float8_e4m3fn: (torch.uint8, np.uint8),
        torch.float8_e5m2: (torch.uint8, np.uint8),
    }
    carrier, kind = kinds.get(host.dtype, (host.dtype, None))
    array: Array = host.view(carrier).numpy().copy()
    return array if kind is None else array.view(kind)
