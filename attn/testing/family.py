"""Run the suite over the registries of dense and prefill backends, which have no paged cache.

A `Family` provides the cases of a class and the check of a case. A backend that cannot run on this machine is skipped with the
reason; a case that fails or raises does not stop the others.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from attn.backend_enum import BackendEnum
from attn.capabilities import Device
from attn.progress import Display
from attn.reports import evidence
from attn.testing.conformance import BackendReport, Failure, Report, check_run, device_for, evidence_of, kind_here, unable
from attn.testing.processes import each


class Family(NamedTuple):
    """The suite of one registry.

    name, level: the registry's and the suite's in the evidence.
    cases: a function that returns the cases of a backend class on a device; each case has a `name`.
    check: a function that raises AssertionError for a case that a backend class fails.
    """

    name: str
    registry: type[BackendEnum]
    level: str
    cases: Callable[[Any, Device], Sequence[Any]]
    check: Callable[[Any, Any], None]


def run_family(
    family: Family,
    names: Sequence[str] | None = None,
    *,
    kind: str | None = None,
    only: str = "",
    record: bool = False,
    jobs: int = 1,
    shown: Display | None = None,
) -> Report:
    """Check each case of a family, on the named members of its registry or on all that run on this machine.

    kind, jobs, shown: as for `run_conformance`.

    Raises ValueError for an unknown name or kind, if `record` is passed with `only`, for `jobs` below 1, and for kind `ran`
    where kernels are interpreted.
    """
    check_run(kind, record, only, jobs)
    shown = shown or Display()
    reports, rows = [], []
    for name in family.registry.names() if names is None else names:
        candidate = family.registry[name].candidate()
        name, backend = candidate.name, candidate.backend  # a name may be passed in another case
        if why := unable(candidate, kind, names is not None):
            reports.append(BackendReport(name, skipped=why))
            continue
        device = device_for(backend)
        report = BackendReport(name, device.name or device.platform, device.platform, family.level, kind or kind_here(backend))
        begin = time.perf_counter()
        selected = [case for case in family.cases(backend, device) if only in case.name]
        shown.begin(name, len(selected))
        problems = each(partial(_problem, family.check), backend, selected, jobs, str)
        for case, problem in zip(selected, problems, strict=True):
            report.cases += 1
            if problem:
                report.failures.append(Failure(case.name, [problem], ""))
            shown.step(report.cases, "")
        report.seconds = time.perf_counter() - begin
        if not report.cases:
            report.skipped = "no case was selected"
        else:
            rows.append(evidence_of(report, backend, family.name))
        reports.append(report)
    if record:
        evidence.record(rows)
    return Report(reports)


def _problem(check: Callable[[Any, Any], None], backend: Any, case: Any) -> str:
    """Return why a case fails, or "". An exception that the backend raises is a failure of the case."""
    try:
        check(backend, case)
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return ""
