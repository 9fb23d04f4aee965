"""Run the mistakes of docs/how-to/mistakes.md and write the message of each below it.

python docs/mistakes.py --write      rewrite the page
"""

import argparse
import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

from attn import cli

PAGE = Path(__file__).parent / "how-to" / "mistakes.md"
WIDTH = 98  #: characters of a line; longer messages are broken
#: A block to run; a mistake (`sh`, `py`) is followed by its message, an example (`python`) is not.
BLOCK = re.compile(r"^```(python)\n(.*?)^```\n|^```(sh|py)\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def current(page: str) -> str:
    """Return the page with the message that each mistake gives now."""
    namespace: dict[str, Any] = {"__name__": "__main__"}

    def run(match: re.Match[str]) -> str:
        example, source, language, mistake, _ = match.groups()
        if example:
            exec(compile(source, PAGE.name, "exec"), namespace)
            return match[0]
        said = command(mistake) if language == "sh" else exception(mistake, namespace)
        lines = [part for line in said.splitlines() for part in wrapped(line)]
        return f"```{language}\n{mistake}```\n\n```text\n" + "".join(f"{line}\n" for line in lines) + "```\n"

    return BLOCK.sub(run, page)


def wrapped(line: str) -> list[str]:
    """Break a line at spaces; the continuations are indented as the line is."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def command(line: str) -> str:
    """Run a command that fails; return what it prints. Raises ValueError if it succeeds."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = cli.main(shlex.split(line, comments=True)[1:])
        except SystemExit as stop:  # argparse's exit
            code = int(stop.code or 0)
    if code not in (1, 2):
        raise ValueError(f"{line.strip()}: exit code {code}, must be 1 or 2: it is no mistake")
    return out.getvalue()


def exception(source: str, namespace: dict[str, Any]) -> str:
    """Run Python that raises; return the exception's type and message. Raises ValueError if it does not raise."""
    try:
        exec(compile(source, PAGE.name, "exec"), namespace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise ValueError(f"{source.strip()}: raises nothing: it is no mistake")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the mistakes of docs/how-to/mistakes.md.")
    parser.add_argument("--write", action="store_true", help="rewrite the page (default: print it)")
    args = parser.parse_args()
    page = current(PAGE.read_text(encoding="utf-8"))
    if args.write:
        PAGE.write_text(page, encoding="utf-8")
    print(PAGE if args.write else page)


if __name__ == "__main__":
    main()
