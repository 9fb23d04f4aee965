"""One conformance case: a batch, a layer and the data's recipe, small enough to paste into a terminal.

A case is data alone. `Case.json()` holds what differs from the defaults, and `Case.from_json` gives the same case back,
so every failure prints the line that repeats it. Geometry (which pages, what is stale, which tree) and data (what is in
the arrays) have seeds of their own, so that one can be kept while the other varies.
"""

import json
import math
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from attn.backends.arguments import Window, layer_features, window_pair
from attn.capabilities import ENCODER_TYPES, AttentionType, Feature, Request
from attn.dtypes import PER_TOKEN_HEAD, kv_cache_element
from attn.testing.bits import CODES

Scale = float | tuple[float, ...]


class Recipe:
    """A frozen dataclass of plain data that is printed as one line of JSON, and made from that line again."""

    #: What of the command that repeats it follows the backend's name.
    option = ""

    def __str__(self) -> str:
        return str(self.name)  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]

    def json(self) -> str:
        """The fields that differ from the defaults, on one line."""
        own = fields(self)  # type: ignore[arg-type]
        stated = {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) != f.default}
        return json.dumps(stated, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The case of `json()`. Raises ValueError for what is no such object, or lacks a field, or has one too many."""
        try:
            stated = json.loads(text)
            if not isinstance(stated, dict):
                raise TypeError("it must be a JSON object")
            return cls(**{name: _tuples(value) for name, value in stated.items()})
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{text!r} is no case: {error}") from error

    def repro(self, backend: str = "") -> str:
        """The command that runs this case again."""
        target = f" {backend}" if backend else ""
        return f"python -m attn.testing{target}{self.option} --repro {shlex.quote(self.json())}"


@dataclass(frozen=True)
class Case(Recipe):
    """What to run and which property to hold it to.

    query_lens, seq_lens: new tokens and tokens in the cache (new ones included), one entry a request.
    k_scale, v_scale: of a quantised cache; a tuple has one entry a kv head.
    alibi: True for the usual slopes, "randn" for slopes of either sign and zero among them.
    sinks: "" (none), "randn", "log_length": about ln of the longest context, where a sink matters most, or "infinite": some
        heads have a sink of -inf (off) or of inf (which takes everything).
    tree: width W of a random draft tree for each request; 0 is none, -1 a mask [R, 0, 0], which holds no tree.
    mla: (L, Dn, Dr, Dv) of multi-head latent attention: `head_size` is L + Dr then, and num_kv_heads 1; () is none.
    topk: with `mla`, keys that an indexer chose for each row, at most (`Call.indices`); 0 is all.
    sparse: (block_size, local_blocks, vert_stride, homo_head) of a block-sparse pattern (docs/semantics.md §13); () is none.
    kv_sharing: the layer reads another layer's cache; its own keys and values are NaN.
    lse: ask for the log-sum-exp too.
    inputs: "randn", "needle" (every query looks for one boundary key), "loud" (scores about 1e4), "far" (one score of
        -524288), "constant" (V is one number), "magnitudes" (queries from 1e-3 to 1e3), "wide" (keys and values beyond
        what the cache's dtype can hold), "hollow" (every third token's key and value are zeros), "infinite" (keys hold -inf,
        so that some scores are -inf: for every third request all, else every third key's or the first half's; asked of
        backends that declare `nan_safe`), "nonfinite" (a NaN or an infinity in some live queries, keys or values; so too).
    poison: what lies in slots and pages that are not in use: "mixed" (NaN and infinities among it), "huge" or "zero".
    shared_prefix: leading tokens that all long enough requests keep in the same physical pages.
    new: what becomes of the new tokens: "written" to the cache, "cached" (they are there already; the call has no keys of its
        own), or "shared" (cached, and every request reads the pages of the longest one, its last page too).
    through: what is called: the implementation ("impl"), or the framework's layer as a person builds it ("layer").
    arrays: whose the batch's arrays are: "numpy", or on the device with host copies of the lengths ("device") or without any
        ("bare").
    layout: how rows lie in memory: "heads" ([T, H, D]), "flat" ([T, H * D]), "fused" (query, key and value are views of one
        array), "heads_first" (a view of [H, T, D]). A framework whose arrays have no strides has the first two.
    loose: by how much max_query_len and max_seq_len exceed what the batch needs.
    output_scale: of an output in fp8; None is an output in the query's dtype.
    padding: rows past the last real token, which must be left alone.
    check: the property (`attn.testing.properties`); "oracle" compares with the float64 reference.
    features: what else to ask of the backend: what a refusal is about, or `batch_invariant` where it is promised.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    attn_type: str = AttentionType.DECODER
    causal: bool = True
    sliding_window: int | Window | None = None
    logits_soft_cap: float | None = None
    alibi: bool | str = False
    sinks: str = ""
    tree: int = 0
    mla: tuple[int, ...] = ()
    topk: int = 0
    sparse: tuple[int, ...] = ()
    kv_sharing: bool = False
    scale: float | None = None
    lse: bool = False
    inputs: str = "randn"
    poison: str = "mixed"
    shared_prefix: int = 0
    new: str = "written"
    through: str = "impl"
    arrays: str = "numpy"
    layout: str = "heads"
    loose: int = 0
    output_scale: float | None = None
    padding: int = 0
    num_blocks: int | None = None
    check: str = "oracle"
    features: tuple[str, ...] = ()
    geometry_seed: int = 0
    data_seed: int = 0

    @property
    def is_encoder(self) -> bool:
        """Whether the keys are this call's own and no cache is involved."""
        return self.attn_type in ENCODER_TYPES

    @property
    def is_quantized(self) -> bool:
        return kv_cache_element(self.kv_cache_dtype, self.dtype) in CODES

    @property
    def is_wild(self) -> bool:
        """Whether keys and values that a row does not see may be NaN or infinite."""
        return self.poison == "mixed" and not self.is_encoder

    @property
    def hidden(self) -> float:
        """What a property puts into keys and values that some rows must not notice: NaN, or a large number."""
        return math.nan if self.is_wild else 2.0**14

    @property
    def query_size(self) -> int:
        """A query head's size: Dn + Dr for MLA, whose cached rows are wider."""
        return self.mla[1] + self.mla[2] if self.mla else self.head_size

    @property
    def output_size(self) -> int:
        """An output head's size: Dv for MLA."""
        return self.mla[3] if self.mla else self.head_size

    @property
    def element(self) -> str:
        """What the cache stores: a dtype, or the name of a cache whose rows bring their own scales."""
        if self.kv_cache_dtype in PER_TOKEN_HEAD:
            return self.kv_cache_dtype
        return kv_cache_element(self.kv_cache_dtype, self.dtype)

    @property
    def cache_scales(self) -> tuple[Scale, Scale]:
        """What codes of keys and of values are worth; 1 in a cache that stores the numbers themselves, whatever the layer's."""
        return (self.k_scale, self.v_scale) if self.is_quantized else (1.0, 1.0)

    @property
    def window(self) -> Window:
        """The inclusive pair that `sliding_window` means for this kind of attention."""
        return window_pair(self.sliding_window, self.attn_type)

    @property
    def sparse_pattern(self) -> dict[str, Any]:
        """The block-sparse pattern by the names of `attn.reference.block_sparse_mask`; empty without one."""
        names = ("block_size", "local_blocks", "vert_stride")
        return {**dict(zip(names, self.sparse, strict=False)), "homo_head": bool(self.sparse[3])} if self.sparse else {}

    def request(self) -> Request:
        """What this case asks of a backend."""
        asked = {
            Feature.NON_CAUSAL: not self.causal and self.attn_type == AttentionType.DECODER,
            Feature.TREE_MASK: bool(self.tree),
            Feature.LSE: self.lse,
            Feature.BLOCK_SPARSE: bool(self.sparse),
            Feature.MLA: bool(self.mla) and not self.topk,
            Feature.SPARSE_MLA: bool(self.topk),
            Feature.OUTPUT_SCALE: self.output_scale is not None,
            Feature.PER_HEAD_SCALES: isinstance(self.k_scale, tuple) or isinstance(self.v_scale, tuple),
            Feature.NAN_SAFE: self.is_wild or self.inputs == "infinite",
        }
        layer = layer_features(
            self.window, self.logits_soft_cap, self.alibi or None, self.sinks or None, "other" if self.kv_sharing else None
        )
        return Request(
            self.head_size,
            self.dtype,
            self.kv_cache_dtype,
            self.block_size,
            self.attn_type,
            layer | frozenset(f.value for f, needed in asked.items() if needed) | frozenset(self.features),
            self.num_heads,
            self.num_kv_heads,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """As `Recipe.from_json`; lengths must be two lists of as many ints."""
        case = super().from_json(text)
        lens = (case.query_lens, case.seq_lens)
        if not all(isinstance(x, tuple) and all(type(n) is int for n in x) for x in lens) or len(lens[0]) != len(lens[1]):
            raise ValueError(f"query_lens={lens[0]} and seq_lens={lens[1]} must be lists of as many ints")
        return case


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
