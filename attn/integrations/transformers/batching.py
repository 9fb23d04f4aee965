"""Continuous batching, in transformers' pages if a layer keeps all of its keys in them."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import NAME, Call, replaced, requested, widened
from attn.integrations.transformers.packing import attend_packed, layer_of, size_for
from attn.integrations.transformers.versions import WINDOWS_IN_PAGES, dotted, installed
from attn.torch import kv_cache as caches
from attn.torch.layer import Attention

#: A name that continuous batching accepts for an implementation without masks: transformers looks for "flash" in the name,
#: and some versions also for the prefix.
PAGED, PREFIX = "attn_flash", "paged|"


def paged_backends() -> list[str]:
    """Return the names of the torch backends with a paged cache of keys and values."""
    known = [member for member in AttentionBackendEnum if str(member.value or "").startswith("attn.torch.")]
    return [member.name for member in known if ".mla." not in str(member.value)]


def paged_name() -> str:
    """Return a name that the installed transformers accepts for continuous batching without masks."""
    from transformers import AttentionInterface

    prefixed = f"{PREFIX}flash_attention_2" in AttentionInterface._global_mapping
    return f"{PREFIX}{PAGED}" if prefixed else PAGED


def refuse_unpaged(model: Any, backend: str | None) -> None:
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"{name}: multi-head latent attention (kv_lora_rank={config.kv_lora_rank}) not supported: transformers' continuous "
            f'batching only supports keys and values of equal size; use model.generate with attn_implementation="{NAME}"'
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedError(
            f"{name}: chunked attention (attention_chunk_size={config.attention_chunk_size}) in continuous batching "
            "not supported: transformers does not pass the chunk to its layers; "
            f'use model.generate with attn_implementation="{NAME}"'
        )
    if _windows(config) != {None} and installed() < WINDOWS_IN_PAGES:
        raise UnsupportedError(
            f"{name}: a sliding window in continuous batching not supported: transformers {dotted(installed())} reads wrong "
            f"keys from its pages (pip install 'transformers>={dotted(WINDOWS_IN_PAGES)}', or use model.generate)"
        )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    for window in _windows(config):
        asked, asked_by = requested(backend, True, window is not None)
        if asked is None:
            continue
        where = name if backend else f"{name} ({asked_by})"
        AttentionBackendEnum[asked]  # raises ValueError with the closest name for an unknown one
        if asked not in paged_backends():
            what = f"{asked} has no torch layer with a paged cache of keys and values"
            raise UnsupportedError(f"{where}: {what}; use {', '.join(paged_backends())}")
        try:
            Attention(
                heads,
                size,
                num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
                dtype=model.dtype,
                backend=asked,
                sliding_window=window,
                block_size=size_for(asked),
                logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}", error.reasons) from None


@contextlib.contextmanager
def without_graphs(model: Any) -> Generator[None, None, None]:
    """Within the block, the model's continuous batching captures no CUDA graphs; by default it does on a GPU for every
    implementation without masks. `attend_paged` reads the requests' lengths on the host, which a capture cannot do.

    Starting it raises `UnsupportedError` if its configuration, or a manager kept from before, asks for graphs.
    """
    start, name = model.init_continuous_batching, type(model).__name__
    before = vars(model).get("init_continuous_batching")

    def init_continuous_batching(
        generation_config: Any = None, continuous_batching_config: Any = None, *rest: Any, **more: Any
    ) -> Any:
        from transformers.generation import ContinuousBatchingConfig  # type: ignore[attr-defined]

        config = continuous_batching_config
        if config is None:
            general = model.generation_config if generation_config is None else generation_config
            config = getattr(general, "continuous_batching_config", None) or ContinuousBatchingConfig()
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        if _asks_for_graphs(config):
            raise UnsupportedError(
                f"{name}: use_cuda_graph={config.use_cuda_graph} in continuous batching not supported: lengths are read on "
                "the host; leave use_cuda_graph at None, or set it to False"
            )
        if _asks_for_graphs(getattr(kept, "continuous_batching_config", None)):
            raise UnsupportedError(
                f"{name}: a continuous batching manager kept from before replays the CUDA graphs of another implementation: "
                "call model.destroy_cached_continuous_batching_manager() first"
            )
        config = copy.copy(config)
        config.use_cuda_graph = False
        return start(generation_config, config, *rest, **more)

    model.init_continuous_batching = init_continuous_batching
    try:
        yield
    finally:
        del model.init_continuous_batching
        if before is not None:
            model.init_continuous_batching = before


def _asks_for_graphs(config: Any) -> bool:
    """Whether a configuration of continuous batching asks for CUDA graphs: a bool, or one for each of two paths."""
    asked = getattr(config, "use_cuda_graph", None)
    return any(asked) if isinstance(asked, tuple) else bool(asked)


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _windows(config: Any) -> set[int | None]:
    """Return the windows of a model's layers, None for full ones."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return {getattr(config, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds}


def attend_paged(call: Call, cache: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Attend one packed row of requests [1, T, ...] over transformers' `PagedAttentionCache`; padding rows are 0.

    Reads lengths on the host. Raises `UnsupportedError` while a CUDA graph is captured.
    """
    if _capturing(call.query):
        raise call.refusal(
            "continuous batching while a CUDA graph is captured",
            "use paged(model), or ContinuousBatchingConfig(use_cuda_graph=False)",
        )
    pages = _pages(cache, call.module.layer_idx, kwargs)
    step = _step_of(cache, call.module.layer_idx, kwargs["cu_seq_lens_q"])
    rows, query = int(step.starts[-1]), call.query[0]
    out = torch.zeros_like(query[..., : call.value.shape[-1]])
    if pages.views is not None and pages.read.numel() and call.value.shape[-1] == query.shape[-1]:
        layer = layer_of(call, AttentionType.DECODER, pages.size)
        kv_cache = _in_place(layer.backend, *pages.views)
        layer.impl.do_kv_cache_update(layer, call.key[0], call.value[0], kv_cache, pages.written)
        result = layer(query[:rows], None, None, kv_cache, step.metadata(pages, layer, query.device))
    else:
        q_lens, k_lens, key_starts = step.lens(pages)
        key, value = (x[: int(key_starts[-1])] for x in pages.update(call.key.transpose(1, 2), call.value.transpose(1, 2)))
        packed = replaced(call, key=key[None], value=value[None])
        result = attend_packed(call, query[:rows], key, widened(packed)[0], q_lens, k_lens)
    out[: len(result)] = result[..., : out.shape[-1]]
    return out[None]


class _Step:
    """What the layers of one step have in common: lengths on the host, and the metadata of each kind of layer.

    starts: where each request's rows begin, on the host. Reading lengths waits for the device, so it is done once a step and
    kind of layer, not in every layer.
    """

    def __init__(self, starts: torch.Tensor, layer_idx: int) -> None:
        self.given, self.last = weakref.ref(starts), layer_idx
        self.starts = starts.cpu().numpy()
        self._lens: dict[Any, tuple[list[int], list[int], Any]] = {}
        self._metadata: dict[Any, Any] = {}

    def lens(self, pages: "_Pages") -> tuple[list[int], list[int], Any]:
        """Return (numbers of rows, numbers of keys, where each request's keys begin), of requests that have both."""
        if pages.kind not in self._lens:
            key_starts = pages.key_starts.cpu().numpy()
            q_lens, k_lens = np.diff(self.starts), np.diff(key_starts)
            live = (q_lens > 0) & (k_lens > 0)
            self._lens[pages.kind] = q_lens[live].tolist(), k_lens[live].tolist(), key_starts
        return self._lens[pages.kind]

    def metadata(self, pages: "_Pages", layer: Attention, device: torch.device) -> Any:
        """Return the metadata of a layer over transformers' pages."""
        key = pages.kind, layer.backend, layer.kv_cache_spec, device
        if key not in self._metadata:
            q_lens, k_lens, key_starts = self.lens(pages)
            where, size = pages.read.cpu().numpy(), pages.size
            ends = zip(key_starts[:-1], key_starts[1:], np.diff(self.starts), strict=True)
            table: list[Any] = [where[start:end:size] // size for start, end, rows in ends if rows > 0 and end > start]
            batch = CommonAttentionMetadata.from_lens(q_lens, k_lens, table, size)
            self._metadata[key] = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=device).build(0, batch)
        return self._metadata[key]


_steps: "weakref.WeakKeyDictionary[Any, _Step]" = weakref.WeakKeyDictionary()


def _step_of(cache: Any, layer_idx: int, starts: torch.Tensor) -> _Step:
    """Return the step that a layer's call is part of: that of the layer before, if it was given the same tensor.

    transformers may write the next step's lengths into the same tensor, but then begins with a layer that has had its turn.
    """
    step = _steps.get(cache)
    if step is None or step.given() is not starts or layer_idx <= step.last:
        step = _steps[cache] = _Step(starts, layer_idx)
    step.last = layer_idx
    return step


@dataclass(frozen=True)
class _Pages:
    """One layer's state in transformers' cache in one step.

    kind: what layers have in common that read the same keys; key_starts: where each request's keys begin; read, written:
    slots of all keys and of the new ones; views: the layer's keys and values as pages [N, P, K, D] if it keeps all of them in
    pages, else None; size: tokens per page; update: takes new keys and values [1, K, T, D], and returns all, [S, K, D].
    """

    kind: Any
    key_starts: torch.Tensor
    read: torch.Tensor
    written: torch.Tensor
    views: tuple[torch.Tensor, torch.Tensor] | None
    size: int
    update: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _pages(cache: Any, index: int, kwargs: dict[str, Any]) -> _Pages:
    """Read either form of the cache: an allocator per layer or, before transformers 5.18, groups of layers."""
    named = {name: kwargs[name] for name in ("read_index", "write_index")}
    if hasattr(cache, "layer_to_allocator"):
        pool = cache.layer_to_allocator[index]
        try:
            views = pool.get_cache_for_block_table(index)
        except NotImplementedError:  # a layer with a window: a ring buffer of the last keys
            views = None

        def update(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=dict(kwargs))
            return key[0].transpose(0, 1), value[0].transpose(0, 1)

        starts, (read, written) = kwargs["cu_seq_lens_k"][pool.layer_type], (x[pool.index] for x in named.values())
        return _Pages(pool.index, starts, read, written, views, 0 if views is None else pool.tokens_per_page, update)
    group, _ = cache.layer_index_to_group_indices[index]
    starts = kwargs["cu_seq_lens_k"]
    if isinstance(starts, dict):
        starts = starts["full_attention" if cache.sliding_windows[index] == 1 else "sliding_attention"]
    # keys and values are in separate storages, which no view joins into a cache: they are gathered
    read, written = (x[group] for x in named.values())
    return _Pages(group, starts, read, written, None, 0, functools.partial(cache.update, layer_idx=index, **named))


def _in_place(backend: Any, key_pages: torch.Tensor, value_pages: torch.Tensor) -> torch.Tensor:
    """View transformers' pages of one layer, keys and values [N, P, K, D] in one storage, as a cache of a backend."""
    apart = value_pages.storage_offset() - key_pages.storage_offset()
    both = key_pages.as_strided((2, *key_pages.shape), (apart, *key_pages.stride()), key_pages.storage_offset())
    return caches.in_layout(backend, both)
