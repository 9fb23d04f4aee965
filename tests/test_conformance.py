"""The conformance suite on the backends that a CPU runs at full speed (about 90 s, most of it XLA compiling).

A backend that cannot run is one skipped test, with its verdict as the reason. Kernels that need an accelerator, or an
interpreter in its place, are examined by their own tests and by `attn conform` on such a machine.
"""

from typing import Any

import pytest

from attn.backends.registry import AttentionBackendEnum
from attn.testing import Case, check_conformance, subject_here
from attn.testing.suite import cases_of

BACKENDS = ("TORCH_SDPA", "CPU_ATTN", "XLA_ATTN")


def _cases() -> list[Any]:
    found = []
    for member in map(AttentionBackendEnum.__getitem__, BACKENDS):
        subject, why = subject_here(member)
        if subject is None:
            found.append(pytest.param(member, None, id=member.name, marks=pytest.mark.skip(reason=why)))
        else:
            found += [pytest.param(member, case, id=f"{member.name}-{case}") for case in cases_of(subject)]
    return found


@pytest.mark.parametrize(("member", "case"), _cases())
def test_conformance(member: AttentionBackendEnum, case: Case) -> None:
    check_conformance(member.get_class(), case)
