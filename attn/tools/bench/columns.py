"""Columns of the printed tables: 100 characters by default, every column with `--wide`."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 100  #: characters of a line by default


class Column(NamedTuple):
    """A column: its name and width; `text` is left-justified, numbers are not; `wide`: left out by default."""

    name: str
    width: int
    text: bool = False
    wide: bool = False


def line(cells: Sequence[str], columns: Sequence[Column], wide: bool = False) -> str:
    """Format the cells of a row; those of the last columns may be missing."""
    shown = [(cell, column) for cell, column in zip(cells, columns, strict=False) if wide or not column.wide]
    return " ".join(cell.ljust(c.width) if c.text else cell.rjust(c.width) for cell, c in shown).rstrip()


def header(columns: Sequence[Column], wide: bool = False) -> str:
    """Format the columns' names. That of the backends is indented, as their names are behind a mark."""
    return line([" backend" if column.name == "backend" else column.name for column in columns], columns, wide)


def wrapped(text: str, indent: int) -> str:
    """Break a line at spaces; the continuations are indented."""
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False))
