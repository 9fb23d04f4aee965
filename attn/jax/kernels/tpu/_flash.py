"""The configuration and the masks of dense attention's two passes, and which keys a group of rows sees.

All arrays are transposed, with query rows on lanes and keys or the head on sublanes. A *unit* is G * Q lanes: Q successive
positions of the G query heads that share a kv head, head by head, so that all of them see the same keys. A *group* is the
units of a grid step, of successive positions. Keys are processed in *chunks*; a launch holds all keys of a kv head in VMEM.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._launch import TpuDevice
from attn.jax.kernels.tpu._refs import LANES, LOG2_E, Ref, dot
from attn.visibility import LayerMask

#: Rows of `rules`: terms added in units of log2.
SINK, SLOPE = range(2)
#: Keys of a tile backward: as many as fill a matrix unit, and few, so that products overlap the next exponentials.
TILE = 256


class BlockSizes(NamedTuple):
    """Positions per unit (128 or 256), units per grid step, keys per chunk (128, 256, 512 or 1024), keys per launch."""

    positions: int
    units: int
    chunk: int
    keys: int


@dataclasses.dataclass(frozen=True)
class FlashParams:
    """The arguments of a call that are not arrays. scale: of the scores; 1 / sqrt(D) when None. logits_soft_cap: cap *
    tanh(score / cap), before ALiBi. block_sizes: of the forward and the backward pass; by default a rule's."""

    mask: LayerMask = LayerMask(causal=False)
    scale: float | None = None
    logits_soft_cap: float | None = None
    block_sizes: tuple[BlockSizes, BlockSizes] | None = None


@dataclasses.dataclass(frozen=True)
class Static:
    """`FlashParams` after they were checked, and the device."""

    mask: LayerMask
    scale: float
    logits_soft_cap: float | None
    block_sizes: tuple[BlockSizes, BlockSizes] | None
    device: TpuDevice


@dataclasses.dataclass(frozen=True)
class FlashConfig(Static):
    """The static configuration of a launch."""

    heads: int  # G: query heads per unit
    positions: int  # Q: positions per unit, a power of two
    units: int  # per group
    groups: int
    chunk: int  # keys per step, a multiple of 128
    keys: int  # per launch, a multiple of the chunk
    first_row: int  # index of the first real row, after padding
    num_rows: int  # number of real rows
    alibi: bool
    sinks: bool
    segments: bool

    @property
    def rows(self) -> int:
        """Lanes per unit."""
        return self.heads * self.positions

    @property
    def reach(self) -> int:
        """Positions per group."""
        return self.units * self.positions

    @property
    def chunks(self) -> int:
        return self.keys // self.chunk


class Masks(NamedTuple):
    """Refs that define which rows see which keys."""

    bounds: Ref  # [2 B] in SMEM: per sequence, the position of its first (padded) row, and its number of keys
    spans: Ref  # [B * 2 * (units of all groups + chunks)] in SMEM: least and greatest segment id of each unit and chunk
    rules: Ref  # [1, 2, rows] float32, or None
    row_segments: Ref  # [1, units, 1, rows] int32, or None
    key_segments: Ref  # [1, keys, 128] int32, or None


class GridStep(NamedTuple):
    """The position of a grid step: sequence, group, the position of the group's first row, and the sequence's keys."""

    sequence: jax.Array
    group: jax.Array
    position: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Tile:
    """A unit's scores for the keys [first, first + count)."""

    unit: Any
    first: Any
    count: int
    masked: bool = False
    limit: Any = None  # if masked: keys from this index on are not seen
    diagonal: bool = False  # the unit's last: its last Q keys have the rows' own positions, and all before are seen

    def split(self, size: int) -> Iterator["Tile"]:
        """Split into tiles of at most `size` keys, a multiple of 128 and of Q."""
        for begin in range(0, self.count, size):
            count = min(size, self.count - begin)
            last = begin + count == self.count
            first = pl.multiple_of(self.first + begin, LANES)
            yield dataclasses.replace(self, first=first, count=count, diagonal=self.diagonal and last)


AttendTiles = Callable[[list[Tile]], None]


def grid_step(cfg: FlashConfig, masks: Masks, sequence: jax.Array, group: jax.Array) -> GridStep:
    position = masks.bounds[2 * sequence] + group * cfg.reach
    return GridStep(sequence, group, position, masks.bounds[2 * sequence + 1])


def seen_keys(cfg: FlashConfig, at: GridStep, first: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """[low, high): the keys that any of `count` successive rows sees, the first of which is at position `first`."""
    (left, right), low, high = cfg.mask.window, jnp.int32(0), at.length
    if cfg.mask.causal:
        high = jnp.minimum(high, first + count)
    if right is not None:
        high = jnp.minimum(high, first + count + right)
    if left is not None:
        low = jnp.clip(first - left, 0, cfg.keys)
    return low, jnp.clip(high, 0, cfg.keys)


def clear_chunks(cfg: FlashConfig, at: GridStep, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[start, stop): the chunks of keys [low, high) that every row of the group sees completely, segments aside."""
    (left, right), begin, end = cfg.mask.window, low, jnp.minimum(high, at.length)
    if cfg.mask.causal:
        end = jnp.minimum(end, at.position + 1)
    if right is not None:
        end = jnp.minimum(end, at.position + right + 1)
    if left is not None:
        begin = jnp.maximum(begin, at.position + cfg.reach - 1 - left)
    # whole chunks only: rounded up at the beginning, down at the end
    start = lax.div(begin + (cfg.chunk - 1), cfg.chunk)
    return start, jnp.maximum(start, lax.div(jnp.maximum(end, 0), cfg.chunk))


def each_chunk(cfg: FlashConfig, masks: Masks, at: GridStep, attend: AttendTiles, finish: Callable[[], None]) -> None:
    """Call attend(tiles), each list one unrolled block, until every row of the group has seen all its keys; then finish().

    A chunk that all rows see is one block with all units. A causal group's diagonal, if it is aligned with chunks, comes
    last: one block without the keys that no row sees, whose tiles finish their units. Of the other keys, those that no
    row of a unit sees are skipped, and the rest is processed unit by unit, masked.
    """
    limit: Any = cfg.keys
    aligned, left = None, cfg.mask.window[0]
    # With a window shorter than a group the diagonal has keys that its last rows do not see, and is masked like others.
    if cfg.mask.causal and (left is None or left >= cfg.reach - 1):
        aligned = (lax.rem(at.position, cfg.chunk) == 0) & (at.position >= 0) & (at.position + cfg.reach <= cfg.keys)
        limit = jnp.where(aligned, at.position, cfg.keys)
    low, high = seen_keys(cfg, at, at.position, cfg.reach)
    high = jnp.minimum(high, limit)
    start, stop = clear_chunks(cfg, at, low, high)

    def by_unit(c: jax.Array) -> None:
        def unit(u: jax.Array, _: None) -> None:
            tile = Tile(u, pl.multiple_of(c * cfg.chunk, cfg.chunk), cfg.chunk, masked=True, limit=limit)
            pl.when(sees(cfg, masks, at, u, c, limit))(lambda: attend([tile]))

        lax.fori_loop(0, cfg.units, unit, None)

    def whole(c: jax.Array) -> None:
        def clear() -> None:
            attend([Tile(u, pl.multiple_of(c * cfg.chunk, cfg.chunk), cfg.chunk) for u in range(cfg.units)])

        if not cfg.segments:
            clear()
            return
        same = one_segment(cfg, masks, at, c)
        pl.when(same)(clear)
        pl.when(jnp.logical_not(same))(lambda: by_unit(c))

    last = lax.div(high + (cfg.chunk - 1), cfg.chunk)
    first = jnp.minimum(lax.div(low, cfg.chunk), last)
    start, stop = jnp.clip(start, first, last), jnp.clip(stop, first, last)
    lax.fori_loop(start, stop, lambda c, _: whole(c), None)
    # a window's left edge and the end of the rest share one loop, so that there is one copy of its body
    edge = start - first
    lax.fori_loop(0, edge + last - stop, lambda i, _: by_unit(jnp.where(i < edge, first + i, stop + i - edge)), None)
    if aligned is None:
        finish()
    else:
        pl.when(aligned)(lambda: attend(_diagonal(cfg, at)))
        pl.when(jnp.logical_not(aligned))(finish)


def _diagonal(cfg: FlashConfig, at: GridStep) -> list[Tile]:
    """Unit u sees the keys at the positions of the units before it, and its own up to the diagonal."""
    tiles = []
    step = max(cfg.chunk, cfg.positions)
    for u in range(cfg.units):
        stop = (u + 1) * cfg.positions
        for begin in range(0, stop, step):
            count = min(step, stop - begin)
            first = pl.multiple_of(at.position + begin, cfg.chunk)
            tiles.append(Tile(u, first, count, diagonal=begin + count == stop))
    return tiles


def sees(cfg: FlashConfig, masks: Masks, at: GridStep, unit: jax.Array, chunk: jax.Array, limit: Any) -> jax.Array:
    """Whether some row of the unit may see some key of the chunk below `limit`."""
    low, high = seen_keys(cfg, at, at.position + unit * cfg.positions, cfg.positions)
    overlapping = (chunk * cfg.chunk < jnp.minimum(high, limit)) & (chunk * cfg.chunk + cfg.chunk > low)
    if cfg.segments:
        # ranges of ids overlap wherever a common segment exists, and perhaps elsewhere, where all is masked
        least, greatest = _unit_span(cfg, masks, at, unit)
        key_least, key_greatest = _chunk_span(cfg, masks, at, chunk)
        overlapping &= (least <= key_greatest) & (greatest >= key_least)
    return overlapping


def one_segment(cfg: FlashConfig, masks: Masks, at: GridStep, chunk: jax.Array) -> jax.Array:
    """Whether the group and the chunk consist of one common segment."""
    least, greatest = _chunk_span(cfg, masks, at, chunk)
    same = least == greatest
    for u in range(cfg.units):
        unit_least, unit_greatest = _unit_span(cfg, masks, at, u)
        same &= (unit_least == least) & (unit_greatest == least)
    return same


def _unit_span(cfg: FlashConfig, masks: Masks, at: GridStep, unit: Any) -> tuple[jax.Array, jax.Array]:
    total = cfg.units * cfg.groups
    base = at.sequence * 2 * (total + cfg.chunks) + at.group * cfg.units + unit
    return masks.spans[base], masks.spans[base + total]


def _chunk_span(cfg: FlashConfig, masks: Masks, at: GridStep, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = cfg.units * cfg.groups
    base = at.sequence * 2 * (total + cfg.chunks) + 2 * total + chunk
    return masks.spans[base], masks.spans[base + cfg.chunks]


def scores(
    cfg: FlashConfig, masks: Masks, at: GridStep, tile: Tile, queries: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """([keys, rows] in units of log2, -inf where not seen; their derivative by the uncapped scores, or None for 1).

    queries: [D, rows] of the tile's unit; keys: [count, D] of the tile.
    """
    s = dot(keys, queries, 1, 0)
    slope = None
    if cfg.logits_soft_cap:
        t = jnp.tanh(s * (cfg.scale / cfg.logits_soft_cap))
        s, slope = t * (cfg.logits_soft_cap * LOG2_E), 1.0 - t * t
    else:
        s *= cfg.scale * LOG2_E
    unit, first, count = tile.unit, tile.first, tile.count
    # a lane's position in its unit: heads follow one another, and Q is a power of two
    offset = lax.broadcasted_iota(jnp.int32, (1, cfg.rows), 1) & (cfg.positions - 1)
    position = at.position + unit * cfg.positions + offset
    if cfg.alibi:
        dist = (first + lax.broadcasted_iota(jnp.int32, s.shape, 0) - position).astype(jnp.float32)
        s += masks.rules[0, SLOPE : SLOPE + 1] * (dist if cfg.mask.causal else -jnp.abs(dist))
    if tile.masked:
        (left, right), j = cfg.mask.window, first + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        seen = j < jnp.minimum(at.length, tile.limit)
        if cfg.mask.causal:
            seen &= j <= position
        if left is not None:
            seen &= j >= position - left
        if right is not None:
            seen &= j <= position + right
        s = jnp.where(_of_segment(cfg, masks, unit, first, count, seen), s, -jnp.inf)
    elif tile.diagonal:
        before = count - cfg.positions
        shape = (cfg.positions, cfg.rows)
        seen = lax.broadcasted_iota(jnp.int32, shape, 0) <= lax.broadcasted_iota(jnp.int32, shape, 1) & (cfg.positions - 1)
        diagonal = jnp.where(_of_segment(cfg, masks, unit, first + before, cfg.positions, seen), s[before:], -jnp.inf)
        if before:
            unmasked = s[:before]
            if cfg.segments:
                unmasked = jnp.where(_of_segment(cfg, masks, unit, first, before, None), unmasked, -jnp.inf)
            diagonal = jnp.concatenate([unmasked, diagonal])
        s = diagonal
    return s, slope


def _of_segment(cfg: FlashConfig, masks: Masks, unit: Any, first: Any, count: int, seen: jax.Array | None) -> Any:
    if not cfg.segments:
        return seen
    of_keys = masks.key_segments[0, pl.ds(first, count), :]
    same = jnp.tile(of_keys, (1, cfg.rows // LANES)) == masks.row_segments[0, unit]
    return same if seen is None else seen & same
