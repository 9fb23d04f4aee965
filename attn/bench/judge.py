"""What rows of times mean: was the choice right, who leads, and what changed between two runs.

Rows are plain dicts, as `Report.to_dict` gives them and as files hold them. Two times are told apart only when their middle
three fifths (p20 to p80) do not overlap, and matter only when they differ by more than `MARGIN`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn.bench.case import Case
from attn.preferences import MARGIN


@dataclass(frozen=True)
class Verdict:
    """What a choice was worth: `behind` is how much longer it takes than the fastest backend (0.12: 12 %), `apart` whether
    their middle three fifths of times lie apart; `peer` is the fastest kernel that could not be chosen."""

    case: str
    choice: str
    ms: float
    fastest: str
    behind: float
    apart: bool
    peer: str = ""
    ahead: float = 0.0  #: how much longer the choice takes than `peer`

    @property
    def lost(self) -> bool:
        return self.apart and self.behind > MARGIN

    def __str__(self) -> str:
        said = f"{self.case:36s} {self.choice} is the fastest"
        if self.behind > 0:
            by = f"{100 * self.behind:.1f} %{'' if self.apart else ' (spreads overlap)'}"
            said = f"{self.case:36s} {self.choice} {'LOSES' if self.lost else 'holds'}: {self.fastest} is ahead by {by}"
        return said + (f"; of the rest, {self.peer} by {100 * self.ahead:.1f} %" if self.ahead > MARGIN else "")


def case_of(row: Mapping[str, Any]) -> str:
    """The case of a row as a report holds it: the shape of a dense one, else the batch and its layer."""
    return str(row["shape"] if "shape" in row else Case.of(row))


def timed(row: Mapping[str, Any]) -> bool:
    """Whether the row has a time that counts."""
    return bool(row.get("right")) and bool(row.get("ms"))


def _beside(row: Mapping[str, Any]) -> bool:
    """Whether the selector could not have taken the row's kernel: a peer, or a backend that is approximate by declaration."""
    return bool(row.get("peer")) or not row.get("exact", True)


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The timed rows of each case and framework, since a choice is made within one framework."""
    wings = {row.get("framework", "torch") for row in rows}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if timed(row):
            wing = f" ({row.get('framework', 'torch')})" if len(wings) > 1 else ""
            found.setdefault(f"{case_of(row)}{wing}", []).append(row)
    return found


def apart(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> bool:
    """Whether the middle three fifths of the one's times lie below those of the other."""
    return bool(fast["ms_p80"] < slow["ms_p20"])


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """One for each case whose choice has a right row."""
    found = []
    for case, right in _by_case(rows).items():
        choice = next((row for row in right if row.get("chosen")), None)
        if choice is None:
            continue
        first = min((row for row in right if not _beside(row)), key=lambda row: row["ms"])
        peer = min((row for row in right if _beside(row)), key=lambda row: row["ms"], default=None)
        more = {} if peer is None else {"peer": peer["backend"], "ahead": choice["ms"] / peer["ms"] - 1}
        behind = choice["ms"] / first["ms"] - 1
        found.append(Verdict(case, choice["backend"], choice["ms"], first["backend"], behind, apart(first, choice), **more))
    return found


def ranking(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, float, float, str]]:
    """(backend, cases, geometric mean of its time over the fastest's, the worst such ratio, its case), the best first.

    A backend that serves fewer cases comes after those that serve more: on a list it would only stand before them.
    """
    ratios: dict[str, list[tuple[float, str]]] = {}
    for case, right in _by_case(rows).items():
        own = [row for row in right if not _beside(row)]
        for row in own:
            ratios.setdefault(row["backend"], []).append((row["ms"] / min(r["ms"] for r in own), case))
    found = [
        (name, len(of), math.exp(sum(math.log(ratio) for ratio, _ in of) / len(of)), *max(of)) for name, of in ratios.items()
    ]
    return sorted(found, key=lambda entry: (-entry[1], entry[2]))


def judge(rows: Sequence[dict[str, Any]]) -> str:
    """Verdicts and ranking as text."""
    lines = [str(verdict) for verdict in verdicts(rows)]
    for name, cases, mean, worst, where in ranking(rows):
        lines.append(f"{name:18s} {cases:3d} cases, {mean:.3f} of the fastest on average, at worst {worst:.2f} ({where})")
    return "\n".join(lines)


# two runs


@dataclass(frozen=True)
class Change:
    """One backend on one case in two runs. `ratio` is the second time over the first (None: one of them has no right row,
    and `said` tells which); `apart` whether the middle three fifths of the times are."""

    case: str
    backend: str
    before: float | None
    after: float | None
    ratio: float | None
    apart: bool = False
    said: str = ""

    @property
    def worse(self) -> bool:
        """Slower beyond doubt and margin, or right in the first run alone."""
        if self.ratio is None:
            return self.before is not None and self.after is None and "not run" not in self.said
        return self.apart and self.ratio > 1 + MARGIN

    @property
    def better(self) -> bool:
        return self.ratio is not None and self.apart and self.ratio < 1 / (1 + MARGIN)

    def __str__(self) -> str:
        head = f"{self.case:36s} {self.backend:20s}"
        if self.ratio is None:
            return f"{head} {'WORSE: ' if self.worse else ''}{self.said}"
        word = "SLOWER" if self.worse else "faster" if self.better else "level"
        doubt = "" if self.apart or abs(self.ratio - 1) <= MARGIN else " (spreads overlap)"
        return f"{head} {self.before:9.4f} -> {self.after:9.4f} ms  {100 * (self.ratio - 1):+6.1f} %  {word}{doubt}"


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[Change]:
    """Every case and backend of either run, in the order of the first, then of the second."""
    first, second = _by_name(before), _by_name(after)
    found = []
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        if a is not None and b is not None and timed(a) and timed(b):
            split = apart(b, a) or apart(a, b)
            found.append(Change(key[1], key[2], a["ms"], b["ms"], b["ms"] / a["ms"], split))
            continue
        said = f"{_outcome(a)} in the first, {_outcome(b)} in the second"
        times = [row["ms"] if row is not None and timed(row) else None for row in (a, b)]
        found.append(Change(key[1], key[2], times[0], times[1], None, said=said))
    return found


def _by_name(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows by (framework, case, backend)."""
    return {(row.get("framework", "torch"), case_of(row), row["backend"]): row for row in rows}


def _outcome(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row.get("refused"):
        return "failed" if row.get("failed") else "refused"
    if not row.get("right"):
        return "wrong"
    return f"{row['ms']:.4f} ms"
