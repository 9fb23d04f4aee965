"""Rows and keys without padding, by the attention registry's choice.

A backend that attends one request at a time (`RaggedAttentionImpl`) reads keys where transformers keeps them; for any other,
a paged cache is created for the call.
"""

import dataclasses
import functools
import weakref
from typing import Any

import numpy as np
import torch

from attn.backends.metadata import CommonAttentionMetadata, slots_of
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, supports_size
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import Call, having, replaced, widened
from attn.torch.backends._ragged import RaggedAttentionImpl
from attn.torch.layer import Attention

_BLOCK_SIZES = (16, 32, 64, 128, 256)


_layers: "weakref.WeakKeyDictionary[Any, dict[Any, Attention]]" = weakref.WeakKeyDictionary()


def layer_of(call: Call, attn_type: str, block_size: int | None = None) -> Attention:
    """Return the attention layer of a module for calls like this one, created once; it shares the module's sinks."""
    made = _layers.setdefault(call.module, {})
    causal = call.causal or attn_type != AttentionType.DECODER
    key = (attn_type, block_size, causal, call.scale, call.window, call.soft_cap, call.sinks is None, call.backend,
           call.chunk, call.spans is None, call.span_window,
           call.query.shape[2:], call.key.shape[2], call.query.dtype, call.query.device)  # fmt: skip
    if key not in made:
        options = {
            "scale": call.scale, "num_kv_heads": call.key.shape[2], "sliding_window": call.window,
            "logits_soft_cap": call.soft_cap, "attn_type": attn_type, "sinks": call.sinks, "dtype": call.query.dtype,
            "backend": call.backend, "chunk_size": call.chunk, "span_window": call.span_window,
            "features": [*([] if causal else [Feature.NON_CAUSAL]), *([] if call.spans is None else [Feature.SPANS])],
        }  # fmt: skip
        made[key] = _first_size(call, options, block_size)
    layer = made[key]
    if call.sinks is not None:
        layer.impl.sinks = call.sinks.detach().float()  # the module's, which may have been loaded since
    return layer


def _first_size(call: Call, options: dict[str, Any], block_size: int | None) -> Attention:
    """Create a layer of `block_size`, or of the first size that its backend supports."""
    num_heads, head_size = call.query.shape[2:]
    try:
        layer = Attention(num_heads, head_size, **options, block_size=block_size or size_for(call.backend))
        allowed = layer.backend.get_supported_kernel_block_size()
        if block_size is None and not supports_size(layer.kv_cache_spec.block_size, allowed):
            layer = Attention(num_heads, head_size, **options, block_size=size_for(layer.selection.name))
    except UnsupportedError as error:
        raise UnsupportedError(f"{call.place}: {error}\n{_who_serves(call, options)}", error.reasons) from None
    return layer.to(call.query.device)


def size_for(backend: str | None) -> int:
    """Return the first block size that a backend supports, or the first of all if `backend` is None."""
    if backend is None:
        return _BLOCK_SIZES[0]
    found: Any = AttentionBackendEnum[backend].get_class()
    allowed = found.get_supported_kernel_block_size()
    return next((size for size in _BLOCK_SIZES if supports_size(size, allowed)), _BLOCK_SIZES[0])


def _who_serves(call: Call, options: dict[str, Any]) -> str:
    """Return a sentence on the backends that have the call's features, and those of them that serve it on this machine."""
    needs = {
        Feature.SLIDING_WINDOW: call.window, Feature.SOFT_CAP: call.soft_cap, Feature.SINKS: call.sinks,
        Feature.NON_CAUSAL: None if call.causal else True, Feature.SPANS: call.spans, Feature.CHUNK_SIZE: call.chunk,
    }  # fmt: skip
    features = [feature for feature, value in needs.items() if value is not None]
    try:
        trace = Attention(*call.query.shape[2:], **{**options, "backend": None}).selection.trace
    except UnsupportedError:
        trace = ()
    serving = ", ".join(verdict.name for verdict in trace if verdict.ok)
    able = having(AttentionBackendEnum, features)
    return f"Backends that support {', '.join(features) or 'this layer'}: {able}{serving and f'; on this machine: {serving}'}"


def pack(
    call: Call, present: torch.Tensor | None, q_lens: list[int], k_lens: list[int], firsts: list[int] | None
) -> torch.Tensor:
    """Attend the valid rows and keys; padding rows are 0.

    present: bool [B, T], the valid keys, None if all are; q_lens, k_lens: each entry's valid rows and keys; firsts: its first
    valid key, None if valid keys have gaps.
    """
    batch, rows, heads, _ = call.query.shape
    value = widened(call)
    layer = _layer_for(call, q_lens, k_lens)
    impl: Any = layer.impl
    if isinstance(impl, RaggedAttentionImpl):
        if present is None:
            out = impl.attend_keys(call.query, call.key, value, call.causal, call.spans)
        else:
            out = _each(impl, call, value, present, q_lens, k_lens, firsts)
        return out[..., : call.value.shape[-1]]
    if impl.attends_keys and present is None and call.spans is None:
        out = impl.attend_keys(call.query, call.key, value, call.causal)
        return out[..., : call.value.shape[-1]]  # type: ignore[no-any-return]
    if present is None:
        queries, keys, values = (x.flatten(0, 1) for x in (call.query, call.key, value))
        real = None
    else:
        real = present[:, -rows:].flatten() if sum(q_lens) < batch * rows else None
        queries = call.query.flatten(0, 1) if real is None else call.query.flatten(0, 1)[real]
        keys, values = (x.flatten(0, 1)[present.flatten()] for x in (call.key, value))
    if call.spans is not None:
        spans = call.spans.reshape(-1, 2)
        call = replaced(call, spans=spans if real is None else spans[real.cpu().numpy()])
    out = _over_pages(layer, call, queries, keys, values, q_lens, k_lens)
    if real is not None:
        full = out.new_zeros(batch * rows, *out.shape[1:])
        full[real] = out
        out = full
    return out.view(batch, rows, heads, -1)[..., : call.value.shape[-1]]


def attend_packed(call: Call, query: torch.Tensor, key: Any, value: Any, q_lens: list[int], k_lens: list[int]) -> torch.Tensor:
    """Attend packed query [T, H, D] and key, value [S, K, D]. Returns [T, H, D]."""
    layer = _layer_for(call, q_lens, k_lens)
    impl = layer.impl
    if not isinstance(impl, RaggedAttentionImpl):
        return _over_pages(layer, call, query, key, value, q_lens, k_lens)
    entries = zip(query[None].split(q_lens, 1), key[None].split(k_lens, 1), value[None].split(k_lens, 1), strict=True)
    return torch.cat([impl.attend_keys(*entry, call.causal)[0] for entry in entries])


def _layer_for(call: Call, q_lens: list[int], k_lens: list[int]) -> Attention:
    return layer_of(call, AttentionType.DECODER if call.causal or q_lens != k_lens else AttentionType.ENCODER_ONLY)


def _each(
    impl: RaggedAttentionImpl,
    call: Call,
    value: torch.Tensor,
    present: torch.Tensor,
    q_lens: list[int],
    k_lens: list[int],
    firsts: list[int] | None,
) -> torch.Tensor:
    """Attend each entry's valid rows over its valid keys, which are copied only if they have gaps. Returns [B, S, H, D]."""
    rows, length = call.query.shape[1], call.key.shape[1]
    whole = sum(q_lens) == len(q_lens) * rows
    out = torch.empty_like(call.query) if whole else torch.zeros_like(call.query)
    for b, own in enumerate(present):
        one = slice(b, b + 1)
        if firsts is None:
            keys, real = own, own[-rows:]
        else:  # the rows are the last keys' tokens
            start = max(0, firsts[b] - (length - rows))
            keys, real = slice(firsts[b], firsts[b] + k_lens[b]), slice(start, start + q_lens[b])
        if whole:
            real = slice(None)
        spans = None
        if call.spans is not None:
            spans = call.spans[one, real.cpu().numpy() if isinstance(real, torch.Tensor) else real]
        queries, own_keys, own_values = call.query[one, real], call.key[one, keys], value[one, keys]
        out[one, real] = impl.attend_keys(queries, own_keys, own_values, call.causal, spans)
    return out


def _over_pages(
    layer: Attention, call: Call, query: torch.Tensor, key: Any, value: Any, q_lens: list[int], k_lens: list[int]
) -> torch.Tensor:
    """Attend packed query [T, H, D] and key, value [S, K, D] over pages of a new cache. Returns [T, H, D]."""
    size = layer.kv_cache_spec.block_size
    paged = layer.impl.attn_type != AttentionType.ENCODER_ONLY
    batch, slots, blocks = _batch(tuple(q_lens), tuple(k_lens), size, call.causal or not paged)
    if call.spans is not None:
        batch = dataclasses.replace(batch, spans=call.spans)
        batch.validate(size)
    cache = None
    if paged:
        cache = layer.new_kv_cache(blocks, query.device)
        layer.impl.do_kv_cache_update(layer, key, value, cache, torch.from_numpy(slots).to(query.device))
        key = value = None
    build = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=query.device).build
    result: torch.Tensor = layer(query, key, value, cache, build(0, batch))
    return result


@functools.lru_cache(64)
def _batch(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], size: int, causal: bool
) -> tuple[CommonAttentionMetadata, Any, int]:
    """Return (the batch, every key's slot, number of blocks), with blocks in order."""
    each = [-(-k // size) for k in k_lens]
    ends = np.cumsum(each)
    table = [range(end - n, end) for end, n in zip(ends, each, strict=True)]
    batch = CommonAttentionMetadata.from_lens(q_lens, k_lens, table, size, causal=causal, strict=False)
    request = np.repeat(np.arange(len(k_lens)), k_lens)
    position = np.arange(sum(k_lens)) - np.repeat(np.cumsum(k_lens) - k_lens, k_lens)
    return batch, slots_of(batch.block_table, request, position, size), max(1, int(ends[-1]) if len(ends) else 1)
