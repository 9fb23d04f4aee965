"""Decode: the one query row of a request meets a block of keys.

With G rows a kv head, a score matrix of one head would fill a part of the sublanes only. So J kv heads are joined:
their keys side by side are one matrix of J * lanes columns (free: a lane offset of 128 is another register), and the
queries are block-diagonal, so one product gives the J * G rows of scores as one dense matrix. The product with the
joined values gives every head's weighted sum of every head's values; the diagonal blocks, picked once an item, are
what is wanted. Keys and values pass the matrix unit once, which is all that costs. Products of keys come first, for as
many groups as the registers hold, then the exponentials, then the products of values: the scheduler keeps source
order, and a chain a head would wait at each link.
"""

import jax
import jax.numpy as jnp
from jax import lax

from attn.jax.kernels.tpu._refs import K_FACTOR, LOG2_E, SINK, SLOPE, V_FACTOR, Config, Refs, dot, widen, widen_e4m3

#: Registers that scores may take while their group waits: all, since the few that spill cost less than a stall.
_SCORE_REGISTERS = 64


def reset(cfg: Config, refs: Refs) -> None:
    refs.m1[...] = jnp.full(refs.m1.shape, -jnp.inf, jnp.float32)
    refs.l1[...] = jnp.zeros(refs.l1.shape, jnp.float32)
    refs.acc1[...] = jnp.zeros(refs.acc1.shape, jnp.float32)


def attend(
    cfg: Config, refs: Refs, slot: jax.Array, q_slot: jax.Array, begin: jax.Array, bounds: tuple[jax.Array, ...], masked: bool
) -> None:
    """All heads meet the keys [begin, begin + kv_block) in `slot`; `bounds` is (low, high, position)."""
    low, high, position = bounds
    shape = (cfg.single_rows, cfg.kv_block)
    dtype = refs.q1.dtype

    def joined(plane: int, n: jax.Array) -> jax.Array:
        heads = [refs.kv[slot, plane, n * cfg.join + i] for i in range(cfg.join)]
        heads = [widen_e4m3(codes) if cfg.even_odd else codes.astype(dtype) for codes in heads]
        return heads[0] if cfg.join == 1 else jnp.concatenate(heads, axis=1)

    def scores(n: jax.Array) -> jax.Array:
        s = dot(refs.q1[q_slot, n], joined(0, n), 1, 1) * widen(refs.rules1[K_FACTOR, n], cfg.kv_block)
        if cfg.logits_soft_cap:
            s = jnp.tanh(s) * (cfg.logits_soft_cap * LOG2_E)
        j = lax.broadcasted_iota(jnp.int32, shape, 1)
        if cfg.even_odd:
            j = jnp.where(2 * j < cfg.kv_block, 2 * j, 2 * j - cfg.kv_block + 1)
        j += begin
        if cfg.alibi:
            away = (j - position).astype(jnp.float32)
            s += widen(refs.rules1[SLOPE, n], cfg.kv_block) * (away if cfg.causal else -jnp.abs(away))
        return jnp.where((j >= low) & (j < high), s, -jnp.inf) if masked else s

    def weights(n: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = refs.m1[n]
        new_m = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        safe = jnp.where(new_m == -jnp.inf, 0.0, new_m) if masked else new_m
        p = jnp.exp2(s - widen(safe, cfg.kv_block))
        fade = jnp.exp2(m - safe)
        refs.m1[n] = new_m
        refs.l1[n] = refs.l1[n] * fade + jnp.sum(p, axis=1, keepdims=True)
        return p.astype(dtype), fade

    def stage(first: jax.Array, count: int) -> None:
        groups = [first + i for i in range(count)]
        held = [weights(n, s) for n, s in zip(groups, [scores(n) for n in groups], strict=True)]
        for n, (p, fade) in zip(groups, held, strict=True):
            values = joined(0 if cfg.packed else 1, n)
            refs.acc1[n] = refs.acc1[n] * widen(fade, cfg.join * cfg.lanes) + dot(p, values, 1, 0)

    at_once = max(1, min(cfg.joined, _SCORE_REGISTERS * 1024 // (shape[0] * shape[1])))
    while cfg.joined % at_once:
        at_once -= 1
    stages = cfg.joined // at_once
    lax.fori_loop(0, stages, lambda i, _: stage(i * at_once, at_once), None, unroll=stages <= 2)


def finish(cfg: Config, refs: Refs) -> None:
    """acc / l of every head into `o1`, and its natural log-sum-exp into `lse_rows1`."""

    def one(n: jax.Array, _: None) -> None:
        m, total = refs.m1[n], refs.l1[n]
        weight = total
        if cfg.sinks:
            weight = total + jnp.exp2(refs.rules1[SINK, n] - jnp.where(m == -jnp.inf, 0.0, m))
        share = jnp.where(total == 0.0, 0.0, refs.rules1[V_FACTOR, n] / jnp.where(total == 0.0, 1.0, weight))
        row = lax.broadcasted_iota(jnp.int32, (cfg.single_rows, cfg.lanes), 0)
        out = refs.acc1[n, :, : cfg.lanes]
        for i in range(1, cfg.join):
            out = jnp.where(row >= i * cfg.group, refs.acc1[n, :, i * cfg.lanes : (i + 1) * cfg.lanes], out)
        refs.o1[n] = (out * widen(share, cfg.lanes)).astype(refs.o1.dtype)
        if cfg.lse:
            refs.lse_rows1[n] = (m + jnp.log2(total)) * (1 / LOG2_E)

    lax.fori_loop(0, cfg.joined, one, None, unroll=cfg.joined <= 2)
