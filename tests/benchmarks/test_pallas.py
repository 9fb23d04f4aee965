"""benchmarks/results/pallas.json is complete and reaches the goals, and pallas.md is its table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

from benchmarks import pallas


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return dict(json.loads(pallas.RESULTS.read_text())["rows"])


def test_no_row_is_missing(rows: dict[str, Any]) -> None:
    missing = [key for job in pallas.wanted(True) if (key := pallas.key_of(*job)) not in rows]
    assert not missing, "measure them: python -m benchmarks.pallas --peers FOLDER"


def test_every_goal_is_met(rows: dict[str, Any]) -> None:
    for row in pallas.ROWS:
        for (chip, page), goal in row.goals.items():
            assert rows[pallas.key_of(row, chip, page, pallas.OURS)]["us"] <= goal, row.name


def test_the_table(rows: dict[str, Any]) -> None:
    assert pallas.TABLE.read_text() == pallas.table(rows) + "\n", "write it: python -m benchmarks.pallas --table"


MISTAKES = {
    "--only nonsense": "no row's key contains this; the first key is 'decode 64 x 4k | v6e | 128 | attn'",
    "--peers /nowhere": "contains no tpu_inference; unzip the file of",
    "--again --compilers /nowhere": "contains no libtpu; `make compilers` installs it",
    "--jobs 0": "--jobs 0: at least 1",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_measure_and_write_nothing(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(pallas, "RESULTS", tmp_path / "pallas.json")
    monkeypatch.setattr(pallas, "TABLE", tmp_path / "pallas.md")
    monkeypatch.setattr(sys, "argv", ["pallas", *given.split()])
    with pytest.raises(SystemExit) as ended:
        pallas.main()
    assert ended.value.code == 2
    assert MISTAKES[given] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_parts_stand_for_a_whole() -> None:
    (row,) = (row for row in pallas.ROWS if row.name == "prefill 2k at 8k")
    ((part, times),) = row.parts
    whole, apart = pallas.key_of(row, "v7x", 128, pallas.OURS), pallas.key_of(row._replace(name=part), "v7x", 128, pallas.OURS)
    failed = {whole: {"error": "did not end", "source": pallas.source(row.kind)}}
    part_of_old = {"us": 100.0, "copies": False, "spills": 0, "source": "before"}
    table = pallas.table({**failed, apart: part_of_old})
    assert f"| {times * 100} (a, c) |" in table
    assert "| 100 (a) (d) |" in table
    assert "| none: did not end |" in pallas.table(failed)
