"""Summary of a report of many batches: a line per batch, and means over all batches and over those of each kind.

Rows are plain dicts, as `BenchReport.to_dict` returns and files store them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn.tables import Column, line
from attn.tools.bench.case import KINDS, BenchCase, abbreviated, key_bytes, kind_of, parse
from attn.tools.bench.judge import case_of, geometric_mean, timed, verdicts

#: Below this many bytes of keys a decode is launch-bound: its bandwidth says nothing about its kernel.
LARGE = 8 << 20
#: Backends that run the same kernels, so comparing them with one another means nothing.
SAME_KERNELS = frozenset({"TRITON_ATTN", "TREE_ATTN", "ROCM_ATTN"})
#: Columns of an outcome.
COLUMNS = (
    *(Column("#", 4), Column("kind", 11, text=True, wide=True), Column("batch", 36, text=True)),
    *(Column(" backend", 17, text=True), Column("ms", 9), Column("floor ms", 9, wide=True), Column("% copy", 6)),
    *(Column("error", 8, wide=True), Column("ratio", 6), Column("best other", 0, text=True)),
)


@dataclass(frozen=True)
class BatchOutcome:
    """One batch: `row` of the selector's choice (else of the first backend named), and `other` of the fastest different kernel
    (None: no other has a time). `number` counts a framework's batches from 1;
    `lost`: as `BenchVerdict.lost`."""

    number: int
    framework: str
    case: BenchCase
    row: Mapping[str, Any]
    other: Mapping[str, Any] | None
    lost: bool

    @property
    def batch_type(self) -> str:
        return kind_of(parse(self.case.batch))

    @property
    def ratio(self) -> float | None:
        """The other kernel's time relative to the row's: above 1, the row is the faster. None if either has no time."""
        return self.other["ms"] / self.row["ms"] if self.other is not None and timed(self.row) else None

    def text(self, wide: bool = False) -> str:
        """Format the outcome; `wide`: with every column."""
        head = (str(self.number), self.batch_type, abbreviated(str(self.case)), f" {self.row['backend']}")
        if not timed(self.row):
            reason = " ".join(str(self.row.get("refused") or "WRONG").split())
            return f"{line(head, COLUMNS, wide)} no time: {reason[:200]}"
        ms, of_copy = self.row["ms"], self.row["of_copy"]
        numbers = f"{ms:.4f}", f"{ms * of_copy:.4f}", f"{100 * of_copy:.1f}", f"{self.row['error']:.1e}"
        if self.other is None or self.ratio is None:
            return line((*head, *numbers), COLUMNS, wide)
        name = self.other["backend"] + (" LOSES" if self.lost else "")
        return line((*head, *numbers, f"{self.ratio:.2f}", name), COLUMNS, wide)


def outcomes(rows: Sequence[dict[str, Any]]) -> list[BatchOutcome]:
    """Return the outcome of every batch, in the order of the rows."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        # By the order of the rows: the numbers are those of the printed table.
        groups.setdefault((row.get("framework", "torch"), case_of(row)), []).append(row)
    results: list[BatchOutcome] = []
    for (framework, _), group in groups.items():
        # A run of peers alone has the first of them as its own.
        eligible = [row for row in group if not row.get("peer")] or group
        choice = next((row for row in eligible if row.get("chosen")), eligible[0])
        same = SAME_KERNELS if choice["backend"] in SAME_KERNELS else {choice["backend"]}
        rivals = (row for row in group if row["backend"] not in same and timed(row))
        other = min(rivals, key=lambda row: row["ms"], default=None)
        number = 1 + sum(outcome.framework == framework for outcome in results)
        lost = any(verdict.lost for verdict in verdicts(group))
        results.append(BatchOutcome(number, framework, BenchCase.of(choice), choice, other, lost))
    return results


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Format, for each framework: the geometric mean and the worst of the ratios, over all batches and by kind; and the share
    of the copy's rate that large decodes reach."""
    results = outcomes(rows)
    frameworks = list(dict.fromkeys(outcome.framework for outcome in results))
    lines = []
    for framework in frameworks:
        of_framework = [outcome for outcome in results if outcome.framework == framework]
        lines += [f"{framework}:"] if len(frameworks) > 1 else []
        for batch_type in ("all", *(KINDS if any(outcome.ratio for outcome in of_framework) else ())):
            of_type = [outcome for outcome in of_framework if batch_type in ("all", outcome.batch_type)]
            lines += [f"{batch_type:11s} {_ratios(of_type)}"] if of_type else []
        lines.append(_large_decodes(of_framework))
    return "\n".join(lines)


def _ratios(outcomes: Sequence[BatchOutcome]) -> str:
    """Describe the ratios of the outcomes that have one."""
    count, missing = f"{_batches(len(outcomes))}", sum(not timed(outcome.row) for outcome in outcomes)
    count += f" ({missing} without a time)" if missing else ""
    ratios = [(outcome.ratio, outcome.number) for outcome in outcomes if outcome.ratio is not None]
    if not ratios:
        return f"{count}; no other kernel was timed"
    worst, where = min(ratios)
    mean = geometric_mean([ratio for ratio, _ in ratios])
    return f"{count}; best other / ours in {len(ratios)}: {mean:.3f} geometric mean, {worst:.3f} at worst (#{where})"


def _large_decodes(outcomes: Sequence[BatchOutcome]) -> str:
    """Describe the shares of copy of decodes with at least `LARGE` bytes of keys."""
    title = f"decodes with at least {LARGE >> 20} MiB of keys"
    large = [o for o in outcomes if o.batch_type == "decodes" and key_bytes(o.case) >= LARGE and timed(o.row)]
    if not large:
        return f"{title}: none with a time"
    shares = [(outcome.row["of_copy"], outcome.number) for outcome in large]
    worst, where = min(shares)
    mean = geometric_mean([share for share, _ in shares])
    return (
        f"{title}: {_batches(len(large))}, {100 * mean:.1f} % of copy (geometric mean), {100 * worst:.1f} % at worst (#{where})"
    )


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"
