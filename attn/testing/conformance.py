"""Running the suite: one case, one backend, or everything that can run here, with a report that can be kept.

A case that fails says how to run it again; the first failure of a backend is also made smaller, by dropping requests, heads,
tokens and features for as long as some rule stays broken. What cannot run here is skipped with its verdict as the reason.
"""

import datetime
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import packages_distributions
from typing import Any, Protocol

from attn import evidence, plugins
from attn.backend_enum import load_candidate, path_of
from attn.backends.registry import BLOCKSPARSE, AttentionBackendEnum, blocksparse_candidate
from attn.capabilities import Candidate, Capabilities, Device, Feature
from attn.dtypes import dtype_name
from attn.errors import AttnError, UnsupportedError
from attn.imports import first_installed, resolve_obj_by_qualname, version_of
from attn.platforms import platform_for
from attn.testing.case import Case
from attn.testing.draw import Call, Result, draw
from attn.testing.processes import spread
from attn.testing.properties import run_check
from attn.testing.rules import BUDGETS, Score, Violation, lse_budget
from attn.testing.shrink import minimised
from attn.testing.subject import Subject, subject_of
from attn.testing.suite import cases_of, program_of
from attn.testing.wrong import wrong  # noqa: F401  # a property like the others, by its name
from attn.verdicts import choose, not_loadable

REFUSAL = "refusal"
#: The kinds of evidence that running the suite can give.
EXECUTED = ("ran", "interpreted", "stand-in")
#: What only a call can show, and a constructor cannot know; and what neither shows, so that selection alone refuses it.
_SEEN_BY_CALL = ("non_causal", "tree_mask", "dtype")
_SEEN_BY_CONSTRUCTOR = (
    "sliding_window", "two_sided_window", "soft_cap", "alibi", "sinks", "kv_sharing", "kv_cache_dtype", "attn_type",
    "head_size",
)  # fmt: skip
_ARRAY_DTYPES = tuple(d for d in BUDGETS if d != "float64")  # float64 arrays are beyond jax without its 64-bit mode


class Runner(Protocol):
    """A wing's driver for one backend: `build` constructs the layer of a call, calling it runs the call."""

    def build(self, call: Call) -> Any: ...

    def __call__(self, call: Call) -> Result: ...


def runner_for(backend: Any, device: Device | None = None) -> Runner:
    """The driver of a backend class, from the wing that it belongs to."""
    runner: Runner = resolve_obj_by_qualname(f"attn.{_framework(backend)}.testing.Runner")(
        backend, device or device_for(backend)
    )
    return runner


def _framework(backend: Any) -> str:
    own = getattr(backend, "capabilities", None)
    return str(own.framework if own is not None else backend.get_impl_cls().framework)


def device_for(backend: Any) -> Device:
    """The device that its wing has here, or the CPU where a torch backend serves that alone."""
    framework, own = _framework(backend), getattr(backend, "capabilities", None)
    here = platform_for(framework).device()
    if framework == "torch" and own is not None and own.device_reasons(here):
        cpu = platform_for(framework, "cpu").device()
        return here if own.device_reasons(cpu) else cpu
    return here


def cases_for(
    backend: Any, device: Device | None = None, level: str = "quick", capabilities: Capabilities | None = None
) -> list[Case]:
    """The suite's cases for a backend class, derived from its capabilities (or from those passed for it)."""
    return cases_of(subject_of(backend, capabilities, device or device_for(backend)), level)


#: The same under the name that a test file of another package reads well with.
conformance_cases = cases_for


def run_case(backend: Any, case: Case, device: Device | None = None, score: Score | None = None) -> list[Violation]:
    """Every violation of one case by one backend class. What the backend raises goes through, refusals apart."""
    device = device or device_for(backend)
    runner = runner_for(backend, device)
    found = _refusal(backend, case, device, runner) if case.check.startswith(REFUSAL) else run_check(case, runner, score)
    return [Violation(**{**vars(v), "backend": backend.get_name()}) for v in found]


def check_conformance(backend: Any, case: Case, device: Device | None = None) -> None:
    """`run_case` for a test: AssertionError with every violation and the line that repeats it."""
    violations = run_case(backend, case, device)
    if violations:
        raise AssertionError("\n".join(map(str, violations)))


def _refusal(backend: Any, case: Case, device: Device, runner: Runner) -> list[Violation]:
    """Selection refuses what is not declared and names it; so do constructor and call, where they can see it."""
    what = case.check.partition("=")[2]
    name, _, value = what.partition("=")

    def select() -> Any:
        candidate = load_candidate(backend.get_name(), path_of(backend), backend)
        return choose([candidate], case.request(), device).require()

    attempts: list[tuple[str, Callable[[], Any]]] = []
    if getattr(backend, "capabilities", None) is not None:
        attempts.append(("selection", select))
    if name in _SEEN_BY_CONSTRUCTOR and not (case.mla and name == "sinks"):  # MLA's constructor takes none
        drawn = draw(case.replace(kv_cache_dtype="auto"))  # no cache can be drawn of a dtype that holds no numbers
        attempts.append(("the constructor", lambda: runner.build(drawn.but(kv_cache_dtype=case.kv_cache_dtype))))
    if name in _SEEN_BY_CALL and (not value or value in _ARRAY_DTYPES):
        attempts.append(("the call", lambda: runner(draw(case))))
    found = []
    for who, attempt in attempts:
        try:
            attempt()
        except AttnError as error:
            said = str(error)
            if name not in said or value not in said:
                found.append(Violation("R", f"{who} refuses without naming {what}: {said}", case))
        else:
            found.append(Violation("R", f"{who} accepts {what}, which is not declared", case))
    return found


# everything that runs here


@dataclass
class Failure:
    """A case that failed: what was violated, or what was raised, and the line that repeats it."""

    case: str
    violations: list[str]
    repro: str


_SHOWN = 8  #: failures printed in full


@dataclass
class BackendReport:
    """One backend's outcome. `rows` maps a dtype to its worst row error (rule B), `lse` is the worst of rule D as a multiple of
    its tolerance; `tame` says that keys and values that no row sees were finite in every case, since the backend does not
    declare `nan_safe`; `above_target` are the cases that passed with less margin than the rules aim at; `smallest` repeats the
    first failure, minimised. `skipped` says why there is nothing else."""

    backend: str
    device: str = ""
    platform: str = ""
    level: str = "quick"
    kind: str = "ran"
    cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    rows: dict[str, float] = field(default_factory=dict)
    lse: float = 0.0
    tame: bool = False
    above_target: list[str] = field(default_factory=list)
    seconds: float = 0.0
    smallest: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.backend}: skipped, {self.skipped}"
        outcome = "all passed" if self.ok else f"{len(self.failures)} FAILED"
        lines = [
            f"{self.backend} {self.kind} on {self.device}: {self.cases} cases ({self.level}), {outcome}, {self.seconds:.1f} s"
        ]
        for dtype, worst in self.rows.items():
            lines.append(
                f"    worst row, {dtype}: {worst:.2g} (target {BUDGETS[dtype].target:.2g}, limit {BUDGETS[dtype].hard:.2g})"
            )
        if self.lse:
            lines.append(f"    worst lse: {self.lse:.2g} of its tolerance")
        if self.tame:
            lines.append("    nan_safe is not declared: what no row sees held large finite numbers, never NaN")
        if self.above_target:
            lines.append(f"    above target, within the limit: {', '.join(self.above_target)}")
        for failure in self.failures[:_SHOWN]:
            lines += [f"  FAILED {failure.case}", *(f"    {line}" for text in failure.violations for line in text.splitlines())]
        if len(self.failures) > _SHOWN:
            lines.append(f"  and {len(self.failures) - _SHOWN} more: {', '.join(f.case for f in self.failures[_SHOWN:])}")
        return "\n".join([*lines, *([f"  smallest failing case:\n    {self.smallest}"] if self.smallest else [])])


@dataclass
class Report:
    """The outcome of a conformance run; print it, or keep `to_dict()`."""

    backends: list[BackendReport]

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.backends)

    def __str__(self) -> str:
        return "\n".join(map(str, self.backends))

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "backends": [{**asdict(report), "ok": report.ok} for report in self.backends]}

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def run_conformance(
    names: Sequence[str] | None = None,
    level: str = "quick",
    *,
    kind: str | None = None,
    record: bool = False,
    only: str = "",
    dtypes: Sequence[str] = (),
    minimise: bool = True,
    jobs: int = 1,
    part: tuple[int, int] = (1, 1),
) -> Report:
    """Run the suite on backends by name, or on every one that can run here (without an interpreter).

    `kind` says how they are executed: `ran`, or `interpreted` or `stand-in` (`attn.evidence`), which need no device that
    the backend serves; None is `ran`, or `interpreted` where the backend says so (`interpreted_on`). `dtypes` leaves out
    cases of other dtypes (an interpreter may lack one), and the evidence says so; `only` keeps the cases whose name
    contains it, and no evidence is made of those. `record` writes a row for each backend into the evidence file, whatever
    the outcome. `part` (i, n) takes every n-th case from the i-th on, so that n runs are the whole. `jobs` processes share
    the cases: kernels that compile when they are first called keep one core busy each, and the device idle. Raises
    ValueError for an unknown name, level, kind or dtype, for a part that is to be recorded, and for an interpreted run
    that is to pass as `ran`.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if not 1 <= part[0] <= part[1]:
        raise ValueError(f"part={part[0]}/{part[1]} must be one of 1/{part[1]} to {part[1]}/{part[1]}")
    if record and (only or part[1] > 1):
        which = f"the cases that contain {only!r}" if only else f"part {part[0]} of {part[1]}"
        raise ValueError(f"record=True needs the whole suite, not {which}")
    if kind is not None and kind not in EXECUTED:
        raise ValueError(f"kind={kind!r} (supports {', '.join(EXECUTED)}: the suite executes what it examines)")
    dtypes = [dtype_name(dtype) for dtype in dtypes]
    plugins.load()
    reports, rows = [], []
    for name in [*AttentionBackendEnum.names(), BLOCKSPARSE] if names is None else names:
        candidate = candidate_of(name)
        subject, why = subject_here(candidate, kind or "ran")
        if subject is None:
            reports.append(BackendReport(name, skipped=why))
            continue
        backend = candidate.backend
        if names is None and kind != "interpreted" and is_interpreted(backend):
            reports.append(BackendReport(name, skipped="executed by an interpreter here, which takes long: ask for it by name"))
            continue
        cases = [case for case in cases_of(subject, level) if only in case.name]
        cases = [case for case in cases if not dtypes or case.dtype in dtypes or case.check.startswith(REFUSAL)]
        cases = cases[part[0] - 1 :: part[1]]
        if not cases:
            reports.append(BackendReport(name, skipped="no case was selected"))
            continue
        words = f"{level}, {' '.join(dtypes)}" if dtypes else level
        report = BackendReport(name, level=words, kind=_kind(backend, kind))
        reports.append(_examine(backend, cases, subject, report, minimise, jobs))
        rows.append(evidence_of(report, backend))
    if record:
        evidence.record(rows)
    return Report(reports)


def candidate_of(name: str) -> Candidate:
    """A backend by name, loaded as far as it goes: a member of the registry, or the selector's block-sparse branch (which is
    none). Raises ValueError for an unknown name."""
    if name == BLOCKSPARSE:
        return blocksparse_candidate()
    return AttentionBackendEnum[name].candidate()


def subject_here(candidate: Candidate, kind: str = "ran") -> tuple[Subject | None, str]:
    """(who is to be examined on this machine, ""), or (None, why that is impossible)."""
    reasons = list(not_loadable(candidate))
    if candidate.backend is None or reasons:
        return None, "; ".join(reasons)
    try:
        device = device_for(candidate.backend)
        subject = subject_of(candidate.backend, device=device if kind == "ran" else None)
        if kind == "ran" and (refused := subject.capabilities.device_reasons(device)):
            return None, "; ".join(refused)
        cases_of(subject)
    except UnsupportedError as error:
        return None, str(error)
    return subject, ""


def _kind(backend: Any, asked: str | None) -> str:
    """How a backend will be executed here. An interpreter's work never passes as the device's."""
    if asked == "ran" and is_interpreted(backend):
        raise ValueError(f"{backend.get_name()} is executed by an interpreter here: kind must be 'interpreted'")
    return asked or ("interpreted" if is_interpreted(backend) else "ran")


def is_interpreted(backend: Any) -> bool:
    """Whether kernels would be executed by an interpreter here."""
    by_choice = getattr(backend, "is_interpreted", None)  # a kernel language's own switch
    return device_for(backend).platform in getattr(backend, "interpreted_on", ()) or bool(by_choice and by_choice())


@dataclass
class _Outcome:
    """What one case came to: its violations as text, and how near the limits it was."""

    violations: list[str]
    score: Score = field(default_factory=Score)


def _examine(
    backend: Any, cases: Sequence[Case], subject: Subject, report: BackendReport, minimise: bool, jobs: int
) -> BackendReport:
    begin, device = time.perf_counter(), device_for(backend)
    report.device, report.platform = device.name or device.platform, device.platform
    report.tame = not subject.has(Feature.NAN_SAFE)
    for case, outcome in zip(cases, _outcomes(backend, cases, jobs), strict=True):
        report.cases += 1
        violations, score = outcome.violations, outcome.score
        if violations:
            report.failures.append(Failure(case.name, violations, case.repro(report.backend)))
        elif score.row and (score.row > BUDGETS[case.dtype].target or score.lse > lse_budget(case).target):
            report.above_target.append(case.name)
        if score.row:
            report.rows[case.dtype] = max(report.rows.get(case.dtype, 0.0), score.row)
        report.lse = max(report.lse, score.lse)
        if violations and minimise and not report.smallest and case.check == "oracle":
            smallest = minimised(case, lambda simpler: subject.serves(simpler) and bool(_outcome(backend, simpler).violations))
            report.smallest = smallest.repro(report.backend)
    report.seconds = time.perf_counter() - begin
    return report


def _outcomes(backend: Any, cases: Sequence[Case], jobs: int) -> Iterable[_Outcome]:
    if jobs == 1:
        return (_outcome(backend, case) for case in cases)
    return spread(partial(_outcome_elsewhere, path_of(backend)), cases, jobs, lambda why: _Outcome([why]), program_of)


def _outcome_elsewhere(path: str, case: Case) -> _Outcome:
    """`_outcome` in a process that starts with nothing: the backend is found by its path."""
    return _outcome(resolve_obj_by_qualname(path), case)


def _outcome(backend: Any, case: Case) -> _Outcome:
    """Whatever a backend under examination raises is a finding, not the end of the run."""
    score = Score()
    try:
        return _Outcome([str(v) for v in run_case(backend, case, score=score)], score)
    except Exception as error:
        return _Outcome([f"raised {type(error).__name__}: {error}\n    {case.repro(backend.get_name())}"], score)


def evidence_of(report: BackendReport, backend: Any, registry: str = "attention") -> evidence.Evidence:
    """The row of one backend's run."""
    framework = _framework(backend)
    needed = [first_installed(names) or names for names in getattr(backend.capabilities, "packages", ())]
    named = packages_distributions()  # flashinfer is of flashinfer-python
    modules = [module.partition(".")[0] for module in needed]
    packages = (framework, "numpy", *(package for module in modules for package in named.get(module, [module])))
    return evidence.Evidence(
        backend=report.backend,
        registry=registry,
        framework=framework,
        platform=report.platform,
        device=report.device,
        kind=report.kind,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        cases=report.cases,
        failures=len(report.failures),
        level=report.level,
        versions={package: version for package in packages if (version := version_of(package))},
    )
