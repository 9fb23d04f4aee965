"""Launch rules of the MLA kernels: rows, keys, warps and stages from shapes and the architecture.

A row's accumulator has L float32 elements (512: two registers for each of 256 threads), so registers limit a program, not
shared memory: at most 64 rows, held by eight warps.
"""

import functools
from typing import Any, NamedTuple

from attn.kernels import hopper
from attn.kernels.launch import FUSED, MIN_SPLIT_TILES, STARTED, Launch, converts_e4m3, power_of_two
from attn.kernels.memory import SHARED_MEMORY, UNKNOWN


@functools.lru_cache(maxsize=1024)
def mla_launch(
    arch: str, rows: int, rank: int, rope: int, itemsize: int, stored: int, sparse: bool = False, packed: bool = False
) -> Launch:
    """The launch for `rows` (token, head) pairs of a request over latents of `rank` + `rope`: the first of a list that fits."""
    block_m = min(64, max(16, power_of_two(rows)))
    if arch == "interpreter":
        return Launch(block_m, 16, 4, 1)
    if itemsize == 4:
        choices = [Launch(16, 16, 4, 2), Launch(16, 16, 4, 1)]
    elif arch.startswith("gfx"):
        block_m = min(block_m, 32)
        choices = [Launch(block_m, n, 4, s) for n, s in ((32, 2), (16, 2), (16, 1))]
    elif block_m == 64 and arch.startswith("sm_9"):
        choices = [Launch(64, n, 8, s) for n, s in ((32, 4) if packed else (64, 2), (32, 2), (16, 2))]
    elif arch.startswith("sm_9"):
        # 147 KB of keys in flight keep memory busy: loading the block table uses some of the stages
        warps = 8 if sparse or stored < itemsize or block_m == 32 else 4
        choices = [Launch(block_m, n, warps, s) for n, s in ((64, 7 if sparse else 5), (32, 5), (32, 2), (16, 2))]
    else:
        # by the compiler's reports alone; not measured on a device
        block_m = min(block_m, 32)
        choices = [Launch(block_m, n, 4 if block_m == 16 else 8, s) for n, s in ((32, 4), (32, 3), (32, 2), (16, 2), (16, 1))]
    limit = SHARED_MEMORY.get(arch, UNKNOWN)
    for launch in choices:
        if _shared(launch, rank, rope, itemsize, stored) <= limit:
            return launch
    return choices[-1]


ROWS, KEYS = 64, 64  #: (token, head) pairs of a program of `hopper_mla`, and keys of its tiles
RANK, ROPE = 512, 64
#: The launch of `hopper_mla`, whose two consumers and ring are written for these tiles.
HOPPER = Launch(ROWS, KEYS, 8, 2)


def prefers_hopper(arch: str, packed: bool) -> bool:
    """Whether `hopper_mla` is the faster kernel where it applies: on Hopper, over plain latents.

    With 16 rows it computes 64 and is faster by 5 and 8 % at two shapes and equal at a third, on an H200.
    Fewer rows: not measured.
    """
    return arch == "sm_90" and not packed and hopper.is_on("hopper_mla")


def fits_hopper(
    query: tuple[int, ...], cache: tuple[int, ...], strides: tuple[int, ...], rank: int, split_size: int, sparse: bool
) -> bool:
    """Whether `hopper_mla` supports query [T, H, L + Dr] and cache [N, P, L + Dr], of one 16-bit dtype, by their extents
    without the first, and a cache's strides. split_size: keys per program, if it is fixed."""
    (heads, width), (page, stored) = query, cache
    if rank != RANK or not width == stored == RANK + ROPE or split_size % KEYS or any(stride % 16 for stride in strides):
        return False
    # A list's tile is heads of one token. Pages are copied in boxes of at least 16 rows, multiples of the 8 that swizzles
    # repeat.
    return heads % ROWS == 0 if sparse else page % 16 == 0


def _shared(launch: Launch, rank: int, rope: int, itemsize: int, stored: int) -> int:
    """Bytes of shared memory: queries once, keys per stage (and once more converted), the weights."""
    row = power_of_two(rank) + power_of_two(rope)
    # Half of the stages go to the block table's loads: 5 leave two tiles of keys in memory.
    stages = 2 if launch.num_stages > 2 else max(1, launch.num_stages)
    need = launch.block_m * row * itemsize + launch.block_n * row * stages * stored + launch.block_m * launch.block_n * itemsize
    return need + (launch.block_n * row * itemsize if stored != itemsize else 0)


def mla_split_size(units: int, keys: int, block_n: int, multiprocessors: int) -> int:
    """Keys per program, a multiple of block_n: splits that fill whole waves of one program per multiprocessor."""
    tiles = max(1, -(-keys // block_n))
    _, best = _splits(units, tiles, multiprocessors)
    return -(-tiles // best) * block_n


def _splits(units: int, tiles: int, multiprocessors: int) -> tuple[float, int]:
    """(time in tiles, splits) of the number of splits that takes least time."""

    def cost(splits: int) -> float:
        # A wave lasts as long as its tiles and STARTED more; splits are merged, which takes about as long as 4 tiles and more
        # for each.
        waves = -(-units * splits // multiprocessors)
        return waves * (-(-tiles // splits) + STARTED) + (0.0 if splits == 1 else 4 + splits / 8)

    return min((cost(splits), splits) for splits in range(1, min(tiles, 64) + 1))


class StreamK(NamedTuple):
    """The stream-K plan of a batch of decodes (`plan.stream_k`): `groups` of `span` programs, one for each row tile of a block
    of rows, and the capacity of the table of items."""

    groups: int
    span: int
    items: int


def mla_stream_k(requests: int, row_tiles: int, tiles: int, multiprocessors: int, uneven: bool = True) -> StreamK | None:
    """The stream-K plan of requests of at most `tiles` tiles of keys and `row_tiles` of rows; None: equal splits are as good.

    A group reads a tile of keys once for its row tiles, through L2: with three of 64 rows memory is faster than the products.
    More leave multiprocessors over, or rows of the last block.
    """
    if tiles <= MIN_SPLIT_TILES:
        return None

    def busy(span: int) -> float:
        # Multiprocessors in whole groups, times the fraction of the last block that has rows, times memory's speed below three
        # row tiles.
        return multiprocessors // span * span * row_tiles / -(-row_tiles // span) / span * min(1, span / 3)

    span = max(range(1, min(row_tiles, multiprocessors, 8) + 1), key=lambda span: (busy(span), span))
    groups, blocks = multiprocessors // span, requests * -(-row_tiles // span)
    # splits take whole waves; stream-K takes a group's tiles, the plan, and the merge
    time, _ = _splits(requests * row_tiles, tiles, multiprocessors)
    # Requests of equal length gain only where whole waves leave the device idle; 8 tiles stand for plan and merge.
    if not uneven and 0.95 * time <= blocks * (tiles + STARTED) / groups + 8:
        return None
    return StreamK(groups, span, groups + blocks)


@functools.lru_cache(maxsize=1024)
def mla_prefill_launch(arch: str, size: int, width: int, itemsize: int) -> Launch:
    """The launch for many query rows of expanded heads: compute-bound, so tiles as large as registers and memory allow."""
    if arch == "interpreter":
        return Launch(32, 32, 4, 1)
    if itemsize == 4:
        choices = [Launch(32, 16, 4, s) for s in (2, 1)]
    elif arch.startswith("gfx"):
        choices = [Launch(64, 32, 4, s) for s in (2, 1)]
    elif arch.startswith(("sm_9", "sm_10")):
        choices = [Launch(128, 128, 8, 2), Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 32, 4, 2)]
    else:
        choices = [Launch(64, n, 4, s) for n, s in ((64, 2), (32, 2), (32, 1))]
    key, value = _as_two_powers(size), power_of_two(width)
    limit = SHARED_MEMORY.get(arch, UNKNOWN)
    for launch in choices:
        m, n = launch.block_m, launch.block_n
        if arch.startswith(("sm_9", "sm_10")):  # products read shared memory while they run: every stage, and no weights
            held = n * (key + value) * launch.num_stages
        else:
            stages = launch.num_stages if itemsize == 4 else max(1, launch.num_stages - 1)
            held = n * (key + value) * stages + m * n * itemsize // 2
        if (m * key + held) * itemsize <= limit:
            return launch
    return choices[-1]


def _as_two_powers(size: int) -> int:
    """The width of a row of `size` as the sum of two powers of two, the larger first (`mla_prefill`)."""
    first = power_of_two(size) // 2
    return first + max(16, power_of_two(size - first))


class RopeFrom(NamedTuple):
    """The layout of a separate array of queries' rotary parts: the element of token t and head h is first + t token + h
    head. All 0 if the queries have it beside their latents."""

    token: int = 0
    head: int = 0
    first: int = 0

    def constants(self) -> dict[str, int]:
        return {"ROPE_T": self.token, "ROPE_H": self.head, "ROPE_AT": self.first}


BESIDE = RopeFrom()


class Decode(NamedTuple):
    """The key of calls of `mla_decode` that have the same launches.

    arch, processors, pdl: as in `paged_launch.Kinds`. on_hopper: whether `hopper_mla` runs the first stage. requests,
    max_query_len: of the batch; keys: the most keys of a row, or the length of a list of them. page: tokens of one. itemsize,
    stored: bytes of an element of queries and of the cache. fixed_split: keys per program, 0 for the rule's choice. sparse:
    whether rows have lists of keys. packed: whether rows of the cache are fp8_ds_mla's. uneven: split keys by all lengths.
    rope_from: as in `RopeFrom`.
    """

    arch: str
    processors: int
    pdl: bool
    on_hopper: bool
    requests: int
    heads: int
    rank: int
    rope: int
    max_query_len: int
    keys: int
    page: int
    itemsize: int
    stored: int
    fixed_split: int
    sparse: bool
    packed: bool
    uneven: bool
    rope_from: RopeFrom = BESIDE


class MLALaunches(NamedTuple):
    """The launch of a batch, by its extents alone.

    tiles: of rows, per request, or per group of a plan. max_splits: of a request, each of `split_size` keys. stream_k: how a
    batch of uneven lengths is split instead, or None. block_m, block_n: rows and keys per tile. attend, merge: the constants
    and options of the two stages (of the first on Hopper, `hopper_mla` has its own).
    """

    tiles: int
    max_splits: int
    split_size: int
    stream_k: StreamK | None
    block_m: int
    block_n: int
    attend: dict[str, Any]
    merge: dict[str, Any]

    def programs(self, requests: int) -> int:
        """Programs of the first stage, in each of `max_splits` columns of the grid."""
        return self.tiles * (requests if self.stream_k is None else self.stream_k.groups)

    def merge_grid(self, requests: int, heads: int, max_query_len: int) -> tuple[int, int]:
        """The grid of the second stage."""
        if self.stream_k is None:
            return requests * max_query_len, heads
        return self.stream_k.groups, min(self.tiles * self.block_m, heads * max_query_len)

    def states(self, rows: int) -> int:
        """The number of split states of a batch of `rows` (token, head) pairs."""
        if self.stream_k is not None:
            return 2 * self.stream_k.groups * self.tiles * self.block_m
        return rows * self.max_splits if self.max_splits > 1 else 0


def launches_of(of: Decode) -> MLALaunches:
    """The launches of a batch."""
    # selected keys belong to one token, whose heads are all that may share a tile
    rows = of.heads if of.sparse else of.heads * of.max_query_len
    rule = HOPPER
    if not of.on_hopper:
        rule = mla_launch(of.arch, rows, of.rank, of.rope, of.itemsize, of.stored, of.sparse, of.packed)
    tiles = -(-of.heads // rule.block_m) * of.max_query_len if of.sparse else -(-rows // rule.block_m)
    split_size = of.fixed_split or mla_split_size(of.requests * tiles, of.keys, rule.block_n, of.processors)
    # the grid's bound for the longest request; programs beyond a request's own splits end at once
    max_splits = max(1, -(-of.keys // split_size))
    stream_k = None
    if not (of.sparse or of.fixed_split):
        stream_k = mla_stream_k(of.requests, tiles, -(-of.keys // rule.block_n), of.processors, of.uneven)
    if stream_k is not None:
        # a plan's grid is one-dimensional: a program takes its items in turn
        tiles, max_splits = stream_k.span, 1
    # without splits there is no merge whose launch could overlap
    pdl = of.pdl and (max_splits > 1 or stream_k is not None)
    common = {"H": of.heads, "L": of.rank, "BLOCK_M": rule.block_m, "BLOCK_L": power_of_two(of.rank), "PDL": pdl, **FUSED}
    common["PLANNED"] = stream_k is not None
    sizes = {"DR": of.rope, "P": of.page, "BLOCK_N": rule.block_n, "BLOCK_R": max(16, power_of_two(of.rope)), "TILES": tiles}
    attend: dict[str, Any] = {**common, **sizes, "SEVERAL": of.max_query_len > 1, "PACKED": of.packed}
    attend["HAS_SPLITS"] = max_splits > 1
    attend["PRECISION"] = "tf32x3" if of.itemsize == 4 and of.arch.startswith("sm") else "ieee"
    attend |= {"BYTES": not converts_e4m3(of.arch), **of.rope_from.constants()}
    attend |= {"num_warps": rule.num_warps, "num_stages": rule.num_stages}
    merge = {**common, "SPARSE": of.sparse, "ROWS": tiles * rule.block_m, "BLOCK_S": 8, "num_warps": 4}
    if pdl:
        merge["launch_pdl"] = True
    return MLALaunches(tiles, max_splits, split_size, stream_k, rule.block_m, rule.block_n, attend, merge)
