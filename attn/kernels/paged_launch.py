"""How the kernels of `paged_attention` are launched: their constants, and what depends on the batch.

Frameworks share these rules: dtypes are names (`"bfloat16"`), arrays are their strides, and addresses play no part.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from attn.kernels.hopper_prefill_launch import PrefillParams
from attn.kernels.launch import (
    FUSED,
    LOG2E,
    STRETCH,
    TOGETHER,
    UNBOUNDED,
    Launch,
    SplitKV,
    crowded_launch,
    decode_launch,
    format_of,
    is_crowded,
    most_stretches,
    power_of_two,
    prefill_launch,
    rows_of_speculation,
    split_kv_for,
)

#: The arrays of `merge` after `scratch`, and those of `attention`, which takes more.
OF_MERGE = ("output", "lse", "query_start_loc", "sinks", "v_scale", "output_scale")
_MASK = ("slopes", "tree", "spans", "prefix", "is_causal")
_CACHE, _NEW = ("key_cache", "value_cache", "seq_lens", "block_table"), ("key", "value", "slots")
ARRAYS = (*OF_MERGE, "query", *_CACHE, *_MASK, "k_scale", *_NEW)
#: What `hopper_prefill` leaves to `attention`, by the array that asks for it, and by the layer's rules.
_GENERAL = {
    "slopes": "ALiBi",
    "tree": "a draft tree",
    "k_scale": "a quantized cache",
    "v_scale": "a quantized cache",
    "output_scale": "a scaled output",
}
_GENERAL_RULES = ("a block-sparse pattern", "a prefix under a window")
GENERAL = (*dict.fromkeys(_GENERAL.values()), *_GENERAL_RULES)
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def bound(side: int | None) -> int:
    """A side of a window as kernels take it."""
    # No sequence has as many keys, and a larger side would exceed 32 bits when a kernel adds it to a position.
    return UNBOUNDED if side is None else min(side, UNBOUNDED)


class LayerParams(NamedTuple):
    """A layer's rules: see `attn.torch.kernels.paged_attention`."""

    scale: float
    soft_cap: float = 0.0
    left: int | None = None
    right: int | None = None
    tree_right: int | None = None
    chunk_size: int | None = None
    span_window: bool = False
    invariant: bool = False
    sparse: tuple[int, ...] | None = None

    def factor(self, k_factor: float) -> float:
        """What scores are multiplied by: in base 2, or before a soft cap."""
        # Kernels take maxima of unscaled scores, which a negative factor would turn into minima: they negate queries instead
        # (NEGATE).
        factor = abs(self.scale) * k_factor
        return factor / self.soft_cap if self.soft_cap else factor * LOG2E

    def constants(self) -> dict[str, Any]:
        """Arguments of `attention`."""
        tree_right = bound(self.tree_right)
        sparse, local, stride, shift, offset = self.sparse or (0, 0, 1, 0, 0)
        numbers = {"cap": self.soft_cap * LOG2E, "left": bound(self.left), "right": bound(self.right), "tree_right": tree_right}
        numbers |= {"span_right": tree_right or UNBOUNDED, "chunk": self.chunk_size or UNBOUNDED, "sparse_local": local}
        numbers |= {"sparse_stride": stride, "sparse_shift": shift, "sparse_offset": offset}
        flags = {"NEGATE": self.scale < 0, "HAS_LEFT": self.left is not None, "HAS_CAP": self.soft_cap != 0}
        flags |= {"HAS_CHUNK": self.chunk_size is not None, "SPAN_LEFT": self.span_window}
        return {**numbers, **flags, "SPARSE": sparse}

    def of_prompts(self, min_query: int, keys_below: int | None = None) -> PrefillParams:
        """The parameters of `hopper_prefill` for requests of more than `min_query` tokens."""
        if self.invariant:  # tiles and consumers by the layer alone
            keys_below = None
        cap, left, right, chunk = self.soft_cap * LOG2E, bound(self.left), bound(self.right), self.chunk_size or 0
        span_right = (bound(self.tree_right) or UNBOUNDED) if self.span_window else 0
        return PrefillParams(cap, self.scale < 0, left, right, chunk, span_right, min_query, keys_below)


class Kinds(NamedTuple):
    """What calls of the same launches have in common beside the layer.

    arch: as in `attn.kernels.memory`. processors: its multiprocessors. pdl: whether launches may overlap
    (`launch.can_use_pdl`). dtypes: names in the order of `ARRAYS`, None for absent arrays. shape: (H, D, *the cache's
    without its first dimension). scales: the strides of k_scale and v_scale. queries: the most tokens of a request, or more
    than a decode's tile holds. same, wide: see `strides_of`. hopper: whether `hopper_prefill` supports the arrays. together:
    whether all requests are in one launch (`launch.run_together`). tuned: measured launches of decodes and prefills.
    """

    arch: str
    processors: int
    pdl: bool
    dtypes: tuple[str | None, ...]
    shape: tuple[int, ...]
    scales: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    queries: int
    same: bool
    wide: bool
    hopper: bool = False
    together: bool = False
    tuned: tuple[Launch | None, ...] = (None, None)


class Launches:
    """The launches of calls that differ in addresses, numbers of requests and keys, and the values of scales.

    In a layer that requests `batch_invariant`, tiles depend on the layer's shape and the request's own number of tokens only,
    and measured launches, which change when another batch is timed, are not used. The batch's plan decides which program has
    which stretches of keys; their results are added in the order of keys. The number of requests selects BLOCK_R, which changes
    integers of the plan only.

    tokens: of a request that fit in one decode tile, 0 without a block table; of all requests together, in one of a request's
    tiles. prefill: the constants and options of `attention` for requests of more tokens, or None; its tile holds
    `prefill_tokens`. beside: whether decodes run beside `hopper_prefill`, which `on_hopper` says takes the prompts, where
    launches may overlap.
    """

    def __init__(self, kinds: Kinds, layer: LayerParams) -> None:
        self.layer, self.kinds = layer, kinds
        (heads, size, *cache), dtypes = kinds.shape, dict(zip(ARRAYS, kinds.dtypes, strict=True))
        query, stored, self.kv_heads, invariant = dtypes["query"], dtypes["key_cache"], cache[-2], layer.invariant
        itemsize, name, tuned = _ITEMSIZE[str(query)], kinds.arch, kinds.tuned
        self.paged, group = dtypes["block_table"] is not None, heads // self.kv_heads
        self.free = dtypes["spans"] is not None or dtypes["prefix"] is not None
        sizes = (size, itemsize, _ITEMSIZE.get(str(stored), 1))
        # bits may not depend on the batch's longest request (docs/semantics.md §17)
        packed = 0 if invariant or not self.paged else rows_of_speculation(name, group, kinds.queries, itemsize)
        if kinds.together:
            packed = max(group, min(TOGETHER, group * kinds.queries))
        decode = decode_launch(name, packed, *sizes) if packed else tuned[0] or decode_launch(name, group, *sizes)
        # one token alone needs no mask between rows
        most = decode.block_m // group if self.paged else 0
        if self.paged and not (invariant or kinds.together) and not 1 < kinds.queries <= most:
            most = 1
        # a cache of [S, K, D], whose requests have one page each: `block_table` names its first row
        in_row = self.paged and len(cache) == 2
        plain = not any(dtypes[x] for x in _GENERAL) and not (in_row or layer.sparse)
        # a row's keys are a range that a prefix extends, and its span; under a window the prefix would be a range of its own
        plain = plain and not (dtypes["prefix"] and layer.left is not None)
        self._prompts = kinds.queries > most and not kinds.together
        self.on_hopper = kinds.hopper and plain and self._prompts
        self.beside = self.on_hopper and self.paged and kinds.pdl
        if self.beside and tuned[0] is None and not invariant:
            decode = decode_launch(name, group, *sizes, beside=True)
        if invariant and name.startswith("sm_"):
            # Registers hold the sums of a stretch beside those before it: with two warps, those of caches of bytes spill.
            decode = replace(decode, num_warps=4 if size <= 128 else 8)
        #: tiles of the shortest stretch of a decode's keys, 0 where its splits are the batch's
        self._stretch = max(1, STRETCH // decode.block_n) if invariant else 0
        self._fits_registers = name.startswith("sm_") and sizes[1:] == (2, 2)
        self.tokens, self.rows = most, most * heads
        # Measured launches have one launch for both, and layers whose bits are the request's. So have decodes beside a prefill,
        # where a deep pipeline was slower (`decode_launch`).
        self._whole = self._split = decode
        self._crowded = None
        if not (invariant or self.beside) and tuned[0] is None:
            self._split = decode_launch(name, packed or group, *sizes, True)
            self._crowded = None if kinds.together else crowded_launch(name, decode.block_m, *sizes)
        prefill = tuned[1] or prefill_launch(name, group, *sizes)
        self.prefill_tokens, self.prefill = prefill.block_m // group, None
        self._attention = self._constants(dtypes, in_row)
        if self._prompts and not self.on_hopper:
            rows = {"DECODE": False, "min_query": most, "max_query": UNBOUNDED}
            self.prefill = self._tiled(prefill, self.prefill_tokens, 0) | rows

    def _common(self) -> dict[str, Any]:
        """Constants of `attention` and of `merge`."""
        # Scales of three dimensions are one for each token and head: a tile of values applies them, not the finished row.
        heads, size, v_scales = *self.kinds.shape[:2], self.kinds.scales[1]
        sizes = {"H": heads, "G": heads // self.kv_heads, "D": size}
        return {**sizes, "vscale_h": 1 if v_scales else 0, "HAS_V_SCALE": v_scales is not None and len(v_scales) < 3}

    def _constants(self, dtypes: dict[str, str | None], in_row: bool) -> dict[str, Any]:
        """Constants of every launch of `attention`."""
        query, stored, (k_scales, v_scales), name = dtypes["query"], dtypes["key_cache"], self.kinds.scales, self.kinds.arch
        # One index of (page, slot, head) serves both arrays of scales, so their strides must agree.
        per_token, wide_query = k_scales is not None and len(k_scales) == 3, query == "float32"
        assert not per_token or k_scales == v_scales
        scale_block, scale_slot = k_scales[:2] if per_token and k_scales else (0, 0)
        one_byte = str(stored) not in _ITEMSIZE
        flags = {"HAS_ALIBI": "slopes", "HAS_TREE": "tree", "HAS_SPANS": "spans", "HAS_PREFIX": "prefix", "MIXED": "is_causal"}
        masks = {flag: dtypes[array] is not None for flag, array in flags.items()}
        numbers = {"kscale_h": 1 if k_scales else 0, "scale_block": scale_block, "scale_slot": scale_slot, "values_at": 0}
        return {
            **{**self._common(), **self.layer.constants(), **numbers, **masks, "BESIDE": self.beside},
            "BLOCK_D": power_of_two(self.kinds.shape[1]),
            "P": UNBOUNDED if in_row else self.kinds.shape[2] if self.paged else 1,
            **{"PAGED": self.paged, "PER_TOKEN": per_token, "HAS_K_SCALE": k_scales is not None and not per_token},
            # int8 codes are finite, and so is their scale of a tensor or head: the check at a tile's end is left out
            "MAY_BE_NONFINITE": per_token or stored != "int8",
            **{"SAME": self.kinds.same, "WIDE": self.kinds.wide, "EXACT": wide_query},
            # three tf32 products give float32's accuracy on tensor cores; without them the tiles would not fit in registers
            "PRECISION": "tf32x3" if wide_query and name.startswith("sm") else "ieee",
            "TILED": self.kinds.together,
            "IN_HALF": query == "bfloat16" and one_byte and not per_token,
            "FORMAT": format_of(str(dtypes["key"]), str(stored)) if dtypes["slots"] else "",
            "STRETCH": 0,
            "STRETCHES": 1,
            **({"launch_pdl": True} if self.beside else {}),
        }

    def _tiled(self, rule: Launch, tokens: int, block_r: int) -> dict[str, Any]:
        tile = {"BLOCK_M": rule.block_m, "BLOCK_N": rule.block_n, "BLOCK_Q": tokens, "BLOCK_R": block_r}
        return {**self._attention, **tile, "PDL": self.kinds.pdl and block_r > 0, **rule.options()}

    def decode(self, block_r: int, crowded: bool = False) -> dict[str, Any]:
        """Constants and options of `attention` for decodes. block_r, crowded: of `SplitKV`; 0 for decodes that stay whole."""
        rows = {"DECODE": True, "min_query": 0, "max_query": UNBOUNDED if self.kinds.together else self.tokens}
        if self._stretch:
            rows |= {"STRETCH": self._stretch, "STRETCHES": most_stretches(self.kv_heads, self.kinds.processors)}
            if self._fits_registers and not block_r:
                # Four programs of four warps share a multiprocessor, as they do without stretches: spilled are numbers of the
                # rare path. 64 decodes of 4,096 keys, three at once with 168 registers: 423 us instead of 369 (H100).
                rows |= {"maxnreg": 128}
        return self._tiled(self._split_launch(crowded) if block_r else self._whole, self.tokens, block_r) | rows

    def _split_launch(self, crowded: bool) -> Launch:
        """The launch of split decodes."""
        return self._crowded if crowded and self._crowded is not None else self._split

    def keys_per_tile(self, crowded: bool) -> int:
        """Keys of a tile of split decodes."""
        return self._split_launch(crowded).block_n

    def merge(self, split_kv: SplitKV) -> dict[str, Any]:
        """Constants and options of `merge`: see `launch.splits_merged_at_once`."""
        pdl = self.kinds.pdl
        block = {"BLOCK_Q": self.tokens, "BLOCK_C": self._merged_columns(split_kv), "BLOCK_S": split_kv.merged}
        block |= {"TILED": self.kinds.together, "STRETCHED": self._stretch > 0}
        return {**self._common(), **block, "PDL": pdl, "num_warps": 1, **({"launch_pdl": True} if pdl else {}), **FUSED}

    def merge_programs(self, tiles: int, split_kv: SplitKV) -> int:
        """Programs of `merge` for as many tiles of rows as `tiles` returns."""
        return tiles * self.rows * -(-self.kinds.shape[1] // self._merged_columns(split_kv))

    def _merged_columns(self, split_kv: SplitKV) -> int:
        if self._stretch:
            return 32 if split_kv.merged == 32 else min(power_of_two(self.kinds.shape[1]), 128)
        return min(power_of_two(self.kinds.shape[1]), 2048 // split_kv.merged)

    def has_decodes(self, singles: bool) -> bool:
        """Whether decodes need their launch. singles: whether there may be requests that it has beside prompts."""
        return singles or not self._prompts

    def tiles(self, num_reqs: int, tokens: int) -> int:
        """The most tiles of rows per kv head in a decode's launch: one for each request, or more if all are together."""
        return num_reqs + (tokens // self.tokens if self.kinds.together else 0)

    def split_kv(self, num_reqs: int, max_seq_len: int, whole: bool) -> SplitKV | None:
        """How the keys of decodes are split; None if they stay whole. num_reqs: or `tiles` of rows. whole: whether they are
        known to be better so."""
        if whole:
            return None
        # Both launches of tiles of 17 to 64 rows have as many splits.
        rows, of = (
            self._whole.block_m if self._crowded is None else self._crowded.block_m,
            (self.kv_heads, self.kinds.processors),
        )
        keys_per_tile = self.keys_per_tile(is_crowded(num_reqs, *of, rows))
        tiles = self._tiles(max_seq_len, keys_per_tile)
        return split_kv_for(num_reqs, self.kv_heads, tiles, self._stretch, self.kinds.processors, rows)

    def _tiles(self, keys: int, keys_per_tile: int) -> int:
        """The most tiles of keys that a decode sees, of a sequence of `keys`."""
        # Rows of a decode are the request's last, so the keys after them add nothing; a first tile that begins before the
        # window adds less than one tile.
        layer = self.layer
        if layer.chunk_size is not None:
            keys = min(keys, layer.chunk_size + self.tokens + keys_per_tile)
        if layer.left is not None and not self.free:
            keys = min(keys, layer.left + self.tokens + min(bound(layer.right), self.tokens) + keys_per_tile)
        return max(1, -(-keys // keys_per_tile))

    def states(self, num_reqs: int, split_kv: SplitKV) -> tuple[int, int]:
        """Return (the number of partial results, float32 elements of `scratch`): every row's results, the log-sum-exp of each,
        or its maximum and its sum of weights, and the plan."""
        states = split_kv.stored * self.rows
        return states, states * (self.kinds.shape[1] + (2 if self._stretch else 1)) + 2 * num_reqs


Strides = tuple[int, ...]


def strides_of(output: Strides, query: Strides, keys: Strides, values: Strides, blocks: int, paged: bool) -> tuple[Any, ...]:
    """(the kernel's strides, whether those of both caches are equal, whether offsets in these need 64 bits).

    Arguments: the strides of arrays; blocks: of a cache. A cache of [S, K, D] has each request's keys in a row.
    """
    (o_t, o_h, o_d), (q_t, q_h, q_d) = output, query
    assert o_d == q_d == keys[-1] == values[-1] == 1, "the last dimensions of output, query and caches must be dense"
    # 64-bit offsets cost a tenth of a prefill's instructions, so only caches that need them use them. A block's slots lie
    # before the next block, so all blocks bound page * stride + slot * stride; a head's offset is always added in 64 bits.
    wide = blocks * max(keys[0], values[0]) >= 2**31
    if len(keys) == 3:  # the page of a request begins at its first key, so pages are as far apart as keys
        keys, values = (keys[0] if paged else 0, *keys), (values[0] if paged else 0, *values)
    return (o_t, o_h, q_t, q_h, *keys[:3], *values[:3]), keys == values, wide
