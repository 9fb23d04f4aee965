"""benchmarks/results/pallas.json is whole, meets the goals, and pallas.md is its table."""

import json
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
