"""`attn evidence`: one file from a device that the project lacks, whatever its backends do (about 25 s)."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attn import cli
from attn.reports import evidence
from attn.tools import collect
from attn.tools.collect import Collection, reported

ROW = {
    "backend": "PALLAS",
    "registry": "attention",
    "framework": "jax",
    "platform": "tpu",
    "device": "TPU v6e",
    "kind": "ran",
    "date": "2026-11-20",
    "cases": 200,
    "failures": 1,
    "level": "quick",
    "versions": {"jax": "0.12.0"},
}


def test_one_backend_is_checked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    timed: list[str] = []
    asked: dict[tuple[str, ...], dict[str, Any]] = {}
    child = Collection._child

    def once(self: Collection, seconds: float, function: Any, words: Sequence[str]) -> dict[str, Any]:
        if (key := tuple(words)) not in asked:  # both levels are one here
            asked[key] = child(self, seconds, function, words)
        return asked[key]

    monkeypatch.setattr(collect, "_LEVELS", ("smoke", "smoke"))
    monkeypatch.setattr(Collection, "_child", once)
    monkeypatch.setattr(Collection, "_bench", lambda self, framework, seconds, names: timed.append(framework))
    file = tmp_path / "evidence.json"
    assert cli.main(["evidence", "--out", str(file), "--seconds", "400", "--backend", "CPU_ATTN"]) == 0
    assert "CPU_ATTN (smoke): " in capsys.readouterr().out and timed == ["torch"]
    content = json.loads(file.read_text())
    [row] = [evidence.Evidence(**row) for row in content["evidence"]]
    assert (row.backend, row.kind, row.failures) == ("CPU_ATTN", "ran", 0) and row.cases > 40
    assert content["environment"]["versions"]["torch"] and content["failures"] == {}
    assert os.uname().nodename not in file.read_text() or len(os.uname().nodename) < 4
    [mine] = reported(file, " a reader ")
    assert str(mine).startswith(f"ran on {row.device}, reported by a reader (")
    assert mine.key != row.key, "it does not replace the project's row"


def test_a_slow_backend_leaves_time_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, now = Collection(tmp_path / "evidence.json", 400), [0.0]

    def slow(self: Collection, seconds: float, function: Any, words: Sequence[str]) -> dict[str, Any]:
        now[0] += seconds
        return {"error": f"not done within {seconds:.0f} s"}

    monkeypatch.setattr(collect.time, "monotonic", lambda: found.began + now[0])
    monkeypatch.setattr(Collection, "_child", slow)
    found._conformance([("attention", name, "jax") for name in "ABC"], "smoke")
    assert [*found.left_out.values()] == [f"not done within {n} s" for n in (200, 100, 50)]


def test_backends_of_one_name_have_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_SDPA, for example, is in three registries."""
    found, registries = Collection(tmp_path / "evidence.json", 400), ("attention", "mla_prefill", "diffusion")

    def failing(self: Collection, seconds: float, function: Any, words: Sequence[str]) -> dict[str, Any]:
        if words[0] == "mla_prefill":
            return {"error": "not done"}
        return {"row": {**ROW, "level": "quick"}, "failures": [f"repeats {words[0]}"]}

    monkeypatch.setattr(Collection, "_child", failing)
    found._conformance([(registry, "TORCH_SDPA", "torch") for registry in registries], "quick")
    assert sorted(found.failures.values()) == [["repeats attention"], ["repeats diffusion"]]
    assert [*found.left_out.values()] == ["not done"] and len(found.failures.keys() | found.left_out.keys()) == 3
    listed = collect._listed(("FLASHINFER",))["left_out"]
    assert len(listed) == 2 and set(listed) == {"FLASHINFER", "FLASHINFER (mla_prefill)"}


def test_each_framework_times_its_own_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = Collection(tmp_path / "evidence.json", 400), []
    backends = [["attention", "TORCH_SDPA", "torch"], ["attention", "XLA_ATTN", "jax"], ["diffusion", "FLUX", "torch"]]

    def child(self: Collection, seconds: float, function: Any, words: Sequence[str]) -> dict[str, Any]:
        if function is collect._listed:
            return {"environment": {}, "backends": backends, "left_out": {}}
        asked.append(tuple(words))
        return {"error": "not run"}

    monkeypatch.setattr(Collection, "_child", child)
    for names in (["TORCH_SDPA", "XLA_ATTN", "FLUX"], []):
        found.collect(names)
    timed = [(words[2], words[5:]) for words in asked if words[0] == "bench"]
    assert timed == [("torch", ("--backend", "TORCH_SDPA")), ("jax", ("--backend", "XLA_ATTN")), ("torch", ()), ("jax", ())]


def test_a_file_that_was_cut_short_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Collection(tmp_path / "evidence.json", 400)

    def ended(self: Collection, seconds: float, function: Any, words: Sequence[str]) -> dict[str, Any]:
        Path(words[words.index("--json") + 1]).write_text('{"rows": [{"ms": 1')
        return {"error": "not done within 5 s"}

    monkeypatch.setattr(Collection, "_child", ended)
    found._bench("torch", 5, ())
    assert found.bench == {} and found.left_out == {"times (torch)": "not done within 5 s"}


def hang(words: Sequence[str]) -> dict[str, Any]:
    os.fork()
    print("{}", flush=True)
    time.sleep(60)
    return {}


def crash(words: Sequence[str]) -> dict[str, Any]:
    print("GPU lost", file=sys.stderr, flush=True)
    os.abort()


def noise(words: Sequence[str]) -> dict[str, Any]:
    print("noise")
    return {"row": words[0]}


def test_processes_that_hang_or_crash_are_reasons(tmp_path: Path) -> None:
    found = Collection(tmp_path / "evidence.json", 100)
    began = time.monotonic()
    assert found._child(6, hang, ()) == {"error": "not done within 6 s"} and time.monotonic() - began < 30
    assert found._child(60, crash, ()) == {"error": "killed by SIGABRT: GPU lost"}
    assert found._child(60, noise, ("1",)) == {"row": "1"}
    assert found._child(60, collect._timed, ("bench", "--limit", "0")) == {
        "error": "exit code 2: attn: --limit=0.0 must be a finite number above 0"
    }
    assert found._child(1, noise, ()) == {"error": "no time left of 100 s (--seconds)"}
    found._write()
    assert json.loads((tmp_path / "evidence.json").read_text())["evidence"] == []


def test_reported_rows_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file, table = tmp_path / "sent.json", tmp_path / "table.json"
    file.write_text(json.dumps({"format": 1, "evidence": [ROW]}))
    keep = evidence.record
    monkeypatch.setattr(evidence, "record", lambda rows: keep(rows, table))
    keep([evidence.Evidence(**ROW)], table)
    assert cli.main(["evidence", "--add", str(file), "--reporter", "someone"]) == 0
    assert "1 rows added" in capsys.readouterr().out
    assert [row.reporter for row in evidence.load(table)] == ["", "someone"]
    text = evidence.summary("attention", "PALLAS", table)
    assert "ran on TPU v6e (1 of 200 cases FAILED" in text and "ran on TPU v6e, reported by someone (1 of 200" in text
    assert '"reporter": ""' not in table.read_text()


MISTAKES = [
    ([], "attn evidence needs --out FILE (run on this machine) or --add FILE --reporter NAME, not both"),
    (["--out", "a.json", "--add", "b.json"], "not both"),
    (["--out", "none/a.json"], "none/a.json: No such file or directory"),
    (["--out", "a.json", "--seconds", "0"], "--seconds=0.0 must be a finite number above 0"),
    (["--out", "a.json", "--reporter", "x"], "--reporter needs --add FILE"),
    (["--add", "sent.json"], "--add needs --reporter NAME: who ran it"),
    (["--add", "sent.json", "--reporter", "x"], "sent.json: not a file of attn evidence --out: format 7: must be 1"),
    (["--add", "rows.json", "--reporter", "x"], "rows.json: not a file of attn evidence --out: kind='believed' is unknown"),
    (["--out", "a.json", "--backend", "NOPE"], "backend 'NOPE' is unknown; known: "),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sent.json").write_text('{"format": 7}')
    Path("rows.json").write_text(json.dumps({"format": 1, "evidence": [{**ROW, "kind": "believed"}]}))
    assert cli.main(["evidence", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and said.startswith("attn: ")


@pytest.mark.parametrize(("missing", "framework"), [("torch", "jax"), ("jax", "torch")])
def test_a_framework_that_is_not_installed_is_a_reason(missing: str, framework: str) -> None:
    """As on a TPU, where torch is not needed: some classes of torch's backends are loaded without it."""
    pytest.importorskip(framework)
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from attn.tools.collect import _listed; found = _listed(());"
        f"assert {{words[2] for words in found['backends']}} == {{{framework!r}}}, found['backends'];"
        f"assert '{missing} is not installed' in str(found['left_out'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
