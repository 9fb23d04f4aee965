"""Timing for `attn bench` in jax: any backend of a paged cache on the default device.

The layer's call is one compiled program, which reads the cache and returns only the output; a latent layer's also writes
its new rows, into a donated cache. Times are wall-clock times until the output is ready, so on an accelerator they include
the launch. Before each call 256 MiB are written on the device (64 on a CPU), or read for the clean median. The kernel's
time without launches is the increment of one more attention in a program that computes several in sequence, with warm caches.
"""

import functools
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import next_power_of_two
from attn.errors import UnsupportedError
from attn.imports import version_of
from attn.jax import kv_cache as caches
from attn.jax.backends.mla._mla import latent_rows
from attn.jax.kernels import xla_mla
from attn.tools.bench import BenchCase, Timing
from attn.tools.bench.case import NOPE, ROPE, VALUE
from attn.tools.bench.deadline import deadline
from attn.tools.bench.stopwatches import CODE_SCALE, LATENT_SCALE, BaseBench, BaseWorkload, timing

_REPEATS = 4  #: attentions added to a program to measure the time of one


class Workload(BaseWorkload):
    """A workload of arrays.

    `attend` is the layer as a function, `arguments` its arrays, the query first. If the layer `writes`, the second is the
    cache, and `attend` returns (output, cache).
    """

    framework = "jax"
    writes = False
    attend: Callable[..., Any]
    arguments: tuple[Any, ...]

    def _fill(self, cls: Any, impl_cls: Any, spec: KVCacheSpec) -> None:
        assert spec.num_blocks is not None
        # The shape alone: `_filled` makes the contents in one program, without a cache of zeros beside it.
        self.empty = jax.eval_shape(functools.partial(caches.allocate, cls, spec, spec.num_blocks))
        self.scale = CODE_SCALE if self.empty.dtype == jnp.int8 else 1.0
        # The builder pads a batch to a power of two, and the query must have as many rows.
        self._draw(cls, impl_cls, self.metadata.slot_mapping.shape[0])

    def _draw(self, cls: Any, impl_cls: Any, rows: int) -> None:
        """Fill the cache; create the layer and queries for `rows` rows of a batch."""
        case, empty = self.case, self.empty
        self.cache = _filled(cls.logical_kv_cache, empty.shape, empty.dtype, case.head_size)
        self._views = functools.partial(_rows, cls.logical_kv_cache, case.head_size)
        # On the host: jax.random compiles a program for each shape.
        draw = np.random.default_rng(1).standard_normal
        self.query = jnp.asarray(draw((rows, case.num_heads, case.head_size), np.float32), case.dtype)
        if case.sinks:
            self.sinks = jnp.asarray(self._heavy() + draw(case.num_heads), jnp.float32)
        impl = self._layer(impl_cls)

        def attend(query: jax.Array, cache: jax.Array, metadata: Any) -> jax.Array:
            out, _ = impl.apply(query, None, None, cache, metadata, k_scale=self.scale, v_scale=self.scale)
            return out

        self.attend = attend
        self.arguments = (self.query, self.cache, self.metadata)

    def program(self) -> Callable[[], jax.Array]:
        """The call, compiled. A cache that it writes is donated and becomes an argument of the next call."""
        if not self.writes:
            # As arguments: an array in a closure would be a constant of the program, and might be folded.
            return functools.partial(jax.jit(self.attend), *self.arguments)
        # Without donation every call would copy the cache to write a few rows.
        step = jax.jit(self.attend, donate_argnums=1)

        def call() -> jax.Array:
            query, cache, *others = self.arguments
            out, cache = step(query, cache, *others)
            self.arguments = (query, cache, *others)
            return out

        return call

    def forward(self) -> None:
        self.output = self.program()()

    def blocks(self, r: int, tokens: int) -> Any:
        """Request r's pages, then others up to a power of two, with at least `tokens` tokens: few shapes to compile."""
        count = next_power_of_two(-(-tokens // self.case.block_size))
        # Padded by page 0, whose tokens the check masks: they are after the last row's position.
        return np.pad(self.tables[r], (0, max(0, count - len(self.tables[r]))))

    def dense(self, r: int) -> tuple[jax.Array, ...]:
        return self._views(self.cache, self.blocks(r, self.lens[r][1]), self.scale)

    def _wrong(self, rows: slice, stored: tuple[jax.Array, ...], first: int) -> tuple[float, float]:
        count = rows.stop - rows.start
        query = np.asarray(self.query)[rows]  # NumPy slices without compiling
        # The rows that pad it attend too, in vain, and are cut off below.
        padded = np.pad(query, ((0, next_power_of_two(count) - count), (0, 0), (0, 0)))
        want = np.asarray(self.exact(padded, stored, first))[:count]
        difference = np.asarray(self.output)[rows].astype(np.float32) - want
        return float(np.square(difference).sum()), float(np.square(want).sum())


class MLAWorkload(Workload):
    """A workload of a latent (MLA) layer, whose call writes the batch's new rows too."""

    writes = True

    def _draw(self, cls: Any, impl_cls: Any, rows: int) -> None:
        case, rank, empty = self.case, self.case.kv_lora_rank, self.empty
        self.scale = LATENT_SCALE if caches.is_quantised(empty.dtype) else 1.0
        draw = np.random.default_rng(1).standard_normal
        shapes = (rank, case.num_heads, NOPE + VALUE), (rows, case.num_heads, NOPE + ROPE), (rows, rank), (rows, ROPE)
        weights, self.query, latent, rope = (jnp.asarray(draw(shape, np.float32), case.dtype) for shape in shapes)
        self.weights = weights * rank**-0.5  # expanded numbers are about 1
        impl = self._layer(impl_cls)

        def filled() -> jax.Array:
            slots = jnp.arange(empty.shape[0] * case.block_size)
            drawn = jax.random.normal(jax.random.key(9), (slots.size, case.head_size), case.dtype)
            cache, layer = jnp.zeros(empty.shape, empty.dtype), SimpleNamespace(_k_scale=self.scale)
            return impl.do_kv_cache_update(layer, drawn[:, :rank], drawn[:, rank:], cache, slots)

        def attend(query: jax.Array, cache: jax.Array, metadata: Any, *latents: jax.Array) -> tuple[jax.Array, jax.Array]:
            latent, rope, w_uk, w_uv = latents
            return impl.apply(query, latent, rope, cache, metadata, w_uk=w_uk, w_uv=w_uv, k_scale=self.scale)

        self.attend = attend
        self.arguments = (self.query, jax.jit(filled)(), self.metadata, latent, rope, *impl.weights())
        rows_as_cached = latent_rows(latent, rope, empty.dtype, self.scale)
        # As the cache stores them (rounded to its dtype), without the lanes that pad a row.
        self.fresh = np.asarray(xla_mla.numbers(rows_as_cached, jnp.float32, self.scale))[:, : case.head_size]

    def dense(self, r: int) -> tuple[jax.Array, ...]:
        """Earlier rows are from the cache, the batch's from its inputs."""
        n, m = self.lens[r]
        begin = sum(count for count, _ in self.lens[:r])
        new = np.pad(self.fresh[begin : begin + n], ((0, next_power_of_two(n) - n), (0, 0)))
        blocks = self.blocks(r, m - n + len(new))  # an update that exceeds the array would be shifted
        return (_latents(self.case.head_size, self.arguments[1], blocks, new, m - n, self.scale),)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _filled(view: Any, shape: tuple[int, ...], element: Any, head_size: int) -> jax.Array:
    """Return a cache with random keys and values; lanes that pad a head stay 0.

    The transpose of a backend's logical view converts them to its layout.
    """
    # A dtype that jax.vjp and jax.random take; 8-bit elements are converted at the end.
    work = element if element.itemsize > 1 else jnp.dtype(jnp.bfloat16)
    views, back = jax.vjp(view, jnp.zeros(shape, work))
    drawn = []
    for number, cache in enumerate(views):
        x = jax.random.normal(jax.random.key(number), (*cache.shape[:-1], head_size), work)
        # Integers in bfloat16, where those up to 256 are exact; the last cast would truncate others towards 0.
        x = jnp.round(x * 30).clip(-127, 127) if element == jnp.int8 else x
        drawn.append(jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, cache.shape[-1] - head_size)]))
    # The view is linear, and its transpose places each number where the view reads it.
    return back(tuple(drawn))[0].astype(element)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rows(view: Any, head_size: int, cache: jax.Array, blocks: Any, scale: float) -> Any:
    """The keys and values [S, K, D] of the blocks, in float32."""
    stored = (x[blocks] for x in view(cache))
    return tuple(x.reshape(-1, *x.shape[2:])[..., :head_size].astype(jnp.float32) * scale for x in stored)


@functools.partial(jax.jit, static_argnums=0)
def _latents(head_size: int, cache: jax.Array, blocks: Any, new: Any, first: Any, scale: float) -> jax.Array:
    """The rows [S, L + Dr] of the blocks, in float32, with those from `first` on replaced by `new`."""
    rows = xla_mla.numbers(cache[blocks].reshape(-1, cache.shape[2]), jnp.float32, scale)[:, :head_size]
    # `first` is traced, so one program serves every request of a length.
    return jax.lax.dynamic_update_slice(rows, new, (first, 0))


# peers


def _dense(workload: Workload, implementation: str | None) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """`jax.nn.dot_product_attention` and its arrays, with keys copied out of the pages beforehand.

    This is the time that a kernel without pages takes.
    """
    # One new token sees all keys; `is_causal` would align it to the first.
    causal = workload.lens[0][0] > 1

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=implementation)  # type: ignore[arg-type]
        return out.reshape(-1, *out.shape[2:])

    return attend, workload.batched()


#: name -> (`jax.nn`'s name of the implementation, the platform that it needs)
PEERS: dict[str, tuple[str | None, str | None]] = {"jax-nn": ("xla", None), "jax-nn-cudnn": ("cudnn", "gpu")}


class JaxBench(BaseBench):
    __doc__ = BaseBench.__doc__

    def __init__(self) -> None:
        super().__init__()
        self.device = jax.devices()[0]
        self.on_cpu = self.device.platform == "cpu"
        mib = 64 if self.on_cpu else 256
        # 2**18 float32 are a MiB. On a CPU NumPy writes in place; jax would allocate.
        self._flushed: Any = np.zeros(mib << 18, np.float32) if self.on_cpu else jnp.zeros(mib << 18, jnp.float32)
        # Donated, so that the same memory is written again.
        self._add = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._max = jax.jit(jnp.max)

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        facts = {"device": self.device.device_kind, "jax": jax.__version__}
        if self.on_cpu:
            facts |= {"device": f"{platform.machine()} CPU", "cores": str(os.cpu_count())}
        facts |= {name: version for name in ("libtpu", "jax-cuda12-plugin") if (version := version_of(name))}
        return {**facts, **self._rates(dtype)}

    def _wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def _copy(self) -> float:
        source = jnp.zeros((64 if self.on_cpu else 1024) << 18, jnp.float32)
        # An addition, as jit would answer an identity without a copy.
        times = self.times(functools.partial(jax.jit(lambda x: x + 1), source), lambda: None, 5, warm=True)
        return 2 * source.nbytes / statistics.median(times) / 1e6

    def _gemm(self, dtype: str) -> float:
        n = 1024 if self.on_cpu else 8192
        a, b = jax.random.normal(jax.random.key(0), (2, n, n), dtype)
        times = self.times(functools.partial(jax.jit(jnp.matmul), a, b), lambda: None, 5, warm=True)
        return 2 * n**3 / statistics.median(times) / 1e9

    def free_bytes(self) -> int | None:
        """The device's memory that this process may still allocate, in bytes; None for a CPU.

        Raises UnsupportedError for a device that does not report it.
        """
        if self.on_cpu:
            return None
        stats = self.device.memory_stats()
        if not stats:
            raise UnsupportedError(f"{self.device.device_kind} does not report its free memory, which bounds --random")
        # Not the device's free memory, of which jax has preallocated most.
        return int(stats["bytes_limit"] - stats["bytes_in_use"])

    def peers(self) -> Sequence[str]:
        return tuple(name for name, (_, needs) in PEERS.items() if needs in (None, self.device.platform))

    def measure(self, case: BenchCase, name: str, limit: float = 0.0) -> Timing:
        """As `Bench.measure`; the limit is for compiling, and there is none outside the main thread."""
        if name in PEERS and case.features:
            raise UnsupportedError(f"peers do not support {', '.join(sorted(case.features))}")
        with deadline(limit):
            if name in PEERS:
                # For its arrays only: the peer reads keys copied out of the pages.
                workload = Workload(case, "XLA_ATTN")
                workload.attend, workload.arguments = _dense(workload, PEERS[name][0])
            else:
                workload = (MLAWorkload if case.mla else Workload)(case, name)
            call = workload.program()
            # Inside the deadline, since jit compiles at the first call.
            jax.block_until_ready(call())
        return self._timed(call, workload, build=name not in PEERS)

    def _timed(self, call: Callable[[], jax.Array], workload: Workload, build: bool) -> Timing:
        count = self._affordable(call, 15 if self.on_cpu else 40)
        build_us = 0.0
        if build:
            # `times` are in milliseconds.
            build_us = 1e3 * statistics.median(self.times(workload.build, lambda: None, min(count, 10), warm=True))
        host_us = self._host_us(call, min(count, 20))
        times = self.times(call, self._flush, count, warm=True)
        # Computed once more, since the outputs of timed calls are dropped; flushes leave the inputs unchanged.
        workload.output = call()
        clean = statistics.median(self.times(call, self._read, count, warm=True))
        figures = {"ms_clean": clean, "build_us": build_us, "host_us": host_us, "error": workload.error(), "replayed": True}
        return timing(times, **figures, kernel_ms=self._kernel_ms(workload, count))

    def _kernel_ms(self, workload: Workload, count: int) -> float | None:
        """Milliseconds that one more attention adds to a program; None if noise hides them."""

        def several(times: Any, query: jax.Array, *others: Any) -> jax.Array:
            def once(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                # The cache is part of the state only if the layer writes it, so that it is not copied in each iteration.
                rows, *cache = state
                out = workload.attend(rows, *cache, *others[len(cache) :])
                out, *cache = out if cache else (out,)
                flat = jnp.pad(out.reshape(-1), (0, query.size - out.size))  # a latent layer's output is smaller
                return query + 0 * flat.reshape(query.shape), *cache  # the next one waits for this: 0 * x is not folded

            # `times` is traced: one program for both counts, which then differ in nothing but iterations.
            return jax.lax.fori_loop(0, times, once, (query, *others[: workload.writes]))[0]

        program, arrays, few = jax.jit(several), workload.arguments, max(3, min(count, 7))
        # The difference has neither the launch nor the program's fixed part.
        one, more = (
            statistics.median(self.times(functools.partial(program, times, *arrays), lambda: None, few, warm=True))
            for times in (1, 1 + _REPEATS)
        )
        return (more - one) / _REPEATS if more > one else None

    def _flush(self) -> None:
        """Fill the caches with lines that must be written back."""
        if self.on_cpu:
            self._flushed.fill(0)
        else:
            self._flushed = jax.block_until_ready(self._add(self._flushed))

    def _read(self) -> None:
        """Fill the caches with clean lines."""
        if self.on_cpu:
            self._flushed.max()
        else:
            jax.block_until_ready(self._max(self._flushed))
