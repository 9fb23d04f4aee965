"""Benchmark cases: a batch, a layer's shape, and the bytes and operations that both require.

A batch is `[count]q<new tokens>[k][s<tokens in the cache>[k]]`, joined by `_`, where k multiplies by 1,024: `64q1s4k` is 64
decodes, `2q2k_32q1s1k` two prompts and 32 decodes. The grammar is that of vLLM's `attention_benchmarks`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from attn import dtypes
from attn.arguments import positive_int
from attn.capabilities import Feature, Request
from attn.reports.machines import pairs
from attn.selector import make_request

_PART = re.compile(r"([1-9]\d*|)q(\d+)(k?)(?:s(\d+)(k?))?")
#: Relative RMS error against float32 above which a row is wrong: twice the rounding error of one product's operands.
LIMITS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-4}
#: Head sizes of a latent layer before absorption, as in DeepSeek-V2 and V3: a key's latent part, its rotary part (cached
#: unchanged, after the latent), and a value.
NOPE, ROPE, VALUE = 128, 64, 128
#: Compositions of a batch (`kind_of`).
KINDS = ("decodes", "speculation", "chunks", "prompts", "mixtures")
SPECULATED = 8  #: most new tokens of a request over cached ones that count as speculation; more are a chunk
_BATCH_WIDTH = 40  #: characters of a batch that `abbreviated` leaves as it is


@dataclass(frozen=True)
class BenchCase:
    """A benchmark case. `heads` is `query heads/kv heads`; block_size is in tokens; a token sees the last `window` keys,
    itself included (None: all); `sinks` gives every query head a sink. `mla`: a latent layer (`BenchCase.latent` has its usual
    shape), in which all heads read one cached row of `head_size`, latent and rotary part together."""

    batch: str
    heads: str = "32/8"
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    window: int | None = None
    sinks: bool = False
    mla: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for malformed heads, a size or window below 1, a dtype without a limit, and a latent layer with
        several kv heads or without a latent part."""
        for name in ("head_size", "block_size"):
            positive_int(name, getattr(self, name))
        if not re.fullmatch(r"[1-9]\d*(/[1-9]\d*)?", self.heads):
            raise ValueError(f"heads={self.heads!r} must be <query heads>/<kv heads>, such as 32/8")
        if self.mla and self.heads.partition("/")[2] not in ("", "1"):
            raise ValueError(f"heads={self.heads!r} with mla must be <query heads>, such as 128: all read the same latent")
        if self.mla and self.head_size <= ROPE:
            raise ValueError(
                f"head_size={self.head_size} with mla must be above {ROPE}: the latent plus {ROPE} rotary elements"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1: a token sees itself")
        if self.dtype not in LIMITS:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(LIMITS)}")

    @classmethod
    def latent(cls, batch: str, **changes: Any) -> "BenchCase":
        """Return a latent layer of DeepSeek-V3's shape: 128 heads, rows of 512 + 64, pages of 64."""
        # `changes` may set any of them but mla.
        return cls(batch, **{"heads": "128", "head_size": 576, "block_size": 64, **changes, "mla": True})

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "BenchCase":
        """Return the case of a row as `BenchReport.to_dict` writes it; fields missing in older files have their defaults."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    @property
    def num_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    @property
    def num_kv_heads(self) -> int:
        # All heads of a latent layer read one row.
        return int(self.heads.partition("/")[2] or (1 if self.mla else self.num_heads))

    @property
    def kv_lora_rank(self) -> int:
        """Size of a latent layer's latent part."""
        return self.head_size - ROPE

    @property
    def features(self) -> frozenset[str]:
        """The features that the case requires of a backend."""
        needed = {Feature.SLIDING_WINDOW: self.window is not None, Feature.SINKS: self.sinks, Feature.MLA: self.mla}
        return frozenset(feature.value for feature, is_needed in needed.items() if is_needed)

    def request(self) -> Request:
        """Return the selector's request for the case's layer."""
        heads: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return make_request(self.head_size, self.dtype, self.kv_cache_dtype, self.block_size, features=self.features, **heads)

    def __str__(self) -> str:
        words = [self.batch, f"{self.heads}x{self.head_size}", f"p{self.block_size}"]
        words += [f"w{self.window}"] if self.window else []
        words += ["sinks"] if self.sinks else []
        words += ["mla"] if self.mla else []
        words += [self.kv_cache_dtype] if self.kv_cache_dtype != "auto" else []
        return " ".join(words)


#: The default batches of `attn bench`: decode, long decode, speculative, prefill, mixed.
SUITE = (
    *(BenchCase("64q1s4k"), BenchCase("16q1s32k", "64/8", block_size=64), BenchCase("128q1s2k"), BenchCase("q1s32k")),
    *(BenchCase("64q1s4k", "64/8", 64), BenchCase("16q4s1k"), BenchCase("4q4k"), BenchCase("4q4k", block_size=128)),
    *(BenchCase("2q2k_32q1s1k"), BenchCase("1q512s8k_63q1s4k"), BenchCase("64q1s4k", kv_cache_dtype="fp8")),
    *(BenchCase("64q1s4k", kv_cache_dtype="int8"), BenchCase("4q4k", kv_cache_dtype="fp8")),
)
#: The same kinds at the size of a model served on a CPU: seconds per row, larger than the CPU's caches.
CPU_SUITE = tuple(
    BenchCase(batch, "8/2", 64, dtype="float32") for batch in ("q1s4k", "16q1s1k", "16q4s512", "q1k", "q256s4k", "q512_16q1s1k")
)
#: Decodes beside a prompt and chunks of prompts, with contexts of different lengths, which are expanded in several turns.
_RAGGED = "48q1s4k_q2ks4k_q512s8k_q1ks16k_q256s32k_q64s60k_q32s1k_q300"
#: Latent layers, with all heads and with one rank's of eight: decode, long decode, speculative, prefill, mixed; many chunks of
#: few rows.
MLA_SUITE = (
    *map(BenchCase.latent, ("64q1s4k", "16q1s32k", "16q4s1k", "4q4k", "2q2k_32q1s1k", "1q512s8k_63q1s4k", _RAGGED)),
    BenchCase.latent("64q1s4k", heads="16"),
    BenchCase.latent("64q1s4k", kv_cache_dtype="fp8"),
    BenchCase.latent(_RAGGED, heads="16"),
    BenchCase.latent("32q1s4k_64q128s8k", heads="16"),
)
_RAGGED_ON_CPU = "16q1s1k_q128s4k_q64s1k_q32s2k_q100"
MLA_CPU_SUITE = tuple(
    BenchCase.latent(batch, heads="8", dtype="float32") for batch in (*(case.batch for case in CPU_SUITE), _RAGGED_ON_CPU)
)


@dataclass(frozen=True)
class Timing:
    """One kernel's time, with its relative RMS error (NaN: not compared). None: not measured.

    Milliseconds per call: median and percentiles with a cache full of dirty lines (`ms`), and the median with a
    clean cache (`ms_clean`). Host microseconds: to build a batch's metadata (`build_us`), to launch one call (`host_us`).

    `replayed`: the call is a captured graph (torch) or one compiled program (jax). `call_ms` is the time of the call in eager
    torch. `kernel_ms` is the time without launches: the sum of a GPU's kernels, the time inside torch's operators on
    a CPU, the time that one more attention adds to a compiled program.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    ms_clean: float | None = None
    build_us: float | None = None
    host_us: float | None = None
    error: float = math.nan
    replayed: bool = False
    call_ms: float | None = None
    kernel_ms: float | None = None


def parse(batch: str) -> list[tuple[int, int]]:
    """Parse a batch into [(new tokens, tokens in the cache including them)], one per request. Default cache: the new tokens.

        >>> parse("2q1s1k_q5")
        [(1, 1024), (1, 1024), (5, 5)]

    Raises ValueError for text outside the grammar, and for fewer tokens in the cache than new tokens.
    """
    requests = []
    for part in batch.split("_"):
        # `fullmatch`, so that a batch with a typing error is refused instead of read in part.
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"batch={batch!r}: {part!r} is not <count>q<new tokens>[k][s<tokens in the cache>[k]], as in 64q1s4k"
            )
        # An empty count is 1, and a part without `s` has no context.
        count, q, q_k, kv, kv_k = match.groups()
        n = int(q) * (1024 if q_k else 1)
        m = int(kv) * (1024 if kv_k else 1) if kv else n
        if n < 1 or m < n:
            raise ValueError(f"batch={batch!r}: {part!r} has {n} new tokens and {m} in the cache: need 1 <= new <= cached")
        requests += [(n, m)] * int(count or 1)
    return requests


def grammar(lens: Iterable[tuple[int, int]]) -> str:
    """Format (new tokens, tokens in the cache) pairs, the inverse of `parse`. Equal neighbours share a part.

    >>> grammar([(1, 4096)] * 64 + [(2048, 2048)])
    '64q1s4k_q2k'
    """
    return "_".join(_part(len(list(same)), n, m) for (n, m), same in groupby(lens))


def _part(count: int, n: int, m: int) -> str:
    return f"{count if count > 1 else ''}q{_short(n)}" + (f"s{_short(m)}" if m != n else "")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def abbreviated(case: str) -> str:
    """Shorten the batch of a printed case to its first parts and the number of the others, if it is long.

    >>> abbreviated("_".join(f"q1s{m}" for m in range(1000, 1099)) + " 32/8x128 p16")
    'q1s1000_q1s1001_q1s1002..+96 32/8x128 p16'
    """
    batch, space, layer = case.partition(" ")
    if len(batch) <= _BATCH_WIDTH:
        return case
    parts = batch.split("_")
    # 16 characters are left for "..+<number>".
    kept = max(1, sum(len("_".join(parts[: count + 1])) <= _BATCH_WIDTH - 16 for count in range(len(parts))))
    return f"{'_'.join(parts[:kept])}..+{len(parts) - kept}{space}{layer}"


def kind_of(lens: Sequence[tuple[int, int]]) -> str:
    """Return the kind (`KINDS`) of a batch of (new tokens, tokens in the cache) pairs.

    Decodes have one new token each, speculation 2 to 8 and chunks more, over cached tokens; prompts have no cached tokens.
    """
    kinds = {"decodes" if n == 1 else "prompts" if n == m else "speculation" if n <= SPECULATED else "chunks" for n, m in lens}
    return kinds.pop() if len(kinds) == 1 else "mixtures"


def flops(case: BenchCase) -> int:
    """Count the operations of the two products over the pairs that causality and the window allow."""
    lens = parse(case.batch)
    if case.mla:
        return case.num_heads * sum(_latent_flops(case, n, m) for n, m in lens)
    # 2 products of 2 operations per pair and element: scores, and weighted values.
    return 4 * case.num_heads * case.head_size * sum(pairs(n, m, case.window or m) for n, m in lens)


def _latent_flops(case: BenchCase, n: int, m: int) -> int:
    """Count a head's operations over a latent in the cheaper form: absorbed, or expanded, which first computes the context's
    keys and values from it. The up-projection of new tokens, needed in either form, is not counted."""
    seen, rank = pairs(n, m, case.window or m), case.kv_lora_rank
    # A score over the whole row, a value over its latent part.
    absorbed = 2 * (case.head_size + rank) * seen
    # The context's latents are multiplied by both up-projections, once for all rows of the request.
    expanded = 2 * (NOPE + ROPE + VALUE) * seen + 2 * rank * (NOPE + VALUE) * (m - n)
    return min(absorbed, expanded)


def nbytes(case: BenchCase) -> int:
    """Count the bytes that must move: each key and value that a row sees (of a latent layer: the cached rows), queries and
    outputs, once each."""
    head = NOPE + ROPE + VALUE if case.mla else 2 * case.head_size
    rows = sum(n for n, _ in parse(case.batch))
    return _token_bytes(case) * _seen(case) + case.num_heads * head * dtypes.DTYPES[case.dtype].itemsize * rows


def key_bytes(case: BenchCase) -> int:
    """Count the bytes of the keys that a row sees (of a latent layer: of the cached rows, which are keys and values)."""
    return _token_bytes(case) * _seen(case) // (1 if case.mla else 2)


def cache_bytes(case: BenchCase) -> int:
    """Count the bytes of the blocks that hold the batch."""
    blocks = sum(-(-m // case.block_size) for _, m in parse(case.batch))
    return _token_bytes(case) * case.block_size * blocks


def _token_bytes(case: BenchCase) -> int:
    """Count the bytes of a token in the cache."""
    stored = dtypes.DTYPES[dtypes.kv_cache_element(case.kv_cache_dtype, case.dtype)].itemsize
    if case.mla:
        return stored * dtypes.kv_cache_row(case.kv_cache_dtype, case.head_size)
    return stored * 2 * case.num_kv_heads * case.head_size


def _seen(case: BenchCase) -> int:
    """Count the cached tokens that at least one row sees."""
    # The last row sees `window` keys, and each row before it one more at the left end.
    return sum(min(m, n + (case.window or m) - 1) for n, m in parse(case.batch))
