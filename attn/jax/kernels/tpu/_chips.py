"""The properties of each TPU generation, and the block sizes that follow from them.

The rule: as many keys per block as make a DMA efficient despite its latency and still leave memory for two blocks; as many
query rows per item as keep the matrix unit busy with one load of the keys. `OVERRIDES` is for the few cases where
measurement beats the rule.
"""

import dataclasses
import math
from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu._refs import LANES, PagedShape, sublanes

MIB = 1 << 20
#: Rows of a kv head in items of long requests on any chip, and their scores for eight heads with 1,024 keys.
ROWS = 512
STRETCH = 8 * 1024 * ROWS
#: The longest request, and the keys of the table, that `fixed_blocks` chooses for.
FIXED_ROWS, FIXED_KEYS = 512, 1 << 20
#: Segments of the line of singles in a block, and the least keys of one: fewer leave the matrix unit's columns empty.
SEGMENTS, SEGMENT = 8, 128
#: The least keys of a block over all kv heads: one head's 1,024 take as long as four heads', whose products run beside others'
#: exponentials.
KEYS_OF_HEADS = 4096

#: Bytes of an item's queries that a launch waits for where its items are few.
QUERIES = 4 * MIB

#: Lanes of heads up to which these sizes hold. Blocks and stretches of wider ones have fewer keys and scores in proportion, so
#: that blocks have the same bytes and programs the same length.
WIDE = 256


class Chip(NamedTuple):
    """One TensorCore.

    Memories in bytes; the rows of a kv head in items of the longest requests; the keys of a block where every request has
    one row.
    """

    vmem: int
    smem: int
    rows: int = ROWS
    keys: int = 1024


CHIPS = {
    "v4": Chip(16 * MIB, MIB),
    "v5e": Chip(128 * MIB, MIB),
    "v5p": Chip(96 * MIB, MIB),
    # their matrix units process 512 rows so fast that the overhead between two steps costs a twentieth
    "v6e": Chip(128 * MIB, MIB, 1024),
    # and with blocks of 1,024 keys the overhead between blocks costs a tenth of a decode
    "v7x": Chip(64 * MIB, MIB, 1024, 2048),
}

#: Chips with float8_e4m3b11fnuz instead of float8_e4m3fn, whose codes are read as that format.
REBIASES_E4M3 = ("v5e", "v5p", "v6e")
#: Chips whose matrix unit multiplies bfloat16 by one-byte floats: that format or float8_e4m3fn, and float8_e5m2.
MULTIPLIES_FP8 = (*REBIASES_E4M3, "v7x")


class RaggedBlocks(NamedTuple):
    """Sizes of a launch.

    Keys per DMA block; query tokens per large item; keys per step of such an item, and keys and rows of its score matrices;
    keys per segment of the line of singles; blocks in memory at a time.
    """

    kv_block: int
    large: int
    chunk: int
    key_tile: int
    row_tile: int
    segment: int
    slots: int = 3
    #: Scores per unrolled block of code: the matrix unit idles at its ends, and compile time grows with its length.
    stretch: int = STRETCH
    #: Keys of the last step of a large item that sees no more of its `key_tile`; 0: all steps have as many.
    last: int = 0
    #: The most such steps that are one where only the last of them has masks.
    fused: int = 1


#: (chip, head lanes, bytes of a cache element) -> RaggedBlocks, measured better than the rule.
OVERRIDES: dict[tuple[str, int, int], RaggedBlocks] = {}


def target() -> str | None:
    """The chip that is compiled for: the present TPU, or that of the abstract mesh in use; None if that is not a TPU."""
    if not pltpu.is_tpu_device():
        return None
    name = str(pltpu.get_tpu_info().chip_version)
    return name if name in CHIPS else f"v{name}"


def chip_of(name: str) -> Chip:
    """The chip of that name. Raises ValueError for an unknown one."""
    if name not in CHIPS:
        raise ValueError(f"chip={name!r} is unknown; known: {', '.join(CHIPS)}")
    return CHIPS[name]


def blocks_for(name: str, shape: PagedShape) -> RaggedBlocks:
    """Block sizes for a launch on a chip; `large` 0 if every request has one row. Raises ValueError for an unknown chip."""
    chip, page, lanes, group, heads = chip_of(name), shape.page, shape.lanes, shape.group, shape.num_kv_heads
    itemsize, cache_itemsize, max_query_len = shape.itemsize, shape.cache_itemsize, shape.max_query_len
    known = OVERRIDES.get((name, lanes, cache_itemsize))
    if known is not None:
        return known
    wide = max(lanes // WIDE, 1)
    # the rest is for spilled registers: 20 MiB of them in float32 at 256 lanes
    room = chip.vmem * 3 // 4 if itemsize == 2 else chip.vmem // 2
    # rows of an item are lanes of its scores, so they fill whole registers
    smallest = shape.align * 128 // math.gcd(shape.align * group, 128)
    large = smallest if max_query_len > 1 else 0
    # a product of float32 is six of bfloat16: 512 rows keep the matrix unit busy, and twice as many take long to compile
    long = chip.rows if itemsize == 2 else ROWS
    if long > ROWS and heads == 1:  # no other head's products hide what a step costs
        long *= 2
    # rows of an item beyond its request's are computed for nothing: the most rows pay only for long requests, and for half as
    # long ones of wide heads, whose items cost more beside those rows, unless their first queries would arrive late
    half = max(ROWS, min(long, QUERIES // (heads * lanes * itemsize))) if wide > 1 else ROWS

    def most_rows(large: int) -> int:
        number = -(-max_query_len // large)
        return long if number >= 16 else half if number >= 8 else ROWS

    while large and large < max_query_len and 2 * large * group <= most_rows(large):
        large *= 2
    keys = max(chip.keys if max_query_len == 1 else 1024, KEYS_OF_HEADS >> (heads - 1).bit_length()) // wide
    # more one-byte keys, but not of heads of 256, whose first block would arrive late
    whole = kv_block = max(keys, 2048 * LANES // (cache_itemsize * lanes), page)
    most, (left, _), chunk = shape.columns * page, shape.mask.window, shape.mask.chunk_size
    if shape.mask.causal and not shape.ranges and (left is not None or chunk is not None):
        reach = min(x for x in (left, chunk and chunk - 1) if x is not None)
        most = min(most, page + reach + max(large, 1))
    if not large:  # singles share blocks
        most *= shape.num_requests
    while kv_block > max(page, sublanes(cache_itemsize)) and kv_block >= 2 * most:
        kv_block //= 2  # no item has that many keys
    slots = min(3 * whole // kv_block, 8)  # the same number of bytes in flight, whatever the block

    def size(kv_block: int, large: int) -> int:
        rows = heads * large * group
        states = rows * 4 * (2 * 16 + 2 * lanes + (256 if shape.lse else 0)) + large * group * 4 * lanes
        return slots * shape.planes * heads * kv_block * lanes * cache_itemsize + 4 * rows * lanes * itemsize + states

    while size(kv_block, large) > room and large * group > ROWS and large > smallest:
        large //= 2
    while size(kv_block, large) > room and kv_block > max(page, 128):
        kv_block //= 2
    while size(kv_block, large) > room and large > smallest:
        large //= 2
    row_tile = next((tile for tile in (512, 384, 256, 128) if large * group % tile == 0), 0)
    # a product of float32 or of heads of 512 is more code; no larger item of such heads has its steps in one stretch
    stretch = STRETCH // (wide * (1 if itemsize == 2 else 4))
    if wide == 1 and large > smallest and large * group > ROWS:
        stretch *= 2
    segment = max(page, kv_block // SEGMENTS, min(kv_block, SEGMENT))
    key_tile = min(kv_block, 256)
    # an item has few steps unless its request is long, and half of them end in the first half of their keys
    last = key_tile // 2 if itemsize == 2 and 0 < large < key_tile == 256 and max_query_len < 16 * large else 0
    ordered = shape.mask.causal and left is None and chunk is None and not shape.ranges
    fused, rows = 1, large * group * (1 if wide > 1 else heads)
    most = min(4 if itemsize == 2 else 2, min(kv_block, 1024) // key_tile)
    while large and ordered and fused < most and (fused + 1) * key_tile * rows <= STRETCH // 2:
        fused += 1
    return RaggedBlocks(kv_block, large, min(kv_block, 1024), key_tile, row_tile, segment, slots, stretch, last, fused)


def fixed_blocks(name: str, shape: PagedShape) -> RaggedBlocks:
    """Block sizes that depend on the layer and on which masks the batch has, not on its size: a request is then computed by the
    same steps in every batch. They are those of long requests over long tables."""
    blocks = blocks_for(name, dataclasses.replace(shape, max_query_len=FIXED_ROWS, columns=FIXED_KEYS // shape.page))
    return blocks if shape.max_query_len > 1 else blocks._replace(large=0)
