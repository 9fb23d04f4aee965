"""Metadata of the paged backends in jax: a framework-neutral batch as a pytree, padded so that few programs are compiled.

XLA compiles one program per shape. The builder pads T, R, the block table's columns and the static bounds up to powers of
two, so that one compilation serves every batch of a bucket. *Values* mark the valid entries (`num_actual_tokens`, lengths
of 0), and changing them does not recompile. Padding reads nothing and writes nothing: lengths 0, block 0, slot -1.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from attn import envs
from attn.arguments import as_int, check_flag, positive_int
from attn.arrays import to_framework
from attn.backends.abstract import AttentionMetadataBuilder
from attn.backends.block_table import INT32_MAX, PAD_SLOT_ID
from attn.backends.metadata import AttentionMetadata, CommonAttentionMetadata, next_power_of_two
from attn.errors import MetadataError, ShapeError
from attn.jax.kernels.xla import Requests
from attn.visibility import BatchMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttentionMetadata(AttentionMetadata):
    """One batch. The first seven fields are arrays (int32, on the device); the others are static and key the compilation."""

    query_start_loc: jax.Array  # [R + 1], the last entry repeated past num_reqs
    seq_lens: jax.Array  # [R], 0 past num_reqs
    block_table: jax.Array  # [R, B], 0 past the blocks in use
    slot_mapping: jax.Array  # [T], -1 past num_actual_tokens
    num_reqs: jax.Array  # []
    num_actual_tokens: jax.Array  # []
    mask: BatchMask = BatchMask()  # spans: -1 past num_actual_tokens; all else 0 past num_reqs
    max_query_len: int = dataclasses.field(default=1, metadata={"static": True})
    max_seq_len: int = dataclasses.field(default=1, metadata={"static": True})
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    block_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    num_blocks: int | None = dataclasses.field(default=None, metadata={"static": True})  # of one layer's cache, if known
    num_layers: int | None = dataclasses.field(default=None, metadata={"static": True})  # in the cache's array, if known
    #: Set by `of_layer`: the layers that the cache's array must have, at least.
    least_layers: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def requests(self) -> Requests:
        """(query_start_loc, seq_lens, block_table), as kernels take them."""
        return Requests(self.query_start_loc, self.seq_lens, self.block_table)

    def pad(self, x: Any) -> jax.Array:
        """Pad token rows x [t, ...] with zeros at the end to this batch's T rows. Raises `ShapeError` if t > T."""
        rows = self.slot_mapping.shape[0]
        missing = rows - x.shape[0]
        if missing < 0:
            raise ShapeError(f"x has {x.shape[0]} rows: must be at most {rows}, the batch's padded length")
        return jnp.pad(jnp.asarray(x), ((0, missing), *((0, 0) for _ in x.shape[1:])))

    def positions(self) -> jax.Array:
        """Return the position of each new token in its request, as for rotary embeddings: [T] int32, 0 in padding rows.

        Computed on the device from the lengths, so that a jitted step needs no argument for it.
        """
        row, ends = jnp.arange(self.slot_mapping.shape[0], dtype=jnp.int32), self.query_start_loc[1:]
        # rows past the last request have an entry too, also in a batch without requests
        begins = jnp.append(ends - self.seq_lens, 0)
        return jnp.where(row < self.num_actual_tokens, row - begins[jnp.searchsorted(ends, row, side="right")], 0)

    def of_layer(self, layer: Any, num_blocks: int | None = None) -> "PagedAttentionMetadata":
        """Return this batch for layer number `layer`, which may be traced, of caches concatenated along N in one array.

        `new_kv_cache(num_blocks, layers=...)` allocates such an array. A scan over layers that carries the array changes it
        in place; one that takes a stack of caches as inputs and returns a stack copies every cache.

        layer: from 0 to the number of layers - 1. If it is traced, its value is not known: the call checks that the cache has
        the layers that were allocated, or at least two; ATTN_DEBUG=device checks the value in the step. num_blocks: blocks per
        layer; None means those of the cache that the batch was built for.

        Raises `MetadataError` for any other layer number, one that is not an int included; for any other `num_blocks`, since
        block ids were checked against it (a block of another layer would be taken for this layer's), and if neither is known;
        and for a batch that is one layer's already.
        """
        if self.least_layers is not None:
            raise MetadataError("layer", None, layer, "passed once: this batch is from of_layer(); pass that of build()")
        known = self.num_blocks
        if known is not None and num_blocks not in (None, known):
            bound = f"{known}, the limit of the batch's block ids: allocate with new_kv_cache(num_blocks, layers=...)"
            raise MetadataError("num_blocks", None, num_blocks, bound)
        num_blocks = known if num_blocks is None else num_blocks
        if num_blocks is None:
            raise MetadataError("num_blocks", None, None, "the number of blocks of one layer's cache")
        num_blocks = positive_int("num_blocks", num_blocks)
        least_layers = self._least_layers(layer)
        # block i of layer l is block l * num_blocks + i of the array
        skip = jnp.asarray(layer, jnp.int32) * num_blocks
        slots = self.slot_mapping
        if self.block_size is None:
            raise MetadataError("block_size", None, None, "the block size of the caches")
        # A traced number may be that of any layer.
        last, most = least_layers if isinstance(layer, jax.core.Tracer) else int(layer) + 1, INT32_MAX // self.block_size
        if last * num_blocks > most:
            bound = f"below {most // num_blocks}, with {num_blocks} blocks of {self.block_size} a layer: slots are int32"
            raise MetadataError("layer", None, layer, bound)
        return dataclasses.replace(
            self,
            block_table=self.block_table + skip,
            slot_mapping=jnp.where(slots < 0, slots, slots + skip * self.block_size),
            num_blocks=num_blocks,
            least_layers=least_layers,
        )

    def _least_layers(self, layer: Any) -> int:
        """Return the least number of layers that the cache must have. Raises `MetadataError` for a layer outside it."""
        if isinstance(layer, jax.core.Tracer):
            if layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer):
                raise MetadataError("layer", None, layer.aval, "an int, or a traced scalar of an integer dtype")
            return self.num_layers or 2  # a traced layer index implies at least two layers
        number = as_int(layer)
        if number is None or number < 0 or (self.num_layers is not None and number >= self.num_layers):
            bound = "an int of at least 0" if self.num_layers is None else f"an int between 0 and {self.num_layers - 1}"
            raise MetadataError("layer", None, repr(layer), f"{bound}, as the caches of new_kv_cache(num_blocks, layers=...)")
        return self.num_layers or number + 1


# so that a function of a batch can be exported (`jax.export`) and run where this package is installed
export.register_namedtuple_serialization(BatchMask, serialized_name="attn.visibility.BatchMask")
export.register_pytree_node_serialization(
    PagedAttentionMetadata,
    serialized_name="attn.jax.metadata.PagedAttentionMetadata",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Check the framework-neutral batch, pad it and move it to the device.

    `config={"bucket": False}` keeps the batch's exact extents: one compilation for each shape.
    """

    metadata_cls = PagedAttentionMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """Return the batch on this builder's device. Raises `MetadataError` (see `CommonAttentionMetadata.validate`).

        Block ids and slots are also checked if the cache's extent is known and they are on the host, unless `fast_build`.
        """
        batch, spec = common_attn_metadata, self.kv_cache_spec
        batch.validate(spec.block_size, None if fast_build else spec.num_blocks)
        if envs.debug("device"):
            batch.on_host().validate(spec.block_size, spec.num_blocks)
        size = next_power_of_two if check_flag("bucket", (self.config or {}).get("bucket", True)) else int
        num_reqs, num_rows, columns = map(size, (batch.num_reqs, batch.slot_mapping.shape[0], batch.block_table.shape[1]))
        # the host's copy where there is one: it is padded without a launch, and sent once
        starts = batch.query_start_loc if batch.query_start_loc_cpu is None else batch.query_start_loc_cpu
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        tree, spans, prefix, is_causal = batch.mask
        arrays = {
            "query_start_loc": _padded(starts, (num_reqs + 1,), None),
            "seq_lens": _padded(lens, (num_reqs,)),
            "block_table": _padded(batch.block_table, (num_reqs, columns)),
            "slot_mapping": _padded(_int32_slots(batch.slot_mapping), (num_rows,), PAD_SLOT_ID),
            "num_reqs": np.int32(batch.num_reqs),
            "num_actual_tokens": np.int32(batch.num_actual_tokens),
            "mask": BatchMask(
                None if tree is None else _padded(tree, (num_reqs, *tree.shape[1:])),
                None if spans is None else _padded(spans[:num_rows], (num_rows, 2), -1),
                *(None if flags is None else _padded(flags, (num_reqs,)) for flags in (prefix, is_causal)),
            ),
        }
        return self.metadata_cls(
            **jax.device_put(arrays, self.device),
            max_query_len=size(batch.max_query_len),
            max_seq_len=size(batch.max_seq_len),
            causal=batch.all_causal,
            **{name: getattr(spec, name) for name in ("block_size", "num_blocks", "num_layers")},
        )


def check_num_layers(name: str, num_blocks: int, attn_metadata: PagedAttentionMetadata) -> None:
    """Raise `ShapeError` if a cache of `num_blocks` blocks does not have the layers that the batch's `of_layer` needs."""
    least, of_one = attn_metadata.least_layers, attn_metadata.num_blocks
    if least is not None and of_one is not None and num_blocks < least * of_one:
        raise ShapeError(
            f"{name}: kv_cache has {num_blocks} blocks, of_layer() needs those of at least {least} layers of {of_one}: "
            f"allocate the caches of all layers with new_kv_cache({of_one}, layers=...), then build the batch"
        )


def check_ids(attn_metadata: PagedAttentionMetadata, block_size: int, num_blocks: int, *, debug: bool = False) -> jax.Array:
    """Check a batch's values against a cache of `num_blocks` blocks with `jax.experimental.checkify`, for use inside jit.

    Checks that live block ids are within the cache, that slots are too unless they are -1, and that no two tokens write one
    slot. Functionalise the step that calls it and read the error that it returns:

        error, output = jax.jit(checkify.checkify(step))(...)
        error.throw()

    debug: use checks that have no effect in a step that is not functionalised, where others raise. Every layer makes these
    checks itself under ATTN_DEBUG=device. Returns whether all hold, 0-d bool.
    """
    from jax.experimental import checkify

    check = checkify.debug_check if debug else checkify.check
    table, slots = attn_metadata.block_table, attn_metadata.slot_mapping
    # entries past a request's last block may be anything, and are not checked
    used = -(-attn_metadata.seq_lens[:, None] // block_size)
    live = jnp.arange(table.shape[1]) < used
    num_slots = num_blocks * block_size
    # equal slots become neighbours
    written = jnp.sort(slots)
    twice = (written[1:] == written[:-1]) & (written[1:] != PAD_SLOT_ID)
    conditions = {
        f"block_table: a live entry is not between 0 and {num_blocks - 1}, or a request has more blocks than columns": (
            (used <= table.shape[1]).all() & (~live | ((table >= 0) & (table < num_blocks))).all()
        ),
        f"slot_mapping: an entry is not -1 or between 0 and {num_slots - 1}": (
            (slots >= PAD_SLOT_ID) & (slots < num_slots)
        ).all(),
        "slot_mapping: a slot is written by more than one token": ~twice.any(),
    }
    for message, holds in conditions.items():
        check(holds, message)
    return jnp.stack([*conditions.values()]).all()


def _padded(array: Any, shape: tuple[int, ...], fill: int | None = 0) -> Any:
    """Extend `array` to `shape` with `fill`, or with its last entry (None); a NumPy array stays on the host."""
    if not isinstance(array, np.ndarray):
        array = to_framework(array, "jax")
        widths = [(0, want - got) for want, got in zip(shape, array.shape, strict=True)]
        return jnp.pad(array, widths, mode="edge") if fill is None else jnp.pad(array, widths, constant_values=fill)
    grown = np.full(shape, array[-1] if fill is None else fill, array.dtype)
    grown[tuple(map(slice, array.shape))] = array
    return grown


def _int32_slots(slot_mapping: Any) -> Any:
    """Convert slots to int32, on the host if they are there. Raises `MetadataError` for a slot that does not fit."""
    if not isinstance(slot_mapping, np.ndarray):
        return to_framework(slot_mapping, "jax").astype(jnp.int32)
    bad = (slot_mapping < PAD_SLOT_ID) | (slot_mapping > INT32_MAX)
    if bad.any():
        i = int(bad.argmax())
        raise MetadataError("slot_mapping", i, int(slot_mapping[i]), f"between -1 and {INT32_MAX} under jax (int32)")
    return slot_mapping.astype(np.int32)
