"""Decode: the one query row of a request against a block of keys.

With G rows per kv head, a score matrix of one head would fill only a part of the sublanes. So J kv heads are joined: their
keys side by side are one matrix of J * lanes columns (free: a lane offset of 128 is another register), and the queries are
block-diagonal, so one product gives the J * G rows of scores as one dense matrix. The product with the joined values gives
every head's weighted sum of every head's values; the diagonal blocks, selected once per item, are the result. Keys and
values pass the matrix unit once, which is the only cost. Products of keys run ahead of exponentials and products of values,
by as much as the registers hold: the scheduler keeps source order, and a chain per head would wait at each link.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._pages import Item
from attn.jax.kernels.tpu._refs import (
    K_FACTOR,
    LANES,
    LOG2_E,
    SINK,
    SLOPE,
    V_FACTOR,
    Config,
    Refs,
    dot,
    own_lanes,
    rows_at,
    widen,
    widened,
    widened_exactly,
)

#: Registers that scores may use in one straight stretch: all, since the few that spill cost less than a stall.
_SCORE_REGISTERS = 64

#: And those that may wait for their exponentials when the next product of keys is started.
_WAITING_REGISTERS = 48

#: Keys per score matrix.
_KEYS_AT_ONCE = 1024


def reset(cfg: Config, refs: Refs) -> None:
    refs.m1[...] = jnp.full(refs.m1.shape, -jnp.inf, jnp.float32)
    refs.l1[...] = jnp.zeros(refs.l1.shape, jnp.float32)
    refs.acc1[...] = jnp.zeros(refs.acc1.shape, jnp.float32)
    refs.recompute1[...] = jnp.zeros(refs.recompute1.shape, jnp.int32)


def failed(cfg: Config, refs: Refs) -> jax.Array:
    """Whether the item must be repeated with `exact`: a sum is not finite, or a NaN of the cache was lost."""
    strange = jnp.where(refs.l1[...] < jnp.inf, 0, 1).reshape(-1, 8, LANES)
    return jnp.any(jnp.maximum(jnp.max(strange, axis=0), refs.recompute1[...]) > 0)


def attend(cfg: Config, refs: Refs, item: Item, slot: jax.Array, begin: jax.Array, masked: bool, exact: bool = False) -> None:
    """Process the keys [begin, begin + kv_block) in `slot` for all heads.

    `exact`: no head is affected by the keys of those joined with it, which it multiplies by 0.
    """
    keys_at_once = keys_of_step(cfg)
    shape = (cfg.single_rows, keys_at_once)
    dtype = refs.q1.dtype

    def joined(plane: int, n: jax.Array, first: int) -> jax.Array:
        at = pl.ds(first, keys_at_once)
        heads = [rows_at(cfg, refs, slot, plane, n * cfg.join + i, at) for i in range(cfg.join)]
        heads = [widened_exactly(cfg, x) if exact else widened(cfg, x, dtype, refs.recompute1) for x in heads]
        return heads[0] if cfg.join == 1 else jnp.concatenate(heads, axis=1)

    def product(n: jax.Array, first: int) -> jax.Array:
        queries, keys = refs.q1[item.q_slot, n], joined(0, n, first)
        if not exact:
            return dot(queries, keys, 1, 1)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        s = jnp.zeros(shape, jnp.float32)
        for i in range(cfg.join):
            own = jnp.where(own_lanes(cfg, keys.shape, i), keys, 0.0).astype(dtype)
            s = jnp.where(row >= i * cfg.group, dot(queries, own, 1, 1), s)
        return s

    def scores(n: jax.Array, first: int) -> jax.Array:
        s = product(n, first) * widen(refs.rules1[K_FACTOR, n], keys_at_once)
        if cfg.logits_soft_cap:
            s = jnp.tanh(s) * (cfg.logits_soft_cap * LOG2_E)
        j = begin + first + lax.broadcasted_iota(jnp.int32, shape, 1)
        if cfg.alibi:
            away = (j - item.position).astype(jnp.float32)
            s += widen(refs.rules1[SLOPE, n], keys_at_once) * (away if cfg.mask.causal else -jnp.abs(away))
        if not masked:
            return s
        seen = (j >= item.low) & (j < item.high)
        for low, high in item.gaps:
            seen &= (j < low) | (j >= high)
        return jnp.where(seen, s, -jnp.inf)

    def add(n: jax.Array, first: int, s: jax.Array) -> None:
        m = refs.m1[n]
        new_m = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        safe = jnp.where(new_m == -jnp.inf, 0.0, new_m) if masked else new_m
        p = jnp.exp2(s - widen(safe, keys_at_once))
        rescale = jnp.exp2(m - safe)
        refs.m1[n] = new_m
        refs.l1[n] = refs.l1[n] * rescale + jnp.sum(p, axis=1, keepdims=True)
        values = joined(cfg.planes - 1, n, first).astype(dtype)
        refs.acc1[n] = refs.acc1[n] * widen(rescale, cfg.join * cfg.lanes) + dot(p.astype(dtype), values, 1, 0)

    def stage(first_group: jax.Array, count: int, firsts: Sequence[Any]) -> None:
        waiting: list[tuple[jax.Array, Any, jax.Array]] = []
        for first in firsts:
            for n in [first_group + i for i in range(count)]:
                waiting.append((n, first, scores(n, first)))
                if len(waiting) > lag:
                    add(*waiting.pop(0))
        for task in waiting:
            add(*task)

    def process(firsts: Sequence[Any]) -> None:
        """Process the keys from each of `firsts` on, `keys_at_once` each, for all heads."""
        scores_of_one = shape[0] * keys_at_once * len(firsts)
        at_once = 1 if exact else max(1, min(cfg.joined, _SCORE_REGISTERS * 1024 // scores_of_one))
        while cfg.joined % at_once:
            at_once -= 1
        stages = cfg.joined // at_once
        lax.fori_loop(0, stages, lambda i, _: stage(i * at_once, at_once, firsts), None, unroll=not exact and stages <= 2)

    lag = 0 if exact else _WAITING_REGISTERS * 1024 // (shape[0] * shape[1])
    if not masked or cfg.kv_block == keys_at_once:
        process(range(0, cfg.kv_block, keys_at_once))
    else:  # the end of a request's last block may not contain any of its keys
        lax.fori_loop(
            0, steps_of(cfg, item.high - begin), lambda n, _: process([pl.multiple_of(n * keys_at_once, keys_at_once)]), None
        )


def keys_of_step(cfg: Config) -> int:
    """Keys per score matrix."""
    return min(cfg.kv_block, _KEYS_AT_ONCE)


def steps_of(cfg: Config, seen: jax.Array) -> jax.Array:
    """The number of score matrices that hold a block's first `seen` keys."""
    size = keys_of_step(cfg)
    return lax.div(jnp.clip(seen, 0, cfg.kv_block) + (size - 1), size)


def finish(cfg: Config, refs: Refs) -> None:
    """Write acc / l of every head into `o1`, and its natural log-sum-exp into `lse_rows1`."""

    def one(n: jax.Array, _: None) -> None:
        m, total = refs.m1[n], refs.l1[n]
        weight = total
        if cfg.sinks:
            weight = total + jnp.exp2(refs.rules1[SINK, n] - jnp.where(m == -jnp.inf, 0.0, m))
        normaliser = jnp.where(total == 0.0, 0.0, refs.rules1[V_FACTOR, n] / jnp.where(total == 0.0, 1.0, weight))
        row = lax.broadcasted_iota(jnp.int32, (cfg.single_rows, cfg.lanes), 0)
        out = refs.acc1[n, :, : cfg.lanes]
        for i in range(1, cfg.join):
            out = jnp.where(row >= i * cfg.group, refs.acc1[n, :, i * cfg.lanes : (i + 1) * cfg.lanes], out)
        refs.o1[n] = (out * widen(normaliser, cfg.lanes)).astype(refs.o1.dtype)
        if cfg.lse:  # the choice keeps a compiler from fusing product and sum, which rounds once, in some programs only
            refs.lse_rows1[n] = jnp.where(total == 0.0, -jnp.inf, m * (1 / LOG2_E)) + jnp.log(total)

    lax.fori_loop(0, cfg.joined, one, None, unroll=cfg.joined <= 4)
