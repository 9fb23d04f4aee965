"""Multi-head latent attention over a paged cache for TPUs.

Queries are absorbed. One launch computes decode, speculation and prompts, and also writes the new tokens.

Layout. The cache is [N, P, lanes], a row [kv_c L | k_pe Dr | zeros] padded to a multiple of 128: a TPU pads the last
dimension anyway, and if the shape does not include the padding XLA transposes the whole cache to save it. A page is one
DMA, and its data is used twice: all lanes as keys, the first L as values.

Undefined: rows of the cache past a request's length. Guaranteed: the kernel follows no block id past the used columns,
writes no slot except those of `slot_mapping`, and returns 0 and -inf for rows of no request or without keys.

Shape letters: T tokens, R requests, H query heads, L kv_lora_rank, Dr rope size, N pages of P tokens, B table columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _launch, _plan
from attn.jax.kernels.tpu._chips import MULTIPLIES_FP8, REBIASES_E4M3, ROWS, chip_of
from attn.jax.kernels.tpu._mla_kernel import MLAConfig, MLARefs, RowRefs, run
from attn.jax.kernels.tpu._plan import Batch
from attn.jax.kernels.tpu._refs import E4M3_GAIN, LANES, LOG2_E, PagedShape
from attn.visibility import LayerMask

#: The keys that a launch's table has room for, from which on its blocks may be longer.
MANY_KEYS = 16 * 4096


class MLABlocks(NamedTuple):
    """Sizes of a launch.

    Keys per DMA block; query tokens per long item (0: there is none); keys of a score matrix of singles, and of others,
    which have all rows of an item; and blocks in memory at a time.
    """

    kv_block: int
    large: int
    single_tile: int
    key_tile: int
    slots: int = 4


def row_lanes(width: int) -> int:
    """Columns of the cache for rows of `width` = L + Dr values."""
    return _round_up(width, LANES)


def blocks_for(chip: str, shape: PagedShape) -> MLABlocks:
    """Block sizes for a launch on `chip`. Raises ValueError for an unknown chip.

    2,048 keys at a time, and 4,096 of decodes that are not bound by their bytes, since the products of a block wait for its
    exponentials and longer blocks wait less often; items of as many rows as those of the ragged kernel, since each takes some
    700 cycles more than its steps.
    """
    heads, page, made = shape.group, shape.page, chip_of(chip)
    rows = made.rows if shape.itemsize == 2 else ROWS  # products of float32 are more code
    computes = chip in MULTIPLIES_FP8 if shape.cache_itemsize == 1 else shape.cache_itemsize == 2 and made.keys > 1024
    # the first block of a launch arrives later, so it must have enough others
    many = shape.max_query_len == 1 and shape.num_requests * shape.columns * page >= MANY_KEYS
    kv_block = max(4096 if computes and many else 2048, page)
    while kv_block > max(page, LANES) and kv_block >= 2 * shape.columns * page:
        kv_block //= 2  # no request has that many keys
    # the least that begins at whole tiles of query rows
    large = shape.align if shape.max_query_len > 1 else 0
    while large and 2 * large * heads <= rows and large < shape.max_query_len:
        large *= 2
    # the rows that an item's request does not have are loaded and stored as others are
    large = min(large, _round_up(shape.max_query_len, shape.align))
    return MLABlocks(kv_block, large, min(kv_block, 512), min(kv_block, 256))


class MLAParams(NamedTuple):
    """What a program is made for, beside shapes: L, the factor of scores, at least the longest query, whether a row sees no
    later key, whether the log-sum-exp is returned, and sizes (None: `blocks_for`'s)."""

    kv_lora_rank: int
    scale: float
    max_query_len: int
    causal: bool = True
    return_lse: bool = False
    blocks: MLABlocks | None = None


def mla_attention(
    query: jax.Array,
    new: jax.Array | None,
    kv_cache: jax.Array,
    batch: Batch,
    rules: MLAParams,
    *,
    k_scale: jax.Array | float = 1.0,
    chip: str | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Compute (out [T, H, L], lse [H, T] float32 natural log or None, the cache with the new tokens in it).

    query: [T, H, L + Dr], absorbed; new: [T, L + Dr] of the cache's dtype (already quantised), or None to write nothing;
    kv_cache: [N, P, row_lanes(L + Dr)], zeros past L + Dr. The batch's block table determines where token t of a request is
    written; its slots only whether (-1: not), and may exclude the first or last tokens of a request, but not tokens in between.
    `k_scale`: the scale of a quantised cache's codes. `chip`: v5e, v6e, ... and `interpret`, False or `pltpu.InterpretParams`:
    by default the TPU that is compiled for, or else the interpreter. Raises ValueError if the tables exceed the chip's SMEM.
    """
    (tokens, heads, _), (num_blocks, page, lanes) = query.shape, kv_cache.shape
    rank, lse, dtype = rules.kv_lora_rank, rules.return_lse, query.dtype
    if 0 in (tokens, *batch.block_table.shape, num_blocks):
        empty = jnp.full((heads, tokens), -jnp.inf, jnp.float32) if lse else None
        return jnp.zeros((tokens, heads, rank), dtype), empty, kv_cache
    # one plane of one head: the layout of `ragged_paged_attention`, whose plan and copies serve both
    device, pages = _launch.device(chip, interpret), kv_cache.reshape(num_blocks, 1, 1, page, lanes)
    query, mask, write = _padded(query, lanes), LayerMask(rules.causal), new is not None
    shape = _plan.shape_of(query, pages, batch, rules.max_query_len, mask, lse=lse, write=write)
    # Codes enter products as they are where the matrix unit takes them beside bfloat16; elsewhere they are widened first.
    multiplied = dtype == jnp.bfloat16 and device.chip in MULTIPLIES_FP8 and kv_cache.dtype.itemsize == 1
    rebiased = multiplied and device.chip in REBIASES_E4M3 and kv_cache.dtype == jnp.float8_e4m3fn
    operand_dtype = jnp.dtype(jnp.float8_e4m3b11fnuz) if rebiased else kv_cache.dtype if multiplied else dtype
    cfg = MLAConfig(
        **vars(shape),
        **(rules.blocks or blocks_for(device.chip, shape))._asdict(),
        values=_round_up(rank, LANES),
        # narrow pages are joined into whole tiles on the way, which only a second buffer can hold
        staged=kv_cache.dtype != operand_dtype or shape.narrow,
        rebiased=rebiased,
    )
    plan = _plan.make(cfg, batch)
    # one array is keys and values, so one scale is in both factors
    gain = jnp.asarray(k_scale, jnp.float32) * (E4M3_GAIN if rebiased else 1.0)
    arrays = {
        "factors": jnp.stack([gain * (rules.scale * LOG2_E), gain]),
        "single.query": jnp.pad(query[batch.start], ((0, 0), (0, -heads % cfg.native), (0, 0))),
    }
    if cfg.large:
        arrays["long.query"] = query[plan.rows.token_of_row].reshape(-1, lanes)
    if new is not None:
        # zeros pad a row, since the kernel multiplies all of its lanes
        arrays["fresh"] = _plan.fresh_tiles(cfg, plan, _padded(new, lanes)[:, None, None])
    buffers = _buffers(cfg, arrays, kv_cache.dtype, operand_dtype)
    made = _launch.paged(lambda refs: run(cfg, _refs(cfg, refs)), cfg, device, plan, arrays, pages, buffers, "mla_attention")

    def by_token(name: str, width: int, fill: float) -> jax.Array:
        """[R, S, E] and [rows of all, E] -> [T, H, width]."""
        long = made[f"long.{name}"][:, :width].reshape(-1, heads, width) if cfg.large else None
        return plan.rows.by_token(made[f"single.{name}"][:, :heads, :width], long, fill)

    of_rows = by_token("lse", 1, -jnp.inf)[..., 0].T if lse else None
    return by_token("out", rank, 0), of_rows, made["cache"].reshape(kv_cache.shape)


def _padded(x: jax.Array, width: int) -> jax.Array:
    """[..., n] -> [..., width], with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _row_groups(cfg: MLAConfig) -> dict[str, int]:
    """The row groups in use, and the query tokens per item of each. A group's name begins those of its refs."""
    return {"single": 1} | ({"long": cfg.large} if cfg.large else {})


def _buffers(cfg: MLAConfig, arrays: dict[str, jax.Array], stored: Any, operand_dtype: Any) -> _launch.Buffers:
    """The buffers of a launch, by names of `MLARefs`. The cache has dtype `stored`; matrix products take `operand_dtype`."""
    dtype = arrays["single.query"].dtype
    made: dict[str, Any] = {}
    scratch = _launch.page_buffers(cfg, stored) | {"failed": pltpu.VMEM((cfg.num_items, LANES), jnp.int32)}
    if cfg.staged:
        scratch["wide"] = pltpu.VMEM((cfg.kv_block, cfg.lanes), operand_dtype)
    if cfg.rebiased:
        scratch["lost"] = pltpu.VMEM((8, LANES), jnp.int32)
    if cfg.large:
        scratch["long.order"] = pltpu.VMEM((cfg.large * cfg.group, LANES), jnp.int32)
    scratch |= _launch.write_buffers(cfg, stored)
    for group, count in _row_groups(cfg).items():
        query_shape = arrays[f"{group}.query"].shape
        # singles have a row for each head, padded to whole tiles; items of others have those of `large` tokens
        rows = query_shape[-2] if group == "single" else count * cfg.group
        made[f"{group}.out"] = jax.ShapeDtypeStruct((*query_shape[:-1], cfg.values), dtype)
        scratch |= {
            f"{group}.q": pltpu.VMEM((2, rows, cfg.lanes), dtype),
            f"{group}.o": pltpu.VMEM((2, rows, cfg.values), dtype),
            f"{group}.m": pltpu.VMEM((rows, LANES), jnp.float32),
            f"{group}.l": pltpu.VMEM((rows, LANES), jnp.float32),
            f"{group}.acc": pltpu.VMEM((rows, cfg.values), jnp.float32),
        }
        if cfg.lse:
            made[f"{group}.lse"] = jax.ShapeDtypeStruct((*query_shape[:-1], LANES), jnp.float32)
            scratch[f"{group}.lse_rows"] = pltpu.VMEM((2, rows, LANES), jnp.float32)
    return _launch.Buffers(scratch, made, {"factors": pltpu.SMEM})


def _refs(cfg: MLAConfig, named: dict[str, Any]) -> MLARefs:
    """The refs of a launch, with those of a row group in one `RowRefs`."""
    # names of a group's refs have a dot (`_row_groups`)
    plain = {name: ref for name, ref in named.items() if "." not in name}
    groups = {
        group: RowRefs(key_tile, **{name.split(".")[1]: ref for name, ref in named.items() if name.startswith(f"{group}.")})
        for group, key_tile in zip(_row_groups(cfg), (cfg.single_tile, cfg.key_tile), strict=False)
    }
    return MLARefs(**plain, **groups)
