"""Fuzz testing: compare backends with the oracle, and entries with the frameworks' own, on random cases, for a given time.

Each backend's cases follow from its capability record (`fuzz_cases`), program by program; `fuzz_entries` draws the others. They
run in separate processes, so that a crash or a hang is a failure of one case. A failure is minimised, distinguished from known
ones by the features that it needs, and printed with the command that repeats it.
"""

import dataclasses
import functools
import math
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from attn.arguments import positive_number
from attn.backend_enum import path_of
from attn.backends.registry import AttentionBackendEnum
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.imports import resolve_obj_by_qualname
from attn.progress import Display
from attn.selection import plugins
from attn.testing import shrink
from attn.testing.case import Case, Recipe
from attn.testing.conformance import candidate_of, device_for, not_on, run_case, subject_here, unable
from attn.testing.dense import DenseCase
from attn.testing.draw import draw
from attn.testing.processes import Ended, Lost, Worker, shared_cores
from attn.testing.shrink import features_of, minimised
from attn.testing.subject import Subject
from attn.testing.wrong import within_package
from attn.tools.fuzz import cases as fuzz_cases
from attn.tools.fuzz import dense as fuzz_dense
from attn.tools.fuzz import entries as fuzz_entries
from attn.tools.fuzz.dense import DenseSubject
from attn.tools.fuzz.entries import EntrySubject

_CASE_LIMIT = 150.0  #: time limit for a case, compilation included, in seconds
_SHRINKING = 0.3  #: largest share of a backend's time spent on minimising
_GROWTH = 1500  #: MiB by which a process may grow before it is replaced
_STICKY = ("CUDA error", "HIP error")  #: errors after which a process cannot use the device
_COMPILED = 16  #: cases per program if each program must be compiled


@dataclass(frozen=True)
class CaseOutcome:
    """The result of a case. `failure` is "" if it passed, else the rule or the error and its place; `text` gives details."""

    failure: str = ""
    text: str = ""
    memory: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.failure)


@dataclass
class Find:
    """A failure: its kind, the fields that it needs not to be plain, how often it occurred, the command that repeats it."""

    kind: str
    text: str
    repro: str
    needs: dict[str, Any] = field(default_factory=dict)
    times: int = 1


class Source(NamedTuple):
    """How to draw a family's cases (as `fuzz_cases.program`), the plain values of fields, and the steps to simplify a case."""

    program: Callable[..., list[Any]]
    plain: Mapping[str, Any]
    simpler: Callable[[Any], Iterator[Any]] | None = None


def _family_of(subject: Any) -> Source:
    if isinstance(subject, EntrySubject):
        return Source(fuzz_entries.program, subject.plain, subject.simpler)
    if isinstance(subject, DenseSubject):
        return Source(fuzz_dense.program, fuzz_dense.PLAIN, fuzz_dense.simpler)
    return Source(fuzz_cases.program, shrink.PLAIN)


@dataclass
class FuzzReport:
    """The result of fuzzing one backend.

    errors: errors of the run that the backend did not cause, such as a process that was killed from outside.
    skipped: why the backend was not run.
    """

    backend: str
    seed: int = 0
    programs: int = 0
    cases: int = 0
    seconds: float = 0.0
    finds: list[Find] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.finds and not self.errors and bool(self.cases or self.skipped)

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.backend}: skipped, {self.skipped}"
        times = sum(find.times for find in self.finds)
        outcome = "no find" if self.cases else "NOTHING TESTED"
        outcome = f"{len(self.finds)} FINDS (seen {times} times)" if self.finds else outcome
        ran = f"{self.cases} cases of {self.programs} programs"
        lines = [f"{self.backend}: seed {self.seed}, {ran}, {outcome}, {self.seconds:.0f} s"]
        lines += [f"  {find.kind} (seen {find.times} times): {find.text}\n    {find.repro}" for find in self.finds]
        return "\n".join(lines + [f"  error of the run: {error}" for error in self.errors])


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; `reports` are of what ran until then."""

    def __init__(self, reports: list[FuzzReport]) -> None:
        super().__init__()
        self.reports = reports


Examine = Callable[[Any, float], CaseOutcome]  #: (case, time limit in seconds) -> outcome; raises `Lost` or `Ended`


def campaign(
    subject: Subject | DenseSubject | EntrySubject,
    examiners: Sequence[Examine],
    seed: int,
    until: float,
    report: FuzzReport,
    most: int | None = None,
    notify: Callable[[FuzzReport], None] = lambda report: None,
    max_finds: int = sys.maxsize,
) -> FuzzReport:
    """Run programs on all examiners in parallel until `time.monotonic()` reaches `until`, or for `most` programs, or until
    there are `max_finds` finds; the last case may end later. `notify` is called with the report after each case. An interrupt
    ends it and is raised."""
    begin, lock = time.monotonic(), threading.Lock()
    family = _family_of(subject)
    spent = [0.0]
    one_shape = isinstance(subject, Subject) and compiles(subject)  # each of the other calls is compiled separately
    count = _COMPILED if one_shape else 3
    # Shared by the examiners: a program's cases follow from its number.
    numbers = iter(range(sys.maxsize if most is None else most))

    def work(examine: Examine) -> None:
        try:
            run_programs(examine)
        except Exception as error:  # of the fuzzer itself: it would end this thread, and the run would pass
            with lock:
                report.errors.append(f"{type(error).__name__}: {error}")

    def run_programs(examine: Examine) -> None:
        while time.monotonic() < until:
            with lock:
                number = next(numbers, None)
            if number is None or len(report.finds) >= max_finds:
                return
            # All cases of a program by one examiner, whose process has compiled it.
            for case in family.program(subject, seed, number, count, one_shape):
                if time.monotonic() >= until:
                    return
                try:
                    # The first case may only be slow, as its process starts. Any later one has its whole limit, also where
                    # the campaign's time runs out within it, or a hang there would go unnoticed.
                    outcome = _within(examine, case, math.inf if report.cases else until)
                except Ended as error:
                    with lock:
                        # Not a find: a person or the out-of-memory killer has ended the process, not the case.
                        report.errors.append(f"{error}, while running {case.repro(report.backend)}")
                    continue
                # The campaign's time has run out within its first case, which says nothing about it.
                if outcome is None:
                    return
                with lock:
                    report.cases += 1
                    report.seconds = time.monotonic() - begin
                if outcome.failed:
                    # Otherwise a backend that fails often would be minimised all the time, and few of its cases would run.
                    started = time.monotonic()
                    may_minimise = started < until and spent[0] < _SHRINKING * (until - begin)
                    _add(subject, family, examine, case, outcome, report, lock, until if may_minimise else 0.0)
                    # The others run on meanwhile: only a share of the campaign's time is spent.
                    spent[0] += (time.monotonic() - started) / len(examiners)
                notify(report)
            with lock:
                report.programs += 1

    # Daemons, so that an interrupt of the main thread ends the program although an examiner waits for its process.
    threads = [threading.Thread(target=work, args=(examine,), daemon=True) for examine in examiners]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        until = begin  # the threads end after their case, of which nothing is known
        raise
    finally:
        report.seconds = time.monotonic() - begin
    return report


def compiles(subject: Subject) -> bool:
    """Whether every new program must be compiled: under jax, and for kernels compiled for a GPU."""
    on_host = subject.device is None or subject.device.platform == "cpu"
    return subject.compiles or not on_host or subject.name == "FLEX_ATTENTION"


def _within(examine: Examine, case: Recipe, until: float) -> CaseOutcome | None:
    """Return the outcome, or None if time ran out first. Raises `Ended`."""
    left = until - time.monotonic()
    try:
        return examine(case, min(_CASE_LIMIT, left))
    except Lost as error:
        # If the limit was what was left of the campaign, the case may only have been slow.
        return CaseOutcome("lost", str(error)) if time.monotonic() < until else None


def _add(
    subject: Any, family: Source, examine: Examine, case: Any, outcome: CaseOutcome, report: FuzzReport, lock: Any, until: float
) -> None:
    """Count a known failure, or minimise a new one and add it to the report."""

    def result_of(one: Any) -> CaseOutcome | None:
        try:
            # Without time to minimise, the case's own outcome stands for it.
            return _within(examine, one, until) if until else outcome
        except Ended as error:
            with lock:
                report.errors.append(f"{error}, while running {one.repro(report.backend)}")
            return None

    def fails(simpler: Any) -> bool:
        if time.monotonic() > until or not subject.serves(simpler):
            return False
        result = result_of(simpler)
        # The same kind: minimising must not wander off to another failure.
        return result is not None and result.failure == outcome.failure

    with lock:
        # A copy, since `fails` below runs cases, for which the lock must be free.
        known = [find for find in report.finds if find.kind == outcome.failure]
    for find in known:
        # The case has every field that the known failure needs, and no longer fails in this way once they are plain: the same
        # failure. If it still fails without them, the failure is new.
        if _alike(find.needs) <= _alike(features_of(case, family.plain)) and not (
            find.needs and fails(case.replace(**{name: family.plain[name] for name in find.needs}))
        ):
            find.times += 1
            return
    smallest = minimised(case, fails, plain=family.plain, simpler=family.simpler)
    final = result_of(smallest)
    text = final.text if final is not None and final.failed else outcome.text
    needs = features_of(smallest, family.plain)
    with lock:
        # Another examiner may have added it while this one minimised.
        for find in report.finds:
            if (find.kind, _alike(find.needs)) == (outcome.failure, _alike(needs)):
                find.times += 1
                return
        report.finds.append(Find(outcome.failure, text, smallest.replace(name="find").repro(report.backend), needs))


def _alike(needs: dict[str, Any]) -> set[tuple[str, object]]:
    """Return a failure's needs without their numbers: the sign of a number, the type of a tuple, other values unchanged."""

    def word(value: Any) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (value > 0) - (value < 0)
        return "tuple" if isinstance(value, tuple) else value

    return {(name, word(value)) for name, value in needs.items()}


# worker processes


@functools.lru_cache(maxsize=4)
def _backend(path: str) -> tuple[Any, Any]:
    plugins.load()
    backend = resolve_obj_by_qualname(path)
    return backend, device_for(backend)


def examine_here(task: tuple[str, str, str]) -> CaseOutcome:
    """Return the outcome of (registry, a backend's path, a case in JSON), run in this process."""
    registry, path, text = task
    if registry == "entries":
        subject = fuzz_entries.subject_of(path)
        return examined_by(subject.check, subject.case.from_json(text))
    backend, device = _backend(path)
    if registry == "diffusion":
        return examined_dense(backend, DenseCase.from_json(text))
    return examined(Case.from_json(text), lambda case: run_case(backend, case, device))


def examined_dense(backend: Any, case: DenseCase) -> CaseOutcome:
    """Return the outcome of a dense case."""
    return examined_by(functools.partial(fuzz_dense.check, backend), case)


def examined_by(check: Callable[[Any], Any], case: Recipe) -> CaseOutcome:
    """Return the outcome of a case; its failure is the message of the check's AssertionError without the numbers."""
    try:
        check(case)
    except AssertionError as error:
        # The kind of a failure must not depend on the case's name or on its numbers, or each case would be a find of its own.
        text = str(error).strip().partition("\n")[0].removeprefix(f"{case}: ")
        words = re.match(r"[\d ]*([a-z ]*)", text)  # the message without its numbers
        return CaseOutcome((words[1].strip() if words else "") or "an assertion", text[:300], _memory())
    except Exception as error:
        return CaseOutcome(f"{type(error).__name__} in {_location(error)}", str(error).partition("\n")[0][:300], _memory())
    return CaseOutcome(memory=_memory())


def examined(case: Case, run: Callable[[Case], Sequence[Any]]) -> CaseOutcome:
    """Return the outcome of a case; `run` returns its violations. A case that cannot be drawn is a bug of the fuzzer."""
    try:
        # First, so that its errors are not taken for the backend's.
        draw(case)
    except ValueError as error:
        return CaseOutcome("not drawn", str(error))
    try:
        violations = run(case)
    except Exception as error:
        return CaseOutcome(f"{type(error).__name__} in {_location(error)}", str(error).partition("\n")[0][:300], _memory())
    finally:
        # Cases do not come twice, and their arrays would fill the memory that `_GROWTH` limits.
        draw.cache_clear()
    if not violations:
        return CaseOutcome(memory=_memory())
    first = violations[0]
    # Rule R (a mistake, a refusal) says in its text what was accepted; of the numeric rules only the letter is the kind.
    step = first.what.partition(" (")[0] if first.rule == "R" else ""
    return CaseOutcome(f"rule {first.rule} {step}".strip(), str(first).partition("\n")[0], _memory())


def _memory() -> int:
    """Return the peak memory of this process in MiB."""
    # KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)


def _location(error: Exception) -> str:
    """Return the innermost frame of an error within this package, such as `torch/backends/sdpa.py _sdpa`."""
    frame, trace = "?", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if inside := within_package(code.co_filename):
            frame = f"{inside} {code.co_name}"
        trace = trace.tb_next
    return frame


class _Examiner:
    """Run `examine_here` in a process that is replaced when it dies or uses too much memory."""

    def __init__(self, registry: str, path: str) -> None:
        self.registry, self.path, self.worker, self.least = registry, path, Worker(examine_here), 0

    def __call__(self, case: Recipe, limit: float) -> CaseOutcome:
        outcome: CaseOutcome = self.worker((self.registry, self.path, case.json()), limit)
        # What the process has after its first case: the framework, and what it compiled.
        self.least = self.least or outcome.memory
        # After an illegal access every later call of this process would fail.
        broken = any(words in outcome.text for words in _STICKY)
        if broken or (self.least and outcome.memory > self.least + _GROWTH):
            self.worker.close()
            self.least = 0
        return outcome


def run_fuzz(
    names: Sequence[str] | None,
    seconds: float,
    seed: int,
    jobs: int = 1,
    most: int | None = None,
    shown: Display | None = None,
    registry: str = "attention",
) -> list[FuzzReport]:
    """Fuzz the named backends or entries, or all that run on this machine, which share the time evenly.

    seconds: total time.
    jobs: number of processes; they work on one backend at a time.
    most: largest number of programs per backend; None: no limit.
    shown: display of the progress, in seconds (default: none).
    registry: "attention", "diffusion" or "entries".

    Raises ValueError for an unknown name or registry, for `seconds` that are not finite and above 0 and for `jobs` below 1,
    `Interrupted` with the reports so far if the run is interrupted.
    """
    if registry not in _REGISTRIES:
        raise ValueError(f"--fuzz draws cases for --registry {', '.join(_REGISTRIES)}, not for {registry}")
    positive_number("seconds", seconds)
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    plugins.load()
    end, reports, chosen, shown = time.monotonic() + seconds, [], [], shown or Display()
    for name in _REGISTRIES[registry].names() if names is None else names:
        subject, path, why = _here(registry, name, names is None)
        if subject is None:
            reports.append(FuzzReport(name, seed, skipped=why))
        else:
            # Under the name that was asked for, which is part of the seed: a pair or an override has its class's name.
            chosen.append((dataclasses.replace(subject, name=name), path))
    for i, (subject, path) in enumerate(chosen):
        begin = time.monotonic()
        # An equal share of what is left: a backend that ends early leaves its time to the next ones.
        until = begin + (end - begin) / (len(chosen) - i)
        notify = functools.partial(_show, shown, begin)
        shown.begin(subject.name, max(1, math.ceil(until - begin)))
        examiners = [_Examiner(registry, path) for _ in range(jobs)]
        report = FuzzReport(subject.name, seed)
        reports.append(report)
        try:
            # Processes are started by the first case that each runs, within the context.
            with shared_cores(jobs):
                campaign(subject, examiners, seed, until, report, most, notify)
        except KeyboardInterrupt:
            # A copy: the examiners' threads still see their processes end.
            reports[-1] = dataclasses.replace(report, finds=list(report.finds), errors=list(report.errors))
            raise Interrupted(reports) from None
        finally:
            for examiner in examiners:
                examiner.worker.close()
    return reports


_REGISTRIES: dict[str, Any] = {
    "attention": AttentionBackendEnum,
    "diffusion": DiffusionAttentionBackendEnum,
    "entries": fuzz_entries,
}


def _here(registry: str, name: str, all_of_them: bool) -> tuple[Any, str, str]:
    """Return (a name as a subject or None, its path for `examine_here`, why it cannot run on this machine)."""
    if registry == "entries":
        entry = fuzz_entries.subject_of(name)
        why = entry.missing()
        return None if why else entry, name, why
    candidate = candidate_of(name) if registry == "attention" else DiffusionAttentionBackendEnum[name].candidate()
    subject: Any = None
    if registry == "attention":
        subject, why = subject_here(candidate, named=not all_of_them)
    elif not (why := unable(candidate, named=not all_of_them)):
        backend: Any = candidate.backend
        device = device_for(backend)
        subject = DenseSubject(name, backend, None if not_on(backend, device) else device)
    return subject, path_of(candidate.backend) if subject is not None and candidate.backend is not None else "", why


def _show(shown: Display, begin: float, report: FuzzReport) -> None:
    words = f"{report.cases} cases, {report.programs} programs, {len(report.finds)} finds"
    shown.step(max(1, int(time.monotonic() - begin)), words)


def as_json(reports: Sequence[FuzzReport]) -> dict[str, Any]:
    """Return the reports as JSON data."""
    return {"backends": [{**asdict(report), "ok": report.ok} for report in reports]}


def as_text(reports: Sequence[FuzzReport]) -> Iterator[str]:
    """Return the reports as text, without skipped ones unless all were skipped."""
    ran = [report for report in reports if not report.skipped]
    return map(str, ran or reports)
