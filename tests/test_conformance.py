"""The conformance suite on XLA's and latent attention's backends, on a CPU; torch/backends/test_ragged.py has it for TORCH_SDPA
and CPU_ATTN. XLA compiles a program for most of XLA_ATTN's cases, so `make test` runs those that are kept
(tests/testing/covering.py) and some of the others; of latent attention, it draws half.

A backend that cannot run is one skipped test, with its verdict as the reason. Kernels that need an accelerator, or an
interpreter in its place, are examined by their own tests and by `attn conform` on such a machine.
"""

from typing import Any

import pytest

from attn.testing import Case, candidate_of, check_conformance, subject_here
from attn.testing.suite import cases_of
from tests.levels import sampled
from tests.testing import covering

#: Of backends whose cases are expensive, the number that `make test` draws.
DRAWN = {"XLA_ATTN": 3, "TORCH_MLA": 60, "TORCH_MLA_SPARSE": 60}
BACKENDS = tuple(DRAWN)


def _cases() -> list[Any]:
    found = []
    for candidate in map(candidate_of, BACKENDS):
        subject, why = subject_here(candidate)
        if subject is None:
            found.append(pytest.param(None, None, id=candidate.name, marks=pytest.mark.skip(reason=why)))
            continue
        name = candidate.name
        cases = [pytest.param(candidate.backend, case, id=f"{name}-{case}") for case in cases_of(subject)]
        found += sampled(cases, DRAWN[name], name, _is_kept)
    return found


def _is_kept(param: Any) -> bool:
    backend, case = param.values
    name = backend.get_name()
    if name in covering.BACKENDS:
        return covering.is_kept(name, case)
    return case.check.startswith("refusal") or case.name == "dummy batch"


@pytest.mark.parametrize(("backend", "case"), _cases())
def test_conformance(backend: Any, case: Case) -> None:
    check_conformance(backend, case)
