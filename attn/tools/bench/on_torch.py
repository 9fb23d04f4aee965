"""Timing for `attn bench` in torch: any backend of a paged cache on the default accelerator, or on the CPU.

On a GPU the call is captured in a CUDA graph and its replays are timed with events (calls that cannot be captured are timed
directly). Before every replay 256 MiB are written, which leaves the L2 cache full of lines that the call must first write back
(about 8 us on an H200); for the clean median they are read instead. As many replays run unmeasured first, since an idle device
raises its clocks over the first dozens. On a CPU calls are timed by the wall clock, with 64 MiB written or read before each.

Kernels alone are timed over warm calls: on a GPU with torch's profiler, as the sum of the durations that CUPTI (or roctracer)
reports; on a CPU as the share of a call that is spent inside torch's operators, the rest being launch overhead.

Inputs are random and pages are at random places. The output of the timed calls is compared with float32 attention over the
cache as it is stored, over up to three requests of each length.
"""

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType, profiler_legacy  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from attn import dtypes
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.errors import UnsupportedError
from attn.imports import version_of
from attn.logger import init_logger
from attn.tools.bench import Case, Timing, parse
from attn.tools.bench.case import NOPE, ROPE, VALUE
from attn.tools.bench.deadline import deadline
from attn.tools.bench.peers import Peer, peers_on
from attn.torch import kv_cache as caches
from attn.torch.backends.mla import _rows
from attn.torch.metadata import PagedAttentionMetadata

logger = init_logger(__name__)

_SCALE = {torch.int8: 0.03}  #: for codes up to about +-90; other caches contain values of about 1
_LATENT_SCALE = 0.02  #: for fp8 caches of latents, with codes up to about +-50, so that a kernel that omits the scale fails
_PACKAGES = ("flashinfer-python", "flash-attn-4", "flash-attn-3", "flash-attn", "xformers", "nvidia-cutlass-dsl", "vllm")
_CPU_GEMM = 1024  #: rows of the matrices whose product is timed on a CPU
_PATIENCE = 2000.0  #: time limit for all timed calls of a slow kernel, in milliseconds


def clocks_now() -> str:
    """The SM and memory clocks of the first NVIDIA GPU as its driver reports them, or an empty string."""
    if not shutil.which("nvidia-smi"):
        return ""
    ask = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Workload:
    """A layer, a filled cache and one batch on the device; `forward()` computes attention without writing the cache.

    `impl_cls` replaces the backend's own implementation.
    """

    chunk = 256  #: rows compared at a time, so that long prompts fit in memory

    def __init__(self, case: Case, backend: str, device: torch.device, impl_cls: Any = None) -> None:
        import numpy as np

        if case.kv_cache_dtype in dtypes.PER_TOKEN_HEAD:
            raise UnsupportedError(
                f"kv_cache_dtype={case.kv_cache_dtype}: the benchmark does not support caches with scales between codes"
            )
        cls: Any = AttentionBackendEnum[backend].get_class()
        self.case, self.lens, self.device = case, parse(case.batch), device
        pages = [-(-m // case.block_size) for _, m in self.lens]
        tables: Any = np.split(np.random.default_rng(0).permutation(sum(pages)).astype(np.int32), np.cumsum(pages)[:-1])
        self.tables = tables
        spec = KVCacheSpec(case.block_size, case.num_kv_heads, case.head_size, case.dtype, case.kv_cache_dtype, sum(pages))
        self.batch = CommonAttentionMetadata.from_lens(
            [q for q, _ in self.lens], [m for _, m in self.lens], tables, case.block_size
        )
        self._builder = cls.get_builder_cls()(spec, ["layer"], None, device)
        self.metadata = self.build()
        self.cache = caches.allocate(cls, spec, sum(pages), device)
        self._k_scale_float = self._v_scale_float = _SCALE.get(self.cache.dtype, 1.0)
        self._k_scale = self._v_scale = torch.tensor(self._k_scale_float)
        self._fill(cls, impl_cls or cls.get_impl_cls(), torch.Generator(device).manual_seed(0))

    def _fill(self, cls: Any, impl_cls: Any, generator: torch.Generator) -> None:
        """Fill the cache; create the layer, the queries and the output buffer."""
        case, device = self.case, self.device
        self.key_cache, self.value_cache = cls.logical_kv_cache(self.cache)
        for part in (self.key_cache, self.value_cache):
            noise = torch.randn(part.shape, device=device, dtype=torch.float16, generator=generator)
            part.copy_((noise * 30 if part.dtype == torch.int8 else noise).to(part.dtype))
        shape = (sum(q for q, _ in self.lens), case.num_heads, case.head_size)
        self.query = torch.randn(shape, device=device, dtype=getattr(torch, case.dtype), generator=generator)
        self.output = torch.full_like(self.query, torch.nan)
        self.sinks = None
        if case.sinks:  # about as much weight as all keys together: less would not be visible in the error
            heavy = math.log(max(m for _, m in self.lens))
            self.sinks = heavy + torch.randn(case.num_heads, device=device, generator=generator)
        self.impl = impl_cls(
            case.num_heads,
            case.head_size,
            case.head_size**-0.5,
            case.num_kv_heads,
            sliding_window=case.window,
            kv_cache_dtype=case.kv_cache_dtype,
            **({} if self.sinks is None else {"sinks": self.sinks}),
        )

    def build(self) -> PagedAttentionMetadata:
        return self._builder.build(0, self.batch)  # type: ignore[no-any-return]

    def forward(self) -> None:
        self.impl.forward(self, self.query, None, None, self.cache, self.metadata, self.output)

    def dense(self, r: int) -> tuple[torch.Tensor, ...]:
        """Request r's keys and values [S, K, D] in float32, gathered and dequantised."""
        blocks = torch.from_numpy(self.tables[r].astype("int64")).to(self.device)
        tokens = self.lens[r][1]
        parts = (part[blocks].flatten(0, 1)[:tokens] for part in (self.key_cache, self.value_cache))
        key, value = (part.float() * float(self._k_scale) for part in parts)
        return key, value

    def exact(self, query: torch.Tensor, stored: tuple[torch.Tensor, ...], hidden: torch.Tensor) -> torch.Tensor:
        """Attention [t, H, D] in float32 over the arrays of `dense`, without the keys that `hidden` [t, S] masks."""
        key, value = stored
        q = query.unflatten(1, (self.case.num_kv_heads, -1))
        s = torch.einsum("tkgd,skd->kgts", q, key) * self.case.head_size**-0.5
        s = s.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            own = self.sinks.view(*s.shape[:2], 1, 1).expand(*s.shape[:3], 1)
            s = torch.cat([s, own], -1)
        return torch.einsum("kgts,skd->tkgd", s.softmax(-1)[..., : len(key)], value).flatten(1, 2)

    def error(self, most: int = 3) -> float:
        """Relative RMS error of `output` against float32, over up to `most` requests of each length."""
        wrong = total = 0.0
        seen: dict[tuple[int, int], int] = {}
        begin = 0
        for r, (n, m) in enumerate(self.lens):
            seen[n, m] = seen.get((n, m), 0) + 1
            if seen[n, m] <= most:
                stored = self.dense(r)
                for first in range(0, n, self.chunk):
                    rows = slice(begin + first, begin + min(first + self.chunk, n))
                    last = torch.arange(first, first + rows.stop - rows.start, device=self.device)[:, None] + m - n
                    at = torch.arange(m, device=self.device)[None]
                    hidden = (at > last) | (at <= last - (self.case.window or m))
                    want = self.exact(self.query[rows].float(), stored, hidden)
                    wrong += float((self.output[rows].float() - want).square().sum())
                    total += float(want.square().sum())
            begin += n
        return (wrong / total) ** 0.5


class MLAWorkload(Workload):
    """A workload of a latent (MLA) layer.

    Its call is the layer's: it writes the batch's new rows (the same each time), takes queries and returns outputs by head, and
    uses absorbed or expanded attention as the batch requires.
    """

    chunk = 64

    def _fill(self, cls: Any, impl_cls: Any, generator: torch.Generator) -> None:
        case, rank = self.case, self.case.kv_lora_rank
        self.softmax_scale = (NOPE + ROPE) ** -0.5
        if caches.is_quantised(self.cache.dtype):
            self._k_scale_float = self._v_scale_float = _LATENT_SCALE
            self._k_scale = self._v_scale = torch.tensor(_LATENT_SCALE)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device, dtype=getattr(torch, case.dtype), generator=generator)

        self.weights = noise(rank, case.num_heads, NOPE + VALUE) * rank**-0.5  # expanded numbers are about 1
        self.impl = impl_cls(
            case.num_heads,
            case.head_size,
            self.softmax_scale,
            1,
            sliding_window=case.window,
            kv_cache_dtype=case.kv_cache_dtype,
            kv_lora_rank=rank,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            kv_b_proj=self.weights,
        )
        slots = torch.arange(self.cache.shape[0] * case.block_size, device=self.device)
        for some in slots.split(1 << 18):
            rows = noise(len(some), case.head_size)
            self.impl.do_kv_cache_update(self, rows[:, :rank], rows[:, rank:], self.cache, some)
        tokens = sum(n for n, _ in self.lens)
        self.latent, self.rope = noise(tokens, rank), noise(tokens, ROPE)
        self.query = noise(tokens, case.num_heads, NOPE + ROPE)
        self.output = torch.full_like(self.query[..., :VALUE], torch.nan, memory_format=torch.contiguous_format)

    def forward(self) -> None:
        self.impl.forward(self, self.query, self.latent, self.rope, self.cache, self.metadata, self.output)

    def dense(self, r: int) -> tuple[torch.Tensor, ...]:
        """Request r's rows [S, L + Dr] in float32, dequantised: earlier ones from the cache, the batch's from its inputs."""
        n, m = self.lens[r]
        at = torch.arange(m - n, device=self.device)
        pages = torch.from_numpy(self.tables[r].astype("int64")).to(self.device)[at // self.case.block_size]
        before = _rows.gather(self.cache, pages, at % self.case.block_size)
        begin = sum(count for count, _ in self.lens[:r])
        fresh = (self.latent[begin : begin + n], self.rope[begin : begin + n])
        name = self.case.kv_cache_dtype
        new = _rows.encode(*fresh, name, self.cache.dtype, self._k_scale)
        return (torch.cat([_rows.decode(part, name, self._k_scale).float() for part in (before, new)]),)

    def exact(self, query: torch.Tensor, stored: tuple[torch.Tensor, ...], hidden: torch.Tensor) -> torch.Tensor:
        """Absorbed attention over the latent rows, whichever form the layer used."""
        (rows,), weights = stored, self.weights.float()
        absorbed = torch.einsum("thd,lhd->thl", query[..., :NOPE], weights[..., :NOPE])
        s = torch.einsum("thw,sw->hts", torch.cat([absorbed, query[..., NOPE:]], -1), rows) * self.softmax_scale
        latent = torch.einsum("hts,sl->thl", s.masked_fill(hidden, -torch.inf).softmax(-1), rows[:, : self.case.kv_lora_rank])
        return torch.einsum("thl,lhd->thd", latent, weights[..., NOPE:])


class TorchBench:
    """Timing on one device, and the device's ceilings: bandwidth of a copy (read and write), rate of a matrix product."""

    def __init__(self, device: torch.device | None = None) -> None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(kind) if device is None else device
        self.on_gpu = self.device.type == "cuda"
        mib = 256 if self.on_gpu else 64
        self._evict = torch.zeros(mib << 18, device=self.device)
        self._peers = peers_on(self.device)
        self._shared: Workload | None = None
        self._copy_gb_per_s = 0.0
        self._gemm_tflop_per_s: dict[str, float] = {}

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        import platform

        copy, gemm = self.ceilings(dtype)  # first, so that the clocks reported are those of a busy device
        found = {
            "device": torch.cuda.get_device_name() if self.on_gpu else f"{platform.machine()} CPU",
            "torch": torch.__version__,
        }
        if self.on_gpu:
            import triton

            found["triton"] = triton.__version__
            found |= {"clocks": clocks} if (clocks := clocks_now()) else {}
        else:
            found["threads"] = str(torch.get_num_threads())
        found |= {name: version for name in _PACKAGES if (version := version_of(name))}
        return {**found, "copy_gb_per_s": round(copy, 1), "gemm_tflop_per_s": round(gemm, 2)}

    def ceilings(self, dtype: str) -> tuple[float, float]:
        """(GB/s of a copy, TFLOP/s of a matrix product in `dtype`), measured on first use."""
        self._copy_gb_per_s = self._copy_gb_per_s or self._copy()
        if dtype not in self._gemm_tflop_per_s:
            self._gemm_tflop_per_s[dtype] = self._gemm(getattr(torch, dtype))
        return self._copy_gb_per_s, self._gemm_tflop_per_s[dtype]

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else None

    def peers(self) -> Sequence[str]:
        return tuple(self._peers)

    def measure(self, case: Case, name: str, limit: float = 0.0) -> Timing:
        """Time one backend or peer on a case.

        limit: time limit for the first call, in seconds; 0 means none, as does a call outside the main thread. Raises
        TimeoutError beyond it, and whatever the backend or peer raises for a case that it does not support.
        """
        with torch.no_grad():
            if name in self._peers:
                return self._measure_peer(case, self._peers[name], limit)
            with deadline(limit):
                workload = (MLAWorkload if case.mla else Workload)(case, name, self.device)
                workload.forward()
            return self.timed(workload.forward, workload.build, lambda: workload.output.fill_(torch.nan), workload.error)

    def _measure_peer(self, case: Case, peer: Peer, limit: float) -> Timing:
        if case.features:
            raise UnsupportedError(f"peers do not support {', '.join(sorted(case.features))}")
        if self._shared is None or self._shared.case != case:  # peers of a case read the same tensors
            self._shared = None
            self._shared = Workload(case, "TRITON_ATTN" if self.on_gpu else "TORCH_SDPA", self.device)
        workload, result = self._shared, torch.empty(0)
        with deadline(limit):
            attend = peer.prepare(workload)
            result = attend()

        def call() -> None:
            nonlocal result
            result = attend()

        def error() -> float:
            out = result.transpose(1, 2).flatten(0, 1) if result.dim() == 4 else result
            workload.output.copy_(out)
            return workload.error()

        return self.timed(call, lambda: None, lambda: result.fill_(torch.nan), error)

    def timed(
        self,
        call: Callable[[], object],
        build: Callable[[], object],
        poison: Callable[[], object],
        error: Callable[[], float],
        count: int = 40,
    ) -> Timing:
        """Time `call`; `poison` overwrites its output beforehand, and `error` returns the output's error afterwards."""
        call()
        count = self._affordable(call, count if self.on_gpu else 15)
        host_us, build_us = self._host_us(call, count), self._host_us(build, count)
        again, replayed = self._captured_or_not(call) if self.on_gpu else (call, False)
        poison()
        times = self.times(again, self._evict.zero_, count)
        wrong = error()
        clean = statistics.median(self.times(again, self._evict.amax, count))
        low, high = times[len(times) // 5], times[4 * len(times) // 5]
        call_ms = statistics.median(self.times(call, self._evict.zero_, count)) if replayed else statistics.median(times)
        kernel_ms = self._kernel_ms(call, host_us)
        if not self.on_gpu and kernel_ms is not None:  # the host is the device: the rest of a call is launch overhead
            host_us -= 1e3 * kernel_ms
        return Timing(
            ms=statistics.median(times),
            ms_p20=low,
            ms_p80=high,
            ms_clean=clean,
            build_us=build_us,
            host_us=host_us,
            error=wrong,
            replayed=replayed,
            call_ms=call_ms,
            kernel_ms=kernel_ms,
        )

    def _kernel_ms(self, call: Callable[[], object], call_us: float, calls: int = 3) -> float | None:
        """Milliseconds of a call's kernels, or None where they cannot be measured.

        On a CPU the profiler slows down the call, so the share that it reports is applied to `call_us` of an unprofiled call.
        """
        if not self.on_gpu:
            with profiler_legacy.profile() as watched:
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                wall_us = 1e6 * (time.perf_counter() - begin)
            inside = sum(e.time_range.elapsed_us() for e in watched.function_events or () if e.cpu_parent is None)
            return min(inside / wall_us, 1.0) * call_us / 1e3 if inside else None
        try:
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
            events = list(seen.events() or ())
        except RuntimeError as error:  # no permission for the counters, or another profiler uses them
            logger.debug("kernel time not measured: %s", error)
            return None
        return sum(e.time_range.elapsed_us() for e in events if e.device_type == DeviceType.CUDA) / calls / 1e3 or None

    def _affordable(self, call: Callable[[], object], count: int) -> int:
        """`count` calls, or for a slow call as many as fit in `_PATIENCE`, at least 5."""
        self._synchronize()
        begin = time.perf_counter()
        call()
        self._synchronize()
        return max(5, min(count, int(_PATIENCE / (1e3 * (time.perf_counter() - begin)))))

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _captured_or_not(self, call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        try:
            return self.captured(call), True
        except RuntimeError:  # for example, a kernel that reads a value back from the device
            torch.cuda.synchronize()
            return call, False

    def times(self, call: Callable[[], object], flush: Callable[[], object], count: int) -> list[float]:
        """Milliseconds of `count` calls, sorted, with `flush` called before each."""
        if not self.on_gpu:
            found = []
            for _ in range(count):
                flush()
                begin = time.perf_counter()
                call()
                found.append(1e3 * (time.perf_counter() - begin))
            return sorted(found)
        for _ in range(count):
            flush()
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in range(count)]
        for begin_event, end_event in events:
            flush()
            begin_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize()
        return sorted(begin_event.elapsed_time(end_event) for begin_event, end_event in events)

    @staticmethod
    def captured(call: Callable[[], object]) -> Callable[[], object]:
        """Capture `call` in a graph after two warm-up calls on a side stream, and return its replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def _host_us(self, call: Callable[[], object], count: int) -> float:
        """Microseconds until `call` returns, starting from an idle device: the median of several."""
        found = []
        for _ in range(min(count, 20 if self.on_gpu else 9)):
            self._synchronize()
            begin = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - begin))
        return statistics.median(found)

    def _copy(self) -> float:
        source = torch.randn((1 << 30) if self.on_gpu else (16 << 20), device=self.device)
        target = torch.empty_like(source)
        times = self.times(lambda: target.copy_(source), lambda: None, 12 if self.on_gpu else 3)
        return 2 * source.numel() * 4 / statistics.median(times) / 1e6

    def _gemm(self, dtype: torch.dtype) -> float:
        n = 8192 if self.on_gpu else _CPU_GEMM
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in "ab")
        out = torch.empty_like(a)
        times = self.times(lambda: torch.mm(a, b, out=out), lambda: None, 12 if self.on_gpu else 3)
        return 2 * n**3 / statistics.median(times) / 1e9
