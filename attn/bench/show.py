"""How a run that takes minutes tells where it is: rows as they come, and below them a bar with the time that is left.

The bar is rich's, on a terminal alone; into a file or a pipe go the rows.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attn.imports import installed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """Prints rows; the base of the other."""

    def say(self, text: str) -> None:
        """A line that stays."""
        print(text, flush=True)

    def step(self, done: int, doing: str) -> None:
        """So many entries are done, and this one is being measured."""


class Bar(Display):
    """A bar below what is printed, gone in the end."""

    def __init__(self, progress: "Progress", task: "TaskID", below_rows: bool) -> None:
        self._progress, self._task, self._below_rows = progress, task, below_rows

    def say(self, text: str) -> None:
        if self._below_rows:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super().say(text)

    def step(self, done: int, doing: str) -> None:
        self._progress.update(self._task, completed=done, description=doing)


@contextlib.contextmanager
def display(total: int) -> Iterator[Display]:
    """What fits the streams, for `total` entries."""
    terminal = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if terminal is None or total < 2 or not installed("rich"):
        yield Display()
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.BarColumn(24),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
        console=Console(file=terminal),
        transient=True,
    )
    with bar:
        yield Bar(bar, bar.add_task("", total=total), terminal is sys.stdout)
