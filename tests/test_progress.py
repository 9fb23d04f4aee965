"""Progress of a command: a bar on a terminal, lines in a log, nothing before JSON."""

import io
import sys

import pytest

from attn.progress import Bar, Display, Lines, Quiet, display


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_bar_shows_progress_time_left_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with display(Lines(), sys.stdout, transient=False) as shown:
        assert isinstance(shown, Bar)
        shown.say("[bold]not markup")
        shown.begin("torch", 4)
        shown.step(1, "12 [tokens]/s", texts=lambda: ["   0: some text"])
        shown.bars.refresh()
        shown.begin("jax", 4)
        shown.step(3, "done", total=3)
    said = terminal.getvalue()
    for words in ("[bold]not markup", "torch", "1/4", "left:", "12 [tokens]/s", "some text", "jax", "3/3"):
        assert words in said


def test_what_stays_goes_to_stdout_where_the_bar_is_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attn bench ... > file`: rich would take the rows to the terminal."""
    monkeypatch.setattr(sys, "stdout", file := io.StringIO())
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with display(Display(), sys.stdout, sys.stderr) as shown:
        shown.begin("", 5)
        shown.step(2, "q4 CPU_ATTN")
        shown.say("a [row] of 5.0 ms")
    assert file.getvalue() == "a [row] of 5.0 ms\n"
    assert "2/5" in terminal.getvalue() and "a [row]" not in terminal.getvalue()


@pytest.mark.parametrize("plain", [Display(), Lines(), Quiet()])
def test_without_a_terminal_it_is_as_asked(plain: Display, capsys: pytest.CaptureFixture[str]) -> None:
    with display(plain, sys.stdout, sys.stderr) as shown:
        assert shown is plain
        shown.say("a row")
        shown.begin("torch", 50)
        for done in range(1, 51):
            shown.step(done, "12 tokens/s", texts=lambda: ["text"])
    said = capsys.readouterr().out
    assert ("a row\n" in said) is not isinstance(plain, Quiet)
    assert said.count("12 tokens/s  text") == (5 if isinstance(plain, Lines) else 0)
