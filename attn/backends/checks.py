"""Checks of a call's arguments, which the implementations of both frameworks share, so that a mistake has one message.

They read static properties only (ranks, shapes, dtypes, devices), never values, so that under jax they run once a compilation,
and under torch they do not wait for the device. `impl` is the layer's implementation, `query` the call's.
"""

from dataclasses import replace
from typing import Any

from attn.arguments import check_reach, refuse
from attn.arrays import framework_of
from attn.backends.abstract import AttentionBackend, AttentionType
from attn.capabilities import ENCODER_TYPES, Feature
from attn.dtypes import dtype_name
from attn.errors import DeviceError, DTypeError, MetadataError, ShapeError, UnsupportedError


def require(impl: Any, feature: Feature) -> None:
    """Raise `UnsupportedError` unless the backend has a feature."""
    record = impl.backend.capabilities
    if feature not in record.features:
        raise UnsupportedError(f"{impl.backend.get_name()}: {record.not_supported(feature)}")


def check_built(backend: type[AttentionBackend], attn_metadata: Any, metadata_cls: type) -> None:
    """Raise TypeError, with the call that builds it, unless the batch was built for this backend."""
    if not isinstance(attn_metadata, metadata_cls):
        raise TypeError(
            f"{backend.get_name()}: attn_metadata is a {type(attn_metadata).__name__}: build it from a batch with "
            "layer.build(batch)"
        )


def check_array(backend: type[AttentionBackend], name: str, array: Any, framework: str) -> None:
    """Raise TypeError unless `array` belongs to the framework; jax also accepts NumPy arrays."""
    try:
        actual = framework_of(array)
    except TypeError:
        raise TypeError(f"{backend.get_name()}: {name} is a {type(array).__name__}: must be an array of {framework}") from None
    # jax's own functions accept NumPy arrays, and tests and notebooks pass them; torch's do not.
    if actual != framework and (actual, framework) != ("numpy", "jax"):
        raise TypeError(
            f"{backend.get_name()}: {name} is an array of {actual}: must be of {framework}, the layer's framework "
            "(attn.arrays.to_framework converts it; layer.impl(layer, ...) accepts arrays of any framework)"
        )


def cache_dtype_error(impl: Any, query: Any, kv_cache: Any, needed: Any) -> DTypeError:
    """Return the error for a cache whose elements are not `needed`. It names the wrong dtype, the cache's or the query's."""
    name, layer_dtype = impl.backend.get_name(), impl.layer_dtype
    query_dtype, cached = dtype_name(query.dtype), dtype_name(kv_cache.dtype)
    # The cache is as the layer was built; then it is the query that is wrong, although the comparison failed at the cache.
    if layer_dtype is not None and impl.kv_cache_dtype == "auto" and cached == layer_dtype != query_dtype:
        advice = f"cast the query, or build the layer with dtype={query_dtype!r}"
        return DTypeError(f"{name}: query has dtype {query_dtype}, the layer {layer_dtype}: {advice}")
    return DTypeError(f"{name}: kv_cache has dtype {cached}: kv_cache_dtype={impl.kv_cache_dtype} needs {dtype_name(needed)}")


def check_block_size(name: str, block_size: int, expected: int | None) -> None:
    """Raise `ShapeError` if a cache's block size differs from the one that the batch was built for."""
    # The batch's slots and table were computed for its block size: with another, tokens would be written and read at
    # wrong places, inside the cache.
    if expected is not None and block_size != expected:
        raise ShapeError(f"{name}: kv_cache has blocks of {block_size} tokens, the batch was built for blocks of {expected}")


def check_num_blocks(name: str, num_blocks: int, checked: int | None) -> None:
    """Raise `ShapeError` for a cache of fewer blocks than the batch's block ids were checked against."""
    if checked is not None and num_blocks < checked:
        raise ShapeError(
            f"{name}: kv_cache has {num_blocks} blocks, the batch's block ids were checked against {checked}, those of the "
            f"largest cache of its layer: build it with the builder of a spec with num_blocks={num_blocks} "
            "(dataclasses.replace(layer.kv_cache_spec, num_blocks=...)), or give each size of cache a layer of its own"
        )


def dtype_error(impl: Any, name: str, array: Any) -> DTypeError:
    """Return the error for an array, such as the query, of a dtype that the backend does not support."""
    dtype, supported = str(array.dtype).removeprefix("torch."), ", ".join(impl.backend.capabilities.dtypes)
    return DTypeError(f"{impl.backend.get_name()}: {name} has dtype {dtype} (supports {supported})")


def check_like(impl: Any, name: str, array: Any, query: Any, of: str = "query") -> None:
    """Raise unless an array has the query's dtype and, under torch, its device. `of`: the message's name for the query."""
    if array.dtype != query.dtype:
        raise DTypeError(f"{impl.backend.get_name()}: {name} has dtype {array.dtype}, {of} {query.dtype}: must be equal")
    # jax places arrays itself, and under jit they have no device.
    if impl.framework == "torch":
        check_placed(impl, name, array, query)


def check_placed(impl: Any, name: str, tensor: Any, query: Any) -> None:
    """Raise `DeviceError` unless a tensor is on the query's device."""
    if tensor.device != query.device:
        raise DeviceError(f"{impl.backend.get_name()}: {name} is on {tensor.device}, query on {query.device}")


def check_rows(impl: Any, name: str, array: Any, least: int) -> None:
    """Raise `ShapeError` if an array has fewer rows than the batch has tokens."""
    if array.shape[0] < least:
        rows = f"{name} has {array.shape[0]} rows"
        raise ShapeError(f"{impl.backend.get_name()}: {rows}: must be at least num_actual_tokens={least}")


def check_pair(impl: Any, **pair: Any) -> None:
    """Raise `ShapeError` if one of two new arrays is None and the other not, or an encoder's call has none."""
    # MLA passes kv_c and k_pe, other layers key and value: the names in the message are the caller's.
    if len({array is None for array in pair.values()}) > 1:
        advice = "pass both, or neither (nothing is written then)"
        raise ShapeError(f"{impl.backend.get_name()}: one of {' and '.join(pair)} is None: {advice}")
    if impl.attn_type in ENCODER_TYPES and all(array is None for array in pair.values()):
        raise ShapeError(f"{impl.backend.get_name()}: {next(iter(pair))} is None, but {impl.attn_type} attention reads it")


def check_no_gradient(impl: Any, **tensors: Any) -> None:
    """Raise `UnsupportedError` if a tensor requires a gradient, which the backend does not compute."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            hint = " (call under torch.no_grad(), or detach)"
            raise UnsupportedError(
                f"{impl.backend.get_name()}: {name} requires grad: {Feature.BACKWARD.value} not supported{hint}"
            )


def check_masks(impl: Any, attn_metadata: Any) -> None:
    """Raise unless the backend serves what the batch's rows see, alone and beside what the layer's rows see."""
    check_reach(impl, attn_metadata)
    # A layer is chosen without knowing its batches: whether they are causal is a matter of each call. The record is
    # then asked again, since a backend may serve non-causal layers and windows, but not both together.
    if not attn_metadata.causal and impl.attn_type == AttentionType.DECODER and not impl.serves_non_causal:
        require(impl, Feature.NON_CAUSAL)
        layer = impl.request()
        refuse(impl.backend, replace(layer, features=layer.features | {Feature.NON_CAUSAL}))
        impl.serves_non_causal = True  # checked once a layer
    if attn_metadata.mask.tree is not None:
        require(impl, Feature.TREE_MASK)
        if not attn_metadata.causal or impl.attn_type != AttentionType.DECODER:
            allowed = f"None for {impl.attn_type} attention, causal={attn_metadata.causal}"
            raise MetadataError("tree_mask", None, "a mask", allowed)


def check_cache_element(impl: Any, query: Any, kv_cache: Any, element: Any) -> None:
    """Raise unless a cache's elements are `element` and, under torch, it is on the query's device."""
    if kv_cache.dtype != element:
        raise cache_dtype_error(impl, query, kv_cache, element)
    if impl.framework == "torch":
        check_placed(impl, "kv_cache", kv_cache, query)


def check_cache_heads(impl: Any, heads_by_size: Any) -> None:
    """Raise `ShapeError` unless a cache holds this layer's heads."""
    layer = [impl.num_kv_heads, impl.head_size]
    if list(heads_by_size) != layer:
        raise ShapeError(f"{impl.backend.get_name()}: kv_cache holds [K, D] = {list(heads_by_size)}, the layer has {layer}")
