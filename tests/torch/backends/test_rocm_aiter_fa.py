"""AITER's two attention backends on stand-ins: the suite, and what is refused with its reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from attn.capabilities import Device, Feature, Request
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends.rocm_aiter_fa import AiterFlashAttentionBackend
from attn.torch.backends.rocm_aiter_unified_attn import RocmAiterUnifiedAttentionBackend
from tests.levels import some
from tests.testing import covering

MI300 = Device("torch", "rocm", "AMD Instinct MI300X", "gfx942")
BACKENDS = (AiterFlashAttentionBackend, RocmAiterUnifiedAttentionBackend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
def test_the_suite_on_a_stand_in(backend: Any, standins: Callable[..., None]) -> None:
    standins("aiter_pkg")
    cases = cases_of(subject_of(backend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 40
    for case in some(cases, 20, backend.get_name(), partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(backend, case)


def test_what_rocm_backends_drop_elsewhere_is_refused_here() -> None:
    """vLLM's ROCm attention loses the soft cap; AITER's own overflows."""
    capped = Request(head_size=128, dtype="bfloat16", block_size=16, features=frozenset({Feature.SOFT_CAP}))
    assert "soft_cap not supported" in "; ".join(RocmAiterUnifiedAttentionBackend.why_not(capped, MI300))
    sinks = Request(head_size=128, dtype="bfloat16", block_size=64, features=frozenset({Feature.SINKS}))
    told = "; ".join(AiterFlashAttentionBackend.why_not(sinks, MI300))
    assert "sinks not supported" in told and "block_size=64 (supports 16, 32)" in told
