"""A griffe extension: docstrings of this package as the sections that mkdocstrings shows.

A docstring says of its parameters `name: text` or `first, second: text`, one after another, each on lines of its own or after a
full stop or a semicolon. They become the section of parameters; sentences that begin with "Raises" follow it. Sessions
(`>>> ...`) and indented blocks become blocks of code.
"""

import importlib
import re
from typing import Any

from attn.imports import installed

#: The tests of `sections` need no griffe.
Extension: Any = importlib.import_module("griffe").Extension if installed("griffe") else object

_ENTRY = re.compile(r"(?:^|(?<=[.;] ))(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
_HEADINGS = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Attributes):\s*$")
_DUNDER = re.compile(r"(?<![`\w])(__\w+__)(?!`)")


class HouseStyle(Extension):
    """Rewrites each docstring when its object is loaded."""

    def on_function(self, *, func: Any, loader: Any, **kwargs: Any) -> None:
        _rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: Any, loader: Any, **kwargs: Any) -> None:
        made = cls.members.get("__init__")
        names = {parameter.name for parameter in made.parameters} if made is not None and made.is_function else set()
        _rewrite(cls, names | {name for name, member in cls.members.items() if member.is_attribute})


def _rewrite(thing: Any, names: set[str]) -> None:
    """Rewrite the docstring of a griffe object about `names`."""
    if thing.docstring is not None:
        thing.docstring.value = sections(thing.docstring.value, names)


def sections(text: str, names: set[str]) -> str:
    """Return a docstring with what it says of `names` as a section `Args:`, after the text before the first of them."""
    lines = text.expandtabs().splitlines()
    if any(_HEADINGS.match(line) for line in lines):
        return text
    before: list[str] = []
    about: list[str] = []
    after: list[str] = []
    number = 0
    while number < len(lines):
        run = [lines[number]]
        number += 1
        if _entries(run[0].strip(), names)[:1] != [0]:
            (after if about else before).append(run[0])
            continue
        while number < len(lines) and lines[number].strip():
            run.append(lines[number])
            number += 1
        told, _, raised = " ".join(line.strip() for line in run).partition(" Raises ")
        starts = [*_entries(told, names), len(told)]
        for start, end in zip(starts, starts[1:], strict=False):
            name, _, words = told[start:end].partition(": ")
            about.append(f"    {name.replace('*', '')}: {_marked(words.strip().removesuffix(';'))}")
        after += [f"Raises {raised}", ""] * bool(raised)
    if not about:
        return "\n".join(_fenced(before))
    return "\n".join([*_fenced(before), "", "Args:", *about, "", *_fenced(after)])


def _entries(text: str, names: set[str]) -> list[int]:
    """Return where the entries of `names` begin in a text."""
    found = [(match.start(), {name.strip("* ") for name in match[1].split(",")}) for match in _ENTRY.finditer(text)]
    return [start for start, named in found if named <= names]


def _fenced(lines: list[str]) -> list[str]:
    """Return lines of text with sessions and indented blocks as blocks of code."""
    made: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        starts = not inside and line.startswith((">>> ", "    ")) and not (number and lines[number - 1].strip())
        ends = inside and line.strip() and not line.startswith((">>> ", "... ", "    ")) and not lines[number - 1].strip()
        if starts:
            made.append("```python")
            inside = True
        if ends:
            made.append("```\n")
            inside = False
        made.append(line.removeprefix("    ") if inside else _marked(line))
    return [*made, *["```"] * inside]


def _marked(line: str) -> str:
    """Return a line of text whose names with underscores on both sides are not read as emphasis."""
    return _DUNDER.sub(r"`\1`", line)
