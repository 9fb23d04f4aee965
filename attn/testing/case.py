"""A conformance case: a description of a batch, a layer and their data, short enough to paste into a terminal.

A case is plain data. `Case.json()` contains the fields that differ from the defaults and `Case.from_json` restores the case,
so every failure prints the command that repeats it. Geometry (pages, stale entries, trees) and data (array contents) have
separate seeds, so that one can vary while the other stays the same.
"""

import json
import math
import shlex
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self

from attn.arguments import Window, layer_features, window_pair
from attn.capabilities import ENCODER_TYPES, AttentionType, Feature, Request
from attn.dtypes import PER_TOKEN_HEAD, kv_cache_element
from attn.testing.bits import CODES

Scale = float | tuple[float, ...]


class Recipe:
    """A frozen dataclass of plain data that converts to one line of JSON and back."""

    #: Options that follow the backend's name in the command that repeats a case.
    option = ""
    #: Field -> its values, for fields that are words.
    words: ClassVar[dict[str, tuple[bool | str, ...]]] = {}

    def __str__(self) -> str:
        return str(self.name)  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def plain(cls, without: Collection[str], **simplest: Any) -> dict[str, Any]:
        """Return the plain values of the fields: `simplest`, else their defaults; without required fields and some others."""
        defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        # A required field has no default (MISSING) and so no plain value, unless `simplest` gives one.
        return {name: value for name, value in (defaults | simplest).items() if value is not MISSING and name not in without}

    def json(self) -> str:
        """Return the fields that differ from the defaults, on one line."""
        specs = fields(self)  # type: ignore[arg-type]
        # A required field's default is MISSING, which no value equals, so it is always stated.
        stated = {f.name: getattr(self, f.name) for f in specs if getattr(self, f.name) != f.default}
        return json.dumps(stated, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the case of a `json()` text.

        Raises ValueError if `text` is not a JSON object, lacks a required field or has an unknown one, or an unknown word.
        """
        try:
            stated = json.loads(text)
            if not isinstance(stated, dict):
                raise TypeError("it must be a JSON object")
            # Checked here, because the message of the dataclass names `__init__` and not the text that a person pasted.
            known = {f.name: f.default is MISSING for f in fields(cls)}  # type: ignore[arg-type]
            if unknown := [name for name in stated if name not in known]:
                raise TypeError(f"unknown field {unknown[0]!r} (fields: {', '.join(known)})")
            if missing := [name for name, required in known.items() if required and name not in stated]:
                raise TypeError(f"missing fields: {', '.join(missing)} (pass what a failure printed after --repro)")
            # JSON has no tuples, and a case with a list could not be hashed, as the cache of `draw` needs.
            case = cls(**{name: _tuples(value) for name, value in stated.items()})
            # An unknown word would be drawn as the ordinary case is, and pass.
            for name, words in cls.words.items():
                if (word := getattr(case, name)) not in words:
                    raise TypeError(f"{name}={word!r} must be one of {', '.join(map(str, words))}")
            return case
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{text!r} is not a case: {error}") from error

    def repro(self, backend: str = "") -> str:
        """Return the command that runs this case again."""
        target = f" {backend}" if backend else ""
        return f"python -m attn.testing{target}{self.option} --repro {shlex.quote(self.json())}"


@dataclass(frozen=True)
class Case(Recipe):
    """A call and the property to check on it.

    query_lens, seq_lens: new tokens and tokens in the cache (new ones included), one entry per request.
    k_scale, v_scale: scales of a quantised cache; a tuple has one entry per kv head.
    alibi: True for the usual slopes, "randn" for random slopes of both signs and some zeros.
    sinks: "" (none), "randn", "log_length": about ln of the longest context, where a sink matters most, or "infinite": some
        heads have a sink of -inf (no effect) or inf (which takes all weight).
    tree: width W of a random draft tree for each request; 0: none; -1: a mask [R, 0, 0], which contains no tree.
    causal: a bool, or "mixed": every other request is causal.
    spans: the approximate number of tokens in each bidirectional range; 0: none; -1: each row is a range, which changes
        nothing.
    prefix: the number of first keys that all rows of a request see (at most its length); -1: a prefix of 0 tokens.
    chunk_size: positions per chunk of a chunked layer; 0: none.
    span_window: whether the window's left bound cuts spans.
    mla: (L, Dn, Dr, Dv) of multi-head latent attention, with `head_size` L + Dr and num_kv_heads 1; (): none.
    topk: with `mla`, the most keys that an indexer selects for each row (`Call.indices`); 0: all keys.
    sparse: (block_size, local_blocks, vert_stride, homo_head) of a block-sparse pattern (docs/semantics.md §13); (): none.
    kv_sharing: the layer reads another layer's cache; its own keys and values are NaN.
    lse: request the log-sum-exp too.
    inputs: "randn", "needle" (every query looks for one boundary key), "loud" (scores about 1e4), "far" (one score of
        -524288), "constant" (all of V is one number), "magnitudes" (queries from 1e-3 to 1e3), "wide" (keys and values out
        of the range of the cache's dtype), "hollow" (every third token's key and value are zeros), "infinite" (some keys
        contain -inf, so that some scores are -inf: all of every third request, otherwise those of every third key or of the
        first half; only for backends that declare `nan_safe`), "nonfinite" (NaN or infinities in some live queries, keys
        or values; likewise).
    poison: contents of slots and pages that are not in use: "mixed" (includes NaN and infinities), "huge" or "zero".
    shared_prefix: leading tokens that all long enough requests keep in the same physical pages.
    new: "written": the call writes the new tokens to the cache; "cached": they are in the cache already and the call has no
        keys; "shared": cached, and every request reads the pages of the longest one, including its last page.
    through: what is called: the implementation ("impl"), or the framework's layer as a user builds it ("layer").
    arrays: the batch's arrays: "numpy", or on the device with ("device") or without ("bare") host copies of the lengths.
    layout: memory layout of rows: "heads" ([T, H, D]), "flat" ([T, H * D]), "fused" (query, key and value are views of one
        array, at odd addresses and strides; with `mla`, the query is a view of another one), "heads_first" (a view of
        [H, T, D]). Frameworks whose arrays have no strides support the first two.
    loose: by how much max_query_len and max_seq_len exceed what the batch needs.
    output_scale: scale of an fp8 output; None: an output in the query's dtype.
    padding: rows past the last real token, which must not be written.
    check: the property (`attn.testing.properties`); "oracle" compares with the float64 reference.
    features: further requested features: the subject of a refusal, or `batch_invariant` for backends that declare it.
    """

    words = {
        "alibi": (False, True, "randn"),
        "sinks": ("", "randn", "log_length", "infinite"),
        "causal": (True, False, "mixed"),
        "inputs": ("randn", "needle", "loud", "far", "constant", "magnitudes", "wide", "hollow", "infinite", "nonfinite"),
        "poison": ("mixed", "huge", "zero"),
        "new": ("written", "cached", "shared"),
        "through": ("impl", "layer"),
        "arrays": ("numpy", "device", "bare"),
        "layout": ("heads", "flat", "fused", "heads_first"),
    }

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
    causal: bool | str = True
    sliding_window: int | Window | None = None
    logits_soft_cap: float | None = None
    alibi: bool | str = False
    sinks: str = ""
    tree: int = 0
    spans: int = 0
    prefix: int = 0
    chunk_size: int = 0
    span_window: bool = False
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
        """Whether attention is over the call's own keys, without a cache."""
        return self.attn_type in ENCODER_TYPES

    @property
    def is_quantized(self) -> bool:
        return self.kv_cache_dtype in PER_TOKEN_HEAD or kv_cache_element(self.kv_cache_dtype, self.dtype) in CODES

    @property
    def is_wild(self) -> bool:
        """Whether keys and values that a row does not attend to may be NaN or infinite."""
        return self.poison == "mixed" and not self.is_encoder

    @property
    def hidden(self) -> float:
        """The value of keys and values that must not affect some rows: NaN, or a large number."""
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
        """The cache's element type: a dtype, or the name of a cache whose rows contain their own scales."""
        # The scale stands between the codes, so the row is no array of the codes' dtype.
        if self.kv_cache_dtype in PER_TOKEN_HEAD:
            return self.kv_cache_dtype
        return kv_cache_element(self.kv_cache_dtype, self.dtype)

    @property
    def cache_scales(self) -> tuple[Scale, Scale]:
        """The scales of the cache's codes of keys and of values; 1 for an unquantised cache, which has none."""
        return (self.k_scale, self.v_scale) if self.is_quantized else (1.0, 1.0)

    @property
    def window(self) -> Window:
        """`sliding_window` as an inclusive (left, right) pair for this attention type."""
        return window_pair(self.sliding_window, self.attn_type)

    @property
    def sparse_pattern(self) -> dict[str, Any]:
        """The block-sparse pattern as arguments of `attn.reference.block_sparse_mask`; empty without a pattern."""
        names = ("block_size", "local_blocks", "vert_stride")
        return {**dict(zip(names, self.sparse, strict=False)), "homo_head": bool(self.sparse[3])} if self.sparse else {}

    def request(self) -> Request:
        """Return the case's request to a backend."""
        requested = {
            # Encoders and cross attention are never causal: their type says it, not a feature. "mixed" needs both features.
            Feature.NON_CAUSAL: self.causal is not True and self.attn_type == AttentionType.DECODER,
            Feature.TREE_MASK: bool(self.tree),
            Feature.SPANS: bool(self.spans or self.prefix),
            Feature.MIXED_CAUSAL: self.causal == "mixed",
            Feature.LSE: self.lse,
            Feature.BLOCK_SPARSE: bool(self.sparse),
            Feature.MLA: bool(self.mla) and not self.topk,
            Feature.SPARSE_MLA: bool(self.topk),
            Feature.OUTPUT_SCALE: self.output_scale is not None,
            Feature.PER_HEAD_SCALES: isinstance(self.k_scale, tuple) or isinstance(self.v_scale, tuple),
            # A request of nan_safe makes `Subject.serves` drop the case for backends that multiply masked values by 0.
            Feature.NAN_SAFE: self.is_wild or self.inputs == "infinite",
        }
        layer = layer_features(
            self.window,
            self.logits_soft_cap,
            self.alibi or None,
            self.sinks or None,
            "other" if self.kv_sharing else None,
            self.chunk_size or None,
        )
        return Request(
            self.head_size,
            self.dtype,
            self.kv_cache_dtype,
            self.block_size,
            self.attn_type,
            layer | frozenset(f.value for f, needed in requested.items() if needed) | frozenset(self.features),
            self.num_heads,
            self.num_kv_heads,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """As `Recipe.from_json`; query_lens and seq_lens must be lists of equally many natural numbers."""
        case = super().from_json(text)
        lens = (case.query_lens, case.seq_lens)
        # `type`, not isinstance: JSON's true is an int to Python, and would be a request of one token.
        natural = all(isinstance(x, tuple) and all(type(n) is int and n >= 0 for n in x) for x in lens)
        if not natural or len(lens[0]) != len(lens[1]):
            raise ValueError(f"query_lens={lens[0]} and seq_lens={lens[1]} must be lists of equally many natural numbers")
        return case


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
