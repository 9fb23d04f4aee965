"""`attn.torch.Attention` and `MLAAttention`: attention layers as `nn.Module`s, which choose their backend at construction.

A layer follows its model: `.to(device)` moves its scales and sinks, and `.to(torch.bfloat16)` selects its backend again for
that dtype, or raises where none serves it; caches are then made again, by `new_kv_cache`. A layer is made for this machine's
accelerator; one that is on the host selects again when it makes its first batch or cache there.

Both work in graphs (`torch.compile(fullgraph=True)`, `torch.export`) with any backend; see `attn.torch.graphs`.

Tensor parallelism shards heads: each rank builds a layer with its own heads (num_heads / ranks, num_kv_heads / ranks, its
share of sinks and slopes) and its own cache, without communication. Local tensors, such as outputs of ColwiseParallel
projections, need nothing else. For DTensors sharded by heads use `local_map`, with the cache and the metadata in the closure:

    heads = [Shard(1)]
    attend = local_map(lambda q, k, v: layer(q, k, v, cache, metadata), heads, (heads, heads, heads), device_mesh=mesh)
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attn import recording
from attn.backends.abstract import AttentionImpl
from attn.capabilities import Request
from attn.errors import BackendLoadError, UnsupportedError
from attn.layer import BaseAttention, BaseLayer, BaseMLAAttention
from attn.torch import graphs
from attn.torch.autocast import lossy
from attn.torch.ops import cast_by
from attn.torch.platforms import TorchPlatform, platform, platform_of

if TYPE_CHECKING:  # loaded with the backends that are chosen
    from attn.torch.backends._paged import PagedAttentionImpl
    from attn.torch.backends.mla._mla import MLACommonImpl

#: Buffers that keep their dtype: the scales of a cache, and sinks that are not a parameter.
_KEPT = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "sinks")
#: Default devices that do not place a layer: its batches and caches are on the default device of their own time. Weights of a
#: model created on "meta" are loaded elsewhere.
_NOWHERE = ("cpu", "meta")
_made_on = contextvars.ContextVar[torch.device | None]("attn_layers_made_on", default=None)


@contextlib.contextmanager
def layers_on(device: torch.device) -> Iterator[None]:
    """Place the layers that are created within the block on `device`, also on the host of a machine with a GPU."""
    token = _made_on.set(device)
    try:
        yield
    finally:
        _made_on.reset(token)


@torch.compiler.assume_constant_result
def _warn_in_graph() -> None:
    """Warn, while a graph is traced, that its calls are not recorded."""
    recording.warn_valueless("in a graph of torch.compile")


class _Module(BaseLayer, nn.Module):
    """Stores the scales as buffers, which move with the module and are never cast."""

    #: The arguments of the selection: the requested name or None, `return_lse`, and the implementation's arguments.
    _made_from: tuple[Any, bool, dict[str, Any]]
    _q_scale: torch.Tensor
    #: The device that the layer was created on (`with torch.device(...)`) or moved to; None: neither.
    _home: torch.device | None = None
    #: The platform to select for; None: this machine's accelerator, as a layer is made before its model is moved there.
    _selects_for: str | None = None
    _unserved = ""  #: the platform for which no backend was found
    #: Whether a batch or a cache of a layer without a home is on an accelerator; later ones on the host are then for copies.
    _accelerated = False

    def __init__(self) -> None:
        super().__init__()
        #: Buffers that moved to "meta", from which `.to_empty()` brings back scales, which no checkpoint holds.
        self._before_meta: dict[str, torch.Tensor] = {}
        # A model that is created under `with torch.device("cuda")` has its layers there, though they have no parameters.
        default = torch.get_default_device()
        self._home = _made_on.get() or (None if default.type in _NOWHERE else default)
        self._selects_for = None if self._home is None else platform_of(self._home.type)

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.get_default_dtype()

    def _own_device(self) -> torch.device | None:
        """The device that the layer was created on or moved to."""
        return self._home

    def _platform(self) -> TorchPlatform | None:
        return platform(self._selects_for) if self._selects_for is not None else None

    def _placed(self, device: torch.device | str | None) -> torch.device | str:
        own = self._own_device()
        device = (torch.get_default_device() if own is None else own) if device is None else device
        name = platform_of((torch.device(device) if own is None else own).type)
        if name not in (self.selection.device.platform, self._unserved, None) and not (name == "cpu" and self._accelerated):
            before, self._selects_for = self._selects_for, name
            try:
                self._choose_again(self.selection.request)
            except (UnsupportedError, BackendLoadError):  # the call says what is on which device
                self._selects_for, self._unserved = before, name
        if own is None and name not in ("cpu", None):
            self._accelerated = True
        return device

    def _keep_scale(self, name: str, scale: torch.Tensor) -> None:
        if scale.ndim == 0:
            setattr(self, f"{name}_float", float(scale))
        self.register_buffer(name, scale if self._home is None else scale.to(self._home), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move scales and sinks with the module without casting them, and select a backend for a new dtype of activations."""
        # `nn.Module` passes a function only; what it does to dtypes shows when it converts an empty tensor.
        dtype = cast_by(fn, self.selection.request.dtype, self._q_scale.device)
        if dtype != self.selection.request.dtype:
            # Before anything is moved: a dtype that no backend serves raises and leaves the layer as it was.
            self._choose_again(replace(self.selection.request, dtype=dtype))
        buffers = {name: values for name, values in self._buffers.items() if name in _KEPT and values is not None}
        super()._apply(fn, recurse)
        for name, values in buffers.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.device != values.device:
                self._home, self._accelerated = moved.device, False
            if values.is_meta:
                values = self._before_meta.get(name, values)
            elif moved.is_meta:
                self._before_meta[name] = values
            # the values from before, moved: `.half()` would have rounded them, and `.to_empty()` has none
            self._buffers[name] = moved if values.is_meta else values.to(moved.device)
        return self

    def _choose(self, request: Request, backend: Any, return_lse: bool, **arguments: Any) -> None:
        super()._choose(request, backend, return_lse, **arguments)
        self._made_from = backend, return_lse, arguments

    def _choose_again(self, request: Request) -> None:
        """Select a backend for another dtype or device. Raises `UnsupportedError` with every reason if none serves it."""
        backend, return_lse, arguments = self._made_from
        self._choose(request, backend, return_lse, **arguments)
        self.kv_cache_spec = replace(self.kv_cache_spec, dtype=request.dtype)
        self._unserved = ""
        self._finish()

    def _in_graph(self) -> None:
        if self.recorder is not None:
            _warn_in_graph()

    def _recorded(self, *arguments: Any) -> Any:
        assert self.recorder is not None
        return self.recorder.call(self, lambda: self.impl.forward(self, *arguments), recording.Arguments(*arguments))

    def _with_weights(self, result: Any, *arguments: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            raise UnsupportedError("return_weights=True in a graph not supported: call the layer outside of torch.compile")
        with torch.no_grad():
            return super()._with_weights(result, *arguments)

    def extra_repr(self) -> str:
        return f"{self.selection.name}, {self.selection.request}"


class Attention(BaseAttention, _Module):
    __doc__ = BaseAttention.__doc__

    framework = "torch"
    impl: "PagedAttentionImpl"
    #: [H]: the parameter that was passed as sinks; else a float32 buffer; None without sinks.
    sinks: torch.Tensor | None
    #: Whether `sinks` are a parameter of another dtype, of which the implementation reads a copy.
    _casts_sinks = False

    def _finish(self) -> None:
        sinks = self._made_from[2].get("sinks")
        # The first call registers them; later ones follow a new dtype, and must not replace values that were loaded meanwhile.
        if not hasattr(self, "sinks"):
            if sinks is None or isinstance(sinks, nn.Parameter):
                self.register_parameter("sinks", sinks)
            else:
                self.register_buffer("sinks", self.impl.sinks)
        self._share_sinks()
        # The text from which a graph rebuilds the implementation; "" where graphs trace the implementation itself.
        is_traced = self.impl.traceable and type(self.impl).traces is AttentionImpl.traces  # every call
        self.graph_key = "" if is_traced else graphs.paged_key(self.impl, self.kv_cache_spec)

    def _share_sinks(self) -> None:
        """Let the implementation read this module's sinks, as float32. Numbers that moved to "meta" keep their values there."""
        if self.sinks is not None and ("sinks" in self._parameters or not self.sinks.is_meta):
            self._casts_sinks = self.sinks.dtype != torch.float32
            self.impl.sinks = self.sinks.detach().float() if self._casts_sinks else self.sinks

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._share_sinks()
        return self

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any,
        return_weights: bool = False,
    ) -> Any:
        """Attend. Returns [T, H, D]; see `AttentionImpl.forward`.

        query: [T, H, D] (or [T, H * D]); key, value: [T, K, D], written to `kv_cache`, which changes in place.
        return_weights: return each request's attention weights too, last: a list of [H, n, m] float32 (`attn.weights`).
        """
        if lossy(query):
            with torch.autocast(query.device.type, enabled=False):
                return self.forward(query, key, value, kv_cache, attn_metadata, return_weights)
        if self._casts_sinks:
            self._share_sinks()  # values that were loaded or trained since
        if return_weights:
            result = self.forward(query, key, value, kv_cache, attn_metadata)
            return self._with_weights(result, query, key, value, kv_cache, attn_metadata)
        if torch.compiler.is_compiling():
            self._in_graph()
            # A pair may be traced for some batches only: its members' batches decide which backends serve.
            if attn_metadata is not None and not self.impl.traces(attn_metadata):
                shape = (self.impl.num_heads, self.impl.head_size)
                return graphs.call(self, query, key, value, kv_cache, attn_metadata, shape)
        elif self.recorder is not None:
            return self._recorded(query, key, value, kv_cache, attn_metadata)
        return self.impl.forward(self, query, key, value, kv_cache, attn_metadata)


class MLAAttention(BaseMLAAttention, _Module):
    __doc__ = BaseMLAAttention.__doc__

    framework = "torch"
    impl: "MLACommonImpl"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Absorb `kv_b_proj` for activations of `act_dtype`. Call it after every loading of weights."""
        self.impl.process_weights_after_loading(act_dtype)

    def forward(
        self,
        query: torch.Tensor,
        kv_c_normed: torch.Tensor | None,
        k_pe: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        return_weights: bool = False,
    ) -> Any:
        """Attend. Returns [T, H, Dv]; see `MLACommonImpl.forward`.

        query: [T, H, Dn + Dr], kv_c_normed: [T, L], k_pe: [T, Dr], projected, normed and rotated by the model. The new rows
        are written to `kv_cache`, which changes in place, unless kv_c_normed and k_pe are None (tokens already cached).
        return_weights: as in `Attention`.
        """
        if lossy(query):
            with torch.autocast(query.device.type, enabled=False):
                return self.forward(query, kv_c_normed, k_pe, kv_cache, attn_metadata, return_weights)
        if return_weights:
            result = self.forward(query, kv_c_normed, k_pe, kv_cache, attn_metadata)
            return self._with_weights(result, query, kv_c_normed, k_pe, kv_cache, attn_metadata)
        if torch.compiler.is_compiling():
            self._in_graph()
            if not self.impl.traceable:
                shape = (self.impl.num_heads, self.impl.v_head_dim)
                return graphs.call(self, query, kv_c_normed, k_pe, kv_cache, attn_metadata, shape)
        elif self.recorder is not None:
            return self._recorded(query, kv_c_normed, k_pe, kv_cache, attn_metadata)
        return self.impl.forward(self, query, kv_c_normed, k_pe, kv_cache, attn_metadata)

    def _own_device(self) -> torch.device:
        """The device of the up-projection's weights, which this module does not move."""
        return self.impl.up_projection().device

    def _choose_again(self, request: Request) -> None:
        before = self.impl
        super()._choose_again(request)
        # the layer's constructor sets these on the implementation that it made
        self.impl.prefill_backend, self.impl.prefill_features = before.prefill_backend, before.prefill_features

    def _finish(self) -> None:
        self.graph_key = graphs.live_key(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._finish()  # a copy is a layer of its own
