"""The conformance suite on the backends that a CPU runs at full speed (about 90 s, most of it XLA compiling).

A backend that cannot run is one skipped test, with its verdict as the reason. Kernels that need an accelerator, or an
interpreter in its place, are examined by their own tests and by `attn conform` on such a machine.
"""

from typing import Any

import pytest

from attn.testing import Case, candidate_of, check_conformance, subject_here
from attn.testing.suite import cases_of

BACKENDS = ("TORCH_SDPA", "CPU_ATTN", "TORCH_MLA", "TORCH_MLA_SPARSE", "XLA_ATTN")


def _cases() -> list[Any]:
    found = []
    for candidate in map(candidate_of, BACKENDS):
        subject, why = subject_here(candidate)
        if subject is None:
            found.append(pytest.param(None, None, id=candidate.name, marks=pytest.mark.skip(reason=why)))
        else:
            found += [pytest.param(candidate.backend, case, id=f"{candidate.name}-{case}") for case in cases_of(subject)]
    return found


@pytest.mark.parametrize(("backend", "case"), _cases())
def test_conformance(backend: Any, case: Case) -> None:
    check_conformance(backend, case)
