"""Running a part of the suite over a registry whose members are no paged backends: the dense and the prefill family.

A family says which cases a class has and how one is checked; what cannot run here is skipped with its reason, and a case
that fails, or raises, is a finding of that case alone.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from attn import evidence
from attn.backend_enum import BackendEnum
from attn.capabilities import Device
from attn.testing.conformance import EXECUTED, BackendReport, Failure, Report, device_for, evidence_of, is_interpreted
from attn.verdicts import not_loadable


def run_family(
    family: str,
    registry: type[BackendEnum],
    cases: Callable[[Any, Device], Sequence[Any]],
    check: Callable[[Any, Any], None],
    names: Sequence[str] | None = None,
    *,
    kind: str | None = None,
    only: str = "",
    record: bool = False,
    level: str = "",
) -> Report:
    """Run `check(backend, case)` for each of `cases(backend, device)`, on members by name or on every one that runs here.

    `family` is the registry's name in the evidence; a case is a value with a `name`; `check` raises AssertionError. `kind`
    as in `run_conformance`: with `stand-in` or `interpreted` no device is asked for; None is `ran`, or `interpreted` where
    the backend says so. Raises ValueError for an unknown name or kind, for a part that is to be recorded, and for an
    interpreted run that is to pass as `ran`.
    """
    if kind is not None and kind not in EXECUTED:
        raise ValueError(f"kind={kind!r} (supports {', '.join(EXECUTED)})")
    if record and only:
        raise ValueError(f"record=True needs the whole suite, not the cases that contain {only!r}")
    reports, rows = [], []
    for name in registry.names() if names is None else names:
        candidate = registry[name].candidate()
        backend: Any = candidate.backend
        if why := not_loadable(candidate):
            reports.append(BackendReport(name, skipped="; ".join(why)))
            continue
        device = device_for(backend)
        interpreted = is_interpreted(backend)
        if interpreted and kind == "ran":
            raise ValueError(f"{name} is executed by an interpreter here: kind must be 'interpreted'")
        how = kind or ("interpreted" if interpreted else "ran")
        if interpreted and names is None and kind is None:
            reports.append(BackendReport(name, skipped="executed by an interpreter here, which takes long: ask for it by name"))
            continue
        if how == "ran" and (refused := backend.capabilities.device_reasons(device)):
            reports.append(BackendReport(name, skipped="; ".join(refused)))
            continue
        report = BackendReport(name, device.name or device.platform, device.platform, level or family, how)
        begin = time.perf_counter()
        for case in cases(backend, device):
            if only in case.name:
                report.cases += 1
                if told := _told(check, backend, case):
                    report.failures.append(Failure(case.name, [told], ""))
        report.seconds = time.perf_counter() - begin
        if not report.cases:
            report.skipped = "no case was selected"
        else:
            rows.append(evidence_of(report, backend, family))
        reports.append(report)
    if record:
        evidence.record(rows)
    return Report(reports)


def _told(check: Callable[[Any, Any], None], backend: Any, case: Any) -> str:
    """What is wrong with one case; "" when nothing is. Whatever a backend under examination raises is a finding."""
    try:
        check(backend, case)
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return ""
