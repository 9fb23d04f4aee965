"""Running the suite on custom backends: correct, wrong in one place, and without some rejections (about 15 s)."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from attn import reference
from attn.backends.abstract import AttentionBackend
from attn.backends.paged import PagedCall
from attn.backends.registry import registered_backend
from attn.capabilities import Capabilities, Feature
from attn.errors import UnsupportedError
from attn.reports import evidence
from attn.testing import Case, check_conformance, conformance_cases, draw, run_case, run_conformance
from attn.testing.shrink import minimised
from attn.tools.conform import main
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl

RECORD = Capabilities(
    framework="torch",
    platforms=("cpu",),
    dtypes=("float32", "bfloat16"),
    features=frozenset({Feature.SLIDING_WINDOW, Feature.SINKS}),
)


class MineBackend(PagedAttentionBackend):
    """A third party's backend: the oracle on torch tensors, with its own cache layout."""

    name = "MINE"
    capabilities = RECORD

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)

    @staticmethod
    def logical_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_cache.transpose(2, 3).unbind(1)
        return keys, values


class MineImpl(PagedAttentionImpl, backend=MineBackend):
    can_return_lse_for_decode = True
    scale_error = 1.0

    def _attend(self, call: PagedCall) -> None:
        meta = call.meta
        keys, values = (x.float().numpy() for x in self.backend.logical_kv_cache(call.kv_cache))
        out, logs = reference.paged_attention(
            call.query.float().numpy(),
            keys,
            values,
            query_start_loc=meta.query_start_loc.numpy(),
            seq_lens=meta.seq_lens.numpy(),
            block_table=meta.block_table.numpy(),
            scale=self.scale * self.scale_error,
            window=call.window,
            sinks=None if self.sinks is None else self.sinks.numpy(),
        )
        live = slice(0, meta.num_actual_tokens)
        call.output[live] = torch.from_numpy(out[live]).to(call.output.dtype)
        if call.lse is not None:
            call.lse[:, live] = torch.from_numpy(logs[:, live]).float()


CASES = conformance_cases(MineBackend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_third_party_backend_conforms(case: Case) -> None:
    check_conformance(MineBackend, case)


class WrongScaleBackend(MineBackend):
    name = "WRONG"


class WrongScaleImpl(MineImpl, backend=WrongScaleBackend):
    scale_error = 1.01


def test_a_wrong_backend_fails_with_the_line_that_repeats_it() -> None:
    with pytest.raises(AssertionError, match=r"rule [BD] \[mixed batch\](.|\n)*attn\.testing WRONG --repro"):
        check_conformance(WrongScaleBackend, CASES[0])


def test_the_report_lists_failures_and_the_smallest_of_them() -> None:
    with registered_backend("WRONG", WrongScaleBackend):
        report = run_conformance(["WRONG"], only="needle")
        (wrong,) = report.backends
        smallest = Case.from_json(re.search(r"--repro '(.*)'", wrong.smallest).group(1))
        assert run_case(WrongScaleBackend, smallest)
    assert not report.ok and not wrong.ok and len(wrong.failures) >= 3
    assert sum(smallest.query_lens) <= 2 and sum(smallest.seq_lens) <= 4 and smallest.num_heads == 1
    text = str(report)
    assert f"{len(wrong.failures)} FAILED" in text and "smallest failing case" in text
    assert json.loads(report.json())["backends"][0]["failures"][0]["repro"] == wrong.failures[0].repro


def test_the_report_states_that_no_nan_was_masked() -> None:
    with registered_backend("MINE", MineBackend):
        (tame,) = run_conformance(["MINE"], only="mixed batch").backends
    (wild,) = run_conformance(["CPU_ATTN"], only="mixed batch, needle").backends
    assert tame.tame and "nan_safe is not declared" in str(tame)
    assert wild.ok and not wild.tame and "nan_safe" not in str(wild)


class RaisingImpl(MineImpl):
    def _attend(self, call: PagedCall) -> None:
        raise RuntimeError("no kernel image is available")


def test_what_a_backend_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrongScaleBackend, "impl_cls", RaisingImpl)
    with registered_backend("WRONG", WrongScaleBackend):
        (report,) = run_conformance(["WRONG"], only="mixed batch", minimise=False).backends
    assert len(report.failures) == 2 and "RuntimeError: no kernel image" in str(report)
    with pytest.raises(RuntimeError, match="no kernel image"):
        check_conformance(WrongScaleBackend, CASES[0])


class SloppyBackend(MineBackend):
    """Rejects at selection what its constructor accepts."""


class SloppyImpl(MineImpl, backend=SloppyBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "logits_soft_cap": None, "alibi_slopes": None})

    def _check_call(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("what", "who"), [("soft_cap", "the constructor"), ("alibi", "the constructor"), ("tree_mask", "the call")]
)
def test_a_backend_that_drops_what_it_does_not_declare_is_found_out(what: str, who: str) -> None:
    (case,) = (c for c in conformance_cases(SloppyBackend) if c.check == f"refusal={what}")
    (violation,) = run_case(SloppyBackend, case)
    assert violation.rule == "R" and f"{who} accepts {what}" in str(violation)
    assert run_case(MineBackend, case) == []


def test_a_class_without_capabilities_takes_them_from_its_author() -> None:
    class Bare(MineBackend):
        capabilities = None

    with pytest.raises(UnsupportedError, match="MINE declares no capabilities"):
        conformance_cases(Bare)
    cases = conformance_cases(Bare, capabilities=RECORD)
    assert [c for c in cases if not c.check.startswith("refusal")] == [c for c in CASES if not c.check.startswith("refusal")]
    assert run_case(Bare, cases[0]) == []


def test_what_cannot_run_here_is_skipped_with_its_verdict() -> None:
    with registered_backend("ELSEWHERE", MineBackend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MineBackend, "capabilities", Capabilities("torch", ("rocm",), ("float32",), packages=("no_such_package",))
        )
        report = run_conformance(["ELSEWHERE", "CUSTOM"])
        assert report.ok and "no_such_package is not installed" in str(report.backends[0])
        patch.setattr(MineBackend, "capabilities", Capabilities("torch", ("rocm",), ("float32",)))
        assert "platform=" in str(run_conformance(["ELSEWHERE"])) and "supports rocm" in str(run_conformance(["ELSEWHERE"]))
        assert run_conformance(["ELSEWHERE"], kind="interpreted", only="mixed batch").backends[0].cases == 2
    assert report.backends[1].skipped


def test_an_interpreted_run_never_passes_as_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MineBackend, "interpreted_on", ("cpu",))
    with registered_backend("MINE", MineBackend):
        assert run_conformance(["MINE"], only="mixed batch").backends[0].kind == "interpreted"
        with pytest.raises(ValueError, match="MINE is interpreted on this machine"):
            run_conformance(["MINE"], kind="ran", only="mixed batch")
        everything = {report.backend: report for report in run_conformance(only="no such case").backends}
        assert "request it by name" in everything["MINE"].skipped


def test_a_run_is_recorded_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record contains the versions of required packages, by the names of distributions: the module PIL is in pillow."""
    kept: list[evidence.Evidence] = []
    monkeypatch.setattr(evidence, "record", kept.extend)
    monkeypatch.setattr(MineBackend, "capabilities", dataclasses.replace(RECORD, packages=("PIL",)))
    with registered_backend("MINE", MineBackend):
        run_conformance(["MINE"], "smoke", record=True, kind="stand-in", dtypes=("float32",))
        (row,) = kept
        assert (row.backend, row.kind, row.failures, row.platform) == ("MINE", "stand-in", 0, "cpu")
        assert (
            row.device.endswith("CPU") and row.level == "smoke, float32" and {"torch", "numpy", "pillow"} == row.versions.keys()
        )
        with pytest.raises(ValueError, match="whole suite"):
            run_conformance(["MINE"], record=True, only="tree")
        with pytest.raises(ValueError, match="kind='compiled'"):
            run_conformance(["MINE"], kind="compiled")
    with pytest.raises(ValueError, match="NOBODY"):
        run_conformance(["NOBODY"])


def test_the_command_runs_a_case_again(capsys: pytest.CaptureFixture[str]) -> None:
    with registered_backend("WRONG", WrongScaleBackend), registered_backend("MINE", MineBackend):
        assert main(["MINE", "--repro", CASES[0].json()]) == 0
        assert capsys.readouterr().out == "no violation\n"
        assert main(["WRONG", "--repro", CASES[0].json()]) == 1
        assert "--repro" in capsys.readouterr().out
        assert main(["MINE", "--only", "mixed batch", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]
    with pytest.raises(ValueError, match="needs a backend"):
        main(["--repro", CASES[0].json()])


def test_minimising_keeps_what_fails() -> None:
    case = Case("big", (3, 5, 4), (9, 30, 40), num_heads=8, num_kv_heads=2, sinks="randn", alibi=True, sliding_window=3)
    smallest = minimised(case, lambda c: c.alibi and max(c.seq_lens, default=0) >= 30)
    assert smallest.alibi and not smallest.sinks and smallest.num_heads == 1
    assert smallest.seq_lens == (30,) and smallest.query_lens == (0,)


def test_minimising_keeps_enough_pages() -> None:
    case = Case("long pages", (1, 1), (250, 250), block_size=128, num_blocks=8)
    assert minimised(case, lambda c: bool(draw(c)) and sum(c.seq_lens) == 500).block_size == 16


class CrashingBackend(MineBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        os._exit(3)


def test_a_case_that_ends_its_process_is_not_minimised_in_this_one() -> None:
    code = (
        "from attn.backends.registry import registered_backend\n"
        "from attn.testing import conformance\n"
        "from tests.testing.test_conformance import CrashingBackend, MineBackend\n"
        "conformance.subject_here = lambda *_: (conformance.subject_of(MineBackend), '')\n"
        "if __name__ == '__main__':\n"
        "    with registered_backend('CRASHING', CrashingBackend):\n"
        "        print(conformance.run_conformance(['CRASHING'], jobs=2, only='mixed batch', minimise=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "2 FAILED" in done.stdout and "died (exit code 3)" in done.stdout, done.stdout + done.stderr


def test_what_is_wrong_is_noticed_without_assertions() -> None:
    """Under python -O, which removes the statement `assert`: some images of servers set PYTHONOPTIMIZE."""
    code = (
        "from attn.testing import run_conformance\n"
        "from attn.testing.dense import DenseCase, check_dense\n"
        "from attn.testing.prefill import PrefillCase, check_prefill\n"
        "from attn.tools.fuzz.campaign import run_fuzz\n"
        "from attn.torch.backends.mla.prefill.sdpa import TorchSDPAPrefillBackend\n"
        "from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl\n"
        "class HalfImpl(SDPAImpl):\n"
        "    def forward(self, *args): return super().forward(*args) / 2\n"
        "class Half(SDPABackend):\n"
        "    get_impl_cls = staticmethod(lambda: HalfImpl)\n"
        "class HalfPrefill(TorchSDPAPrefillBackend):\n"
        "    def run_prefill_new_tokens(self, *args):\n"
        "        out = super().run_prefill_new_tokens(*args)\n"
        "        return (out[0] / 2, out[1]) if isinstance(out, tuple) else out / 2\n"
        "for check, backend, case in ((check_dense, Half, DenseCase('x')), (check_prefill, HalfPrefill, PrefillCase('y'))):\n"
        "    try: check(backend, case)\n"
        "    except AssertionError as error: print('noticed', str(error)[:20])\n"
        "try: run_fuzz(['SCHEDULER'], 1.0, 0, registry='entries')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.count("noticed") == 2 and "python -O removes the checks" in done.stdout, done.stdout + done.stderr


def test_backends_are_classes_of_the_interface() -> None:
    assert issubclass(MineBackend, AttentionBackend)
    assert np.isfinite(CASES[0].num_heads)
