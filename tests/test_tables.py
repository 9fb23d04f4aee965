"""Tables as text, HTML and data."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from attn.tables import WIDTH, Column, block, cells, counted, folded, header, html, line, markdown, plain, wrapped

COLUMNS = (Column(" backend", 10, text=True), Column("ms", 6), Column("spread", 8, wide=True), Column("error", 6))
FIGURES = (Column("us", key="us", form=".1f"), Column("size", key="size"))


def test_a_line_has_the_columns_that_are_shown() -> None:
    cells = ["*CPU", "1.5", "0.1", "1e-7"]
    assert line(cells, COLUMNS) == "*CPU          1.5   1e-7"
    assert line(cells, COLUMNS, wide=True) == "*CPU          1.5      0.1   1e-7"
    assert line(cells[:1], COLUMNS) == "*CPU", "no spaces at the end"
    assert header(COLUMNS) == " backend       ms  error"


def test_a_long_line_is_broken_at_spaces_only() -> None:
    first, second = wrapped(f"{'x' * 90} pip-install-this-package", more="    ")
    assert first == "x" * 90 and second == "    pip-install-this-package" and WIDTH == 100
    assert wrapped("") == [] and wrapped("a", "  ") == ["  a"]


def test_columns_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"  TORCH_SDPA      {'reason; ' * 20}\n\n  {'x' * 70}"
    assert folded(text) == text, "as long as a line is, without it"
    for value, width in (("60", 60), ("200", 200), ("5", 20)):
        monkeypatch.setenv("COLUMNS", value)
        lines = folded(text).split("\n")
        assert max(map(len, lines)) <= width and "".join(folded(text).split()) == "".join(text.split())
        assert max(map(len, wrapped("word " * 80))) <= width
    assert lines[0].startswith("  TORCH_SDPA") and lines[1].startswith("      ") and "" in lines
    for value in ("", "0", "wide", "-3"):
        monkeypatch.setenv("COLUMNS", value)
        assert folded(text) == text


def test_numbers_of_things() -> None:
    assert [counted(n, "case") for n in (0, 1, 2, 1000)] == ["0 cases", "1 case", "2 cases", "1,000 cases"]


def test_a_block_is_as_wide_as_its_cells() -> None:
    rows = [("case", *(column.name for column in FIGURES)), ("one", *cells({"us": 1.25}, FIGURES))]
    assert block(rows, "  ", numbers=(1, 2)) == ["  case   us  size", "  one   1.2     -"]
    assert block([]) == []


def test_html_and_markdown() -> None:
    left = "style='text-align:left'"
    assert html(["", "a"], [["&rarr;", ("<b>x</b>", "color:gray")]], ["background:red"]) == (
        f"<table><tr><th></th><th {left}>a</th></tr><tr style='background:red'><td>&rarr;</td>"
        "<td style='text-align:left;color:gray'><b>x</b></td></tr></table>"
    )
    assert markdown(["a|b", "c"]) == "| a&#124;b | c |"


class Pair(NamedTuple):
    first: int
    second: tuple[int, ...]


@dataclass
class Record:
    pair: Pair | None
    names: frozenset[str]


def test_records_are_plain_data() -> None:
    assert plain([Record(Pair(1, (2, 3)), frozenset("ba"))]) == [{"pair": {"first": 1, "second": [2, 3]}, "names": ["a", "b"]}]
