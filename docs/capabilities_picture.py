"""Draw what the attention backends serve, on any machine, from their capability records.

python docs/capabilities_picture.py          writes docs/assets/capabilities.svg
"""

from dataclasses import replace
from pathlib import Path

from attn import pictures
from attn.reports import report

TARGET = Path(__file__).parent / "assets" / "capabilities.svg"


def picture() -> pictures.Picture:
    """Return the picture of the built-in backends, without what is available on this machine."""
    rows = report.backends("attention").rows
    return pictures.capabilities([replace(row, reasons=()) for row in rows if row.origin == "built-in"])


if __name__ == "__main__":
    picture().save(TARGET)
    print(TARGET)
