"""Run the conformance suite on one case, one backend or every backend that can run on this machine, and report the result.

A failed case prints the command that repeats it. The first failure of a backend is also minimised: requests, heads, tokens and
features are removed while some rule is still broken. A backend that cannot run is skipped, with its verdict as the reason.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import packages_distributions
from typing import Any, NamedTuple, Protocol

from attn.backend_enum import BackendEnum, load_candidate, path_of
from attn.backends.registry import BLOCKSPARSE, AttentionBackendEnum, blocksparse_candidate
from attn.capabilities import Candidate, Capabilities, Device, Feature
from attn.dtypes import dtype_name
from attn.errors import AttnError, UnsupportedError
from attn.imports import first_installed, installed, pip_install, resolve_obj_by_qualname, version_of
from attn.progress import Display
from attn.reports import evidence
from attn.selection import plugins
from attn.selection.platforms import platform_for
from attn.selection.verdicts import choose, not_loadable
from attn.tables import counted
from attn.testing.case import Case, Recipe
from attn.testing.draw import Call, Result, draw
from attn.testing.processes import each
from attn.testing.properties import run_check
from attn.testing.rules import BUDGETS, Score, Violation, lse_budget
from attn.testing.shrink import minimised
from attn.testing.subject import Subject, subject_of
from attn.testing.suite import cases_of, program_of
from attn.testing.wrong import wrong  # noqa: F401  # a property like the others, by its name

Check = Callable[[Any, Any], None]  #: (backend class, case); raises AssertionError

REFUSAL = "refusal"
#: The kinds of evidence that running the suite can give.
EXECUTED = ("ran", "interpreted", "stand-in")
#: Features that a call can reject, and those that a constructor can. Selection rejects these and all others.
_SEEN_BY_CALL = ("non_causal", "tree_mask", "spans", "mixed_causal", "dtype")
_RULES = ("sliding_window", "two_sided_window", "chunk_size", "soft_cap", "alibi", "sinks")
_SEEN_BY_CONSTRUCTOR = (*_RULES, "kv_sharing", "kv_cache_dtype", "attn_type", "head_size")
_ARRAY_DTYPES = tuple(d for d in BUDGETS if d != "float64")  # jax supports float64 only in its 64-bit mode


class BackendRunner(Protocol):
    """A framework's driver for one backend: `build` constructs the layer of a call; calling the driver runs the call."""

    def build(self, call: Call) -> Any: ...

    def __call__(self, call: Call) -> Result: ...


def runner_for(backend: Any, device: Device | None = None) -> BackendRunner:
    """Return the driver of a backend class, from its framework's package."""
    framework = _framework(backend)
    runner = resolve_obj_by_qualname(f"attn.{framework}.testing.{framework.capitalize()}Runner")
    return runner(backend, device or device_for(backend))


def _framework(backend: Any) -> str:
    capabilities = getattr(backend, "capabilities", None)
    return str(capabilities.framework if capabilities is not None else backend.get_impl_cls().framework)


def device_for(backend: Any) -> Device:
    """Return the device of the backend's framework on this machine; the CPU for a torch backend that supports no other."""
    framework, capabilities = _framework(backend), getattr(backend, "capabilities", None)
    device = platform_for(framework).device()
    # On a machine with a GPU a backend for CPUs would otherwise have no device, and could not be tested there.
    if framework == "torch" and capabilities is not None and capabilities.device_reasons(device):
        cpu = platform_for(framework, "cpu").device()
        return device if capabilities.device_reasons(cpu) else cpu
    return device


def cases_for(
    backend: Any, device: Device | None = None, level: str = "quick", capabilities: Capabilities | None = None
) -> list[Case]:
    """Return the suite's cases for a backend class, derived from `capabilities` (None: the class's own)."""
    return cases_of(subject_of(backend, capabilities, device or device_for(backend)), level)


#: The same function under a name that reads well in another package's tests.
conformance_cases = cases_for


def run_case(backend: Any, case: Case, device: Device | None = None, score: Score | None = None) -> list[Violation]:
    """Return all violations of a case by a backend class.

    Raises what the backend raises, unless the case expects a rejection.
    """
    device = device or device_for(backend)
    runner = runner_for(backend, device)
    violations = _refusal(backend, case, device, runner) if case.check.startswith(REFUSAL) else run_check(case, runner, score)
    # The checks do not know the backend's name, which the command that repeats a case needs.
    return [Violation(**{**vars(v), "backend": backend.get_name()}) for v in violations]


def check_conformance(backend: Any, case: Case, device: Device | None = None) -> None:
    """Run a case as `run_case` does.

    Raises AssertionError with all violations and the command that repeats each.
    """
    violations = run_case(backend, case, device)
    if violations:
        raise AssertionError("\n".join(map(str, violations)))


def _refusal(backend: Any, case: Case, device: Device, runner: BackendRunner) -> list[Violation]:
    """Check that selection rejects an undeclared feature by name, and so do the constructor and the call if they receive it."""
    setting = case.check.partition("=")[2]
    name, _, value = setting.partition("=")

    def select() -> Any:
        # The selector judges a candidate of this class, whether or not the class is registered.
        candidate = load_candidate(backend.get_name(), path_of(backend), backend)
        return choose([candidate], case.request(), device).require()

    attempts: list[tuple[str, Callable[[], Any]]] = []
    # Selection reads the record only; a backend without one refuses in its constructor and its call.
    if getattr(backend, "capabilities", None) is not None:
        attempts.append(("selection", select))
    if name in _SEEN_BY_CONSTRUCTOR and not (case.mla and name in ("sinks", "chunk_size")):  # not MLA's
        drawn = draw(case.replace(kv_cache_dtype="auto"))  # the dtype may be one without values
        attempts.append(("the constructor", lambda: runner.build(drawn.but(kv_cache_dtype=case.kv_cache_dtype))))
    if name in _SEEN_BY_CALL and (not value or value in _ARRAY_DTYPES):
        attempts.append(("the call", lambda: runner(draw(case))))
    violations = []
    for step, attempt in attempts:
        try:
            attempt()
        except AttnError as error:
            message = str(error)
            # A rejection for another reason would hide that this setting is accepted.
            if name not in message or value not in message:
                violations.append(Violation("R", f"{step} refuses without naming {setting}: {message}", case))
        else:
            violations.append(Violation("R", f"{step} accepts {setting}, which is not declared", case))
    return violations


# whole runs


@dataclass
class Failure:
    """A failed case: its violations, or the exception that was raised, and the command that repeats it."""

    case: str
    violations: list[str]
    repro: str


_SHOWN = 8  #: failures printed in full


@dataclass
class BackendReport:
    """The result of one backend.

    rows: the worst row error (rule B) of each dtype.
    lse: the worst error of rule D, as a multiple of its tolerance.
    tame: whether keys and values that no row attends to were finite in all cases, as `nan_safe` is not declared.
    above_target: cases that passed with an error above the target, within the limit.
    smallest: the command that repeats the first failure, minimised.
    skipped: why the backend did not run; the other fields are then empty.
    """

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
        cases = f"{counted(self.cases, 'case')} ({self.level})"
        lines = [f"{self.backend} {self.kind} on {self.device}: {cases}, {outcome}, {self.seconds:.1f} s"]
        for dtype, worst in self.rows.items():
            lines.append(
                f"    worst row, {dtype}: {worst:.2g} (target {BUDGETS[dtype].target:.2g}, limit {BUDGETS[dtype].hard:.2g})"
            )
        if self.lse:
            lines.append(f"    worst lse: {self.lse:.2g} of its tolerance")
        if self.tame:
            lines.append("    nan_safe is not declared: unattended keys and values were large finite numbers, never NaN")
        if self.above_target:
            lines.append(f"    above target, within the limit: {', '.join(self.above_target)}")
        for failure in self.failures[:_SHOWN]:
            lines += [f"  FAILED {failure.case}", *(f"    {line}" for text in failure.violations for line in text.splitlines())]
        if len(self.failures) > _SHOWN:
            lines.append(f"  and {len(self.failures) - _SHOWN} more: {', '.join(f.case for f in self.failures[_SHOWN:])}")
        return "\n".join([*lines, *([f"  smallest failing case:\n    {self.smallest}"] if self.smallest else [])])


@dataclass
class Report:
    """The result of a conformance run; print it, or store `to_dict()`."""

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
    dtypes: Sequence[str] = (),
    minimise: bool = True,
    **options: Any,
) -> Report:
    """Run the suite on the named backends, or on all that can run on this machine without an interpreter.

    level: one of `attn.testing.suite.LEVELS`.
    dtypes: run the cases of these dtypes (an interpreter may lack one); the evidence states it. Empty: all.
    minimise: minimise the first failure of each backend that did not end its process.

    The other options are those of the suites of all registries:

    kind: how the backends are executed: `ran`, or `interpreted` or `stand-in` (`attn.reports.evidence`), which do not need a
        supported device. None: `interpreted` on the platforms of a backend's `interpreted_on`, else `ran`.
    only: run the cases whose name contains this text.
    record: write a row for each backend to the evidence file, whether it passed or failed.
    jobs: number of processes that share the cases, useful for kernels that compile at their first call on one core.
    part: (i, n): run every n-th case from the i-th on; n runs cover the suite.
    shown: display of the progress, a step per case (default: none).

    Raises ValueError for an unknown name, level, kind or dtype, if `record` is passed with `only` or `part`, and for kind `ran`
    where kernels are interpreted.
    """
    dtypes = [dtype_name(dtype) for dtype in dtypes]

    def cases(backend: Any, subject: Subject) -> list[Case]:
        # Refusals in any dtype stay: they compute nothing.
        served = cases_of(subject, level)
        return [case for case in served if not dtypes or case.dtype in dtypes or case.check.startswith(REFUSAL)]

    words = f"{level}, {' '.join(dtypes)}" if dtypes else level
    # Called at the run, since plug-ins add names to the registry.
    all_names = lambda: [*AttentionBackendEnum.names(), BLOCKSPARSE]  # noqa: E731
    more: dict[str, Any] = {"program_of": program_of, "minimise": minimise}
    family = Family("attention", words, all_names, candidate_of, subject_here, cases, _outcome, **more)
    return run_family(family, names, **options)


class Family(NamedTuple):
    """The suite of one registry.

    name, level: the registry's and the suite's in the evidence. candidate: one of `names`, or ValueError. subject: as
    `subject_here`; `cases` follow from it. outcome: the result of a case on a class. minimise: as in `run_conformance`.
    """

    name: str
    level: str
    names: Callable[[], Sequence[str]]
    candidate: Callable[[str], Candidate]
    subject: Callable[[Candidate, str | None, bool], tuple[Any, str]]
    cases: Callable[[Any, Any], Sequence[Any]]
    outcome: Callable[[Any, Any], "_Outcome"]
    program_of: Callable[[Any], Any] = lambda case: None  #: as for `attn.testing.processes.spread`
    minimise: bool = False

    @classmethod
    def checked(
        cls, name: str, level: str, registry: type[BackendEnum], cases: Callable[[Any, Device], Sequence[Any]], check: Check
    ) -> "Family":
        """Return the suite of a registry without a paged cache. cases: of a class on a device; check: raises AssertionError."""
        find = lambda backend: registry[backend].candidate()  # noqa: E731
        return cls(name, level, registry.names, find, _device_here, cases, functools.partial(_checked, check))


def run_family(
    family: Family,
    names: Sequence[str] | None = None,
    *,
    kind: str | None = None,
    record: bool = False,
    only: str = "",
    jobs: int = 1,
    part: tuple[int, int] = (1, 1),
    shown: Display | None = None,
) -> Report:
    """Run a registry's suite on the named backends, or on all that can run here; the arguments are `run_conformance`'s."""
    _check_run(kind, record, only, jobs, part)
    plugins.load()
    shown = shown or Display()
    reports, runs = [], []
    for name in family.names() if names is None else names:
        candidate = family.candidate(name)
        reports.append(report := BackendReport(candidate.name))  # a name may be passed in another case
        subject, report.skipped = family.subject(candidate, kind, names is not None)
        if subject is None:
            continue
        # Every n-th case, not a block of them: neighbours are of one kind and need about the same time.
        cases = [case for case in family.cases(candidate.backend, subject) if only in case.name][part[0] - 1 :: part[1]]
        if not cases:
            report.skipped = "no case was selected"
            continue
        report.level, report.kind = family.level, kind or kind_here(candidate.backend)
        runs.append((candidate.backend, cases, subject, report))
    done = 0
    # All cases are listed before any is run, so that the progress has a total.
    shown.begin("cases", sum(len(cases) for _, cases, _, _ in runs))
    for backend, cases, subject, report in runs:
        shown.step(done, report.backend)
        for _ in _examine(family, backend, cases, subject, report, jobs):
            done += 1
            shown.step(done, report.backend)
    # Also a run with failures: the table must not keep the older, better row.
    if record:
        evidence.record(evidence_of(report, backend, family.name) for backend, _, _, report in runs)
    return Report(reports)


def _check_run(kind: str | None, record: bool, only: str, jobs: int, part: tuple[int, int]) -> None:
    """Raise ValueError for arguments of a run as `run_conformance` documents."""
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if kind is not None and kind not in EXECUTED:
        raise ValueError(f"kind={kind!r} (supports {', '.join(EXECUTED)}: the suite executes the backends)")
    if record and only:
        raise ValueError(f"record=True needs the whole suite, not the cases that contain {only!r}")
    if not 1 <= part[0] <= part[1]:
        raise ValueError(f"part={part[0]}/{part[1]} must be one of 1/{part[1]} to {part[1]}/{part[1]}")
    if record and part[1] > 1:
        raise ValueError(f"record=True needs the whole suite, not part {part[0]} of {part[1]}")


def candidate_of(name: str) -> Candidate:
    """Return a backend by name, loaded if possible: a member of the registry or the selector's block-sparse backend.

    Raises ValueError for an unknown name.
    """
    if name.upper() == BLOCKSPARSE:
        return blocksparse_candidate()
    return AttentionBackendEnum[name].candidate()


def subject_here(candidate: Candidate, kind: str | None = None, named: bool = True) -> tuple[Subject | None, str]:
    """Return (the candidate's subject on this machine, ""), or (None, why it cannot run); arguments as for `unable`."""
    if why := unable(candidate, kind, named):
        return None, why
    backend: Any = candidate.backend
    device: Device | None = device_for(backend)
    if kind not in (None, "ran") or not_on(backend, device):
        device = None  # interpreted: the limits are those of any device
    try:
        subject = subject_of(backend, device=device)
        # For its error only: a device on which no case is served is a reason to skip the backend.
        cases_of(subject)
    except UnsupportedError as error:
        return None, str(error)
    return subject, ""


def _device_here(candidate: Candidate, kind: str | None, named: bool) -> tuple[Device | None, str]:
    """Return (the device of a backend on this machine, ""), or (None, why it cannot run); arguments as for `unable`."""
    why = unable(candidate, kind, named)
    return None if why else device_for(candidate.backend), why


def unable(candidate: Candidate, kind: str | None = None, named: bool = True) -> str:
    """Return why a backend cannot run on this machine, or "".

    kind: as for `run_conformance`. named: whether the backend was requested by name; others do not run in an interpreter, which
    is slow, unless `kind` requests it. Raises ValueError for kind `ran` where kernels are interpreted: such a run is never
    recorded as the device's.
    """
    if reasons := not_loadable(candidate):
        return "; ".join(reasons)
    backend: Any = candidate.backend
    if not installed(framework := _framework(backend)):  # a backend of records only is loaded without it
        return f"{framework} is not installed: {pip_install(framework)}"
    interpreted = is_interpreted(backend)
    if interpreted and kind == "ran":
        raise ValueError(f"{candidate.name} is interpreted on this machine: kind must be 'interpreted'")
    if interpreted and kind is None and not named:
        return "kernels are interpreted on this machine, slow: request it by name"
    # Under an interpreter or with a stand-in the record's devices do not matter.
    return "" if interpreted or kind not in (None, "ran") else "; ".join(not_on(backend, device_for(backend)))


def not_on(backend: Any, device: Device | None) -> list[str]:
    """Return why a backend does not support a device; nothing of a backend that declares no capabilities."""
    capabilities = getattr(backend, "capabilities", None)
    return [] if capabilities is None or device is None else list(capabilities.device_reasons(device))


def kind_here(backend: Any) -> str:
    """Return how a backend is executed on this machine."""
    return "interpreted" if is_interpreted(backend) else "ran"


def is_interpreted(backend: Any) -> bool:
    """Whether an interpreter executes the backend's kernels on this machine."""
    switch = getattr(backend, "is_interpreted", None)  # a kernel language's setting
    return device_for(backend).platform in getattr(backend, "interpreted_on", ()) or bool(switch and switch())


@dataclass
class _Outcome:
    """The result of one case: its violations as text, and its errors relative to the limits."""

    violations: list[str]
    score: Score = field(default_factory=Score)
    lost: bool = False  #: whether its process died


def _examine(
    family: Family, backend: Any, cases: Sequence[Any], subject: Any, report: BackendReport, jobs: int
) -> Iterator[None]:
    """Run the cases into `report`; yield after each."""
    begin, device = time.perf_counter(), device_for(backend)
    report.device, report.platform = device.name or device.platform, device.platform
    # A dense family's subject is a device.
    report.tame = isinstance(subject, Subject) and not subject.has(Feature.NAN_SAFE)
    outcomes = each(family.outcome, backend, cases, jobs, lambda why: _Outcome([why], lost=True), family.program_of)
    for case, outcome in zip(cases, outcomes, strict=True):
        report.cases += 1
        violations, score = outcome.violations, outcome.score
        if violations:
            repro = case.repro(report.backend) if isinstance(case, Recipe) else ""
            report.failures.append(Failure(case.name, violations, repro))
        # A property or a refusal that computes no row has no error to report.
        elif score.row and (score.row > BUDGETS[case.dtype].target or score.lse > lse_budget(case).target):
            report.above_target.append(case.name)
        if score.row:
            report.rows[case.dtype] = max(report.rows.get(case.dtype, 0.0), score.row)
        report.lse = max(report.lse, score.lse)
        # A case that ended its process is not minimised: the simpler ones run in this process, and could end it too.
        if violations and not outcome.lost and family.minimise and not report.smallest and case.check == "oracle":
            smallest = minimised(case, lambda simpler: subject.serves(simpler) and bool(_outcome(backend, simpler).violations))
            report.smallest = smallest.repro(report.backend)
        report.seconds = time.perf_counter() - begin
        yield


def _outcome(backend: Any, case: Case) -> _Outcome:
    """Run one case; an exception that the backend raises is a failure of the case, not of the run."""
    score = Score()
    try:
        return _Outcome([str(v) for v in run_case(backend, case, score=score)], score)
    except Exception as error:
        return _Outcome([f"raised {type(error).__name__}: {error}\n    {case.repro(backend.get_name())}"], score)


def _checked(check: Check, backend: Any, case: Any) -> _Outcome:
    """Run a case of a family whose `check` raises AssertionError; any other exception is a failure of the case too."""
    try:
        check(backend, case)
    except AssertionError as error:
        return _Outcome([str(error) or "an assertion failed"])
    except Exception as error:
        return _Outcome([f"raised {type(error).__name__}: {error}"])
    return _Outcome([])


def evidence_of(report: BackendReport, backend: Any, registry: str = "attention") -> evidence.Evidence:
    """Return the evidence of one backend's run."""
    framework = _framework(backend)
    # Of alternatives `a|b` the one that is installed. A substitute (stand-in) runs without any, and no version is recorded.
    needed = [first_installed(names) or names for names in getattr(backend.capabilities, "packages", ())]
    named = packages_distributions()  # the module flashinfer is in the package flashinfer-python
    modules = [module.partition(".")[0] for module in needed]
    # A module that no distribution names is looked up as a distribution of that name.
    packages = (framework, "numpy", *(package for module in modules for package in named.get(module, [module])))
    return evidence.Evidence(
        **{name: getattr(report, name) for name in ("backend", "platform", "device", "kind", "cases", "level")},
        registry=registry,
        framework=framework,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        failures=len(report.failures),
        versions={package: version for package in packages if (version := version_of(package))},
    )
