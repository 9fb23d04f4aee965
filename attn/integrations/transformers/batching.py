"""Continuous batching, in transformers' pages if a layer keeps all of its keys in them.

A backend that reads lengths on the device only takes them from transformers' arrays there, and transformers captures its steps
in CUDA graphs, as it does by default. For any other backend they are read on the host, and graphs are off.
"""

import contextlib
import copy
import importlib
import sys
import weakref
from collections.abc import Generator
from typing import Any

import torch

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import AttentionType, supports_size
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import NAME, ModuleCall, replaced, requested, visible, widened
from attn.integrations.transformers.packing import attend_packed, layer_of, size_for
from attn.integrations.transformers.steps import (
    BatchingStep,
    LayerCache,
    attends_again,
    cache_view,
    pages_of,
    step_of,
    was_served,
)
from attn.selector import selection_state
from attn.torch import kv_cache as caches
from attn.torch.layer import Attention, layers_on

#: The oldest supported transformers, and the oldest whose continuous batching reads a window's keys correctly.
OLDEST, WINDOWS_IN_PAGES = (5, 4), (5, 16)
#: The oldest whose CUDA graphs of continuous batching suit every step that they are replayed for: older ones keep the largest
#: length of the step that was captured. The oldest that stores a layer's keys and values in one tensor.
GRAPHS, JOINED = (5, 6), (5, 18)
#: The oldest whose models store a step's keys themselves, and pass all keys of its requests, gathered, to an implementation.
STORED_BY_MODELS = (5, 24)
#: A name that continuous batching accepts for an implementation without masks: transformers looks for "flash" in the name,
#: and some versions also for the prefix.
PAGED, PREFIX = "attn_flash", "paged|"
_GATHERED = 64  #: tokens per page of gathered keys
#: The share of free memory for the cache, where the configuration says none and keys are gathered: transformers' own (0.9)
#: leaves less than its largest step then needs.
_SHARE = 0.5


def installed() -> tuple[int, int]:
    """Return (major, minor) of the installed transformers."""
    from transformers import __version__

    major, minor, *_ = __version__.split(".")
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def paged_backends() -> list[str]:
    """Return the names of the torch backends with a paged cache of keys and values."""
    # by path, without importing the backends
    known = [member for member in AttentionBackendEnum if str(member.value or "").startswith("attn.torch.")]
    return [member.name for member in known if ".mla." not in str(member.value)]


def paged_name() -> str:
    """Return a name that the installed transformers accepts for continuous batching without masks."""
    from transformers import AttentionInterface

    # versions that require the prefix list their own implementations with it
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
    for window in _windows(config):
        _, request = requested(selection_state(), backend, True, window)
        named = request.backend
        if named is None:
            continue
        where = name if backend else f"{name} ({request.source})"
        AttentionBackendEnum[named]  # raises ValueError with the closest name for an unknown one
        if named not in paged_backends():
            reason = f"{named} has no torch layer with a paged cache of keys and values"
            raise UnsupportedError(f"{where}: {reason}; use {', '.join(paged_backends())}")
        try:
            # A layer with the model's heads and features is refused here, with reasons, instead of in the first step.
            _layer_of_model(model, window, named, size_for(named))
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}", error.reasons) from None


def _layer_of_model(model: Any, window: int | None, backend: str | None, block_size: int) -> Attention:
    """Return a layer as the model's layers with a window (None: without one) will need it."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    # configurations do not say so; parameters of that name do (gpt-oss)
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    with layers_on(model.device):
        return Attention(
            heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            dtype=model.dtype,
            backend=backend,
            sliding_window=window,
            block_size=block_size,
            logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
            sinks=torch.zeros(heads) if has_sinks else None,
        )


@contextlib.contextmanager
def graphs_where_possible(model: Any, backend: str | None) -> Generator[None, None, None]:
    """Within the block, the model's continuous batching captures CUDA graphs, as it does by default on a GPU for every
    implementation without masks, if every layer's backend can be captured (`why_no_graphs`); else it captures none.

    Starting it raises `UnsupportedError` if its configuration asks for graphs that cannot be captured, or if a manager kept
    from before has graphs of another implementation.
    """
    # The bound method, or what another block put in its place: blocks may be nested.
    start, name, implementation = model.init_continuous_batching, type(model).__name__, model.config._attn_implementation
    before = vars(model).get("init_continuous_batching")

    def init_continuous_batching(
        generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **more: Any
    ) -> Any:
        from transformers.generation import ContinuousBatchingConfig  # type: ignore[attr-defined]

        config = continuous_batching_config
        if config is None:
            general = model.generation_config if generation_config is None else generation_config
            config = getattr(general, "continuous_batching_config", None) or ContinuousBatchingConfig()
        why = why_no_graphs(model, backend, config)
        if why and _asks_for_graphs(config):
            raise UnsupportedError(
                f"{name}: use_cuda_graph={config.use_cuda_graph} in continuous batching not supported: {why}; "
                "leave use_cuda_graph at None, or set it to False"
            )
        # transformers keeps a manager with its graphs, which a block for another backend would replay
        cached_manager = getattr(model, "_cached_continuous_batching_manager", None)
        has_graphs = _asks_for_graphs(getattr(cached_manager, "continuous_batching_config", None))
        if has_graphs and _implementations.get(cached_manager) != implementation:
            raise UnsupportedError(
                f"{name}: a continuous batching manager kept from before replays the CUDA graphs of another implementation: "
                "call model.destroy_cached_continuous_batching_manager() first"
            )
        if why:
            config = copy.copy(config)
            config.use_cuda_graph = False
        elif installed() < JOINED and config.max_memory_percent is None and config.num_blocks is None:
            config = copy.copy(config)
            config.max_memory_percent = _SHARE
        manager = start(generation_config, config, *args, **more)
        _implementations[manager] = implementation
        return manager

    model.init_continuous_batching = init_continuous_batching
    try:
        yield
    finally:
        del model.init_continuous_batching
        if before is not None:
            model.init_continuous_batching = before


def hand_over_caches() -> None:
    """Let `attend_paged` store keys and read pages, as with older versions: for good, for models of its names only.

    The caches of `STORED_BY_MODELS` and later then leave an update to it: a layer passes its new keys on, and `cache_of` finds
    their cache, for layers too that share the keys of an earlier one and store none (Gemma 3n).
    """
    if installed() < STORED_BY_MODELS:
        return
    from transformers.generation.continuous_batching import PagedAttentionCache

    update: Any = PagedAttentionCache.update
    # done before
    if update.__module__ == __name__:
        return

    def handed_over(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *kwargs: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The call of `attend_paged` itself, which stores, and models of other implementations.
        if "cache" in named.get("kwargs", {}) or PAGED not in (self.config._attn_implementation or ""):
            return update(self, key_states, value_states, layer_idx, *kwargs, **named)  # type: ignore[no-any-return]
        key_states.attn_stored = self, value_states  # type: ignore[attr-defined]
        return key_states, value_states

    PagedAttentionCache.update = handed_over  # type: ignore[method-assign]


def cache_of(module: Any, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Return the cache that was to store these keys and values. Raises `UnsupportedError` if a layer stores others."""
    cache, stored = getattr(key, "attn_stored", (None, None))
    if cache is None or stored is not value:
        raise UnsupportedError(
            f"{type(module).__name__}: continuous batching not supported: its keys and values are not the ones that it stores; "
            f'use model.generate with attn_implementation="{NAME}"'
        )
    return cache


@contextlib.contextmanager
def every_step_served(model: Any) -> Generator[None, None, None]:
    """Within the block, a step of continuous batching raises `UnsupportedError` if no layer has been given its cache.

    Layers of some models do not pass on what a step consists of (Nemotron, StableLM): its requests would see each other.
    """

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if "read_index" in kwargs and not was_served(kwargs["cache"]):
            raise UnsupportedError(
                f"{type(model).__name__}: continuous batching not supported: its layers do not pass a step's arguments on to "
                f'attention; use model.generate with attn_implementation="{NAME}"'
            )

    hook = model.register_forward_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def short_warm_up() -> Generator[None, None, None]:
    """Within the block, the request that transformers makes up to capture its largest step has no more older keys than rows.

    In 5.20 and before, its keys fill the cache: attention of 8,192 rows over millions of keys, computed twice, takes seconds.
    5.23 limits them too. The step is padded to the same extents, by which later graphs fit in its memory.
    """
    package, name = "transformers.generation.continuous_batching", "create_warmup_future_states"
    caller: Any = importlib.import_module(f"{package}.continuous_api")  # the caller in 5.6, which has no other module
    # where versions after 5.6 call it from
    caller = sys.modules.get(f"{package}.model_runner", caller)
    make = getattr(caller, name, None)
    # a version without this function makes no such request here
    if make is None:
        yield
        return
    setattr(caller, name, lambda num, status, rows, older, cache: make(num, status, rows, min(older, rows), cache))
    try:
        yield
    finally:
        setattr(caller, name, make)


#: The implementation of each manager of continuous batching that was started here.
_implementations: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def why_no_graphs(model: Any, backend: str | None, batching: Any) -> str:
    """Return why a model's continuous batching, as configured, cannot be captured in CUDA graphs; "" if it can."""
    if installed() < GRAPHS:
        return f"transformers {dotted(installed())} replays graphs of shorter requests for longer ones"
    for window in _windows(model.config.get_text_config(decoder=True)):
        named = requested(selection_state(), backend, True, window)[1].backend
        # layers with a window keep a ring of their last keys, which is gathered
        in_pages = window is None and installed() >= JOINED
        layer = _layer_of_model(model, window, named, batching.page_size if in_pages else _size_of_gathered(named))
        if not _is_captured(layer):
            return f"{layer.selection.name} reads lengths on the host"
    return ""


def _asks_for_graphs(config: Any) -> bool:
    """Whether a configuration of continuous batching asks for CUDA graphs: a bool, or one for each of two paths."""
    use_cuda_graph = getattr(config, "use_cuda_graph", None)
    return any(use_cuda_graph) if isinstance(use_cuda_graph, tuple) else bool(use_cuda_graph)


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _windows(config: Any) -> set[int | None]:
    """Return the windows of a model's layers, None for full ones."""
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    return {
        getattr(config, "sliding_window", None) if layer_type == "sliding_attention" else None for layer_type in layer_types
    }


def attend_paged(call: ModuleCall, cache: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Attend one packed row of requests [1, T, ...] over transformers' `PagedAttentionCache`; padding rows are 0.

    Reads nothing on the host for a backend that does not; for any other it reads lengths there, and raises `UnsupportedError`
    while a CUDA graph is captured.
    """
    capturing = _capturing(call.query)
    pages = pages_of(cache, call.module.layer_idx, kwargs)
    if pages.window is not None and call.seen.layer.window[0] is None:
        call.seen = visible(True, pages.window)  # a layer may leave its window to masks (Phi-3.5-MoE), of which there are none
    if attends_again(cache, call.module.layer_idx, kwargs["cu_seq_lens_q"]) and not capturing:
        raise call.refusal("continuous batching of a layer that attends twice in a step", "use model.generate")
    step = step_of(cache, call.module.layer_idx, kwargs["cu_seq_lens_q"], capturing)
    # a cache of this library has keys and values of one width
    views = pages.views if call.value.shape[-1] == call.query.shape[-1] else None
    size = _size_of_gathered(call.backend) if views is None else views[0].shape[1]
    layer = layer_of(call, AttentionType.DECODER, size)
    if _is_captured(layer):
        return _attend_on_device(call, pages, step, layer, views)
    if capturing:
        raise call.refusal(
            "continuous batching while a CUDA graph is captured",
            "use paged(model), or ContinuousBatchingConfig(use_cuda_graph=False)",
        )
    # rows of requests; those behind them are padding
    rows, query = int(step.starts[-1]), call.query[0].transpose(0, 1)
    out = torch.zeros_like(query[..., : call.value.shape[-1]])
    # a step without older keys has no list of pages to read: its own keys are attended as they are
    if views is not None and len(pages.read):
        kv_cache = _updated(call, pages, layer, views)
        result = layer(query[:rows], None, None, kv_cache, step.metadata(pages, layer, query.device))
    else:
        q_lens, k_lens, key_starts = step.lens(pages)
        updated = pages.update(call.key, call.value, pages.read)
        key, value = (x[None, : int(key_starts[-1])].transpose(1, 2) for x in updated)
        result = attend_packed(replaced(call, query=call.query[:, :, :rows], key=key, value=value), q_lens, k_lens)
    out[: len(result)] = result[..., : out.shape[-1]]
    return out[None]


def _updated(call: ModuleCall, pages: LayerCache, layer: Attention, views: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Write a step's new keys and values to transformers' pages; return these as a cache of the layer's backend."""
    kv_cache = cache_view(layer.backend, *views)
    layer.impl.do_kv_cache_update(layer, call.key[0].transpose(0, 1), call.value[0].transpose(0, 1), kv_cache, pages.written)
    return kv_cache


def _attend_on_device(
    call: ModuleCall, pages: LayerCache, step: BatchingStep, layer: Attention, views: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Attend without reading anything on the host: over transformers' pages, or over pages made of the step's keys."""
    rows, width = call.query.shape[2], call.value.shape[-1]
    batch = step.on_device(pages, layer, rows, gathered=views is None)
    if views is not None:
        kv_cache = _updated(call, pages, layer, views)
    else:
        assert batch.taken is not None and batch.slots is not None
        # the places of gathered keys, or none, for which the cache returns the new ones
        slots = batch.slots if len(pages.read) else pages.read
        key, value = pages.update(call.key, call.value, slots)
        if not len(pages.read):
            key, value = (x.index_select(0, batch.taken) for x in (key, value))
        value = widened(replaced(call, value=value))
        # [2, S, K, D], whose tokens are pages of `block_size` in a row
        both = torch.stack((key, value))
        kv_cache = caches.in_layout(layer.backend, both.unflatten(1, (-1, layer.kv_cache_spec.block_size)))
    out = layer(call.query[0].transpose(0, 1), None, None, kv_cache, batch.metadata)
    return out.masked_fill_(batch.padding[:, None, None], 0)[None, ..., :width]  # type: ignore[no-any-return]


def _is_captured(layer: Attention) -> bool:
    """Whether a layer computes batches whose lengths are on the device only, so that a CUDA graph can capture it.

    `torch.compile` traces an implementation that reads no values of tensors.
    """
    return layer.impl.traceable and hasattr(layer.backend.get_builder_cls(), "build_for_cudagraph_capture")


def _size_of_gathered(backend: str | None) -> int:
    """Return the tokens per page of gathered keys: each request begins on a new page, and kernels read whole tiles of keys."""
    cls: Any = None if backend is None else AttentionBackendEnum[backend].get_class()
    is_supported = cls is None or supports_size(_GATHERED, cls.get_supported_kernel_block_size())
    return _GATHERED if is_supported else size_for(backend)
