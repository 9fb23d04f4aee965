"""Prefill: the query rows of a long request against one step of keys.

Scores are transposed, with keys on sublanes and query rows on lanes. The sum over keys is then elementwise, and the second
product has the weights on the stationary side of the matrix unit, whose 256 columns they fill; with rows on sublanes the
128 lanes of the values would leave half of it idle, and every sum would cross lanes. The sums (l and acc) are
double-buffered: a step reads one buffer and writes the other, so that a step can be repeated. The first step of an item reads
zeros instead.

m is the reference that is subtracted in exponentials. It need not be the maximum: any m works as long as sums neither
overflow nor vanish. While it stays fixed, no sum is rescaled and no maximum is computed.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attn.jax.kernels.tpu._pages import Item
from attn.jax.kernels.tpu._plan import NO_TREE
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
    own_lanes,
    own_scales,
    rows_at,
    signed_halves,
    widen,
    widened,
    widened_exactly,
)

#: The scalars of `RaggedRefs.flags`: the current buffer of the sums, whether the step must be repeated, the buffer that it
#: read, and whether it wrote the item's results.
CURRENT, REPEAT, READ, WRITTEN = range(4)
#: The buffer that an item's first step reads: zeros, one for all heads.
ZEROS = 2

#: Rows of a register of 32-bit elements.
_SUBLANES = 8


class StepKeys(NamedTuple):
    """The keys of a step: rows [start, start + size) of the block in `slot`, the first of which is at position `first`.

    clear: how many of the first ones every row sees, if others are masked.
    """

    slot: jax.Array
    start: jax.Array
    first: jax.Array
    size: Any
    clear: int = 0


#: m is chosen again once log2 of a sum of exponentials leaves +-_MAX_LOG2_SUM. Terms that vanish beside a sum
#: this small are below 2 ** -66 of it, and products with a sum this large are far from overflow.
_MAX_LOG2_SUM = 60.0

#: Keys whose weights wait for their product with the values, so that the matrix unit has work during exponentials. A short
#: step has as many score matrices in waiting as others: of eight heads' one each, few would be left beside the exponentials.
_PENDING_KEYS = 768

#: Heads whose results are transposed in one unrolled block: each waits only for the transpose unit.
_HEADS_AT_ONCE = 4


def begin(cfg: RaggedConfig, refs: RaggedRefs) -> None:
    """Before any item."""
    for state in (refs.l, refs.acc):
        state[ZEROS * cfg.num_kv_heads] = jnp.zeros(state.shape[1:], jnp.float32)


def _sums(cfg: RaggedConfig, buffer: jax.Array, k: Any) -> jax.Array:
    """Where the sums of head k in a buffer are: with zeros, everywhere the same."""
    return jnp.where(buffer == ZEROS, ZEROS * cfg.num_kv_heads, buffer * cfg.num_kv_heads + k)


def reset(refs: RaggedRefs) -> None:
    # The first step reads zeros, so that nothing has to be cleared for an item but m.
    refs.flags[CURRENT] = ZEROS
    refs.flags[WRITTEN] = jnp.int32(0)
    refs.m[...] = jnp.zeros(refs.m.shape, jnp.float32)


def is_clear(cfg: RaggedConfig, item: Item, first: jax.Array, stop: jax.Array) -> jax.Array:
    """Whether every row of the item sees every key in [first, stop)."""
    if cfg.ranges:
        return (first >= item.clear[0]) & (stop <= item.clear[1])
    (left, right), chunk = cfg.mask.window, cfg.mask.chunk_size
    # The first row sees the fewest later keys, and the last one the fewest earlier ones.
    clear = (stop <= item.high) & (first >= item.low)
    if cfg.mask.causal:
        before = stop <= item.position + 1
        if cfg.tree:
            before |= (stop <= item.context) & (item.context != NO_TREE)
        clear &= before
    if left is not None:
        clear &= first >= item.position + cfg.large - 1 - left
    if right is not None:
        clear &= stop <= item.position + right + 1
    if chunk is not None:
        clear &= first >= _chunk_start(item.position + cfg.large - 1, chunk)
    return clear


def attend(cfg: RaggedConfig, refs: RaggedRefs, item: Item, step: StepKeys, masked: int) -> None:
    """Process the keys of a step for all heads; `recompute` must follow.

    masked: how many ranges of each row are compared with the keys; 0 if every row sees every key.
    """
    before = refs.flags[CURRENT]
    after = jnp.where(before == 0, 1, 0)
    refs.flags[CURRENT], refs.flags[READ] = after, before
    refs.flags[WRITTEN] = jnp.int32(_writes(cfg, masked))
    refs.recompute[...] = jnp.zeros(refs.recompute.shape, jnp.int32)
    # Heads in one unrolled block, as many as a stretch has scores for: products of one run beside the exponentials of others.
    at_once = 1
    while cfg.num_kv_heads % (2 * at_once) == 0 and 2 * at_once * cfg.rows * step.size <= cfg.stretch:
        at_once *= 2

    def heads(n: jax.Array, _: None) -> None:
        _streamed(cfg, refs, item, step, masked, [n * at_once + i for i in range(at_once)], before, after)

    lax.fori_loop(0, cfg.num_kv_heads // at_once, heads, None)


def recompute(cfg: RaggedConfig, refs: RaggedRefs, item: Item, step: StepKeys) -> None:
    """Repeat a step if `refs.recompute` is set. Separate from `attend`, so that masked and other steps share the code."""

    @pl.when(refs.flags[REPEAT] > 0)
    def _() -> None:
        before, after = refs.flags[READ], refs.flags[CURRENT]
        refs.flags[WRITTEN] = jnp.int32(0)

        def head(k: jax.Array, _: None) -> None:
            _exact(cfg, refs, item, step, k, before, after)

        lax.fori_loop(0, cfg.num_kv_heads, head, None)


def _streamed(
    cfg: RaggedConfig,
    refs: RaggedRefs,
    item: Item,
    step: StepKeys,
    masked: int,
    heads: list[jax.Array],
    before: jax.Array,
    after: jax.Array,
) -> None:
    """One pass over the scores, with the current m.

    If a sum leaves its range, or a number that not every row may see is not finite, `recompute` is set and the step is
    repeated. The products with values are delayed by a few tiles.
    """
    tiles = [(first_row, at) for first_row in range(0, cfg.rows, cfg.row_tile) for at in range(0, step.size, cfg.key_tile)]
    if cfg.packed:  # all rows of a few keys one after another: codes are widened and scales transposed once for them
        tiles.sort(key=operator.itemgetter(1))
    # 0 * NaN is NaN for the rows that may not see it; `rebiased` notices those of its codes
    may_be_nonfinite = jnp.issubdtype(refs.kv.dtype, jnp.floating) and not cfg.rebiased
    pending: list[Any] = []
    read: Any = None

    def rows_of(k: jax.Array, keys_at: Any, first: jax.Array, kind: int) -> tuple[jax.Array, jax.Array | None]:
        """Keys (kind 0) or values (1), and the scales that they have of their own."""
        plane = 0 if cfg.packed else kind * (cfg.planes - 1)
        rows = rows_at(cfg, refs, step.slot, plane, k, keys_at)
        if not cfg.packed:
            return widened(cfg, rows, refs.q.dtype, refs.recompute), None
        codes, scales = signed_halves(rows, kind, cfg.float8), _scales(cfg, refs, item, step.slot, kind, k, keys_at, first)
        if kind == 0:
            return codes.astype(refs.q.dtype), scales
        # Rounded after scaling, as values of a 16-bit cache are: scaling every weight instead takes as long as its exponential.
        return (codes * widen(scales, cfg.lanes)).astype(refs.q.dtype), scales

    def add_values(k: jax.Array, at: slice, read: Any, p: jax.Array, source: jax.Array, last: bool) -> None:
        values, _ = read(1)
        total = refs.acc[source, :, at] + dot(values, p, 0, 0)
        refs.acc[after * cfg.num_kv_heads + k, :, at] = total
        if last and _writes(cfg, masked):  # beside the products of the next heads
            _write(cfg, refs, item.q_slot, k, at, after * cfg.num_kv_heads + k)

    for k in heads:
        for first_row, offset in tiles:
            at, key_tile = slice(first_row, first_row + cfg.row_tile), min(cfg.key_tile, step.size - offset)
            keys_at, is_masked = pl.ds(step.start + offset, key_tile), bool(masked) and offset >= step.clear
            if first_row == 0 or not cfg.packed:
                read = functools.partial(rows_of, k, keys_at, step.first + offset)
                read = functools.cache(read) if cfg.packed else read
            keys, k_scales = read(0)
            if is_masked and may_be_nonfinite and first_row == 0:
                values, _ = read(1)
                zero_products = dot(jnp.zeros((_SUBLANES, key_tile), values.dtype), values, 1, 0)
                for lane in range(0, cfg.lanes, LANES):
                    refs.recompute[:, :LANES] |= jnp.where(zero_products[:, lane : lane + LANES] == 0, 0, 1)
            if cfg.packed and is_masked and first_row == 0:  # a weight of 0 does not hide NaN
                lost = jnp.where(read(1)[1] * 0.0 == 0.0, 0, 1).reshape(-1, _SUBLANES, LANES)
                refs.recompute[:, :LANES] |= jnp.max(lost, axis=0)
            s = _scores(cfg, refs, item, step.first + offset, keys, k, first_row, masked * is_masked, k_scales)
            if len(pending) * cfg.key_tile >= _PENDING_KEYS:
                pending.pop(0)()
            # m is of steps before this one: no exponential waits for a maximum
            p = jnp.exp2(s - refs.m[k, :1, at])
            target = after * cfg.num_kv_heads + k
            source = _sums(cfg, before, k) if offset == 0 else target
            total = refs.l[source, :, at] + jnp.sum(p, axis=0, keepdims=True)
            refs.l[target, :, at] = total
            in_range = (total >= 2.0**-_MAX_LOG2_SUM) & (total <= 2.0**_MAX_LOG2_SUM)
            if masked and not step.clear:
                in_range |= (total == 0) & _sees_none(cfg, refs, item, step.first + offset, s, first_row, masked)
            # sums only grow within a step: the last one tells whether any left its range
            last = offset + key_tile == step.size
            if last:
                refs.recompute[:, at] |= jnp.where(in_range, 0, 1)
            # source order is what the scheduler keeps, so this product is placed where the next tiles' exponentials are
            pending.append(functools.partial(add_values, k, at, read, p.astype(refs.q.dtype), source, last))
    if cfg.rebiased:  # values set `recompute` as well
        pending.append(lambda: _reduce_recompute(refs))
    else:
        pending.insert(0, lambda: _reduce_recompute(refs))
    for work in pending:
        work()


def _reduce_recompute(refs: RaggedRefs) -> None:
    """Reduce `recompute` to a scalar. The read has a high latency, so it is issued where other work can hide it."""
    refs.flags[REPEAT] = jnp.any(refs.recompute[...] > 0).astype(jnp.int32)


def _exact(
    cfg: RaggedConfig, refs: RaggedRefs, item: Item, step: StepKeys, k: jax.Array, before: jax.Array, after: jax.Array
) -> None:
    """The same for one head with the maximum as m, where no row is affected by keys that it may not see."""
    dtype = refs.q.dtype

    def tile(n: jax.Array, _: None) -> None:
        offset = n * cfg.key_tile
        target = after * cfg.num_kv_heads + k
        source = jnp.where(n == 0, _sums(cfg, before, k), target)
        keys_at = pl.ds(pl.multiple_of(step.start + offset, cfg.key_tile), cfg.key_tile)
        k_scales = v_scales = None
        if cfg.packed:
            pairs = rows_at(cfg, refs, step.slot, 0, k, keys_at)
            keys, values = (signed_halves(pairs, kind, cfg.float8) for kind in (0, 1))
            k_scales, v_scales = (_scales(cfg, refs, item, step.slot, kind, k, keys_at, step.first + offset) for kind in (0, 1))
            usable = jnp.abs(v_scales) < jnp.inf
            values = jnp.where(widen(usable, cfg.lanes), values, jnp.nan)
            v_scales = jnp.where(usable, v_scales, 0.0)
        else:
            keys, values = (
                widened_exactly(cfg, rows_at(cfg, refs, step.slot, plane, k, keys_at)) for plane in (0, cfg.planes - 1)
            )
        keys = jnp.where(own_lanes(cfg, keys.shape, 0), keys, 0.0).astype(dtype)
        finite = jnp.abs(values) < jnp.inf
        has_nonfinite = jnp.max(jnp.where(finite, 0, 1)) > 0
        for first_row in range(0, cfg.rows, cfg.row_tile):
            at = slice(first_row, first_row + cfg.row_tile)
            s = _scores(cfg, refs, item, step.first + offset, keys, k, first_row, max(cfg.ranges, 1), k_scales)
            m, total = refs.m[k, :, at], refs.l[source, :, at]
            # As the new reference this makes the rescaled sum 1 at most, also where m was far from the maximum.
            running_lse = jnp.where(total == 0, -jnp.inf, m + jnp.log2(total))
            new_m = jnp.maximum(running_lse, jnp.max(s, axis=0, keepdims=True))
            new_m = jnp.where(new_m == -jnp.inf, 0.0, new_m)
            p, rescale = jnp.exp2(s - new_m[:1]), jnp.where(total == 0, 0.0, jnp.exp2(m - new_m))
            refs.m[k, :, at] = new_m
            refs.l[target, :, at] = total * rescale + jnp.sum(p, axis=0, keepdims=True)
            p = p if v_scales is None else p * widen(v_scales, cfg.row_tile)
            pv = dot(jnp.where(finite, values, 0.0).astype(dtype), p.astype(dtype), 0, 0)
            refs.acc[target, :, at] = refs.acc[source, :, at] * rescale[:1] + pv

            @pl.when(has_nonfinite)
            def _(at: slice = at, s: jax.Array = s) -> None:
                seen = jnp.where(s == -jnp.inf, 0.0, 1.0).astype(dtype)
                for number, is_number in (
                    (jnp.nan, values != values),
                    (jnp.inf, values == jnp.inf),
                    (-jnp.inf, values == -jnp.inf),
                ):
                    # which rows see such a value, by a product, since no [keys, rows, lanes] fits in registers
                    hits = dot(jnp.where(is_number, 1.0, 0.0).astype(dtype), seen, 0, 0)
                    refs.acc[target, :, at] += jnp.where(hits > 0, number, 0.0)

    lax.fori_loop(0, lax.div(step.size, cfg.key_tile), tile, None)


def _scales(
    cfg: RaggedConfig, refs: RaggedRefs, item: Item, slot: jax.Array, kind: int, k: jax.Array, at: Any, first: jax.Array
) -> jax.Array:
    """[n, 128], lanes alike: the scales of keys (kind 0) or values (1) in rows `at`, which begin at position `first`.

    Those of keys times `K_FACTOR`, which is the same for all rows of a kv head.
    """
    lane, columns = lax.broadcasted_iota(jnp.int32, (1, LANES), 1), []
    for n in range(0, at.size, LANES):
        key = first + n + lane
        (scale,) = own_scales(cfg, refs, slot, kind, k, 1, at.start + n)
        scale = scale if kind else scale * refs.rules[K_FACTOR, k, :, :LANES]
        scale = jnp.where((key >= item.low) & (key < item.high), scale, 0.0)  # the others may be any
        columns.append(jnp.transpose(jnp.broadcast_to(scale, (LANES, LANES))))
    return jnp.concatenate(columns, axis=0)


def _scores(
    cfg: RaggedConfig,
    refs: RaggedRefs,
    item: Item,
    first: jax.Array,
    keys: jax.Array,
    k: jax.Array,
    row: int,
    masked: int,
    scales: jax.Array | None = None,
) -> jax.Array:
    """[keys, rows] of one tile, in units of log2; `first` is the position of its first key, `row` its first row; scales: of
    keys that have their own (`_scales`)."""
    at = slice(row, row + cfg.row_tile)
    s = dot(keys, refs.q[item.q_slot, k, at, :], 1, 1)
    s *= refs.rules[K_FACTOR, k, :, at] if scales is None else widen(scales, cfg.row_tile)
    if cfg.logits_soft_cap:
        s = jnp.tanh(s) * (cfg.logits_soft_cap * LOG2_E)
    if not (masked or cfg.alibi):
        return s
    position = _positions(cfg, item, row)
    if cfg.alibi:
        key = lax.broadcasted_iota(jnp.int32, s.shape, 0)
        dist = (key + (first - position)).astype(jnp.float32)
        s += refs.rules[SLOPE, k, :, at] * (dist if cfg.mask.causal and not (cfg.tree or cfg.ranges) else -jnp.abs(dist))
    if not masked:
        return s
    shape = (s.shape[0] // _SUBLANES, _SUBLANES, s.shape[1])
    # a key is compared in one operation: the register that has it, a constant, with a bound that is less by its sublane
    register, sublane = (lax.broadcasted_iota(jnp.int32, shape[axis:], 0) for axis in (0, 1))

    def is_before(bound: jax.Array) -> jax.Array:
        return register * _SUBLANES < bound - first - sublane

    seen, *others = [
        is_before(high) if low is None else is_before(high) & jnp.logical_not(is_before(low))
        for low, high in _ranges(cfg, refs, item, position, at, masked)
    ]
    if cfg.mask.causal and cfg.tree:
        # row w of a one-hot matrix is new key w: a product scatters the tree's edges to the keys
        of_node = (s.shape[0], LANES)
        node = first - item.context + lax.broadcasted_iota(jnp.int32, of_node, 0)
        one_hot = jnp.where(node == lax.broadcasted_iota(jnp.int32, of_node, 1), 1.0, 0.0).astype(refs.edges.dtype)
        edge = dot(one_hot, refs.edges[item.q_slot, at, :], 1, 1).reshape(shape) > 0.5
        is_tree = item.context != NO_TREE
        ordered = is_before(jnp.broadcast_to(jnp.int32(NO_TREE), position.shape) if cfg.ranges else position + 1)
        seen &= (
            (ordered & jnp.logical_not(is_tree)) | (is_before(jnp.broadcast_to(item.context, position.shape)) & is_tree) | edge
        )
    for other in others:
        seen |= other
    return jnp.where(seen, s.reshape(shape), -jnp.inf).reshape(s.shape)


def _positions(cfg: RaggedConfig, item: Item, first_row: int) -> jax.Array:
    """[1, rows] of a tile that begins at `first_row`."""
    return item.position + lax.div(first_row + lax.broadcasted_iota(jnp.int32, (1, cfg.row_tile), 1), cfg.group)


def _chunk_start(position: jax.Array, chunk: int) -> jax.Array:
    return lax.div(position, chunk) * chunk


def _ranges(
    cfg: RaggedConfig, refs: RaggedRefs, item: Item, position: jax.Array, at: slice, count: int
) -> list[tuple[jax.Array | None, jax.Array]]:
    """The first `count` ranges of keys that rows `at` see, except what a tree hides of the first: see `_seen_by_order`."""
    if not cfg.ranges:
        return [_seen_by_order(cfg, item, position)]

    def bound(column: int) -> jax.Array:
        return refs.seen[item.q_slot, column : column + 1, at]  # type: ignore[no-any-return]

    from_start = cfg.mask.window[0] is None and cfg.mask.chunk_size is None
    return [(None if from_start and k == 0 else bound(2 * k), bound(2 * k + 1)) for k in range(count)]


def _seen_by_order(cfg: RaggedConfig, item: Item, position: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Rows see keys of [low, high), [1, rows] each, except those that a tree hides. low: None if it is 0."""
    (left, right), chunk = cfg.mask.window, cfg.mask.chunk_size
    low = None if left is None else jnp.maximum(position - left, item.low)
    if chunk is not None:
        low = jnp.maximum(_chunk_start(position, chunk), item.low if low is None else low)
    high = jnp.broadcast_to(item.high, position.shape)
    if cfg.mask.causal and not cfg.tree:
        high = jnp.minimum(high, position + 1)
    if right is not None:
        high = jnp.minimum(high, position + right + 1)
    return low, high


def _sees_none(
    cfg: RaggedConfig, refs: RaggedRefs, item: Item, first: jax.Array, s: jax.Array, row: int, masked: int
) -> jax.Array:
    """[1, rows]: whether a row sees no key of the tile with scores `s`, the first of which is at position `first`."""
    if cfg.tree:
        return jnp.max(s, axis=0, keepdims=True) == -jnp.inf
    unseen_by = []
    for low, high in _ranges(cfg, refs, item, _positions(cfg, item, row), slice(row, row + cfg.row_tile), masked):
        unseen = high <= first
        unseen_by.append(unseen if low is None else unseen | (low >= jnp.minimum(high, first + s.shape[0])))
    return functools.reduce(operator.and_, unseen_by)


def _writes(cfg: RaggedConfig, masked: int) -> bool:
    """Whether a step also writes its item's results: it is mostly the last one, if only keys of the item's rows are masked."""
    return bool(masked) and cfg.mask.causal and cfg.from_start and cfg.large <= 2 * cfg.key_tile


def finish(cfg: RaggedConfig, refs: RaggedRefs, slot: jax.Array) -> None:
    """Write the results of an item whose last step did not."""

    def head(k: jax.Array, _: None) -> None:
        _write(cfg, refs, slot, k, slice(None), _sums(cfg, refs.flags[CURRENT], k))

    @pl.when(refs.flags[WRITTEN] == 0)
    def _() -> None:
        unroll = _HEADS_AT_ONCE if cfg.num_kv_heads % _HEADS_AT_ONCE == 0 else 1
        lax.fori_loop(0, cfg.num_kv_heads, head, None, unroll=unroll)


def _write(cfg: RaggedConfig, refs: RaggedRefs, slot: jax.Array, k: Any, at: slice, sums: jax.Array) -> None:
    """Write acc / l of rows `at` of head k into `o`, and the natural log-sum-exp into `lse_rows`, with rows on sublanes."""
    m, total = refs.m[k, :, at], refs.l[sums, :, at]
    weight = total
    if cfg.sinks:
        weight = total + jnp.exp2(refs.rules[SINK, k, :, at] - m)
    # 0 for a row without keys, sink or not (docs/semantics.md §5)
    normaliser = jnp.where(total == 0.0, 0.0, refs.rules[V_FACTOR, k, :, at] / jnp.where(total == 0.0, 1.0, weight))
    refs.o[slot, k, at, :] = jnp.transpose((refs.acc[sums, :, at] * normaliser[:1]).astype(refs.o.dtype))
    if cfg.lse:
        lse = jnp.where(total == 0.0, -jnp.inf, m * (1 / LOG2_E)) + jnp.log(total)
        refs.lse_rows[slot, k, at, :] = jnp.transpose(jnp.broadcast_to(lse[:1], (LANES, lse.shape[1])))
