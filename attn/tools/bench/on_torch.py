"""Timing for `attn bench` in torch: any backend of a paged cache on the default accelerator, or on the CPU.

On a GPU the call is captured in a CUDA graph and its replays are timed with events (calls that cannot be captured are timed
directly). Before every replay 256 MiB are written, which leaves the L2 cache full of lines that the call must first write back
(about 8 us on an H200); for the clean median they are read instead. As many replays run unmeasured first, since an idle device
raises its clocks over the first dozens. On a CPU calls are timed by the wall clock, with 64 MiB written or read before each.

Kernels alone are timed over warm calls: on a GPU with torch's profiler, as the sum of the durations that CUPTI (or roctracer)
reports; on a CPU as the share of a call that is spent inside torch's operators, the rest being launch overhead.
"""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType, profiler_legacy  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from attn.backends.abstract import KVCacheSpec
from attn.errors import UnsupportedError
from attn.imports import version_of
from attn.logger import init_logger
from attn.tools.bench import BenchCase, Timing
from attn.tools.bench.case import NOPE, ROPE, VALUE
from attn.tools.bench.deadline import deadline
from attn.tools.bench.peers import Peer, peers_on
from attn.tools.bench.stopwatches import CODE_SCALE, LATENT_SCALE, BaseBench, BaseWorkload, timing
from attn.torch import kv_cache as caches
from attn.torch.backends._paged import of_one_batch
from attn.torch.backends.mla import _rows

logger = init_logger(__name__)

_PACKAGES = ("flashinfer-python", "flash-attn-4", "flash-attn-3", "flash-attn", "xformers", "nvidia-cutlass-dsl", "vllm")
_CPU_GEMM = 1024  #: rows of the matrices whose product is timed on a CPU


def clocks_now(uuid: object) -> str:
    """The SM and memory clocks of the NVIDIA GPU of this UUID as its driver reports them, or an empty string."""
    # by UUID: the driver's tool counts all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, in its order
    if not shutil.which("nvidia-smi"):
        return ""
    ask = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Workload(BaseWorkload):
    """A workload of tensors; `forward()` computes attention without writing the cache."""

    framework = "torch"

    def _fill(self, cls: Any, impl_cls: Any, spec: KVCacheSpec) -> None:
        assert spec.num_blocks is not None
        self.cache = caches.allocate(cls, spec, spec.num_blocks, self.device)
        # The workload stands in for the layer: implementations read its scales, as tensors or numbers, by these names.
        self._k_scale_float = self._v_scale_float = CODE_SCALE if self.cache.dtype == torch.int8 else 1.0
        self._k_scale = self._v_scale = torch.tensor(self._k_scale_float)
        self._draw(cls, impl_cls, torch.Generator(self.device).manual_seed(0))

    def _draw(self, cls: Any, impl_cls: Any, generator: torch.Generator) -> None:
        case, device = self.case, self.device
        # Views, of whatever layout the backend has: [N, P, K, D].
        self.key_cache, self.value_cache = cls.logical_kv_cache(self.cache)
        for cache in (self.key_cache, self.value_cache):
            # In float16, since `randn` makes no 8-bit numbers. Codes have a standard deviation of 30: three of them are 90, of
            # int8's 127.
            noise = torch.randn(cache.shape, device=device, dtype=torch.float16, generator=generator)
            cache.copy_((noise * 30 if cache.dtype == torch.int8 else noise).to(cache.dtype))
        shape = (sum(q for q, _ in self.lens), case.num_heads, case.head_size)
        self.query = torch.randn(shape, device=device, dtype=getattr(torch, case.dtype), generator=generator)
        # A row that is not written stays NaN, and so does the error.
        self.output = torch.full_like(self.query, torch.nan)
        if case.sinks:
            self.sinks = self._heavy() + torch.randn(case.num_heads, device=device, generator=generator)
        self.impl = self._layer(impl_cls)

    def forward(self) -> None:
        self.impl.forward(self, self.query, None, None, self.cache, self.metadata, self.output)

    def dense(self, r: int) -> tuple[torch.Tensor, ...]:
        blocks = torch.from_numpy(self.tables[r].astype("int64")).to(self.device)
        tokens = self.lens[r][1]
        stored = (cache[blocks].flatten(0, 1)[:tokens] for cache in (self.key_cache, self.value_cache))
        # Of both: `_v_scale` is the same.
        key, value = (rows.float() * float(self._k_scale) for rows in stored)
        return key, value

    def _wrong(self, rows: slice, stored: tuple[torch.Tensor, ...], first: int) -> tuple[float, float]:
        want = self.exact(self.query[rows], stored, first)
        return float((self.output[rows].float() - want).square().sum()), float(want.square().sum())


class MLAWorkload(Workload):
    """A workload of a latent (MLA) layer, whose call writes the batch's new rows too."""

    def _draw(self, cls: Any, impl_cls: Any, generator: torch.Generator) -> None:
        case, rank = self.case, self.case.kv_lora_rank
        if caches.is_quantised(self.cache.dtype):
            self._k_scale_float = self._v_scale_float = LATENT_SCALE
            self._k_scale = self._v_scale = torch.tensor(LATENT_SCALE)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device, dtype=getattr(torch, case.dtype), generator=generator)

        self.weights = noise(rank, case.num_heads, NOPE + VALUE) * rank**-0.5  # expanded numbers are about 1
        self.impl = self._layer(impl_cls)
        slots = torch.arange(self.cache.shape[0] * case.block_size, device=self.device)
        # The layer's own write makes the cache, whatever its format; in parts, since the rows to write take as much memory as
        # the cache.
        for group in slots.split(1 << 18):
            rows = noise(len(group), case.head_size)
            self.impl.do_kv_cache_update(self, rows[:, :rank], rows[:, rank:], self.cache, group)
        tokens = sum(n for n, _ in self.lens)
        self.latent, self.rope = noise(tokens, rank), noise(tokens, ROPE)
        self.query = noise(tokens, case.num_heads, NOPE + ROPE)
        # `full_like` of a slice would keep the strides of the whole.
        self.output = torch.full_like(self.query[..., :VALUE], torch.nan, memory_format=torch.contiguous_format)

    def forward(self) -> None:
        self.impl.forward(self, self.query, self.latent, self.rope, self.cache, self.metadata, self.output)

    def dense(self, r: int) -> tuple[torch.Tensor, ...]:
        """Earlier rows are from the cache, the batch's from its inputs."""
        n, m = self.lens[r]
        position = torch.arange(m - n, device=self.device)
        pages = torch.from_numpy(self.tables[r].astype("int64")).to(self.device)[position // self.case.block_size]
        before = _rows.gather(self.cache, pages, position % self.case.block_size)
        begin = sum(count for count, _ in self.lens[:r])
        # Encoded here as the call writes them: reading them back would miss a wrong write.
        fresh = (self.latent[begin : begin + n], self.rope[begin : begin + n])
        name = self.case.kv_cache_dtype
        new = _rows.encode(*fresh, name, self.cache.dtype, self._k_scale)
        return (torch.cat([_rows.decode(rows, name, self._k_scale).float() for rows in (before, new)]),)


class TorchBench(BaseBench):
    __doc__ = BaseBench.__doc__

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device_type) if device is None else device
        self.on_gpu = self.device.type == "cuda"
        mib = 256 if self.on_gpu else 64
        # 2**18 float32 are a MiB. An H200's L2 cache has 50 MB.
        #: Memory that evicts all else from the caches when it is written or read.
        self.evict = torch.zeros(mib << 18, device=self.device)
        self._peers = peers_on(self.device)
        self._shared: Workload | None = None

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        import platform

        rates = self._rates(dtype)  # first, so that the clocks reported are those of a busy device
        facts = {
            "device": torch.cuda.get_device_name() if self.on_gpu else f"{platform.machine()} CPU",
            "torch": torch.__version__,
        }
        if self.on_gpu:
            import triton

            facts["triton"] = triton.__version__
            facts |= {"clocks": clocks} if (clocks := clocks_now(torch.cuda.get_device_properties().uuid)) else {}
        else:
            facts["threads"] = str(torch.get_num_threads())
        facts |= {name: version for name in _PACKAGES if (version := version_of(name))}
        return {**facts, **rates}

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else None

    def peers(self) -> Sequence[str]:
        return tuple(self._peers)

    def measure(self, case: BenchCase, name: str, limit: float = 0.0) -> Timing:
        """As `Bench.measure`; the limit is for the first call, and there is none outside the main thread."""
        with torch.no_grad():
            if name in self._peers:
                return self._measure_peer(case, self._peers[name], limit)
            with deadline(limit):
                workload = (MLAWorkload if case.mla else Workload)(case, name, self.device)
                workload.forward()
            return self.timed(workload.forward, workload.build, lambda: workload.output.fill_(torch.nan), workload.error)

    def _measure_peer(self, case: BenchCase, peer: Peer, limit: float) -> Timing:
        if case.features:
            raise UnsupportedError(f"peers do not support {', '.join(sorted(case.features))}")
        if self._shared is None or self._shared.case != case:  # peers of a case read the same tensors
            # Before the next one is made: two caches may not fit in memory.
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
            # [R, H, Q, D] of a dense kernel becomes [T, H, D]: all requests have equally many rows.
            out = result.transpose(1, 2).flatten(0, 1) if result.dim() == 4 else result
            workload.output.copy_(out)
            return workload.error()

        # After a capture `result` is the graph's own output, which each replay fills anew: NaN in it shows a replay that writes
        # nothing.
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
        few = min(count, 20 if self.on_gpu else 9)
        # Of the eager call: a replay's launch says nothing about what a framework does on the host.
        host_us, build_us = self._host_us(call, few), self._host_us(build, few)
        again, replayed = self._captured_or_not(call) if self.on_gpu else (call, False)
        poison()
        times = self._steady(again, count)
        # Of the timed replays, before another call writes the same output.
        wrong = error()
        clean = statistics.median(self.times(again, self.evict.amax, count))
        call_ms = statistics.median(self.times(call, self.evict.zero_, count)) if replayed else statistics.median(times)
        kernel_ms = self._kernel_ms(call, host_us)
        if not self.on_gpu and kernel_ms is not None:  # the host is the device: the rest of a call is launch overhead
            host_us -= 1e3 * kernel_ms
        figures = {"ms_clean": clean, "build_us": build_us, "host_us": host_us, "error": wrong, "replayed": replayed}
        return timing(times, **figures, call_ms=call_ms, kernel_ms=kernel_ms)

    def _steady(self, call: Callable[[], object], count: int) -> list[float]:
        """`times` with caches flushed. On a GPU, whose times contain waits for a host that stands still for milliseconds, they
        are measured twice if they vary by half, and those of the smaller median returned."""
        times = self.times(call, self.evict.zero_, count)
        if not self.on_gpu or times[-(count // 5) - 1] <= 1.5 * times[count // 5]:
            return times
        return min(times, self.times(call, self.evict.zero_, count), key=statistics.median)

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
            # Operators that no other operator called, or their time would count twice.
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
        # 0 means that the profiler saw no kernel, not that there was none.
        return sum(e.time_range.elapsed_us() for e in events if e.device_type == DeviceType.CUDA) / calls / 1e3 or None

    def _wait(self, result: object) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _captured_or_not(self, call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        try:
            return self.captured(call), True
        except RuntimeError:  # for example, a kernel that reads a value back from the device
            torch.cuda.synchronize()
            return call, False

    def times(self, call: Callable[[], object], flush: Callable[[], object], count: int, warm: bool = False) -> list[float]:
        """Milliseconds of `count` calls, sorted, with `flush` called before each."""
        if not self.on_gpu:
            return super().times(call, flush, count, warm)
        for _ in range(count):
            flush()
            call()
        # Made beforehand, and read after a single wait: the host runs ahead, so that its work is hidden behind the writes.
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
        # As torch's documentation of CUDA graphs asks: what is allocated or compiled at the first calls must not be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        token = of_one_batch.set(True)  # every replay is of this batch
        try:
            with torch.cuda.graph(graph):
                call()
        finally:
            of_one_batch.reset(token)
        return graph.replay

    def _copy(self) -> float:
        # 4 GiB, or 64 MiB on a CPU: read once and written once.
        source = torch.randn((1 << 30) if self.on_gpu else (16 << 20), device=self.device)
        target = torch.empty_like(source)
        times = self.times(lambda: target.copy_(source), lambda: None, 12 if self.on_gpu else 3)
        # Bytes per millisecond / 1e6 are GB/s; below, operations per millisecond / 1e9 are TFLOP/s.
        return 2 * source.numel() * 4 / statistics.median(times) / 1e6

    def _gemm(self, dtype: str) -> float:
        n = 8192 if self.on_gpu else _CPU_GEMM
        a, b = (torch.randn(n, n, device=self.device, dtype=getattr(torch, dtype)) for _ in "ab")
        out = torch.empty_like(a)
        times = self.times(lambda: torch.mm(a, b, out=out), lambda: None, 12 if self.on_gpu else 3)
        return 2 * n**3 / statistics.median(times) / 1e9
