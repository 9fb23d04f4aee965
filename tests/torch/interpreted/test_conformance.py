"""The conformance suite on Triton's kernels in Triton's interpreter; tests/torch/test_interpreted.py starts a process for it.

Every feature is TRITON_ATTN's. Its relatives run what is theirs, and enough to show that they are wired up.
"""

import importlib.util
import os
from typing import Any

import pytest

from attn.testing import Case, candidate_of, check_conformance, subject_here
from attn.testing.suite import cases_of
from tests.levels import sampled
from tests.testing import covering

pytestmark = [
    pytest.mark.triton_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
#: Backend, level, what a case's name contains, and how many of the cases `make test` draws.
RELATIVES = (
    ("TREE_ATTN", "smoke", "tree", 2),
    ("BLOCKSPARSE", "smoke", "", 2),
    ("TREE_ATTN", "quick", "odd", 1),  # batch_invariant
    ("BLOCKSPARSE", "quick", "odd", 1),
    ("ROCM_ATTN", "quick", "odd", 0),
    ("ROCM_ATTN", "smoke", "needle", 2),
    ("TRITON_MLA", "smoke", "needle", 2),
    ("TRITON_MLA_SPARSE", "smoke", "needle", 2),
)


def _params(name: str, level: str, words: str) -> list[Any]:
    candidate = candidate_of(name)
    subject, why = subject_here(candidate, "interpreted")
    assert subject is not None, why
    cases = [case for case in cases_of(subject, level) if words in case.name]
    assert cases, f"no case of {name}, level {level}, contains {words!r}"
    return [pytest.param(candidate.backend, case, id=f"{name}-{case}") for case in cases]


def _cases() -> list[Any]:
    if not INTERPRETS:
        return []
    found = sampled(
        _params("TRITON_ATTN", "quick", ""), 4, "TRITON_ATTN", lambda param: covering.is_kept("TRITON_ATTN", param.values[1])
    )
    for name, level, words, count in RELATIVES:
        found += sampled(_params(name, level, words), count, f"{name} {level} {words}")
    return found


@pytest.mark.parametrize(("backend", "case"), _cases())
def test_conformance(backend: Any, case: Case) -> None:
    check_conformance(backend, case)
