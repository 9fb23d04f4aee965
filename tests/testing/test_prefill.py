"""The prefill family's suite: right backends pass, planted bugs do not, and every registry's result can be recorded (10 s)."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from attn.capabilities import MultipleOf
from attn.reports import evidence
from attn.testing.dense import DenseCase, check_dense, dense_cases, run_dense
from attn.testing.prefill import PrefillCase, check_prefill, draw_prefill, prefill_cases, run_prefill
from attn.tools.conform import main
from attn.torch.backends.mla.prefill.sdpa import TorchSDPAPrefillBackend
from attn.torch.diffusion.backends.sdpa import SDPABackend

CASES = {case.name: case for case in prefill_cases(TorchSDPAPrefillBackend)}
#: What the suite starts from, smaller.
SMALL = PrefillCase("small", (5, 1, 7), ((9, 0, 4), (0, 0, 6)), sizes=(40, 24), num_heads=2)


@pytest.mark.parametrize("name", CASES)
def test_the_portable_backend(name: str) -> None:
    check_prefill(TorchSDPAPrefillBackend, CASES[name])


def test_the_jax_backend() -> None:
    check_prefill(MLAPrefillBackendEnum["XLA"].get_class(), SMALL)


def test_a_backend_of_other_sizes_has_cases_of_its_own_size() -> None:
    class Narrow(TorchSDPAPrefillBackend):
        capabilities = dataclasses.replace(TorchSDPAPrefillBackend.capabilities, head_sizes=(64,))
        v_head_dims = (48,)

    assert {case.sizes for case in prefill_cases(Narrow)} == {(64, 48)} and len(prefill_cases(Narrow)) > 8
    check_prefill(Narrow, dataclasses.replace(SMALL, sizes=(64, 48)))

    class Eighty(SDPABackend):
        capabilities = dataclasses.replace(SDPABackend.capabilities, head_sizes=(MultipleOf(80, 160),))

    cases = dense_cases(Eighty)
    assert {case.head_size for case in cases} == {160} and len(cases) > 20


def test_a_dense_call_without_rows_has_nothing_to_judge() -> None:
    for changes in ({"rows": 0}, {"batch": 0}, {"rows": 0, "mask": True}, {"keys": 0}):
        check_dense(SDPABackend, DenseCase("empty", dtype="float32", **changes))  # type: ignore[arg-type]


class _Planted(TorchSDPAPrefillBackend):
    """A right backend whose states a subclass changes."""

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, meta: Any, return_lse: bool) -> Any:
        out, lse = super().run_prefill_new_tokens(q, k, v, meta, True)
        state = self.changed(out, lse)
        return state if return_lse else state[0]

    def run_prefill_context_chunk(self, chunk_idx: int, q: Any, k: Any, v: Any, meta: Any) -> Any:
        return self.changed(*super().run_prefill_context_chunk(chunk_idx, q, k, v, meta))

    def changed(self, out: Any, lse: Any) -> Any:
        return out, lse


class _BaseTwo(_Planted):
    def changed(self, out: Any, lse: Any) -> Any:
        return out, lse / np.log(2)


class _FiniteWhenEmpty(_Planted):
    def changed(self, out: Any, lse: Any) -> Any:
        return out, torch.where(lse.isinf(), 0.0, lse)


class _ScaleOfTheAbsorbedHead(_Planted):
    def __init__(self, num_heads: int, qk_head_dim: int, v_head_dim: int, scale: float) -> None:
        super().__init__(num_heads, qk_head_dim, v_head_dim, (qk_head_dim + 1) ** -0.5)


class _StridesFromShapes(_Planted):
    """Takes a view for dense memory, as tokenspeed-mla does."""

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, meta: Any, return_lse: bool) -> Any:
        dense = torch.as_strided(v, v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1))
        return super().run_prefill_new_tokens(q, k, dense, meta, return_lse)


class _ChunkOfTheFirst(_Planted):
    def run_prefill_context_chunk(self, chunk_idx: int, q: Any, k: Any, v: Any, meta: Any) -> Any:
        return super().run_prefill_context_chunk(0 if len(k) == meta.chunks[0].num_keys else chunk_idx, q, -k, v, meta)


@pytest.mark.parametrize("planted", [_BaseTwo, _FiniteWhenEmpty, _ScaleOfTheAbsorbedHead, _StridesFromShapes, _ChunkOfTheFirst])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_planted_bug_is_seen(planted: Any, dtype: str) -> None:
    case = PrefillCase("small", SMALL.query_lens, SMALL.chunks, sizes=SMALL.sizes, num_heads=2, dtype=dtype)
    check_prefill(_Planted, case)
    with pytest.raises(AssertionError, match="rule"):
        check_prefill(planted, case)


def test_a_run_is_a_report_and_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[evidence.Evidence] = []
    monkeypatch.setattr(evidence, "record", kept.extend)
    monkeypatch.setattr("attn.testing.prefill.prefill_cases", lambda backend: [SMALL])
    register_mla_prefill_backend("BASE_TWO", _BaseTwo)
    good, bad, absent = run_prefill(["TORCH_SDPA", "BASE_TWO", "FLASHINFER"], record=True).backends
    assert good.ok and good.cases == 1 and not bad.ok and "rule D" in str(bad)
    assert "flashinfer is not installed" in absent.skipped
    assert [(row.registry, row.backend, row.failures) for row in kept] == [
        ("mla_prefill", "TORCH_SDPA", 0),
        ("mla_prefill", "BASE_TWO", 1),
    ]
    with pytest.raises(ValueError, match="needs the whole suite"):
        run_prefill(["TORCH_SDPA"], record=True, only="small")


def test_cases_are_shared_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same report, a case that fails included, and the suite's other families alike."""
    monkeypatch.setattr("attn.testing.prefill.prefill_cases", lambda backend: [SMALL, CASES["no context"]])
    register_mla_prefill_backend("BASE_TWO", _BaseTwo)
    (alone,) = run_prefill(["BASE_TWO"]).backends
    (shared,) = run_prefill(["BASE_TWO"], jobs=2).backends
    assert shared.cases == 2 and shared.failures == alone.failures and len(alone.failures) == 2
    (dense,) = run_dense(["TORCH_SDPA"], only="one row", jobs=2).backends
    assert dense.ok
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        run_prefill(["TORCH_SDPA"], jobs=0)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--registry", "mla_prefill", "TORCH_SDPA", "--only", "no context"]) == 0
    assert "TORCH_SDPA ran on" in capsys.readouterr().out
    assert main(["--registry", "mla_prefill", "TRTLLM_RAGGED"]) == 1
    assert "not tested: TRTLLM_RAGGED: " in capsys.readouterr().err


def test_a_case_is_always_the_same() -> None:
    one, other = draw_prefill(SMALL), draw_prefill(SMALL)
    assert np.array_equal(one.query, other.query) and len(one.parts) == 1 + len(SMALL.chunks)
