"""A layer's whole call as one operator: how `torch.compile` and `torch.export` see a backend that they cannot trace.

Most backends read lengths on the host, plan, or call a vendor's library, none of which can be traced into a graph. In a graph,
the call of such a layer is an operator with a fake implementation (shapes only), which runs the real one when the graph runs.
Implementations that can be traced set `traceable` and are traced. The operators take only tensors and strings, so that a graph
can be serialised:

* `attn::layer`: a paged layer is described by its arguments (JSON) and rebuilt where the graph runs; an MLA layer, which has
  weights, is looked up among the live layers of this process.
* `attn::dense`: the same for a diffusion implementation's call.

A batch is represented by its tensors. The metadata object that they came from is reused if it is alive and holds these very
tensors, which saves rebuilding it in each layer; a graph in another process rebuilds it. Gradients do not flow through these
operators: for gradients use implementations that are traced (`attn.torch.scaled_dot_product_attention`, `DiffusionAttention`
over TORCH_SDPA or CUDNN_ATTN).
"""

import copy
import functools
import inspect
import itertools
import json
import weakref
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.diffusion.backends.dense import DenseCall
from attn.distributed import world_size
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.torch.alignment import aligned
from attn.torch.metadata import ARRAYS, alive

_counter = itertools.count(1)
_layers: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
_LIVE = "live:"


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _text(description: dict[str, Any]) -> str:
    return json.dumps(description, default=lambda number: number.item())  # NumPy scalars too


def uncaptured(name: str, *, mutates_args: tuple[str, ...]) -> Any:
    """Define a `custom_op` that compilers exclude from the CUDA graphs they capture, where this torch has a tag for that.

    A replay would not repeat planning or host reads.
    """
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    known = tag is not None and "tags" in inspect.signature(library.custom_op).parameters
    more: dict[str, Any] = {"tags": (tag,)} if known else {}
    return library.custom_op(name, mutates_args=mutates_args, **more)


def live_key(layer: Any) -> str:
    """Register a layer and return the key that finds it in this process for as long as it lives."""
    key = f"{_LIVE}{type(layer).__name__}-{next(_counter)}"
    _layers[key] = layer
    return key


def paged_key(impl: Any, spec: KVCacheSpec) -> str:
    """Text from which a paged implementation can be rebuilt. Its per-head vectors are passed with each call."""
    # The arguments of the constructor: a serialised graph runs in a process without the layer.
    names = ("num_heads", "head_size", "num_kv_heads", "kv_cache_dtype", "logits_soft_cap", "attn_type")
    arguments = {name: getattr(impl, name) for name in (*names, "kv_sharing_target_layer_name")}
    # as they were passed: the constructor folds the sign and completes the window again
    arguments |= {"scale": impl.signed_scale, "sliding_window": impl.window}
    reach = {name: getattr(impl.mask, name) for name in ("chunk_size", "span_window")}
    arguments |= {name: value for name, value in reach.items() if value is not None}
    described = {"impl": _path(type(impl)), "arguments": arguments, "spec": asdict(spec)}
    return _text(described | ({"batch_invariant": True} if impl.batch_invariant else {}))


@functools.lru_cache(1024)
def _made(key: str, lse: bool) -> tuple[Any, KVCacheSpec]:
    """The (impl, spec) that `paged_key`'s text describes, without per-head vectors."""
    described = json.loads(key)
    for part in (described["arguments"], described["spec"]):
        if isinstance(window := part["sliding_window"], list):
            # JSON has no tuples, which windows are
            part["sliding_window"] = tuple(window)
    # Shared by all layers with this text, which therefore have equal rules; vectors of each head come with the call.
    impl = resolve_obj_by_qualname(described["impl"])(**described["arguments"])
    impl.need_to_return_lse_for_decode = lse
    impl.batch_invariant = described.get("batch_invariant", False)
    return impl, KVCacheSpec(**described["spec"])


class _Scales:
    """A stand-in for the layer that an implementation reads the scales of a quantised cache from."""

    def __init__(self, k_scale: Tensor, v_scale: Tensor) -> None:
        self._k_scale, self._v_scale = k_scale, v_scale
        self._q_scale = self._prob_scale = torch.ones(())

    _k_scale_float = property(lambda self: float(self._k_scale))
    _v_scale_float = property(lambda self: float(self._v_scale))


class _Numbers(NamedTuple):
    """The numbers of a call, which may be symbols of a graph: of its batch (`handle`: the metadata's), and of its output."""

    handle: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: int
    num_heads: int
    width: int
    lse: int


def call(layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, out: tuple[int, int]) -> Any:
    """Call a layer's `impl.forward` as one operator of the graph. out: (heads, width) of a row of the output."""
    impl, batch = layer.impl, attn_metadata
    # The operator has no derivative: torch would compute the forward pass and fail, or cut the gradient, in the backward one.
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value)):
        raise UnsupportedError(f"{impl.backend.get_name()}: gradients in a graph not supported (call under torch.no_grad())")
    if batch is None:
        return query.new_zeros(query.shape[0], *out)
    # Tensors that the layer holds are inputs of the operator, or the graph would have those of its tracing as constants.
    indices = getattr(getattr(impl, "indexer", None), "topk_indices", None)
    weights = [getattr(impl, "sinks", None), impl.alibi_slopes, indices, layer._k_scale, layer._v_scale]
    bounds, with_lse = (batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len), impl.need_to_return_lse_for_decode
    numbers = [*_Numbers(batch.handle, *bounds, int(batch.causal), out[0], out[1], int(with_lse))]
    result, lse = _layer(query, key, value, kv_cache, batch.tensors(), weights, numbers, layer.graph_key)
    return (result, lse) if with_lse else result


@uncaptured("attn::layer", mutates_args=("kv_cache",))
def _layer(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor | None,
    batch: list[Tensor | None],
    weights: list[Tensor | None],
    numbers: list[int],
    layer: str,
) -> tuple[Tensor, Tensor]:
    """Return (output [T, H, D], lse [H, T]); lse is [0] if not requested.

    batch: its `tensors()`; weights: sinks, slopes, sparse indices, and the scales of keys and of values; numbers: `_Numbers`.
    """
    sinks, alibi_slopes, topk_indices, k_scale, v_scale = weights
    facts = _Numbers(*numbers)
    lse = bool(facts.lse)
    if layer.startswith(_LIVE):
        owner = _living(layer)
        impl, spec = owner.impl, owner.kv_cache_spec
        if topk_indices is not None:  # the graph's own tensor: the indexer may store later ones elsewhere
            impl = impl.with_indices(topk_indices, query)
    else:
        impl, spec = _made(layer, lse)
        assert k_scale is not None and v_scale is not None
        owner = _Scales(k_scale, v_scale)
        if sinks is not None or alibi_slopes is not None:
            impl = copy.copy(impl)  # another layer with these arguments may run at the same time
            impl.sinks, impl.alibi_slopes = sinks, alibi_slopes
    metadata = _living_batch(facts.handle, batch)
    if metadata is None:
        if world_size() > 1:
            raise UnsupportedError(
                "decode context parallelism: a graph runs only with the batch object that was built, and it no longer exists"
            )
        *passed, is_causal = batch
        arrays: dict[str, Any] = dict(zip((*ARRAYS, "tree_mask", "spans", "prefix"), passed, strict=True))
        common = CommonAttentionMetadata(
            **arrays,
            num_reqs=arrays["seq_lens"].shape[0],
            # A graph of other extents than the batch's has rows of padding; the device knows the batch's own number.
            num_actual_tokens=min(facts.num_actual_tokens, int(arrays["query_start_loc"][-1])),
            max_query_len=facts.max_query_len,
            max_seq_len=facts.max_seq_len,
            causal=bool(facts.causal) if is_causal is None else is_causal.cpu().numpy(),
        )
        # `fast_build`: block ids and slots would be fetched to be checked
        metadata = impl.backend.get_builder_cls()(spec, device=query.device).build(0, common, fast_build=True)
    result = impl.forward(owner, query, key, value, kv_cache, metadata)
    # Set on a live layer after the graph was compiled, as engines do: the graph's outputs are fixed.
    if isinstance(result, tuple) is not lse:
        raise UnsupportedError(f"{layer.removeprefix(_LIVE)}: this graph was compiled for a layer that returns lse={lse}")
    return result if lse else (result, query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32)))


def _living(key: str) -> Any:
    layer = _layers.get(key)
    if layer is None:
        raise UnsupportedError(f"{key.removeprefix(_LIVE)}: the layer of this graph was deleted, or is in another process")
    return layer


@_layer.register_fake
def _(query, key, value, kv_cache, batch, weights, numbers, layer):  # type: ignore[no-untyped-def]
    facts, rows = _Numbers(*numbers), query.shape[0]
    shape = (facts.num_heads, rows) if facts.lse else (0,)
    return query.new_empty(rows, facts.num_heads, facts.width), query.new_empty(
        shape, dtype=torch.promote_types(query.dtype, torch.float32)
    )


def _living_batch(handle: int, tensors: list[Tensor | None]) -> Any:
    """The metadata object with this handle, if it is alive and holds these tensors."""
    batch = alive.get(handle)
    # The handle may be that of an earlier batch, where a graph holds it as a constant: the tensors decide.
    same = batch is not None and all(map(_same, batch.tensors(), tensors))
    return batch if same else None


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        type(one) is Tensor and one.device == other.device and one.shape == other.shape and one.data_ptr() == other.data_ptr()
    )


# --- dense -----------------------------------------------------------------------------------------------------------


def dense_key(impl: Any) -> str:
    """Text from which a dense implementation can be rebuilt."""
    names = ("num_heads", "head_size", "causal", "num_kv_heads")
    arguments = {name: getattr(impl, name) for name in names} | {"softmax_scale": impl.signed_scale}
    return _text({"impl": _path(type(impl)), "arguments": arguments})


def dense(impl: Any, call: DenseCall) -> Tensor:
    """Call `impl._attend` as one operator of the graph."""
    query, key, value, present, lens, mask = call
    first = None if lens is None else list(lens)
    return _dense(query, key, value, present, mask, first, impl.graph_key)


@functools.lru_cache(1024)
def _made_dense(key: str) -> Any:
    described = json.loads(key)
    return resolve_obj_by_qualname(described["impl"])(**described["arguments"])


@uncaptured("attn::dense", mutates_args=())
def _dense(
    query: Tensor, key: Tensor, value: Tensor, present: Tensor | None, mask: Tensor | None, lens: list[int] | None, impl: str
) -> Tensor:
    query, key, value = aligned(query), aligned(key), aligned(value)  # a graph is traced without addresses
    call = DenseCall(query, key, value, present, None if lens is None else tuple(lens), mask)
    out: Tensor = _made_dense(impl)._attend(call)
    # the fake implementation promises a contiguous result
    return out.contiguous()


@_dense.register_fake
def _(query, key, value, *arguments):  # type: ignore[no-untyped-def]
    return torch.empty_like(query, memory_format=torch.contiguous_format)
