"""Evaluation of rows: verdicts, a ranking, and changes between two runs."""

import json
from collections.abc import Callable

import pytest

from attn.tools.bench import MARGIN, BenchRow, Refusal, compare, judge, ranking, verdicts

RowsOf = Callable[..., dict[str, BenchRow | Refusal]]


@pytest.mark.parametrize(
    ("times", "lost", "said"),
    [
        ({"CPU_ATTN": 1.0, "TORCH_SDPA": 1.2}, False, "CPU_ATTN is the fastest"),
        ({"CPU_ATTN": 1.04, "TORCH_SDPA": 1.0}, False, "CPU_ATTN is level with TORCH_SDPA, which is 1.04 x as fast"),
        ({"CPU_ATTN": 1.12, "TORCH_SDPA": 1.0}, True, "CPU_ATTN LOSES to TORCH_SDPA, which is 1.12 x as fast"),
        (
            {"CPU_ATTN": 1.0, "sdpa": 0.5},
            False,
            "CPU_ATTN is the fastest backend; sdpa, which cannot be selected, is 2.00 x as fast",
        ),
    ],
)
def test_verdicts(rows_of: RowsOf, times: dict[str, float], lost: bool, said: str) -> None:
    rows = [row.to_dict() for row in rows_of(**times).values()]
    [verdict] = verdicts(json.loads(json.dumps(rows)))
    assert verdict.lost is lost and said in str(verdict) and said in judge(rows)
    assert MARGIN == 0.05


def test_a_time_whose_spread_overlaps_loses_nothing_and_a_wrong_row_wins_nothing(rows_of: RowsOf) -> None:
    rows = [row.to_dict() for row in rows_of(CPU_ATTN=1.12, TORCH_SDPA=1.0).values()]
    rows[0]["ms_p20"] = 0.9
    [verdict] = verdicts(rows)
    assert not verdict.lost and "spreads overlap" in str(verdict)
    rows[1]["right"] = False
    assert "is the fastest" in str(verdicts(rows)[0])


def test_a_ranking_puts_backends_that_serve_more_first(rows_of: RowsOf) -> None:
    rows = [row.to_dict() for row in rows_of(CPU_ATTN=1.0, TORCH_SDPA=2.0).values()]
    more = {**rows[1], "batch": "q8"}
    assert [entry[:2] for entry in ranking([*rows, more])] == [("TORCH_SDPA", 2), ("CPU_ATTN", 1)]
    name, _, mean, worst, where = ranking([*rows, more])[0]
    assert (name, round(mean, 3), worst) == ("TORCH_SDPA", 1.414, 2.0) and where.startswith("q4")


def test_what_changed_between_two_runs(rows_of: RowsOf) -> None:
    before = [row.to_dict() for row in rows_of(CPU_ATTN=1.0, TORCH_SDPA=1.0).values() if isinstance(row, BenchRow)]
    slower = {**before[0], "ms": 1.2, "ms_p20": 1.19, "ms_p80": 1.21}
    noisy = {**before[1], "ms": 1.2, "ms_p20": 0.9, "ms_p80": 1.3}
    first, second = compare(before, [slower, noisy])
    assert first.worse and "SLOWER" in str(first) and "+20.0 %" in str(first)
    assert not second.worse and "level (spreads overlap)" in str(second)
    assert compare([slower], before)[0].better
    lost = compare(before, [{**before[0], "right": False}])
    assert lost[0].worse and "1.0000 ms in the first, wrong in the second" in str(lost[0])
    assert not lost[1].worse and "not run in the second" in str(lost[1])
    assert compare([], before)[0].note == "not run in the first, 1.0000 ms in the second"


def test_dense_shapes_are_compared_too(rows_of: RowsOf) -> None:
    row = {"shape": "1x8x2x64", "backend": "TORCH_SDPA", "right": True, "refused": "", "ms": 2.0, "ms_p20": 1.9, "ms_p80": 2.1}
    refused = {**row, "backend": "CUDNN_ATTN", "refused": "platform=cpu", "ms": 0.0}
    changes = compare([row, refused], [{**row, "ms": 1.0, "ms_p20": 0.9, "ms_p80": 1.1}, refused])
    assert changes[0].better and changes[0].case == "1x8x2x64" and not changes[1].worse
