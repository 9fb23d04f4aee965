"""Prefill: the query rows of a long request meet a chunk of keys.

Scores are held transposed, keys on sublanes and query rows on lanes. The maximum over keys is then an elementwise one,
and the second product has the weights on the stationary side of the matrix unit, whose 256 columns they fill; with
rows on sublanes the 128 lanes of the values would leave half of it idle, and every maximum would cross lanes. The sum,
too, is kept transposed, and turned once an item. The state (m, l, acc) is double: a chunk reads one and writes the
other, so that a chunk can be done again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._plan import NO_TREE
from attn.jax.kernels.tpu._refs import K_FACTOR, LANES, LOG2_E, SINK, SLOPE, V_FACTOR, Config, Refs, dot


class Item(NamedTuple):
    """The scalars of an item, and which half of the double buffers holds its queries."""

    q_slot: jax.Array
    position: jax.Array
    low: jax.Array
    high: jax.Array
    context: jax.Array


#: By how much, in powers of two, a score may exceed what the exponentials are taken relative to.
_HEADROOM = 24.0

#: Scores of one straight stretch of code: the matrix unit idles at its ends, and compilation takes longer with its length.
_SCORES_AT_ONCE = 1 << 21


def reset(cfg: Config, refs: Refs) -> None:
    refs.turn[0] = 0
    refs.m[0] = jnp.full(refs.m.shape[1:], -jnp.inf, jnp.float32)
    refs.l[0] = jnp.zeros(refs.l.shape[1:], jnp.float32)
    refs.acc[0] = jnp.zeros(refs.acc.shape[1:], jnp.float32)


def is_clear(cfg: Config, item: Item, first: jax.Array, stop: jax.Array) -> jax.Array:
    """Whether every row of the item sees every key in [first, stop)."""
    left, right = cfg.window
    clear = (stop <= item.high) & (first >= item.low)
    if cfg.causal:
        before = stop <= item.position + 1
        if cfg.tree:
            before |= (stop <= item.context) & (item.context != NO_TREE)
        clear &= before
    if left is not None:
        clear &= first >= item.position + cfg.large - 1 - left
    if right is not None:
        clear &= stop <= item.position + right + 1
    return clear


def attend(cfg: Config, refs: Refs, item: Item, slot: jax.Array, begin: jax.Array, start: jax.Array, masked: bool) -> None:
    """All heads meet the keys in rows [start, start + chunk) of the block in `slot`, whose first key is `begin`."""
    before = refs.turn[0]
    after = 1 - before
    refs.turn[0] = after
    refs.alarm[...] = jnp.zeros(refs.alarm.shape, jnp.float32)
    at_once = 1
    while cfg.num_kv_heads % (2 * at_once) == 0 and 2 * at_once * cfg.rows * cfg.chunk <= _SCORES_AT_ONCE:
        at_once *= 2

    def heads(n: jax.Array, _: None) -> None:
        _streamed(cfg, refs, item, slot, begin, start, masked, [n * at_once + i for i in range(at_once)], before, after)

    lax.fori_loop(0, cfg.num_kv_heads // at_once, heads, None)

    @pl.when(jnp.max(refs.alarm[...]) > 0)
    def _() -> None:
        def head(k: jax.Array, _: None) -> None:
            _exact(cfg, refs, item, slot, begin, start, k, before, after)

        lax.fori_loop(0, cfg.num_kv_heads, head, None)


def _streamed(
    cfg: Config, refs: Refs, item: Item, slot: jax.Array, begin: jax.Array, start: jax.Array, masked: bool,
    heads: list[jax.Array], before: jax.Array, after: jax.Array,
) -> None:  # fmt: skip
    """One pass over the scores: exponentials are relative to the maximum of the chunks *before*.

    So they need not wait for this chunk's maximum, nor scores be kept until it is known. That is exact as long as no
    score exceeds the old maximum by more than floats have room for; a row that has none yet takes 0. Where it does not
    hold, `alarm` is raised and the chunk done again. The products of values come one tile late, so that the matrix
    unit has work during exponentials.
    """
    dtype = refs.q.dtype
    tiles = [(top, at) for top in range(0, cfg.rows, cfg.row_tile) for at in range(0, cfg.chunk, cfg.key_tile)]
    late = None
    for k in heads:
        for top, offset in tiles:
            at = slice(top, top + cfg.row_tile)
            keys_at = pl.ds(start + offset, cfg.key_tile)
            s = _scores(cfg, refs, item, slot, begin + start + offset, keys_at, k, top, masked)
            if late is not None:
                late()
            old = refs.m[before, k, :, at]
            base = jnp.where(old == -jnp.inf, 0.0, old)
            p = jnp.exp2(s - base[:1])
            is_first, is_last = offset == 0, offset + cfg.key_tile == cfg.chunk
            source = before if is_first else after
            new = jnp.maximum(refs.m[source, k, :, at], jnp.max(s, axis=0, keepdims=True))
            total = refs.l[source, k, :, at] + jnp.sum(p, axis=0, keepdims=True)
            fade = None
            if is_last:
                grown = jnp.where(old == -jnp.inf, jnp.abs(new), new - old)
                unseen = new == -jnp.inf
                fade = jnp.exp2(base - jnp.where(unseen, base, new))
                total = total * fade
                refs.alarm[:, at] = jnp.maximum(refs.alarm[:, at], jnp.where((grown <= _HEADROOM) | unseen, 0.0, 1.0))
            refs.m[after, k, :, at] = new
            refs.l[after, k, :, at] = total
            late = functools.partial(_add_values, cfg, refs, slot, keys_at, k, at, p.astype(dtype), source, after, fade)
    assert late is not None
    late()


def _add_values(
    cfg: Config, refs: Refs, slot: jax.Array, keys_at: Any, k: jax.Array, at: slice, p: jax.Array, source: jax.Array,
    after: jax.Array, fade: jax.Array | None,
) -> None:  # fmt: skip
    values = refs.kv[slot, cfg.planes - 1, k, keys_at, :].astype(p.dtype)
    total = refs.acc[source, k, :, at] + dot(values, p, 0, 0)
    refs.acc[after, k, :, at] = total if fade is None else total * fade[:1]


def _exact(
    cfg: Config, refs: Refs, item: Item, slot: jax.Array, begin: jax.Array, start: jax.Array, k: jax.Array, before: jax.Array,
    after: jax.Array,
) -> None:  # fmt: skip
    """The same for one head with the maximum first: for chunks whose scores leap."""
    source = before
    for offset in range(0, cfg.chunk, cfg.key_tile):
        keys_at = pl.ds(start + offset, cfg.key_tile)
        for top in range(0, cfg.rows, cfg.row_tile):
            at = slice(top, top + cfg.row_tile)
            s = _scores(cfg, refs, item, slot, begin + start + offset, keys_at, k, top, True)
            old = refs.m[source, k, :, at]
            new = jnp.maximum(old, jnp.max(s, axis=0, keepdims=True))
            safe = jnp.where(new == -jnp.inf, 0.0, new)
            p, fade = jnp.exp2(s - safe[:1]), jnp.exp2(old - safe)
            refs.m[after, k, :, at] = new
            refs.l[after, k, :, at] = refs.l[source, k, :, at] * fade + jnp.sum(p, axis=0, keepdims=True)
            values = refs.kv[slot, cfg.planes - 1, k, keys_at, :].astype(refs.q.dtype)
            part = dot(values, p.astype(refs.q.dtype), 0, 0)
            refs.acc[after, k, :, at] = refs.acc[source, k, :, at] * fade[:1] + part
        source = after


def _scores(
    cfg: Config, refs: Refs, item: Item, slot: jax.Array, first: jax.Array, keys_at: Any, k: jax.Array, top: int, masked: bool
) -> jax.Array:
    """[keys, rows] of one tile, in units of log2; `first` is the position of its first key, `top` its first row."""
    at = slice(top, top + cfg.row_tile)
    keys = refs.kv[slot, 0, k, keys_at, :].astype(refs.q.dtype)
    s = dot(keys, refs.q[item.q_slot, k, at, :], 1, 1) * refs.rules[K_FACTOR, k, :1, at]
    if cfg.logits_soft_cap:
        s = jnp.tanh(s) * (cfg.logits_soft_cap * LOG2_E)
    if not (masked or cfg.alibi):
        return s
    j = first + lax.broadcasted_iota(jnp.int32, s.shape, 0)
    position = item.position + lax.div(top + lax.broadcasted_iota(jnp.int32, (1, cfg.row_tile), 1), cfg.group)
    if cfg.alibi:
        away = (j - position).astype(jnp.float32)
        s += refs.rules[SLOPE, k, :1, at] * (away if cfg.causal and not cfg.tree else -jnp.abs(away))
    if not masked:
        return s
    seen = (j < item.high) & (j >= item.low)
    if cfg.causal:
        ordered = j <= position
        if cfg.tree:
            # row w of a one-hot matrix is new key w: a product places the tree's edges among the keys
            shape = (cfg.key_tile, LANES)
            node = first - item.context + lax.broadcasted_iota(jnp.int32, shape, 0)
            one_hot = jnp.where(node == lax.broadcasted_iota(jnp.int32, shape, 1), 1.0, 0.0).astype(refs.edges.dtype)
            edge = dot(one_hot, refs.edges[item.q_slot, at, :], 1, 1) > 0.5
            is_tree = item.context != NO_TREE
            ordered = (ordered & jnp.logical_not(is_tree)) | ((j < item.context) & is_tree) | edge
        seen &= ordered
    left, right = cfg.window
    if left is not None:
        seen &= j >= position - left
    if right is not None:
        seen &= j <= position + right
    return jnp.where(seen, s, -jnp.inf)


def finish(cfg: Config, refs: Refs) -> None:
    """acc / l of every head into `o`, and its natural log-sum-exp into `lse_rows`, both with rows on sublanes again."""
    turn = refs.turn[0]

    def head(k: jax.Array, _: None) -> None:
        m, total = refs.m[turn, k], refs.l[turn, k]
        weight = total
        if cfg.sinks:
            weight = total + jnp.exp2(refs.rules[SINK, k] - jnp.where(m == -jnp.inf, 0.0, m))
        share = jnp.where(total == 0.0, 0.0, refs.rules[V_FACTOR, k] / jnp.where(total == 0.0, 1.0, weight))
        refs.o[k] = jnp.transpose(refs.acc[turn, k] * share[:1]).astype(refs.o.dtype)
        if cfg.lse:
            lse = (m + jnp.log2(total)) * (1 / LOG2_E)
            refs.lse_rows[k] = jnp.transpose(jnp.broadcast_to(lse[:1], (LANES, lse.shape[1])))

    lax.fori_loop(0, cfg.num_kv_heads, head, None)
