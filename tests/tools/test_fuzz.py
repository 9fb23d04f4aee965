"""The fuzzer: it draws what is declared, passes a correct kernel, finds planted bugs, and survives crashes."""

import dataclasses
import json
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn.capabilities import Device
from attn.cli import main as attn_main
from attn.testing import Case, candidate_of, draw, subject_here
from attn.testing.dense import DenseCase
from attn.testing.processes import Lost, Worker
from attn.testing.properties import run_check
from attn.tools.conform import main
from attn.tools.fuzz import entries as fuzz_entries
from attn.tools.fuzz.campaign import CaseOutcome, FuzzReport, campaign, examined, examined_by, examined_dense, run_fuzz
from attn.tools.fuzz.cases import program
from attn.tools.fuzz.dense import DenseSubject, check
from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl
from attn.torch.dot_product import scaled_dot_product_attention
from tests.testing.fates import fate
from tests.testing.mutants import MUTANTS, SUBJECT
from tests.testing.simulated import SimulatedKernel

FAR = time.monotonic() + 1e6  #: tests count programs, never seconds


class ScaleMadePositive(SimulatedKernel):
    """The sign of the softmax scale is dropped."""

    def scale(self) -> float:
        return abs(self.call.scale)


class BoundTakenForLength(SimulatedKernel):
    """Every request is as long as max_seq_len says, as far as its row of the table goes."""

    def length(self, r: int) -> int:
        return min(self.call.batch.max_seq_len, self.call.batch.block_table.shape[1] * self.case.block_size)


class HeadsOfOneSizeOnly(SimulatedKernel):
    """An error of the framework is raised unchanged."""

    def capped(self, s: Any) -> Any:
        return s.reshape(-1, 4, 7) if self.case.logits_soft_cap else s


PLANTED: dict[str, type[SimulatedKernel]] = {
    **{
        name: MUTANTS[name] for name in ("WindowLeftOneMore", "LseBaseTwo", "ScaleOfWrongHead", "TreeIgnored", "SinkInEmptyRow")
    },
    **{kernel.__name__: kernel for kernel in (ScaleMadePositive, BoundTakenForLength, HeadsOfOneSizeOnly)},
}


def fuzzed(kernel: SimulatedKernel, programs: int) -> FuzzReport:
    """Fuzz a kernel in this process until the first find, without the checks that need a layer."""

    def examine(case: Case, limit: float) -> CaseOutcome:
        return CaseOutcome() if case.check.startswith("wrong") else examined(case, lambda case: run_check(case, kernel))

    return campaign(SUBJECT, [examine], 3, FAR, FuzzReport("SIMULATED", 3), most=programs, max_finds=1)


def test_a_correct_kernel_has_no_find() -> None:
    report = fuzzed(SimulatedKernel(), 25)
    assert report.ok and report.programs == 25 and report.cases > 60, str(report)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found_and_made_small(name: str) -> None:
    report = fuzzed(PLANTED[name](), 200)
    assert report.finds, f"{report.cases} cases do not notice {name}"
    found = report.finds[0]
    case = Case.from_json(found.repro.partition("--repro ")[2].strip("'"))
    assert len(case.query_lens) <= 2 and case.num_kv_heads <= 3
    assert f"{found.kind} (seen {found.times} times)" in str(report)
    assert {"WindowLeftOneMore": "sliding_window", "ScaleMadePositive": "scale"}.get(name, "") in ("", *found.needs)


def test_a_program_follows_from_its_numbers_and_asks_for_what_is_declared() -> None:
    drawn = [case for number in range(60) for case in program(SUBJECT, 7, number, 3)]
    assert drawn == [case for number in range(60) for case in program(SUBJECT, 7, number, 3)]
    assert [c.replace(name="") for c in program(SUBJECT, 8, 0, 3)] != [c.replace(name="") for c in program(SUBJECT, 7, 0, 3)]
    assert all(SUBJECT.serves(case) and Case.from_json(case.json()) == case for case in drawn)
    for name in ("through", "arrays", "layout", "new", "inputs", "attn_type", "kv_cache_dtype", "tree", "sinks", "check"):
        assert len({getattr(case, name) for case in drawn}) > 1, name
    assert {True, False} == {(case.scale or 1) < 0 for case in drawn} == {case.loose > 0 for case in drawn}
    lens = [pair for case in drawn for pair in zip(case.query_lens, case.seq_lens, strict=True)]
    assert any(not case.query_lens for case in drawn) and any(q > m for q, m in lens) and any(q == 0 < m for q, m in lens)


def test_programs_of_a_compiler_have_one_shape() -> None:
    for number in range(20):
        cases = [c for c in program(SUBJECT, 1, number, 9, one_shape=True) if c.check in ("oracle", "rerun", "poison")]
        calls = [draw(case) for case in cases]
        requests = {1 << (len(c.case.query_lens) - 1).bit_length() for c in calls}
        assert len({(c.query.shape, c.batch.block_table.shape[1]) for c in calls}) <= 1 >= len(requests)
        assert len({c.key_cache.shape for c in calls if c.key_cache is not None}) <= 1
        draw.cache_clear()


def test_a_case_that_kills_its_process_or_never_ends_is_a_find() -> None:
    case, worker = Case("x", (1,), (1,)), Worker(fate)
    try:
        with pytest.raises(Lost, match=r"died \(exit code 11\)"):
            worker(("", case.replace(num_heads=1, num_kv_heads=1).json()), 60.0)
        with pytest.raises(Lost, match="not done within 1 s"):
            worker(("", case.json()), 1.0)
        assert worker(("", case.replace(num_heads=3, num_kv_heads=3).json()), 60.0) == CaseOutcome()
    finally:
        worker.close()


def test_an_error_of_the_fuzzer_is_an_error_of_the_run() -> None:
    def examine(case: Case, limit: float) -> CaseOutcome:
        raise ZeroDivisionError("not of the backend")

    report = campaign(SUBJECT, [examine, examine], 0, FAR, FuzzReport("SIMULATED"), 4)
    assert not report.ok and len(report.errors) == 2 and "ZeroDivisionError: not of the backend" in report.errors[0]


def test_an_errors_place_is_in_this_package(tmp_path: Path) -> None:
    """A checkout is named attn too, and may contain the environment with the framework."""
    file = tmp_path / "attn" / ".venv" / "torch.py"
    file.parent.mkdir(parents=True)
    file.write_text("def act(case):\n    raise OverflowError('no')\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert examined_by(names["act"], Case("x", (1,), (1,))).failure == "OverflowError in tools/fuzz/campaign.py examined_by"


@pytest.mark.full
def test_a_process_that_was_ended_from_outside_is_an_error_of_the_run() -> None:
    """A process ended by a signal from outside is no failure of the case; one ended by a crash's signal is."""
    workers = [Worker(fate), Worker(fate)]
    crashing, ended = (Case("x", (1,), (1,), num_heads=heads, num_kv_heads=heads) for heads in (5, 7))
    try:
        with pytest.raises(Lost, match="exit code -11"):
            workers[0](("", crashing.json()), 60.0)

        def examine(case: Case, limit: float) -> CaseOutcome:
            return workers[1](("", ended.json()), limit)  # type: ignore[no-any-return]

        report = campaign(SUBJECT, [examine], 3, FAR, FuzzReport("SIMULATED", 3), most=1)
    finally:
        for worker in workers:
            worker.close()
    assert not report.finds and not report.ok and len(report.errors) >= 1 and report.programs == 1
    assert "error of the run: its process was ended from outside by SIGKILL, while running python -m" in str(report)


class Dense(SDPABackend):
    get_name = staticmethod(lambda: "DENSE")


class KeysThatAreNotThere(SDPAImpl):
    """A padded entry attends to one key too many."""

    backend = Dense

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        if attn_metadata is not None and attn_metadata.kv_lens is not None:
            lens = [min(n + 1, key.shape[1]) for n in attn_metadata.kv_lens]
            attn_metadata = dataclasses.replace(attn_metadata, kv_lens=lens)
        return super().forward(query, key, value, attn_metadata)


class NoRearStream(SDPAImpl):
    """The second stream always comes first."""

    backend = Dense

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        if attn_metadata is not None:
            attn_metadata = dataclasses.replace(attn_metadata, joint_strategy="front")
        return super().forward(query, key, value, attn_metadata)


@pytest.mark.parametrize("kernel", [SDPAImpl, KeysThatAreNotThere, NoRearStream])
def test_dense_backends_are_fuzzed_too(kernel: type[SDPAImpl], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dense, "get_impl_cls", staticmethod(lambda: kernel))
    subject = DenseSubject("DENSE", Dense, Device("torch", "cpu"))

    def examine(case: DenseCase, limit: float) -> CaseOutcome:
        return examined_dense(Dense, case)

    most = 30 if kernel is SDPAImpl else 200
    report = campaign(subject, [examine], 3, FAR, FuzzReport("DENSE", 3), most=most, max_finds=1)
    if kernel is SDPAImpl:
        assert report.ok and report.programs == 30 and report.cases > 60, str(report)
        return
    (found,) = report.finds
    assert {KeysThatAreNotThere: "lens", NoRearStream: "rear"}[kernel] in found.needs
    again = DenseCase.from_json(found.repro.partition("--repro ")[2].strip("'"))
    assert "DENSE --registry diffusion --repro" in found.repro and again.batch == again.num_heads == 1
    with pytest.raises(AssertionError, match=found.kind):
        check(Dense, again)
    command = shlex.split(again.repro("TORCH_SDPA"))[3:]
    assert main(command) == 0, "the backend without the bug"


def test_a_case_that_hangs_at_the_end_is_a_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the campaign's time runs out within it; the first case may only be slow, as its process starts."""
    subject = fuzz_entries.subject_of("SCHEDULER")
    clock, limits = [0.0], list[float]()
    monkeypatch.setattr("attn.tools.fuzz.campaign.time.monotonic", lambda: clock[0])

    def hangs(case: Any, limit: float) -> CaseOutcome:
        limits.append(limit)
        if len(limits) > quick:
            clock[0] += limit
            raise Lost(f"not done within {limit:g} s")
        return CaseOutcome()

    for quick in (2, 0):
        clock[0] = 0.0
        limits.clear()
        report = campaign(subject, [hangs], 1, 9.0, FuzzReport("SCHEDULER", 1))
        assert report.cases == (quick + 1 if quick else 0) and limits[-1] == (150 if quick else 9)
        assert [(find.kind, find.text) for find in report.finds] == [("lost", "not done within 150 s")] * bool(quick)


class Here:
    """In the place of a process: it runs its function in this one."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, task: Any, limit: float) -> Any:
        return self._function(task)

    def close(self) -> None: ...


def test_the_command_runs_a_campaign(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = run_fuzz(["CPU_ATTN"], 600, 1, most=1)
    assert report.cases >= 2 and report.programs == 1
    assert main(["TRITON_ATTN", "--fuzz", "5", "--json"]) == 1 or subject_here(candidate_of("TRITON_ATTN"))[0]
    assert json.loads(capsys.readouterr().out)["backends"][0]["backend"] == "TRITON_ATTN"
    monkeypatch.setattr("attn.tools.fuzz.campaign.Worker", Here)
    (report,) = run_fuzz(["TORCH_SDPA"], 600, 1, most=1, registry="diffusion")
    assert report.cases == 3 and report.ok
    for wrong in (["--fuzz", "0"], ["--fuzz", "5", "--jobs", "0"], ["--fuzz", "5", "--registry", "mla_prefill"]):
        with pytest.raises(ValueError, match=r"must be|draws cases for"):
            main(["CPU_ATTN", *wrong])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_campaign_tells_what_it_found(
    number: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C and `timeout` interrupt it, whose limit includes the seconds in which frameworks are imported."""
    seen = list[str]()

    def fails_once(task: tuple[str, str, str]) -> CaseOutcome:
        seen.append(task[2])
        if len(seen) == 2:
            # a signal, as a terminal sends it: `_thread.interrupt_main` does not wake a main thread that waits for this one
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            time.sleep(1)  # the interrupt comes within this case, of which nothing is known
        return CaseOutcome("rule Z", "of the test")

    monkeypatch.setattr("attn.tools.fuzz.campaign.examine_here", fails_once)
    monkeypatch.setattr("attn.tools.fuzz.campaign.Worker", Here)
    monkeypatch.setattr("attn.tools.fuzz.campaign._SHRINKING", 0)
    before = signal.getsignal(signal.SIGTERM)
    # processes that a shell starts in the background ignore this signal
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert attn_main(["conform", "CPU_ATTN", "--fuzz", "1000"]) == code
    finally:
        signal.signal(signal.SIGINT, ignored)
    told = capsys.readouterr()
    assert "attn: interrupted: the report is of what ran until then" in told.err
    assert "1 FINDS (seen 1 times)" in told.out and "rule Z (seen 1 times): of the test" in told.out
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", fuzz_entries.names())
def test_entries_are_fuzzed_too(name: str) -> None:
    subject = fuzz_entries.subject_of(name)
    drawn = fuzz_entries.program(subject, 1, 0, 30)
    assert drawn == fuzz_entries.program(subject, 1, 0, 30) != fuzz_entries.program(subject, 2, 0, 30)
    assert all(subject.case.from_json(case.json()) == case for case in drawn)
    if name == "JAX_ENTRY":
        return  # called by tests/jax/test_dot_product.py
    report = campaign(subject, [lambda case, limit: examined_by(subject.check, case)], 1, FAR, FuzzReport(name, 1), most=3)
    assert report.ok and report.cases == 9, str(report)


def test_a_find_in_an_entry_is_made_small_and_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(query: Any, key: Any, value: Any, is_causal: bool = False, **options: Any) -> Any:
        if not is_causal:
            return scaled_dot_product_attention(query, key, value, **options)
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("attn.tools.fuzz.on_torch.scaled_dot_product_attention", entry)
    subject = fuzz_entries.subject_of("TORCH_ENTRY")

    def examine(case: Any, limit: float) -> CaseOutcome:
        return examined_by(subject.check, case)

    report = campaign(subject, [examine], 1, FAR, FuzzReport("TORCH_ENTRY", 1), most=200, max_finds=1)
    (found,) = report.finds
    assert found.kind.startswith("IndexError in") and found.needs == {"causal": True}
    assert "TORCH_ENTRY --registry entries --repro" in found.repro and len(found.repro) < 200
    command = shlex.split(found.repro)[3:]
    assert main(command) == 1 and "tuple index out of range" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(command) == 0 and capsys.readouterr().out == "no violation\n"


def test_the_command_fuzzes_entries(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn.tools.fuzz.campaign.Worker", Here)
    (report,) = run_fuzz(["SCHEDULER"], 600, 1, most=1, registry="entries")
    assert report.cases == 3 and report.ok
    assert main(["SCHEDULER", "--registry", "entries", "--fuzz", "1e-9"]) == 1
    for words, message in (("NOBODY --fuzz 5", "unknown entry 'NOBODY'; known: TORCH_ENTRY"), ("SCHEDULER", "has no suite")):
        with pytest.raises(ValueError, match=message):
            main([*words.split(), "--registry", "entries"])
