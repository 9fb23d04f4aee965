"""Ragged attention over a paged KV cache for TPUs.

One launch computes prefill, decode or both, and also writes the new tokens.

Layout. The cache is [N, planes, K, P, lanes]: a page is one contiguous DMA, and a head's keys of a page are a matrix with
tokens on sublanes and the head on lanes, which the matrix unit reads directly. A head of 64 shares one row of 128 with its
values (planes = 1): scores contract with zeros against the values, and the weighted sum of keys is discarded, both at no
cost. Other heads have planes = 2 and are padded to a multiple of 128 with zeros: a TPU pads the last dimension anyway, and
if the shape does not include the padding XLA transposes the whole cache to save it, and transposes it back for the kernel.

Undefined: rows of the cache past a request's length. Guaranteed: the kernel follows no block id past the used columns,
writes no slot except those of `slot_mapping`, and returns 0 and -inf for rows of no request.

Shape letters: T tokens, R requests, H query heads, K kv heads, G = H / K, D head size, N pages of P tokens, B table
columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _kernel, _launch, _plan
from attn.jax.kernels.tpu._chips import REBIASES_E4M3, RaggedBlocks, blocks_for, fixed_blocks
from attn.jax.kernels.tpu._refs import E4M3_GAIN, LANES, LOG2_E, RaggedConfig, RaggedRefs
from attn.visibility import CAUSAL, PLAIN, BatchMask, LayerMask


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, int4: bool = False
) -> tuple[int, int, int, int, int]:
    """The shape [N, planes, K, P, lanes] of a cache; int4: that of `pages_of`."""
    if int4:
        return (num_blocks, 1, num_kv_heads + -(-8 * num_kv_heads // head_size), block_size, head_size)
    if 2 * head_size == LANES:
        return (num_blocks, 1, num_kv_heads, block_size, LANES)
    return (num_blocks, 2, num_kv_heads, block_size, -(-head_size // LANES) * LANES)


def keys_and_values(kv_cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    """View the cache as keys [N, P, K, D] and values [N, P, K, D], or wider if `cache_shape` pads heads, with zeros past D."""
    pages = kv_cache.transpose(0, 1, 3, 2, 4)
    if kv_cache.dtype == jnp.uint8:
        return _rows_of(kv_cache)
    if kv_cache.shape[1] == 1:
        return pages[:, 0, ..., : LANES // 2], pages[:, 0, ..., LANES // 2 :]
    return pages[:, 0], pages[:, 1]


def stored(key: jax.Array, value: jax.Array, kv_cache: jax.Array) -> jax.Array:
    """Arrange rows key, value [T, K, D], already of the cache's dtype, as it stores them: [T, planes, K, lanes]."""
    if kv_cache.shape[1] == 1:
        return jnp.concatenate([key, value], axis=2)[:, None]
    rows = jnp.stack([key, value], axis=1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, kv_cache.shape[4] - key.shape[2])))


def packed(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes [..., K, D] and the float32 scales [..., K, 2] of rows [..., K, D / 2 + 4] (docs/semantics.md §10).

    A byte holds a key's code in its low half and a value's above, so that neither moves a lane.
    """
    keys, values = (jnp.concatenate([x[..., :-4] & 15, x[..., :-4] >> 4], axis=-1) for x in (key, value))
    scales = lax.bitcast_convert_type(jnp.stack([key[..., -4:], value[..., -4:]], axis=-2), jnp.float32)
    return keys | values << 4, scales


def pages_of(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Pages [N, 1, K + scale heads, P, D] of an int4_per_token_head cache from `packed` tokens [N, P, ...].

    The scale heads hold, for each head, its keys' scales of all tokens, then its values'. Four rows of bytes are a row of them.
    """
    count, page, _, lanes = codes.shape
    floats = scales.transpose(0, 2, 3, 1).reshape(count, -1, lanes)
    floats = jnp.pad(floats, ((0, 0), (0, -floats.shape[1] % (page // 4)), (0, 0)))
    of_scales = lax.bitcast_convert_type(floats, jnp.uint8).swapaxes(2, 3).reshape(count, -1, page, lanes)
    return jnp.concatenate([codes.transpose(0, 2, 1, 3), of_scales], axis=1)[:, None]


def _rows_of(kv_cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys' and the values' rows of an int4_per_token_head cache: see `packed`."""
    count, _, stored_heads, page, lanes = kv_cache.shape
    heads = stored_heads - -(-8 * stored_heads // (lanes + 8))
    scales = kv_cache[:, 0, heads:].reshape(count, -1, lanes)[:, : 8 * heads * page // lanes]
    scales = scales.reshape(count, -1, 4, lanes).swapaxes(2, 3).reshape(count, heads, 2, page, 4)

    def rows(kind: int) -> jax.Array:
        low, high = jnp.split(kv_cache[:, 0, :heads] >> 4 * kind & 15, 2, axis=-1)
        return jnp.concatenate([low | high << 4, scales[:, :, kind]], axis=-1).swapaxes(1, 2)

    return rows(0), rows(1)


def write(key: jax.Array, value: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Scatter key, value [T, K, D], of the cache's dtype, into the cache at `slot_mapping` [T] (-1: nowhere), any slots."""
    num_blocks, page = kv_cache.shape[0], kv_cache.shape[3]
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // page)  # out of range, so dropped
    if kv_cache.dtype == jnp.uint8:
        # a page of each token, in which its own row and lane of scales are where its slot is
        slot, (heads, lanes) = slot_mapping % page, (key.shape[1], kv_cache.shape[4])
        one = pages_of(*(jnp.repeat(x[:, None], page, axis=1) for x in packed(key, value)))
        kv_cache = kv_cache.at[block, :, :heads, slot].set(one[:, :, :heads, 0], mode="drop")
        at = (slot[:, None] + jnp.arange(0, lanes, page)).reshape(-1, lanes // page)[:, None]
        token = jnp.arange(len(slot))[:, None, None]
        scales = one[token, :, heads:, :, at]
        return kv_cache.at[block[:, None, None], :, heads:, :, at].set(scales, mode="drop")
    return kv_cache.at[block, :, :, slot_mapping % page].set(stored(key, value, kv_cache), mode="drop")


def ragged_paged_attention(
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    kv_cache: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_table: jax.Array,
    slot_mapping: jax.Array,
    *,
    scale: float,
    max_query_len: int,
    chip: str | None = None,
    mask: LayerMask = CAUSAL,
    batch_mask: BatchMask = PLAIN,
    logits_soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float = 1.0,
    v_scale: jax.Array | float = 1.0,
    return_lse: bool = False,
    invariant: bool = False,
    blocks: RaggedBlocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Compute (out [T, H, D], lse [H, T] float32 or None, the cache with the new tokens in it).

    query: [T, H, D]; key, value: [T, K, D] of the cache's dtype (already quantised), or None to write nothing; kv_cache:
    see `cache_shape`; query_start_loc: [R + 1], seq_lens: [R], block_table: [R, B], slot_mapping: [T], int32. The block
    table determines where token t of a request is written; slot_mapping only whether (-1: not), and may exclude the first
    or last tokens of a request, but not tokens in between (`write` supports any). `mask`, static, and `batch_mask`: what
    rows see (`attn.visibility`), a tree at most 128 wide. Raises ValueError if the tables exceed the chip's SMEM.
    `max_query_len`: static, at least the longest query. `invariant`: whether a request's bits must not depend on the others
    (docs/semantics.md §17), by block sizes that do not depend on the batch. `chip`: v5e, v6e, ... and `interpret`, False or
    `pltpu.InterpretParams`: by default the TPU that is compiled for (`_chips.target`), or else the interpreter.
    """
    # Pallas has no empty operands; without tokens, requests, pages or columns of a table there is nothing to attend.
    if 0 in (query.shape[0], *block_table.shape, kv_cache.shape[0]):
        lse = jnp.full(query.shape[1::-1], -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(query), lse, kv_cache
    device = _launch.device(chip, interpret)
    batch = _plan.Batch(query_start_loc, seq_lens, block_table, slot_mapping, batch_mask)
    # From here on everything static is in `cfg`, by which a program is made; the plan has the values.
    within = mask.within_int32()
    shape = _plan.shape_of(query, kv_cache, batch, max_query_len, within, lse=return_lse, write=key is not None)
    cfg = RaggedConfig(
        **vars(shape),
        **(blocks or (fixed_blocks if invariant else blocks_for)(device.chip, shape))._asdict(),
        logits_soft_cap=logits_soft_cap or None,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        tree=batch_mask.tree is not None,
        invariant=invariant,
        float8=jnp.float8_e4m3b11fnuz if device.chip in REBIASES_E4M3 else jnp.float8_e4m3fn,
        rebiased=device.chip in REBIASES_E4M3 and kv_cache.dtype == jnp.float8_e4m3fn,
    )
    plan = _plan.make(cfg, batch)
    arrays = _arrays(cfg, plan, batch, query, _rules(cfg, scale, k_scale, v_scale, sinks, alibi_slopes))
    if key is not None and value is not None:
        if cfg.packed:
            tokens = packed(key, value)
            tiles = pages_of(*(x[plan.token_of_slot].reshape(-1, cfg.page, *x.shape[1:]) for x in tokens))
            arrays["fresh"] = tiles.transpose(1, 2, 0, 3, 4).reshape(1, cfg.stored_heads, -1, cfg.lanes)
        else:
            arrays["fresh"] = _plan.fresh_tiles(cfg, plan, stored(key, value, kv_cache))
    buffers, name = _buffers(cfg, arrays, kv_cache.dtype), "ragged_paged_attention"
    made = _launch.paged(lambda refs: _kernel.run(cfg, RaggedRefs(**refs)), cfg, device, plan, arrays, kv_cache, buffers, name)

    def by_token(name: str, width: int, fill: float) -> jax.Array:
        """[K, M, E] and [R, K / J, S, E] -> [T, H, width]."""
        heads, long = query.shape[1], made.get(name)
        single = made[f"{name}1"][:, :, : cfg.join * cfg.group, :width].reshape(-1, heads, width)
        if long is not None:
            long = long[..., :width].reshape(cfg.num_kv_heads, -1, cfg.group, width).transpose(1, 0, 2, 3)
            long = long.reshape(-1, heads, width)
        return plan.rows.by_token(single, long, fill)

    # a head of 64 shares its row with the values, which are in the right half of the weighted sum
    first = LANES // 2 if cfg.planes == 1 and not cfg.packed else 0
    out = by_token("out", cfg.lanes, 0)[..., first : first + query.shape[2]]
    return out, by_token("lse", 1, -jnp.inf)[..., 0].T if return_lse else None, made["cache"]


def _arrays(
    cfg: RaggedConfig, plan: _plan.Plan, batch: _plan.Batch, query: jax.Array, rules: jax.Array
) -> dict[str, jax.Array]:
    """The operands of a launch, by the names of `RaggedRefs`, without the new tokens."""
    # zeros meet what pads a head in the cache, or the values that share its row
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, cfg.lanes - query.shape[2])))
    # The first row of every request: what singles have; that of others is not read. Of a request without rows it is any
    # row.
    arrays = {"query1": _single_queries(cfg, padded[batch.start]), "rules1_in": _single_rows(cfg, rules)}
    if cfg.large:
        token, request = plan.rows.token_of_row, plan.rows.request_of_row
        arrays["query"] = _by_kv_head(cfg, padded[token])
        # a row of an item is a query head of a token: heads vary fastest, in every array of rows
        arrays["rules_in"] = jnp.tile(rules[:, :, None], (1, 1, 1, cfg.large))
        if plan.ranges is not None:
            arrays["ranges"] = jnp.repeat(plan.ranges, cfg.group, axis=2)
        if cfg.tree:
            width = batch.mask.tree.shape[1]
            # rows of requests that are no trees get some node's edges, which their items do not compare
            node = jnp.clip(token - batch.query_start_loc[request], 0, width - 1)
            edges = batch.mask.tree[request, node].astype(query.dtype)
            arrays["tree"] = jnp.repeat(jnp.pad(edges, ((0, 0), (0, LANES - width))), cfg.group, axis=0)
    return arrays


def _rules(cfg: RaggedConfig, scale: float, k_scale: Any, v_scale: Any, sinks: Any, alibi_slopes: Any) -> jax.Array:
    """[4, K, G] float32: see `_refs.K_FACTOR`."""
    shape = (cfg.num_kv_heads, cfg.group)
    # Before a cap scores are in its units; without one they are in units of log2 at once (docs/semantics.md §2).
    factor = scale / cfg.logits_soft_cap if cfg.logits_soft_cap else scale * LOG2_E
    gain = E4M3_GAIN if cfg.rebiased else 1.0
    if cfg.packed:
        gain = 1 / float(jnp.finfo(cfg.float8).smallest_subnormal)
    by_kv_head = [gain * factor * jnp.asarray(k_scale, jnp.float32), gain * jnp.asarray(v_scale, jnp.float32)]
    by_head = [jnp.zeros(shape) if x is None else x.reshape(shape) * LOG2_E for x in (sinks, alibi_slopes)]
    spread = [jnp.broadcast_to(x[..., None] if x.ndim else x, shape) for x in by_kv_head]
    return jnp.stack([*spread, *by_head]).astype(jnp.float32)


def _single_rows(cfg: RaggedConfig, rules: jax.Array) -> jax.Array:
    """`rules` for the rows of singles: [4, K / J, S, 128], all lanes equal."""
    rows = rules.reshape(4, cfg.joined, cfg.join * cfg.group)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, cfg.single_rows - rows.shape[2])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def _single_queries(cfg: RaggedConfig, query: jax.Array) -> jax.Array:
    """[R, H, lanes] -> [R, K / J, S, J * lanes], each head's row in the columns of its kv head."""
    query = query.reshape(-1, cfg.joined, cfg.join, cfg.group, 1, cfg.lanes)
    # block-diagonal: one product with the joined keys of J heads gives each row its own head's scores
    same_head = jnp.eye(cfg.join, dtype=jnp.bool_)[None, None, :, None, :, None]
    rows = jnp.where(same_head, query, 0).reshape(-1, cfg.joined, cfg.join * cfg.group, cfg.join * cfg.lanes)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, cfg.single_rows - rows.shape[2]), (0, 0)))


def _by_kv_head(cfg: RaggedConfig, query: jax.Array) -> jax.Array:
    """[M, H, lanes] -> [K, M * G, lanes]."""
    query = query.reshape(-1, cfg.num_kv_heads, cfg.group, cfg.lanes).transpose(1, 0, 2, 3)
    return query.reshape(cfg.num_kv_heads, -1, cfg.lanes)


def _buffers(cfg: RaggedConfig, arrays: dict[str, jax.Array], stored: Any) -> _launch.Buffers:
    """The buffers of a launch over a cache of dtype `stored`, by the names of `RaggedRefs`."""
    dtype, heads, lanes, rows = arrays["query1"].dtype, cfg.num_kv_heads, cfg.lanes, cfg.rows
    # `single` buffers are one for each segment of a block, as that many requests may share one
    single = (cfg.joined, cfg.single_rows)
    made = {"out1": jax.ShapeDtypeStruct((cfg.num_requests, *single, lanes), dtype)}
    scratch = _launch.page_buffers(cfg, stored) | {
        "q1": pltpu.VMEM((cfg.query_slots, *single, cfg.join * lanes), dtype),
        "o1": pltpu.VMEM((cfg.segments, *single, lanes), dtype),
        "o1_sem": pltpu.SemaphoreType.DMA((cfg.segments,)),
        "m1": pltpu.VMEM((cfg.segments, *single, LANES), jnp.float32),
        "l1": pltpu.VMEM((cfg.segments, *single, LANES), jnp.float32),
        "acc1": pltpu.VMEM((cfg.segments, *single, cfg.join * lanes), jnp.float32),
        "recompute1": pltpu.VMEM((cfg.segments, 8, LANES), jnp.int32),
        "rules1": pltpu.VMEM(arrays["rules1_in"].shape, jnp.float32),
        "rules_sem": pltpu.SemaphoreType.DMA(()),
    }
    if cfg.lse:
        made["lse1"] = jax.ShapeDtypeStruct((cfg.num_requests, *single, LANES), jnp.float32)
        scratch["lse_rows1"] = pltpu.VMEM((cfg.segments, *single, LANES), jnp.float32)
    if cfg.large:
        made["out"] = jax.ShapeDtypeStruct(arrays["query"].shape, dtype)
        scratch |= {
            "q": pltpu.VMEM((2, heads, rows, lanes), dtype),
            "o": pltpu.VMEM((2, heads, rows, lanes), dtype),
            "m": pltpu.VMEM((heads, 8, rows), jnp.float32),
            # two buffers of sums for all heads, and one of zeros that they share (`_long.ZEROS`)
            "l": pltpu.VMEM((2 * heads + 1, 8, rows), jnp.float32),
            "acc": pltpu.VMEM((2 * heads + 1, lanes, rows), jnp.float32),
            "flags": pltpu.SMEM((4,), jnp.int32),
            "recompute": pltpu.VMEM((8, rows), jnp.int32),
            "rules": pltpu.VMEM(arrays["rules_in"].shape, jnp.float32),
        }
        if cfg.lse:
            made["lse"] = jax.ShapeDtypeStruct((heads, arrays["query"].shape[1], LANES), jnp.float32)
            scratch["lse_rows"] = pltpu.VMEM((2, heads, rows, LANES), jnp.float32)
        if cfg.tree:
            scratch["edges"] = pltpu.VMEM((2, rows, LANES), dtype)
        if cfg.ranges:
            scratch["seen"] = pltpu.VMEM((2, 8, rows), jnp.int32)
    return _launch.Buffers(scratch | _launch.write_buffers(cfg, stored), made)
