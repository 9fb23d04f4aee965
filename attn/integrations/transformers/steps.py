"""One step of continuous batching: a layer's keys and values in transformers' cache, and the metadata of each kind of layer.

Metadata is made once a step and kind of layer, in one of two ways. For a backend that reads lengths on the device only,
operations there make it from transformers' arrays; nothing waits for the device, so a CUDA graph that captures them makes the
metadata of each step that it is replayed for. For any other, lengths are copied to the host.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from attn.backends.metadata import CommonAttentionMetadata
from attn.torch import kv_cache as caches
from attn.torch.layer import Attention


@dataclass(frozen=True)
class LayerCache:
    """One layer's state in transformers' cache in one step.

    Rows and keys may be padded to the extents of a CUDA graph. Requests beyond the step's own then begin where the last one
    ends, padding rows are written to a page that is never handed out, and indices of padding keys are of another such page.

    group: what layers have in common that read the same keys; row_starts, key_starts: where each request's rows and keys begin,
    [R + 1]; most_rows, most_keys: no request has more, nor one of another step that a graph is replayed for; read, written:
    slots of all keys (none if the step reads no older ones) and of the new ones; window: the keys that the layer's cache keeps
    of a request, None for all; views: the layer's keys and values as pages
    [N, P, K, D] if it keeps all of them in pages, else None; update: takes new keys and values [1, K, T, D] and slots of keys,
    stores the new ones and returns the keys and values of those slots, [S, K, D]; without slots, the new ones.
    """

    group: Any
    row_starts: torch.Tensor
    key_starts: torch.Tensor
    most_rows: int
    most_keys: int
    read: torch.Tensor
    written: torch.Tensor
    window: int | None
    views: tuple[torch.Tensor, torch.Tensor] | None
    update: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def pages_of(cache: Any, index: int, kwargs: dict[str, Any]) -> LayerCache:
    """Read either form of the cache: an allocator per layer or, before transformers 5.18, groups of layers."""
    if hasattr(cache, "layer_to_allocator"):
        pool = cache.layer_to_allocator[index]
        group = pool.index
        try:
            views = pool.get_cache_for_block_table(index)
            window = None
        except NotImplementedError:  # a layer with a window: a ring buffer of the last keys
            views, window = None, pool.sliding_window
    else:
        # keys and values are in separate storages, which no view joins into a cache: they are gathered
        (group, _), views = cache.layer_index_to_group_indices[index], None
        window = None if cache.sliding_windows[index] == 1 else cache.sliding_windows[index]
    layer_type = "full_attention" if window is None else "sliding_attention"
    # from transformers 5.19 on bounds have these names, and the cache takes the step's arguments together
    together = "max_length_k" in kwargs
    names = ("max_length_q", "max_length_k") if together else ("max_seqlen_q", "max_seqlen_k")
    lists = {name: kwargs[name] for name in ("read_index", "write_index")}

    def update(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices = {**lists, "read_index": [slots] * len(lists["read_index"])}  # the cache reads that of the layer's kind
        if not together:
            return cache.update(key, value, layer_idx=index, **indices)  # type: ignore[no-any-return]
        key, value = cache.update(key, value, layer_idx=index, kwargs={**kwargs, **indices, "cache": cache})
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    return LayerCache(
        group=group,
        row_starts=kwargs["cu_seq_lens_q"],
        key_starts=_of(layer_type, kwargs["cu_seq_lens_k"]),
        most_rows=kwargs[names[0]],
        most_keys=_of(layer_type, kwargs[names[1]]),
        read=lists["read_index"][group],
        written=lists["write_index"][group],
        window=window,
        views=views,
        update=update,
    )


def cache_view(backend: Any, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
    """View transformers' pages of one layer, keys and values [N, P, K, D] in one storage, as a cache of a backend."""
    # keys and values are parts of one storage: the distance between them is the stride of the first dimension
    distance = value_pages.storage_offset() - key_pages.storage_offset()
    pages = key_pages.as_strided((2, *key_pages.shape), (distance, *key_pages.stride()), key_pages.storage_offset())
    return caches.in_layout(backend, pages)


def _of(layer_type: str, by_type: Any) -> Any:
    """Return what is given for a type of layers; before transformers 5.19 a model with one type has no dictionary."""
    return by_type[layer_type] if isinstance(by_type, dict) else by_type


class OnDevice(NamedTuple):
    """The metadata of a step, made on the device.

    padding: [T] bool, rows of no request. taken, slots: for keys that are gathered into pages, [N * P] each: which of the
    step's keys goes to each place, and its slot in transformers' cache; places after a request's last key take any key.
    """

    metadata: Any
    padding: torch.Tensor
    taken: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class BatchingStep:
    """One step. starts: where each request's rows begin, on the host."""

    def __init__(self, starts: torch.Tensor, layer_idx: int, capturing: bool = False) -> None:
        # weak: transformers keeps the tensor for as long as the step lasts
        self.cu_seq_lens, self.last, self.capturing = weakref.ref(starts), layer_idx, capturing
        self._lens: dict[Any, tuple[list[int], list[int], Any]] = {}
        self._metadata: dict[Any, Any] = {}
        self._on_device: dict[Any, OnDevice] = {}

    @functools.cached_property
    def starts(self) -> Any:
        starts = self.cu_seq_lens()
        assert starts is not None
        return starts.cpu().numpy()

    def lens(self, pages: LayerCache) -> tuple[list[int], list[int], Any]:
        """Return (numbers of rows, numbers of keys, where each request's keys begin), of requests that have both."""
        if pages.group not in self._lens:
            key_starts = pages.key_starts.cpu().numpy()
            q_lens, k_lens = np.diff(self.starts), np.diff(key_starts)
            live = (q_lens > 0) & (k_lens > 0)
            self._lens[pages.group] = q_lens[live].tolist(), k_lens[live].tolist(), key_starts
        return self._lens[pages.group]

    def metadata(self, pages: LayerCache, layer: Attention, device: torch.device) -> Any:
        """Return the metadata of a layer over transformers' pages, made on the host."""
        key = pages.group, layer.backend, layer.kv_cache_spec, device
        if key not in self._metadata:
            q_lens, k_lens, key_starts = self.lens(pages)
            where, size = pages.read.cpu().numpy(), layer.kv_cache_spec.block_size
            ends = zip(key_starts[:-1], key_starts[1:], np.diff(self.starts), strict=True)
            # the slot of each page's first key, in units of pages
            table: list[Any] = [where[start:end:size] // size for start, end, rows in ends if rows > 0 and end > start]
            batch = CommonAttentionMetadata.from_lens(q_lens, k_lens, table, size)
            self._metadata[key] = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=device).build(0, batch)
        return self._metadata[key]

    def on_device(self, pages: LayerCache, layer: Attention, rows: int, gathered: bool) -> OnDevice:
        """Return the metadata of `rows` rows, made on the device: over transformers' pages or over `gathered` keys."""
        key = pages.group, layer.backend, layer.kv_cache_spec, gathered
        if key not in self._on_device:
            self._on_device[key] = _made_on_device(pages, layer, rows, gathered)
        return self._on_device[key]


def _made_on_device(pages: LayerCache, layer: Attention, rows: int, gathered: bool) -> OnDevice:
    size, device = layer.kv_cache_spec.block_size, pages.read.device
    row_starts, starts = pages.row_starts.to(torch.int32), pages.key_starts.to(torch.int32)
    # requests without rows in this step have no keys to read, and padding requests may end before they begin
    lens = (starts.diff() * (row_starts.diff() > 0)).clamp_(min=0)
    requests, columns = len(lens), -(-pages.most_keys // size)
    # a step without older keys reads none: its keys are the new ones
    where, key_index, slots = pages.read if len(pages.read) else pages.written, None, None
    if gathered:
        # each request begins on a page of its own
        used = (lens + size - 1) // size
        ends = used.cumsum(0)
        # how many pages there are is known on the device only
        first, pages_at_most = ends - used, (len(where) + requests * (size - 1)) // size
        page = torch.arange(pages_at_most, device=device)
        request = torch.searchsorted(ends, page, right=True).clamp_(max=requests - 1)
        position = ((page - first[request]) * size)[:, None] + torch.arange(size, device=device)
        is_key = (position < lens[request, None]).flatten()
        key_index = (starts[request, None] + position).flatten() * is_key
        # an index that is not of a new key, which transformers would place there
        slots = where[key_index] * is_key
        table = first[:, None] + torch.arange(columns, device=device)
    else:
        # the index of each page's first key in the list of slots; behind a request's last page anything, within the list
        index = starts[:-1, None] + torch.arange(0, columns * size, size, device=device)
        table = where[index.clamp_(max=len(where) - 1)] // size
    batch = CommonAttentionMetadata(
        query_start_loc=row_starts,
        seq_lens=lens,
        block_table=table.to(torch.int32),
        slot_mapping=pages.written,
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=pages.most_rows,
        max_seq_len=pages.most_keys,
        block_size=size,
    )
    builder: Any = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=device)
    # a graph's rows behind those of the step
    padding = torch.arange(rows, device=device) >= row_starts[-1]
    return OnDevice(builder.build_for_cudagraph_capture(batch), padding, key_index, slots)


_steps: "weakref.WeakKeyDictionary[Any, BatchingStep]" = weakref.WeakKeyDictionary()


def attends_again(cache: Any, layer_idx: int, starts: torch.Tensor) -> bool:
    """Whether a layer has had its turn in a step that others are part of too."""
    step = _steps.get(cache)
    layers = getattr(cache, "layer_to_allocator", None) or cache.layer_index_to_group_indices
    return step is not None and step.cu_seq_lens() is starts and layer_idx == step.last and len(layers) > 1


def was_served(cache: Any) -> bool:
    """Whether a layer's call was part of a step over a cache."""
    return cache in _steps


def step_of(cache: Any, layer_idx: int, starts: torch.Tensor, capturing: bool = False) -> BatchingStep:
    """Return the step that a layer's call is part of: that of the layer before, if it was given the same tensor.

    transformers may write the next step's lengths into the same tensor, but then begins with a layer that has had its turn.
    So does the capture of a step that has just been computed: what a graph reads is made within it.
    """
    step = _steps.get(cache)
    if step is None or step.cu_seq_lens() is not starts or layer_idx <= step.last or step.capturing != capturing:
        step = _steps[cache] = BatchingStep(starts, layer_idx, capturing)
    step.last = layer_idx
    return step
