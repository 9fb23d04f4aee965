"""TRITON_ATTN on a GPU: time, bandwidth and arithmetic rate of batches in the grammar `(count)q<q>(k)(s<kv>(k))`.

    python -m benchmarks.triton_attn                       every row of the table
    python -m benchmarks.triton_attn 64q1s4k --heads 64/8  one row of your own
    python -m benchmarks.triton_attn --json out.json

Each row: random bf16 inputs, pages at random places, the call captured in a CUDA graph and replayed, median and
p20/p80 of the replays by CUDA events. Before every replay 256 MiB are written, which leaves L2 full of lines that the
call must first write back (some 8 us on an H200); `clean` is the median when they are read instead. The replayed
output is compared with fp32 attention in the same run (relative RMS over up to three requests of each length). The
ceiling is a device-to-device copy measured first.
"""

import argparse
import datetime
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.torch import kv_cache as caches
from attn.torch.backends.triton_attn import TritonAttentionBackend

#: (batch, heads/kv heads, head size, page, what bounds it)
ROWS = (
    ("64q1s4k", "32/8", 128, 16, "memory"),
    ("16q1s32k", "64/8", 128, 64, "memory"),
    ("128q1s2k", "32/8", 128, 16, "memory"),
    ("q1s32k", "32/8", 128, 16, "memory"),
    ("64q1s4k", "64/8", 64, 16, "memory"),
    ("16q4s1k", "32/8", 128, 16, "memory"),
    ("4q4k", "32/8", 128, 16, "arithmetic"),
    ("2q2k_32q1s1k", "32/8", 128, 16, "arithmetic"),
    ("1q512s8k_63q1s4k", "32/8", 128, 16, "memory"),
)
_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


@dataclass
class Row:
    """One measured row; `error` is relative RMS against fp32."""

    batch: str
    heads: str
    head_size: int
    page: int
    dtype: str
    kv_cache_dtype: str
    ms: float
    ms_p20: float
    ms_p80: float
    ms_clean: float
    gb_per_s: float
    tflop_per_s: float
    of_copy: float
    error: float

    def __str__(self) -> str:
        return (
            f"{self.batch:18s} {self.heads:>5s}x{self.head_size:<3d} p{self.page:<3d} {self.kv_cache_dtype:8s} "
            f"{self.ms:7.4f} ms [{self.ms_p20:.4f} {self.ms_p80:.4f}] clean {self.ms_clean:.4f} {self.gb_per_s:6.0f} GB/s "
            f"{100 * self.of_copy:5.1f} % of copy "
            f"{self.tflop_per_s:6.1f} TF  error {self.error:.1e}"
        )


def parse(batch: str) -> list[tuple[int, int]]:
    """[(q_len, kv_len)] of a batch; kv_len defaults to q_len. Raises ValueError for what the grammar has no reading of."""
    found = []
    for part in batch.split("_"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"batch part {part!r}: must be <count>q<q>[k][s<kv>[k]]")
        count, q, q_k, kv, kv_k = match.groups()
        n = int(q) * (1024 if q_k else 1)
        m = int(kv) * (1024 if kv_k else 1) if kv else n
        found += [(n, m)] * int(count or 1)
    return found


class Workload:
    """A layer, a filled cache and one batch on the device; `forward()` attends without writing the cache."""

    def __init__(
        self, batch: str, heads: str, head_size: int, page: int, dtype: torch.dtype, kv_cache_dtype: str, **layer: Any
    ) -> None:
        self.lens = parse(batch)
        self.num_heads, self.num_kv_heads = (int(h) for h in heads.split("/"))
        self.head_size, self.page, self.dtype = head_size, page, dtype
        generator = torch.Generator("cuda").manual_seed(0)
        pages = [-(-m // page) for _, m in self.lens]
        ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        tables = np.split(ids, np.cumsum(pages)[:-1])
        name = str(dtype).removeprefix("torch.")
        spec = KVCacheSpec(page, self.num_kv_heads, head_size, name, kv_cache_dtype, sum(pages))
        common = CommonAttentionMetadata.from_lens([q for q, _ in self.lens], [m for _, m in self.lens], tables, page)
        self.metadata = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, torch.device("cuda")).build(0, common)
        self.cache = caches.allocate(TritonAttentionBackend, spec, sum(pages), "cuda")
        for part in self.cache:
            noise = torch.randn(part.shape, device="cuda", dtype=torch.float16, generator=generator)
            part.copy_((noise * 30 if self.cache.dtype == torch.int8 else noise).to(self.cache.dtype))
        total = sum(q for q, _ in self.lens)
        self.query = torch.randn(total, self.num_heads, head_size, device="cuda", dtype=dtype, generator=generator)
        self.output = torch.full_like(self.query, torch.nan)
        self.impl = TritonAttentionBackend.get_impl_cls()(
            self.num_heads, head_size, head_size**-0.5, self.num_kv_heads, kv_cache_dtype=kv_cache_dtype, **layer
        )
        self._k_scale = self._v_scale = torch.tensor(0.03 if self.cache.dtype == torch.int8 else 1.0)
        self.tables = tables

    def forward(self) -> None:
        self.impl.forward(self, self.query, None, None, self.cache, self.metadata, self.output)

    def bytes(self) -> int:
        kv = sum(m for _, m in self.lens) * 2 * self.num_kv_heads * self.head_size * self.cache.element_size()
        return kv + 2 * self.query.numel() * self.query.element_size()

    def flops(self) -> int:
        pairs = sum(q * m - q * (q - 1) // 2 for q, m in self.lens)
        return 4 * self.num_heads * self.head_size * pairs

    def error(self) -> float:
        """Relative RMS of `output` against fp32 over up to three requests of each length."""
        wrong = total = 0.0
        start = np.cumsum([0] + [q for q, _ in self.lens])
        seen: dict[tuple[int, int], int] = {}
        for r, (n, m) in enumerate(self.lens):
            seen[n, m] = seen.get((n, m), 0) + 1
            if seen[n, m] > 3:
                continue
            blocks = torch.from_numpy(self.tables[r].astype(np.int64)).cuda()
            key, value = (part[blocks].flatten(0, 1)[:m].float() * float(self._k_scale) for part in self.cache)
            group = self.num_heads // self.num_kv_heads
            for first in range(0, n, 256):
                rows = slice(int(start[r]) + first, int(start[r]) + min(first + 256, n))
                q = self.query[rows].float()
                position = torch.arange(first, first + len(q), device="cuda")[:, None] + m - n
                hidden = torch.arange(m, device="cuda")[None] > position
                for h in range(self.num_kv_heads):
                    own = slice(h * group, (h + 1) * group)
                    s = torch.einsum("tgd,sd->gts", q[:, own], key[:, h]) * self.head_size**-0.5
                    want = torch.einsum("gts,sd->tgd", s.masked_fill(hidden, -torch.inf).softmax(-1), value[:, h])
                    wrong += float((self.output[rows, own].float() - want).square().sum())
                    total += float(want.square().sum())
        return (wrong / total) ** 0.5


def replay_times(graph: torch.cuda.CUDAGraph, flush: Callable[[], object], count: int = 40) -> list[float]:
    """Milliseconds of each of `count` replays in order of size, `flush` called before every one; as many go before unmeasured,
    since an idle device takes its clocks up over the first dozens."""
    for _ in range(count):
        flush()
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        flush()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)


def captured(call: Any) -> torch.cuda.CUDAGraph:
    """`call` as a graph, after two warm-up calls on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy of 4 GiB, read and write counted."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.numel() * 4 / statistics.median(times) / 1e6


def measure(workload: Workload, names: tuple[str, str], kv_cache_dtype: str, copy: float, evict: torch.Tensor) -> Row:
    graph = captured(workload.forward)
    workload.output.fill_(torch.nan)
    times = replay_times(graph, evict.zero_)
    clean = statistics.median(replay_times(graph, evict.amax))
    ms, gb = statistics.median(times), workload.bytes() / 1e6
    return Row(
        *names, workload.head_size, workload.page, str(workload.dtype).removeprefix("torch."), kv_cache_dtype,
        ms, times[len(times) // 5], times[4 * len(times) // 5], clean,
        gb / ms, workload.flops() / ms / 1e9, gb / ms / copy, workload.error(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*")
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [(b, args.heads, args.head_size, args.page, "") for b in args.batches] or ROWS
    copy = copy_bandwidth()
    evict = torch.zeros(64 << 20, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy:.0f} GB/s")
    found = []
    for batch, heads, head_size, page, _ in rows:
        workload = Workload(batch, heads, head_size, page, torch.bfloat16, args.kv_cache_dtype)
        found.append(measure(workload, (batch, heads), args.kv_cache_dtype, copy, evict))
        print(found[-1], flush=True)
        del workload
    if args.json:
        import triton

        about: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        about |= {"triton": triton.__version__, "date": datetime.date.today().isoformat(), "copy_gb_per_s": round(copy, 1)}
        with open(args.json, "w") as file:
            json.dump({**about, "rows": [asdict(row) for row in found]}, file, indent=1)


if __name__ == "__main__":
    main()
