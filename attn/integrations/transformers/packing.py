"""Rows and keys without padding, by the attention registry's choice: of a padded batch, or of sequences packed in one row.

A backend that attends one request at a time (`RaggedAttentionImpl`) reads keys where transformers keeps them; for any other,
a paged cache is created for the call.
"""

import dataclasses
import functools
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from attn.backends.block_table import slots_of
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, Feature, supports_size
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import EVERYTHING, ModuleCall, having, replaced, rows_first
from attn.integrations.transformers.masks import drawn
from attn.torch.backends._ragged import RaggedAttentionImpl
from attn.torch.layer import Attention, layers_on
from attn.visibility import Visibility

_BLOCK_SIZES = (16, 32, 64, 128, 256)
#: Where sequences that are packed in one row begin and end.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")

_layers: "weakref.WeakKeyDictionary[Any, dict[Any, Attention]]" = weakref.WeakKeyDictionary()


def layer_of(call: ModuleCall, attn_type: str, block_size: int | None = None) -> Attention:
    """Return the attention layer of a module for calls like this one, created once; it shares the module's sinks."""
    layers = _layers.setdefault(call.module, {})
    spans, mask = call.seen.batch.spans is not None, call.seen.layer
    if attn_type != AttentionType.DECODER:
        mask = mask._replace(causal=True)  # the type says that rows see later keys
    heads, kv_heads, head_size = call.query.shape[1], call.key.shape[1], call.query.shape[3]
    # Not the lengths: a layer serves any.
    key = (attn_type, block_size, mask, spans, call.scale, call.soft_cap, call.sinks is None, call.backend, heads, kv_heads,
           head_size, call.query.dtype, call.query.device)  # fmt: skip
    if key not in layers:
        options = {
            "scale": call.scale, "num_kv_heads": kv_heads, "attn_type": attn_type, "dtype": call.query.dtype,
            "sliding_window": None if mask.window[0] is None else mask.window, "chunk_size": mask.chunk_size,
            "span_window": mask.span_window, "logits_soft_cap": call.soft_cap, "sinks": call.sinks, "backend": call.backend,
            "features": [*([] if mask.causal else [Feature.NON_CAUSAL]), *([Feature.SPANS] if spans else [])],
        }  # fmt: skip
        with layers_on(call.query.device):
            layers[key] = _first_size(call, (heads, head_size), options, block_size)
    layer = layers[key]
    if call.sinks is not None:
        layer.impl.sinks = call.sinks.detach().float()  # the module's, which may have been loaded since
    return layer


def _first_size(call: ModuleCall, heads: tuple[int, int], options: dict[str, Any], block_size: int | None) -> Attention:
    """Create a layer of `block_size`, or of the first size that its backend supports. heads: their number and size."""
    try:
        layer = Attention(*heads, **options, block_size=block_size or size_for(call.backend))
        allowed = layer.backend.get_supported_kernel_block_size()
        if block_size is None and not supports_size(layer.kv_cache_spec.block_size, allowed):
            # the backend is known only when it was chosen, and may need other pages
            layer = Attention(*heads, **options, block_size=size_for(layer.selection.name))
    except UnsupportedError as error:
        raise UnsupportedError(f"{call.label}: {error}\n{_who_serves(call, heads, options)}", error.reasons) from None
    return layer.to(call.query.device)


def size_for(backend: str | None) -> int:
    """Return the first block size that a backend supports, or the first of all if `backend` is None."""
    if backend is None:
        return _BLOCK_SIZES[0]
    cls: Any = AttentionBackendEnum[backend].get_class()
    allowed = cls.get_supported_kernel_block_size()
    return next((size for size in _BLOCK_SIZES if supports_size(size, allowed)), _BLOCK_SIZES[0])


def _who_serves(call: ModuleCall, heads: tuple[int, int], options: dict[str, Any]) -> str:
    """Return a sentence on the backends that have the call's features, and those of them that serve it on this machine."""
    (mask, batch), cap, sinks = call.seen, call.soft_cap, call.sinks
    needs = {
        Feature.SLIDING_WINDOW: mask.window[0],
        Feature.SOFT_CAP: cap,
        Feature.SINKS: sinks,
        Feature.NON_CAUSAL: None if mask.causal else True,
        Feature.SPANS: batch.spans,
        Feature.CHUNK_SIZE: mask.chunk_size,
    }
    features = [feature for feature, value in needs.items() if value is not None]
    try:
        # who would serve the layer if none were named
        trace = Attention(*heads, **{**options, "backend": None}).selection.trace
    except UnsupportedError:
        trace = ()
    serving = ", ".join(verdict.name for verdict in trace if verdict.ok)
    names = having(AttentionBackendEnum, features)
    return f"Backends that support {', '.join(features) or 'this layer'}: {names}{serving and f'; on this machine: {serving}'}"


def pack(call: ModuleCall) -> torch.Tensor:
    """Attend the valid rows and keys of a call that was read; returns [B, S, H, Dv], in which padding rows are 0."""
    (batch, heads, rows, _), width, valid = call.query.shape, call.value.shape[3], call.valid
    if valid is None:
        q_lens, k_lens = [rows] * batch, [call.key.shape[2]] * batch
    else:
        rows_padded = (call.seen.layer.causal or call.square) and not valid.all_rows  # rows are the last keys' tokens
        q_lens, k_lens, _ = valid.lens()
        q_lens = q_lens if rows_padded else [rows] * batch
    query, key, value = rows_first(call)
    layer, spans = _layer_for(call, q_lens, k_lens), call.seen.batch.spans
    impl: Any = layer.impl
    if isinstance(impl, RaggedAttentionImpl):
        if valid is not None:
            return _each(impl, call, q_lens)[..., :width]
        return impl.attend_keys(query, key, value, call.seen.layer.causal, spans)[..., :width]
    query, key, value, real = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), None
    if valid is not None:
        # which rows of the padded batch are there; None: all
        real = valid.present[:, -rows:].flatten() if sum(q_lens) < batch * rows else None
        query = query if real is None else query[real]
        key, value = (x[valid.present.flatten()] for x in (key, value))
    if spans is not None:
        spans = spans.reshape(-1, 2)
        spans = spans if real is None else spans[real.cpu().numpy()]
    out = _over_pages(layer, call.seen.layer.causal, (query, key, value), q_lens, k_lens, spans)
    if real is not None:
        # padding rows are 0
        full = out.new_zeros(batch * rows, *out.shape[1:])
        full[real] = out
        out = full
    return out.view(batch, rows, heads, -1)[..., :width]


def attend_packed(call: ModuleCall, q_lens: list[int], k_lens: list[int]) -> torch.Tensor:
    """Attend the sequences that are packed in a call's one row. Returns [T, H, Dv]."""
    query, key, value = (x[0] for x in rows_first(call))
    layer, causal, width = _layer_for(call, q_lens, k_lens), call.seen.layer.causal, call.value.shape[3]
    impl = layer.impl
    if not isinstance(impl, RaggedAttentionImpl):
        return _over_pages(layer, causal, (query, key, value), q_lens, k_lens)[..., :width]
    entries = zip(query[None].split(q_lens, 1), key[None].split(k_lens, 1), value[None].split(k_lens, 1), strict=True)
    return torch.cat([impl.attend_keys(*entry, causal)[0] for entry in entries])[..., :width]


def _layer_for(call: ModuleCall, q_lens: list[int], k_lens: list[int]) -> Attention:
    # an encoder's layer takes as many rows as keys of each sequence
    decodes = call.seen.layer.causal or q_lens != k_lens
    return layer_of(call, AttentionType.DECODER if decodes else AttentionType.ENCODER_ONLY)


def _each(impl: RaggedAttentionImpl, call: ModuleCall, q_lens: list[int]) -> torch.Tensor:
    """Attend each entry's valid rows over its valid keys, which are copied only if they have gaps. Returns [B, S, H, D]."""
    assert call.valid is not None
    (query, key, value), spans = rows_first(call), call.seen.batch.spans
    _, k_lens, firsts = call.valid.lens()
    rows, length = query.shape[1], key.shape[1]
    # no padding among rows: each element is written, so none has to be cleared
    whole = sum(q_lens) == len(q_lens) * rows
    out = torch.empty_like(query) if whole else torch.zeros_like(query)
    for b, present in enumerate(call.valid.present):
        i, keys, real = slice(b, b + 1), present, present[-rows:]
        if firsts is not None:  # the rows are the last keys' tokens
            start = max(0, firsts[b] - (length - rows))
            # slices are views, where a mask of bools would copy
            keys, real = slice(firsts[b], firsts[b] + k_lens[b]), slice(start, start + q_lens[b])
        if whole:
            real = slice(None)
        row_spans = None if spans is None else spans[i, real.cpu().numpy() if isinstance(real, torch.Tensor) else real]
        out[i, real] = impl.attend_keys(query[i, real], key[i, keys], value[i, keys], call.seen.layer.causal, row_spans)
    return out


def _over_pages(
    layer: Attention, causal: bool, arrays: tuple[torch.Tensor, ...], q_lens: list[int], k_lens: list[int], spans: Any = None
) -> torch.Tensor:
    """Attend packed query [T, H, D] and key, value [S, K, D] over pages of a new cache. Returns [T, H, D]."""
    (query, key, value), size = arrays, layer.kv_cache_spec.block_size
    paged = layer.impl.attn_type != AttentionType.ENCODER_ONLY
    # an encoder's batch is not causal by its type, so the batch does not say it again
    batch, slots, blocks = _batch(tuple(q_lens), tuple(k_lens), size, causal or not paged)
    if spans is not None:
        batch = dataclasses.replace(batch, spans=spans)
        batch.validate(size)
    cache: torch.Tensor | None = None
    if paged:
        cache = layer.new_kv_cache(blocks, query.device)
        layer.impl.do_kv_cache_update(layer, key, value, cache, torch.from_numpy(slots).to(query.device))
        key = value = None  # type: ignore[assignment]  # they are in the cache
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


def sequences(call: ModuleCall, kwargs: dict[str, Any], output_only: bool) -> torch.Tensor | ModuleCall:
    """Return the output [1, S, H, Dv] of sequences packed in one row, computed one by one; or, if the call needs more than an
    output without gradients (not `output_only`), has other sizes or a mask that hides more, return a call with a mask instead.

    Raises `UnsupportedError` for boundaries that do not divide the call's rows and keys into equally many sequences.
    """
    allowed = None
    if call.mask is not None:
        masked = drawn(call)
        call, allowed = replaced(masked, mask=None, seen=call.seen), masked.mask
    starts = _checked(call, kwargs)
    if call.seen.layer.window[0] is not None and not call.seen.layer.causal:
        raise call.non_causal_window()
    seen = _seen(call, starts)
    if output_only and not (torch.compiler.is_compiling() or call.wants_grad or call.wide):
        lens = [(q, k) for q, k in zip(*map(_lens, starts), strict=True) if q or k]
        # a mask that hides nothing within the sequences says no more than their boundaries
        whole = allowed is None or bool((allowed | ~seen).all())
        # sequences of rows without keys, or of keys without rows, are left to the mask
        if whole and all(q and k for q, k in lens):
            return attend_packed(call, *(list(x) for x in zip(*lens, strict=True)))[None]
    return replaced(call, seen=EVERYTHING, mask=seen if allowed is None else seen & allowed)


def _checked(call: ModuleCall, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the boundaries of rows and of keys. In a graph, values are checked when it runs."""
    starts: list[torch.Tensor] = []
    for name in BOUNDARIES:
        x = kwargs.get(name)
        if not isinstance(x, torch.Tensor) or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise call.refusal(f"{name} of {got}", f"pass {' and '.join(BOUNDARIES)}, [n + 1] of int32 or int64, or neither")
        starts.append(x)
    if len(call.query) != 1 or len(starts[0]) != len(starts[1]):
        got = f"{len(starts[0]) - 1} sequences of rows and {len(starts[1]) - 1} of keys in a batch of {len(call.query)}"
        raise call.refusal(f"cu_seq_lens_q, cu_seq_lens_k: {got}", "pass equally many, in one row [1, T]")
    ends = (("rows", call.query.shape[2]), ("keys", call.key.shape[2]))
    for name, x, (axis, end) in zip(BOUNDARIES, starts, ends, strict=True):
        if torch.compiler.is_compiling():
            increasing = (x[0] == 0) & (x[-1] == end) & (x.diff() >= 0).all()
            torch._assert_async(increasing, f"{call.label}: {name} must increase from 0 to the number of {axis}")
        elif min(_lens(x), default=0) < 0 or sum(_lens(x)) != end or int(x[0]):
            advice = f"it must increase from 0 to {end}; a call over cached keys needs a mask instead"
            raise call.refusal(f"{name} = {x.tolist()} over {end} {axis}", advice)
    return starts


#: The lengths of sequences by the tensor of their boundaries, which the layers of a model share, and its version.
_lens_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _lens(starts: torch.Tensor) -> list[int]:
    """Return the sequences' lengths. Waits for the device once."""
    version = None if starts.is_inference() else starts._version
    known: tuple[int | None, list[int]] | None = _lens_of.get(starts)
    if known is None or known[0] is None or known[0] != version:
        known = _lens_of[starts] = version, starts.diff().tolist()
    return known[1]


def _seen(call: ModuleCall, starts: list[torch.Tensor]) -> torch.Tensor:
    """Return bool [1, 1, S, T]: which keys of its own sequence a row sees, the last row of each being at its last key."""
    q_at, k_at = (torch.arange(x.shape[2], device=x.device) for x in (call.query, call.key))
    q_starts, k_starts = (x.to(call.query.device) for x in starts)
    q_of, k_of = (torch.searchsorted(x[1:], at, right=True) for x, at in ((q_starts, q_at), (k_starts, k_at)))
    # positions from the end of the sequence
    position, key = (q_at - q_starts[1:][q_of])[:, None], k_at - k_starts[1:][k_of]
    seen: torch.Tensor = (q_of[:, None] == k_of) & Visibility(call.seen.layer).allowed(position, key)
    return seen[None, None]
