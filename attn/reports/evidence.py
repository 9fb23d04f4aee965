"""Recorded results of backends on devices: a table that conformance runs write and reports read.

A row is one run of the conformance suite. Its `kind` says how much it proves. A row of one kind never replaces or hides one
of another kind: an interpreted kernel has not run on a device, and a compiled one has not been executed.

| kind | meaning |
|---|---|
| ran | executed on the given device |
| interpreted | a kernel's program executed by an interpreter on the host (Triton's, Pallas') |
| compiled | lowered and compiled for the given platform, not executed |
| stand-in | executed with a substitute for the vendor's package: tests the adapter, not the kernel |
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attn.tables import counted

KINDS = ("ran", "interpreted", "compiled", "stand-in")
# Beside this module, so that it is in the wheel: `attn backends` shows the evidence on any machine.
PATH = Path(__file__).with_name("evidence.json")


@dataclass(frozen=True)
class Evidence:
    """One run: registry, backend, device, kind, date, versions, and the numbers of cases and failures.

    `device` is the device's usual name; a CPU is identified by its architecture only. `date` is ISO 8601; `versions` maps
    distributions to versions; `level` is the suite's. `reporter`: who ran it, if it was not this project (`attn evidence`).
    """

    backend: str
    registry: str
    framework: str
    platform: str
    device: str
    kind: str
    date: str
    cases: int
    failures: int
    level: str = "quick"
    versions: dict[str, str] = field(default_factory=dict, hash=False)
    reporter: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.cases < 1 or not 0 <= self.failures <= self.cases:
            raise ValueError(f"cases={self.cases}, failures={self.failures}: need cases >= 1 and 0 <= failures <= cases")

    @property
    def key(self) -> tuple[str, ...]:
        """Key under which a later run replaces an earlier one: backend, device, kind, level and reporter."""
        identity = (self.registry, self.backend, self.framework, self.platform, self.device, self.kind, self.level)
        return (*identity, self.reporter)

    def __str__(self) -> str:
        outcome = counted(self.cases, "case") if not self.failures else f"{self.failures} of {self.cases} cases FAILED"
        reporter = f", reported by {self.reporter}" * bool(self.reporter)
        return f"{self.kind} on {self.device}{reporter} ({outcome}, {self.date[:10]})"


def load(path: Path = PATH) -> list[Evidence]:
    """Return every row, in the file's order; none if the file does not exist. Raises ValueError for a malformed file."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Evidence)}
    for row in rows:
        # Named here: the class's own TypeError would not say which file and row.
        if unknown := row.keys() - known:
            raise ValueError(f"{path.name}: unknown field {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}")
    return [Evidence(**row) for row in rows]


def record(rows: Iterable[Evidence], path: Path = PATH) -> None:
    """Add `rows` to the file, each replacing an earlier run with the same key; sorted, one row per line."""
    # New rows come last and so replace stored ones of the same key; rows of another level or reporter stay.
    table = {row.key: row for row in [*load(path), *rows]}
    # One row per line, sorted: a diff of the file shows which runs are new.
    lines = ",\n".join(json.dumps(_plain(table[key])) for key in sorted(table))
    path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")


def _plain(row: Evidence) -> dict[str, Any]:
    plain = {**asdict(row), "versions": dict(sorted(row.versions.items()))}
    return plain if row.reporter else {name: value for name, value in plain.items() if name != "reporter"}


def of(registry: str, backend: str, path: Path = PATH) -> list[Evidence]:
    """Return the rows of one backend, the strongest kind first."""
    rows = [row for row in load(path) if (row.registry, row.backend) == (registry, backend)]
    return sorted(rows, key=lambda row: (KINDS.index(row.kind), row.device, row.level))


def summary(registry: str, backend: str, path: Path = PATH) -> str:
    """Summarise the rows of one backend: `ran on NVIDIA H200 (260 cases, 2026-11-20)`; `none` without any.

    Of several levels on one device and of one kind, the longest run is shown, and every failed one.
    """
    rows = of(registry, backend, path)
    # Sorted by cases, the longest run is the last and stays in the dict.
    longest = {(row.kind, row.device, row.reporter): row for row in sorted(rows, key=lambda row: row.cases)}
    return "; ".join(str(row) for row in rows if row.failures or row is longest[row.kind, row.device, row.reporter]) or "none"
