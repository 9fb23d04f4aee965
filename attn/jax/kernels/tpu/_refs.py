"""The components of a launch: the static configuration, and the refs that its loops use."""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.visibility import LayerMask

LANES = 128
LOG2_E = 1.4426950408889634
#: The value of a code of float8_e4m3fn divided by its value as float8_e4m3b11fnuz.
E4M3_GAIN = 16.0
Ref = Any

#: Rows of `rules`: factors of scores and outputs, and terms added in units of log2.
K_FACTOR, V_FACTOR, SINK, SLOPE = range(4)


@dataclasses.dataclass(frozen=True)
class PagedShape:
    """What is static in a call over pages, before block sizes are chosen."""

    num_tokens: int  # T
    num_requests: int  # R
    columns: int  # B, of the block table
    max_query_len: int  # at least the longest query
    planes: int  # arrays per head in a page: keys and values, or one that holds both
    num_kv_heads: int
    page: int
    lanes: int  # per row as stored, a multiple of 128
    group: int  # G: query heads that share a kv head
    itemsize: int  # bytes of a query's element
    cache_itemsize: int
    mask: LayerMask = LayerMask()
    lse: bool = False
    write: bool = True
    ranges: int = 0  # of keys that a row sees, listed by the plan; 0: one, which follows from its position
    scale_heads: int = 0  # that follow the others in a page and hold their scales: the cache is int4_per_token_head

    @property
    def packed(self) -> bool:
        """Whether a byte holds a key's code and a value's: see `halves`."""
        return self.scale_heads > 0

    @property
    def stored_heads(self) -> int:
        return self.num_kv_heads + self.scale_heads

    @property
    def native(self) -> int:
        """Rows of a hardware tile of queries."""
        return sublanes(self.itemsize)

    @property
    def align(self) -> int:
        """A long request's query tokens begin at multiples of this."""
        return self.native // math.gcd(self.group, self.native)

    @property
    def tile(self) -> int:
        """Rows of the cache that are written together."""
        # scales are of all tokens of a page
        return self.page if self.packed else min(sublanes(self.cache_itemsize), self.page)

    @property
    def num_tiles(self) -> int:
        """The most tiles of cache rows that such a batch writes to."""
        if self.max_query_len == 1:
            return min(self.num_requests, self.num_tokens)
        return min(2 * self.num_requests, self.num_tokens) + self.num_tokens // self.tile + 1

    @property
    def ring(self) -> int:
        """Tiles in memory at a time: all of a small launch, and as many of a long request as hide the latency of copies."""
        return 16 if self.max_query_len > self.tile or self.num_tiles <= 16 else 8

    @property
    def narrow(self) -> bool:
        """Whether a page has fewer rows than a hardware tile, so that pages cannot form blocks of rows: see `rows_at`."""
        return self.page < sublanes(self.cache_itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedConfig(PagedShape):
    """The static configuration of any launch over pages."""

    kv_block: int  # keys per DMA block
    large: int  # query tokens per item; 0 if every request is a single
    key_tile: int  # keys per score matrix
    slots: int  # blocks that VMEM holds: one computed on, the others being loaded
    segment: int = 0  # keys per segment of the line of singles (`_line`); 0: singles are items like others

    @property
    def segments(self) -> int:
        """Segments per block."""
        return self.kv_block // self.segment

    @property
    def num_rows(self) -> int:
        """Rows of the query buffer for any batch of T tokens in R requests, with each longer request's rows aligned."""
        padded = self.num_tokens + min(self.num_requests, self.num_tokens // 2) * (self.align - 1)
        return -(-padded // self.align) * self.align + max(self.large, 1)

    @property
    def num_items(self) -> int:
        """The most items that such a batch has."""
        return min(self.num_requests, self.num_tokens) + self.num_tokens // max(self.large, 1)

    @property
    def num_runs(self) -> int:
        """The most pages that such a batch fills with new tokens alone, if a page has several tiles."""
        return self.num_tokens // self.page if self.write and self.tile < self.page <= self.max_query_len else 0

    @property
    def shares(self) -> bool:
        """Whether items of one request may share a block: see `_pages.Loads.group`.

        Longer requests have many blocks that none shares, and would pay for the branches.
        """
        return 0 < self.large < self.max_query_len <= self.kv_block and not self.ranges

    @property
    def per_part(self) -> int:
        """Pages of a shared block that are waited for together: an eighth of it."""
        return -(-self.kv_block // (8 * self.page))

    @property
    def num_signals(self) -> int:
        """Semaphores of blocks: one for each, and one for each part of those that are shared."""
        return self.slots * (1 + (-(-self.kv_block // (self.page * self.per_part)) if self.shares else 0))

    @property
    def least(self) -> int:
        """The keys of an item's shortest steps, the last of which may end in keys that it does not see."""
        return self.key_tile

    @property
    def late(self) -> bool:
        """Whether new rows are written after all keys are loaded, with which they are merged in VMEM: see `_pages.writing`."""
        return self.write and not self.num_runs and self.num_tiles <= self.ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRefs:
    """Refs passed to the kernel; None for those this launch does not use."""

    items: Ref
    tiles: Ref
    counts: Ref
    table: Ref
    cache: Ref  # [N, planes, K, P, lanes] in HBM
    kv: Ref  # [slots, planes, K, kv_block, lanes] in VMEM; narrow: [slots, planes, K, kv_block / P, P, lanes]
    kv_sem: Ref
    q_sem: Ref
    o_sem: Ref
    # the write
    fresh: Ref = None  # [planes, K, X * tile, lanes] in HBM; narrow: [X, planes, K, tile, lanes]
    old: Ref = None  # [ring, planes, K, tile, lanes] in VMEM
    new: Ref = None
    read_sem: Ref = None
    write_sem: Ref = None
    runs: Ref = None  # the plan's, and what their copies signal
    run_sem: Ref = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedConfig(PagedConfig):
    """The ragged kernel's sizes and features. With one plane a row holds [key | value]."""

    chunk: int  # keys per step of a long request if every row sees them but not a whole block; others have `key_tile`
    row_tile: int  # query rows of a score matrix
    fused: int  # score matrices of a step that every row sees but for the last of them; 1: masked ones are steps of their own
    last: int  # except an item's last one if no row sees more keys of it than this; 0: that has `key_tile` too
    stretch: int  # scores per unrolled block of code
    logits_soft_cap: float | None
    alibi: bool
    sinks: bool
    tree: bool
    float8: Any  # what the matrix unit multiplies, which codes of int4 are in: see `halves`
    rebiased: bool  # the cache is float8_e4m3fn, read as another format: see `widened`
    invariant: bool  # a request's bits do not depend on the others

    @property
    def join(self) -> int:
        """J: kv heads that a single treats as one."""
        join = 1
        while self.num_kv_heads % (2 * join) == 0 and 2 * join * self.group <= self.native:
            join *= 2
        return join

    @property
    def single_rows(self) -> int:
        """J * G, padded to whole tiles."""
        return -(-self.join * self.group // self.native) * self.native

    @property
    def joined(self) -> int:
        """The number of groups of J kv heads."""
        return self.num_kv_heads // self.join

    @property
    def query_slots(self) -> int:
        """Places for the queries of singles: at least a segment's of each block in memory, and a power of two."""
        return 1 << (self.segments * self.slots - 1).bit_length()

    @property
    def least(self) -> int:
        # no step reads others, but one that is compared with several ranges is never short
        return self.last if self.last and self.ranges < 2 else self.key_tile

    @property
    def from_start(self) -> bool:
        """Whether rows see every key before their last one."""
        return self.mask.window[0] is None and self.mask.chunk_size is None and not self.ranges

    @property
    def rows(self) -> int:
        """Rows of a kv head in an item of a long request."""
        return self.large * self.group


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedRefs(PagedRefs):
    """Refs of the ragged kernel. E: J * lanes; M, S: rows of long, single items."""

    # singles
    query1: Ref = None  # [R, K / J, S, E], zero off the diagonal blocks
    out1: Ref = None  # [R, K / J, S, lanes]
    lse1: Ref = None  # [R, K / J, S, 128] float32
    rules1_in: Ref = None  # [4, K / J, S, 128] float32 in HBM
    rules1: Ref = None  # and in VMEM
    rules_sem: Ref = None
    q1: Ref = None  # [query_slots, K / J, S, E] in VMEM
    o1: Ref = None  # [segments, K / J, S, lanes]
    o1_sem: Ref = None
    m1: Ref = None  # [segments, K / J, S, 128]
    l1: Ref = None
    acc1: Ref = None  # [segments, K / J, S, E]
    lse_rows1: Ref = None
    recompute1: Ref = None  # [segments, 8, 128] int32, above 0 where a NaN of the cache was lost
    # long requests
    query: Ref = None  # [K, rows of all, lanes]
    out: Ref = None
    lse: Ref = None  # [K, rows of all, 128]
    tree: Ref = None  # [rows of all, 128]
    ranges: Ref = None  # [I, 8, M] int32: of each row of an item, first key and stop of each of its ranges
    rules_in: Ref = None  # [4, K, 1, M] float32 in HBM
    rules: Ref = None  # and in VMEM
    q: Ref = None  # [2, K, M, lanes] in VMEM
    o: Ref = None
    m: Ref = None  # [K, 8, M], rows alike
    l: Ref = None  # noqa: E741  # [2 * K + 1, 8, M]: see `_long.ZEROS`
    acc: Ref = None  # [2 * K + 1, lanes, M]
    flags: Ref = None  # [4] in SMEM: see `_long.CURRENT`
    recompute: Ref = None  # [8, M] int32, above 0 for rows whose step must be repeated
    lse_rows: Ref = None  # [2, K, M, 128]
    edges: Ref = None  # [2, M, 128]
    seen: Ref = None  # [2, 8, M]


def sublanes(itemsize: int) -> int:
    """Rows of a native tile for elements of `itemsize` bytes."""
    return 32 // itemsize


def block_shape(cfg: PagedConfig) -> tuple[int, ...]:
    """The shape of a block of one head's rows in `kv`."""
    return (cfg.kv_block // cfg.page, cfg.page, cfg.lanes) if cfg.narrow else (cfg.kv_block, cfg.lanes)


def rows_at(cfg: PagedConfig, refs: PagedRefs, slot: Any, plane: int, head: Any, at: Any) -> jax.Array:
    """Rows `at` (a `pl.ds`, of whole pages where pages are narrow) of the block in `slot`: [rows, lanes].

    Copies write whole hardware tiles, so narrow pages are separate in VMEM, each in tiles of its own height. In registers
    the rows of several pages are joined into whole tiles.
    """
    if not cfg.narrow:
        return refs.kv[slot, plane, head, at, :]  # type: ignore[no-any-return]
    first = at.start // cfg.page if isinstance(at.start, int) else lax.div(at.start, cfg.page)
    pages = refs.kv[slot, plane, head, pl.ds(first, at.size // cfg.page), :, :]
    words = pltpu.bitcast(pages, jnp.int32)
    per_tile = min(8 // words.shape[1], words.shape[0])
    words = words.reshape(-1, per_tile, *words.shape[1:])
    tiles = jnp.concatenate([words[:, i] for i in range(per_tile)], axis=1)
    return pltpu.bitcast(tiles.reshape(-1, cfg.lanes), pages.dtype)  # type: ignore[no-any-return]


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """The matrix product over the given axes, summed in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def widen(x: jax.Array, width: int) -> jax.Array:
    """[rows, 128] with all lanes equal -> [rows, width]."""
    return x[:, :width] if width <= LANES else jnp.tile(x, (1, width // LANES))


def rows_between(x: jax.Array, y: jax.Array | None, first: jax.Array, stop: jax.Array) -> jax.Array:
    """x [n, rows, lanes] in rows [first, stop), and y (None: zeros) in the others, bit for bit.

    Whole 32-bit words are masked, each of which holds 1, 2 or 4 rows of a lane, so no chip needs narrower masks.
    """
    count, rows, lanes = x.shape
    bits = x.dtype.itemsize * 8
    per_word = 32 // bits

    def as_words(x: jax.Array) -> jax.Array:
        if rows < 8 * per_word:  # less than a hardware tile
            return pltpu.bitcast(x, jnp.int32)  # type: ignore[no-any-return]
        return pltpu.bitcast(x.reshape(count * rows, lanes), jnp.int32).reshape(count, rows // per_word, lanes)  # type: ignore[no-any-return]

    words = as_words(x)
    row = lax.broadcasted_iota(jnp.int32, words.shape, 1) * per_word
    keep = jnp.zeros(words.shape, jnp.int32)
    for i in range(per_word):
        mask = ((1 << bits) - 1) << (i * bits)
        mask -= (mask >> 31) << 32  # as a signed word
        keep |= jnp.where((row + i >= first) & (row + i < stop), jnp.int32(mask), 0)
    words &= keep
    if y is not None:
        words |= as_words(y) & ~keep
    if rows < 8 * per_word:
        return pltpu.bitcast(words, x.dtype)  # type: ignore[no-any-return]
    return pltpu.bitcast(words.reshape(-1, lanes), x.dtype).reshape(x.shape)


def halves(pairs: jax.Array, high: int, float8: Any) -> jax.Array:
    """The unsigned codes in one half of bytes [n, lanes], keys' in the low one, as `float8` in units of its smallest subnormal.

    A float8 without a sign whose upper exponent bits are 0 is linear in its lowest four bits.
    """
    words = pltpu.bitcast(pairs, jnp.int32)
    return pltpu.bitcast((words >> 4 if high else words) & 0x0F0F0F0F, float8)  # type: ignore[no-any-return]


def zero_code(float8: Any) -> float:
    """What `halves` has for 0."""
    return 8 * float(jnp.finfo(float8).smallest_subnormal)


def signed_halves(pairs: jax.Array, high: int, float8: Any) -> jax.Array:
    """The same as signed codes in float32."""
    return halves(pairs, high, float8).astype(jnp.float32) - zero_code(float8)


def own_scales(cfg: RaggedConfig, refs: PagedRefs, slot: Any, kind: int, n: Any, count: int, first: Any) -> list[jax.Array]:
    """[1, 128] each: the scales of 128 keys (kind 0) or values (1) of `count` heads, a power of two, from n * count on.

    The keys are those of a page of the block in `slot`, from row `first` on.
    """
    tile, per_page = 8 * cfg.lanes // (2 * LANES), LANES // 32  # heads of a hardware tile, and tiles of a page
    page = first // LANES if isinstance(first, int) else lax.div(first, LANES)
    scales = []
    for i in range(count):
        if i % tile == 0:
            at = lax.div(n * count + i, tile)
            rows = pl.ds(pl.multiple_of(page * LANES + lax.rem(at, per_page) * 32, 32), 32)
            floats = pltpu.bitcast(refs.kv[slot, 0, cfg.num_kv_heads + lax.div(at, per_page), rows, :], jnp.float32)
        # where a tile has heads of other numbers n, which of them is known when the kernel runs
        numbers, found = max(tile // count, 1), []
        for m in range(numbers):
            row, lane = divmod((2 * ((m * count + i) % tile) + kind) * LANES, cfg.lanes)
            found.append(floats[row : row + 1, lane : lane + LANES])
        scales.append(
            functools.reduce(lambda x, m: jnp.where(lax.rem(n, numbers) == m, found[m], x), range(1, numbers), found[0])
        )
    return scales


def rebiased(codes: jax.Array, lost: Ref) -> jax.Array:
    """float8_e4m3fn codes [n, lanes] as float8_e4m3b11fnuz of 2 ** -4 times their values.

    Chips before v7x multiply and convert that format, and decode float8_e4m3fn in 15 operations per register. In it the same
    codes represent values 16 times smaller, including subnormals, with two exceptions: -0 is a NaN, which is cleared, and there
    are no other NaNs, so `lost` [8, at least lanes or 128] int32 is set to 1 where one was.
    """
    words = pltpu.bitcast(codes, jnp.int32)
    size = words & 0x7F7F7F7F
    words &= (size + 0x7F7F7F7F) | 0x7F7F7F7F
    above = size + 0x01010101
    height = min(8, above.shape[0])
    nan_bits = functools.reduce(operator.or_, (above[i : i + height] for i in range(0, above.shape[0], height)))
    for lane in range(0, above.shape[1], LANES):
        lost[:height, :LANES] |= jnp.where((nan_bits[:, lane : lane + LANES] & -0x7F7F7F80) != 0, 1, 0)
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz)  # type: ignore[no-any-return]


def widened(cfg: RaggedConfig, rows: jax.Array, dtype: Any, lost: Ref) -> jax.Array:
    """Rows [n, lanes] of the cache as `dtype`, times 2 ** -4 if `cfg.rebiased`; lost: see `rebiased`."""
    return (rebiased(rows, lost) if cfg.rebiased else rows).astype(dtype)


def widened_exactly(cfg: Any, rows: jax.Array) -> jax.Array:
    """The same in float32, NaN included, for steps that are repeated."""
    return rows.astype(jnp.float32) * (1 / E4M3_GAIN if cfg.rebiased else 1.0)


def own_lanes(cfg: RaggedConfig, shape: tuple[int, ...], head: int) -> jax.Array:
    """Where rows of joined heads hold the keys of `head`: the other heads' numbers, times 0, may be NaN."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1) - head * cfg.lanes
    return (lane >= 0) & (lane < (cfg.lanes // 2 if cfg.planes == 1 and not cfg.packed else cfg.lanes))
