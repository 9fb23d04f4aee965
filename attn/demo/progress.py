"""How `attn demo` shows what it is doing: a live picture on a terminal, plain lines in a log, nothing before JSON."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attn.imports import installed

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import TaskID

WIDTH = 100  # characters of a text that is being written
_MILESTONES = 5  # lines a bar that a log gets


class Display:
    """Swallows everything, for `--json`; the base of the others."""

    def say(self, text: str) -> None:
        """A line or more that stays."""

    def begin(self, name: str, total: int) -> None:
        """A new bar."""

    def step(self, done: int, total: int, status: str, texts: Callable[[], list[str]]) -> None:
        """How far the bar is; `texts` gives what is being written just now, a line each."""


class Lines(Display):
    """A line at every fifth of the way."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, name: str, total: int) -> None:
        self._name, self._passed = name, 0

    def step(self, done: int, total: int, status: str, texts: Callable[[], list[str]]) -> None:
        if done * _MILESTONES // total > self._passed:
            self._passed = done * _MILESTONES // total
            print("  ".join([f"{self._name:<12} {done:>5}/{total:<5}", status, *texts()[:1]]), flush=True)


class Live(Display):
    """Bars that grow, and the texts of the requests that have run longest."""

    def __init__(self, console: "Console") -> None:
        from rich import live, progress

        self._bars = progress.Progress(
            progress.TextColumn("[bold]{task.description:<12}"),
            progress.BarColumn(30),
            progress.TextColumn("{task.completed:>5.0f}/{task.total:<5.0f} {task.fields[status]}"),
            console=console,
        )
        self._texts: list[str] = []
        self.live = live.Live(console=console, get_renderable=self._picture, refresh_per_second=8)

    def _picture(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, *(Text(text, style="cyan", no_wrap=True) for text in self._texts))

    def say(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False)

    def begin(self, name: str, total: int) -> None:
        self._bar: TaskID = self._bars.add_task(name, total=total, status="")

    def step(self, done: int, total: int, status: str, texts: Callable[[], list[str]]) -> None:
        self._bars.update(self._bar, completed=done, total=total, status=status)
        self._texts = texts()


@contextlib.contextmanager
def display(quiet: bool) -> Iterator[Display]:
    """The display that fits stdout."""
    if quiet:
        yield Display()
    elif sys.stdout.isatty() and installed("rich"):
        from rich.console import Console

        shown = Live(Console())
        with shown.live:
            yield shown
    else:
        yield Lines()
