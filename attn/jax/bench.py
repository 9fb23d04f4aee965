"""The stopwatch of `attn bench` under jax: any paged backend on the default device.

The layer's call is one compiled program, which reads the cache and returns the output alone. Times are those of the wall
clock until the output is there, so that on an accelerator they hold the launch too; before each 256 MiB are written on the
device (64 on a CPU), read for the clean median. What the attention takes without launches is the time that one more adds to
a program that attends several times, each after the other, caches warm.

Inputs are random and pages lie at random places. The output of the timed program is compared with float32 attention over the
cache as it is stored, over up to three requests of each length.
"""

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn import dtypes
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.bench import Case, Timing, parse
from attn.bench.deadline import deadline
from attn.errors import UnsupportedError
from attn.imports import version_of
from attn.jax import kv_cache as caches

_CODE_SCALE = 0.03  #: of an int8 cache, whose codes are about +-90; other caches hold numbers about 1
_PATIENCE = 2000.0  #: milliseconds that the timed calls of a slow kernel may take together
_REPEATS = 4  #: attentions that a program adds to tell what one takes
_CHUNK = 256  #: rows that are compared at a time, so that long prompts fit


class Workload:
    """A layer, a filled cache and one batch on the device; `attend` is the layer as a function, `arguments` its arrays."""

    def __init__(self, case: Case, backend: str) -> None:
        if case.kv_cache_dtype in dtypes.PER_TOKEN_HEAD:
            raise UnsupportedError(
                f"kv_cache_dtype={case.kv_cache_dtype}: caches of codes with scales between them are not filled here"
            )
        cls: Any = AttentionBackendEnum[backend].get_class()
        self.case, self.lens = case, parse(case.batch)
        pages = [-(-m // case.block_size) for _, m in self.lens]
        tables: Any = np.split(np.random.default_rng(0).permutation(sum(pages)).astype(np.int32), np.cumsum(pages)[:-1])
        self.tables = tables
        spec = KVCacheSpec(case.block_size, case.num_kv_heads, case.head_size, case.dtype, case.kv_cache_dtype, sum(pages))
        self.batch = CommonAttentionMetadata.from_lens(
            [n for n, _ in self.lens], [m for _, m in self.lens], tables, case.block_size
        )
        self._builder = cls.get_builder_cls()(spec, ["layer"], None, None)
        self.metadata = self.build()
        self.cache = _filled(cls, caches.allocate(cls, spec, sum(pages)), case.head_size)
        self.scale = _CODE_SCALE if self.cache.dtype == jnp.int8 else 1.0
        self._views = functools.partial(_rows, cls.logical_kv_cache, case.head_size)
        draw = np.random.default_rng(1).standard_normal
        rows = self.metadata.slot_mapping.shape[0]
        self.query = jnp.asarray(draw((rows, case.num_heads, case.head_size), np.float32), case.dtype)
        self.sinks = None
        if case.sinks:  # about as heavy as the keys together: a lighter one would not show in the error
            heavy = np.log(max(m for _, m in self.lens))
            self.sinks = jnp.asarray(heavy + draw(case.num_heads), jnp.float32)
        impl = cls.get_impl_cls()(
            case.num_heads, case.head_size, case.head_size**-0.5, case.num_kv_heads, sliding_window=case.window,
            kv_cache_dtype=case.kv_cache_dtype, **({} if self.sinks is None else {"sinks": self.sinks}),
        )  # fmt: skip

        def attend(query: jax.Array, cache: jax.Array, metadata: Any) -> jax.Array:
            out, _ = impl.apply(query, None, None, cache, metadata, k_scale=self.scale, v_scale=self.scale)
            return out  # type: ignore[no-any-return]

        self.attend = attend
        self.arguments = (self.query, self.cache, self.metadata)

    def build(self) -> Any:
        return self._builder.build(0, self.batch)

    def dense(self, r: int) -> tuple[jax.Array, jax.Array]:
        """Request r's keys and values [S, K, D] in float32, gathered and dequantised."""
        tokens, blocks = self.lens[r][1], self.tables[r]
        return self._views(tokens, self.cache, blocks, self.scale)  # type: ignore[no-any-return]

    def error(self, output: jax.Array, most: int = 3) -> float:
        """Relative RMS of `output` [T, H, D] against float32 over up to `most` requests of each length."""
        wrong = total = 0.0
        seen: dict[tuple[int, int], int] = {}
        begin = 0
        for r, (n, m) in enumerate(self.lens):
            seen[n, m] = seen.get((n, m), 0) + 1
            if seen[n, m] <= most:
                key, value = self.dense(r)
                for first in range(0, n, _CHUNK):
                    rows = slice(begin + first, begin + min(first + _CHUNK, n))
                    want = _exact(self.query[rows], key, value, self.sinks, m - n + first, self.case.window)
                    difference = np.asarray(output[rows], np.float32) - np.asarray(want)
                    wrong += float(np.square(difference).sum())
                    total += float(np.square(want).sum())
            begin += n
        return float((wrong / total) ** 0.5)


def _filled(cls: Any, empty: jax.Array, head_size: int) -> jax.Array:
    """The cache with random keys and values; what pads a head stays 0. A backend's layout is turned about by the transpose
    of its logical view."""
    element = empty.dtype
    work = element if element.itemsize > 1 else jnp.dtype(jnp.bfloat16)

    @jax.jit
    def fill(seed: jax.Array) -> jax.Array:
        views, back = jax.vjp(cls.logical_kv_cache, jnp.zeros(empty.shape, work))
        drawn = []
        for number, view in enumerate(views):
            x = jax.random.normal(jax.random.fold_in(seed, number), (*view.shape[:-1], head_size), work)
            x = jnp.round(x * 30).clip(-127, 127) if element == jnp.int8 else x
            drawn.append(jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, view.shape[-1] - head_size)]))
        return back(tuple(drawn))[0].astype(element)  # type: ignore[no-any-return]

    return fill(jax.random.key(0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rows(view: Any, head_size: int, tokens: int, cache: jax.Array, blocks: Any, scale: float) -> Any:
    """The first `tokens` keys and values [S, K, D] of the blocks, in float32."""
    parts = (part[blocks] for part in view(cache))
    return tuple(part.reshape(-1, *part.shape[2:])[:tokens, :, :head_size].astype(jnp.float32) * scale for part in parts)


@functools.partial(jax.jit, static_argnames="window")
def _exact(query: Any, key: Any, value: Any, sinks: Any, first: Any, window: int | None) -> jax.Array:
    """Attention [t, H, D] in float32 of rows that begin at position `first` over keys and values [S, K, D]."""
    rows, heads, size = query.shape
    tokens, kv_heads = key.shape[:2]
    query = query.astype(jnp.float32).reshape(rows, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("tkgd,skd->kgts", query, key, precision="highest") * size**-0.5
    last, at = first + jnp.arange(rows)[:, None], jnp.arange(tokens)
    scores = jnp.where((at <= last) & (at > last - (window or tokens + rows)), scores, -jnp.inf)
    if sinks is not None:
        own = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, own], -1)
    weights = jax.nn.softmax(scores, -1)[..., :tokens]
    return jnp.einsum("kgts,skd->tkgd", weights, value, precision="highest").reshape(rows, heads, size)


# peers


def _dense(workload: Workload, implementation: str | None) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """`jax.nn.dot_product_attention` on keys copied out of the pages beforehand, and its arrays: what a kernel without
    pages would take."""
    case, lens = workload.case, workload.lens
    if case.features or case.kv_cache_dtype != "auto":
        raise UnsupportedError(f"takes plain attention over keys in the queries' dtype, not {case}")
    if len(set(lens)) > 1 or lens[0][0] not in (1, lens[0][1]):
        raise UnsupportedError("takes requests of one length, all new or one token each")
    pairs = [workload.dense(r) for r in range(len(lens))]
    key, value = (jnp.stack([p[i] for p in pairs]).astype(case.dtype) for i in (0, 1))
    query = workload.query[: len(lens) * lens[0][0]].reshape(len(lens), lens[0][0], case.num_heads, case.head_size)
    causal = lens[0][0] > 1

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=implementation)  # type: ignore[arg-type]
        return out.reshape(-1, *out.shape[2:])

    return attend, (query, key, value)


#: name -> (what `jax.nn` calls the implementation, the platform that it needs)
PEERS: dict[str, tuple[str | None, str | None]] = {"jax-nn": ("xla", None), "jax-nn-cudnn": ("cudnn", "gpu")}


class JaxBench:
    """The default device, its ceilings (a copy, read and written, and a matrix product), and the stopwatch."""

    def __init__(self) -> None:
        self.device = jax.devices()[0]
        self.on_cpu = self.device.platform == "cpu"
        mib = 64 if self.on_cpu else 256
        self._dirt: Any = np.zeros(mib << 18, np.float32) if self.on_cpu else jnp.zeros(mib << 18, jnp.float32)
        self._add = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._max = jax.jit(jnp.max)
        self._copy_gb_per_s = 0.0
        self._gemm_tflop_per_s: dict[str, float] = {}

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        found = {"device": self.device.device_kind, "jax": jax.__version__}
        if self.on_cpu:
            found |= {"device": f"{platform.machine()} CPU", "cores": str(os.cpu_count())}
        found |= {name: version for name in ("libtpu", "jax-cuda12-plugin") if (version := version_of(name))}
        copy, gemm = self.ceilings(dtype)
        return {**found, "copy_gb_per_s": round(copy, 1), "gemm_tflop_per_s": round(gemm, 2)}

    def ceilings(self, dtype: str) -> tuple[float, float]:
        """(GB/s of a copy, TFLOP/s of a matrix product in `dtype`), measured when first asked for."""
        if not self._copy_gb_per_s:
            source = jnp.zeros((64 if self.on_cpu else 1024) << 18, jnp.float32)
            times = self._times(functools.partial(jax.jit(lambda x: x + 1), source), lambda: None, 5)
            self._copy_gb_per_s = 2 * source.nbytes / statistics.median(times) / 1e6
        if dtype not in self._gemm_tflop_per_s:
            n = 1024 if self.on_cpu else 8192
            a, b = jax.random.normal(jax.random.key(0), (2, n, n), dtype)
            times = self._times(functools.partial(jax.jit(jnp.matmul), a, b), lambda: None, 5)
            self._gemm_tflop_per_s[dtype] = 2 * n**3 / statistics.median(times) / 1e9
        return self._copy_gb_per_s, self._gemm_tflop_per_s[dtype]

    def peers(self) -> Sequence[str]:
        return tuple(name for name, (_, needs) in PEERS.items() if needs in (None, self.device.platform))

    def measure(self, case: Case, name: str, limit: float = 0.0) -> Timing:
        """Raises what the backend or the peer raises for a case that it does not serve, TimeoutError when it is not
        compiled after `limit` seconds (0, or outside the main thread: however long it takes)."""
        with deadline(limit):
            if name in PEERS:
                workload = Workload(case, "XLA_ATTN")
                attend, arrays = _dense(workload, PEERS[name][0])
            else:
                workload = Workload(case, name)
                attend, arrays = workload.attend, workload.arguments
            program = jax.jit(attend)
            jax.block_until_ready(program(*arrays))
        return self._timed(attend, program, arrays, workload, build=name not in PEERS)

    def _timed(
        self, attend: Callable[..., jax.Array], program: Any, arrays: tuple[Any, ...], workload: Workload, build: bool
    ) -> Timing:
        call = functools.partial(program, *arrays)
        count = self._affordable(call, 15 if self.on_cpu else 40)
        build_us = 0.0
        if build:
            build_us = 1e3 * statistics.median(self._times(workload.build, lambda: None, min(count, 10)))
        host_us = self._launch_us(call, min(count, 20))
        times = self._times(call, self._dirty, count)
        error = workload.error(call())
        clean = statistics.median(self._times(call, self._read, count))
        low, high = times[len(times) // 5], times[4 * len(times) // 5]
        kernel = self._kernel_ms(attend, arrays, count)
        return Timing(statistics.median(times), low, high, clean, build_us, host_us, error, True, None, kernel)

    def _kernel_ms(self, attend: Callable[..., jax.Array], arrays: tuple[Any, ...], count: int) -> float | None:
        """Milliseconds that one more attention adds to a program; None where noise hides them."""

        def several(times: Any, query: jax.Array, *rest: Any) -> jax.Array:
            def once(_: int, rows: jax.Array) -> jax.Array:  # the next waits for this one: 0 x is not 0 to a compiler
                return query + 0 * attend(rows.reshape(query.shape), *rest).reshape(query.shape)

            return jax.lax.fori_loop(0, times, once, query)

        program = jax.jit(several)
        one, more = (
            statistics.median(self._times(functools.partial(program, times, *arrays), lambda: None, max(3, min(count, 7))))
            for times in (1, 1 + _REPEATS)
        )
        return (more - one) / _REPEATS if more > one else None

    def _affordable(self, call: Callable[[], Any], count: int) -> int:
        """As many calls, or what a slow one leaves time for."""
        [ms] = self._times(call, lambda: None, 1, warm=False)
        return max(5, min(count, int(_PATIENCE / ms)))

    def _times(self, call: Callable[[], Any], flush: Callable[[], Any], count: int, warm: bool = True) -> list[float]:
        """Milliseconds of `count` calls until what they return is there, in order of size, `flush` called before each."""
        if warm:
            jax.block_until_ready(call())
        found = []
        for _ in range(count):
            flush()
            begin = time.perf_counter()
            jax.block_until_ready(call())
            found.append(1e3 * (time.perf_counter() - begin))
        return sorted(found)

    def _launch_us(self, call: Callable[[], Any], count: int) -> float:
        """Microseconds until `call` returns, the device idle at its start: the median of several."""
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            out = call()
            found.append(1e6 * (time.perf_counter() - begin))
            jax.block_until_ready(out)
        return statistics.median(found)

    def _dirty(self) -> None:
        """Fill the caches with lines to write back."""
        if self.on_cpu:
            self._dirt.fill(0)
        else:
            self._dirt = jax.block_until_ready(self._add(self._dirt))

    def _read(self) -> None:
        """Fill the caches with clean lines."""
        if self.on_cpu:
            self._dirt.max()
        else:
            jax.block_until_ready(self._max(self._dirt))
