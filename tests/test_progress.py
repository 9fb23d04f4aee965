"""Progress of a command: a bar on a terminal, lines in a log, nothing before JSON."""

import io
import sys

import pytest

from attn.progress import Bar, Display, Lines, Quiet, coloured, display


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


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("40 of 40", True, io.StringIO()) == "40 of 40"
    assert coloured("40 of 40", True, Terminal()) == "\x1b[1;32m40 of 40\x1b[0m"
    assert "\x1b[1;31m" in coloured("39 of 40", False, Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("40 of 40", True, Terminal()) == "40 of 40"


def test_a_log_says_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 150.0])
    monkeypatch.setattr("attn.progress.time.perf_counter", lambda: next(clock))
    log = Lines(sys.stderr)
    log.begin("cases", 10)
    log.step(2, "CPU_ATTN")
    log.step(5, "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["cases        2/10     left: 1:20  CPU_ATTN", "cases        5/10     left: 2:30"]


def test_the_time_left_is_rounded_to_seconds_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 59.7])
    monkeypatch.setattr("attn.progress.time.perf_counter", lambda: next(clock))
    log = Lines()
    log.begin("cases", 10)
    log.step(5, "")
    assert "left: 1:00" in capsys.readouterr().out


def test_a_log_of_nothing_to_do_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    log = Lines()
    log.begin("cases", 0)
    log.step(0, "")
    assert capsys.readouterr().out == ""
