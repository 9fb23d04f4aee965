"""A drawn figure: shown by a notebook, saved to a file, and nobody's global state."""

import errno
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn.imports import installed, pip_install

#: Colours that stay apart for colour-blind readers and in grey (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#000000")
#: What a picture says with colour alone elsewhere: seen, not seen, special.
SEEN, HIDDEN, SPECIAL = "#0072b2", "#f2f2f2", "#e69f00"
FORMATS = (".svg", ".png", ".pdf")


class Picture:
    """A matplotlib `figure`. In a notebook it is an SVG; `save` writes it to a file."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, file: str | Path) -> None:
        """Write it; the ending says how (.svg, .png, .pdf). Raises ValueError for another one."""
        check_file(file)
        with _deterministic():
            self.figure.savefig(file, bbox_inches="tight", metadata=_undated(str(file)))

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        with _deterministic():
            self.figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
        return text.getvalue()

    @property
    def texts(self) -> list[str]:
        """Every word that is in it, for those who cannot see it (and for tests)."""
        from matplotlib.text import Text

        return [found.get_text() for found in self.figure.findobj(Text) if found.get_text()]


def _deterministic() -> Any:
    """The same picture is the same file: matplotlib's element ids are random otherwise. Text stays text."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "attn", "svg.fonttype": "none"})


def _undated(file: str) -> dict[str, None] | None:
    return {"Date": None} if file.endswith(".svg") else None


def check_file(file: str | Path) -> None:
    """Raise ValueError for an ending that no picture has, OSError where no file can be written, ModuleNotFoundError without
    matplotlib: before the work whose result is to be drawn there."""
    if Path(file).suffix not in FORMATS:
        raise ValueError(f"{file}: a picture's file ends in {', '.join(FORMATS)}")
    check_writable(file)
    _need_matplotlib()


def check_writable(file: str | Path) -> None:
    """Raise OSError, which names the file, unless one can be written there: its folder must exist."""
    path = Path(file).absolute()
    code = errno.ENOENT if not path.parent.is_dir() else errno.EISDIR if path.is_dir() else 0
    if not code and not os.access(path if path.exists() else path.parent, os.W_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(file))


def _need_matplotlib() -> None:
    if not installed("matplotlib"):
        raise ModuleNotFoundError(f"matplotlib is not installed: {pip_install('plots')}", name="matplotlib")


def drawn(
    width: float,
    height: float,
    draw: Callable[..., None],
    rows: int = 1,
    columns: int = 1,
    heights: Sequence[float] | None = None,
) -> Picture:
    """A picture of so many inches whose axes (an array when there are several) `draw` fills; `heights` of the rows.

    Raises ModuleNotFoundError without matplotlib.
    """
    _need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots(rows, columns, height_ratios=heights))
    return Picture(figure)
