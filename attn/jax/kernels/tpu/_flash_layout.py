"""How dense attention is divided into launches: block sizes, the order of rows and keys in units, and the masks' arrays.

Shape letters: B sequences, S rows, M keys, H query heads, K kv heads, G = H / K, D head size, Dv head size of values.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn.jax.kernels.tpu._chips import MIB, chip_of
from attn.jax.kernels.tpu._flash import TILE, BlockSizes, FlashConfig, Static
from attn.jax.kernels.tpu._refs import LANES, LOG2_E


class Extents(NamedTuple):
    """What the block sizes of a pass follow from; `heads`: query heads per unit."""

    heads: int
    rows: int
    num_keys: int
    head_size: int
    value_size: int
    itemsize: int
    backward: bool
    window: bool = False


class Extras(NamedTuple):
    """The arrays beside q, k, v.

    q_segment_ids [B, S], kv_segment_ids [B, M], int32, both or neither: a row sees the keys of its own segment. alibi_slopes
    [H]: adds slope * (j - p) under causality, else -slope * |p - j|, for key j and the row at position p. sinks [H]: logits of
    a key without value. kv_lens: [B] int32, the number of keys of sequence b (M when None); later keys are ignored.
    """

    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    kv_lens: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How rows, heads and keys are divided; K1 is the number of the heads' units: K, or more if G is split."""

    cfg: FlashConfig
    batch: int
    rows: int  # S
    unit_heads: int  # K1
    split: int  # K1 / K
    launches: int
    num_keys: int  # M

    @property
    def units(self) -> int:
        return self.cfg.units * self.cfg.groups

    def padded_rows(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Pad axis 1 of x from S to the rows of all units."""
        after = self.units * self.cfg.positions - self.rows - self.cfg.first_row
        return jnp.pad(x, [(0, 0), (self.cfg.first_row, after)] + [(0, 0)] * (x.ndim - 2), **kwargs)

    def padded_keys(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Pad axis 1 of x from M to the keys of all launches."""
        return jnp.pad(x, [(0, 0), (0, self.launches * self.cfg.keys - self.num_keys)] + [(0, 0)] * (x.ndim - 2), **kwargs)

    def _by_unit(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """[B, S, H, E] -> [B, units, Q, K1, G, E]."""
        rows = self.padded_rows(x, **kwargs)
        return rows.reshape(self.batch, self.units, self.cfg.positions, self.unit_heads, self.cfg.heads, -1)

    def columns(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """[B, S, H, E] -> [B, K1, units, E, rows]."""
        units = self._by_unit(x, **kwargs)
        return units.transpose(0, 3, 1, 5, 4, 2).reshape(self.batch, self.unit_heads, self.units, -1, self.cfg.rows)

    def of_columns(self, x: jax.Array) -> jax.Array:
        """[B, K1, units, E, rows] -> [B, S, H, E]."""
        size = x.shape[3]
        units = x.reshape(self.batch, self.unit_heads, self.units, size, self.cfg.heads, self.cfg.positions)
        rows = units.transpose(0, 2, 5, 1, 4, 3).reshape(self.batch, -1, self.unit_heads * self.cfg.heads, size)
        return rows[:, self.cfg.first_row : self.cfg.first_row + self.rows]

    def of_keys(self, x: jax.Array) -> jax.Array:
        """[B, M, K, E] -> [launches, B, K, keys, E]."""
        keys = self.padded_keys(x).reshape(self.batch, self.launches, self.cfg.keys, *x.shape[2:])
        return keys.transpose(1, 0, 3, 2, 4)

    def from_keys(self, x: jax.Array) -> jax.Array:
        """[launches, B, K, keys, E] -> [B, M, K, E]."""
        keys = x.transpose(1, 0, 3, 2, 4)
        return keys.reshape(self.batch, -1, *keys.shape[3:])[:, : self.num_keys]

    def by_rule(self, x: jax.Array | None) -> jax.Array:
        """[H] -> [K1, rows] float32."""
        if x is None:
            return jnp.zeros((self.unit_heads, self.cfg.rows), jnp.float32)
        by_head = x.astype(jnp.float32).reshape(self.unit_heads, self.cfg.heads)
        return jnp.repeat(by_head, self.cfg.positions, axis=1)


def layout_of(static: Static, q: jax.Array, v: jax.Array, extras: Extras, *, backward: bool) -> Layout:
    batch, rows, num_heads, head_size = q.shape
    num_keys, num_kv_heads, value_size = v.shape[1:]
    group = num_heads // num_kv_heads
    # Query heads of a unit, which divide their group: up to four, or all of a group of five or seven, which has no other
    # divisor.
    heads = max(n for n in range(1, min(group, 4) + 1) if group % n == 0)
    if heads == 1 and group <= 8:
        heads = group
    window = static.mask.window != (None, None)
    extents = Extents(heads, rows, num_keys, head_size, value_size, q.dtype.itemsize, backward, window)
    chosen = static.block_sizes
    sizes = block_sizes_for(static.device.chip, extents) if chosen is None else chosen[backward]
    chunk = sizes.chunk
    while sizes.units * sizes.positions % chunk:
        chunk //= 2  # groups are aligned to chunks
    # Padding rows before the first move positions to multiples of a chunk, where a causal group's diagonal is one block.
    first_row = (num_keys - rows) % chunk if static.mask.causal and rows > sizes.positions else 0
    needed = -(-(rows + first_row) // sizes.positions)
    max_units = min(sizes.units, needed)
    # the fewest padding units of any choice; of equal ones the largest
    choices = [n for n in range(max(1, max_units // 2), max_units + 1) if n >= needed or n * sizes.positions % chunk == 0]
    units = min(choices, key=lambda n: (-(-needed // n) * n, -n))
    groups = -(-needed // units)
    # a causal group's diagonal is complete
    span = max(num_keys, groups * units * sizes.positions + num_keys - rows - first_row)
    keys = min(-(-span // chunk) * chunk, sizes.keys)
    of_rows = heads, sizes.positions, units, groups, chunk, keys, first_row, rows
    of_extras = extras.alibi_slopes is not None, False, extras.q_segment_ids is not None
    fields: list[Any] = [*vars(static).values(), *of_rows, *of_extras]
    split = group // heads
    return Layout(FlashConfig(*fields), batch, rows, num_kv_heads * split, split, -(-num_keys // keys), num_keys)


def block_sizes_for(chip: str, extents: Extents) -> BlockSizes:
    """The rule: units of about 512 lanes, as many as make long stretches of code, as many keys as VMEM holds."""
    heads, rows, num_keys, _, _, itemsize, backward, window = extents
    vmem, positions = chip_of(chip).vmem, 128 if heads > 1 or rows <= 128 else 256
    lanes = heads * positions
    # float32 takes six passes of the matrix unit, and so six times the code; the backward pass has five products
    units = max(1, min(8, 4096 // lanes) // (1 if itemsize == 2 else 4) // (2 if backward else 1))
    chunk = 512 if num_keys > 256 else 256 if num_keys > 128 else 128
    if num_keys >= 2048 and itemsize == 2 and vmem >= 64 * MIB and not (window or backward):
        chunk = 1024  # then few chunks are masked, and the ends of an unrolled block cost as much as 250 registers of scores

    def fits(units: int, chunk: int, keys: int) -> bool:
        return vmem_bytes(BlockSizes(positions, units, chunk, keys), extents) <= vmem * 5 // 8

    while units > 1 and not fits(units, chunk, chunk):
        units //= 2
    while chunk > 128 and not fits(units, chunk, chunk):
        chunk //= 2
    keys = chunk
    # twice as many as there are may be needed: a group's diagonal is complete, so keys are padded to it
    while keys < 2 * num_keys and fits(units, chunk, 2 * keys):
        keys *= 2
    return BlockSizes(positions, units, chunk, keys)


def vmem_bytes(sizes: BlockSizes, extents: Extents) -> int:
    """Bytes of the blocks, each double-buffered, and of scratch."""
    size, value = (-(-x // LANES) * LANES for x in (extents.head_size, extents.value_size))
    rows, itemsize = sizes.units * extents.heads * sizes.positions, extents.itemsize
    if extents.backward:
        of_keys = (2 * size + value) * itemsize + (size + value) * 4
        of_rows = (2 * size + value) * itemsize
        scratch = size * 4 + 4 * TILE * itemsize // sizes.units
    else:
        of_keys, of_rows, scratch = (size + value) * itemsize, (size + value) * itemsize, value * 4
    segments = LANES * 4
    return 2 * sizes.keys * (of_keys + segments) + rows * (2 * of_rows + scratch)


def masks_of(layout: Layout, extras: Extras) -> dict[str, jax.Array]:
    """The arrays that define masks; `bounds`, `spans` and `key_segments` per launch."""
    cfg, batch = layout.cfg, layout.batch
    lens = jnp.full(batch, layout.num_keys, jnp.int32) if extras.kv_lens is None else extras.kv_lens.astype(jnp.int32)
    start = jnp.arange(layout.launches, dtype=jnp.int32)[:, None] * cfg.keys
    # Relative to each launch's own keys, so that a kernel counts keys from 0. Rows align with the last key by length.
    position = lens - layout.rows - cfg.first_row - start
    arrays = {"bounds": jnp.stack([position, jnp.clip(lens - start, 0, cfg.keys)], axis=2).reshape(layout.launches, -1)}
    if cfg.alibi or extras.sinks is not None:
        rules = jnp.stack([layout.by_rule(extras.sinks), layout.by_rule(extras.alibi_slopes)], axis=1)
        arrays["rules"] = rules * LOG2_E
    if extras.q_segment_ids is not None and extras.kv_segment_ids is not None:
        # Padding takes the neighbour's segment, so that it does not widen the range of segments of its unit or chunk.
        of_rows = layout.padded_rows(extras.q_segment_ids.astype(jnp.int32), mode="edge")
        of_rows = of_rows.reshape(batch, layout.units, 1, cfg.positions)
        of_keys = layout.padded_keys(extras.kv_segment_ids.astype(jnp.int32), mode="edge")
        of_keys = of_keys.reshape(batch, layout.launches, cfg.chunks, cfg.chunk).swapaxes(0, 1)
        spans = [of_rows.min(3), of_rows.max(3)]
        by_launch = [jnp.broadcast_to(x.reshape(1, batch, -1), (layout.launches, batch, layout.units)) for x in spans]
        extremes = [*by_launch, of_keys.min(3), of_keys.max(3)]
        arrays["spans"] = jnp.concatenate(extremes, axis=2).reshape(layout.launches, -1)
        arrays["row_segments"] = jnp.tile(of_rows, (1, 1, 1, cfg.heads))
        lanes = of_keys.reshape(layout.launches, batch, cfg.keys, 1)
        arrays["key_segments"] = jnp.broadcast_to(lanes, (*lanes.shape[:3], LANES))
    return arrays
