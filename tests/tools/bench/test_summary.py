"""The summary of a report, from rows with given times."""

from typing import Any

import pytest

from attn.tables import header
from attn.tools.bench.roofline import chart
from attn.tools.bench.summary import COLUMNS, outcomes, summary


def row(batch: str, backend: str, ms: float, of_copy: float = 0.5, **changes: Any) -> dict[str, Any]:
    return {
        "batch": batch,
        "heads": "32/8",
        "head_size": 128,
        "backend": backend,
        "ms": ms,
        "ms_p20": ms,
        "ms_p80": ms,
        "of_copy": of_copy,
        "error": 2e-3,
        "right": True,
        **changes,
    }


ROWS = [
    row("64q1s4k", "OURS", 1.0, 0.8, chosen=True),
    row("64q1s4k", "OTHER", 2.0),
    row("64q1s4k", "sdpa", 4.0, peer=True),
    row("32q1s4k", "OURS", 1.0, 0.2, chosen=True),
    row("32q1s4k", "OTHER", 0.5),
    row("2q1s40", "OURS", 1.0, 0.01, chosen=True),
    row("2q1s40", "sdpa", 8.0, peer=True),
    row("q2k", "sdpa", 9.0, peer=True),
    row("q2k", "OURS", 3.0, chosen=True),
    row("q2k_q1s9", "OURS", 1.0, chosen=True, right=False),
    row("q2k_q1s9", "OTHER", 3.0),
]


def test_the_summary_of_rows() -> None:
    assert summary(ROWS).splitlines() == [
        "all         5 batches (1 without a time); best other / ours in 4: 2.213 geometric mean, 0.500 at worst (#2)",
        "decodes     3 batches; best other / ours in 3: 2.000 geometric mean, 0.500 at worst (#2)",
        "prompts     1 batch; best other / ours in 1: 3.000 geometric mean, 3.000 at worst (#4)",
        "mixtures    1 batch (1 without a time); no other kernel was timed",
        "decodes with at least 8 MiB of keys: 2 batches, 40.0 % of copy (geometric mean), 20.0 % at worst (#2)",
    ]


def test_a_line_per_batch() -> None:
    lines = [outcome.text(wide=True).split() for outcome in outcomes(ROWS)]
    layer, numbers = ["64q1s4k", "32/8x128", "p16"], ["1.0000", "0.8000", "80.0", "2.0e-03", "2.00"]
    assert lines[0] == ["1", "decodes", *layer, "OURS", *numbers, "OTHER"]
    assert lines[1][-3:] == ["0.50", "OTHER", "LOSES"] and lines[2][-2:] == ["8.00", "sdpa"]
    assert lines[3][5:] == ["OURS", "3.0000", "1.5000", "50.0", "2.0e-03", "3.00", "sdpa"], "the order of rows does not matter"
    assert lines[4][-3:] == ["no", "time:", "WRONG"]
    assert header(COLUMNS, wide=True).split()[:3] == ["#", "kind", "batch"]
    narrow = [outcome.text() for outcome in outcomes(ROWS)]
    assert narrow[0].split() == ["1", *layer, "OURS", "1.0000", "80.0", "2.00", "OTHER"] and max(map(len, narrow)) <= 100
    assert header(COLUMNS).split() == ["#", "batch", "backend", "ms", "%", "copy", "ratio", "best", "other"]


def test_named_backends_and_a_refused_one() -> None:
    refused = {"batch": "q9", "backend": "FIRST", "right": True, "refused": "head_size=7 (supports 64)"}
    rows = [row("q8", "FIRST", 2.0), row("q8", "SECOND", 3.0), refused, row("q9", "SECOND", 1.0)]
    first, second = outcomes(rows)
    assert first.ratio == 1.5 and first.row["backend"] == "FIRST"
    assert second.ratio is None and "no time: head_size=7 (supports 64)" in second.text()
    assert summary(rows[:1]).splitlines()[0] == "all         1 batch; no other kernel was timed"


def test_each_framework_has_a_summary() -> None:
    rows = [row("q8", "OURS", 1.0, chosen=True), row("q8", "OTHER", 3.0, framework="jax", chosen=True)]
    assert [outcome.number for outcome in outcomes(rows)] == [1, 1]
    lines = summary(rows).splitlines()
    assert lines[0] == "torch:" and lines[3] == "jax:" and all("no other" in lines[at] for at in (1, 4))


def test_a_backend_that_runs_the_same_kernels_is_no_rival() -> None:
    rows = [row("q1s4k", "TRITON_ATTN", 1.0, chosen=True), row("q1s4k", "TREE_ATTN", 0.99), row("q1s4k", "FLASHINFER", 1.2)]
    assert [outcome.ratio for outcome in outcomes(rows)] == [1.2]
    assert [outcome.other for outcome in outcomes(rows[:2])] == [None]


def test_a_report_of_random_batches_is_drawn_as_a_dot_a_batch() -> None:
    pytest.importorskip("matplotlib")
    report = {"rows": ROWS, "device": "a card", "date": "2026-01-02", "random": {"batches": 5}}
    texts = chart(report).texts
    assert "a card (torch), 2026-01-02: 2.21 in the mean of 4 batches" in texts
    assert {"decodes", "prompts", "fastest other: OTHER", "fastest other: sdpa"} <= {*texts} and "speculation" not in texts
    marks = [line for line in chart(report).figure.axes[0].lines if line.get_marker() not in ("", "None")]
    assert sorted(float(mark.get_ydata()[0]) for mark in marks) == [0.5, 2.0, 3.0, 8.0]
    with pytest.raises(ValueError, match="no batch has the times of two kernels"):
        chart({**report, "rows": ROWS[:1]})
