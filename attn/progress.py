"""Progress display of long-running commands: lines and, on a terminal, a bar below them (rich's).

    with display(Lines(), sys.stdout) as shown:
        shown.begin("torch", 40)
        shown.step(3, "12 tokens/s")

Without a terminal or without rich, `Lines` writes a log, `Display` prints only permanent lines, and `Quiet` prints nothing.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from attn.imports import installed
from attn.tables import folded

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_MILESTONES = 5  #: log lines per bar


class Display:
    """Prints permanent lines and no bar; the base of the others."""

    def say(self, text: str) -> None:
        """Print one or more permanent lines."""
        print(folded(text), flush=True)

    def begin(self, name: str, total: int) -> None:
        """Start a new bar."""

    def step(self, done: int, status: str, total: int | None = None, texts: Callable[[], list[str]] = list) -> None:
        """Update the bar, and its total if given; `texts` returns lines to show below it until the next update."""


class Quiet(Display):
    """Prints nothing, so that stdout has only JSON."""

    def say(self, text: str) -> None:
        pass


class Lines(Display):
    """Prints a line at every fifth of the total, with the time left at the average rate so far, for a log."""

    def __init__(self, log: TextIO | None = None) -> None:
        """`log`: the stream of the progress lines (default: stdout)."""
        self._log = log

    def begin(self, name: str, total: int) -> None:
        self._name, self._total, self._passed, self._began = name, total, 0, time.perf_counter()

    def step(self, done: int, status: str, total: int | None = None, texts: Callable[[], list[str]] = list) -> None:
        self._total = total or self._total
        if self._total and done * _MILESTONES // self._total > self._passed:
            self._passed = done * _MILESTONES // self._total
            # Rounded before it is divided: 59.7 seconds are 1:00, not 0:60.
            minutes, seconds = divmod(round((time.perf_counter() - self._began) * (self._total - done) / done), 60)
            head = f"{self._name:<8} {done:>5}/{self._total:<5}  left: {minutes}:{seconds:02}"
            print(folded("  ".join([head, *filter(None, [status]), *texts()[:1]])), file=self._log, flush=True)


class Bar(Display):
    """Bars below the printed lines: progress, elapsed and remaining time, the status, and the current texts."""

    def __init__(self, terminal: TextIO, transient: bool, below_lines: bool) -> None:
        """`terminal`: the stream of the bar; `below_lines`: permanent lines go to it too, else to stdout, a different stream.
        `transient`: the bar is removed at the end."""
        from rich import progress
        from rich.console import Console, RenderableType
        from rich.text import Text

        class Bars(progress.Progress):
            def get_renderables(bars) -> Iterator[RenderableType]:
                yield from super().get_renderables()
                yield from (Text(text, style="cyan", no_wrap=True) for text in self._texts)

        self._below_lines = below_lines
        self._texts: list[str] = []
        self.bars: Progress = Bars(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[status]}", markup=False),
            console=Console(file=terminal),
            transient=transient,
            redirect_stdout=below_lines,  # else rich would redirect a file's stdout to the terminal
        )

    def say(self, text: str) -> None:
        if self._below_lines:
            self.bars.console.print(folded(text), markup=False, highlight=False, soft_wrap=True)
        else:
            super().say(text)

    def begin(self, name: str, total: int) -> None:
        self._task: TaskID = self.bars.add_task(name, total=total, status="")

    def step(self, done: int, status: str, total: int | None = None, texts: Callable[[], list[str]] = list) -> None:
        self._texts = texts()
        self.bars.update(self._task, completed=done, total=total, status=status)


def coloured(text: str, good: bool, stream: TextIO) -> str:
    """Return `text` in bold green or red for a terminal; unchanged for a file, and if NO_COLOR is set (no-color.org)."""
    # no-color.org: any value but an empty one turns colour off.
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[1;{32 if good else 31}m{text}\x1b[0m"


@contextlib.contextmanager
def display(plain: Display, *streams: TextIO, transient: bool = True) -> Iterator[Display]:
    """Yield a bar on the first of the streams that is a terminal, if rich is installed; else `plain`."""
    terminal = next((stream for stream in streams if stream.isatty()), None)
    if terminal is None or not installed("rich"):
        yield plain
        return
    # Only a bar on stdout can print lines above itself; one on stderr leaves stdout to a pipe or a file.
    bar = Bar(terminal, transient, terminal is sys.stdout)
    with bar.bars:
        yield bar
