"""The paged KV cache in torch: one tensor per layer, written in place.

A cache is allocated in its backend's own layout; `logical_kv_cache` views it as keys and values [N, P, K, D] of any strides. A
quantised cache stores x / scale, saturated and rounded to nearest even, and reads code * scale. Nothing in this module waits
for the device: a slot of -1 is redirected, not masked out, so that shapes do not depend on values and the write can be
captured in a CUDA graph.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from attn.backends.abstract import AttentionBackend, KVCacheSpec
from attn.dtypes import DTYPES, dtype_name, kv_cache_element
from attn.errors import DeviceError, ShapeError, UnsupportedError


def element_type(kv_cache_dtype: str | None, dtype: Any) -> torch.dtype:
    """The element type of a cache of `kv_cache_dtype` for a model of `dtype` (torch.dtype or name). Raises `DTypeError`."""
    element = getattr(torch, kv_cache_element(kv_cache_dtype, dtype_name(dtype)))
    assert isinstance(element, torch.dtype)
    return element


def is_quantised(element: torch.dtype) -> bool:
    """Whether elements of this type are codes that a scale multiplies: int8 and the fp8 formats."""
    return element.itemsize == 1


def allocate(
    backend: type[AttentionBackend], spec: KVCacheSpec, num_blocks: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return a zeroed cache of `num_blocks` blocks.

    Its shape is `get_kv_cache_shape`, laid out in memory as `get_kv_cache_stride_order` defines (physical dimension i is
    logical dimension order[i]; as in vLLM, a backend that does not implement it has its shape's own order). Raises ValueError
    for a negative `num_blocks`.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks={num_blocks} must be at least 0")
    shape = backend.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype)
    order: tuple[int, ...] = tuple(range(len(shape)))
    with contextlib.suppress(NotImplementedError):
        order = backend.get_kv_cache_stride_order()
    element = element_type(spec.kv_cache_dtype, spec.dtype)
    physical = torch.zeros([shape[i] for i in order], dtype=element, device=device)
    # the inverse permutation: the caller sees logical dimensions, memory has the order asked for
    return physical.permute([order.index(i) for i in range(len(order))])


def in_layout(backend: type[AttentionBackend], pages: torch.Tensor) -> torch.Tensor:
    """View foreign keys and values [2, N, P, K, D], of any strides, as a cache of a backend.

    Kernels take any strides; a backend's layout defines only the order of the dimensions. Raises `UnsupportedError` for a
    layout that is not a permutation of them.
    """
    order = backend.get_kv_cache_shape(3, 4, 5, 7, "auto")  # distinct sizes identify the dimensions
    if sorted(order) != [2, 3, 4, 5, 7]:
        raise UnsupportedError(f"{backend.get_name()}: its cache {list(order)} is not a permutation of pages [2, N, P, K, D]")
    return pages.permute([(2, 3, 4, 5, 7).index(size) for size in order])


def check_not_expanded(name: str, kv_cache: torch.Tensor) -> None:
    """Raise `ShapeError` if several elements of a cache are one in memory: a token's write would change others."""
    if any(not step and size > 1 for step, size in zip(kv_cache.stride(), kv_cache.shape, strict=True)):
        raise ShapeError(f"{name}: kv_cache is expanded: tokens share memory, where each needs its own (expand().clone())")


def check_scale(name: str, value: Any, num_kv_heads: int) -> torch.Tensor:
    """Return a scale as float32 on the CPU: 0-d, or [K] with one entry per kv head.

    Raises `ShapeError` for another shape and ValueError unless every entry is finite and positive.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
    # the device is explicit: within `with torch.device("meta")` around a model's constructor the values would be lost
    scale = torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()
    if tuple(scale.shape) not in ((), (num_kv_heads,)):
        raise ShapeError(f"{name} has shape {list(scale.shape)}: must be a scalar or [{num_kv_heads}], one per kv head")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"{name}={scale.tolist()} must be finite and above 0")
    return scale


def of_scale(scale: Any) -> Any:
    """The part of a scale that a call's launches depend on: its value, if the host has it."""
    # launches read these from the device, so the value may change; a scalar on the host is an argument of theirs
    if isinstance(scale, torch.Tensor) and (scale.ndim or not scale.is_cpu):
        return scale.shape, scale.stride(), scale.dtype, scale.device, scale.requires_grad
    return float(scale)


def check_scale_device(backend: type[AttentionBackend], layer: Any, query: torch.Tensor) -> None:
    """Raise `DeviceError` if a layer's scales are on "meta", where their values are lost, and the query is not."""
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(layer, name)
        if getattr(scale, "is_meta", False) and not query.is_meta:
            raise DeviceError(
                f"{backend.get_name()}: layer.{name} is on meta, query on {query.device}: the scale's value is lost"
            )


def split(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a cache with a scale per token and head into views: keys, values [N, P, K, D]; their scales [N, P, K] float32.

    kv_cache: [2, N, P, K, D + 4], one byte per element, with contiguous blocks. The codes of a block come first, so that every
    row of D stays aligned; the scales of its tokens and heads follow. Raises `ShapeError`.
    """
    _, blocks, page, heads, row = kv_cache.shape
    if row != head_size + 4 or kv_cache.itemsize != 1:
        raise ShapeError(
            f"kv_cache has shape {list(kv_cache.shape)} and dtype {kv_cache.dtype}: must be [2, N, P, K, {head_size + 4}], "
            "one byte per element, to hold a scale for each token and head"
        )
    if page * heads * head_size % 4:
        raise ShapeError(
            f"kv_cache has shape {list(kv_cache.shape)}: P * K * {head_size} must be a multiple of 4, so that the "
            "float32 scales after the codes of a block are aligned"
        )
    # Scales are float32 views of the bytes behind a block's codes, so each block must be one run, at a multiple of 4 bytes.
    strides = kv_cache.stride()
    begin = 0 if torch.compiler.is_compiling() else kv_cache.storage_offset()  # not traced
    if not kv_cache[:1, :1].is_contiguous() or any(stride % 4 for stride in (begin, *strides[:2])):
        raise ShapeError(
            f"kv_cache has strides {list(strides)} and begins at byte {begin} of its storage: each block "
            "[P, K, D + 4] must be contiguous and begin at a multiple of 4, to hold its scales (see `layer.new_kv_cache`)"
        )
    content = kv_cache.view(2, blocks, page * heads * row)
    codes = content[..., : page * heads * head_size].unflatten(-1, (page, heads, head_size))
    scales = content[..., page * heads * head_size :].view(torch.float32).unflatten(-1, (page, heads))
    return codes[0], codes[1], scales[0], scales[1]


def own_scale(x: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    """The dynamic scales [T, K] float32 of x [T, K, D]: absmax / the largest code; NaN where x is not all finite."""
    largest = x.abs().amax(-1).to(torch.float32)
    # divided by a tensor: on a GPU torch multiplies by the reciprocal of a number, which gives another scale in some cases
    scale = largest / torch.full_like(largest, DTYPES[dtype_name(element)].max)
    # An infinite scale would turn finite elements of the row into 0, where NaN shows that something is wrong.
    return torch.where(scale.isfinite(), scale, torch.nan)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
) -> None:
    """Store token t's key and value at slot_mapping[t] = block * P + offset; -1 stores nothing.

    key, value: [T', K, D]; caches: [N, P, K, D], of any strides; slot_mapping: [T] int. Rows past the shorter of T and T'
    are padding. Scales (0-d or [K]) apply only to quantised caches. Scales [N, P, K] are part of the cache (`split`): each
    token and head is quantised with its own, which is stored beside its codes.
    """
    stored = []
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if isinstance(scale, torch.Tensor) and scale.ndim == 3:
            token_scale = own_scale(new.detach(), cache.dtype)
            stored.append((token_scale, scale))
            # a token of zeros: 0 / 0 would be NaN
            scale = torch.where(token_scale == 0, 1, token_scale)
        stored.append((encode(new.detach(), cache.dtype, scale), cache))
    put(stored, slot_mapping)


def put(stored: Sequence[tuple[torch.Tensor, torch.Tensor]], slot_mapping: torch.Tensor) -> None:
    """Store row t of each array's elements [T', ...] in its cache [N, P, ...] at slot_mapping[t]; -1 stores nothing.

    Elements already have the cache's dtype. Rows past the shorter of T and T' are padding.
    """
    tokens = min(slot_mapping.shape[0], *(rows.shape[0] for rows, _ in stored))
    if tokens == 0:
        return
    slots = slot_mapping[:tokens].to(torch.int64)
    # A padded token repeats the write of the first real token: the same bytes to the same slot, so the order does not matter.
    real = slots >= 0
    source = torch.where(real, torch.arange(tokens, device=slots.device), real.int().argmax())
    slots = slots[source]
    at = slots.clamp(min=0)  # slots is still -1 if no token is real: then slot 0 keeps its content
    for rows, cache in stored:
        # block and offset, since a cache of any strides has no view in which a slot is one index
        index = (at // cache.shape[1], at % cache.shape[1])
        if cache.itemsize == 1:
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)  # many operators do not support fp8
        keep = (slots < 0).view(-1, *[1] * (rows.dim() - 1))
        cache.index_put_(index, torch.where(keep, cache[index], rows[source]))


def encode(x: torch.Tensor, element: torch.dtype, scale: torch.Tensor | float) -> torch.Tensor:
    """Convert x [T, K, D] to a cache's element type: a cast, or the codes of x / scale.

    Codes saturate at the largest finite value and round to nearest even. NaN stays NaN in fp8 and becomes 0 in int8.
    """
    if not is_quantised(element):
        return x.to(element)
    # divided in float32 and rounded once, to the code
    x = x.to(torch.promote_types(x.dtype, torch.float32)) / per_head(scale, x.device)
    largest = DTYPES[dtype_name(element)].max
    # torch converts what is too large for e5m2 to infinity, and what is too large for int8 to anything
    x = x.clamp(-largest, largest)
    return x.nan_to_num(nan=0.0).round().to(element) if element == torch.int8 else x.to(element)


def gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Gather the tokens of some blocks in order, elements as stored, by head: [K, B * P, D].

    cache: [N, P, K, D] of any strides; blocks: [B] int. Returns a copy. Slots past the sequence's end contain arbitrary data:
    cut them off before computing.
    """
    # not every release of torch indexes fp8
    stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    pages = stored.index_select(0, blocks).view(cache.dtype)
    return pages.permute(2, 0, 1, 3).reshape(cache.shape[2], -1, cache.shape[3])


def per_head(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Reshape a scale (0-d, [K] or [T, K]) to multiply [..., K, D]."""
    return torch.as_tensor(scale, dtype=torch.float32, device=device)[..., None]


def extent(backend: type[AttentionBackend], kv_cache: torch.Tensor) -> tuple[int, int]:
    """(blocks, tokens per block) of a cache in the backend's layout."""
    num_blocks, block_size = backend.logical_kv_cache(kv_cache)[0].shape[:2]
    return num_blocks, block_size


def load(layer: Any, kv_cache: torch.Tensor, slots: Any, keys: torch.Tensor, values: torch.Tensor, codes: bool) -> torch.Tensor:
    """Implement `BaseLayer.load_pages` after its checks: write rows [T, ...] in place at slots [T] of the cache."""
    index = torch.from_numpy(slots).to(kv_cache.device)
    keys, values = keys.to(kv_cache.device), values.to(kv_cache.device)
    if not codes:
        layer.impl.do_kv_cache_update(layer, keys, values, kv_cache, index)
        return kv_cache
    key_cache, value_cache = layer.backend.logical_kv_cache(kv_cache)
    if keys.shape[1:] == key_cache.shape[2:]:
        put([(keys, key_cache), (values, value_cache)], index)
    else:  # MLA: one row contains both
        put([(torch.cat([keys, values], -1)[:, None], key_cache)], index)
    return kv_cache
