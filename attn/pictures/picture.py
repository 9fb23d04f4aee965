"""A figure that notebooks display and that can be saved to a file, without pyplot's global state."""

import errno
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn.imports import installed, pip_install

#: Colours distinguishable by colour-blind readers and in greyscale (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#000000")
#: Colours with a fixed meaning: seen, not seen, special.
SEEN, HIDDEN, SPECIAL = "#0072b2", "#f2f2f2", "#e69f00"
FORMATS = (".svg", ".png", ".pdf")
#: A date would change the file at each run; of these formats, matplotlib writes one unless it is None.
_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class Picture:
    """A matplotlib `figure`. Notebooks display it as SVG, or as PNG where they store it; `save` writes it to a file."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        title = next((axis.get_title() for axis in self.figure.axes if axis.get_title()), "")
        size = f"{width:.1f} x {height:.1f} inches"
        return f"<Picture{f' {title!r}' * bool(title)}, {size}: .save('picture.svg') writes it to a file>"

    def save(self, file: str | Path) -> None:
        """Write the figure in the format of the file's extension (.svg, .png, .pdf). Raises ValueError for any other."""
        check_file(file)
        with _deterministic():
            self.figure.savefig(file, bbox_inches="tight", metadata=_DATES.get(Path(file).suffix))

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        with _deterministic():
            self.figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
        return text.getvalue()

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", bbox_inches="tight", metadata={"Software": None})
        return data.getvalue()

    @property
    def texts(self) -> list[str]:
        """Return every text in the figure, for readers who cannot see it (and for tests)."""
        from matplotlib.text import Text

        return [text.get_text() for text in self.figure.findobj(Text) if text.get_text()]


def _deterministic() -> Any:
    """Settings that make files reproducible: matplotlib's element ids are random otherwise. Text is stored as text."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "attn", "svg.fonttype": "none"})


def check_file(file: str | Path) -> None:
    """Raise ValueError for an unsupported extension, OSError if the file cannot be written, ModuleNotFoundError without
    matplotlib. Called before the work whose result is plotted."""
    if Path(file).suffix not in FORMATS:
        raise ValueError(f"{file}: the extension must be one of {', '.join(FORMATS)}")
    check_writable(file)
    _need_matplotlib()


def check_writable(file: str | Path) -> None:
    """Raise OSError, with the file's name, unless the file can be written: its folder must exist."""
    path = Path(file).absolute()
    # The codes that opening the file would give, so that the command line words both alike.
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
    """Create a picture of this size in inches; `draw` fills its axes (an array if several); `heights`: of the rows.

    Raises ModuleNotFoundError without matplotlib.
    """
    _need_matplotlib()
    from matplotlib.figure import Figure

    # `Figure` and not pyplot's: pyplot keeps a reference to every figure, and chooses a backend that may open a window.
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots(rows, columns, height_ratios=heights))
    return Picture(figure)
