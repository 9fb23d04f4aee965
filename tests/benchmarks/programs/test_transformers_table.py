"""The table of transformers' models: the best peer, ratios, and reasons as footnotes."""

import math

import pytest

from benchmarks.programs.transformers_table import Cell, Row, header, lines, profile, shown

ROW = Row("llama", 16, 2048, "dynamic")
NAMES = ["sdpa", "eager", "attn"]


def cells(what: str, sdpa: float, eager: float, attn: float) -> dict[str, Cell]:
    figures = dict(zip(NAMES, (sdpa, eager, attn), strict=True))
    return {name: Cell({what: figure}, 0.0, 1.0) for name, figure in figures.items()}


def test_a_row_is_read_as_it_is_written() -> None:
    assert Row.parse("llama:16x2048:dynamic") == ROW and str(ROW) == "llama:16x2048:dynamic"
    for text in ("llama", "llama:16:dynamic", "llama:16xlong:dynamic"):
        with pytest.raises(ValueError):
            Row.parse(text)


@pytest.mark.parametrize(("what", "best", "ratio"), [("ms per token", "sdpa", 0.5), ("tokens per s", "eager", 4 / 3)])
def test_the_ratio_is_to_the_best_peer(what: str, best: str, ratio: float) -> None:
    (line,) = lines(ROW, cells(what, sdpa=2.0, eager=3.0, attn=4.0))
    assert line["best"] == best and line["ratio"] == pytest.approx(ratio)
    assert line["model"] == "llama" and line["what"] == what and line["times"] == {"sdpa": 2.0, "eager": 3.0, "attn": 4.0}


def test_another_backend_of_attn_is_no_peer() -> None:
    (line,) = lines(ROW, cells("prefill ms", 2.0, 3.0, 4.0) | {"attn:TRITON_ATTN": Cell({"prefill ms": 1.0})})
    assert line["best"] == "sdpa" and line["times"]["attn:TRITON_ATTN"] == 1.0


def test_an_implementation_that_refuses_is_a_footnote() -> None:
    row = cells("prefill ms", 2.0, 3.0, 4.0)
    with row["sdpa"].noting():
        raise ValueError("not supported\nby this model")
    (line,) = lines(ROW, row)
    footnotes = ["another"]
    text = shown(line, NAMES, footnotes)
    assert footnotes == ["another", "ValueError: not supported"]
    assert text == "| llama | 16 | 2048 | dynamic | prefill ms | [2] | 3 | 4 | eager 3 | 0.75 | 0.0e+00, 100 % of tokens |"
    assert shown(line, NAMES, footnotes) == text and len(footnotes) == 2
    assert {part.count("|") for part in (text, *header(NAMES).splitlines())} == {text.count("|")}


def test_a_row_in_which_nothing_ran_is_a_line_of_footnotes() -> None:
    footnotes: list[str] = []
    (line,) = lines(ROW, {name: Cell(note="out of memory") for name in NAMES})
    assert shown(line, NAMES, footnotes) == "| llama | 16 | 2048 | dynamic |  | [1] | [1] | [1] |  |  |  |"
    assert footnotes == ["out of memory"]


@pytest.mark.parametrize("difference", [0.3, math.nan])
def test_times_of_other_outputs_do_not_count(difference: float) -> None:
    row = cells("prefill ms", 2.0, 3.0, 4.0)
    row["sdpa"].difference = difference
    row["sdpa"].judge(0.2)
    (line,) = lines(ROW, row)
    assert line["best"] == "eager" and line["times"]["sdpa"] == 2.0 and "differ" in line["notes"]["sdpa"]
    row["attn"].difference = difference
    row["attn"].judge(0.2)
    (line,) = lines(ROW, row)
    assert line["ratio"] is None and "| 4 [1] |" in shown(line, ["attn"], [])


def test_a_difference_below_the_limit_has_no_note() -> None:
    for difference in (None, 0.0, 0.2):
        cell = Cell(difference=difference)
        cell.judge(0.2)
        assert cell.note == ""
    refused = Cell(difference=1.0, note="refused")
    refused.judge(0.2)
    assert refused.note == "refused"


def test_prompts_of_continuous_batching_are_a_range() -> None:
    (line,) = lines(Row("llama", 64, 1024, "paged"), cells("tokens per s", 2.0, 3.0, 4.0))
    assert "| 64 | 32 to 1024 | paged |" in shown(line, NAMES, [])


def test_a_profile_is_its_sum_and_the_longest_kernels() -> None:
    text = profile("llama attn, token", {"short": (2.0, 1.5), "long": (16.0, 2000.0), "none": (1.0, 0.5)}, 2)
    assert text.splitlines() == [
        "| llama attn, token | 2,002 us in 19 kernels |",
        "|   2,000 us, 16 times | long |",
        "|   1.5 us, 2 times | short |",
    ]
    assert profile("empty", {}, 2) == "| empty | 0 us in 0 kernels |"
