"""Launch rules of `hopper_prefill`: its tiles, rings, registers and copies, from shapes and strides. They need no Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from attn.kernels.launch import FUSED, UNBOUNDED, power_of_two

ROWS = 128  #: most query heads of a kv head
ONE_PAGE = 1 << 30  #: keys of a page that holds all of a request
#: Registers of a thread of a consumer, and of a producer, by the number of consumers.
_REGISTERS = {2: (240, 24), 3: (160, 24)}


class PrefillParams(NamedTuple):
    """What the kernel takes of a layer, and the requests it is launched for.

    cap: in base 2, or 0; left, right: number of keys seen on either side, `UNBOUNDED` if there is no bound; chunk: positions of
    a chunk, before which a row sees no key, or 0; span_right: 0, or the number of later keys to which the window cuts spans (it
    then cuts them on the left too); min_query: requests of at most so many tokens are left out; few_keys: whether rows see so
    few keys that smaller tiles are faster (`seeing`), None if that is not known.
    """

    cap: float = 0.0
    negate: bool = False
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    chunk: int = 0
    span_right: int = 0
    min_query: int = 0
    few_keys: bool | None = None

    def seeing(self, keys: float, size: int) -> "PrefillParams":
        """These parameters for heads of `size` whose rows would see `keys` keys on average without a window."""
        return self._replace(few_keys=has_few_keys(min(keys, self.left), size))


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
    lse; mixed: causality of each request.
    """

    paged: bool
    ragged: bool
    copied: bool
    sinks: bool
    lse: bool
    mixed: bool = False


#: Shape, strides and box of an array that the tensor engine copies from.
Map = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class PrefillPlan(NamedTuple):
    """What a launch for `Arrays` needs of them.

    maps: of the query, None if the engine does not copy it, and of keys and values; strides: the kernel's; sizes: query heads,
    those of a kv head, sizes of keys and of values, the page; tiles: more units of work than there are.
    """

    maps: tuple[Map | None, Map, Map]
    strides: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]
    tiles: int


def has_few_keys(keys: float, size: int) -> bool:
    """Whether tiles of 64 keys are faster than tiles of 128 where causal rows of heads of `size` see `keys` keys on average.

    Measured on an H200 on 56 batches drawn at random (windows, contexts and MLA's 192/128 among them): at 64 both take the same
    time somewhere between 1,600 and 2,700 keys, at 96 and more between 700 and 1,300; fewer keys take down to 0.7 of the time.
    """
    return keys < (2000 if size <= 64 else 1000)


def fits(size: int, width: int, copied: bool, group: int, page: int) -> bool:
    """Whether the kernel supports these sizes of keys and of values, query heads of a kv head, and pages. copied: see `copies`;
    heads above 256 leave no memory in which consumers could store queries."""
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
    return 64 % group == 0 and not negate and all(stride % 8 == 0 for stride in strides[:-1]) and aligned


def plan_of(arrays: Arrays, num_reqs: int, page: int, paged: bool, params: PrefillParams, aligned: bool) -> PrefillPlan:
    """paged: whether there is a block table; aligned: whether the query begins at a multiple of 16 bytes."""
    (tokens, heads, size), k_shape, v_shape = arrays.query, arrays.key, arrays.value
    (o_t, o_h, _), (q_t, q_h, _), k_strides, v_strides = arrays.of_output, arrays.of_query, arrays.of_key, arrays.of_value
    if not paged:
        k_strides, v_strides = (k_shape[0] * k_strides[0], *k_strides), (v_shape[0] * v_strides[0], *v_strides)
        k_shape, v_shape = (1, *k_shape), (1, *v_shape)
    kv_heads, width = k_shape[2], v_shape[3]
    group = heads // kv_heads
    copied = copies(group, arrays.of_query, params.negate, aligned)
    box = 1, _box(page, _keys(size, width, params, copied)), 1, 64
    q_map = ((1, tokens, heads, size), (tokens * q_t, q_t, q_h, 1), (1, 64 // group, group, 64)) if copied else None
    strides = o_t, o_h, q_t, q_h, *k_strides[:3], *v_strides[:3]
    tiles = (tokens // (_rows(size) // group) + num_reqs) * kv_heads * passes(width)
    return PrefillPlan(
        (q_map, (k_shape, k_strides, box), (v_shape, v_strides, box)), strides, (heads, group, size, width, page), tiles
    )


def constants(sizes: tuple[int, ...], params: PrefillParams, variant: Variant, values_at: int = 0) -> dict[str, Any]:
    """Constants and options of a launch. sizes: `PrefillPlan`'s; values_at: the page at which the array of keys has values."""
    heads, group, size, width, page = sizes
    consumers = _consumers(size)
    registers, keys = _REGISTERS[consumers], _keys(size, width, params, variant.copied)
    return {
        "cap": params.cap, "left": params.left, "right": params.right, "min_query": params.min_query, "H": heads, "G": group,
        "D": size, "DV": width, "BLOCK_D": _padded(size), "BLOCK_V": min(_padded(width), 256), "P": page,
        "BOX": _box(page, keys), "BLOCK_Q": _rows(size) // group, "BLOCK_N": keys,
        "CONSUMERS": consumers, "STAGES": _stages(size), "Q_STAGES": 2 if variant.copied and size <= 128 else 1,
        "COPIED": variant.copied, "PAGED": variant.paged, "RAGGED": variant.ragged, "NEGATE": params.negate,
        "CHUNK": params.chunk, "SPAN_RIGHT": params.span_right, "HAS_LEFT": params.left < UNBOUNDED or params.chunk > 0,
        "HAS_RIGHT": params.right < UNBOUNDED or variant.mixed, "HAS_CAP": params.cap != 0, "HAS_SINKS": variant.sinks,
        "HAS_LSE": variant.lse, "CONSUMER_REGS": registers[0], "PRODUCER_REGS": registers[1], "VALUES_AT": values_at,
        "num_warps": 4, **FUSED,
    }  # fmt: skip


def _padded(size: int) -> int:
    """Columns of a tile for heads of `size`."""
    return max(64, power_of_two(size))


def _keys(size: int, width: int, params: PrefillParams, copied: bool) -> int:
    """Keys per tile, for sizes of keys and of values: as many as registers and two stages of shared memory hold, but fewer
    where causal rows see few: less of a tile is masked, and a unit's first and last tile, which nothing overlaps, are
    shorter. copied: whether the engine copies queries; those that consumers store take more memory above 128."""
    few = size <= 64 if params.few_keys is None else params.few_keys
    return 64 if size > (192 if copied else 128) or width > 128 or (few and params.right < UNBOUNDED) else 128


def _consumers(size: int) -> int:
    """Consumers of a program: three where the exponentials take as long as the products, so that they keep both units busy."""
    return 3 if size <= 64 else 2


def _rows(size: int) -> int:
    """Packed rows of a unit of work."""
    return 64 * _consumers(size)


def _stages(size: int) -> int:
    """Tiles of keys, and of values, in the ring buffer."""
    return 4 if size <= 64 else 2 if size <= 256 else 1


def _box(page: int, keys: int) -> int:
    """Keys per copy: all copies of a tile are of the same size, and none is of two pages."""
    return min(page & -page, keys)
