"""The framework-neutral benchmark: a layer over random pages, the check of its output, and timed calls.

Inputs are random and pages are at random places. The output of the timed calls is compared with attention by the formula
(`attn.functional`) in float32 over the cache as it is stored, over up to three requests of each length.
"""

import math
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from attn import dtypes
from attn.arrays import ops_of
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.errors import UnsupportedError
from attn.functional import DenseParams, OptionalArrays, attend_rows
from attn.tools.bench.case import NOPE, ROPE, VALUE, BenchCase, Timing, parse

CODE_SCALE = 0.03  #: for an int8 cache, with codes up to about +-90; other caches contain values of about 1
LATENT_SCALE = 0.02  #: for an fp8 cache of latents, with codes up to about +-50, so that a kernel that omits the scale fails
_PATIENCE = 2000.0  #: time limit for all timed calls of a slow kernel, in milliseconds


def timing(times: Sequence[float], **figures: Any) -> Timing:
    """Return the median, p20 and p80 of sorted times in milliseconds, and other fields."""
    return Timing(statistics.median(times), times[len(times) // 5], times[4 * len(times) // 5], **figures)


class BaseWorkload:
    """A layer, a filled cache and one batch on the device. `impl_cls` replaces the backend's own implementation.

    The call of a latent layer (MLA) is the layer's: it writes the batch's new rows (the same each time), takes queries and
    returns outputs by head, and uses absorbed or expanded attention as the batch requires.
    """

    framework: ClassVar[str]
    sinks: Any = None  #: [H]
    weights: Any = None  #: [L, H, Dn + Dv] of a latent layer
    query: Any
    output: Any

    def __init__(self, case: BenchCase, backend: str, device: Any = None, impl_cls: Any = None) -> None:
        import numpy as np

        # Codes and scales share a row's bytes there, so random numbers are no valid cache.
        if case.kv_cache_dtype in dtypes.PER_TOKEN_HEAD:
            raise UnsupportedError(
                f"kv_cache_dtype={case.kv_cache_dtype}: the benchmark does not support caches with scales between codes"
            )
        cls: Any = AttentionBackendEnum[backend].get_class()
        self.case, self.lens, self.device = case, parse(case.batch), device
        self.softmax_scale = (NOPE + ROPE if case.mla else case.head_size) ** -0.5
        # In random order, as a server's cache is after a while.
        pages = [-(-m // case.block_size) for _, m in self.lens]
        tables: Any = np.split(np.random.default_rng(0).permutation(sum(pages)).astype(np.int32), np.cumsum(pages)[:-1])
        self.tables, (new, cached) = tables, zip(*self.lens, strict=True)
        spec = KVCacheSpec(case.block_size, case.num_kv_heads, case.head_size, case.dtype, case.kv_cache_dtype, sum(pages))
        self.batch = CommonAttentionMetadata.from_lens(new, cached, tables, case.block_size)
        self._builder = cls.get_builder_cls()(spec, ["layer"], None, device)
        # Before the cache: the layer's query has as many rows as the metadata, which jax pads.
        self.metadata = self.build()
        self._fill(cls, impl_cls or cls.get_impl_cls(), spec)

    @abstractmethod
    def _fill(self, cls: Any, impl_cls: Any, spec: KVCacheSpec) -> None:
        """Fill the cache; create the layer and the queries."""

    @abstractmethod
    def dense(self, r: int) -> tuple[Any, ...]:
        """Return request r's keys and values [S, K, D], or latent rows [S, L + Dr], in float32; after them there may be
        others."""

    @abstractmethod
    def _wrong(self, rows: slice, stored: tuple[Any, ...], first: int) -> tuple[float, float]:
        """Return the sums of squares of `output`'s error and of the exact rows, which begin at position `first`."""

    def build(self) -> Any:
        return self._builder.build(0, self.batch)

    def _layer(self, impl_cls: Any) -> Any:
        case, more = self.case, {} if self.sinks is None else {"sinks": self.sinks}
        if case.mla:
            more = {
                "kv_lora_rank": case.kv_lora_rank,
                "qk_nope_head_dim": NOPE,
                "qk_rope_head_dim": ROPE,
                "v_head_dim": VALUE,
                "kv_b_proj": self.weights,
            }
        sizes = (case.num_heads, case.head_size, self.softmax_scale, case.num_kv_heads)
        return impl_cls(*sizes, sliding_window=case.window, kv_cache_dtype=case.kv_cache_dtype, **more)

    def _heavy(self) -> float:
        """Return sinks of about as much weight as all keys together: less would not be visible in the error."""
        return math.log(max(m for _, m in self.lens))

    def exact(self, query: Any, stored: tuple[Any, ...], first: int) -> Any:
        """Return attention [t, H, D] in float32 over the arrays of `dense`, causal; the first row is at position `first`.

        Latent attention is absorbed, whichever form the layer used.
        """
        xp, window = ops_of(self.framework), self.case.window
        rules = DenseParams(True, self.softmax_scale, (None if window is None else window - 1, None), None)
        formula, parameters = (_exact_latent, self.weights) if self.case.mla else (_exact, self.sinks)
        return xp.compiled(formula)(xp, rules, query, *stored, parameters, first)

    def batched(self) -> tuple[Any, Any, Any]:
        """Return query [R, Q, H, D] and key, value [R, S, K, D] without pages, in the query's dtype.

        Raises `UnsupportedError` for requests of several lengths, and for a cache of another dtype.
        """
        case, (n, m) = self.case, self.lens[0]
        # A dense kernel would read a copy in the query's dtype, which has more bytes.
        if case.kv_cache_dtype != "auto":
            raise UnsupportedError(f"kv_cache_dtype={case.kv_cache_dtype}: dense kernels read {case.dtype} only")
        # SDPA aligns causality to the top left (docs/semantics.md §3), which is the same for whole prompts, and unneeded for
        # one row.
        if len(set(self.lens)) > 1 or n not in (1, m):
            raise UnsupportedError("needs requests of equal lengths, all new or with one new token each")
        xp, count = ops_of(self.framework), len(self.lens)
        pairs = [self.dense(r) for r in range(count)]
        key, value = (xp.cast(xp.stack([pair[i][:m] for pair in pairs]), like=self.query) for i in (0, 1))
        return self.query[: count * n].reshape(count, n, *self.query.shape[1:]), key, value

    def error(self, most: int = 3) -> float:
        """Relative RMS error of `output` against float32, over up to `most` requests of each length."""
        wrong = total = 0.0
        seen: dict[tuple[int, int], int] = {}
        # Latent rows are 4.5 times as wide as a head of 128, and 128 heads' scores are held at a time.
        begin, most_rows = 0, 64 if self.case.mla else 256  # compared at a time, so that long prompts fit in memory
        for r, (n, m) in enumerate(self.lens):
            # Requests of equal lengths run the same code: a few of each show whether pages and offsets are right.
            seen[n, m] = seen.get((n, m), 0) + 1
            if seen[n, m] <= most:
                stored = self.dense(r)
                chunk = ops_of(self.framework).rows_at_once(min(n, most_rows), self.case.num_heads * m)
                for first in range(0, n, chunk):
                    rows = slice(begin + first, begin + min(first + chunk, n))
                    squares = self._wrong(rows, stored, m - n + first)
                    wrong, total = wrong + squares[0], total + squares[1]
            begin += n
        # A NaN in any row makes the error NaN, which `rows.judged` counts as wrong.
        return float((wrong / total) ** 0.5)


def _exact(xp: Any, rules: DenseParams, query: Any, key: Any, value: Any, sinks: Any, first: Any) -> Any:
    """Compute [t, H, Dv] of query [t, H, D] from position `first` on over key [S, K, D] and value [S, K, Dv]."""
    (rows, heads, size), kv_heads = query.shape, key.shape[1]
    grouped = (kv_heads, heads // kv_heads)
    # [K, G], grouped as the heads.
    extras = OptionalArrays(None, sinks if sinks is None else xp.wide(sinks).reshape(grouped), None)
    query, position = xp.wide(query).reshape(1, rows, *grouped, size), xp.arange(0, rows, key) + first
    out, _ = attend_rows(xp, rules, query, key[None], value[None], position, extras)
    return out.reshape(rows, heads, -1)


def _exact_latent(xp: Any, rules: DenseParams, query: Any, latents: Any, weights: Any, first: Any) -> Any:
    """Compute [t, H, Dv] of query [t, H, Dn + Dr] from position `first` on over latent rows [S, L + Dr]."""
    query, weights = xp.wide(query), xp.wide(weights)
    absorbed = xp.einsum("thd,lhd->thl", query[..., :NOPE], weights[..., :NOPE])
    # [t, H, L + Dr] over one kv head, whose values are the first L elements of its keys (docs/semantics.md §9).
    query, rows = xp.concat([absorbed, query[..., NOPE:]], -1), latents[:, None]
    latent = _exact(xp, rules, query, rows, rows[..., : weights.shape[0]], None, first)
    return xp.einsum("thl,lhd->thd", latent, weights[..., NOPE:])


class BaseBench:
    """Timing on one device, and the device's ceilings: bandwidth of a copy (read and write), rate of a matrix product."""

    _copy_gb_per_s = 0.0

    def __init__(self) -> None:
        self._gemm_tflop_per_s: dict[str, float] = {}

    @abstractmethod
    def _wait(self, result: Any) -> None:
        """Wait until the result of a call is ready."""

    @abstractmethod
    def _copy(self) -> float:
        """Measure GB/s of a copy."""

    @abstractmethod
    def _gemm(self, dtype: str) -> float:
        """Measure TFLOP/s of a matrix product."""

    def ceilings(self, dtype: str) -> tuple[float, float]:
        """(GB/s of a copy, TFLOP/s of a matrix product in `dtype`), measured on first use."""
        # Measured in the same run as the rows: clocks and memory differ between devices of one kind.
        self._copy_gb_per_s = self._copy_gb_per_s or self._copy()
        if dtype not in self._gemm_tflop_per_s:
            self._gemm_tflop_per_s[dtype] = self._gemm(dtype)
        return self._copy_gb_per_s, self._gemm_tflop_per_s[dtype]

    def _rates(self, dtype: str) -> dict[str, float]:
        copy, gemm = self.ceilings(dtype)
        return {"copy_gb_per_s": round(copy, 1), "gemm_tflop_per_s": round(gemm, 2)}

    def times(self, call: Callable[[], Any], flush: Callable[[], Any], count: int, warm: bool = False) -> list[float]:
        """Milliseconds of `count` calls until their result is ready, sorted, with `flush` called before each; `warm` adds one
        that is not timed."""
        if warm:
            self._wait(call())
        milliseconds = []
        for _ in range(count):
            flush()
            begin = time.perf_counter()
            self._wait(call())
            milliseconds.append(1e3 * (time.perf_counter() - begin))
        return sorted(milliseconds)

    def _affordable(self, call: Callable[[], Any], count: int) -> int:
        """`count` calls, or for a slow call as many as fit in `_PATIENCE`, at least 5."""
        self._wait(None)
        begin = time.perf_counter()
        self._wait(call())
        # At least five, which the 20th and 80th percentile need.
        return max(5, min(count, int(_PATIENCE / (1e3 * (time.perf_counter() - begin)))))

    def _host_us(self, call: Callable[[], Any], count: int) -> float:
        """Microseconds until `call` returns, starting from an idle device: the median of several."""
        microseconds = []
        for _ in range(count):
            self._wait(None)
            begin = time.perf_counter()
            result = call()
            microseconds.append(1e6 * (time.perf_counter() - begin))
            # Outside the time: only the host's part is measured, up to the return of the call.
            self._wait(result)
        return statistics.median(microseconds)
