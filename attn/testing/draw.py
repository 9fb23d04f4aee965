"""Draw the arrays of a case, the same on every machine: data, page placement, and poison everywhere else.

Memory that a backend must not read is never zero: cache slots past a sequence's end, unused pages, table entries past the
last page, keys that are outside every window, padding rows. The cache of a call contains the *context*; the new tokens' slots
are poisoned too, since the backend writes them.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from attn.backends.abstract import KVCacheSpec
from attn.backends.block_table import slots_of
from attn.backends.metadata import CommonAttentionMetadata, next_power_of_two
from attn.capabilities import AttentionType
from attn.dtypes import kv_cache_row
from attn.reference import alibi_slopes
from attn.testing.bits import Array, drawn, encode, poisoned
from attn.testing.case import Case, Scale


@dataclass
class Call:
    """The NumPy arrays of one forward call.

    Values are float32 and already rounded to the case's dtype (float64 with digits beyond float32 for float64); caches are
    stored bits. All arrays are made read-only: a runner copies those that it passes to a framework.

    query: [T, H, D].
    key, value: [T, K, D], or None (nothing to write).
    key_cache, value_cache: [N, P, K, D] bits (rows of D + 4 bytes if each token and head has its own scale); None for encoders.
    batch: the lengths, the block table, the tree mask, spans and prefixes.
    alibi_slopes, sinks: [H] float32 or None.
    memo: cached results that were derived from this call.
    """

    case: Case
    query: Array
    key: Array | None
    value: Array | None
    key_cache: Array | None
    value_cache: Array | None
    batch: CommonAttentionMetadata
    alibi_slopes: Array | None
    sinks: Array | None
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for array in (*vars(self).values(), *vars(self.batch).values()):
            # A backend that wrote into an argument would otherwise change the input of every later one, through the cache of
            # `draw`.
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    def but(self, **changes: Any) -> Self:
        """Return a copy with some arrays or fields of the case changed."""
        arrays = {k: v for k, v in changes.items() if k in self.__dataclass_fields__}
        arrays["case"] = self.case.replace(**{k: v for k, v in changes.items() if k not in arrays})
        # The memo holds the expected result of the arrays before the change.
        return replace(self, **arrays, memo={})

    def with_batch(self, **changes: Any) -> Self:
        """Return a copy with some fields of its batch changed."""
        return self.but(batch=self.batch.replace(**changes))

    def writable_batch(self) -> CommonAttentionMetadata:
        """Return the batch with copies of its arrays, since a framework may share their memory."""
        arrays = {name: value.copy() for name, value in vars(self.batch).items() if isinstance(value, np.ndarray)}
        return self.batch.replace(**arrays)

    @property
    def num_tokens(self) -> int:
        return self.batch.num_actual_tokens

    @property
    def scale(self) -> float:
        return self.case.scale if self.case.scale is not None else 1.0 / math.sqrt(self.case.query_size)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        return (self.query.shape[0], self.case.num_heads, self.case.output_size)

    @property
    def indices(self) -> Array:
        """The keys that each row of a sparse MLA case attends to, [T, topk] int32.

        -1 and positions past the end are ignored. A row's keys depend on its position only, so that a token has the same keys
        in any batch.
        """
        # A query that lacks rows (a mistake of `attn.testing.wrong`) leaves the batch's rows as they are.
        chosen = np.full((max(self.query.shape[0], self.num_tokens), self.case.topk), -1, np.int32)
        for r in range(self.batch.num_reqs):
            rows, end = self.rows(r), int(self.batch.seq_lens[r])
            for row in range(rows.start, rows.stop):
                position = row - rows.stop + end
                # The position of a row before the sequence's start is negative, which NumPy refuses in a seed.
                rng = np.random.default_rng([10, self.case.data_seed, position + (1 << 20)])
                # Three entries of a list name no key, and places that the pool does not reach stay -1, also between others: a
                # kernel that stops at the first -1 reads too few keys.
                pool = np.concatenate([rng.permutation(max(0, position + 1))[: self.case.topk - 3], [-1, 1 << 30, -1]])
                places = rng.permutation(self.case.topk)[: len(pool)]
                chosen[row, places] = pool
        return chosen

    @property
    def weights(self) -> Array:
        """MLA's up-projection [L, H, Dn + Dv]."""
        return up_projection(self.case)

    def rows(self, r: int) -> slice:
        """Return the slice of request r's rows in the packed arrays."""
        start = self.batch.query_start_loc
        return slice(int(start[r]), int(start[r + 1]))


@dataclass
class Result:
    """A runner's result, in NumPy.

    output: [T, H, D] float32 values of dtype `dtype`.
    lse: [H, T] float32 or None.
    key_cache, value_cache: stored bits after the call, or None.
    padding: the required value of rows past the last token (NaN: unwritten; 0: zeros).
    spilled: whether memory next to the output buffer changed.
    """

    output: Array
    lse: Array | None
    key_cache: Array | None
    value_cache: Array | None
    dtype: str
    padding: float = float("nan")
    spilled: bool = False


def scale_array(scale: Scale) -> Array:
    """Return a case's scale as the layer stores it: 0-d or [K] float32."""
    return np.asarray(scale, np.float32)


def layer_arguments(call: Call) -> dict[str, Any]:
    """Return the constructor arguments of a call's implementation, for any framework.

    Sinks are omitted; MLA's weights (`kv_b_proj`) are a NumPy array.
    """
    case = call.case
    special: dict[str, Any] = {"blocksparse_params": case.sparse_pattern} if case.sparse else {}
    # The sizes of a latent, by name as in vLLM's interface; the query arrives projected, so it has no rank of its own.
    if case.mla:
        rank, nope, rope, value = case.mla
        special = {
            **{"q_lora_rank": None, "kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope},
            **{"qk_head_dim": nope + rope, "v_head_dim": value, "kv_b_proj": call.weights},
        }
    if case.chunk_size:
        special["chunk_size"] = case.chunk_size
    # Required of a layer with a window that is to serve spans (docs/semantics.md §18).
    if case.spans and case.sliding_window is not None:
        special["span_window"] = case.span_window
    return {
        **special,
        "num_heads": case.num_heads,
        "head_size": case.head_size,
        "scale": call.scale,
        "num_kv_heads": case.num_kv_heads,
        "alibi_slopes": None if call.alibi_slopes is None else [float(s) for s in call.alibi_slopes],
        "sliding_window": case.sliding_window,
        "kv_cache_dtype": case.kv_cache_dtype,
        "logits_soft_cap": case.logits_soft_cap,
        "attn_type": case.attn_type,
        "kv_sharing_target_layer_name": "another layer" if case.kv_sharing else None,
    }


@functools.lru_cache(maxsize=64)
def _up_projection(mla: tuple[int, ...], num_heads: int, dtype: str, seed: int) -> Array:
    rank, nope, _, value = mla
    values = np.random.default_rng([9, seed]).standard_normal((rank, num_heads, nope + value), np.float32)
    # A sum over `rank` latents of unit variance keeps that variance: the rules' floors assume values of about 1.
    weights = drawn(values * np.float32(rank**-0.5), dtype)
    weights.setflags(write=False)
    return weights


def up_projection(case: Case) -> Array:
    """Return an MLA case's weights [L, H, Dn + Dv], rounded to its dtype."""
    return _up_projection(case.mla, case.num_heads, case.dtype, case.data_seed)


def cache_spec(call: Call) -> KVCacheSpec:
    """Return the specification of the cache of a call's layer; num_blocks is None for an encoder, which has no cache."""
    case = call.case
    num_blocks = None if call.key_cache is None else call.key_cache.shape[0]
    return KVCacheSpec(
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        case.dtype,
        case.kv_cache_dtype,
        num_blocks,
        case.sliding_window,
        case.attn_type,
    )


# Keyed by the case, name included, since a `Case` is frozen. Shared arrays are safe because they are read-only.
@functools.lru_cache(maxsize=512)
def draw(case: Case) -> Call:
    """Return the call of a case, cached because several backends and checks use the same one."""
    # The first number of a seed names the array that is drawn, so that the contents of one do not depend on whether another is
    # drawn, nor on how many numbers it took.
    geometry = np.random.default_rng([1, case.geometry_seed])
    table, num_blocks = _tables(case, geometry)
    slack = int(geometry.integers(0, 2)) * 3 * (max(case.query_lens, default=0) > 1)  # a captured graph's bound is not tight
    q_lens, seq_lens = np.array(case.query_lens, np.int32), np.array(case.seq_lens, np.int32)
    start = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    # [m, K, D] of each request; the cache's contents and the call's new rows are both cut out of these.
    data = [_sequence(case, r) for r in range(len(q_lens))]
    query, key, value = _tokens(case, start, data)
    # Cross attention reads an encoder's keys, which are in the cache already; an encoder has keys in its call and no slots.
    writes = case.attn_type != AttentionType.ENCODER_DECODER and case.new == "written"
    batch = CommonAttentionMetadata(
        query_start_loc=start,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=_slots(case, table, start, writes),
        num_reqs=len(q_lens),
        num_actual_tokens=int(start[-1]),
        max_query_len=int(q_lens.max(initial=0)) + slack + case.loose,
        max_seq_len=min(int(seq_lens.max(initial=0)) + slack, table.shape[1] * case.block_size) + case.loose,
        # "mixed": the first request is causal, the second is not, and so on.
        causal=np.arange(len(q_lens)) % 2 == 0 if case.causal == "mixed" else case.causal,
        query_start_loc_cpu=start,
        seq_lens_cpu=seq_lens,
        tree_mask=_trees(case),
        spans=_spans(case),
        prefix=np.minimum(max(case.prefix, 0), seq_lens).astype(np.int32) if case.prefix else None,
    )
    none = (None, None)
    new: tuple[Array | None, Array | None] = (key, value) if writes else none
    caches: tuple[Array | None, Array | None] = none if case.is_encoder else _filled_caches(case, table, num_blocks, data)
    return Call(case, query, *new, *caches, batch, _slopes(case), _sinks(case))


def _tokens(case: Case, start: Array, data: list[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Return query [T, H, D] and key, value [T, K, D] of the batch's tokens. Padding, and rows without a key, are NaN."""
    rows = int(start[-1]) + case.padding
    # float32 holds every 16-bit value exactly, so only float64 needs a wider array.
    dtype = np.float64 if case.dtype == "float64" else np.float32
    query = np.full((rows, case.num_heads, case.query_size), np.nan, dtype)
    key = np.full((rows, case.num_kv_heads, case.head_size), np.nan, dtype)
    value = key.copy()
    for r, (count, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        query[start[r] : start[r + 1]] = _queries(case, r, data[r][0])
        keyless = max(count - length, 0)  # rows before the sequence's start
        # Elsewhere the call's keys stay NaN: a backend that reads them where it must not gives NaN.
        if case.attn_type != AttentionType.ENCODER_DECODER and not case.kv_sharing and count > keyless:
            live, new = slice(start[r] + keyless, start[r + 1]), slice(max(length - count, 0), None)
            key[live], value[live] = (x[new] for x in data[r])
    return query, key, value


def _slots(case: Case, table: Array, start: Array, writes: bool) -> Array:
    """Return the slots of the batch's tokens, int64 [T]; -1 for padding and for tokens that are not written."""
    slots, total = np.full(int(start[-1]) + case.padding, -1, np.int64), int(start[-1])
    if writes and case.attn_type == AttentionType.DECODER:
        q_lens, seq_lens = np.diff(start), np.array(case.seq_lens, np.int64)
        # [T]: the request of each row, and the row's position in that request, which is negative before its start (slot -1).
        owner = np.repeat(np.arange(len(q_lens)), q_lens)
        position = np.arange(total) - start[owner] + (seq_lens - q_lens)[owner]
        slots[:total] = slots_of(table, owner, position, case.block_size)
    return slots


def _tables(case: Case, rng: np.random.Generator) -> tuple[Array, int]:
    """Return (block_table [R, B], N): random pages, a shared prefix, and stale entries after each row's last page."""
    used = [-(-m // case.block_size) for m in case.seq_lens]
    shared = case.shared_prefix // case.block_size
    # few sizes: a compiled backend compiles for each
    num_blocks = case.num_blocks or max(8, next_power_of_two(2 * sum(used) + 2))
    # The permutation below would run out of pages without an error, and two requests would write to the same one.
    if num_blocks < shared + sum(used):
        raise ValueError(f"num_blocks={num_blocks} must be at least {shared + sum(used)}, the pages in use")
    free = rng.permutation(num_blocks).astype(np.int32)
    if num_blocks > 1 << 16 or num_blocks * case.block_size * case.num_kv_heads * case.head_size > 1 << 31:
        free = np.sort(free)[::-1]  # only the last pages have numbers or offsets that need more than 16 or 32 bits
    common, free = free[:shared], free[shared:]
    # At least two entries past every request's last page, and few different widths, since some backends compile for them. A
    # batch without keys has no entry, as `from_lens` makes it.
    columns = max(8, max(used) + 2) if any(used) else 0
    # What an engine leaves in a row that it reuses: padding, or pages of requests that have ended.
    table = np.where(rng.random((len(used), columns)) < 0.5, -1, rng.integers(0, num_blocks, (len(used), columns)))
    table = table.astype(np.int32)
    for r, count in enumerate(used):
        # Only cached tokens are shared: a new token in a shared page would be written by every request that shares it.
        shares = shared if shared and case.seq_lens[r] - case.query_lens[r] >= case.shared_prefix else 0
        table[r, :shares] = common[:shares]
        table[r, shares:count], free = free[: count - shares], free[count - shares :]
    if case.new == "shared" and used:
        # Requests with fewer pages read the first pages of the longest one; `_sequence` gives all of them its keys.
        longest = table[used.index(max(used))]
        for row, count in zip(table, used, strict=True):
            row[:count] = longest[:count]
    return table, num_blocks


def _trees(case: Case) -> Array | None:
    """Return ancestor-or-self masks [R, W, W] of a random tree per request."""
    if not case.tree:
        return None
    width = max(case.tree, 0)
    trees = np.zeros((len(case.query_lens), width, width), np.bool_)
    for r, mask in enumerate(trees):
        rng = np.random.default_rng([6, case.geometry_seed, r])
        for node in range(width):
            if node:
                # A parent with a smaller number: its row is complete and holds its ancestors and itself.
                mask[node] = mask[rng.integers(0, node)]
            mask[node, node] = True
    return trees


def _spans(case: Case) -> Array | None:
    """Return spans [T + padding, 2]: runs of text and runs of tokens that see each other, and a few ranges elsewhere."""
    if not case.spans:
        return None
    spans = np.full((sum(case.query_lens) + case.padding, 2), -1, np.int32)
    spans[sum(case.query_lens) :] = 1 << 20  # rows of padding are not read
    offset = 0
    for r, (n, m) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        rng = np.random.default_rng([11, case.geometry_seed, r])
        # `ranges` is a view, through which the request's rows of `spans` are written.
        position, ranges = np.arange(m - n, m), spans[offset : offset + n]
        offset += n
        live = position >= 0
        if case.spans < 0:
            ranges[live] = position[live, None]
            continue
        # Ends of m + 1 runs of at least one token each, so the last end is past every position.
        bounds = np.cumsum(rng.integers(1, 2 * case.spans + 1, m + 1))
        run = np.searchsorted(bounds, np.maximum(position, 0), side="right")
        first = np.where(run > 0, bounds[run - 1], 0)
        # Every other run is an image; whether the first one is alternates with the request.
        together = live & (run % 2 == r % 2)
        ranges[together] = np.stack([first, np.minimum(bounds[run], m) - 1], 1)[together]
        # Ranges that do not contain their own row, before or after it, which spans of images never are.
        for i in np.flatnonzero((rng.random(n) < 0.15) & (m > 0)):
            ranges[i] = np.sort(rng.integers(0, m, 2))
    return spans


def _sequence(case: Case, r: int) -> tuple[Array, Array]:
    """Return request r's (keys, values) [m, K, D], rounded to the case's dtype; an encoder's are of its rows."""
    shares = case.new == "shared"
    # Requests that share pages must agree on what these hold, so all draw the longest one's tokens and keep their first ones.
    rng = np.random.default_rng([2, case.data_seed, 0 if shares else r])
    m = max(case.seq_lens) if shares else case.seq_lens[r]
    shape = (m, case.num_kv_heads, case.head_size)
    key, value = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
    if case.inputs == "far":
        key = np.zeros(shape, np.float32)
        # With a query of -256 / scale (`_queries`) the score is -524288, of which every factor is a power of two and exact in
        # 16 bits. A kernel whose "minus infinity" is a large finite number takes such a key for a masked one.
        key[..., 0] = 2048.0
    elif case.inputs == "loud":
        # With a query of 250: 40 * 250 * sqrt(D) at the default scale of 1 / sqrt(D), about 1e4.
        key *= 40.0
    elif case.inputs == "constant":
        value = np.full(shape, 1.625, np.float32)
    elif case.inputs == "wide":
        # Divided by the scales of `fixtures._caches` (0.02 and 0.5) both are about 400, where e4m3 ends at 448 and int8 at 127.
        key, value = key * 8.0, value * 200.0
    elif case.inputs == "hollow":
        # A token of zeros has a scale of 0 in a cache that scales each token, and 0 / 0 is NaN.
        key[::3], value[::3] = 0.0, 0.0
    elif case.inputs == "infinite":
        # One element is enough: the query has 1 there (`_queries`), and the others are finite.
        key[(slice(None), slice(None, None, 3), slice(m // 2))[r % 3], :, case.mla[0] if case.mla else 0] = -np.inf
    if case.shared_prefix:
        # Not of the request: every request that shares the pages draws the same prefix.
        common = np.random.default_rng([3, case.data_seed])
        for array in (key, value):
            prefix = common.standard_normal((case.shared_prefix, *shape[1:]), np.float32)
            if m - case.query_lens[r] >= case.shared_prefix:
                array[: case.shared_prefix] = prefix
    if case.inputs == "nonfinite":
        _spoil(case, rng, key, "key")
        _spoil(case, rng, value, "value")
    if case.mla:
        value = key  # a latent row is key and value; the weights make the value
    live = slice(case.seq_lens[r])
    return drawn(key[live], case.dtype), drawn(value[live], case.dtype)


def _spoil(case: Case, rng: np.random.Generator, rows: Array, tensor: str) -> None:
    """Set two live elements of rows [n, heads, D] to NaN or an infinity, if the case's data seed selects the rows of `tensor`.

    In MLA only rotary elements: whether an infinite latent results in an infinity or NaN depends on the order of products.
    """
    if tensor != ("query", "key", "value")[case.data_seed % 3] or not rows.size or (case.mla and tensor == "value"):
        return
    first = 0
    if case.mla:
        # Rotary elements follow the latent in a cached row, and the part without rotation in a query.
        first = case.mla[0] if tensor == "key" else case.mla[1]
    for _ in range(2):
        row, head, d = (int(rng.integers(0, size)) for size in (*rows.shape[:2], rows.shape[2] - first))
        rows[row, head, first + d] = rng.choice((np.inf, -np.inf, np.nan))


def _queries(case: Case, r: int, key: Array) -> Array:
    """Return request r's queries [n, H, D]."""
    rng = np.random.default_rng([4, case.data_seed, r])
    n, m = case.query_lens[r], case.seq_lens[r]
    query = rng.standard_normal((n, case.num_heads, case.query_size), np.float32)
    if case.inputs == "far":
        query = np.zeros_like(query)
        # The scale of this case is a power of two, so that the product with the key is exact.
        query[..., 0] = -256.0 / (case.scale if case.scale is not None else case.query_size**-0.5)
    elif case.inputs == "loud":
        query *= 250.0
    elif case.inputs == "magnitudes":
        query *= np.float32(10.0 ** rng.integers(-3, 4))
    elif case.inputs == "wide":
        query *= 0.05
    elif case.inputs == "infinite":  # times -inf and the scale gives -inf
        query[..., case.mla[1] if case.mla else 0] = math.copysign(1.0, case.scale or 1.0)
    elif case.inputs == "nonfinite":
        _spoil(case, rng, query, "query")
    elif case.inputs == "needle" and m:
        # The noise is small against a score of 8: a kernel that misses the target key loses nearly the whole row, at any
        # length, where the mean of random values hides an error among thousands of keys.
        query = _needles(case, rng, key, n) + 0.25 * query
    return drawn(query, case.dtype)


def _needles(case: Case, rng: np.random.Generator, key: Array, n: int) -> Array:
    """Return queries [n, H, D], each aligned with a key at a boundary: itself, its neighbours, window edges, page start, ends.

    The target's score is about 8. Without a window, the edges are those of a window of one page.
    """
    m = len(key)
    p = np.arange(n) + m - n
    left, right = case.window
    left = case.block_size if left is None else left
    right = 1 if right is None else right
    page = p // (case.chunk_size or case.block_size) * (case.chunk_size or case.block_size)
    # [14, n]: a key on each side of every bound that a mask has, since an error by one moves exactly these.
    edges = [p, p - 1, p + 1, p - left, p - left - 1, p - left + 1, p + right, p + right + 1, p + right - 1, page, page - 1]
    edges += [np.zeros_like(p), np.full_like(p, m - 1), rng.integers(0, m, n)]
    choice = rng.integers(0, len(edges), (n, case.num_heads))
    target = np.stack(edges)[choice, np.arange(n)[:, None]]
    # A row near the start has edges before it.
    target = np.where((target >= 0) & (target < m), target, rng.integers(0, m, target.shape))
    if case.mla:
        rank, nope, rope, _ = case.mla
        shared = np.broadcast_to(key[..., rank:], (m, case.num_heads, rope))
        # The expanded keys [m, H, Dn + Dr], since a query is compared with these, not with latents.
        key = np.concatenate([np.tensordot(key[:, 0, :rank], up_projection(case)[..., :nope], 1), shared], 2)
    head = np.arange(case.num_heads) // (case.num_heads // key.shape[1])
    scale = case.scale if case.scale is not None else case.query_size**-0.5
    # The square of a unit normal key's length is about its size, so the score is scale * (8 / (scale * size)) * size.
    return (8.0 / (scale * case.query_size)) * key[target, head]


def _filled_caches(case: Case, table: Array, num_blocks: int, data: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return key and value storage [N, P, K, D] with the readable context of every request, and poison elsewhere."""
    shape = (num_blocks, case.block_size, case.num_kv_heads, kv_cache_row(case.kv_cache_dtype, case.head_size))
    caches = tuple(poisoned(shape, case.element, case.poison) for _ in range(2))
    # If the call writes its new tokens, their slots are poison until then.
    is_written = case.attn_type == AttentionType.DECODER and not case.kv_sharing and case.new == "written"
    # A span or a prefix reaches keys that the window does not.
    left = None if case.spans or case.prefix else case.window[0]
    for r, (n, m) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        end, first = max(m - n, 0) if is_written else m, max(m - n, 0)
        begin = 0 if left is None else max(m - n - left, 0)  # keys that are outside every row's window and chunk
        # The first row's chunk begins earliest, and a chunk limits spans and prefixes too.
        begin = min(max(begin, first // case.chunk_size * case.chunk_size if case.chunk_size else 0), end)
        # No row reads the keys of such a request: they stay poison.
        if n == 0 or end == begin:
            continue
        j = np.arange(begin, end)
        page, offset = table[r, j // case.block_size], j % case.block_size
        for cache, values, scale in zip(caches, data[r], case.cache_scales, strict=True):
            cache[page, offset] = encode(values[begin:end], case.element, scale_array(scale))
    return caches[0], caches[1]


def _slopes(case: Case) -> Array | None:
    if not case.alibi:
        return None
    if case.alibi is True:
        return alibi_slopes(case.num_heads).astype(np.float32)
    slopes = np.random.default_rng([11, case.data_seed]).uniform(-0.2, 0.2, case.num_heads)
    # Zeros beside others, since a kernel may skip the bias by layer, but not by head.
    return np.where(np.arange(case.num_heads) % 3 == 2, 0.0, slopes).astype(np.float32)


def _sinks(case: Case) -> Array | None:
    if not case.sinks:
        return None
    rng = np.random.default_rng([5, case.data_seed])
    sinks = rng.standard_normal(case.num_heads)
    if case.sinks == "log_length":
        # The sum of n exponentials of scores near 0 is about n: a sink of ln n has as much weight as all keys together, where
        # one of about 1 is invisible among thousands. The two ones are there because `max` needs two arguments if there is no
        # request.
        sinks = 0.5 * sinks + math.log(max(*case.seq_lens, 1, 1))
    elif case.sinks == "infinite":
        # In single heads: some kernels branch on whether a layer has sinks, and must not on their values.
        sinks = np.where(rng.random(case.num_heads) < 0.6, rng.choice((-np.inf, np.inf), case.num_heads), sinks)
    return sinks.astype(np.float32)
