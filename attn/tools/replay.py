"""`attn replay`: run a recorded call (`attn.recording`) on backends of both frameworks, and judge each by the oracle."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn import recording
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import supports_size
from attn.pictures.picture import check_writable
from attn.selection import plugins
from attn.tables import block, folded
from attn.testing.case import Case
from attn.testing.conformance import candidate_of, runner_for, subject_here
from attn.testing.rules import BUDGETS
from attn.testing.subject import Subject
from attn.tools.recorded import RecordedCall, as_smaller, outcome_of, read, sizes, snapshot_of, wild_rows


@dataclass(frozen=True)
class ReplayRow:
    """The result on one backend. status: ok, FAILED, or "not run"; error: the worst row's relative error; text: why."""

    backend: str
    framework: str
    status: str
    error: float
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="a recording, from the folder ATTN_RECORD")
    add("--backend", action="append", default=[], metavar="NAME", help="run this backend; may be repeated (default: every one)")
    add("--shrink", metavar="OUT", help="write a minimised call that still fails on the first failing backend")
    add("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 1 if a backend fails, a requested one cannot run the call, or none can, else 0."""
    # The recorded call is a `Call` like those of the suite: drivers and rules do not know where its arrays are from.
    call, metadata = read(Path(args.file))
    if args.shrink:
        check_writable(args.shrink)
    rows = replay(call, args.backend or None)
    failed = next((row.backend for row in rows if row.status == "FAILED"), None)
    # Said beside the result: a NaN in an output is usually why a call was recorded, and may be right.
    nonfinite = wild_rows(call)
    notes = (
        [f"{nonfinite} rows are expected to be non-finite: a query, key or value that they read is non-finite"]
        if nonfinite
        else []
    )
    if args.shrink:
        if failed is None:
            raise ValueError(f"--shrink {args.shrink}: nothing to shrink, no backend fails")
        # After all backends have run: whether others pass tells a bug of the backend from one of the caller.
        small = shrink(call, failed)
        recording.write(Path(args.shrink), snapshot_of(small), {**metadata, "reason": "shrunk", "backend": failed})
        notes.append(f"{args.shrink}: still fails on {failed}: {sizes(small)}")
    ran = any(row.status == "ok" for row in rows)
    # A named backend that did not run is no success; of all backends, those that cannot serve the call do not count.
    ok = ran and failed is None and not (args.backend and any(row.status != "ok" for row in rows))
    if args.json:
        recorded = {name: metadata[name] for name in ("reason", "error", "backend", "device")} | {
            "case": json.loads(metadata["case"])
        }
        print(json.dumps({"recorded": recorded, "rows": [vars(row) for row in rows], "notes": notes, "ok": ok}, indent=2))
        return int(not ok)
    print(f"{metadata['reason']} call of {metadata['backend']} on {metadata['device']}: {sizes(call)}")
    if metadata["error"]:
        print(metadata["error"])
    limit = f"(limit {BUDGETS[call.case.dtype].hard:.2g})"
    # The limit stands beside each error, so that a pasted line can be read without this table.
    errors = ["" if row.status == "not run" else f"worst row {row.error:.2g} {limit}" for row in rows]
    cells = [(row.backend, row.framework, row.status, error, row.text) for row, error in zip(rows, errors, strict=True)]
    print(folded("\n".join([*block(cells, "  "), *notes])))
    return int(not ok)


def replay(call: RecordedCall, names: Sequence[str] | None = None) -> list[ReplayRow]:
    """Run a call on the named backends, or on every one that serves it here (not on interpreters).

    Raises ValueError for an unknown name.
    """
    # Plug-ins register backends, which may be the one that failed.
    plugins.load()
    rows = []
    for name in AttentionBackendEnum.names() if names is None else names:
        backend, subject, why = _subject_of(name, call.case, names is not None)
        if subject is not None:
            outcome = outcome_of(call, runner_for(backend, subject.device))
            status = "FAILED" if outcome.failure else "ok"
            rows.append(ReplayRow(name, subject.capabilities.framework, status, outcome.score.row, outcome.text))
        # Of all backends only those that ran are shown.
        elif names is not None:
            rows.append(ReplayRow(name, "", "not run", 0.0, why))
    return rows


def shrink(call: RecordedCall, name: str) -> RecordedCall:
    """Return a minimised call that still fails on a backend. Raises ValueError if the call passes there."""
    backend, subject, why = _subject_of(name, call.case)
    if subject is None:
        raise ValueError(f"{name} does not run the call: {why}")
    return as_smaller(call, runner_for(backend, subject.device), subject.serves)


def _subject_of(name: str, case: Case, named: bool = True) -> tuple[Any, Subject | None, str]:
    """Return (backend, its subject on this machine, ""), or (backend, None, why it does not run the case here)."""
    candidate = candidate_of(name)
    subject, why = subject_here(candidate, named=named)
    if subject is not None and not subject.serves(case):
        request = case.request()
        # Sizes of pages are no part of a record, so `why_not` has no reason for them.
        size_supported = case.is_encoder or supports_size(case.block_size, subject.block_sizes)
        sizes = [] if size_supported else [f"block_size={case.block_size}"]
        reasons = [*candidate.backend.why_not(request, subject.device)] if candidate.backend is not None else []
        return candidate.backend, None, "; ".join(reasons or sizes) or "not served"
    return candidate.backend, subject, why
