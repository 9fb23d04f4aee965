"""Code of paged and MLA layers alike: checks of static arguments, and `forward` in terms of `apply`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from attn.backends.block_table import PAD_SLOT_ID
from attn.backends.checks import check_block_size, check_cache_element, check_num_blocks
from attn.capabilities import Feature
from attn.errors import ShapeError, UnsupportedError
from attn.jax import kv_cache as caches
from attn.jax.metadata import PagedAttentionMetadata, check_ids, check_num_layers


def in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, traced without JAX's 64-bit mode."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # In that mode Python's ints are int64, which a kernel's int32 scalars cannot be divided by.
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return run


def over_explicit_axes(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return an implementation's `apply`, which takes arrays sharded over a mesh's explicit axes too.

    `jax.make_mesh` makes axes explicit by default. Then each operation must say how its result is sharded, which gathers,
    scatters and kernels here do not: XLA partitions the call, as over automatic axes. The output has the sharding of the
    query's rows and heads, the cache keeps its own.
    """

    @functools.wraps(apply)
    def run(impl: Any, query: Any, key: Any, value: Any, kv_cache: Any, *rest: Any, **more: Any) -> Any:
        leaves, tree = jax.tree.flatten(((query, key, value, kv_cache, *rest), more))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        kinds: Any = [jax.typeof(x).sharding for x in arrays.values()]
        meshes = [kind.mesh for kind in kinds if any(kind.spec)]
        if not meshes:
            return apply(impl, query, key, value, kv_cache, *rest, **more)

        def partitioned(arrays: dict[int, jax.Array]) -> Any:
            args, named = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            return apply(impl, *args, **named)

        of_query: Any = jax.typeof(query).sharding
        rows, heads = (*of_query.spec, None)[:2]
        output: Any = PartitionSpec(rows, heads)
        if impl.need_to_return_lse_for_decode:
            output = output, PartitionSpec(heads, rows)
        cache: Any = None if kv_cache is None else jax.typeof(kv_cache).sharding.spec  # type: ignore[attr-defined]
        shardings = jax.tree.map(lambda spec: NamedSharding(meshes[0], spec), (output, cache))
        return jax.sharding.auto_axes(partitioned, out_sharding=shardings)(arrays)

    return run


def check_shape(impl: Any, name: str, array: Any, *shape: int) -> None:
    """Raise `ShapeError` unless an array has `shape`, [T, ...] of the padded batch; all but T may be flattened."""
    if array.shape[0] != shape[0] or array.size != math.prod(shape):
        raise ShapeError(
            f"{impl.backend.get_name()}: {name} has shape {list(array.shape)}: must be {list(shape)}, as many rows as the "
            "batch's slot_mapping (attn_metadata.pad adds them)"
        )


def check_cache(impl: Any, query: jax.Array, kv_cache: Any, attn_metadata: PagedAttentionMetadata) -> None:
    """Raise unless a cache is an array in the backend's layout with this layer's heads, and the batch was built for it."""
    backend, name = impl.backend, impl.backend.get_name()
    row = (impl.num_kv_heads, impl.head_size, impl.kv_cache_dtype)
    if not isinstance(kv_cache, jax.Array):
        type_name = type(kv_cache).__name__
        raise TypeError(f"{name}: kv_cache must be a jax.Array, got {type_name} (only forward() takes an nnx.Variable)")
    if kv_cache.ndim != (rank := len(backend.get_kv_cache_shape(0, 0, *row))):
        raise ShapeError(f"{name}: kv_cache has shape {list(kv_cache.shape)}: must have {rank} dimensions")
    # A layout may pad heads, so shapes are compared in the layout itself, and told in logical terms.
    num_blocks, block_size, *heads_by_size = logical_shape(impl, kv_cache)
    check_block_size(name, block_size, attn_metadata.block_size)
    shape = tuple(backend.get_kv_cache_shape(num_blocks, block_size, *row))
    if kv_cache.shape != shape:
        layer = list(logical_shape(impl, jax.ShapeDtypeStruct(shape, kv_cache.dtype))[2:])
        raise ShapeError(f"{name}: kv_cache holds [K, D] = {heads_by_size}, the layer has {layer}")
    check_num_blocks(name, num_blocks, attn_metadata.num_blocks)
    check_num_layers(name, num_blocks, attn_metadata)
    check_cache_element(impl, query, kv_cache, caches.element_type(impl.kv_cache_dtype, query.dtype))


def checked(impl: Any, kv_cache: jax.Array, attn_metadata: PagedAttentionMetadata) -> tuple[PagedAttentionMetadata, jax.Array]:
    """Check a batch's values inside the step (`check_ids`); return (the batch, whether it passed, 0-d bool).

    A batch that fails is returned without keys and slots: it reads and writes nothing, so that the kernel does not crash before
    the caller sees the error.
    """
    num_blocks, block_size = logical_shape(impl, kv_cache)[:2]
    # A checkify error is read after the step: until then the kernel must not follow a bad id.
    ids_valid = check_ids(attn_metadata, block_size, num_blocks, debug=True)
    safe = dataclasses.replace(
        attn_metadata,
        block_table=jnp.where(ids_valid, attn_metadata.block_table, 0),
        slot_mapping=jnp.where(ids_valid, attn_metadata.slot_mapping, PAD_SLOT_ID),
        seq_lens=jnp.where(ids_valid, attn_metadata.seq_lens, 0),
    )
    return safe, ids_valid


def logical_shape(impl: Any, kv_cache: Any) -> tuple[int, ...]:
    """Return the (N, P, K, D) of a cache in the backend's layout."""
    # shapes alone: the view itself might be a copy of the cache
    return tuple(jax.eval_shape(impl.backend.logical_kv_cache, kv_cache)[0].shape)


def forward(impl: Any, kv_cache: Any, apply: Callable[[Any], tuple[Any, Any]], output: Any, *output_scales: Any) -> Any:
    """Return the output of `apply(cache)`, and rebind `kv_cache` to the cache that it returns.

    kv_cache: an `nnx.Variable`, any object whose array is read and replaced by `[...]`, or None. Raises `UnsupportedError` for
    scales of an output, ValueError for a buffer, and TypeError for an array, which cannot be rebound.
    """
    if any(scale is not None for scale in output_scales):
        raise UnsupportedError(f"{impl.backend.get_name()}: {Feature.OUTPUT_SCALE.value} not supported")
    if output is not None:
        raise ValueError("output= cannot be filled: jax arrays are immutable; use the returned array")
    if isinstance(kv_cache, jax.Array):
        raise TypeError("kv_cache is a jax.Array, which forward() cannot change: pass an nnx.Variable, or call apply()")
    # `[...]` reads and replaces the array of an `nnx.Variable`, and of other holders that have the same methods
    out, after = apply(None if kv_cache is None else kv_cache[...])
    if kv_cache is not None:
        kv_cache[...] = after
    return out
