"""Multi-head latent attention over a paged cache for TPUs.

Queries are absorbed. One launch computes decode, speculation and prompts, and also writes the new tokens.

Layout. The cache is [N, P, lanes], a row [kv_c L | k_pe Dr | zeros] padded to a multiple of 128: a TPU pads the last
dimension anyway, and if the shape does not include the padding XLA transposes the whole cache to save it. A page is one
DMA, and its data is used twice: all lanes as keys, the first L as values.

Undefined: rows of the cache past a request's length. Guaranteed: the kernel follows no block id past the used columns,
writes no slot except those of `slot_mapping`, and returns 0 and -inf for rows of no request or without keys.

Shape letters: T tokens, R requests, H query heads, L kv_lora_rank, Dr rope size, N pages of P tokens, B table columns.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu import _launch, _plan
from attn.jax.kernels.tpu._chips import CHIPS, WIDENS_E4M3, sublanes
from attn.jax.kernels.tpu._mla_kernel import Config, Refs, Rows, run
from attn.jax.kernels.tpu._refs import LANES, LOG2_E, block_shape


class Blocks(NamedTuple):
    """Sizes of a launch.

    Keys per DMA block, query tokens per long item (0: there is none), keys and rows of a score matrix, and blocks in memory
    at a time.
    """

    kv_block: int
    large: int
    key_tile: int
    row_tile: int
    slots: int = 4


def row_lanes(width: int) -> int:
    """Columns of the cache for rows of `width` = L + Dr values."""
    return _round_up(width, LANES)


def blocks_for(chip: str, *, heads: int, page: int, columns: int, align: int, max_query_len: int) -> Blocks:
    """Block sizes for a launch on `chip`. Raises ValueError for an unknown chip.

    2,048 keys at a time, since the products of a block wait for its exponentials and longer blocks wait less often; 512
    rows per item, and 256 of them between two loads of keys, keep the matrix unit busy.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip={chip!r} is unknown; known: {', '.join(CHIPS)}")
    kv_block = max(2048, page)
    while kv_block > max(page, LANES) and kv_block >= 2 * columns * page:
        kv_block //= 2  # no request has that many keys
    large = align if max_query_len > 1 else 0
    while large and 2 * large * heads <= 512 and large < max_query_len:
        large *= 2
    return Blocks(kv_block, large, min(kv_block, 512), 256 if large and large * heads % 256 == 0 else 128)


def mla_attention(
    q_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array | None,
    new_k_pe: jax.Array | None,
    kv_cache: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_table: jax.Array,
    slot_mapping: jax.Array,
    *,
    scale: float,
    max_query_len: int,
    chip: str | None = None,
    causal: bool = True,
    k_scale: jax.Array | float = 1.0,
    return_lse: bool = False,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Compute (out [T, H, L], lse [H, T] float32 natural log or None, the cache with the new tokens in it).

    q_nope: [T, H, L], absorbed; q_pe: [T, H, Dr]; new_kv_c: [T, L] and new_k_pe: [T, Dr] of the cache's dtype (already
    quantised), or both None to write nothing; kv_cache: [N, P, row_lanes(L + Dr)], zeros past L + Dr; query_start_loc: [R +
    1], seq_lens: [R], block_table: [R, B], slot_mapping: [T], int32. The block table determines where token t of a request
    is written; slot_mapping only whether (-1: not), and may exclude the first or last tokens of a request, but not tokens
    in between. `max_query_len`: static, at least the longest query. `k_scale`: the scale of a quantised cache's codes.
    `chip`: v5e, v6e, ... and `interpret`, False or `pltpu.InterpretParams`: by default the TPU that is compiled for, or
    else the interpreter. Raises ValueError if the tables exceed the chip's SMEM.
    """
    num_tokens, heads, rank = q_nope.shape
    num_blocks, page, lanes = kv_cache.shape
    num_requests, columns = block_table.shape
    if 0 in (num_tokens, num_requests, columns, num_blocks):
        lse = jnp.full((heads, num_tokens), -jnp.inf, jnp.float32) if return_lse else None
        return jnp.zeros_like(q_nope), lse, kv_cache
    chip, interpret = _launch.device(chip, interpret)
    dtype = q_nope.dtype
    native = sublanes(dtype.itemsize)
    align = native // math.gcd(heads, native)
    tile = min(sublanes(kv_cache.dtype.itemsize), page)
    blocks = blocks or blocks_for(chip, heads=heads, page=page, columns=columns, align=align, max_query_len=max_query_len)
    plan = _plan.make(
        query_start_loc, seq_lens, block_table, slot_mapping,
        page=page, tile=tile, align=align, large=blocks.large or 1, kv_block=blocks.kv_block, causal=causal,
        window=(None, None), tree_mask=None,
    )  # fmt: skip
    cfg = Config(
        heads=heads, lanes=lanes, values=_round_up(rank, LANES), page=page, tile=tile, align=align, large=blocks.large,
        kv_block=blocks.kv_block, key_tile=blocks.key_tile, row_tile=blocks.row_tile, slots=blocks.slots, causal=causal,
        lse=return_lse, write=new_kv_c is not None, widened=kv_cache.dtype != dtype,
        even_odd=chip in WIDENS_E4M3 and kv_cache.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16,
        num_items=plan.items.shape[0] // 8, num_tiles=plan.tiles.shape[0] // 5,
        narrow=page < sublanes(kv_cache.dtype.itemsize),
    )  # fmt: skip
    scalars = _launch.scalars(plan, block_table, chip)

    def padded(x: jax.Array, width: int) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    query = padded(jnp.concatenate([q_nope, q_pe], axis=-1), lanes)
    worth = jnp.asarray(k_scale, jnp.float32)
    single = query[query_start_loc[:-1]]
    arrays = {
        "factors": jnp.stack([worth * (scale * LOG2_E), worth]),
        "single.query": jnp.pad(single, ((0, 0), (0, -heads % native), (0, 0))),
    }
    if cfg.large:
        arrays["long.query"] = query[plan.token_of_row].reshape(-1, lanes)
        order = jnp.arange(cfg.large * heads, dtype=jnp.int32) // heads
        arrays["long.order"] = jnp.broadcast_to(order[:, None], (order.shape[0], LANES))
    if new_kv_c is not None and new_k_pe is not None:
        new = padded(jnp.concatenate([new_kv_c, new_k_pe], axis=-1), lanes)
        fresh = new[plan.token_of_slot]
        arrays["fresh"] = fresh.reshape(-1, 1, 1, tile, lanes) if cfg.narrow else fresh[None, None]
    tokens = {"single": 1} | ({"long": cfg.large} if cfg.large else {})
    scratch, results = _buffers(cfg, tokens, arrays, kv_cache.dtype)
    made = _launch.paged(
        "mla_attention", lambda refs: run(cfg, _refs(tokens, refs)), scalars, arrays,
        kv_cache.reshape(num_blocks, 1, 1, page, lanes), results, scratch, {"factors": pltpu.SMEM, "long.order": pltpu.VMEM},
        chip=chip, interpret=interpret,
    )  # fmt: skip

    def back(name: str, fill: float) -> jax.Array:
        """[R, S, E] and [rows of all, E] -> [T, H, E]."""
        rows = made[f"single.{name}"][:, :heads][plan.request]
        if cfg.large:
            of_long = made[f"long.{name}"].reshape(-1, heads, rows.shape[-1])
            rows = jnp.where(plan.single[:, None, None], rows, of_long[plan.row_of])
        return jnp.where(plan.live[:, None, None], rows, fill)

    out = back("out", 0)[..., :rank]
    lse = back("lse", -jnp.inf)[..., 0].T if return_lse else None
    return out, lse, made["cache"].reshape(kv_cache.shape)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _buffers(
    cfg: Config, tokens: dict[str, int], arrays: dict[str, jax.Array], stored: Any
) -> tuple[dict[str, Any], dict[str, jax.ShapeDtypeStruct]]:
    """(scratch, results) of a launch over a cache of dtype `stored`, by the names of `Refs`.

    Names of refs for one kind of rows begin with the kind. `tokens`: for each kind in use, the query tokens per item.
    """
    dtype = arrays["single.query"].dtype
    made: dict[str, Any] = {}
    scratch: dict[str, Any] = {
        "kv": pltpu.VMEM((cfg.slots, 1, 1, *block_shape(cfg)), stored),
        "kv_sem": pltpu.SemaphoreType.DMA((cfg.slots,)),
        "q_sem": pltpu.SemaphoreType.DMA((2,)),
        "o_sem": pltpu.SemaphoreType.DMA(()),
    }
    if cfg.widened:
        scratch["wide"] = pltpu.VMEM((cfg.kv_block, cfg.lanes), dtype)
    if cfg.write:
        stage = pltpu.VMEM((cfg.ring, 1, 1, cfg.tile, cfg.lanes), stored)
        ring = pltpu.SemaphoreType.DMA((cfg.ring,))
        scratch |= {"old": stage, "new": stage, "read_sem": ring, "write_sem": ring}
    for kind, count in tokens.items():
        given = arrays[f"{kind}.query"].shape
        rows = given[-2] if kind == "single" else count * cfg.heads
        made[f"{kind}.out"] = jax.ShapeDtypeStruct((*given[:-1], cfg.values), dtype)
        scratch |= {
            f"{kind}.q": pltpu.VMEM((2, rows, cfg.lanes), dtype),
            f"{kind}.o": pltpu.VMEM((rows, cfg.values), dtype),
            f"{kind}.m": pltpu.VMEM((rows, LANES), jnp.float32),
            f"{kind}.l": pltpu.VMEM((rows, LANES), jnp.float32),
            f"{kind}.acc": pltpu.VMEM((rows, cfg.values), jnp.float32),
        }
        if cfg.lse:
            made[f"{kind}.lse"] = jax.ShapeDtypeStruct((*given[:-1], LANES), jnp.float32)
            scratch[f"{kind}.lse_rows"] = pltpu.VMEM((rows, LANES), jnp.float32)
    return scratch, made


def _refs(tokens: dict[str, int], named: dict[str, Any]) -> Refs:
    """The refs of a launch, with those of each kind of rows grouped."""
    plain = {name: ref for name, ref in named.items() if "." not in name}
    kinds = {
        kind: Rows(count, **{name.split(".")[1]: ref for name, ref in named.items() if name.startswith(f"{kind}.")})
        for kind, count in tokens.items()
    }
    return Refs(**plain, **kinds)
