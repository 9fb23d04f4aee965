"""`attn bench` on the CPU, under torch and JAX, and its errors. A minute."""

import argparse
import json
import os
import re
from pathlib import Path

import pytest

from attn.cli import main
from attn.tools.bench import CPU_SUITE, MLA_CPU_SUITE, MLA_SUITE, SUITE, BenchCase

pytestmark = pytest.mark.usefixtures("jax_compiles_fast", "small_gemm")


def run(*words: str, code: int = 0) -> None:
    assert main(["bench", *words]) == code


TINY = ("--heads", "4/2", "--head-size", "32", "--dtype", "float32")
LATENT = ("--mla", "--heads", "2", "--dtype", "float32")


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    run("2q1s40_q20", "--backend", "TORCH_SDPA", *TINY, "--window", "7", "--sinks", "--json", str(file))
    assert "launch us" not in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {"device", "torch", "date", "copy_gb_per_s", "gemm_tflop_per_s"} <= report.keys()
    [row] = report["rows"]
    assert row["right"] and row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["error"] < 1e-5
    assert row["framework"] == "torch" and row["window"] == 7 and row["sinks"] and not row["replayed"]
    assert row["build_us"] > 0 and row["host_us"] >= 0 and row["kernel_ms"] > 0 and row["call_ms"] == row["ms"]


def test_columns_is_obeyed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    results = Path(__file__).parents[3] / "benchmarks/results"
    two = [str(results / f"every_peer_{name}.json") for name in ("h200_2026-11-22", "h100_2026-11-26")]
    for argv in (["--judge", two[0]], ["compare", *two]):
        main(["bench", *argv])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_a_backends_name_determines_its_framework() -> None:
    from attn.tools.bench.command import frameworks_of

    def named(*backends: str, framework: str | None = None) -> dict[str, list[str]]:
        return frameworks_of(argparse.Namespace(backend=list(backends), framework=framework))

    assert named("TORCH_SDPA", "XLA_ATTN", "PALLAS") == {"torch": ["TORCH_SDPA"], "jax": ["XLA_ATTN", "PALLAS"]}
    assert named("sdpa", framework="torch") == {"torch": ["sdpa"]}
    assert named(framework="all") == {"torch": [], "jax": []}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_latent_layer_is_timed(framework: str, tmp_path: Path) -> None:
    """Decode and speculative decode, by what the selector takes."""
    pytest.importorskip(framework)
    file = tmp_path / "rows.json"
    run("2q1s70_q3s20", "--framework", framework, *LATENT, "--json", str(file))
    [row] = json.loads(file.read_text())["rows"]
    assert row["backend"] == {"torch": "TORCH_MLA", "jax": "XLA_MLA"}[framework] and row["chosen"] and row["mla"]
    assert row["right"] and row["error"] < 1e-5 and row["build_us"] > 0
    assert (row["heads"], row["head_size"], row["block_size"]) == ("2", 576, 64)
    assert BenchCase.of(row) == BenchCase.latent("2q1s70_q3s20", heads="2", dtype="float32")


def test_both_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr("os.environ", os.environ.copy())
    file = tmp_path / "rows.json"
    run(
        "3q1s20",
        "--framework",
        "all",
        "--heads",
        "4/2",
        "--head-size",
        "64",
        "--dtype",
        "float32",
        "--peers",
        "sdpa,jax-nn,PALLAS",
        "--json",
        str(file),
    )
    report = json.loads(file.read_text())
    assert report["torch"]["torch"] and report["jax"]["jax"] and report["date"]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false", "they share a device"
    rows = {(row["framework"], row["backend"]): row for row in report["rows"]}
    assert list(rows) == [("torch", "CPU_ATTN"), ("torch", "sdpa"), ("jax", "XLA_ATTN"), ("jax", "PALLAS"), ("jax", "jax-nn")]
    assert "its kernels are interpreted on this machine" in rows["jax", "PALLAS"]["refused"]
    assert [verdict["case"].endswith(("(torch)", "(jax)")) for verdict in report["verdicts"]] == [True, True]
    assert all(row["right"] and row["replayed"] for row in (rows["jax", "XLA_ATTN"], rows["jax", "jax-nn"]))
    assert rows["jax", "XLA_ATTN"]["build_us"] > 0 and rows["jax", "XLA_ATTN"]["host_us"] > 0
    capsys.readouterr()
    run("compare", str(file), str(file))
    said = capsys.readouterr().out
    assert said.count("level") == 4 and "4 times in both: 0 worse, 0 faster, 5 in all" in said


def test_mistakes_are_reported_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run("q8s4", "--framework", "torch", code=2)
    run("q8", "--framework", "torch", "--backend", "XLA_ATTN", code=2)
    run("compare", "one.json", code=2)
    run("compare", "/nowhere/a.json", "/nowhere/b.json", code=2)
    run("q8", "--workloads", "x.jsonl", "--framework", "torch", code=2)
    run("q8", "--framework", "torch", "--backend", "FLASH_ATTN", code=1)
    run("q8", "--framework", "torch", "--backend", "BLOCKSPARSE", code=2)
    run("q8", "--framework", "torch", "--backend", "TORCH_SDPA", "--mla", "--dtype", "float32", code=1)
    run("q8", "--framework", "torch", "--heads", "8/2", "--mla", code=2)
    run("q8", "--framework", "torch", "--registry", "diffusion", "--mla", code=2)
    said = capsys.readouterr().err
    for words in (
        "8 new tokens and 4 in the cache",
        "XLA_ATTN is a backend of jax, not of torch",
        "takes two files",
        "/nowhere/a.json: No such file or directory",
        "not both",
        "platform=cpu (supports cuda)",
        "BLOCKSPARSE cannot be timed",
        "TORCH_SDPA  mla not supported",
        "heads='8/2' with mla",
        "--mla has no effect with --registry diffusion",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--registry diffusion 1x8x2x64 --heads 8/2", "--heads has no effect with --registry diffusion"),
        ("--registry diffusion 1x8x2x64 --peers all", "--peers has no effect with --registry diffusion"),
        ("--judge rows.json --json other.json", "--json has no effect with --judge"),
        ("64q1s4k --judge rows.json", "batches (64q1s4k) have no effect with --judge"),
        ("compare a.json b.json --plot c.svg", "--plot has no effect with compare"),
        ("64q1s4k --without sdpa", "--without has no effect without --peers"),
    ],
)
def test_arguments_without_an_effect_are_refused(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(*argv.split(), code=2)
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_a_table_of_its_own_for_a_cpu() -> None:
    from attn.tools.bench import command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--head-size", "96"])
    assert [case.head_size for case in command.cases_of(args, True)] == [96] * len(CPU_SUITE)
    assert {case.dtype for case in command.cases_of(args, True)} == {"float32"}
    assert {case.dtype for case in command.cases_of(args, False)} == {"bfloat16"}
    assert command.cases_of(parser.parse_args([]), False) == list(SUITE)
    assert command.cases_of(parser.parse_args(["--mla"]), False) == list(MLA_SUITE)
    assert command.cases_of(parser.parse_args(["--mla"]), True) == list(MLA_CPU_SUITE)
    assert command.cases_of(parser.parse_args(["q4", "--mla", "--block-size", "16"]), False) == [
        BenchCase.latent("q4", block_size=16)
    ]


def test_a_run_beside_the_peers_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    call = [
        "bench",
        "2q1s20",
        "q8_q4",
        "--framework",
        "torch",
        *TINY,
        "--peers",
        "all",
        "--without",
        "flex,FLEX_ATTENTION",
        "--json",
        str(file),
    ]
    assert main([*call, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    report = json.loads(file.read_text())
    rows = {(row["batch"], row["backend"]): row for row in report["rows"]}
    assert {name for _, name in rows} >= {"CPU_ATTN", "TORCH_SDPA", "IPEX", "sdpa"}
    assert not {name for _, name in rows} & {"flex", "FLEX_ATTENTION", "TORCH_MLA", "XLA_ATTN"}
    assert [name for (_, name), row in rows.items() if row["chosen"]] == ["CPU_ATTN"] * 2
    assert rows["2q1s20", "sdpa"]["peer"] and rows["2q1s20", "sdpa"]["error"] < 1e-5
    assert "equal lengths" in rows["q8_q4", "sdpa"]["refused"] and "ms" not in rows["q8_q4", "sdpa"]
    assert "IPEX" in said and "not timed:" in said and all(row["right"] for row in report["rows"])
    table = said[said.index(" backend") :].splitlines()
    assert max(map(len, table)) <= 100 and sum(line.startswith("-> CPU_ATTN") for line in table) == 2
    assert said.count("CPU_ATTN is the fastest") + said.count("CPU_ATTN LOSES") + said.count("CPU_ATTN is level") == 2
    assert [verdict["choice"] for verdict in report["verdicts"]] == ["CPU_ATTN"] * 2
    assert main(["bench", "--judge", str(file)]) in (0, 1)  # whether the choice lost here is the machine's affair
    assert re.search(r"CPU_ATTN +2 cases", capsys.readouterr().out)


def test_unknown_names_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["bench", "q4", "--framework", "torch", *TINY, "--peers", "sdpa,CUDNN"]) == 2
    assert "peer 'CUDNN' is unknown; known: all, " in capsys.readouterr().err
    assert main(["bench", "--judge", "/nowhere/rows.json"]) == 2
    assert "/nowhere/rows.json: No such file or directory" in capsys.readouterr().err
    (tmp_path / "rows.json").write_text("[]")
    assert main(["bench", "--judge", str(tmp_path / "rows.json")]) == 2
    assert "not a report written by --json" in capsys.readouterr().err


def test_random_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run, its judgement and a comparison with itself."""
    pytest.importorskip("torch")
    file = str(tmp_path / "rows.json")
    names = ("--peers", "TORCH_SDPA,sdpa", "--framework", "torch")
    run("--random", "3", "--seed", "1", "--heads", "2/1", "--head-size", "32", *names, "--json", file)
    printed = capsys.readouterr().out
    report = json.loads(Path(file).read_text())
    assert report["random"]["batches"] == 3 and report["random"]["seed"] == 1 and "prompts" in report["random"]["kinds"]
    assert report["random"]["bounds"]["cache_mib"] == 128 and "drawn again above 512 new tokens or 128 MiB" in printed
    kinds = {row["batch"]: row["kind"] for row in report["rows"]}
    assert list(kinds.values()) == ["speculation", "chunks", "decodes"] and all(row["right"] for row in report["rows"])
    assert "q5s136_q5s16_q5s528_q5s3773_q5s1306_q5s670_q5s29" in kinds, "whole in the file"
    assert "q5s136_q5s16_q5s528..+4 2/1x32" in printed and "q5s1306" not in printed
    assert main(["bench", "--judge", file]) in (0, 1)  # whether the choice lost is a matter of the machine
    judged = capsys.readouterr().out
    assert judged in printed[printed.index("   #") :] and "best other / ours in 3" in judged
    run("compare", file, file)
    assert "q5s136_q5s16_q5s528..+4 2/1x32" in capsys.readouterr().out


def test_random_batches_that_a_named_backend_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names = ("--backend", "FLASH_ATTN", "--backend", "TORCH_SDPA", "--framework", "torch")
    run("--random", "2", *names, "--heads", "2/1", "--head-size", "32")
    printed = capsys.readouterr().out
    assert printed.count("no time: ") == 2 and "2 batches (2 without a time)" in printed


def test_random_latent_batches(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    file = tmp_path / "rows.json"
    run("--random", "1", "--seed", "9", "--mla", "--heads", "2", "--framework", "jax", "--json", str(file))
    [row] = json.loads(file.read_text())["rows"]
    assert row["backend"] == "XLA_MLA" and row["mla"] and row["right"] and row["heads"] == "2"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("q8 --random 3", "pass --random 3 or batches (q8), not both"),
        ("--random 3 --workloads x.jsonl", "pass --random 3 or --workloads x.jsonl, not both"),
        ("--random 3 --judge x.json", "pass --random 3 or --judge x.json, not both"),
        ("--random 3 --registry diffusion", "pass --random 3 or --registry diffusion, not both"),
        ("compare a.json b.json --random 3", "pass --random 3 or batches (compare a.json b.json), not both"),
        ("--random 0", "--random 0 must be at least 1"),
        ("q8 --seed 0", "--seed 0 requires --random N"),
    ],
)
def test_mistakes_with_random(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(*argv.split(), code=2)
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1
