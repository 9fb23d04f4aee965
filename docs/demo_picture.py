"""Run `attn demo` in a terminal and draw what it shows at the end, in SVG.

python docs/demo_picture.py          writes docs/assets/demo.svg
"""

import fcntl
import html
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

TARGET = Path(__file__).parent / "assets" / "demo.svg"
COLUMNS = 112
SPACE = "\xa0"


def run(command: list[str], columns: int = COLUMNS) -> str:
    """Run a command in a terminal of this width; return what it wrote, escape sequences included. Raises
    CalledProcessError if it fails."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": ""}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL, env=environment)
    os.close(its)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux raises EIO when the other side is closed
            part = b""
        if not part:
            break
        written += part
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end, with their colours: of the cursor's movements, rich writes only
    those up a line and to a line's start."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[\d;?]*[A-Za-z]|\r|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K" or part == "\r":
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        elif part and (part[0] != "\x1b" or part[-1] == "m"):
            lines[row] += part
    return lines


def picture(lines: list[str], title: str, columns: int = COLUMNS) -> str:
    """Return lines with escape sequences as an SVG of a terminal, without external resources."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=False)
    drawn = console.export_svg(title=title, unique_id="demo")
    return _TEXT.sub(_placed, re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL))


#: A text of a line: attributes, place, length, more attributes, and what it says.
_TEXT = re.compile(r'<text ([^>]*)x="([\d.]+)" ([^>]*)textLength="([\d.]+)" ([^>]*)>(.*?)</text>')


def _placed(match: re.Match[str]) -> str:
    """Return a text as one text for each part between two spaces or more, each at its own place: columns stay below one another
    where a renderer has another font and ignores `textLength`."""
    first, x, middle, length, last, content = match.groups()
    said = html.unescape(content)
    step = float(length) / len(said)
    return "".join(
        f'<text {first}x="{float(x) + step * part.start():.1f}" {middle}textLength="{step * len(part[0]):.1f}" {last}>'
        f"{html.escape(part[0]).replace(SPACE, '&#160;')}</text>"
        for part in re.finditer(rf"[^{SPACE}]+(?:{SPACE}[^{SPACE}]+)*", said)
    )


def main() -> None:
    lines = screen(run([sys.executable, "-m", "attn", "demo"]))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(lines, "attn demo"), encoding="utf-8")
    print(TARGET)


if __name__ == "__main__":
    main()
