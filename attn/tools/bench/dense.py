"""`attn bench --registry diffusion`: time dense backends, checking each in the same run.

A shape is `<batch>x<rows>x<heads>x<head size>`: a self-attention layer of an image or video model, such as `2x4608x24x128`.
Every available backend that serves the shape is timed on the same tensors, interleaved, so that clock throttling affects
every backend equally. Outputs are compared with float32 over sampled rows: exact backends against their dtype's limit,
approximate ones against that plus their declared error. The selector's choice for a layer without an error budget is marked;
it must not be slower than another exact backend by more than `MARGIN`. Operations are 4 B H S^2 D.
"""

import argparse
import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn.backend_enum import off_paths
from attn.diffusion.backends.abstract import DiffusionRequest
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import select_diffusion
from attn.imports import resolve_obj_by_qualname
from attn.selection.platforms import default_framework, platform_for
from attn.selection.preferences import MARGIN
from attn.selection.verdicts import judge
from attn.tables import Column, folded, header, line, wrapped
from attn.tools.bench.case import LIMITS, Timing
from attn.tools.bench.roofline import draw
from attn.tools.bench.rows import BenchReport


@dataclass(frozen=True)
class Shape:
    """Shape of a layer's queries, keys and values: [batch, rows, heads, head_size]."""

    batch: int
    rows: int
    heads: int
    head_size: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}x{self.heads}x{self.head_size}"

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.rows**2 * self.head_size

    def request(self, dtype: str, error_budget: float = 0.0) -> DiffusionRequest:
        return DiffusionRequest(
            self.head_size,
            dtype,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            error_budget=error_budget,
            rows=self.rows,
            keys=self.rows,
        )


#: Common models: Flux and SD3 at 1024 x 1024 with guidance, Wan 2.x for five seconds of 480p and 720p.
SUITE = (
    Shape(2, 4608, 24, 128, "Flux"),
    Shape(2, 4250, 24, 64, "SD3"),
    Shape(1, 32760, 40, 128, "Wan 480p"),
    Shape(1, 75600, 40, 128, "Wan 720p"),
)

#: Columns of a row; "allowed" is the largest error of a right output.
COLUMNS = (
    Column(" backend", 24, text=True, of=lambda row: f"{'*' if row.chosen else ' '}{row.backend}"),
    Column("ms", 10, of=lambda row: f"{row.timing.ms:.4f}"),
    Column("p20 .. p80", 23, of=lambda row: f"{row.timing.ms_p20:.4f} .. {row.timing.ms_p80:.4f}"),
    Column("TFLOP/s", 8, of=lambda row: f"{row.tflop_per_s:.1f}"),
    Column("kind", 11, text=True, of=lambda row: "exact" if row.exact else "approximate"),
    Column("error", 8, of=lambda row: f"{row.timing.error:.1e}"),
    Column("allowed", 8, of=lambda row: f"{row.allowed:.1e}"),
)


def parse(text: str) -> Shape:
    """Parse a shape. Raises ValueError for an invalid one."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
        raise ValueError(f"shape={text!r} is not <batch>x<rows>x<heads>x<head size>, such as {SUITE[0]}")
    named = {str(shape): shape for shape in SUITE}
    batch, rows, heads, head_size = map(int, text.split("x"))
    # With the model's name if it is one of the suite, for the table.
    return named.get(text, Shape(batch, rows, heads, head_size))


@dataclass(frozen=True)
class DenseRow:
    """One shape on one backend: its `timing` and `allowed` error; or `refused`: why it does not serve the shape on this
    machine; or what it `raised`. `chosen`: the selector's choice without an error budget; `exact`: declares no error."""

    shape: Shape
    backend: str
    exact: bool = True
    chosen: bool = False
    refused: str = ""
    timing: Timing | None = None
    allowed: float = 0.0
    raised: str = ""

    @property
    def right(self) -> bool:
        """Whether nothing was raised and the error is within the limit (NaN is not)."""
        return not self.raised and (self.timing is None or self.timing.error <= self.allowed)

    @property
    def tflop_per_s(self) -> float:
        return self.shape.flops / self.timing.ms / 1e9 if self.timing else 0.0

    def __str__(self) -> str:
        if self.timing is None:
            text = f"{COLUMNS[0].of(self):24s} {'not available: ' + self.refused if self.refused else 'FAILED: ' + self.raised}"
            return "\n".join(wrapped(text, more=" " * (COLUMNS[0].width + 1)))
        return line([column.of(self) for column in COLUMNS], COLUMNS) + ("" if self.right else " WRONG")

    def to_dict(self) -> dict[str, Any]:
        # JSON has no NaN: a row without a time has zeros, and `refused` or `raised` say why.
        t = self.timing or Timing(0.0, 0.0, 0.0, error=0.0)
        of_row = {name: getattr(self, name) for name in ("backend", "exact", "chosen", "refused", "allowed", "raised", "right")}
        times = {name: getattr(t, name) for name in ("ms", "ms_p20", "ms_p80", "error")}
        shape = {"shape": str(self.shape), "name": self.shape.name}
        return {**shape, **of_row, **times, "tflop_per_s": round(self.tflop_per_s, 2)}


@dataclass
class DenseReport(BenchReport):
    """Rows of shapes, with problems in place of verdicts."""

    rows: list[DenseRow] = field(default_factory=list)  # type: ignore[assignment]

    @property
    def right(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """Return every wrong row, and every exact backend that is faster than its shape's choice by more than `MARGIN`."""
        sentences = [f"{row.shape} {row.backend} is wrong: {' '.join(str(row).split())}" for row in self.rows if not row.right]
        timed = [(row, row.timing.ms) for row in self.rows if row.right and row.timing]
        # A choice with wrong results is not in `timed`: the lines above report it.
        for best, least in ((row, ms) for row, ms in timed if row.chosen):
            sentences += [
                f"{row.shape}: {row.backend} takes {ms:.4f} ms, the choice {best.backend} {least:.4f}"
                for row, ms in timed
                if row.shape == best.shape and row.exact and ms * (1 + MARGIN) < least
            ]
        return sentences

    def to_dict(self) -> dict[str, Any]:
        return {**self.about, "rows": [row.to_dict() for row in self.rows], "problems": self.problems()}


def rows(shape: Shape, dtype: str, names: Sequence[str], framework: str, bench: Any) -> Iterator[DenseRow]:
    """Time a shape on the given backends (default: all of the framework) and on the choice, the slowest last.

    bench: a `attn.tools.bench.dense_on_torch.DenseBench`.
    """
    device = platform_for(framework).device()
    chosen = select_diffusion(shape.request(dtype), framework=framework).name
    refused, classes = [], {}
    for name in [*(names or DiffusionAttentionBackendEnum.names()), *([chosen] if chosen else [])]:
        candidate = DiffusionAttentionBackendEnum[name].candidate()
        name = candidate.name  # a name may be passed in another case
        capabilities = getattr(candidate.backend, "capabilities", None)
        if not names and (
            capabilities is None or capabilities.framework != framework or device.platform not in capabilities.platforms
        ):
            continue
        # Each backend is judged with the error budget that it needs; without one an approximate one would always be refused.
        error = getattr(candidate.backend, "error", 0.0)
        verdict = judge(candidate, shape.request(dtype, error), device)
        # A dict: a backend that is both named and chosen is timed once.
        if verdict.ok:
            classes[name] = candidate.backend
        else:
            refused.append(DenseRow(shape, name, exact=error == 0, refused=str(verdict)))
    timings = bench.measure(shape, dtype, list(classes.values()))
    rows = [
        _row(shape, name, name == chosen, timing, cls.error, LIMITS[dtype])  # type: ignore[union-attr]
        for (name, cls), timing in zip(classes.items(), timings, strict=True)
    ]
    yield from sorted(rows, key=lambda row: row.timing.ms if row.timing else float("inf"))
    yield from refused


def _row(shape: Shape, name: str, chosen: bool, timing: Timing | Exception, declared: float, limit: float) -> DenseRow:
    """A row of a backend's time, or of the exception it raised, with its declared error."""
    if isinstance(timing, Exception):
        return DenseRow(shape, name, declared == 0, chosen, raised=f"{type(timing).__name__}: {str(timing)[:300]}")
    return DenseRow(shape, name, declared == 0, chosen, timing=timing, allowed=limit + declared)


def run(args: argparse.Namespace) -> int:
    """Run `attn bench --registry diffusion`.

    Returns 1 if an output is wrong or the choice is not the fastest exact backend, else 0.
    """
    shapes = [parse(text) for text in args.batches] or list(SUITE)
    framework = args.framework or default_framework()
    if framework != "torch":
        raise ValueError(f"framework={framework!r} has no benchmark of dense backends (supports torch)")
    bench = resolve_obj_by_qualname("attn.tools.bench.dense_on_torch.DenseBench")()
    dtype = args.dtype or "bfloat16"
    report = DenseReport({**bench.about(), "dtype": dtype, "date": datetime.date.today().isoformat()})
    print(folded(", ".join(f"{name} {value}" for name, value in report.about.items())))
    print(folded(header(COLUMNS)))
    for shape in shapes:
        print(f"{shape.name} {shape}".strip())
        for row in rows(shape, dtype, args.backend or (), framework, bench):
            report.rows.append(row)
            print(folded(row), flush=True)
        report.write(args.json)  # after each shape, so that an interrupted run keeps its rows
    for off in off_paths(DiffusionAttentionBackendEnum, [row.backend for row in report.rows if not row.refused]):
        print(folded(off))
    for problem in report.problems():
        print(folded(f"problem: {problem}"))
    draw(args.plot, report.to_dict())
    return int(not report.right)
