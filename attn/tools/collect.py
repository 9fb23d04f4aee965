"""`attn evidence`: what this machine's device computes, how fast, and with which versions, in one file and in bounded time.

For owners of devices that the project lacks. Each backend runs the conformance suite in a process of its own, one at a time,
so that a kernel that crashes or hangs ends its own row only, and because a TPU admits one process. None but the last takes more
than half of the time that is left. All backends run the short suite first, then `attn bench` measures each framework's table,
then backends run the quick suite while there is time. The file is written after each of these steps. It holds the versions and
devices that `attn env` prints, and no names of hosts or users.

`--add` copies the rows of such a file to the project's own table, marked as reported; it never replaces rows of the project.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import attn
from attn.arguments import positive_number
from attn.pictures.picture import check_writable
from attn.reports import evidence
from attn.testing.processes import Ended, Lost, Worker

FORMAT = 1
SECONDS = 600.0  #: the default time limit
_LEVELS = ("smoke", "quick")
_BENCH_SHARE = 0.4  #: of the time left after the short suite
_LEAST = 5.0  #: seconds: a step with less is left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("--out", metavar="FILE", help="run on this machine and write the results to FILE (JSON)")
    add("--seconds", type=float, default=SECONDS, help="time limit for all (default: %(default).0f)")
    add("--backend", action="append", default=[], metavar="NAME", help="only this backend; may be repeated")
    add("--add", metavar="FILE", help="add the rows of a file to attn/reports/evidence.json of this checkout")
    add("--reporter", metavar="NAME", help="with --add: name to credit in the tables")


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 1 if a case failed or no backend ran, else 0."""
    # Neither or both: reading a file and measuring this machine are two commands in one.
    if bool(args.out) == bool(args.add):
        raise ValueError("attn evidence needs --out FILE (run on this machine) or --add FILE --reporter NAME, not both")
    if args.add:
        rows = reported(Path(args.add), args.reporter)
        evidence.record(rows)
        print(f"{len(rows)} rows added; python -m attn tables --write shows them")
        return 0
    if args.reporter:
        raise ValueError("--reporter needs --add FILE")
    positive_number("--seconds", args.seconds)
    # Before ten minutes of measuring.
    check_writable(args.out)
    collection = Collection(Path(args.out), args.seconds)
    collection.collect(args.backend)
    return 0 if collection.rows and not collection.failures else 1


def reported(file: Path, reporter: str | None) -> list[evidence.Evidence]:
    """Return the rows of a file written by --out, marked as reported. Raises ValueError for any other file, and for no name."""
    if not (reporter or "").strip():
        raise ValueError("--add needs --reporter NAME: who ran it")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}: must be {FORMAT}")
        rows = [evidence.Evidence(**row) for row in content["evidence"]]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{file}: not a file of attn evidence --out: {error}") from None
    return [replace(row, reporter=str(reporter).strip()) for row in rows]


class Collection:
    """The results of one run, which are written to `file` after each step."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.began, self.limit = file, time.monotonic(), seconds
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.failures: dict[str, list[str]] = {}
        self.left_out: dict[str, str] = {}
        self.bench: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.began)

    def collect(self, names: Sequence[str] = ()) -> None:
        """Run everything. Raises ValueError for unknown names, and if no backend can run here."""
        listed = self._child(self.left, _listed, tuple(names))
        if "error" in listed:
            raise ValueError(listed["error"])
        self.environment, backends = listed["environment"], listed["backends"]
        self.left_out |= listed["left_out"]
        if not backends:
            raise ValueError(f"no backend can run here: {'; '.join(f'{n}: {why}' for n, why in self.left_out.items())}")
        print(f"{len(backends)} backends: {', '.join(dict.fromkeys(name for _, name, _ in backends))}")
        self._conformance(backends, _LEVELS[0])
        # In seconds left: the benchmarks end when this much remains for the quick suite.
        bench_until = self.left * (1 - _BENCH_SHARE)
        frameworks = list(dict.fromkeys(framework for registry, _, framework in backends if registry == "attention"))
        for i, framework in enumerate(frameworks):
            # An equal share of what remains: a framework that needs less leaves the rest to the next.
            members = [name for registry, name, owner in backends if names and (registry, owner) == ("attention", framework)]
            self._bench(framework, (self.left - bench_until) / (len(frameworks) - i), members)
        self._conformance(backends, _LEVELS[1])
        counts = f"{len(self.rows)} runs, {len(self.failures)} with failures, {len(self.left_out)} left out"
        print(f"{counts}, {time.monotonic() - self.began:.0f} s: {self.file}")

    def _conformance(self, backends: Sequence[Sequence[str]], level: str) -> None:
        for i, (registry, name, _) in enumerate(backends, 1):
            title = f"{_titled(registry, name)} ({level})"
            if registry != "attention" and level == _LEVELS[0]:
                continue  # their suites have one level
            last = i == len(backends) and level == _LEVELS[-1]
            # Half of what is left: a backend that hangs takes as much, and the others still have a turn.
            row = self._child(self.left / (1 if last else 2), _examined, (registry, name, level))
            if "row" in row:
                # Both levels are kept: the quick suite may end without a result.
                self.rows[registry, f"{name} {row['row']['level']}"] = row["row"]
                if row["failures"]:
                    self.failures[title] = row["failures"]
                print(f"  {title}: {row['row']['cases']} cases, {len(row['failures'])} failed", flush=True)
            else:
                self.left_out[title] = row["error"]
                print(f"  {title}: {row['error']}", flush=True)
            self._write()

    def _bench(self, framework: str, seconds: float, names: Sequence[str]) -> None:
        title = f"times ({framework})"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "bench.json"
            words = [word for name in names for word in ("--backend", name)]
            outcome = self._child(seconds, _timed, ("bench", "--framework", framework, "--json", str(file), *words))
            # Written after each case, and cut short if the process was ended while it wrote: no JSON then.
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                self.bench[framework] = json.loads(file.read_text(encoding="utf-8"))
        if outcome.get("error"):
            self.left_out[title] = outcome["error"]
        print(f"  {title}: {len(self.bench.get(framework, {}).get('rows', []))} rows", flush=True)
        self._write()

    def _child(self, seconds: float, function: Callable[[Any], dict[str, Any]], words: Sequence[str]) -> dict[str, Any]:
        """Return the result of a function in a separate process; {"error": why} if it fails."""
        if seconds < _LEAST:
            return {"error": f"no time left of {self.limit:.0f} s (--seconds)"}
        # A new process for every step: what one leaves behind, such as a device in error, ends with it.
        with Worker(function, quiet=True) as worker:
            try:
                return worker(words, seconds)
            except (Lost, Ended) as error:
                return {"error": str(error)}

    def _write(self) -> None:
        seconds, evidence = round(time.monotonic() - self.began, 1), list(self.rows.values())
        fields = {name: getattr(self, name) for name in ("environment", "failures", "bench", "left_out")}
        content = {"format": FORMAT, "attn": attn.__version__, "seconds": seconds, "evidence": evidence, **fields}
        # Replaced in one step: a run that is stopped while it writes leaves the last complete file.
        temporary = self.file.with_name(f"{self.file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.file)


def _titled(registry: str, name: str) -> str:
    """Name a backend in a file; several registries have one of the same name, such as TORCH_SDPA."""
    return name if registry == "attention" else f"{name} ({registry})"


# in the processes of a collection


def _listed(names: Sequence[str]) -> dict[str, Any]:
    """Return the backends of this machine's devices, [registry, name, framework] each, and why others are left out.

    A framework that has another device than the CPU is judged by that device: its CPU backends are left out.
    """
    # Imports of frameworks happen in the child only: the parent would hold the device.
    from attn.backend_enum import registries
    from attn.reports.report import environment
    from attn.selection import plugins
    from attn.selection.platforms import platform_for
    from attn.testing.conformance import device_for, unable

    plugins.load()
    backends, left_out, known = [], dict[str, str](), set()
    for registry, members in registries().items():
        for name in members.names():
            known.add(name)
            if names and name not in names:
                continue
            candidate = members[name].candidate()
            capabilities: Any = getattr(candidate.backend, "capabilities", None)
            why = unable(candidate, named=False)
            if not why and capabilities is None:
                why = "it declares no capabilities"
            elif (
                not why
                and device_for(candidate.backend).platform == "cpu" != platform_for(capabilities.framework).device().platform
            ):
                why = f"it runs on the CPU only; {capabilities.framework} has another device here"
            if why:
                left_out[_titled(registry, name)] = why
            else:
                backends.append([registry, name, capabilities.framework])
    if unknown := set(names) - known:
        return {"error": f"backend {sorted(unknown)[0]!r} is unknown; known: {', '.join(sorted(known))}"}
    return {"environment": environment(), "backends": backends, "left_out": left_out}


def _examined(words: Sequence[str]) -> dict[str, Any]:
    """Run one backend's suite: registry, name, level. Returns its row of evidence and the commands that repeat its failures."""
    from attn.backend_enum import registries
    from attn.testing.conformance import evidence_of, run_conformance
    from attn.testing.dense import run_dense
    from attn.testing.prefill import run_prefill

    registry, name, level = words
    if registry == "attention":
        (report,) = run_conformance([name], level, minimise=False).backends
    else:
        (report,) = (run_dense([name]) if registry == "diffusion" else run_prefill([name])).backends
    if not report.cases:
        return {"error": report.skipped or "no case ran"}
    row = evidence_of(report, registries()[registry][name].get_class(), registry)
    return {"row": asdict(row), "failures": [failure.repro or failure.case for failure in report.failures]}


def _timed(words: Sequence[str]) -> dict[str, Any]:
    """Run `attn` with these words. Ends the process, with its exit code, unless it succeeds."""
    from attn import cli

    # The code reaches the parent as the process's, which then reads the last words of its output.
    if code := cli.main(words):
        sys.exit(code)
    return {}
