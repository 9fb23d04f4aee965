"""Backend limits, caller requests, and the reasons a backend rejects a request.

Limits are data: one frozen `Capabilities` per backend class. Selection, error messages, constructor checks, the
documentation's tables and the conformance cases are derived from it. A feature that is not listed is rejected.
Block sizes and the LSE are not fields, since vLLM's methods `get_supported_kernel_block_size` and
`can_return_lse_for_decode` already state them; `AttentionBackend.why_not` combines both.
"""

import enum
import fnmatch
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from attn.dtypes import DTYPES, KV_CACHE_DTYPES

FRAMEWORKS = ("torch", "jax")
#: Platforms of devices, of torch and of jax (`Device`).
PLATFORMS = ("cuda", "rocm", "xpu", "npu", "cpu", "tpu", "gpu")


class AttentionType:
    """
    Attention type.
    Use string to be compatible with `torch.compile`.
    """

    DECODER = "decoder"
    """Decoder attention between previous layer Q/K/V."""
    ENCODER = "encoder"
    """Encoder attention between previous layer Q/K/V for encoder-decoder."""
    ENCODER_ONLY = "encoder_only"
    """Encoder attention between previous layer Q/K/V."""
    ENCODER_DECODER = "encoder_decoder"
    """Attention between dec. Q and enc. K/V for encoder-decoder."""


ATTN_TYPES = (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)
#: Self attention over the tokens of the call, without a cache.
ENCODER_TYPES = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
#: Dtypes of a latent cache where any conversion is possible.
LATENT_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")


class Feature(enum.StrEnum):
    """A feature that a request may need beyond head size and dtype. The value is the public name."""

    NON_CAUSAL = "non_causal"  #: decoder attention with `causal=False` in the metadata
    SLIDING_WINDOW = "sliding_window"  #: keys p-left <= j
    TWO_SIDED_WINDOW = "two_sided_window"  #: a finite right bound as well, without causality
    SOFT_CAP = "soft_cap"  #: cap * tanh(s / cap), before the bias
    ALIBI = "alibi"
    SINKS = "sinks"
    LSE = "lse"  #: the log-sum-exp as a second output: natural log, float32, sinks excluded
    TREE_MASK = "tree_mask"
    SPANS = "spans"  #: rows that also see a range of keys of their own, or a prefix of their request (§18)
    MIXED_CAUSAL = "mixed_causal"  #: batches in which some requests are causal and others are not
    CHUNK_SIZE = "chunk_size"  #: rows see no key before the start of their chunk of positions (Llama 4)
    KV_SHARING = "kv_sharing"
    PER_HEAD_SCALES = "per_head_scales"  #: quantised cache with a scale for each kv head
    BLOCK_SPARSE = "block_sparse"
    MASK = "mask"  #: an arbitrary boolean mask (dense families)
    CASCADE = "cascade"
    DCP = "dcp"
    OUTPUT_SCALE = "output_scale"  #: quantised output
    HEAD_SIZE_V = "head_size_v"  #: value heads of another size than key heads
    BACKWARD = "backward"
    BATCH_INVARIANT = "batch_invariant"  #: a request's bits do not depend on the rest of the batch (§17)
    #: Data that a row does not see (stale slots, masked keys) may be NaN or infinite. Most vendors' kernels multiply it by a
    #: weight of 0, which is correct only for finite data (FlashAttention #1745, FlashInfer #1018).
    NAN_SAFE = "nan_safe"
    MLA = "mla"
    SPARSE_MLA = "sparse_mla"


#: Features of causality and windows.
WINDOW_FEATURES = frozenset({Feature.NON_CAUSAL, Feature.SLIDING_WINDOW, Feature.TWO_SIDED_WINDOW})
#: Features that change scores or the softmax denominator.
SCORE_FEATURES = frozenset({Feature.SOFT_CAP, Feature.ALIBI, Feature.SINKS})
#: Masks besides causality and the window.
MASK_FEATURES = frozenset({Feature.TREE_MASK, Feature.SPANS, Feature.MIXED_CAUSAL, Feature.CHUNK_SIZE})
#: Features of every general backend over a paged cache.
PAGED_FEATURES = WINDOW_FEATURES | SCORE_FEATURES | MASK_FEATURES | {Feature.LSE, Feature.KV_SHARING}

#: Features that no built-in backend serves yet (a test checks this against every record). A custom backend may.
UNSERVED = frozenset({Feature.CASCADE, Feature.HEAD_SIZE_V})

#: A backend with one of these features serves only requests that need it.
KINDS = (Feature.MLA, Feature.SPARSE_MLA, Feature.BLOCK_SPARSE)

#: Kinds of layers for which a backend can be requested (`layer_kind`).
LAYER_KINDS = ("full", "sliding", "chunked", "mla", "sparse_mla", "encoder", "cross")


class MultipleOf:
    """Any positive multiple of `base`, optionally within [minimum, maximum]."""

    base: int

    def __init__(self, base: int, minimum: int | None = None, maximum: int | None = None) -> None:
        self.base, self.minimum, self.maximum = base, minimum or base, maximum

    def __contains__(self, size: object) -> bool:
        return (
            isinstance(size, int)
            and size % self.base == 0
            and size >= self.minimum
            and (self.maximum is None or size <= self.maximum)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultipleOf) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.base, self.minimum, self.maximum))

    def __repr__(self) -> str:
        words = "any" if self.base == 1 else f"multiples of {self.base}"
        low = f" from {self.minimum}" if self.minimum > self.base else ""
        return words + low + (f" up to {self.maximum}" if self.maximum else "")


def supports_size(size: int, allowed: Iterable[int | MultipleOf]) -> bool:
    """Whether `size` is one of `allowed`, each an int or a `MultipleOf`.

    >>> [supports_size(size, (64, MultipleOf(16, 96, 256))) for size in (64, 80, 96, 272)]
    [True, False, True, False]
    """
    return any(size in rule if isinstance(rule, MultipleOf) else size == rule for rule in allowed)


def sizes_of_both(one: Iterable[int | MultipleOf], other: Iterable[int | MultipleOf]) -> tuple[int | MultipleOf, ...]:
    """Return the sizes, or rules for them, that two backends have in common.

    >>> sizes_of_both((64, MultipleOf(8, 32, 256)), (64, 100, MultipleOf(16)))
    (64, multiples of 16 from 32 up to 256)
    """
    one, other = tuple(one), tuple(other)
    exact = dict.fromkeys(size for size in (*one, *other) if isinstance(size, int))
    shared: list[int | MultipleOf] = [size for size in exact if supports_size(size, one) and supports_size(size, other)]
    for a in (rule for rule in one if isinstance(rule, MultipleOf)):
        for b in (rule for rule in other if isinstance(rule, MultipleOf)):
            # Common multiples of two bases are the multiples of their least common multiple; the lower end is rounded
            # up to one, so that `least` itself is a size that both support.
            base, ends = math.lcm(a.base, b.base), [end for end in (a.maximum, b.maximum) if end is not None]
            least, most = -(-max(a.minimum, b.minimum) // base) * base, min(ends, default=None)
            # An empty range is left out, since a rule that no size satisfies would be shown as a supported size.
            if most is None or least <= most:
                shared.append(MultipleOf(base, least, most))
    return tuple(shared)


@dataclass(frozen=True)
class Device:
    """Description of a device, present or not.

    `platform` is cuda, rocm, xpu or cpu under torch and tpu, gpu or cpu under jax; `arch` is `sm_90`, `gfx942`, `v6e`,
    `x86_64`; `name` is the name to display.
    """

    framework: str
    platform: str
    name: str = ""
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.name or self.platform} ({self.framework})"


@dataclass(frozen=True)
class Request:
    """The requirements of a caller: strings and ints only, hashable, comparable, printable.

    `block_size` None means without a paged cache. `features` hold `Feature` values.
    """

    head_size: int
    dtype: str
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    attn_type: str = AttentionType.DECODER
    features: frozenset[str] = frozenset()
    num_heads: int | None = None
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("head_size", "block_size", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            if value is None and name != "head_size":
                continue
            # NumPy's integers are rejected here, and converted by `make_request`: a request is a key of caches and is
            # written to JSON, which does not take them.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive int")
        check_known("dtype", self.dtype, DTYPES)
        check_known("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_known("attn_type", self.attn_type, ATTN_TYPES)
        # The only way to set a field of a frozen class. Plain strings replace members of `Feature`, so that requests
        # compare equal, and print the same, whichever the caller passed.
        object.__setattr__(self, "features", frozenset(feature_name(f) for f in self.features))
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")

    def __str__(self) -> str:
        words = [f"head_size={self.head_size}", f"dtype={self.dtype}"]
        for spec in fields(self)[2:]:
            value = getattr(self, spec.name)
            if value != spec.default and spec.name != "features":
                words.append(f"{spec.name}={value}")
        if self.features:
            words.append(f"features={{{', '.join(sorted(self.features))}}}")
        return " ".join(words)


def layer_kind(attn_type: str, features: Collection[str]) -> str:
    """Return the kind, one of `LAYER_KINDS`, of a layer with these features, as `attn.reports.model_config` names it.

    The type decides first, then latent attention, chunks, and the window, as for the groups of vLLM's `backend_per_kind`.
    """
    if attn_type != AttentionType.DECODER:
        return "encoder" if attn_type in ENCODER_TYPES else "cross"
    kinds = {
        Feature.MLA: "mla",
        Feature.SPARSE_MLA: "sparse_mla",
        Feature.CHUNK_SIZE: "chunked",
        Feature.SLIDING_WINDOW: "sliding",
    }
    return next((name for feature, name in kinds.items() if feature in features), "full")


def feature_name(feature: str) -> str:
    """Return the public name of `feature`. Raises ValueError with the known names for an unknown one."""
    try:
        return Feature(feature).value
    except ValueError:
        raise ValueError(f"feature {str(feature)!r} is unknown; known: {', '.join(Feature)}") from None


def check_known(name: str, value: str, known: Collection[str]) -> str:
    """Return `value` if it is one of the strings in `known`. Raises ValueError with those otherwise."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(known)}")
    return value


def arch_matches(arch: str, rule: str) -> bool:
    """Whether `arch` satisfies `rule`: `sm_90` matches exactly, `sm_80+` that number or above, `gfx9*` by pattern."""
    if rule.endswith("+"):
        prefix, _, number = rule[:-1].rpartition("_")
        # "sm_90a" and "sm_100f" count as 90 and 100: the letter names a feature set of the same generation. Without an
        # underscore ("gfx942") the prefixes differ, so "+" never applies to AMD's names, whose numbers are not ordered.
        head, _, version = arch.rpartition("_")
        digits = "".join(c for c in version if c.isdigit())
        return head == prefix and bool(digits) and int(digits) >= int(number)
    return fnmatch.fnmatchcase(arch, rule)


def with_lse(features: frozenset[str], returned: bool) -> frozenset[str]:
    """Return `features` with `lse` added or removed, according to whether the implementation returns it."""
    return features | {Feature.LSE.value} if returned else features - {Feature.LSE.value}


def _listed(values: Collection[object]) -> str:
    return ", ".join(map(str, values)) or "none"


@dataclass(frozen=True)
class Capabilities:
    """The limits of one backend class. Tuples are in display order.

    `packages` are import names that must be present (not imported until the backend is chosen), `a|b` where either
    suffices; `install` is the pip argument that installs them. `archs` maps a platform to rules, of which `Device.arch` must
    satisfy one; a platform without an entry accepts any. `priority` places a backend that is not on the platform's own
    list: above 0 before it, otherwise after. `refusals` pairs features that are not served with the reason.
    """

    framework: str
    platforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_sizes: tuple[int | MultipleOf, ...] = (MultipleOf(1),)
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    attn_types: tuple[str, ...] = (AttentionType.DECODER,)
    features: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    install: str = ""
    archs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    priority: int = 0
    refusals: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("features", "platforms", "dtypes", "head_sizes", "kv_cache_dtypes", "attn_types", "packages"):
            values = getattr(self, name)
            # A string is a collection too, and contains every part of itself.
            if isinstance(values, str) or not isinstance(values, Collection):
                raise ValueError(f"{name}={values!r} must be a tuple: ({values!r},)")
            object.__setattr__(self, name, tuple(values))
        if not all(isinstance(size, MultipleOf) or (isinstance(size, int) and size > 0) for size in self.head_sizes):
            raise ValueError(f"head_sizes={self.head_sizes!r} must be sizes, each a positive int or a MultipleOf")
        if not isinstance(self.priority, int):
            raise ValueError(f"priority={self.priority!r} must be an int")
        if isinstance(self.refusals, dict) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.refusals):
            raise ValueError(f"refusals={self.refusals!r} must be pairs: ((feature, why), ...)")
        object.__setattr__(self, "features", frozenset(feature_name(f) for f in self.features))
        if both := sorted(self.features.intersection(feature_name(f) for f, _ in self.refusals)):
            raise ValueError(f"features and refusals both name {', '.join(both)}")
        check_known("framework", self.framework, FRAMEWORKS)
        for name, words, known in (  # a misspelled name would never match
            ("platform", self.platforms, PLATFORMS),
            ("dtype", self.dtypes, DTYPES),
            ("kv_cache_dtype", self.kv_cache_dtypes, KV_CACHE_DTYPES),
            ("attn_type", self.attn_types, ATTN_TYPES),
        ):
            for word in words:
                check_known(name, word, known)

    def reasons(self, request: Request, device: Device | None = None, features: frozenset[str] | None = None) -> list[str]:
        """Return every reason why `request` (on `device`) is not served; empty when it is. `features`: the served features,
        where the backend's methods change what the record lists."""
        why = []
        if device is not None:
            why += self.device_reasons(device)
        if not supports_size(request.head_size, self.head_sizes):
            why.append(f"head_size={request.head_size} (supports {_listed(self.head_sizes)})")
        for name, allowed in (("dtype", self.dtypes), ("kv_cache_dtype", self.kv_cache_dtypes), ("attn_type", self.attn_types)):
            if getattr(request, name) not in allowed:
                why.append(f"{name}={getattr(request, name)} (supports {_listed(allowed)})")
        why += [self.not_supported(f) for f in sorted(request.features - (self.features if features is None else features))]
        why += [f"serves {feature} only" for feature in KINDS if feature in self.features and feature not in request.features]
        return why

    def not_supported(self, feature: str) -> str:
        """Return the reason for refusing a feature: its name, and why it is not served if that is known."""
        why = "no built-in backend serves it yet" if feature in UNSERVED else dict(self.refusals).get(feature)
        return f"{feature} not supported" + (f": {why}" if why else "")

    def device_reasons(self, device: Device) -> list[str]:
        """Return why this backend cannot run on `device` at all; empty when it can."""
        if device.framework != self.framework:
            return [f"framework={device.framework} (supports {self.framework})"]
        if device.platform not in self.platforms:
            return [f"platform={device.platform} (supports {_listed(self.platforms)})"]
        rules = dict(self.archs).get(device.platform)
        if rules and not any(arch_matches(device.arch, rule) for rule in rules):
            return [f"arch={device.arch or 'unknown'} (supports {_listed(rules)})"]
        return []


@dataclass(frozen=True)
class Candidate:
    """One entry of a priority list, loaded if possible.

    `backend` is the class, or None with the reason in `problem`; `missing` lists required packages that were not
    found; `error` is the exception that caused `problem`, if any.
    """

    name: str
    path: str = ""
    backend: type[Any] | None = None
    problem: str = ""
    missing: tuple[str, ...] = ()
    error: Exception | None = field(default=None, compare=False, repr=False)
