"""How fast a backend is: batches in vLLM's grammar, each timed configuration checked in the same run.

A batch is `[count]q<new tokens>[k][s<tokens in the cache>[k]]`, joined by `_`, where k multiplies by 1,024: `64q1s4k` is 64
decodes, `2q2k_32q1s1k` two prompts beside 32 decodes. A row tells the time of a call (on a GPU: of a replayed graph, caches
flushed before each), what it costs the host, and two rates, as shares of what a copy and a matrix product reach on the same
device in the same run. The bytes counted are those that must move: keys, values, queries and outputs once. The operations
are 4 H D for each pair of a query and a key that it sees.
"""

import argparse
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from attn import dtypes
from attn.imports import resolve_obj_by_qualname
from attn.platforms import default_framework

_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")
#: Relative RMS error against float32 above which a time counts for nothing: twice the rounding of one product's operands.
LIMITS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-4}


@dataclass(frozen=True)
class Case:
    """What is timed. `heads` is `query heads/kv heads`; block_size is in tokens."""

    batch: str
    heads: str = "32/8"
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"

    @property
    def num_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.heads.partition("/")[2] or self.num_heads)

    def __str__(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}"
        return f"{self.batch} {self.heads}x{self.head_size} p{self.block_size}{cache}"


#: The rows of the table in benchmarks/NOTES.md: decode, long decode, speculative, prefill, mixed.
SUITE = (
    Case("64q1s4k"), Case("16q1s32k", "64/8", block_size=64), Case("128q1s2k"), Case("q1s32k"), Case("64q1s4k", "64/8", 64),
    Case("16q4s1k"), Case("4q4k"), Case("4q4k", block_size=128), Case("2q2k_32q1s1k"), Case("1q512s8k_63q1s4k"),
    Case("64q1s4k", kv_cache_dtype="fp8"), Case("64q1s4k", kv_cache_dtype="int8"), Case("4q4k", kv_cache_dtype="fp8"),
)  # fmt: skip


def parse(batch: str) -> list[tuple[int, int]]:
    """[(new tokens, tokens in the cache with them)], one a request; the cache holds what is new unless said otherwise.

    Raises ValueError for what the grammar has no reading of, and for a cache that holds less than what is new.
    """
    found = []
    for part in batch.split("_"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"batch={batch!r}: {part!r} is not <count>q<new tokens>[k][s<tokens in the cache>[k]]")
        count, q, q_k, kv, kv_k = match.groups()
        n = int(q) * (1024 if q_k else 1)
        m = int(kv) * (1024 if kv_k else 1) if kv else n
        if n < 1 or m < n:
            raise ValueError(f"batch={batch!r}: {part!r} has {n} new of {m} tokens: need 1 or more, and no more than there are")
        found += [(n, m)] * int(count or 1)
    return found


def flops(case: Case) -> int:
    """Operations of the two products over the pairs that a causal mask allows."""
    return 4 * case.num_heads * case.head_size * sum(q * m - q * (q - 1) // 2 for q, m in parse(case.batch))


def nbytes(case: Case) -> int:
    """Bytes that must move: keys and values once, queries and outputs once."""
    lens = parse(case.batch)
    stored = dtypes.DTYPES[dtypes.kv_cache_element(case.kv_cache_dtype, case.dtype)].itemsize
    cache = 2 * case.num_kv_heads * case.head_size * stored * sum(m for _, m in lens)
    return cache + 2 * case.num_heads * case.head_size * dtypes.DTYPES[case.dtype].itemsize * sum(q for q, _ in lens)


@dataclass(frozen=True)
class Timing:
    """What a wing measures. Milliseconds of a call: median and percentiles with a cache full of lines to write back, and the
    median with a clean one; microseconds of the host: to build a batch's metadata, and to make one call."""

    ms: float
    ms_p20: float
    ms_p80: float
    ms_clean: float
    build_us: float
    host_us: float
    error: float


@dataclass(frozen=True)
class Row:
    """One case on one backend: `timing`, and its rates as shares of the device's own copy and matrix product."""

    case: Case
    backend: str
    timing: Timing
    gb_per_s: float
    tflop_per_s: float
    of_copy: float
    of_gemm: float
    right: bool

    def __str__(self) -> str:
        t = self.timing
        verdict = f"error {t.error:.1e}" if self.right else f"WRONG: error {t.error:.1e}"
        return (
            f"{self.case!s:36s} {self.backend:12s} {t.ms:8.4f} ms [{t.ms_p20:.4f} {t.ms_p80:.4f}] clean {t.ms_clean:.4f}"
            f"{self.gb_per_s:6.0f} GB/s {100 * self.of_copy:5.1f} % of copy {self.tflop_per_s:6.1f} TF "
            f"{100 * self.of_gemm:4.1f} % of gemm, host {t.host_us:.0f} us, build {t.build_us:.0f} us, {verdict}"
        )

    def to_dict(self) -> dict[str, Any]:
        flat = {**asdict(self), **asdict(self.case), **asdict(self.timing)}
        return {name: value for name, value in flat.items() if name not in ("case", "timing")}


@dataclass
class Report:
    """Rows and where they come from: `about` names device, versions and date, and the two ceilings."""

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**self.about, "rows": [row.to_dict() for row in self.rows]}


class Bench(Protocol):
    """A wing's side: one device, its ceilings, and the stopwatch."""

    copy_gb_per_s: float
    gemm_tflop_per_s: float

    def about(self) -> dict[str, Any]: ...

    def measure(self, case: Case, backend: str) -> Timing: ...


def judged(case: Case, backend: str, timing: Timing, bench: Bench) -> Row:
    """A timing as a row."""
    gb, tflop = nbytes(case) / timing.ms / 1e6, flops(case) / timing.ms / 1e9
    shares = (gb / bench.copy_gb_per_s, tflop / bench.gemm_tflop_per_s)
    return Row(case, backend, timing, gb, tflop, *shares, timing.error <= LIMITS[case.dtype])


def rows(cases: Sequence[Case], backends: Sequence[str], bench: Bench) -> Iterator[Row]:
    """Every case on every backend, as they come. Raises `UnsupportedError` when a backend does not serve a case."""
    for case in cases:
        for backend in backends:
            yield judged(case, backend, bench.measure(case, backend), bench)


def open_bench(framework: str) -> Bench:
    """The wing's stopwatch on its default device. Raises ValueError for a wing that has none."""
    if framework != "torch":
        raise ValueError(f"framework={framework!r} has no benchmark (torch has)")
    return resolve_obj_by_qualname("attn.torch.bench.TorchBench")()  # type: ignore[no-any-return]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, Case("")
    add("batches", nargs="*", metavar="BATCH", help="such as 64q1s4k or 2q2k_32q1s1k (default: a table of a dozen)")
    add("--backend", action="append", metavar="NAME", help="may be repeated (default: TRITON_ATTN)")
    add("--heads", default=default.heads, help="query heads/kv heads (default: %(default)s)")
    add("--head-size", type=int, default=default.head_size, help="(default: %(default)s)")
    add("--block-size", type=int, default=default.block_size, help="tokens a block of the cache (default: %(default)s)")
    add("--dtype", default=default.dtype, choices=sorted(LIMITS), help="(default: %(default)s)")
    add("--kv-cache-dtype", default=default.kv_cache_dtype, help="(default: %(default)s)")
    add("--framework", help="(default: the one that is here)")
    add("--json", metavar="FILE", help="write the rows, the device and the versions there")


def run(args: argparse.Namespace) -> int:
    """1 when some row is not right, else 0."""
    model = Case("", args.heads, args.head_size, args.block_size, args.dtype, args.kv_cache_dtype)
    cases = [replace(model, batch=batch) for batch in args.batches] or list(SUITE)
    for case in cases:
        parse(case.batch)
    bench = open_bench(args.framework or default_framework())
    report = Report({**bench.about(), "date": datetime.date.today().isoformat()})
    print(", ".join(f"{name} {value}" for name, value in report.about.items()))
    for row in rows(cases, args.backend or ["TRITON_ATTN"], bench):
        report.rows.append(row)
        print(row, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.right for row in report.rows) else 1
