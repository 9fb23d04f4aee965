"""The backward pass: five products per tile, in one launch.

Probabilities are computed from the scores and the log-sum-exp, so no maximum is needed. The gradients of a kv head's keys
and values stay in VMEM, where all groups of all its query heads add to them; those of the queries stay for one group's
step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._flash import Config, Masks, Place, Tile, each_chunk, place, scores
from attn.jax.kernels.tpu._refs import Ref, dot


@dataclasses.dataclass(frozen=True)
class Refs:
    """The refs, in VMEM except for the scalars of `masks`."""

    masks: Masks
    query: Ref  # [1, 1, units, D, rows]
    query_rows: Ref  # [1, 1, units, rows, D]
    d_out: Ref  # [1, 1, units, Dv, rows]
    d_out_rows: Ref  # [1, 1, units, rows, Dv]
    lse: Ref  # [1, 1, units, 1, rows] float32 in units of log2, inf where a row sees no key
    delta: Ref  # [1, 1, units, 1, rows] float32
    keys: Ref  # [1, 1, keys, D]
    key_columns: Ref  # [1, 1, D, keys]
    values: Ref  # [1, 1, keys, Dv]
    dq: Ref  # [1, 1, units, D, rows]
    dk: Ref  # [1, 1, keys, D] float32, before multiplying by `scale`
    dv: Ref  # [1, 1, keys, Dv] float32
    acc: Ref  # [units, D, rows] float32


def run(cfg: Config, split: int, refs: Refs) -> None:
    """A group's step, which requires `acc` to be zero and leaves it zero; `split` successive heads' units share a kv head."""
    at = place(cfg, refs.masks, pl.program_id(0), pl.program_id(2))

    @pl.when((at.group == 0) & (lax.rem(pl.program_id(1), split) == 0))
    def _clear() -> None:
        refs.dk[...] = jnp.zeros(refs.dk.shape, jnp.float32)
        refs.dv[...] = jnp.zeros(refs.dv.shape, jnp.float32)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def finish() -> None:
        for u in range(cfg.units):
            _finish(cfg, refs, u)

    each_chunk(cfg, refs.masks, at, functools.partial(_attend, cfg, refs, at), finish)


def _finish(cfg: Config, refs: Refs, unit: Any) -> None:
    refs.dq[0, 0, unit] = (refs.acc[unit] * cfg.scale).astype(refs.dq.dtype)
    refs.acc[unit] = jnp.zeros(refs.acc.shape[1:], jnp.float32)


def _attend(cfg: Config, refs: Refs, at: Place, tiles: list[Tile]) -> None:
    """Process all tiles in one stretch; sums come one tile late, so that the matrix unit has work meanwhile."""
    late = None
    for tile in tiles:
        p, ds = _probabilities(cfg, refs, at, tile)
        if late is not None:
            late()
        dtype = refs.query.dtype
        late = functools.partial(_add, cfg, refs, tile, p.astype(dtype), ds.astype(dtype))
    if late is not None:
        late()


def _probabilities(cfg: Config, refs: Refs, at: Place, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """[keys, rows] each: p, and the gradient of the products of queries and keys, without `scale`."""
    keys = pl.ds(tile.first, tile.count)
    s, slope = scores(cfg, refs.masks, at, tile, refs.query[0, 0, tile.unit], refs.keys[0, 0, keys, :])
    dp = dot(refs.values[0, 0, keys, :], refs.d_out[0, 0, tile.unit], 1, 0)
    p = jnp.exp2(s - refs.lse[0, 0, tile.unit])
    ds = p * (dp - refs.delta[0, 0, tile.unit])
    if slope is not None:
        ds *= slope
    if tile.masked or tile.diagonal:  # 0 * NaN, where a row's cotangent is NaN
        ds = jnp.where(s == -jnp.inf, 0.0, ds)
    return p, ds


def _add(cfg: Config, refs: Refs, tile: Tile, p: jax.Array, ds: jax.Array) -> None:
    keys = pl.ds(tile.first, tile.count)
    refs.dv[0, 0, keys, :] += dot(p, refs.d_out_rows[0, 0, tile.unit], 1, 0)
    refs.dk[0, 0, keys, :] += dot(ds, refs.query_rows[0, 0, tile.unit], 1, 0)
    refs.acc[tile.unit] += dot(refs.key_columns[0, 0, :, keys], ds, 1, 0)
    if tile.diagonal:
        _finish(cfg, refs, tile.unit)
