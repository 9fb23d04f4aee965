"""The backward pass: five products per tile, in one launch.

Probabilities are computed from the scores and the log-sum-exp, so no maximum is needed. The gradients of a kv head's keys
and values stay in VMEM, where all groups of all its query heads add to them; those of the queries stay for one group's
step. All gradients are transposed: probabilities are then the matrix unit's stationary operand, and the 128 rows of a
gradient pass by, where 128 columns of it would fill half of a unit of 256.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._flash import TILE, FlashConfig, GridStep, Masks, Tile, each_chunk, grid_step, scores
from attn.jax.kernels.tpu._refs import Ref, dot


@dataclasses.dataclass(frozen=True)
class BackwardRefs:
    """The refs, in VMEM except for the scalars of `masks`."""

    masks: Masks
    query: Ref  # [1, 1, units, D, rows]
    d_out: Ref  # [1, 1, units, Dv, rows]
    lse: Ref  # [1, 1, units, 1, rows] float32 in units of log2, inf where a row sees no key
    delta: Ref  # [1, 1, units, 1, rows] float32
    keys: Ref  # [1, 1, keys, D]
    key_columns: Ref  # [1, 1, D, keys]
    values: Ref  # [1, 1, keys, Dv]
    dq: Ref  # [1, 1, units, D, rows]
    dk: Ref  # [1, 1, D, keys] float32, before multiplying by `scale`
    dv: Ref  # [1, 1, Dv, keys] float32
    p_ds: Ref  # [2, 2, TILE, rows]: double-buffered tiles of the probabilities and of the scores' gradients
    acc: Ref  # [units, D, rows] float32


def run(cfg: FlashConfig, split: int, refs: BackwardRefs) -> None:
    """A group's step, which requires `acc` to be zero and leaves it zero; `split` successive heads' units share a kv head."""
    at = grid_step(cfg, refs.masks, pl.program_id(0), pl.program_id(2))

    @pl.when((at.group == 0) & (lax.rem(pl.program_id(1), split) == 0))
    def _clear() -> None:
        refs.dk[...] = jnp.zeros(refs.dk.shape, jnp.float32)
        refs.dv[...] = jnp.zeros(refs.dv.shape, jnp.float32)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def finish() -> None:
        for u in range(cfg.units):
            _finish(cfg, refs, u)

    each_chunk(cfg, refs.masks, at, functools.partial(_attend, cfg, refs, at), finish)


def _finish(cfg: FlashConfig, refs: BackwardRefs, unit: Any) -> None:
    refs.dq[0, 0, unit] = (refs.acc[unit] * cfg.scale).astype(refs.dq.dtype)
    refs.acc[unit] = jnp.zeros(refs.acc.shape[1:], jnp.float32)


def _attend(cfg: FlashConfig, refs: BackwardRefs, at: GridStep, tiles: list[Tile]) -> None:
    """Process all tiles in one unrolled block; sums run one tile behind, so that the matrix unit has work meanwhile."""
    pending = None
    for i, tile in enumerate([tile for whole in tiles for tile in whole.split(TILE)]):
        p_ds = refs.p_ds.at[i % 2, :, : tile.count]
        p_ds[0], p_ds[1] = _probabilities(cfg, refs, at, tile)
        if pending is not None:
            pending()
        pending = functools.partial(_add, cfg, refs, tile, p_ds)
    if pending is not None:
        pending()


def _probabilities(cfg: FlashConfig, refs: BackwardRefs, at: GridStep, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """[keys, rows] each: p, and the gradient of the products of queries and keys, without `scale`."""
    keys = pl.ds(tile.first, tile.count)
    s, slope = scores(cfg, refs.masks, at, tile, refs.query[0, 0, tile.unit], refs.keys[0, 0, keys, :])
    dp = dot(refs.values[0, 0, keys, :], refs.d_out[0, 0, tile.unit], 1, 0)
    p = jnp.exp2(s - refs.lse[0, 0, tile.unit])
    ds = p * (dp - refs.delta[0, 0, tile.unit])
    if slope is not None:
        ds *= slope
    unmasked = 0 if tile.masked or cfg.segments else tile.count - cfg.positions * tile.diagonal  # keys that all rows see
    if unmasked < tile.count:  # 0 * NaN, where a row's cotangent is NaN
        masked = jnp.where(s[unmasked:] == -jnp.inf, 0.0, ds[unmasked:])
        ds = jnp.concatenate([ds[:unmasked], masked]) if unmasked else masked
    return p.astype(refs.p_ds.dtype), ds.astype(refs.p_ds.dtype)


def _add(cfg: FlashConfig, refs: BackwardRefs, tile: Tile, p_ds: Ref) -> None:
    keys, p, ds = pl.ds(tile.first, tile.count), p_ds[0], p_ds[1]
    refs.dv[0, 0, :, keys] += dot(refs.d_out[0, 0, tile.unit], p, 1, 1)
    refs.dk[0, 0, :, keys] += dot(refs.query[0, 0, tile.unit], ds, 1, 1)
    refs.acc[tile.unit] += dot(refs.key_columns[0, 0, :, keys], ds, 1, 0)
    if tile.diagonal:
        _finish(cfg, refs, tile.unit)
