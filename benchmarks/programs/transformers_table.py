"""The table of `transformers_generate`: rows, what each implementation did in them, the best peer and footnotes."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "attn"
PAGED, SHORTEST = "paged", 32  #: the cache of `generate_batch`, and its shortest prompt


@dataclass(frozen=True)
class Row:
    """A batch of prompts of one length, for one model with one kind of cache; written MODEL:BATCHxPROMPT:CACHE."""

    model: str
    batch: int
    prompt: int
    cache: str

    @classmethod
    def parse(cls, text: str) -> "Row":
        model, shape, cache = text.split(":")
        batch, prompt = shape.split("x")
        return cls(model, int(batch), int(prompt), cache)

    def __str__(self) -> str:
        return f"{self.model}:{self.batch}x{self.prompt}:{self.cache}"


@dataclass
class Cell:
    """What one implementation did in a row.

    figures: by the names of the lines; difference, equal: the largest difference of its outputs, and the share of its tokens
    that are the reference's; note: why it has no figures, or why they do not count; kernels: by what they were counted in.
    """

    figures: dict[str, float] = field(default_factory=dict)
    difference: float | None = None
    equal: float | None = None
    note: str = ""
    kernels: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Let an error become this cell's note."""
        try:
            yield
        except Exception as error:
            said = (str(error).strip() or repr(error)).splitlines()[0]
            self.figures, self.note = {}, f"{type(error).__name__}: {said[:160]}"

    def judge(self, limit: float) -> None:
        """Note a difference above the limit, or one that is no number."""
        if not self.note and self.difference is not None and not self.difference <= limit:
            self.note = f"outputs differ by {self.difference:.2g} deviations"


def lines(row: Row, cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """Return a line for each figure, with the best peer and its time by that of `attn`, of rates the inverse."""
    found = []
    whats = dict.fromkeys(what for cell in cells.values() for what in cell.figures) or {"": None}
    for what in whats:
        times = {name: cell.figures[what] for name, cell in cells.items() if what in cell.figures}
        sound = {name: time for name, time in times.items() if not cells[name].note}
        peers = {name: time for name, time in sound.items() if not name.startswith(OURS)}
        rate = what.endswith("per s")
        best = (max if rate else min)(peers, key=peers.__getitem__, default=None)
        line: dict[str, Any] = vars(row) | {"what": what, "times": times, "best": best, "ratio": None}
        if best is not None and OURS in sound:
            line["ratio"] = sound[OURS] / peers[best] if rate else peers[best] / sound[OURS]
        line["differences"] = {name: cell.difference for name, cell in cells.items() if cell.difference is not None}
        line["equal_tokens"] = {name: cell.equal for name, cell in cells.items() if cell.equal is not None}
        found.append(line | {"notes": {name: cell.note for name, cell in cells.items() if cell.note}})
    return found


def header(names: Sequence[str]) -> str:
    head = ["model", "batch", "prompt", "cache", "what", *names, "best peer", "ratio", "largest difference"]
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}"


def shown(line: dict[str, Any], names: Sequence[str], footnotes: list[str]) -> str:
    """Return a line as text. A note becomes the number of a footnote, which is added if it is a new one."""
    cells = []
    for name in names:
        parts = [_digits(line["times"][name])] if name in line["times"] else []
        if note := line["notes"].get(name):
            if note not in footnotes:
                footnotes.append(note)
            parts.append(f"[{footnotes.index(note) + 1}]")
        cells.append(" ".join(parts))
    best = "" if line["best"] is None else f"{line['best']} {_digits(line['times'][line['best']])}"
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
    difference = f"{line['differences'][OURS]:.1e}" if OURS in line["differences"] else ""
    if OURS in line["equal_tokens"]:
        difference += f", {100 * line['equal_tokens'][OURS]:.0f} % of tokens"
    prompt = f"{SHORTEST} to {line['prompt']}" if line["cache"] == PAGED else str(line["prompt"])
    start = [line["model"], str(line["batch"]), prompt, line["cache"], line["what"]]
    return f"| {' | '.join([*start, *cells, best, ratio, difference])} |"


def profile(of: str, kernels: dict[str, tuple[float, float]], most: int) -> str:
    """Return the number and time of kernels, by name, and those that take most time, as a line and one for each."""
    number, us = (sum(column) for column in zip(*kernels.values(), strict=True)) if kernels else (0.0, 0.0)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:most]
    each = (f"\n|   {_digits(took)} us, {_digits(count)} times | {name[:110]} |" for name, (count, took) in longest)
    return f"| {of} | {_digits(us)} us in {_digits(number)} kernels |" + "".join(each)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
