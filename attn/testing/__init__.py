"""The conformance suite: check that a backend, built in or your own, computes what it declares.

    from attn.testing import run_conformance
    print(run_conformance(["XLA_ATTN"]))

    # a backend of your own, under pytest
    from attn.testing import conformance_cases, check_conformance
    @pytest.mark.parametrize("case", conformance_cases(MyBackend), ids=str)
    def test_conformance(case): check_conformance(MyBackend, case)

Cases follow from the backend's `Capabilities`, expected answers from the float64 oracle (`attn.reference`), tolerances from
the dtype. This package imports NumPy only; a framework's driver (`attn.torch.testing`, `attn.jax.testing`) is loaded by name.
"""

from attn.testing import bits
from attn.testing.case import Case
from attn.testing.conformance import (
    BackendReport,
    Report,
    candidate_of,
    cases_for,
    check_conformance,
    conformance_cases,
    run_case,
    run_conformance,
    runner_for,
    subject_here,
)
from attn.testing.draw import Call, Result, cache_spec, draw, layer_arguments
from attn.testing.expected import Expected, expect
from attn.testing.rules import Violation, compare

__all__ = [
    "BackendReport",
    "Call",
    "Case",
    "Expected",
    "Report",
    "Result",
    "Violation",
    "bits",
    "cache_spec",
    "candidate_of",
    "cases_for",
    "check_conformance",
    "compare",
    "conformance_cases",
    "draw",
    "expect",
    "layer_arguments",
    "run_case",
    "run_conformance",
    "runner_for",
    "subject_here",
]
