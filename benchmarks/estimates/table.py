"""The table of `benchmarks.pallas`: one line for each launch, chip and page."""

import math
from typing import Any

from benchmarks.estimates.launches import OURS, ROWS, RPA, Row, key_of, wanted
from benchmarks.estimates.programs import floors, source

#: Peers' figures from an earlier script with the same method, in microseconds, for launches that this one does not follow.
EARLIER = {("decode 64 x 4k", "v7x", 128, RPA): 283, ("decode 64 x 4k, e4m3", "v7x", 128, RPA): 387}
HEAD = (
    "launch", "chip", "page", "goal", "ours us", "spills", "HBM", "MXU", "VALU", "EUP", "XLU", "peers us (spills)",
    "best peer / ours",
)  # fmt: skip
LEGEND = """
us by libtpu's static estimate, without a TPU; HBM to XLU are floors. The simulator does not saturate HBM: where its
time is less than that of the bytes, the floor is printed, with the simulated time after `sim`; goals are for the
latter. (a) compute time without copies, which the v7x simulator does not support. (b) by an earlier script. (c) the
sum of separate launches of some of its requests or of shards of its heads (rows of this table), because the
simulator does not finish the whole; where both are known the sum is {low:.2f} to {high:.2f} times the whole. Of
most decodes it is four, and what eight take beyond four for every other four.
(d) of the kernel before its last change."""


def table(rows: dict[str, Any]) -> str:
    """Return a Markdown table: one line for each launch, chip and page for which our kernel has a row."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    places = [(row, chip, page) for row in ROWS for chip in row.chips for page in sorted(row.pages)]
    for row, chip, page in places:
        if key_of(row, chip, page, OURS) in rows:
            lines.append(f"| {' | '.join(map(str, _cells(rows, row, chip, page)))} |")
    low, high = _parts_per_whole(rows)
    return "\n".join(lines) + "\n" + LEGEND.format(low=low, high=high)


def _cells(rows: dict[str, Any], row: Row, chip: str, page: int) -> list[Any]:
    own, limit = rows[key_of(row, chip, page, OURS)], floors(row, chip, page)
    us, marks = own_of(rows, row, chip, page)
    shown = bounded(us, limit) if us else f"none: {own['error'][:60]}"
    goal, outcome = row.goals.get((chip, page)), ""
    if goal:
        outcome = f"{goal:g} {'met' if us and us <= goal else 'missed'}"
    peers = [peer_of(rows, row, chip, page, name, limit) for name in row.peers]
    best, least, ratio = min((found for _, found in peers), default=math.inf), limit["hbm_us"], ""
    if us and best < math.inf:
        ratio = f"{max(best, least) / max(us, least):.2f}"
    known = [f"{limit[name]:.0f}" if name in limit else "" for name in ("hbm_us", "mxu_us", "valu_us", "eup_us", "xlu_us")]
    texts = "; ".join(text for text, _ in peers if text)
    return [row.name, chip, page or "–", outcome, shown + marks, own.get("spills", ""), *known, texts, ratio]


def own_of(rows: dict[str, Any], row: Row, chip: str, page: int) -> tuple[float | None, str]:
    """Return our microseconds, by parts if there are none of the whole, and their marks."""
    own, marks = rows[key_of(row, chip, page, OURS)], ""
    us, of = own.get("us"), [own]
    if us is not None:
        marks = "" if own["copies"] else " (a)"
    else:
        us, parts = by_parts(rows, row, chip, page)
        marks, of = (" (a, c)", parts) if parts else ("", of)
    return us, marks + ("" if all(made["source"] == source(row.kind) for made in of) else " (d)")


def bounded(us: float, limit: dict[str, float]) -> str:
    """Return an estimate as text, or the floor of HBM with the simulated time, if that is less."""
    return f"{us:.0f}" if us >= limit["hbm_us"] else f"{limit['hbm_us']:.0f} (sim {us:.0f})"


def by_parts(rows: dict[str, Any], row: Row, chip: str, page: int) -> tuple[float | None, list[dict[str, Any]]]:
    """Return the total microseconds of a row's parts, None if one is missing, and the estimates that it is made of."""
    total = 0.0
    of: list[dict[str, Any]] = []
    for name, times in row.parts:
        (part,) = (row for row in ROWS if row.name == name)
        made = rows.get(key_of(part, chip, page, OURS), {})
        us, made_of = (made["us"], [made]) if "us" in made else by_parts(rows, part, chip, page)
        if us is None:
            return None, []
        total, of = total + times * us, of + made_of
    return total or None, of


def _parts_per_whole(rows: dict[str, Any]) -> tuple[float, float]:
    """Return the smallest and largest ratio of the sum of parts to the whole, where both are known; NaN if there is none."""
    found = []
    for row, chip, page, kernel in wanted(False):
        whole, parts = rows.get(key_of(row, chip, page, kernel), {}).get("us"), by_parts(rows, row, chip, page)[0]
        if whole and parts:
            found.append(parts / whole)
    return min(found, default=math.nan), max(found, default=math.nan)


def peer_of(rows: dict[str, Any], row: Row, chip: str, page: int, kernel: str, limit: dict[str, float]) -> tuple[str, float]:
    made = rows.get(key_of(row, chip, page, kernel))
    if made and "us" in made:
        return f"{kernel} {bounded(made['us'], limit)} ({made['spills']})", made["us"]
    known = EARLIER.get((row.name, chip, page, kernel))
    if known:
        return f"{kernel} {bounded(known, limit)} (b)", known
    return (f"{kernel}: {made['error'][:60]}" if made else ""), math.inf
