"""Multi-head latent attention in plain `jax.numpy`: absorbed, over all or selected keys, and the `fp8_ds_mla` row.

Absorbed MLA is attention with one kv head, whose keys are cache rows [kv_c | k_pe] and whose values are the first L columns
of the same rows. So both functions in this module are `attn.jax.kernels.xla`'s loop with a fetch that reads each row once
and returns it twice. The L + Dr columns of the result that are not values are cut off, which wastes 11 % of the second
product.

Sparse attention is the same loop with pages of one token: a query row is a request whose block table is its list of keys.
Order does not matter, so the list is sorted to put entries that are not keys past its length.

Shape letters: T rows, R requests, H query heads, L kv_lora_rank, Dr rope size, W = L + Dr, N pages of P tokens, B columns
of the block table.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn.jax.kernels import xla
from attn.jax.kernels.division import divide

_LATENT, _TILE, _SCALES, _ROPE = 512, 128, 512, 528  # the fp8_ds_mla row: offsets of its fields
_NONE = jnp.iinfo(jnp.int32).max
#: Rows that are attended at a time. A window is computed whole, over the keys of its longest request.
WINDOW = 256
_SCORED = 2048  #: keys that the indexer scores at a time


@functools.partial(jax.jit, static_argnames=("kv_lora_rank", "max_query_len", "causal"))
def latent_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    requests: xla.Requests,
    *,
    kv_lora_rank: int,
    k_scale: jax.Array | float = 1.0,
    **rules: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute (out [T, H, L] in query's dtype, lse [H, T] float32, natural) of a ragged batch over a paged latent cache.

    query: [T, H, W], absorbed; kv_cache: [N, P, W] of any dtype, whose codes have scale `k_scale`, or [N, P, 656] uint8
    (`fp8_ds_mla`). `rules` are scale, max_query_len and causal of `xla.XLAParams`. Rows of no request, or without keys, are 0
    and -inf.
    """
    fetch, extent = _fetch(kv_cache, query.dtype), (*kv_cache.shape[:2], 1)
    out, lse = _attend(query, fetch, extent, requests, k_scale=k_scale, v_scale=k_scale, **rules)
    return out[..., :kv_lora_rank], lse


@functools.partial(jax.jit, static_argnames="kv_lora_rank")
def sparse_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    requests: xla.Requests,
    *,
    kv_lora_rank: int,
    scale: jax.Array | float,
    k_scale: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The same where row t attends only to the keys at the positions `indices` [T, topk] int32 of its own request.

    -1, or a position at or past the request's length, is not a key. Order does not matter; a repeated position counts
    repeatedly. Causality is not applied: the indices must respect it.
    """
    num_blocks, page, width = kv_cache.shape
    slot, valid = slots_of(indices, requests, page)
    slot = jnp.sort(jnp.where(valid, slot, _NONE), axis=1)
    fetch, extent = _fetch(kv_cache.reshape(-1, 1, width), query.dtype), (num_blocks * page, 1, 1)
    by_row = xla.Requests(jnp.arange(indices.shape[0] + 1, dtype=jnp.int32), valid.sum(axis=1, dtype=jnp.int32), slot)
    out, lse = xla._attend(query, fetch, extent, by_row, scale=scale, max_query_len=1, k_scale=k_scale, v_scale=k_scale)
    return out[..., :kv_lora_rank], lse


def slots_of(indices: jax.Array, requests: xla.Requests, page: int) -> tuple[jax.Array, jax.Array]:
    """Return ([T, topk] slots of the keys at positions `indices` [T, topk] of each row's request, whether they are keys)."""
    query_start_loc, seq_lens, block_table = requests
    row = jnp.arange(indices.shape[0], dtype=jnp.int32)
    request = jnp.sum(row[:, None] >= query_start_loc[1:], axis=1, dtype=jnp.int32)
    owned = request < seq_lens.shape[0]
    request = jnp.where(owned, request, 0)
    valid = owned[:, None] & (indices >= 0) & (indices < seq_lens[request][:, None])
    position = jnp.where(valid, indices, 0)
    return jnp.take_along_axis(block_table[request], position // page, axis=1) * page + position % page, valid


class Packed(NamedTuple):
    """Some requests of a batch in another order, and their rows one after another."""

    order: jax.Array  # [R] the request of the batch
    starts: jax.Array  # [R + 1] where its rows begin
    row: jax.Array  # [T] the row of the batch that a packed row is
    packed_row: jax.Array  # [T] the packed row of a row of the batch, if it has one


def pack(query_start_loc: jax.Array, lens: jax.Array, order: jax.Array, num_rows: int) -> Packed:
    """Pack the rows of a batch of `num_rows`. lens: [R], the requests' rows, or 0 to leave one out; order: [R]."""
    starts = jnp.pad(jnp.cumsum(lens[order], dtype=jnp.int32), (1, 0))
    shift = query_start_loc[order] - starts[:-1]  # from a packed row to that of the batch
    index = jnp.arange(num_rows, dtype=jnp.int32)
    row = index + shift[request_of(starts, index)]
    packed = index - shift[jnp.argsort(order)][request_of(query_start_loc, index)]
    return Packed(order, starts, *(jnp.clip(x, 0, num_rows - 1) for x in (row, packed)))


def request_of(bounds: jax.Array, index: jax.Array) -> jax.Array:
    """Return the request whose range in `bounds` [R + 1] contains each index; 0 past the last."""
    request = jnp.sum(index[:, None] >= bounds[1:], axis=1, dtype=jnp.int32)
    return jnp.where(request < bounds.shape[0] - 1, request, 0)


def _attend(
    query: jax.Array,
    fetch: xla.Fetch,
    extent: tuple[int, ...],
    requests: xla.Requests,
    *,
    max_query_len: int,
    causal: bool = True,
    **rules: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute `xla._attend` of a batch of many rows a window at a time.

    That loop computes all rows over the keys of the longest request. A window has only rows that see keys, and requests of
    similar lengths, the longest first.
    """
    num_rows, rules = query.shape[0], {"max_query_len": min(max_query_len, WINDOW), "causal": causal, **rules}
    if num_rows <= WINDOW:
        return xla._attend(query, fetch, extent, requests, **rules)
    query_start_loc, seq_lens, block_table = requests
    lens = jnp.where(seq_lens > 0, jnp.diff(query_start_loc), 0)
    order = jnp.argsort(jnp.where(lens > 0, -seq_lens, 1), stable=True)
    packed = pack(query_start_loc, lens, order, num_rows)
    most = min(lens.shape[0], WINDOW)  # requests that may have rows in a window
    bounds = jnp.pad(packed.starts, (0, most), mode="edge")
    lengths, table = jnp.pad(seq_lens[order], (0, most)), jnp.pad(block_table[order], ((0, most), (0, 0)))

    def window(begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = begin + jnp.arange(WINDOW, dtype=jnp.int32)
        first = request_of(packed.starts, index[:1])[0]
        starts = lax.dynamic_slice_in_dim(bounds, first, most + 1) - begin
        inside = jnp.clip(starts, 0, WINDOW)
        keys, pages = (lax.dynamic_slice_in_dim(x, first, most) for x in (lengths, table))
        if causal:
            keys = jnp.maximum(keys - (starts - inside)[1:], 0)  # without those of rows that are cut off
        return xla._attend(query[packed.row[index]], fetch, extent, xla.Requests(inside, keys, pages), **rules)

    out, lse = lax.map(window, jnp.arange(0, num_rows, WINDOW, dtype=jnp.int32))
    out, lse = out.reshape(-1, *out.shape[2:]), lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
    out, lse = out[packed.packed_row], lse[:, packed.packed_row]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    sees = (row < query_start_loc[-1]) & (lens[request_of(query_start_loc, row)] > 0)
    return jnp.where(sees[:, None, None], out, 0), jnp.where(sees, lse, -jnp.inf)


def _fetch(kv_cache: jax.Array, dtype: Any) -> xla.Fetch:
    """Gather pages of a latent cache as keys and values, [X, 1, pages, P, W] both."""

    def fetch(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        # On CPUs XLA widens bf16 and fp8, and would widen the whole cache before the loop: tie it to this iteration's ids.
        pages, ids = lax.optimization_barrier((kv_cache, ids))
        rows = pages.at[ids].get(mode="promise_in_bounds")[:, None]
        if kv_cache.dtype == jnp.uint8:
            rows = jnp.concatenate(unpack_fp8_ds_mla(rows), axis=-1).astype(dtype)
        return rows, rows

    return fetch


@functools.partial(jax.jit, static_argnames=("max_query_len", "causal"))
def expanded_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, requests: xla.Requests, **rules: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute (out [T, H, Dv], lse [H, T]) of expanded heads, in which a request attends to its own keys.

    query: [T, H, D]; key: [m, H, D]; value: [m, H, Dv]; requests: `xla.Requests.of_packed_keys`. `rules` are scale,
    max_query_len and causal of `xla.XLAParams`.
    """
    value_width, width = value.shape[2], max(value.shape[2], key.shape[2])
    # the loop has one width: zeros change no score, and what they add to the values is cut off
    query, key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]))) for x in (query, key, value))
    out, lse = _attend(query, *xla.packed_keys(key, value), requests, **rules)
    return out[..., :value_width], lse


def numbers(rows: jax.Array, dtype: Any, k_scale: jax.Array | float = 1.0) -> jax.Array:
    """Dequantise cache rows [..., width] to `dtype`: [..., L + Dr]."""
    if rows.dtype == jnp.uint8:
        return jnp.concatenate(unpack_fp8_ds_mla(rows), axis=-1).astype(dtype)
    return (rows.astype(jnp.float32) * k_scale).astype(dtype)


def pack_fp8_ds_mla(kv_c: jax.Array, k_pe: jax.Array, *, ue8m0: bool = False) -> jax.Array:
    """Pack rows of 656 bytes, uint8 [..., 656] = 512 e4m3 | 4 float32 scales | 64 bfloat16, little-endian.

    kv_c: [..., 512]; k_pe: [..., 64]. Each 128 latents share scale = amax / 448 and are stored as x / scale, rounded to
    nearest even; with `ue8m0` (DeepSeek-V3.2) the scale is max(amax / 448, 1e-4) rounded up to a power of two.
    """
    tiles = kv_c.astype(jnp.float32).reshape(*kv_c.shape[:-1], -1, _TILE)
    top = jnp.where(jnp.isnan(tiles).any(axis=-1), jnp.nan, jnp.abs(tiles).max(axis=-1))  # a maximum may drop NaN on CPUs
    scale = divide(top, jnp.float32(448))
    if ue8m0:
        fraction, exponent = jnp.frexp(jnp.maximum(scale, 1e-4))
        scale = jnp.ldexp(jnp.float32(1), exponent - (fraction == 0.5))
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    codes = jnp.clip(divide(tiles, scale[..., None]), -448.0, 448.0).astype(jnp.float8_e4m3fn).reshape(kv_c.shape)

    def as_bytes(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(*kv_c.shape[:-1], -1)

    return jnp.concatenate([as_bytes(codes), as_bytes(scale), as_bytes(k_pe.astype(jnp.bfloat16))], axis=-1)


def unpack_fp8_ds_mla(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpack (kv_c [..., 512], k_pe [..., 64]) of packed rows uint8 [..., 656], in float32."""

    def field(first: int, stop: int, dtype: Any) -> jax.Array:
        size = jnp.dtype(dtype).itemsize
        octets = rows[..., first:stop].reshape(*rows.shape[:-1], -1, size)
        return lax.bitcast_convert_type(octets[..., 0] if size == 1 else octets, dtype).astype(jnp.float32)

    codes = field(0, _LATENT, jnp.float8_e4m3fn).reshape(*rows.shape[:-1], -1, _TILE)
    latent = codes * field(_SCALES, _ROPE, jnp.float32)[..., None]
    return latent.reshape(*rows.shape[:-1], _LATENT), field(_ROPE, rows.shape[-1], jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="topk")
def lightning_indexer(
    query: jax.Array, weights: jax.Array, key_cache: jax.Array, requests: xla.Requests, *, topk: int
) -> tuple[jax.Array, jax.Array]:
    """Select the keys of DeepSeek's sparse attention. Returns (indices [T, topk] int32, scores [T, B * P] float32).

    score(t, s) = sum over index heads i of weights(t, i) * relu(query(t, i) . key(s)), for s up to t's own position; -inf
    elsewhere. query: [T, I, E]; weights: [T, I], including any scale of the model's; key_cache: [N, P, E], the index keys
    on the batch's pages. The top `topk` positions of a row come best first (of equal scores the earlier), padded with -1.
    """
    rows, page = query.shape[0], key_cache.shape[1]
    query_start_loc, seq_lens, block_table = requests
    row = jnp.arange(rows, dtype=jnp.int32)
    request = request_of(query_start_loc, row)
    position = jnp.where(row < query_start_loc[-1], seq_lens[request] - query_start_loc[request + 1] + row, -1)
    columns = block_table.shape[1]
    if columns == 0:
        return jnp.full((rows, topk), -1, jnp.int32), jnp.zeros((rows, 0), jnp.float32)
    pages = max(1, min(columns, _SCORED // page))  # of a step
    used = -(-seq_lens // page)[:, None]
    table = jnp.where(jnp.arange(columns) < used, block_table, 0)
    table = jnp.pad(table, ((0, 0), (0, -columns % pages)))

    def one(q: jax.Array, w: jax.Array, r: jax.Array, last: jax.Array) -> jax.Array:
        """Score the keys up to position `last`, some pages at a time: a row costs as much as its own request is long."""

        def step(i: jax.Array, scores: jax.Array) -> jax.Array:
            keys = key_cache[lax.dynamic_slice(table, (r, i * pages), (1, pages))[0]].reshape(pages * page, -1)
            dots = jnp.einsum("ie,se->is", q, keys.astype(q.dtype), precision="highest", preferred_element_type=jnp.float32)
            return lax.dynamic_update_slice(scores, w.astype(jnp.float32) @ jax.nn.relu(dots), (i * pages * page,))

        shape = jax.eval_shape(step, last, jax.ShapeDtypeStruct((table.shape[1] * page,), jnp.float32))
        none = jnp.full_like(shape, -jnp.inf)  # under shard_map it varies over the mesh axes of a step's result
        return lax.fori_loop(0, -(-(last + 1) // (pages * page)), step, none)

    # one row at a time: [T, I, S] would fill the memory
    scores = lax.map(lambda x: one(*x), (query, weights, request, position))[:, : columns * page]
    scores = jnp.where(jnp.arange(columns * page, dtype=jnp.int32) <= position[:, None], scores, -jnp.inf)
    best, indices = lax.top_k(scores, min(topk, scores.shape[1]))
    indices = jnp.where(best > -jnp.inf, indices, -1).astype(jnp.int32)
    return jnp.pad(indices, ((0, 0), (0, topk - indices.shape[1])), constant_values=-1), scores
