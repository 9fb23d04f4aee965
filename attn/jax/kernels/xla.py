"""Ragged attention over pages in plain `jax.numpy`, for every device that XLA compiles for.

Flash attention (arXiv 2205.14135) with the online softmax in float32, over static shapes. The T rows of a batch are divided
into tiles of Q rows, each of one request. A loop iterates over the keys of up to ABREAST tiles at once, C at a time, and
gathers their pages. Its trip count is dynamic (that of its longest tile), so a short batch in a large bucket is cheap; a
window also moves a tile's first chunk. More tiles are sorted by their trips first, so that short ones do not wait for long
ones. Encoders use the same loop: their packed keys are pages of one token.

Masked scores are IEEE -inf with a guarded maximum. Masked *values* are selected away, not multiplied by 0: if a product is
NaN, that chunk is recomputed with its non-finite values separated and added only to the rows that attend to them. So the
content of unused slots has no effect, and a NaN in use affects exactly the rows that see it. A live page id outside the
cache is not clamped, which would give a plausible but wrong result: the rows that attend to it become NaN.

Shape letters: T rows, R requests, B columns of the block table, H query heads, K kv heads, D head size, N pages of P
tokens; X tiles of Q rows; M = H / K * Q rows of a tile that read one kv head; C keys of a chunk.

Batches of the same shapes share one compilation for all values (including scale, cap and window): only
`max_query_len`, `causal`, `span_window` and which features are present are static.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn.visibility import BatchMask, LayerMask, Visibility

#: Tiles whose keys one loop iterates over. Fewer waste less on tiles of other lengths, and are more loops.
ABREAST = 32

#: Page ids [X, pages] -> keys, values, each [X, K, pages, P, D].
Fetch = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

_compiled = functools.partial(jax.jit, static_argnames=("max_query_len", "causal", "span_window"))


class Requests(NamedTuple):
    """Where the rows and the keys of a batch's requests are; all int32."""

    query_start_loc: jax.Array  # [R + 1]
    seq_lens: jax.Array  # [R]
    block_table: jax.Array  # [R, B]

    @classmethod
    def of_packed_keys(cls, query_start_loc: jax.Array, key_start_loc: jax.Array, max_keys: int) -> "Requests":
        """Return the requests of a batch without a cache, whose packed keys are pages of one token: request r has the rows
        from key_start_loc[r] [R + 1] on, `max_keys` at the most."""
        table = key_start_loc[:-1, None] + jnp.arange(max_keys, dtype=jnp.int32)
        return cls(query_start_loc, jnp.diff(key_start_loc), table)


@_compiled
def paged_attention(query: jax.Array, kv_cache: jax.Array, requests: Requests, **rules: Any) -> tuple[jax.Array, jax.Array]:
    """Compute (out [T, H, D] in query's dtype, lse [H, T] float32) of a ragged batch over a paged cache.

    query: [T, H, D]; kv_cache: [2, N, P, K, D], keys then values, of any dtype. `rules` are `XLAParams`. Rows of no request are
    0 and -inf.
    """
    num_blocks = kv_cache.shape[1]
    pages = kv_cache.reshape(2 * num_blocks, *kv_cache.shape[2:])  # one array: taking [0] would copy half the cache
    heads = jnp.arange(kv_cache.shape[3])[:, None]

    def by_head(pages: jax.Array, ids: jax.Array) -> jax.Array:
        return pages.at[ids[:, None], :, heads].get(mode="promise_in_bounds")

    def by_page(pages: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.moveaxis(pages.at[ids].get(mode="promise_in_bounds"), 3, 1)

    def take(pages: jax.Array, ids: jax.Array) -> jax.Array:
        # The same values. On CPUs this is one pass instead of two, but a TPU would first copy the whole cache into another
        # layout.
        return lax.platform_dependent(pages, ids, cpu=by_head, default=by_page)

    def fetch(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        # On CPUs XLA widens bf16 and fp8, and would widen the whole cache before the loop: tie it to this iteration's ids.
        here, ids = lax.optimization_barrier((pages, ids))
        return take(here, ids), take(here, ids + num_blocks)

    return _attend(query, fetch, kv_cache.shape[1:4], requests, **rules)


@_compiled
def pages_first_attention(
    query: jax.Array, kv_cache: jax.Array, requests: Requests, **rules: Any
) -> tuple[jax.Array, jax.Array]:
    """The same over a cache [N, planes, K, P, lanes] (`kernels.tpu.ragged_paged_attention.cache_shape`)."""
    num_blocks, planes, num_kv_heads, page, _ = kv_cache.shape
    size = query.shape[2]
    values = slice(size, 2 * size) if planes == 1 else slice(size)

    def fetch(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        here, ids = lax.optimization_barrier((kv_cache, ids))
        gathered = here.at[ids].get(mode="promise_in_bounds").transpose(2, 0, 3, 1, 4, 5)
        return gathered[0, ..., :size], gathered[-1, ..., values]

    return _attend(query, fetch, (num_blocks, page, num_kv_heads), requests, **rules)


@_compiled
def ragged_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, query_start_loc: jax.Array, *, max_query_len: int, **rules: Any
) -> tuple[jax.Array, jax.Array]:
    """The same without a cache: each request attends to its own rows of key, value [T, K, D]."""
    requests = Requests.of_packed_keys(query_start_loc, query_start_loc, max_query_len)
    return _attend(query, *packed_keys(key, value), requests, max_query_len=max_query_len, **rules)


def packed_keys(key: jax.Array, value: jax.Array) -> tuple[Fetch, tuple[int, ...]]:
    """Return `_attend`'s fetch and extent of key, value [m, K, D], whose pages have one token."""

    def fetch(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(x[ids].swapaxes(1, 2)[:, :, :, None] for x in (key, value))  # type: ignore[return-value]

    return fetch, (key.shape[0], 1, key.shape[1])


def tile_rows(num_rows: int, num_requests: int, max_query_len: int) -> int:
    """Q, a power of two: 1 for decodes; else the largest for which padding all requests gives at most 2 T rows."""
    rows = 1
    while rows < min(max_query_len, 64) and num_requests * (2 * rows - 1) <= num_rows:
        rows *= 2
    return rows


def chunk_pages(page: int, columns: int, scored_rows: int) -> int:
    """Pages per chunk: 256 keys, fewer if scores of `scored_rows` (rows times heads) would fill memory."""
    keys = 256
    while keys > 64 and keys * scored_rows > 1 << 26:
        keys //= 2
    return max(1, min(columns, keys // page))


def unpacked(rows: jax.Array, dtype: Any) -> jax.Array:
    """The numbers [..., D] of a cache's rows in `dtype`: codes without the layer's scale, times their own in bytes of
    int4_per_token_head."""
    if rows.dtype != jnp.uint8:
        return rows.astype(dtype)
    codes = jnp.concatenate([rows[..., :-4] & 15, rows[..., :-4] >> 4], axis=-1).astype(jnp.float32) - 8
    return (codes * lax.bitcast_convert_type(rows[..., -4:], jnp.float32)[..., None]).astype(dtype)


class XLAParams(NamedTuple):
    """The inputs of a call besides queries, keys and values.

    max_query_len: static, at least the longest query; window: (left, right), inclusive, None for unbounded; alibi_slopes,
    sinks: [H] float32; causal, chunk_size, span_window and batch: `attn.visibility` (with `batch.is_causal`, causal=False);
    k_scale, v_scale: scalar or [K], scales of a quantised cache's codes (applied to scores and output; the codes themselves
    are exact in query's dtype).
    """

    scale: jax.Array | float
    max_query_len: int
    causal: bool = True
    window: tuple[Any, Any] = (None, None)
    logits_soft_cap: jax.Array | float | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    batch: BatchMask = BatchMask()
    chunk_size: Any = None
    span_window: bool = False
    k_scale: jax.Array | float = 1.0
    v_scale: jax.Array | float = 1.0

    @property
    def layer(self) -> LayerMask:
        return LayerMask(self.causal, self.window, self.chunk_size, self.span_window)


class _Tiles(NamedTuple):
    """The rows of each tile, and the tile of each row of the batch."""

    request: jax.Array  # [X] (0 for an unused tile)
    real: jax.Array  # [X, Q] whether the row exists
    row: jax.Array  # [X, Q] its index in the batch (0 if it does not exist)
    position: jax.Array  # [X, Q] in its request
    context: jax.Array  # [X, 1] keys before the request's own rows
    length: jax.Array  # [X, 1] all of its keys
    tile: jax.Array  # [T] tile of each row of the batch, and index in it (not of some of the tiles)
    tile_row: jax.Array
    owned: jax.Array  # [T] whether the row belongs to a request


def _tiles_of(query_start_loc: jax.Array, seq_lens: jax.Array, num_rows: int, q: int) -> _Tiles:
    """Divide T rows into tiles of `q`. Their number is static: the most that R requests with T rows in total can need."""
    lens = jnp.diff(query_start_loc)
    num_requests = lens.shape[0]
    num_tiles = (num_rows + num_requests * (q - 1)) // q
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-lens // q), dtype=jnp.int32)])

    def owner(bounds: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For each of `count` numbers: the interval of bounds [R + 1] that contains it, the offset from its start, if any."""
        number = jnp.arange(count, dtype=jnp.int32)
        request = jnp.sum(number[:, None] >= bounds[1:], axis=1, dtype=jnp.int32)
        exists = request < num_requests
        request = jnp.where(exists, request, 0)
        return request, jnp.where(exists, number - bounds[request], 0), exists

    request, nth, exists = owner(first_tile, num_tiles)
    order = nth[:, None] * q + jnp.arange(q, dtype=jnp.int32)
    real = exists[:, None] & (order < lens[request][:, None])
    order = jnp.where(real, order, 0)
    row = jnp.where(real, query_start_loc[request][:, None] + order, 0)
    length = seq_lens[request][:, None]
    context = length - lens[request][:, None]
    of, offset, owned = owner(query_start_loc, num_rows)
    of_rows = {"tile": first_tile[of] + offset // q, "tile_row": offset % q, "owned": owned}
    return _Tiles(request, real, row, order + context, context, length, **of_rows)


class _Heads(NamedTuple):
    """The M rows of a tile that read one kv head: for each query head of its group, the tile's Q rows."""

    num_kv_heads: int
    group: int
    tile_len: int

    def of_tiles(self, x: jax.Array) -> jax.Array:
        """[X, Q, H, D] -> [X, K, M, D]."""
        x = x.reshape(-1, self.tile_len, self.num_kv_heads, self.group, x.shape[-1]).transpose(0, 2, 3, 1, 4)
        return x.reshape(-1, self.num_kv_heads, self.group * self.tile_len, x.shape[-1])

    def to_rows(self, tiles: _Tiles, x: jax.Array, fill: float) -> jax.Array:
        """[X, K, M, E] -> [T, H, E], each row from its tile."""
        x = x.reshape(x.shape[0], self.num_kv_heads * self.group, self.tile_len, -1)[tiles.tile, :, tiles.tile_row]
        return jnp.where(tiles.owned[:, None, None], x, fill)

    def by_head(self, values: jax.Array) -> jax.Array:
        """[H] -> [K, M, 1], against scores [X, K, M, C]."""
        return jnp.repeat(values.reshape(self.num_kv_heads, self.group), self.tile_len, axis=1)[..., None]

    def by_kv_head(self, values: Any) -> jax.Array:
        """Scalar or [K] -> [K, 1, 1]."""
        return jnp.broadcast_to(jnp.asarray(values, jnp.float32), (self.num_kv_heads,))[:, None, None]

    def alike(self, x: jax.Array) -> jax.Array:
        """[X, Q, C] -> [X, 1, M, C]: the same for every head of the group."""
        return jnp.tile(x, (1, self.group, 1))[:, None]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # HIGHEST: neither TF32 nor bf16 passes for float32; 16-bit inputs are exact as they are
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def _mask(rules: XLAParams, tiles: _Tiles, num_keys: int) -> tuple[Visibility, jax.Array, jax.Array]:
    """(what the tiles' rows see, [low, stop): the keys that a tile can see, [X, 1] each)."""
    batch, reach, prefixed = rules.batch, None, None
    if batch.spans is not None:
        spans = batch.spans[tiles.row][:, :, None]  # [X, Q, 1, 2]
        has_span = tiles.real & (spans[:, :, 0, 1] >= 0)
        first = jnp.where(has_span, spans[:, :, 0, 0], num_keys).min(axis=1, keepdims=True)
        reach = first, jnp.where(has_span, spans[:, :, 0, 1], -1).max(axis=1, keepdims=True)
        batch = batch._replace(spans=spans)
    if batch.prefix is not None:
        prefixed = batch.prefix[tiles.request][:, None]
    mask, last = Visibility(rules.layer, batch), tiles.position.max(axis=1, keepdims=True)
    ordered = rules.causal and batch.tree is None
    return mask, *mask.bounds(tiles.position[:, :1], last, tiles.length, reach, prefixed, ordered, jnp)


def _seen(mask: Visibility, tiles: _Tiles, key: jax.Array) -> jax.Array:
    """[X, Q, C]: which of the keys at positions [X, C] each row attends to."""
    p, j, request, context = tiles.position[..., None], key[:, None], tiles.request[:, None, None], tiles.context[..., None]
    length = tiles.length[..., None]
    allowed = mask.allowed(p, j, request, ..., context, length - context)
    return tiles.real[..., None] & (j < length) & allowed


def _scores(rules: XLAParams, heads: _Heads, tiles: _Tiles, q: jax.Array, k: jax.Array, key: jax.Array) -> jax.Array:
    """[X, K, M, C], not masked, of the keys k [X, K, C, D] at positions [X, C]."""
    score_scale = rules.scale * heads.by_kv_head(rules.k_scale)
    if q.shape[2] <= 32:  # few rows: transpose the scores, since by default XLA transposes the keys, which are many more
        s = lax.optimization_barrier(_dot("xkcd,xkmd->xkcm", k, q)).swapaxes(2, 3) * score_scale
    else:
        s = _dot("xkmd,xkcd->xkmc", q, k) * score_scale
    if rules.logits_soft_cap is not None:
        s = rules.logits_soft_cap * jnp.tanh(s / rules.logits_soft_cap)
    if rules.alibi_slopes is not None:
        distance = (key[:, None, :] - tiles.position[..., None]).astype(jnp.float32)
        s -= heads.by_head(rules.alibi_slopes) * heads.alike(jnp.abs(distance))
    return s


def _attend(
    query: jax.Array, fetch: Fetch, extent: tuple[int, ...], requests: Requests, **terms: Any
) -> tuple[jax.Array, jax.Array]:
    """Run the loop over the keys, of ABREAST tiles at a time. `extent` is (N, P, K); `terms` are `XLAParams`."""
    rules, (query_start_loc, seq_lens, block_table) = XLAParams(**terms), requests
    num_rows, num_heads, _ = query.shape
    (num_requests, columns), (num_blocks, page, num_kv_heads) = block_table.shape, extent
    if 0 in (num_rows, num_requests, columns, num_blocks):
        return jnp.zeros_like(query), jnp.full((num_heads, num_rows), -jnp.inf, jnp.float32)
    heads = _Heads(num_kv_heads, num_heads // num_kv_heads, tile_rows(num_rows, num_requests, rules.max_query_len))
    tiles = _tiles_of(query_start_loc, seq_lens, num_rows, heads.tile_len)
    of = functools.partial(_over_keys, rules, heads, query, fetch, extent, block_table)
    num_tiles = tiles.request.shape[0]
    if num_tiles <= ABREAST:
        out, lse = of(tiles)
    else:
        _, low, stop = _mask(rules, tiles, columns * page)
        order = jnp.argsort(jnp.where(tiles.real[:, 0], jnp.maximum(low, 0)[:, 0] - stop[:, 0], 1))
        spare = -num_tiles % ABREAST

        def grouped(x: jax.Array) -> jax.Array:
            x = jnp.pad(x[order], ((0, spare), *[(0, 0)] * (x.ndim - 1)))
            return x.reshape(-1, ABREAST, *x.shape[1:])

        of_rows = {"tile": tiles.tile, "tile_row": tiles.tile_row, "owned": tiles.owned}
        out, lse = lax.map(lambda fields: of(_Tiles(*fields, **of_rows)), tuple(map(grouped, tiles[:6])))
        out, lse = (x.reshape(-1, *x.shape[2:]) for x in (out, lse))
        tiles = tiles._replace(tile=jnp.argsort(order)[tiles.tile])
    lse = heads.to_rows(tiles, lse[..., None], -jnp.inf)[..., 0].T
    return heads.to_rows(tiles, out, 0.0).astype(query.dtype), lse


def _over_keys(
    rules: XLAParams,
    heads: _Heads,
    query: jax.Array,
    fetch: Fetch,
    extent: tuple[int, ...],
    block_table: jax.Array,
    tiles: _Tiles,
) -> tuple[jax.Array, jax.Array]:
    """Return (out [X, K, M, D] float32, lse [X, K, M]) of some tiles: a loop over the keys of the longest of them."""
    columns, (num_blocks, page, num_kv_heads), head_size = block_table.shape[1], extent, query.shape[2]
    pages = chunk_pages(page, columns, tiles.row.size * query.shape[1])
    chunk = pages * page
    # unused rows must not propagate a NaN
    q = heads.of_tiles(jnp.where(tiles.real[..., None, None], query[tiles.row], 0))
    table, used = block_table[tiles.request], -(-tiles.length // page)  # [X, B], [X, 1]
    mask, low, stop = _mask(rules, tiles, columns * page)
    first = jnp.maximum(low, 0) // chunk
    trips = jnp.where(tiles.real[:, :1], -(-stop // chunk) - first, 0).max()

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        row_max, total, acc = carry
        column = (first + i) * pages + jnp.arange(pages, dtype=jnp.int32)  # [X, pages]
        ids = jnp.take_along_axis(table, jnp.minimum(column, columns - 1), axis=1)
        ids = jnp.where(column < used, ids, 0)  # table entries past the used columns are never followed
        lost = (ids < 0) | (ids >= num_blocks) | ((column >= columns) & (column < used))  # no such page, or no column for it
        k, v = (unpacked(x, query.dtype).reshape(-1, num_kv_heads, chunk, head_size) for x in fetch(jnp.where(lost, 0, ids)))
        key = (first + i) * chunk + jnp.arange(chunk, dtype=jnp.int32)  # [X, C]
        s = _scores(rules, heads, tiles, q, k, key)
        s = jnp.where(jnp.repeat(lost, page, axis=1)[:, None, None], jnp.nan, s)
        allowed = heads.alike(_seen(mask, tiles, key))
        s = jnp.where(allowed, s, -jnp.inf)

        new_top = jnp.maximum(row_max, s.max(axis=-1))
        finite_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights, rescale = jnp.exp(s - finite_top[..., None]), jnp.exp(row_max - finite_top)
        product = _dot("xkmc,xkcd->xkmd", weights.astype(v.dtype), v)
        product = lax.cond(jnp.isnan(product).any(), lambda: _select(weights, allowed, v), lambda: product)
        return new_top, total * rescale + weights.sum(axis=-1), acc * rescale[..., None] + product

    sums = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    rows = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    # Under shard_map the loop's initial state must vary over the same mesh axes as the step's result: query the step for
    # them.
    nothing = map(jnp.full_like, jax.eval_shape(step, trips, (rows, rows, sums)), (-jnp.inf, 0.0, 0.0))
    row_max, total, acc = lax.fori_loop(0, trips, step, tuple(nothing))

    empty = total == 0  # not by the maximum: on a CPU it does not always propagate NaN
    total = jnp.where(empty, 1.0, total)
    lse, out = row_max + jnp.log(total), acc / total[..., None] * heads.by_kv_head(rules.v_scale)
    if rules.sinks is not None:
        gate = jax.nn.sigmoid(lse[..., None] - heads.by_head(rules.sinks))
        out = jnp.where(empty[..., None], 0.0, out * gate)
    return out, lse


def _select(weights: jax.Array, allowed: jax.Array, v: jax.Array) -> jax.Array:
    """weights [X, K, M, C] times v [X, K, C, D], where a row includes only values it may see, NaN and infinities among them."""
    attends = jnp.broadcast_to(allowed, weights.shape).astype(v.dtype)

    def reach(flags: jax.Array) -> jax.Array:
        return _dot("xkmc,xkcd->xkmd", attends, flags.astype(v.dtype)) > 0

    product = _dot("xkmc,xkcd->xkmd", weights.astype(v.dtype), jnp.where(jnp.isfinite(v), v, 0))
    product += jnp.where(reach(v == jnp.inf), jnp.inf, 0.0)
    product += jnp.where(reach(v == -jnp.inf), -jnp.inf, 0.0)  # both infinities make NaN, as they should
    return jnp.where(reach(jnp.isnan(v)), jnp.nan, product)
