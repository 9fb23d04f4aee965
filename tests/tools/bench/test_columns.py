"""Columns of printed tables."""

from attn.tools.bench.columns import WIDTH, Column, header, line, wrapped

COLUMNS = (Column("backend", 10, text=True), Column("ms", 6), Column("spread", 8, wide=True), Column("error", 6))


def test_a_line_has_the_columns_that_are_shown() -> None:
    cells = ["*CPU", "1.5", "0.1", "1e-7"]
    assert line(cells, COLUMNS) == "*CPU          1.5   1e-7"
    assert line(cells, COLUMNS, wide=True) == "*CPU          1.5      0.1   1e-7"
    assert line(cells[:1], COLUMNS) == "*CPU", "no spaces at the end"
    assert header(COLUMNS) == " backend       ms  error"


def test_a_long_line_is_broken_at_spaces_only() -> None:
    first, second = wrapped(f"{'x' * 90} pip-install-this-package", 4).splitlines()
    assert first == "x" * 90 and second == "    pip-install-this-package" and WIDTH == 100
