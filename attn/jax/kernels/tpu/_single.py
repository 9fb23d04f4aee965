"""Decode: the query rows of requests that have one each against keys of a block (`_line`).

With G rows per kv head, a score matrix of one head would fill only a part of the sublanes. So J kv heads are joined: their
keys side by side are one matrix of J * lanes columns (free: a lane offset of 128 is another register), and the queries are
block-diagonal, so one product gives the J * G rows of scores as one dense matrix. The product with the joined values gives
every head's weighted sum of every head's values; the diagonal blocks, selected once per item, are the result. Keys and
values pass the matrix unit once, which is the only cost. Products of keys run ahead of exponentials and products of values,
by as much as the registers hold: the scheduler keeps source order, and a chain per head would wait at each link.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._refs import (
    K_FACTOR,
    LANES,
    LOG2_E,
    SINK,
    SLOPE,
    V_FACTOR,
    RaggedConfig,
    RaggedRefs,
    dot,
    halves,
    own_lanes,
    own_scales,
    rows_at,
    signed_halves,
    widen,
    widened,
    widened_exactly,
    zero_code,
)

#: Registers that the scores of one unrolled stage may use: all, since the few that spill cost less than a stall.
_SCORE_REGISTERS = 64

#: And those that may wait for their exponentials when the next product of keys is started.
_PENDING_REGISTERS = 48

#: Keys per score matrix of a block that belongs to one request.
KEYS_AT_ONCE = 1024


class Keys(NamedTuple):
    """Successive keys of one request, and where its queries (in `q1`) and its sums (in `m1`, `l1`, `acc1`) are.

    The first key is at position `begin`; the request sees those in [low, high) that are in none of `gaps`.
    """

    query: jax.Array
    state: jax.Array
    begin: jax.Array
    low: jax.Array
    high: jax.Array
    position: jax.Array
    gaps: tuple[tuple[jax.Array, jax.Array], ...] = ()


#: (keys, the first row, the number of keys) of each tile.
Tiles = Sequence[tuple[Keys, int, int]]


def reset(cfg: RaggedConfig, refs: RaggedRefs, state: Any) -> None:
    refs.m1[state] = jnp.full(refs.m1.shape[1:], -jnp.inf, jnp.float32)
    refs.l1[state] = jnp.zeros(refs.l1.shape[1:], jnp.float32)
    refs.acc1[state] = jnp.zeros(refs.acc1.shape[1:], jnp.float32)
    refs.recompute1[state] = jnp.zeros(refs.recompute1.shape[1:], jnp.int32)


def failed(cfg: RaggedConfig, refs: RaggedRefs, state: Any = slice(None)) -> jax.Array:
    """Whether a request must be repeated with `exact`: a sum is not finite, or a NaN of the cache was lost."""
    # 0 x is NaN for NaN and infinities, so one sum of products shows any number that is not finite.
    sums = [x[state][..., at : at + LANES] for x in (refs.l1, refs.acc1) for at in range(0, x.shape[-1], LANES)]
    zero = functools.reduce(jnp.add, [jnp.sum((x * 0.0).reshape(-1, 8, LANES), axis=0) for x in sums])
    lost = jnp.max(refs.recompute1[state].reshape(-1, 8, LANES), axis=0)
    return jnp.any(jnp.where(zero == 0.0, lost, 1) > 0)


def attend(cfg: RaggedConfig, refs: RaggedRefs, slot: jax.Array, tiles: Tiles, masked: bool, exact: bool = False) -> None:
    """Process tiles of the block in `slot` for all heads.

    The keys of an unmasked tile begin at row 0. `exact`: no head is affected by the keys of the heads joined with
    it, which it multiplies by 0.
    """
    size, dtype = tiles[0][2], refs.q1.dtype
    shape = (cfg.single_rows, size)
    # Codes enter the matrix unit as they are stored, 8 above their values, of which the products are cleared.
    unsigned = cfg.packed and not exact and dtype != jnp.float32

    def cleared(products: jax.Array, rows: jax.Array) -> jax.Array:
        return products - zero_code(cfg.float8) * jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True)

    def joined(plane: int, n: jax.Array, first: int, keys: Keys) -> jax.Array:
        of_heads = [n * cfg.join + i for i in range(cfg.join)]
        heads = [rows_at(cfg, refs, slot, 0 if cfg.packed else plane, i, pl.ds(first, size)) for i in of_heads]
        lost = refs.recompute1.at[keys.state]
        if cfg.packed:
            heads = [(halves if unsigned else signed_halves)(x, plane, cfg.float8) for x in heads]
        else:
            heads = [widened_exactly(cfg, x) if exact else widened(cfg, x, dtype, lost) for x in heads]
        return heads[0] if cfg.join == 1 else jnp.concatenate(heads, axis=1)

    def scaled(x: jax.Array, kind: int, n: jax.Array, first: int, keys: Keys) -> jax.Array:
        """x [rows, size] times the scales of each row's own head; those of keys that are not seen may be any."""
        row, lane = (lax.broadcasted_iota(jnp.int32, (cfg.single_rows, LANES), axis) for axis in (0, 1))
        parts = []
        for at in range(first, first + size, LANES):
            heads = own_scales(cfg, refs, slot, kind, n, cfg.join, at)
            part = jnp.broadcast_to(heads[0], row.shape)
            for i in range(1, cfg.join):
                part = jnp.where(row >= i * cfg.group, heads[i], part)
            j = (keys.begin - first if masked else keys.begin) + at + lane
            parts.append(jnp.where(visible(keys, j), part, 0.0) if masked else part)
        return x * jnp.concatenate(parts, axis=1)

    def visible(keys: Keys, j: jax.Array) -> jax.Array:
        seen = j < keys.high if cfg.from_start else (j >= keys.low) & (j < keys.high)
        for low, high in keys.gaps:
            seen &= (j < low) | (j >= high)
        return seen

    def product(n: jax.Array, first: int, keys: Keys) -> jax.Array:
        queries, rows = refs.q1[keys.query, n], joined(0, n, first, keys)
        if not exact:
            products = dot(queries, rows, 1, 1)
            return cleared(products, queries) if unsigned else products
        # Rows of one head take the product with that head's lanes alone: the others', which are multiplied by 0, may be NaN.
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        s = jnp.zeros(shape, jnp.float32)
        for i in range(cfg.join):
            head_keys = jnp.where(own_lanes(cfg, rows.shape, i), rows, 0.0).astype(dtype)
            s = jnp.where(row >= i * cfg.group, dot(queries, head_keys, 1, 1), s)
        return s

    def scores(n: jax.Array, first: int, keys: Keys) -> jax.Array:
        s = product(n, first, keys) * widen(refs.rules1[K_FACTOR, n], size)
        s = scaled(s, 0, n, first, keys) if cfg.packed else s
        if cfg.logits_soft_cap:
            s = jnp.tanh(s) * (cfg.logits_soft_cap * LOG2_E)
        j = (keys.begin if masked else keys.begin + first) + lax.broadcasted_iota(jnp.int32, shape, 1)
        if cfg.alibi:
            dist = (j - keys.position).astype(jnp.float32)
            s += widen(refs.rules1[SLOPE, n], size) * (dist if cfg.mask.causal else -jnp.abs(dist))
        return jnp.where(visible(keys, j), s, -jnp.inf) if masked else s

    def add(n: jax.Array, first: int, keys: Keys, s: jax.Array) -> None:
        at = keys.state, n
        m = refs.m1[at]
        new_m = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        # without a mask a row has seen keys, and its maximum is a number
        safe = jnp.where(new_m == -jnp.inf, 0.0, new_m) if masked else new_m
        p = jnp.exp2(s - widen(safe, size))
        rescale = jnp.exp2(m - safe)
        refs.m1[at] = new_m
        refs.l1[at] = refs.l1[at] * rescale + jnp.sum(p, axis=1, keepdims=True)
        p = scaled(p, 1, n, first, keys) if cfg.packed else p
        values = joined(1 if cfg.packed else cfg.planes - 1, n, first, keys)
        if exact:  # a weight of 0 does not hide NaN
            row = keys.begin + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(visible(keys, row), values, 0.0)
        values = values if unsigned else values.astype(dtype)
        rescaled, weights = refs.acc1[at] * widen(rescale, cfg.join * cfg.lanes), p.astype(dtype)
        products = dot(weights, values, 1, 0)
        refs.acc1[at] = rescaled + (cleared(products, weights) if unsigned else products)

    def stage(first_group: jax.Array, count: int) -> None:
        pending: list[tuple[jax.Array, int, Keys, jax.Array]] = []
        for keys, first, _ in tiles:
            for n in [first_group + i for i in range(count)]:
                pending.append((n, first, keys, scores(n, first, keys)))
                if len(pending) > lag:
                    add(*pending.pop(0))
        for task in pending:
            add(*task)

    lag = 0 if exact else _PENDING_REGISTERS * 1024 // (shape[0] * shape[1])
    at_once = 1 if exact else max(1, min(cfg.joined, _SCORE_REGISTERS * 1024 // (shape[0] * size * len(tiles))))
    # stages of equal size, so that they are one loop
    while cfg.joined % at_once:
        at_once -= 1
    stages = cfg.joined // at_once
    lax.fori_loop(0, stages, lambda i, _: stage(i * at_once, at_once), None, unroll=not exact and stages <= 2)


def finish(cfg: RaggedConfig, refs: RaggedRefs, state: Any) -> None:
    """Write acc / l of every head of a request into `o1`, and its natural log-sum-exp into `lse_rows1`."""

    def one(n: jax.Array, _: None) -> None:
        m, total = refs.m1[state, n], refs.l1[state, n]
        weight = total
        if cfg.sinks:
            weight = total + jnp.exp2(refs.rules1[SINK, n] - jnp.where(m == -jnp.inf, 0.0, m))
        normaliser = jnp.where(total == 0.0, 0.0, refs.rules1[V_FACTOR, n] / jnp.where(total == 0.0, 1.0, weight))
        row = lax.broadcasted_iota(jnp.int32, (cfg.single_rows, cfg.lanes), 0)
        # the diagonal blocks: row i's own head is in its columns
        out = refs.acc1[state, n, :, : cfg.lanes]
        for i in range(1, cfg.join):
            out = jnp.where(row >= i * cfg.group, refs.acc1[state, n, :, i * cfg.lanes : (i + 1) * cfg.lanes], out)
        refs.o1[state, n] = (out * widen(normaliser, cfg.lanes)).astype(refs.o1.dtype)
        if cfg.lse:  # the choice keeps a compiler from fusing product and sum, which rounds once, in some programs only
            refs.lse_rows1[state, n] = jnp.where(total == 0.0, -jnp.inf, m * (1 / LOG2_E)) + jnp.log(total)

    lax.fori_loop(0, cfg.joined, one, None, unroll=cfg.joined <= 4)
