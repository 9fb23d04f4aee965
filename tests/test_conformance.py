"""The conformance suite on the backends that a CPU runs at full speed. XLA compiles a program for most of XLA_ATTN's cases, so
`make test` runs those that are kept (tests/testing/covering.py) and some of the others.

A backend that cannot run is one skipped test, with its verdict as the reason. Kernels that need an accelerator, or an
interpreter in its place, are examined by their own tests and by `attn conform` on such a machine.
"""

from typing import Any

import pytest

from attn.testing import Case, candidate_of, check_conformance, subject_here
from attn.testing.suite import cases_of
from tests.levels import sampled
from tests.testing import covering

BACKENDS = ("TORCH_SDPA", "CPU_ATTN", "TORCH_MLA", "TORCH_MLA_SPARSE", "XLA_ATTN")


def _cases() -> list[Any]:
    found = []
    for candidate in map(candidate_of, BACKENDS):
        subject, why = subject_here(candidate)
        if subject is None:
            found.append(pytest.param(None, None, id=candidate.name, marks=pytest.mark.skip(reason=why)))
            continue
        name = candidate.name
        cases = [pytest.param(candidate.backend, case, id=f"{name}-{case}") for case in cases_of(subject)]
        found += sampled(cases, 5, name, _is_kept) if name in covering.BACKENDS else cases
    return found


def _is_kept(param: Any) -> bool:
    backend, case = param.values
    return covering.is_kept(backend.get_name(), case)


@pytest.mark.parametrize(("backend", "case"), _cases())
def test_conformance(backend: Any, case: Case) -> None:
    check_conformance(backend, case)
