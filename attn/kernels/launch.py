"""Launch rules: tile sizes, warps and stages from shapes and the architecture, not from a table of measured shapes.

A rule lists launches in order of preference and takes the first that fits the architecture's shared memory. The splits of
decodes depend on the batch; `split_kv_for` fixes them if a sequence's bits must not depend on the rest of it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn.kernels.memory import SHARED_MEMORY, UNKNOWN

LOG2E = 1.4426950408889634
#: The fewest keys of a stretch of a decode of a layer that requests `batch_invariant` (`plan.stretch_of`).
STRETCH = 256
#: Formats by the dtype of a cache; "uint8" is that of e4m3 codes for kernels that do not convert these.
_FORMATS = {"int8": "int8", "float8_e4m3fn": "e4m3", "uint8": "e4m3", "float8_e5m2": "e5m2", "bfloat16": "bf16"}
UNBOUNDED = 1 << 30  #: a window side without a bound: larger than any sequence length


#: Multiprocessors of a GPU that is compiled for and not present: those of the largest part that is sold.
PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 160, "sm_120": 188, "gfx942": 304}


@dataclass(frozen=True)
class Launch:
    """Launch options of one kernel: rows and keys per tile, warps per program, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **FUSED}


#: For every launch: fuse a product and a sum into one instruction. Triton 3.9 warns if this is unset, 3.10 disables it.
FUSED = {"enable_fp_fusion": True}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def format_of(dtype: str, stored: str) -> str:
    """The format of the codes of elements of `dtype` in a cache of dtype `stored`, which is then passed as unsigned integers of
    its size; "" if they are stored as they are."""
    return "" if stored == dtype else _FORMATS.get(stored, "")


def converts_e4m3(arch: str) -> bool:
    """Whether the hardware converts e4m3 codes to numbers.

    Elsewhere kernels read codes as bytes (`number_in`): Triton would reject them (NVIDIA before Ada) or emulate the
    conversion in so much code that LLVM does not finish (RDNA3).
    """
    if arch.startswith("sm_"):
        return int(arch[3:]) >= 89
    return arch.startswith(("gfx95", "gfx12", "interpreter"))


def can_use_pdl(arch: str) -> bool:
    """Whether a kernel's launch may overlap the end of the previous one (programmatic dependent launch, from Hopper on)."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def _fitting(choices: list[Launch], arch: str, block_d: int, itemsize: int, stored: int) -> Launch:
    """The first of `choices` whose tiles fit: queries once, keys and values per stage, one stage of them converted."""
    # Elements of queries and weights have the product's size, those of keys and values the cache's: a cache of bytes holds
    # twice the stages in the same memory.
    limit = SHARED_MEMORY.get(arch, UNKNOWN)
    for launch in choices:
        stages = max(1, launch.num_stages - 1)  # the last stage computes from what the others hold
        tile = 2 * launch.block_n * block_d
        need = launch.block_m * block_d * itemsize + tile * stages * stored + launch.block_m * launch.block_n * itemsize
        if stored != itemsize:
            need += tile * itemsize
        if need <= limit:
            return launch
    # Smaller tiles do not exist. Layers whose rows fit in none are refused before a launch (`memory.group_reason`).
    return choices[-1]


#: Measured launches, by ("decode" or "prefill", *the rule's arguments). These take precedence over the rules.
TUNED: dict[tuple[str | int, ...], Launch] = {}


@functools.lru_cache(maxsize=1024)
def decode_launch(
    arch: str, group: int, head_size: int, itemsize: int, stored: int, split_kv: bool = False, beside: bool = False
) -> Launch:
    """The launch for few query rows against many keys: memory-bound, so many small programs with loads in flight.

    split_kv: whether requests are split (`SplitKV`). beside: whether a prefill runs at the same time.
    """
    # Products have at least 16 rows (`tl.dot`), and vectors of Triton a power of two of elements.
    block_m, block_d = max(16, power_of_two(group)), power_of_two(head_size)
    if arch == "interpreter":
        return Launch(block_m, 32, 4, 1)
    if arch.startswith("gfx1"):
        # Waves of 32, whose matrix instructions need operands in both halves: by the compiler's reports (gfx1100) tiles of
        # 64 keys spill hundreds of registers, these none up to 128 columns.
        choices = [Launch(block_m, 16, 4 if block_d <= 128 else 8, 2)]
    elif arch.startswith("gfx"):
        choices = [Launch(block_m, n, 4, 2) for n in (64, 32, 16)]
    else:
        # About 8 KiB of keys per stage (in the dtype of the product: one-byte codes are converted in registers), and enough
        # stages that four programs fill shared memory: more of them share a multiprocessor unevenly, and the last one
        # delays the end. Loading the block table uses some of the stages.
        n = min(64, max(16, power_of_two(8192 // (block_d * itemsize))))
        warps, stages = (2, 8 if block_d > 64 else 6) if block_d <= 128 else (4, 6)
        if stored == 1 and itemsize == 2 and block_d == 128 and block_m == 16:
            warps = 1  # caches of bytes are bound by instructions, and one warp needs the fewest
        choices = [Launch(block_m, k, warps, s) for k, s in ((n, stages), (32, 3), (16, 3), (16, 1))]
        if arch == "sm_90" and not beside and (block_d, stored) in ((128, 2), (256, 2), (128, 1)):
            # Measured (H200). Parts of equal size, two to a multiprocessor, end together: deep pipelines and few warps;
            # requests of any length: one program more on each, and warps that hold 64 rows or wide heads in registers.
            # Beside a prefill the launch that was measured there stays (1q512s8k_63q1s4k 0.321 ms).
            few = (split_kv or block_m == 32 or stored == 1) and block_d == 128 and block_m <= 32
            options = (64, 2, 5) if few else (64, 4, 4)
            if (block_d, stored) == (128, 2):
                # 64 rows: 0.89 to 0.99 of the time with 64 keys on six batches (H100). 32 rows of whole requests: five programs
                # on a multiprocessor instead of two, 0.83 to 0.98 of the time on four batches (H200).
                options = (32, 4, 6) if block_m == 64 else (32, 2, 6) if block_m == 32 and not split_kv else options
            choices.insert(0, Launch(block_m, *options))
    if itemsize == 4:
        # Registers hold no larger tile of float32 (`packs_rows`), on any architecture.
        choices = [Launch(block_m, 16, 4, s) for s in (3, 1)]
    return _fitting(choices, arch, block_d, itemsize, stored)


def crowded_launch(arch: str, rows: int, head_size: int, itemsize: int, stored: int) -> Launch | None:
    """The launch for tiles of `rows` rows of split requests where items do not fit on the device at once
    (`SplitKV.crowded`); None: that of other splits.

    Measured (H200) on seven batches of 23 to 238 requests: 32 rows by tensor instructions of 64 took 0.71, 0.77, 0.86, 1.00 and
    1.05 of the time, 64 rows 0.94 to 1.00 (one of them 1.07 in a second run). On seven batches whose items fit at once they
    took up to 1.2 of it.
    """
    return Launch(64, 64, 4, 5) if 16 < rows <= 64 and times_are_known(arch, head_size, itemsize, stored) else None


def rows_of_speculation(arch: str, group: int, max_query_len: int, itemsize: int) -> int:
    """Rows of a decode's tile that holds up to 16 tokens of a request, or 0 if tiles of one token's rows are better.

    A few tokens read as many bytes as one, so their keys are split as a decode's are.
    """
    # Where all rows fit in the tile of one token's heads, which has 16 at least, the rule for one token already holds them.
    rows = group * max_query_len
    few = 1 < max_query_len <= 16 and max(16, group) < rows <= 64
    return rows if few and packs_rows(arch, itemsize) else 0


def packs_rows(arch: str, itemsize: int) -> bool:
    """Whether a decode's tile may hold more rows than one token's.

    Not for float32, whose registers hold no larger tile, and on NVIDIA only: it was measured on Hopper.
    """
    return itemsize == 2 and arch.startswith(("sm_", "interpreter"))


TOGETHER = 64  #: rows of a tile of a batch that is one launch


def writes_rows(arch: str, group: int, max_query_len: int, itemsize: int, together: bool) -> bool:
    """Whether the launch of decodes may write a batch's new tokens: it has all requests, and each program at most 16 of them
    among its keys, or `TOGETHER` if prompts are in it."""
    # on NVIDIA a barrier orders what threads of a program store and read; what AMD's orders was not examined
    if not arch.startswith(("sm_", "interpreter")):
        return False
    if together:
        return max_query_len <= TOGETHER and packs_rows(arch, itemsize)
    return group * max_query_len <= max(16, group) or rows_of_speculation(arch, group, max_query_len, itemsize) > 0


def run_together(q_lens: Any, keys: Any, group: int, kv_heads: int, multiprocessors: int) -> bool:
    """Whether a batch with prompts is better one launch, which splits the keys of all requests.

    q_lens, keys: the tokens and visible keys of each request (NumPy, [R]). group: query heads of a kv head.

    The work of one launch is counted in tiles of 64 rows and 64 keys: those of all requests, and 1/4 of a tile for each row
    that has to be merged, because the keys of its request are split. The multiprocessors share it. Otherwise prompts have a
    launch of their own, which splits no keys: its longest program takes 3/2 of such a tile for 128 keys. For its beginning and
    end, one launch takes 6 tiles more than that launch if it has a merge, and 2 less if it has none; a second launch, of
    decodes, takes 8. Prompts that fill the device have more work than that: their own launch computes it faster.

    Measured (H200): the numbers were set by 138 batches, most of them drawn at random, 90 of prompts of up to 64 tokens and 48
    of up to 640; the choice takes 1.008 of the faster form's time (geometric mean; at most 1.29). On 30 batches of up to 640
    tokens drawn afterwards it takes 1.003 (1.12). Other GPUs, which have the rule too, were not measured.
    """
    # `x[x.argmax()]` and `count_nonzero` take a fraction of the time of `max` and `any`
    of_prompts = keys[q_lens > 1]
    if not len(of_prompts):
        return False
    tiles = -(-keys // 64)
    split = tiles > MIN_SPLIT_TILES
    work = int(tiles.dot(blocks_of(q_lens, group))) + group * int(q_lens[split].sum()) // 4
    longest = -(-int(of_prompts[of_prompts.argmax()]) // 128)
    spare = 1.5 * longest + (-6 if np.count_nonzero(split) else 2) + (8 if np.count_nonzero(q_lens == 1) else 0)
    return work * kv_heads <= spare * multiprocessors


def blocks_of(q_lens: Any, group: int) -> Any:
    """Tiles of rows of requests in one launch (NumPy, [R])."""
    return -(-q_lens * group // TOGETHER)


@functools.lru_cache(maxsize=1024)
def prefill_launch(arch: str, group: int, head_size: int, itemsize: int, stored: int) -> Launch:
    """The launch for many query rows: compute-bound, so tiles as large as registers and shared memory allow."""
    # A tile holds whole tokens, so it has at least the rows of one: the query heads of a kv head.
    least, block_d = power_of_two(group), power_of_two(head_size)
    if arch == "interpreter":
        return Launch(max(32, least), 32, 4, 1)
    if itemsize == 4:
        # Small tiles. On NVIDIA three tf32 products replace one of float32 and need the queries' shared memory three times
        # (by the compiler's reports): 16 rows where 32 rows and the tiles would not fit.
        room = SHARED_MEMORY.get(arch, UNKNOWN) if arch.startswith("sm") else 1 << 30
        rows, warps = (32, 8 if block_d > 128 else 4) if 4 * 32 * block_d * itemsize <= room else (16, 4)
        choices = [Launch(max(rows, least), 16, warps, s) for s in (2, 1)]
    elif arch.startswith("gfx1"):
        # as in `decode_launch`: 64 rows and 32 keys on four waves spilled a thousand registers
        choices = [Launch(max(64 if block_d <= 128 else 32, least), 16, 8, s) for s in (2, 1)]
    elif arch.startswith("gfx"):
        # by the compiler's reports alone: larger tiles spill although LDS would hold them (gfx950), and 32 keys of wide
        # heads in two stages do not compile with a tree's mask on gfx950
        rows, keys = (64, 32) if block_d <= 128 else (32, 16)
        choices = [Launch(max(rows, least), n, 4, s) for n, s in ((keys, 2), (16, 1))]
    elif arch.startswith("sm_9"):
        wide = [Launch(max(128, least), 128, 8, 3), Launch(max(128, least), 64, 8, 3)] if block_d <= 128 else []
        choices = [*wide, Launch(max(128, least), 64, 8, 2), Launch(max(64, least), 32, 8, 2)]
    elif arch.startswith("sm_10"):
        # Accumulators are in tensor memory, which has 512 columns: several of block_d and one of block_n. Below 64 rows
        # they are in registers.
        choices = [Launch(max(128, least), 64, 8, 3) if block_d <= 128 else Launch(max(32, least), 32, 4, 2)]
    else:
        # by the compiler's reports alone (spills); not measured on a device
        choices = [Launch(max(64, least), n, 4, s) for n, s in ((32, 2), (16, 2), (16, 1))]
    return _fitting(choices, arch, block_d, itemsize, stored)


@functools.lru_cache(maxsize=64)
def int8_launch(arch: str, head_size: int) -> Launch:
    """The launch for dense attention with 8-bit scores: query and key tiles are half as large, value tiles are not."""
    block_d = power_of_two(head_size)
    if arch == "interpreter":
        return Launch(32, 32, 4, 1)
    warps = 8 if block_d > 64 else 4
    if arch.startswith("gfx1"):  # waves of 32
        choices = [Launch(64, 32, 8 if block_d > 64 else 4, s) for s in (2, 1)]
    elif arch.startswith("gfx"):
        choices = [Launch(128 if block_d <= 128 else 64, 64 if block_d <= 128 else 32, 4, s) for s in (2, 1)]
    elif arch.startswith("sm_9"):
        choices = [Launch(128, 128, 8, 3), Launch(128, 64, 8, 3)] if block_d <= 128 else [Launch(128, 64, 8, 2)]
    elif arch.startswith("sm_10"):
        choices = [Launch(128, 64, warps, 3), Launch(128, 64, warps, 2)]
    else:
        choices = [Launch(128 if block_d <= 128 else 64, n, warps, s) for n, s in ((64, 3), (64, 2), (32, 2))]
    return _fitting(choices, arch, block_d, 2, 2)


@dataclass(frozen=True)
class SplitKV:
    """The split-KV plan of decodes; each program derives the items from the lengths on the device.

    split_tiles: tiles of keys in every split, or, if max_splits > 0, the least number of tiles of a split; the device then
    chooses the smallest number that makes at most `max_splits` items more than there are requests. whole_from: the number of
    requests from which those of about equal length stay whole. items: the bound of work items per kv head. block_r: requests
    per vector in the device's search. crowded: whether requests take at least half of the items that fit on the device at once,
    so that there are more. merged: splits that a program of `paged_attention.merge` reads at once. stored: the bound of partial
    results per kv head and row, of which a split has one, or each of its stretches.
    """

    split_tiles: int
    max_splits: int
    whole_from: int
    items: int
    block_r: int
    crowded: bool = False
    merged: int = 64
    stored: int = 0


def block_of(num_reqs: int) -> int:
    """Requests per vector in a plan: few sizes, so that another number of requests seldom compiles a kernel again."""
    return next((size for size in (32, 256, 2048) if num_reqs <= size), power_of_two(num_reqs))


MIN_SPLIT_TILES = 2  #: tiles of keys below which a split costs more than it saves
MOST_ROW_SPLITS = 64  #: of one row over keys in no cache (`row_splits`), which one program merges
#: Keys, of more than `MIN_SPLIT_TILES` tiles in any launch: without a fixed split, longer requests are launched alike.
MIN_KEYS_TO_SPLIT = MIN_SPLIT_TILES * 256 + 1
#: Tiles of keys that beginning and ending a block of rows takes as long as, in stream-K: on an H200, 1.8 us a tile and
#: 11.5 us an item of the program with most of both are within 10 % of what seven of nine batches took.
STARTED = 6
FIELDS = 8  #: of an item of the table of stream-K (`plan`)


@functools.lru_cache(maxsize=4096)
def split_kv_for(
    num_reqs: int, kv_heads: int, tiles: int, stretch: int, multiprocessors: int, rows: int = 16
) -> SplitKV | None:
    """The split-KV plan of `num_reqs` decodes of at most `tiles` tiles of keys; None: one program per request and kv head.

    stretch: tiles of the shortest stretch if a request's bits must not depend on the rest of the batch, else 0. Items fill one
    wave, two per multiprocessor. If that is less than two per request and kv head, a wave is added to one item per request
    and kv head: with fewer items the last ones to end leave the device idle, with more their starts (of about two tiles each)
    and the merge cost more than they save. The rule comes from a model of programs that share the memory's bandwidth, fitted to
    16 batches in five launches on an H200. rows: of a tile; with 64, items wait for each other's products too, and half as
    many more were 8 and 18 % faster on an H200 (33 x 7 rows with 4 kv heads, 26 x 7 with 8; fewer and more were slower).
    """
    if tiles <= MIN_SPLIT_TILES:
        return None
    wave = _wave(kv_heads, multiprocessors)
    crowded = is_crowded(num_reqs, kv_heads, multiprocessors, rows)
    max_splits = (3 * wave // 2 if rows >= 64 else wave) if crowded else wave - num_reqs
    # From four fifths of a wave on, requests of equal length keep the device busy without being split (`plan.item_of`).
    items = max_splits + num_reqs
    merged, stored = splits_merged_at_once(items // num_reqs), items
    if stretch:
        # added one after the other: what is read in place of none costs as many instructions
        merged = 32 if items >= 8 * num_reqs else 8
        # each request that is split has an item more than one
        stored = min(num_reqs, max_splits) * most_stretches(kv_heads, multiprocessors)
    return SplitKV(MIN_SPLIT_TILES, max_splits, -(-4 * wave // 5), items, block_of(num_reqs), crowded, merged, stored)


def most_stretches(kv_heads: int, multiprocessors: int) -> int:
    """Stretches of a request in a layer that requests `batch_invariant`: as many as fill the device if it is alone."""
    return _wave(kv_heads, multiprocessors)


def splits_merged_at_once(splits: int) -> int:
    """`SplitKV.merged` for requests of `splits` splits on average.

    A program of the merge is one warp with 64 elements a lane, of as many columns as that leaves for each split. Measured
    (H200, heads of 128) on 23 batches, 17 sizes: 16 x 128 elements are the fastest, or nearly, where requests have up to 4
    splits, 64 x 32 at 22 to 44, and 128 x 16 beyond. The limits were set by these batches and not compared on others.
    """
    return 16 if splits < 8 else 64 if splits < 64 else 128


def is_crowded(num_reqs: int, kv_heads: int, multiprocessors: int, rows: int) -> bool:
    """`SplitKV.crowded` of `num_reqs` decodes. rows: of a tile."""
    return 2 * num_reqs > _wave(kv_heads, multiprocessors) - (rows >= 64)


def _wave(kv_heads: int, multiprocessors: int) -> int:
    """Items that fit on the device at once."""
    # An item is one program for each kv head, so this many fill the device with two programs on each multiprocessor.
    return max(1, 2 * multiprocessors // kv_heads)


def _split_tiles_range(requests: int, total: int, longest: int, split_kv: SplitKV) -> tuple[int, int]:
    """Return the fewest and the most tiles per split that the device may choose. total: of all requests; longest: of one."""
    # Splits of `high` tiles always fit: each request has at most one split that is not full. Splits smaller than `low` would be
    # too many.
    low = max(split_kv.split_tiles, -(-total // (split_kv.max_splits + requests)))
    high = max(low, -(-total // split_kv.max_splits))
    if requests >= split_kv.whole_from and 4 * longest * requests <= 5 * total:
        low = high = max(high, longest)
    return low, high


def split_tiles_of(tiles: Any, split_kv: SplitKV) -> int:
    """The tiles per split that the device chooses for requests of `tiles` tiles (NumPy, [R]): `plan.item_of`."""
    return _split_tiles_between(*_split_tiles_range(len(tiles), int(tiles.sum()), int(tiles.max()), split_kv), tiles, split_kv)


def _split_tiles_between(low: int, high: int, tiles: Any, split_kv: SplitKV, least: int = 0) -> int:
    """`split_tiles_of`, which is between `low` and `high`. least: any number below it may be returned for a smaller one."""
    room = split_kv.max_splits + int(np.count_nonzero(tiles))  # a request without keys has one item
    # As many halvings as on the device, which may leave several candidates: the host's answer must be the device's.
    for _ in range(4):
        if high < least:
            break
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= room:
            high = middle
        else:
            low = min(middle + 1, high)
    return high


def are_whole(keys: Any, kv_heads: int, multiprocessors: int, rows: int = 0) -> bool:
    """Whether decodes of `keys` visible keys (NumPy, [R]) are better left whole: no split would be shorter than the longest, or
    splits cost more than the idle end of whole requests.

    The search and the merge cost about 6 us (H200), 2 % of 64 decodes of 4,096 keys, which fill the device without them.
    rows: of a tile, where the times of both were measured (`times_are_known`), else 0.
    """
    tiles = -(-keys // 64)
    longest = int(tiles[tiles.argmax()]) if len(tiles) else 0
    split_kv = split_kv_for(len(keys), kv_heads, longest, 0, multiprocessors)
    if split_kv is None:
        return True
    low, high = _split_tiles_range(len(tiles), int(tiles.sum()), longest, split_kv)
    # most batches are decided without the search
    if low >= longest or (high >= longest and _split_tiles_between(low, high, tiles, split_kv, longest) >= longest):
        return True
    return 0 < rows <= 64 and _end_soon(len(tiles), int(tiles.sum()), longest, kv_heads, multiprocessors, rows)


def times_are_known(arch: str, head_size: int, itemsize: int, stored: int) -> bool:
    """Whether whole and split requests were timed, by `_end_soon` and `crowded_launch`: Hopper, heads of 65 to 128, 16 bits."""
    return arch == "sm_90" and power_of_two(head_size) == 128 and itemsize == stored == 2


def _end_soon(requests: int, total: int, longest: int, kv_heads: int, multiprocessors: int, rows: int) -> bool:
    """Whether whole requests of up to 64 rows, `total` tiles of keys in all, end before split ones would.

    Up to 16 rows: whole requests take 9 us and 1.7 us for each tile of the longest (H200), or the time of their bytes if that
    is longer; split ones take the time of their bytes, and more for each request. The line was set by 90 batches of 6 to 150
    requests on an H100 and an H200: it leaves 37 whole, which take 0.75 to 1.03 of the time; the others would take 0.93 to 6.3
    of it.

    More rows, measured (H100): whole ones take about 12 us and 2.25 us for each tile until the last of them ends, split ones
    48 us and 3 us for each tile of a program's share, on the 28 batches that set the rule. Of 13 such batches drawn
    afterwards it leaves eight whole, which take 0.69 to 0.95 of the time; the other five would take 0.96 to 1.49 of it.
    """
    wave = _wave(kv_heads, multiprocessors)
    share = total / wave
    if rows <= 16:
        return longest < 0.4 * share + 10 * requests / wave + 1
    if not is_crowded(requests, kv_heads, multiprocessors, 64):
        return False
    # Programs take two tiles' time each to start; if some run after others, the last one begins before the first of them ends.
    end = longest + 2 if requests <= wave else share + 2 * requests / wave + 0.6 * longest
    return end < 16 + 4 / 3 * share


@functools.lru_cache(maxsize=256)
def row_launch(arch: str, group: int, size: int, itemsize: int, processors: int) -> tuple[Launch, int]:
    """Return the launch of single rows over keys in no cache, and how many programs run at once."""
    rule = decode_launch(arch, group, size, itemsize, itemsize)
    # Other devices and larger tiles have not been measured: they keep a decode's launch, one program per multiprocessor.
    if arch != "sm_90" or itemsize != 2 or rule.block_m > 32:
        return rule, processors
    # Measured (H200, 48 batches each of 64-, 128- and 256-wide heads): 32 KB of keys and values on their way in each of four
    # programs per multiprocessor.
    return Launch(rule.block_m, max(16, 8192 // power_of_two(size)), 4, 2), 4 * processors


@functools.lru_cache(maxsize=4096)
def row_splits(programs: int, tiles: int, slots: int, width: int) -> int:
    """Return the splits of each request's keys that take least time, in tiles; `slots` programs run at once.

    width: elements of the state that a split leaves, which one program merges. Fitted to the measurements of `row_launch`: on
    average 5 % above the fastest tiles and splits of each batch.
    """

    def time(splits: int) -> float:
        merge = 1.5 * max(1, width / 512) + splits * width / 5120 if splits > 1 else 0
        # Waves of programs times the tiles of each, then the merge, all in units of the time of a tile.
        return -(-programs * splits // slots) * -(-tiles // splits) + merge

    splits = min(range(1, max(1, min(tiles, MOST_ROW_SPLITS)) + 1), key=time)
    return -(-tiles // -(-tiles // splits)) if tiles else 1  # none is empty


@functools.lru_cache(maxsize=4096)
def are_all_whole(num_reqs: int, keys: int, kv_heads: int, multiprocessors: int) -> bool:
    """`are_whole` of decodes that all see `keys` keys."""
    return are_whole(np.full(num_reqs, keys), kv_heads, multiprocessors)


def prefill_programs(flops: float, nbytes: float, multiprocessors: int) -> int:
    """Multiprocessors for the prefill of a mixed batch while its decode runs on the others; all, if run in sequence.

    `flops` of the prefill against `nbytes` of the decode's keys and values, at Hopper's rates. A decode saturates memory
    with three sevenths of the multiprocessors and slows down in proportion with fewer. The two share the device if that is
    predicted to take a tenth less time than running in sequence, where the decode begins as the prefill's last programs
    end.
    """
    # Seconds of either alone. 4 prompts of 4,096 ran at 479 to 509 TFLOP/s on four H200s, which copy 4.3 TB/s.
    whole, decode = flops / 480e12, nbytes / 4e12
    if decode == 0:
        return multiprocessors

    def time(programs: int) -> float:
        prefill = whole * multiprocessors / programs
        # in the time of the decode alone: what of it the other multiprocessors do meanwhile
        done = prefill * min(1.0, (multiprocessors - programs) / (3 / 7 * multiprocessors))
        return prefill + max(0.0, decode - done)

    # More programs shorten the prefill until the decode ends with it, after which they delay the decode. It ends with the
    # prefill where it takes what was left to it, at its full rate (`programs` <= 4/7 of all) or below it.
    even = whole / decode if 4 * decode > 7 * whole else 1 / (1 + 3 / 7 * decode / whole)
    near = int(even * multiprocessors)
    # Both neighbours of the solution are tried, because multiprocessors are whole numbers; the decode keeps at least one.
    best = min((min(max(n, multiprocessors // 8, 1), multiprocessors - 1) for n in (near, near + 1)), key=time)
    # In sequence, about 0.3 of the decode runs while the prefill's last programs end.
    return best if time(best) < 0.9 * (whole + 0.7 * decode) else multiprocessors
