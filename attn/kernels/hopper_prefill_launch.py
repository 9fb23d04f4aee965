"""Launch rules of `hopper_prefill`: its tiles, rings, registers and copies, from shapes and strides. They need no Triton."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from attn.kernels.launch import FUSED, UNBOUNDED, power_of_two

ROWS = 128  #: most query heads of a kv head
ONE_PAGE = 1 << 30  #: keys of a page that holds all of a request
#: Registers of a thread of a consumer, and of a producer, by the number of consumers. One consumer is the launch's own group of
#: warps, which has what the producers leave.
_REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 24)}
#: Of a thread as programs of one consumer and two producers are launched (eight warps), by how many of them share the 65,536
#: registers of a multiprocessor.
_REGISTERS_OF_ONE = {2: 128, 3: 80}
#: Numbers of keys at which tiles or consumers change (`_keys`, `_consumers`).
_BOUNDS = (190, 250, 1000, 2000, 2500, UNBOUNDED)


class PrefillParams(NamedTuple):
    """What the kernel takes of a layer, and the requests it is launched for.

    cap: in base 2, or 0; left, right: number of keys seen on either side, `UNBOUNDED` if there is no bound; chunk: positions of
    a chunk, before which a row sees no key, or 0; span_right: 0, or the number of later keys to which the window cuts spans (it
    then cuts them on the left too); min_query: requests of at most so many tokens are left out; keys_below: `keys_below`
    of the rows, None if that is not known; ends: whether each request's one page ends with its last key, so that the engine
    fills in zeros after it.
    """

    cap: float = 0.0
    negate: bool = False
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    chunk: int = 0
    span_right: int = 0
    min_query: int = 0
    keys_below: int | None = None
    ends: bool = False

    def seeing(self, keys: float, rows: float) -> "PrefillParams":
        """These parameters for requests of `keys` keys and `rows` rows on average."""
        return self._replace(keys_below=keys_below(keys, rows, self.left, self.right))


class Arrays(NamedTuple):
    """Shapes of the query [T, H, D], keys and values (see `hopper_prefill`), their strides and the output's, in elements."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    of_query: tuple[int, ...]
    of_key: tuple[int, ...]
    of_value: tuple[int, ...]
    of_output: tuple[int, ...]


class Variant(NamedTuple):
    """The arguments that a launch passes, for which the kernel is compiled.

    paged: a block table; ragged: keys without pages, of starts of their own; copied: whether the engine copies queries; sinks;
    lse; mixed: causality of each request; far: offsets of heads, or within a page, of 64 bits; equal: each request has `rows`
    rows and `num_pages` keys, or as many of them as `seq_lens` says, which are a page of their own, in order, so that there are
    no other lists.
    """

    paged: bool
    ragged: bool
    copied: bool
    sinks: bool
    lse: bool
    mixed: bool = False
    far: bool = False
    equal: bool = False


#: Shape, strides and box of an array that the tensor engine copies from.
Map = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class PrefillPlan(NamedTuple):
    """What a launch for `Arrays` needs of them.

    maps: of the query, None if the engine does not copy it, and of keys and values; strides: the kernel's; sizes: query heads,
    those of a unit of work, units that share a kv head, sizes of keys and of values, the page, whether heads are joined
    (`_are_joined`); tiles: more units of work than there are; resident: programs that a multiprocessor holds at once; far: as
    of `Variant`.
    """

    maps: tuple[Map | None, Map, Map]
    strides: tuple[int, ...]
    sizes: tuple[int, int, int, int, int, int, bool]
    tiles: int
    resident: int
    far: bool

    def programs(self, multiprocessors: int) -> int:
        """Programs of a launch that takes so many multiprocessors."""
        # programs stay on their multiprocessors and take unit after unit, so more of them than units have nothing to do
        return min(self.tiles, self.resident * multiprocessors)


def keys_below(keys: float, rows: float, left: int, right: int) -> int:
    """The least of some bounds above the number of keys that rows see on average, if their requests have `keys` keys and
    `rows` rows. left, right: `PrefillParams`'."""
    # on average, half of the request's rows come after a row
    seen = min(keys - rows / 2, left) + min(rows / 2, right)
    return next(bound for bound in _BOUNDS if seen < bound)


def fits(size: int, width: int, copied: bool, group: int, page: int) -> bool:
    """Whether the kernel supports these sizes of keys and of values, query heads of a kv head, and pages. copied: see `copies`;
    heads above 256 leave no memory in which consumers could store queries."""
    # The engine's strides are multiples of 16 bytes, which are 8 elements. Sizes need be no multiple of a tile's columns: the
    # engine fills in zeros.
    if (size | width) % 8 or not 0 < size <= 512 or not 0 < _padded(width) <= _padded(size):
        return False
    return group <= ROWS and page % 16 == 0 and (size <= 256 or copied)


def passes(width: int) -> int:
    """Units of work for the values of the same rows: accumulators of 64 rows and more than 256 columns are more than a
    consumer's registers hold. Each computes all scores: half as many products again for heads of 512. A unit of 128 rows and
    half of the values takes 96 KiB of keys and values a tile from the second-level cache; 64 rows and all values took 128."""
    return -(-width // 256)


def copies(group: int, strides: Sequence[int], negate: bool, aligned: bool) -> bool:
    """Whether the engine copies queries: those of whole rows of each consumer, as they are.

    strides: the query's, of its last dimension too; aligned: whether it begins at a multiple of 16 bytes.
    """
    # A consumer has 64 rows, which are whole tokens if groups divide them. The engine cannot negate, so consumers do.
    return 64 % group == 0 and not negate and all(stride % 8 == 0 for stride in strides[:-1]) and aligned


def plan_of(arrays: Arrays, num_reqs: int, page: int, paged: bool, params: PrefillParams, aligned: bool) -> PrefillPlan:
    """paged: whether keys have pages, with or without a table; aligned: whether the query begins at a multiple of 16 bytes."""
    (tokens, heads, size), k_shape, v_shape = arrays.query, arrays.key, arrays.value
    (o_t, o_h, _), (q_t, q_h, _), k_strides, v_strides = arrays.of_output, arrays.of_query, arrays.of_key, arrays.of_value
    # a call's own keys are one page, whose stride is never used but must be a multiple of 16 bytes too
    if not paged:
        k_strides, v_strides = (k_shape[0] * k_strides[0], *k_strides), (v_shape[0] * v_strides[0], *v_strides)
        k_shape, v_shape = (1, *k_shape), (1, *v_shape)
    kv_heads, width = k_shape[2], v_shape[3]
    group = heads // kv_heads
    packed = math.gcd(group, 64)
    copied = copies(packed, arrays.of_query, params.negate, aligned)
    if not copied or not _pays(packed, group, tokens / max(1, num_reqs), size, width, params):
        packed, copied = group, copied and packed == group
    consumers = _consumers(size, width, params, copied, packed)
    box = 1, _box(page, _keys(size, width, params, copied, packed)), 1, 64
    # four dimensions, as keys have, so that one layout of boxes serves all: a box is 64 / packed tokens of a unit's heads
    q_map = ((1, tokens, heads, size), (tokens * q_t, q_t, q_h, 1), (1, 64 // packed, packed, 64)) if copied else None
    strides = o_t, o_h, q_t, q_h, *k_strides[:3], *v_strides[:3]
    # a bound on units by extents alone: each request may end in a tile that is not full
    tiles = (tokens // (64 * consumers // packed) + num_reqs) * (heads // packed) * passes(width)
    of_heads = heads * max(o_h, q_h), kv_heads * max(k_strides[2], v_strides[2])
    far = max(*of_heads, k_shape[1] * k_strides[1], v_shape[1] * v_strides[1]) >= 1 << 31
    joined = _are_joined(size, width, kv_heads, k_strides, v_strides)
    if joined:
        k_shape, v_shape = ((*shape[:2], 1, kv_heads * size) for shape in (k_shape, v_shape))
        k_strides, v_strides = ((*of[:2], of[1], 1) for of in (k_strides, v_strides))
    maps = q_map, (k_shape, k_strides, box), (v_shape, v_strides, box)
    sizes = heads, packed, group // packed, size, width, page, joined
    return PrefillPlan(maps, strides, sizes, tiles, _resident(size) if consumers == 1 else 1, far)


def constants(sizes: tuple[int, ...], params: PrefillParams, variant: Variant, values_at: int = 0) -> dict[str, Any]:
    """Constants and options of a launch. sizes: `PrefillPlan`'s; values_at: the page at which the array of keys has values."""
    heads, group, shared, size, width, page, joined = sizes
    consumers = _consumers(size, width, params, variant.copied, group)
    registers, keys = _REGISTERS[consumers], _keys(size, width, params, variant.copied, group)
    return {
        "cap": params.cap, "left": params.left, "right": params.right, "min_query": params.min_query, "H": heads, "G": group,
        "SHARED": shared,
        "D": size, "DV": width, "BLOCK_D": _padded(size), "BLOCK_V": min(_padded(width), 256), "P": page,
        "BOX": _box(page, keys), "BLOCK_Q": 64 * consumers // group, "BLOCK_N": keys,
        "CONSUMERS": consumers, "STAGES": _stages(size, width, variant.copied, consumers, keys),
        "Q_STAGES": _q_stages(size, variant.copied),
        "COPIED": variant.copied, "PAGED": variant.paged, "RAGGED": variant.ragged, "EQUAL": variant.equal,
        "NEGATE": params.negate, "CHUNK": params.chunk, "SPAN_RIGHT": params.span_right,
        "HAS_LEFT": params.left < UNBOUNDED or params.chunk > 0,
        "HAS_RIGHT": params.right < UNBOUNDED or variant.mixed, "HAS_CAP": params.cap != 0, "HAS_SINKS": variant.sinks,
        "HAS_LSE": variant.lse, "CONSUMER_REGS": registers[0], "PRODUCER_REGS": registers[1], "VALUES_AT": values_at,
        "FAR": variant.far, "ENDS": params.ends, "JOINED": size if joined else 0,
        "num_warps": 4, **({"maxnreg": _REGISTERS_OF_ONE[_resident(size)]} if consumers == 1 else {}), **FUSED,
    }  # fmt: skip


def _are_joined(size: int, width: int, kv_heads: int, *strides: Sequence[int]) -> bool:
    """Whether the engine takes the heads of a token as one row: where some heads, and only because of their size, begin 16
    bytes after a multiple of 32 (elements are of 16 bits). strides: of keys, and of values.

    Rows of 144 bytes that begin at any multiple of 16 take the engine 11.4 cycles, those of 160 at multiples of 32 take 8.2
    (H100, pages of 64): causal 8x1810 24/24 took 438 us with heads of 72 and 265 with heads of 80.
    """
    dense = all(token % 16 == 0 and head == size for _, token, head, *_ in strides)
    return size == width and size % 16 == 8 and size <= 256 and kv_heads > 1 and dense


def _pays(part: int, group: int, rows: float, size: int, width: int, params: PrefillParams) -> bool:
    """Whether units of `part` of a kv head's query heads, which divide a consumer's 64 rows, so that the engine copies their
    queries, replace units of all heads, whose queries consumers store: a third of a short unit, and nothing of a long one.
    rows: of a request, on average.

    Few rows of fewer heads leave more of a unit empty. Where the host does not know lengths, all batches are packed alike.
    """
    below = params.keys_below
    if part == group or below is None or below == UNBOUNDED:
        return part == group

    def computed(heads: int, copied: bool) -> float:
        """Rows of a request's units for a kv head, empty ones included."""
        consumers = _consumers(size, width, params, copied, heads)
        return consumers * (group // heads) * math.ceil(rows / (64 * consumers // heads))

    return computed(part, True) <= (1.25 if below <= 1000 else 1.1) * computed(group, False)


def _padded(size: int) -> int:
    """Columns of a tile for heads of `size`."""
    return max(64, power_of_two(size))


def _keys(size: int, width: int, params: PrefillParams, copied: bool, group: int) -> int:
    """Keys per tile, for sizes of keys and of values: as many as registers and two stages of shared memory hold, but fewer
    where rows see few: less of a tile is masked, and a unit's first and last tile, which nothing overlaps, are shorter.
    copied: whether the engine copies queries; those that consumers store take more memory above 128. group: query heads of a kv
    head.

    Measured on H200s: three consumers (heads of 64) are faster with 64 keys than with 128 below 2,000 keys seen (causal, 700 to
    1,000 keys: 0.75 of the time). Without causality only batches of equal lengths were timed there. Above 64: see `_consumers`.
    """
    sees = params.keys_below
    if size <= 64:
        few = params.right < UNBOUNDED if sees is None else sees <= 2000
    else:
        few = sees is not None and sees <= (1000 if params.ends else 2000)
    # 128 keys of 192 columns and of 128 columns of values, two stages each, and queries of 192 take 208 KiB of 227.
    tall = size <= (192 if copied else 128) and width <= 128 and not few
    return 128 if tall and _consumers(size, width, params, copied, group) > 1 else 64


def _consumers(size: int, width: int, params: PrefillParams, copied: bool, group: int) -> int:
    """Consumers of a program, each of 64 rows: three where the exponentials take as long as the products, so that they keep
    both units busy, or two. Where rows see few keys, one, if two such programs share a multiprocessor: one computes while the
    other begins or ends a unit, and short batches have more units. But each reads its own keys and values from the second-level
    cache, twice as many bytes for a product as two consumers of a program. Arguments: as of `_keys`.

    Above 64 the limits, here and of `_keys`, follow 164 launches of equal lengths on H100s, with one consumer, and with two and
    64 or 128 keys a tile. On the 72 of them that were drawn at random (heads of 80 to 128; dense, ragged and over pages; 76 to
    5,467 keys seen) the choice takes 1.008 of the fastest one's time (geometric mean; at most 1.14). The limit without
    causality follows 25 more, dense, of 65 to 256 keys: 1.012 with cold caches and 1.008 otherwise (at most 1.17: one unit for
    each program), where 250 takes 1.019 and 1.013.
    """
    few = (1000 if params.ends else 2500) if size <= 64 else (250 if params.right < UNBOUNDED else 190)
    few = params.keys_below is not None and params.keys_below <= few
    # A unit is whole tokens, and one consumer's 64 rows hold none of more query heads.
    if few and group <= 64 and _held(size, width, copied, 1, 64) >= 2:
        return 1
    return 3 if size <= 64 else 2


def _held(size: int, width: int, copied: bool, consumers: int, keys: int) -> int:
    """Tiles of so many keys, and of their values, that a program's shared memory holds beside the queries, of 16 bits."""
    # 129 to 192 columns are three tiles of 64, but not of queries that consumers store (`hopper_prefill`)
    columns = 192 if 128 < size <= 192 else _padded(size)
    queries = 64 * consumers * (columns if copied else _padded(size)) * _q_stages(size, copied)
    room = _room(_resident(size) if consumers == 1 else 1) // 2
    return (room - queries) // (keys * (columns + min(_padded(width), 256)))


def _resident(size: int) -> int:
    """Programs of one consumer that share a multiprocessor: as many as its registers hold without spills."""
    return 3 if size <= 64 else 2


def _room(programs: int) -> int:
    """Bytes for the tiles of each of so many programs that share the 228 KiB of a multiprocessor, which keeps 1 KiB for each;
    barriers, the description of units, and results that change threads take less than 7 KiB."""
    return 228 * 1024 // programs - 1024 - 7 * 1024


def _q_stages(size: int, copied: bool) -> int:
    """Tiles of queries: the next unit's are copied while this one's are used, if the engine copies and memory allows it."""
    return 2 if copied and size <= 128 else 1


def _stages(size: int, width: int, copied: bool, consumers: int, keys: int) -> int:
    """Tiles of keys, and of values, in the ring buffer: 256 keys where memory holds them, or four tiles for heads of up to
    64."""
    # Heads of 512 fill the memory, 64 KiB of keys and 32 of values beside 128 of queries, into the room that others leave free.
    return max(1, min(4 if size <= 64 else 256 // keys, _held(size, width, copied, consumers, keys)))


def _box(page: int, keys: int) -> int:
    """Keys per copy: all copies of a tile are of the same size, and none is of two pages."""
    return min(page & -page, keys)
