"""Analysis of timed rows: whether the choice was the fastest, the ranking, and what changed between two runs.

Rows are plain dicts, as `BenchReport.to_dict` returns and files store them. Two times are distinguished only when their middle
three fifths (p20 to p80) do not overlap, and matter only when they differ by more than `MARGIN`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn.selection.preferences import MARGIN
from attn.tables import counted
from attn.tools.bench.case import BenchCase, abbreviated


@dataclass(frozen=True)
class BenchVerdict:
    """Assessment of a choice: `behind` is its time relative to the fastest backend's, minus 1 (0.12: 12 % slower); `apart`:
    whether the middle three fifths of their times do not overlap; `peer`: the fastest kernel that could not be chosen."""

    case: str
    choice: str
    ms: float
    fastest: str
    behind: float
    apart: bool
    peer: str = ""
    ahead: float = 0.0  #: time of the choice relative to `peer`'s, minus 1

    @property
    def lost(self) -> bool:
        return self.apart and self.behind > MARGIN

    @property
    def outcome(self) -> str:
        """The verdict in words, without the case."""
        text = f"{self.choice} is the fastest backend"
        if self.behind > 0:
            doubt = "" if self.apart else " (spreads overlap)"
            relation = "LOSES to" if self.lost else "is level with"
            text = f"{self.choice} {relation} {self.fastest}, which is {1 + self.behind:.2f} x as fast{doubt}"
        peer = f"; {self.peer}, which cannot be selected, is {1 + self.ahead:.2f} x as fast"
        return text + (peer if self.ahead > MARGIN else "")

    def __str__(self) -> str:
        return f"{abbreviated(self.case):36s} {self.outcome}"


def case_of(row: Mapping[str, Any]) -> str:
    """Return the case of a report's row: a dense row's shape, else the batch and its layer."""
    return str(row["shape"] if "shape" in row else BenchCase.of(row))


def timed(row: Mapping[str, Any]) -> bool:
    """Whether the row has a valid time."""
    return bool(row.get("right")) and bool(row.get("ms"))


def _beside(row: Mapping[str, Any]) -> bool:
    """Whether the selector could not have chosen the row's kernel: a peer, or a backend that declares an error."""
    return bool(row.get("peer")) or not row.get("exact", True)


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the timed rows by case and framework, since a choice is made within one framework."""
    frameworks = {row.get("framework", "torch") for row in rows}
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if timed(row):
            # Rows of dense backends name none: only torch times them.
            framework = f" ({row.get('framework', 'torch')})" if len(frameworks) > 1 else ""
            grouped.setdefault(f"{case_of(row)}{framework}", []).append(row)
    return grouped


def apart(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> bool:
    """Whether the middle three fifths of `fast`'s times are below those of `slow`'s."""
    return bool(fast["ms_p80"] < slow["ms_p20"])


def verdicts(rows: Sequence[dict[str, Any]]) -> list[BenchVerdict]:
    """Return a verdict for each case whose choice has a right row."""
    judged = []
    for case, right in _by_case(rows).items():
        choice = next((row for row in right if row.get("chosen")), None)
        if choice is None:
            continue
        # Never empty: the choice itself can be selected.
        first = min((row for row in right if not _beside(row)), key=lambda row: row["ms"])
        peer = min((row for row in right if _beside(row)), key=lambda row: row["ms"], default=None)
        more = {} if peer is None else {"peer": peer["backend"], "ahead": choice["ms"] / peer["ms"] - 1}
        behind = choice["ms"] / first["ms"] - 1
        judged.append(
            BenchVerdict(case, choice["backend"], choice["ms"], first["backend"], behind, apart(first, choice), **more)
        )
    return judged


def ranking(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, float, float, str]]:
    """Return (backend, cases, geometric mean of its time relative to the fastest's, the worst ratio, its case), best first.

    Backends that serve more cases come first, since one that serves fewer could not be first on a priority list.
    """
    ratios: dict[str, list[tuple[float, str]]] = {}
    for case, right in _by_case(rows).items():
        candidates = [row for row in right if not _beside(row)]
        for row in candidates:
            # Relative to the fastest backend, not to the fastest peer: a list of priorities has no peers.
            ratios.setdefault(row["backend"], []).append((row["ms"] / min(r["ms"] for r in candidates), case))
    # Geometric, so that twice and half as fast cancel.
    entries = [(name, len(pairs), geometric_mean([ratio for ratio, _ in pairs]), *max(pairs)) for name, pairs in ratios.items()]
    return sorted(entries, key=lambda entry: (-entry[1], entry[2]))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers, of which there is at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))


def judge(rows: Sequence[dict[str, Any]]) -> str:
    """Format verdicts and ranking as text."""
    return "\n".join([*map(str, verdicts(rows)), *ranked(rows)])


def ranked(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the ranking, a line per backend, under a line that says what the numbers are."""
    lines = [
        f"  {name:24s} {counted(cases, 'case'):>9s}, mean {mean:.3f}, worst {worst:.2f} ({abbreviated(where)})"
        for name, cases, mean, worst, where in ranking(rows)
    ]
    return [*(["time of each backend / time of the fastest backend:"] if lines else []), *lines]


# two runs


@dataclass(frozen=True)
class Change:
    """One backend on one case in two runs. `ratio` is the second time over the first (None: a run has no right row, and
    `note` says which); `apart`: whether the middle three fifths of the times do not overlap."""

    case: str
    backend: str
    before: float | None
    after: float | None
    ratio: float | None
    apart: bool = False
    note: str = ""

    @property
    def worse(self) -> bool:
        """Whether it is slower, `apart` and by more than `MARGIN`, or right in the first run only."""
        if self.ratio is None:
            # A case that the second run left out is no loss.
            return self.before is not None and self.after is None and "not run" not in self.note
        return self.apart and self.ratio > 1 + MARGIN

    @property
    def better(self) -> bool:
        return self.ratio is not None and self.apart and self.ratio < 1 / (1 + MARGIN)

    def __str__(self) -> str:
        head = f"{abbreviated(self.case):26s} {self.backend:18s}"
        if self.ratio is None:
            return f"{head} {'WORSE: ' if self.worse else ''}{self.note}"
        word = "SLOWER" if self.worse else "faster" if self.better else "level"
        doubt = "" if self.apart or abs(self.ratio - 1) <= MARGIN else " (spreads overlap)"
        return f"{head} {self.before:8.4g} -> {self.after:8.4g} ms {100 * (self.ratio - 1):+6.1f} %  {word}{doubt}"


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[Change]:
    """Compare every case and backend of either run, in the order of the first run, then of the second."""
    first, second = _by_name(before), _by_name(after)
    changes = []
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        if a is not None and b is not None and timed(a) and timed(b):
            # In either direction: `worse` and `better` add the sign.
            split = apart(b, a) or apart(a, b)
            changes.append(Change(key[1], key[2], a["ms"], b["ms"], b["ms"] / a["ms"], split))
            continue
        note = f"{_outcome(a)} in the first, {_outcome(b)} in the second"
        times = [row["ms"] if row is not None and timed(row) else None for row in (a, b)]
        changes.append(Change(key[1], key[2], times[0], times[1], None, note=note))
    return changes


def _by_name(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Index rows by (framework, case, backend)."""
    return {(row.get("framework", "torch"), case_of(row), row["backend"]): row for row in rows}


def _outcome(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row.get("refused"):
        return "failed" if row.get("failed") else "refused"
    if not row.get("right"):
        return "wrong"
    return f"{row['ms']:.4f} ms"
