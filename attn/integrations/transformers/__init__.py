"""transformers: `attn` as an attention implementation, dense and in continuous batching. Call `register()` first.

Before that, transformers does not know these names, and its error for an unknown name lists only its own.

    from attn.integrations import transformers as attn_transformers
    attn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn")            # the fastest for each call
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn:FLASHINFER")  # this backend, or an error
    with attn_transformers.paged(model):                                                      # continuous batching
        model.generate_batch(...)

A call takes one of five routes, depending only on its requirements:

* dense: causal with as many rows as keys, single tokens, bidirectional calls, arbitrary masks: by the diffusion registry's
  choice.
* packed: other causal calls, windows, caps and sinks: rows without padding, by the attention registry's choice. CPU_ATTN,
  TORCH_SDPA and backends with Triton's kernels read keys where transformers keeps them; for any other a paged cache is created.
  A backend requested by name, for all layers or for the layer's kind (`attn.backend_per_kind`), computes every call by this
  route; dense ones that repeat are computed by the dense backend of that name, if there is one.
* paged: continuous batching, in transformers' pages if a layer keeps all of its keys in them, else over gathered keys; in CUDA
  graphs if the backend reads nothing on the host.
* formula: `attn.attention`, in float32 and differentiable, where no kernel exists: a mask together with a cap, a window or
  sinks, gradients together with these, values wider than keys.
* torch's SDPA: a bias of positions (T5) and dropout of weights, both without a cap and sinks.

A call's mask is read first (`masks`): a causal, windowed or bidirectional pattern with padding, chunks (Llama 4) and blocks of
tokens that see each other (Gemma 3's images, PaliGemma's prefix) are described, not materialised; any other mask becomes
boolean, and is recognised as a pattern where that matters. Then `dispatch` chooses the route, once for calls that repeat in
every layer and for every token; the layers of a step repeat one launch. In a graph (`torch.compile`) masks are materialised;
the dense route is traced, each other route is one operator. Single rows are an operator that CUDA graphs may capture, where the
chosen backend has one (`dense_decode`).

Arguments that change the meaning of attention are used or, if not supported (`call.UNKNOWN`), rejected with the layer's name; a
test lists every argument that transformers passes. Requested weights (`output_attentions`) are computed beside the call by the
formula (`attn.weights`).

transformers 5.4 is the oldest version with these attention and mask interfaces. Its continuous batching reads a window's keys
correctly from 5.16 on; before 5.18 it stores keys and values in separate tensors, which no view joins, so they are gathered.
From 5.24 on models store keys themselves and pass all of them on, gathered: `paged` lets them pass the cache on instead
(`hand_over_caches`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch

from attn.backends.registry import AttentionBackendEnum
from attn.errors import BackendLoadError
from attn.integrations.transformers.batching import (
    OLDEST,
    PAGED,
    PREFIX,
    attend_paged,
    cache_of,
    dotted,
    every_step_served,
    graphs_where_possible,
    hand_over_caches,
    installed,
    paged_backends,
    paged_name,
    refuse_unpaged,
    short_warm_up,
)
from attn.integrations.transformers.call import NAME, UNKNOWN, ModuleCall, refuse_unknown, request, requested
from attn.integrations.transformers.dispatch import attend, facts_of, launch_of, launched, run_for, runs, selected, weights
from attn.integrations.transformers.masks import attention_tables, has_own_attention, keys_seen, mask, own_attention
from attn.integrations.transformers.packing import BOUNDARIES, sequences
from attn.selector import selection_state
from attn.torch.autocast import autocast
from attn.torch.autocast import enabled as autocast_enabled
from attn.torch.diffusion.chosen import known

__all__ = ["mask", "paged", "register"]


def register() -> tuple[str, ...]:
    """Add "attn" and "attn:<NAME>" for each paged torch backend to transformers' implementations; may be called repeatedly.

    Returns the names; they are accepted in lower case too. Raises `BackendLoadError` if transformers is missing or older than
    these interfaces.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise BackendLoadError(
            f"transformers' attention interface cannot be imported: {error} (pip install 'transformers>={dotted(OLDEST)}')"
        ) from error
    if installed() < OLDEST:
        raise BackendLoadError(
            f"transformers {dotted(installed())} has another mask interface (pip install 'transformers>={dotted(OLDEST)}')"
        )
    for backend in (None, *paged_backends()):
        suffix = "" if backend is None else f":{backend}"
        for name in (NAME, PAGED, f"{PREFIX}{PAGED}"):
            # names of backends are written in either case elsewhere in this library
            for spelled in {f"{name}{suffix}", f"{name}{suffix.lower()}"}:
                AttentionInterface.register(spelled, _function(backend))
                # under the same name, or transformers would make masks of its own for these layers
                AttentionMaskInterface.register(spelled, mask)
    _say_where_layers_have_their_own()
    return (NAME, *(f"{NAME}:{backend}" for backend in paged_backends()))


@functools.cache
def _say_where_layers_have_their_own() -> None:
    """Let transformers' check of a new model's implementation warn where its layers will not call it: such a model keeps its
    own attention, and only those that ask for a mask are refused, at their first call. Layers that look the name up in a table
    of their model are refused when they are made, in place of a KeyError."""
    from transformers import PreTrainedModel

    checks: Any = PreTrainedModel
    check = getattr(checks, "_check_and_adjust_attn_implementation", None)
    if check is None:  # private: another version may have another
        return

    @functools.wraps(check)
    def saying_check(model: Any, implementation: Any, *args: Any, **kwargs: Any) -> Any:
        model_class: Any = type(model)
        checked = check(model, implementation, *args, **kwargs)
        if str(checked).removeprefix(PREFIX).partition(":")[0] in (NAME, PAGED):
            tables = attention_tables(model_class)

            def refuse(*_: Any, **__: Any) -> None:
                raise own_attention(model_class.__name__, checked)

            for table in tables:  # a model of several parts, each with its own implementation, may never look it up
                table[checked] = refuse
            if not tables and has_own_attention(model_class):
                warnings.warn(
                    f'{model_class.__name__}: attn_implementation="{implementation}" has no effect: its layers compute '
                    "attention without transformers' AttentionInterface",
                    stacklevel=2,
                )
        return checked

    checks._check_and_adjust_attn_implementation = saying_check


@contextlib.contextmanager
def paged(model: Any, backend: str | None = None) -> Generator[Any, None, None]:
    """Let `generate_batch` use `attn` for `model` within the block; its previous implementation is restored afterwards.

    backend: the name of a torch backend; None for the fastest for each call. Raises `ValueError` for an unknown name, and
    `UnsupportedError`, before anything runs, for a model or a backend that continuous batching does not support.

    transformers captures CUDA graphs, as it does by default on a GPU, if the backend of every layer reads lengths on the device
    (TRITON_ATTN and others with its kernels). For any other they are off, and `use_cuda_graph=True` raises `UnsupportedError`.

    transformers restricts continuous batching to implementations called eager, sdpa or flash-something, and loads the last as
    kernels; so the name is written into the config directly.
    """
    register()
    backend = None if backend is None else AttentionBackendEnum[backend].name  # it may be passed in another case
    # before the configuration is changed
    refuse_unpaged(model, backend)
    hand_over_caches()
    before = model.config._attn_implementation
    model.config._attn_implementation = paged_name() if backend is None else f"{paged_name()}:{backend}"
    try:
        with graphs_where_possible(model, backend), short_warm_up(), every_step_served(model):
            yield model
    finally:
        model.config._attn_implementation = before


#: Arguments that change how a call is computed, or that are refused.
_OTHERS = frozenset({*UNKNOWN, *BOUNDARIES, "output_attentions", "indices"})


@functools.cache
def _function(backend: str | None) -> Callable[..., Any]:
    """Make transformers' attention function for one backend."""
    from transformers.utils import output_capturing

    # What a call of the model keeps of its layers' outputs, by name: some layers do not pass `output_attentions` on.
    collector = getattr(output_capturing, "_active_collector", None)
    collected = (lambda: None) if collector is None else collector.context_var.get

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention. query: [B, H, S, D]; key: [B, K, T, D]; value: [B, K, T, Dv]. Returns ([B, S, H, Dv], None), or
        the attention weights [B, H, S, T] instead of None for `output_attentions`."""
        # The argument before the module's attribute, as transformers' own functions have it.
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        graph, facts = torch.compiler.is_compiling(), None
        if cache is None and "read_index" in kwargs:
            cache = cache_of(module, key, value)
        if not graph and (outputs := collected()) and any("attentions" in name for name in outputs):
            kwargs["output_attentions"] = True
        # Calls that need nothing but keys, a window, a cap and sinks find their launch by facts alone, without a `ModuleCall`:
        # this is what a decoded token costs in each layer.
        if not (graph or dropout or position_bias is not None) and cache is None and _OTHERS.isdisjoint(kwargs):
            if sliding_window is not None or attention_mask is not None:
                seen = keys_seen(query, key, value, attention_mask, causal, sliding_window)
            else:
                seen = key, value, None
            if seen is not None:
                keys, values, window = seen
                options = backend, causal, scaling, softcap, window, selection_state()
                facts = facts_of(query, keys, values, s_aux, options)
                run = runs.get(facts)
                # not met with these very shapes: the launch may be known by what decides it
                if run is None and facts is not None:
                    run = run_for(facts, query, keys, values, s_aux)
                if run is not None:
                    return run(query, keys, values, s_aux, None), None
        if graph:
            # In a graph nothing is cached by identity: the request is a constant of the trace.
            scaling, (pattern, requested_backend) = known(scaling), request(backend, causal, sliding_window)
        else:
            pattern, requested_backend = requested(selection_state(), backend, causal, sliding_window)
        if autocast_enabled(query.device.type):
            # as torch's own function, which this one stands for
            query, key, value = autocast(query, key, value)
        extras: dict[str, Any] = {"sinks": s_aux, "bias": position_bias, "dropout": dropout, "requested": requested_backend}
        call = ModuleCall(module, query, key, value, attention_mask, pattern, float(scaling), softcap, **extras)
        if cache is not None:
            refuse_unknown(call, kwargs)
            if kwargs.get("indices") is not None or kwargs.get("output_attentions"):
                argument = "indices of keys" if kwargs.get("indices") is not None else "output_attentions"
                raise call.refusal(f"{argument} in continuous batching", "use model.generate")
            return attend_paged(call, cache, kwargs), None
        if not _OTHERS.isdisjoint(kwargs):
            return _restricted(call, kwargs, graph)
        out = attend(call, graph)
        # made by `attend` for this module; kept for all layers and steps with these facts
        launch = None if facts is None else launch_of(call)
        if facts is not None and launch is not None:
            launched(facts, s_aux, launch)
        return out, None

    return attention


def _restricted(call: ModuleCall, kwargs: dict[str, Any], graph: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call with arguments that restrict what rows see, or that ask for weights, if they are set."""
    refuse_unknown(call, kwargs)
    wants_weights = bool(kwargs.get("output_attentions"))
    if kwargs.get("indices") is not None:
        call = selected(call, kwargs["indices"])
    if any(kwargs.get(name) is not None for name in BOUNDARIES):
        # an output only where nothing else is asked for; otherwise the boundaries become a mask
        result = sequences(call, kwargs, not (wants_weights or call.dropout or call.bias is not None))
        if isinstance(result, torch.Tensor):
            return result, None
        call = result
    if wants_weights and (graph or call.bias is not None or call.dropout):
        raise call.refusal("output_attentions in a graph, or with position_bias or dropout", "use eager")
    # before the call, which replaces its mask
    requested_weights = weights(call) if wants_weights else None
    return attend(call, graph), requested_weights
