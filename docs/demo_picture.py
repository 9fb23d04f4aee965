"""Run `attn demo` and draw its output as a terminal, in SVG.

python docs/demo_picture.py          writes docs/assets/demo.svg
"""

import io
import re
import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).parent / "assets" / "demo.svg"
ARGUMENTS = ("--num-requests", "8", "--max-new-tokens", "24")


def picture(text: str, title: str) -> str:
    """Return text as an SVG of a terminal, without external resources."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=118, file=io.StringIO())
    for line in text.splitlines():
        style = "bold green" if line.lstrip().startswith("->") else "dim" if line.startswith("     ") else ""
        console.print(Text(line, style), soft_wrap=False)
    drawn = console.export_svg(title=title, unique_id="demo")
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL)


def main() -> None:
    done = subprocess.run([sys.executable, "-m", "attn", "demo", *ARGUMENTS], capture_output=True, text=True, check=True)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(done.stdout, f"attn demo {' '.join(ARGUMENTS)}"), encoding="utf-8")
    print(TARGET)


if __name__ == "__main__":
    main()
