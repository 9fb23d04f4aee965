"""attn bench: its grammar, what it counts, and one run on the CPU. Three seconds."""

import json
import re
from pathlib import Path

import pytest

from attn.bench import SUITE, Case, flops, nbytes, parse
from attn.cli import main


def test_the_grammar() -> None:
    assert parse("q2k") == [(2048, 2048)]
    assert parse("8q1s1k") == [(1, 1024)] * 8
    assert parse("2q2k_3q1s1k") == [(2048, 2048)] * 2 + [(1, 1024)] * 3
    assert parse("1q512s8k") == [(512, 8192)]
    assert all(parse(case.batch) for case in SUITE)


@pytest.mark.parametrize("batch", ["", "q", "s4", "q1s4m", "2q1__q1", "q-1", "0q1x", "q8s4", "q0"])
def test_what_has_no_reading_is_refused(batch: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"batch={batch!r}")):
        parse(batch)


def test_what_is_counted() -> None:
    decode = Case("2q1s100", "8/2", 64)
    assert flops(decode) == 4 * 8 * 64 * 2 * 100
    assert nbytes(decode) == 2 * 2 * 64 * 2 * 200 + 2 * 8 * 64 * 2 * 2
    assert nbytes(Case("2q1s100", "8/2", 64, kv_cache_dtype="int8")) == 2 * 2 * 64 * 200 + 2 * 8 * 64 * 2 * 2
    assert flops(Case("q3", "1/1", 32)) == 4 * 32 * (1 + 2 + 3)


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    call = ["bench", "2q1s40_q20", "--framework", "torch", "--backend", "CPU_ATTN", "--heads", "4/2", "--head-size", "32"]
    assert main([*call, "--dtype", "float32", "--json", str(file)]) == 0
    assert "error" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {"device", "torch", "date", "copy_gb_per_s", "gemm_tflop_per_s"} <= report.keys()
    [row] = report["rows"]
    assert row["right"] and row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["error"] < 1e-5


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "q8s4", "--framework", "torch"]) == 2
    assert main(["bench", "q8", "--framework", "jax"]) == 2
    said = capsys.readouterr().err
    assert "8 new of 4 tokens" in said and "framework='jax'" in said
