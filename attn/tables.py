"""Tables and reports: columns and rows of cells in; text, HTML, Markdown and plain data out.

Printed lines have 100 characters, unless the caller asks for the columns that are left out by default (`--wide`), or as many as
the variable COLUMNS says.
"""

import itertools
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, NamedTuple

WIDTH = 100  #: characters of a line by default
LEFT = "text-align:left"


class Column(NamedTuple):
    """A column: its heading, the width in tables whose rows are printed one by one, and the format of its values.

    `text` is left-justified, numbers are not; `wide`: left out by default; `key`: of its value in a row's figures, or `of`:
    a row's cell.
    """

    name: str
    width: int = 0
    text: bool = False
    wide: bool = False
    key: str = ""
    form: str = ""
    of: Callable[[Any], str] = str


def shown(value: Any, form: str) -> str:
    """Format a number; a dash if there is none."""
    return "-" if value is None else format(value, form)


def cells(figures: Mapping[str, Any], columns: Sequence[Column]) -> list[str]:
    """Return the cells of a row's figures."""
    return [shown(figures.get(column.key), column.form) for column in columns]


def line(cells: Sequence[str], columns: Sequence[Column], wide: bool = False, gap: str = " ") -> str:
    """Format a row in the columns' widths; the cells of the last columns may be missing."""
    kept = [(cell, column) for cell, column in zip(cells, columns, strict=False) if wide or not column.wide]
    # Without trailing spaces, which copies of a terminal and diffs of recorded outputs would show.
    return gap.join(cell.ljust(c.width) if c.text else cell.rjust(c.width) for cell, c in kept).rstrip()


def header(columns: Sequence[Column], wide: bool = False) -> str:
    """Format the columns' names."""
    return line([column.name for column in columns], columns, wide)


def block(rows: Sequence[Sequence[str]], indent: str = "", numbers: Collection[int] = ()) -> list[str]:
    """Format rows as lines, two spaces between columns as wide as their widest cell; `numbers`: the right-justified columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [Column("", width, i not in numbers) for i, width in enumerate(widths)]
    return [(indent + line(row, columns, gap="  ")).rstrip() for row in rows]


def wrapped(text: str, indent: str = "", more: str = "") -> list[str]:
    """Break a line at spaces, into none if it is empty; the continuations are indented by `more` too."""
    # Words longer than a line (paths, names of cases) are broken only where COLUMNS asks for a width: a broken path
    # cannot be copied.
    requested = requested_width()
    width = requested or WIDTH
    more = (indent + more)[: width // 2]
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=more, break_on_hyphens=False, break_long_words=requested > 0
    )


def requested_width() -> int:
    """Return the characters of a line that COLUMNS asks for; 0 if it asks for none."""
    columns = os.environ.get("COLUMNS", "")
    # Below 20 the indents alone fill a line. `isdecimal`, since COLUMNS is any string that the environment holds.
    return max(20, int(columns)) if columns.isdecimal() and int(columns) else 0


def folded(text: object) -> str:
    """Return a text for printing: lines longer than COLUMNS, if that is set, are broken, and continued with an indent."""
    width, lines = requested_width(), str(text).split("\n")
    if not width:
        return str(text)
    indents = [" " * min(len(line) - len(line.lstrip()) + 4, width // 2) for line in lines]
    broken = [
        # `wrap` returns no line for an empty one, which separates paragraphs.
        textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        for line, indent in zip(lines, indents, strict=True)
    ]
    return "\n".join(itertools.chain(*broken))


def counted(count: int, noun: str) -> str:
    """Return a number of things: `1 case`, `2,000 cases`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def markdown(cells: Iterable[str]) -> str:
    """Format a row of a Markdown table."""
    # Renderers of Markdown differ on a backslash before a bar within code spans.
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def html(head: Sequence[str], rows: Iterable[Sequence[Any]], styles: Iterable[str] = ()) -> str:
    """Format rows of HTML, left-justified below each heading; a cell is HTML, or (HTML, its style), `styles` are the rows'."""
    aligned = [LEFT if name else "" for name in head]
    cells = [_html_row("th", zip(map(escape, head), aligned, strict=True))]
    for row, style in itertools.zip_longest(rows, styles, fillvalue=""):
        pairs = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        styled = [(cell, ";".join(filter(None, (left, more)))) for (cell, more), left in zip(pairs, aligned, strict=True)]
        cells.append(_html_row("td", styled, style))
    return f"<table>{''.join(cells)}</table>"


def _html_row(tag: str, cells: Iterable[tuple[str, str]], style: str = "") -> str:
    inner = "".join(f"<{tag}{_styled(cell_style)}>{cell}</{tag}>" for cell, cell_style in cells)
    return f"<tr{_styled(style)}>{inner}</tr>"


def _styled(style: str) -> str:
    return f" style='{style}'" if style else ""


def paragraph(html: str) -> str:
    """Return HTML as a left-justified paragraph."""
    return f"<p style='{LEFT}'>{html}</p>"


def plain(value: Any) -> Any:
    """Return a report as data for JSON: records as dicts of their fields, or what their `to_dict` returns; sets sorted."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
