"""The evidence table: what is recorded, what is replaced, and what never is (under a second)."""

import dataclasses
import json
from pathlib import Path

import pytest

from attn.reports import evidence
from attn.reports.evidence import Evidence

ROW = Evidence("XLA_ATTN", "attention", "jax", "cpu", "x86_64 CPU", "ran", "2026-11-20", 200, 0, "quick", {"jax": "0.10.2"})


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    assert evidence.load(path) == []
    evidence.record([ROW], path)
    assert evidence.load(path) == [ROW]
    evidence.record([], path)
    assert evidence.load(path) == [ROW]


def test_a_later_run_replaces_its_own_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    later = dataclasses.replace(ROW, date="2026-11-21", failures=3)
    elsewhere = dataclasses.replace(ROW, platform="tpu", device="TPU v6e")
    longer = dataclasses.replace(ROW, level="full")
    evidence.record([ROW, elsewhere, longer], path)
    evidence.record([later], path)
    assert sorted(evidence.load(path), key=str) == sorted([later, elsewhere, longer], key=str)


@pytest.mark.parametrize("kind", [k for k in evidence.KINDS if k != "ran"])
def test_one_kind_never_replaces_another(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    other = dataclasses.replace(ROW, kind=kind)
    evidence.record([ROW], path)
    evidence.record([other], path)
    assert set(evidence.load(path)) == {ROW, other}
    assert evidence.summary("attention", "XLA_ATTN", path).startswith("ran on x86_64 CPU")
    evidence.record([dataclasses.replace(other, date="2027-01-01")], path)
    assert ROW in evidence.load(path)


def test_the_summary_counts_failures(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    evidence.record([ROW, dataclasses.replace(ROW, backend="PALLAS", kind="interpreted", failures=2)], path)
    assert evidence.summary("attention", "XLA_ATTN", path) == "ran on x86_64 CPU (200 cases, 2026-11-20)"
    assert evidence.summary("attention", "PALLAS", path) == "interpreted on x86_64 CPU (2 of 200 cases FAILED, 2026-11-20)"
    assert evidence.summary("attention", "FLASH_ATTN", path) == evidence.summary("diffusion", "PALLAS", path) == "none"


def test_the_longest_run_in_a_place_speaks_and_every_failure(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    short = dataclasses.replace(ROW, level="smoke", cases=90)
    evidence.record([ROW, short], path)
    assert evidence.summary("attention", "XLA_ATTN", path) == "ran on x86_64 CPU (200 cases, 2026-11-20)"
    evidence.record([dataclasses.replace(short, failures=1)], path)
    said = evidence.summary("attention", "XLA_ATTN", path)
    assert "(200 cases" in said and "1 of 90 cases FAILED" in said


@pytest.mark.parametrize("wrong", [{"kind": "hoped"}, {"cases": 0}, {"failures": 201}, {"failures": -1}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(ROW, **wrong)


def test_an_unknown_field_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps([{**dataclasses.asdict(ROW), "mood": "good"}]))
    with pytest.raises(ValueError, match="mood"):
        evidence.load(path)


def test_the_committed_table_loads_and_is_in_order() -> None:
    rows = evidence.load()
    assert [row.key for row in rows] == sorted({row.key for row in rows})
    assert all("/" not in row.device for row in rows)
