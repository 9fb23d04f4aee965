"""transformers' cache of continuous batching: where one layer's keys and values are in one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn.torch import kv_cache as caches


@dataclass(frozen=True)
class Pages:
    """One layer's state in transformers' cache in one step.

    Rows and keys may be padded to the extents of a CUDA graph. Requests beyond the step's own then begin where the last one
    ends, padding rows are written to a page that is never handed out, and indices of padding keys are of another such page.

    kind: what layers have in common that read the same keys; row_starts, key_starts: where each request's rows and keys begin,
    [R + 1]; most_rows, most_keys: no request has more, nor one of another step that a graph is replayed for; read, written:
    slots of all keys (none if the step reads no older ones) and of the new ones; views: the layer's keys and values as pages
    [N, P, K, D] if it keeps all of them in pages, else None; size: tokens per page; update: takes new keys and values
    [1, K, T, D] and slots of keys, stores the new ones and returns the keys and values of those slots, [S, K, D]; without
    slots, the new ones.
    """

    kind: Any
    row_starts: torch.Tensor
    key_starts: torch.Tensor
    most_rows: int
    most_keys: int
    read: torch.Tensor
    written: torch.Tensor
    views: tuple[torch.Tensor, torch.Tensor] | None
    size: int
    update: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def pages_of(cache: Any, index: int, kwargs: dict[str, Any]) -> Pages:
    """Read either form of the cache: an allocator per layer or, before transformers 5.18, groups of layers."""
    if hasattr(cache, "layer_to_allocator"):
        pool = cache.layer_to_allocator[index]
        kind, size = pool.index, pool.tokens_per_page
        try:
            views = pool.get_cache_for_block_table(index)
        except NotImplementedError:  # a layer with a window: a ring buffer of the last keys
            views = None
        has_window = views is None
    else:
        # keys and values are in separate storages, which no view joins into a cache: they are gathered
        (kind, _), size, views = cache.layer_index_to_group_indices[index], 0, None
        has_window = cache.sliding_windows[index] != 1
    layer_type = "sliding_attention" if has_window else "full_attention"
    # from transformers 5.19 on bounds have these names, and the cache takes the step's arguments together
    together = "max_length_k" in kwargs
    names = ("max_length_q", "max_length_k") if together else ("max_seqlen_q", "max_seqlen_k")
    most_rows, most_keys = (kwargs[name] for name in names)
    lists = {name: kwargs[name] for name in ("read_index", "write_index")}
    read, written = (slots[kind] for slots in lists.values())

    def update(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {**lists, "read_index": [slots] * len(lists["read_index"])}  # the cache reads that of the layer's kind
        if not together:
            return cache.update(key, value, layer_idx=index, **given)  # type: ignore[no-any-return]
        key, value = cache.update(key, value, layer_idx=index, kwargs={**kwargs, **given})
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    return Pages(
        kind=kind,
        row_starts=kwargs["cu_seq_lens_q"],
        key_starts=_of(layer_type, kwargs["cu_seq_lens_k"]),
        most_rows=most_rows,
        most_keys=_of(layer_type, most_keys),
        read=read,
        written=written,
        views=views,
        size=size,
        update=update,
    )


def in_place(backend: Any, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
    """View transformers' pages of one layer, keys and values [N, P, K, D] in one storage, as a cache of a backend."""
    apart = value_pages.storage_offset() - key_pages.storage_offset()
    both = key_pages.as_strided((2, *key_pages.shape), (apart, *key_pages.stride()), key_pages.storage_offset())
    return caches.in_layout(backend, both)


def _of(layer_type: str, given: Any) -> Any:
    """Return what is given for a type of layers; before transformers 5.19 a model with one type has no dictionary."""
    return given[layer_type] if isinstance(given, dict) else given
