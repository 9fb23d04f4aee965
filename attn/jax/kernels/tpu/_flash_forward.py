"""The forward pass: no running maximum, and long unrolled blocks of code.

Exponentials are computed from unshifted scores. That is exact as long as a row's sum is well within the range of float32,
which holds for scores below 66 in magnitude; a unit with a row outside this range is recomputed with a running
maximum. So no step waits for a maximum, the sum is never rescaled, and the order of keys is free: products, exponentials
and products of different units overlap. The keys at the rows' own positions, the diagonal of a causal group, are one block
that skips what no row sees; the others take one block per chunk, with all units of the group in each.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._flash import SINK, FlashConfig, GridStep, Masks, Tile, each_chunk, grid_step, scores, seen_keys, sees
from attn.jax.kernels.tpu._refs import LOG2_E, Ref, dot

#: A log-sum-exp up to this magnitude needs no maximum: it leaves 30 binary digits below for terms of the sum.
_LARGEST = 96 / LOG2_E


@dataclasses.dataclass(frozen=True)
class ForwardRefs:
    """The refs, in VMEM except for the scalars of `masks`."""

    masks: Masks
    query: Ref  # [1, 1, units, D, rows]
    keys: Ref  # [1, 1, keys, D]
    values: Ref  # [1, 1, Dv, keys]
    out: Ref  # [1, 1, units, Dv, rows]
    lse: Ref  # [1, 1, units, 1, rows] float32
    total: Ref  # [units, 8, rows] float32: sums of exponentials, the 8 rows not yet added
    acc: Ref  # [units, Dv, rows] float32
    m: Ref  # [8, rows] float32: the maximum, if needed


def run(cfg: FlashConfig, refs: ForwardRefs) -> None:
    """A group's step. It requires `total` and `acc` to be zero and leaves them zero."""
    at = grid_step(cfg, refs.masks, pl.program_id(0), pl.program_id(2))

    @pl.when((pl.program_id(1) == 0) & (at.group == 0))
    def _clear() -> None:
        refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def finish() -> None:
        _check(cfg, refs, at, [_finish(cfg, refs, at, u) for u in range(cfg.units)])

    each_chunk(cfg, refs.masks, at, functools.partial(_attend, cfg, refs, at), finish)


def _attend(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, tiles: list[Tile]) -> None:
    """Process all tiles in one unrolled block, software-pipelined so that the matrix unit has work during exponentials.

    The products of keys run one tile ahead, those of values one tile behind.
    """
    failed: list[jax.Array] = []
    pending = None
    s = _tile_scores(cfg, refs, at, tiles[0])
    for i, tile in enumerate(tiles):
        next_scores = _tile_scores(cfg, refs, at, tiles[i + 1]) if i + 1 < len(tiles) else None
        if pending is not None:
            failed += _add_values(cfg, refs, at, *pending)
        p = jnp.exp2(s)
        # eight partial sums, one a sublane: adding those would cross sublanes for each tile instead of once
        refs.total[tile.unit] += jnp.sum(p.reshape(-1, 8, cfg.rows), axis=0)
        pending = tile, p.astype(refs.query.dtype)
        if next_scores is not None:
            s = next_scores
    if pending is not None:
        failed += _add_values(cfg, refs, at, *pending)
    if failed:
        _check(cfg, refs, at, failed)


def _tile_scores(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, tile: Tile) -> jax.Array:
    keys = refs.keys[0, 0, pl.ds(tile.first, tile.count), :]
    return scores(cfg, refs.masks, at, tile, refs.query[0, 0, tile.unit], keys)[0]


def _add_values(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, tile: Tile, p: jax.Array) -> list[jax.Array]:
    """Returns `_finish`'s result for a unit's last tile."""
    refs.acc[tile.unit] += dot(refs.values[0, 0, :, pl.ds(tile.first, tile.count)], p, 1, 0)
    return [_finish(cfg, refs, at, tile.unit)] if tile.diagonal else []


def _finish(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, unit: Any) -> jax.Array:
    """Write a unit's results; [1, rows]: 1 for each real row whose sum needs a maximum, is empty, or is NaN, else 0."""
    total = jnp.sum(refs.total[unit], axis=0, keepdims=True)
    _write(cfg, refs, unit, jnp.zeros_like(total), total)
    return _outside(cfg, at, unit, refs.lse[0, 0, unit])


def _outside(cfg: FlashConfig, at: GridStep, unit: Any, lse: jax.Array) -> jax.Array:
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1) & (cfg.positions - 1)
    row = (at.group * cfg.units + unit) * cfg.positions + lane
    # NaN and -inf compare false; padding rows may have any sum, and are cut off
    in_range = (jnp.abs(lse) <= _LARGEST) | (row < cfg.first_row) | (row >= cfg.first_row + cfg.num_rows)
    return jnp.where(in_range, 0.0, 1.0)


def _check(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, failed: list[jax.Array]) -> None:
    """Recompute the units that have a row out of range."""

    @pl.when(jnp.max(functools.reduce(jnp.maximum, failed)) > 0)
    def _recompute_units() -> None:
        def unit(u: jax.Array, _: None) -> None:
            pl.when(jnp.max(_outside(cfg, at, u, refs.lse[0, 0, u])) > 0)(lambda: _exact(cfg, refs, at, u))

        lax.fori_loop(0, cfg.units, unit, None)


def _write(cfg: FlashConfig, refs: ForwardRefs, unit: Any, m: jax.Array, total: jax.Array) -> None:
    """Write out and lse of a unit, and zeros for the next; m, total: [1, rows]."""
    weight = total
    if cfg.sinks:
        weight = total + jnp.exp2(refs.masks.rules[0, SINK : SINK + 1] - m)
    empty = total == 0.0
    normaliser = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, weight))
    refs.out[0, 0, unit] = (refs.acc[unit] * normaliser).astype(refs.out.dtype)
    refs.lse[0, 0, unit] = (m + jnp.log2(total)) * (1 / LOG2_E)
    refs.total[unit] = jnp.zeros(refs.total.shape[1:], jnp.float32)
    refs.acc[unit] = jnp.zeros(refs.acc.shape[1:], jnp.float32)


def _exact(cfg: FlashConfig, refs: ForwardRefs, at: GridStep, unit: jax.Array) -> None:
    """Recompute a unit, with every chunk masked and a running maximum."""
    refs.m[...] = jnp.full(refs.m.shape, -jnp.inf, jnp.float32)

    def step(c: jax.Array, _: None) -> None:
        @pl.when(sees(cfg, refs.masks, at, unit, c, cfg.keys))
        def _chunk() -> None:
            tile = Tile(unit, pl.multiple_of(c * cfg.chunk, cfg.chunk), cfg.chunk, masked=True, limit=cfg.keys)
            s = _tile_scores(cfg, refs, at, tile)
            old_m = refs.m[...]
            new = jnp.maximum(old_m, jnp.max(s, axis=0, keepdims=True))
            safe = jnp.where(new == -jnp.inf, 0.0, new)
            p, rescale = jnp.exp2(s - safe[:1]), jnp.exp2(old_m - safe)
            refs.m[...] = new
            refs.total[unit] = refs.total[unit] * rescale + jnp.sum(p.reshape(-1, 8, cfg.rows), axis=0)
            refs.acc[unit] = refs.acc[unit] * rescale[:1]
            _add_values(cfg, refs, at, tile, p.astype(refs.query.dtype))

    low, high = seen_keys(cfg, at, at.position + unit * cfg.positions, cfg.positions)
    lax.fori_loop(lax.div(low, cfg.chunk), lax.div(high + (cfg.chunk - 1), cfg.chunk), step, None)
    m = refs.m[:1]
    _write(cfg, refs, unit, jnp.where(m == -jnp.inf, 0.0, m), jnp.sum(refs.total[unit], axis=0, keepdims=True))
