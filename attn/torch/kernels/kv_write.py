"""Write new keys and values into a paged cache: `attn.kernels.kv_write` launched for torch's tensors."""

import functools
from typing import Any

import torch

from attn.kernels.kv_write import Scales, constants, write
from attn.kernels.launch import format_of
from attn.torch.kernels.direct import Prepared, Signature, check_stride, operator, signature_of

# By bytes of an element: kernels compute codes by integers, so that their bits are the same on every architecture.
_BITS = {1: torch.uint8, 2: torch.uint16}


@functools.cache
def _code(source: torch.dtype, stored: torch.dtype) -> str:
    return format_of(*(str(dtype).removeprefix("torch.") for dtype in (source, stored)))


@operator("triton_write_kv", "key_cache", "value_cache")
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Store token t's key and value at slot_mapping[t] = block * P + offset; -1 stores nothing.

    key, value: [T', K, D]; caches: [N, P, K, D], any strides with D dense; slot_mapping: [T] int; scales: 0-d or [K]
    float32 on the same device, which one-byte caches need and others ignore. Rows past the shorter of T and T' are padding.
    """
    _launch(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, per_token=False)


@operator("triton_write_kv_per_token", "key_cache", "value_cache", "key_scales", "value_scales")
def write_kv_per_token(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv` with a scale per token and head, stored in key_scales and value_scales.

    Caches: int8 or float8_e4m3fn; scales: [N, P, K] float32 with equal strides and adjacent heads.
    """
    # the kernel takes the strides of one of them for both (`kv_cache.split` makes them so)
    assert key_scales.stride() == value_scales.stride() and key_scales.stride(2) == 1
    _launch(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales, per_token=True)


def _launch(*arrays: Any, per_token: bool) -> None:
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale = arrays
    # Either may be padded, as engines pad the rows of a batch that a graph is captured for.
    tokens = min(key.shape[0], slot_mapping.shape[0])
    if tokens == 0:
        return
    _, heads, size = key.shape
    # slices of one projection are read where they are
    key, value = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (key, value))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_stride(name, cache)
    code = _code(key.dtype, key_cache.dtype)
    if code:
        key_cache, value_cache = (cache.view(_BITS[cache.itemsize]) for cache in (key_cache, value_cache))
    strides = (key.stride(0), value.stride(0), *key_cache.stride()[:3], *value_cache.stride()[:3])
    arrays = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    # Empty for no scale, and for one of the whole tensor: kernels then read no scale per head.
    scales = tuple([() if scale is None else scale.stride() for scale in (k_scale, v_scale)])
    kernel = _prepared(signature_of(arrays, strides), (heads, size, key_cache.shape[1]), code, scales, per_token)
    kernel(tokens, arrays, *strides)


@functools.lru_cache(maxsize=1024)
def _prepared(signature: Signature, shape: tuple[int, int, int], code: str, scales: Scales, per_token: bool) -> Prepared:
    """The kernel for calls that agree in these; shape: (heads, head size, page)."""
    return Prepared(write, **constants(*shape, code, scales, per_token))
