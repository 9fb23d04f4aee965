"""Charts of `attn bench` reports: rows under their device's roofline and the backends' times, or a ratio per random batch."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from attn.pictures.picture import COLOURS, Picture, drawn
from attn.tools.bench.case import KINDS, BenchCase, abbreviated, flops, nbytes
from attn.tools.bench.judge import case_of, geometric_mean, timed
from attn.tools.bench.summary import BatchOutcome, outcomes


def chart(report: dict[str, Any]) -> Picture:
    """Draw a report as `attn bench --json` writes it: a roofline per framework, and below it a bar per backend and case.

    The roof is the measured rate of a copy and a matrix product in the same run. Rows of dense backends, which count no bytes,
    have bars only. Rows that are wrong or refused are not drawn. A report of `--random` is drawn by `ratios`. Raises ValueError
    for a report without a right row.
    """
    if "random" in report:
        return ratios(report)
    rows = [row for row in report["rows"] if timed(row)]
    if not rows:
        raise ValueError("no right row to draw")
    names = list(dict.fromkeys(row["backend"] for row in rows))
    colours = dict(zip(names, cycle(COLOURS), strict=False))
    frameworks = list(dict.fromkeys(row.get("framework", "torch") for row in rows if "batch" in row))
    cases = list(dict.fromkeys((row.get("framework", "torch"), _case(row)) for row in rows))

    def draw(axes: Any) -> None:
        # matplotlib returns one axis, or a sequence of several.
        *roofs, below = axes if frameworks else [axes]
        for axis, framework in zip(roofs, frameworks, strict=True):
            of_framework = [row for row in rows if row.get("framework", "torch") == framework]
            _roofline(axis, of_framework, colours, _origin(report, framework))
        _bars(below, rows, cases, names, colours, len(frameworks) > 1)

    heights = [3.8] * len(frameworks) + [1.2 + 0.2 * (len(rows) + len(cases))]
    return drawn(9, sum(heights), draw, len(heights), heights=heights)


def _origin(report: dict[str, Any], framework: str) -> str:
    """Describe where and when the rows of a framework were measured."""
    about = report[framework] if isinstance(report.get(framework), dict) else report  # "torch" may be its version
    return f"{about.get('device', framework)} ({framework}), {report.get('date', '')}"


def ratios(report: dict[str, Any]) -> Picture:
    """Draw a dot a batch: the time of the fastest other kernel relative to that of the selected backend, above 1 where the
    selected one is faster. Raises ValueError for a report in which no batch has both times."""
    compared = [(outcome, outcome.ratio) for outcome in outcomes(report["rows"]) if outcome.ratio is not None]
    if not compared:
        raise ValueError("no batch has the times of two kernels")
    frameworks = list(dict.fromkeys(outcome.framework for outcome, _ in compared))

    def draw(axes: Any) -> None:
        for axis, framework in zip(axes if len(frameworks) > 1 else [axes], frameworks, strict=True):
            pairs = [(outcome, ratio) for outcome, ratio in compared if outcome.framework == framework]
            mean = f"{geometric_mean([ratio for _, ratio in pairs]):.2f} in the mean of {len(pairs)} batches"
            _dots(axis, pairs, f"{_origin(report, framework)}: {mean}")

    return drawn(8, 3.6 * len(frameworks), draw, len(frameworks))


#: Ratios above it are drawn there.
_HIGHEST = 10.0


def _dots(axis: Any, compared: Sequence[tuple[BatchOutcome, float]], title: str) -> None:
    """Plot ratios over the selected backend's times: a colour for each fastest other kernel, a marker for each kind."""
    from matplotlib.lines import Line2D

    rivals = list(dict.fromkeys(outcome.other["backend"] for outcome, _ in compared if outcome.other is not None))
    colours, markers = dict(zip(rivals, cycle(COLOURS), strict=False)), dict(zip(KINDS, "osD^v", strict=False))
    for outcome, ratio in compared:
        colour = colours[outcome.other["backend"]] if outcome.other is not None else "black"
        where = [outcome.row["ms"]], [min(ratio, _HIGHEST)]
        axis.plot(*where, markers[outcome.batch_type], color=colour, markersize=6, markeredgecolor="black", markeredgewidth=0.4)
    axis.axhline(1, color="black", linewidth=0.8, zorder=1)
    axis.set(xscale="log", yscale="log", title=title, xlabel="ms, selected backend", ylabel="best other / selected")
    axis.set_ylim(
        min(0.75, min(ratio for _, ratio in compared) / 1.1), max(2.2, min(_HIGHEST, max(r for _, r in compared)) * 1.1)
    )
    low, high = axis.get_ylim()
    ticks = [tick for tick in (0.25, 0.5, 0.8, 1, 1.25, 1.6, 2, 3, 5, _HIGHEST) if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" if tick < _HIGHEST else "10 or more" for tick in ticks])
    low, high = axis.get_xlim()
    axis.set_xticks([tick for tick in (1e-3, 1e-2, 0.1, 1, 10, 100, 1000) if low <= tick <= high])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.yaxis.minorticks_off()
    axis.grid(True, linewidth=0.3, alpha=0.5)
    kinds = [label for label in KINDS if any(outcome.batch_type == label for outcome, _ in compared)]
    handles = [Line2D([], [], color="grey", marker=markers[label], linestyle="none", label=label) for label in kinds]
    for name in rivals:
        handles.append(Line2D([], [], color=colours[name], marker="s", linestyle="none", label=f"fastest other: {name}"))
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))


def draw(file: str | None, report: dict[str, Any]) -> None:
    """Write a report's chart to `file`, if given."""
    if file:
        chart(report).save(file)
        print(f"drawn: {file}")


def _case(row: dict[str, Any]) -> str:
    return f"{row.get('name', '')} {case_of(row)}".strip()


def _roofline(axis: Any, rows: Sequence[dict[str, Any]], colours: dict[str, str], title: str) -> None:
    """Plot the attained rate over operations per byte, below the two ceilings, which are derived from the rows."""
    # Every row's quotient is the ceiling. Matrix products have one for each dtype, of which the highest is drawn.
    copy = max(row["gb_per_s"] / row["of_copy"] for row in rows) / 1e3  # TB/s
    gemm = max(row["tflop_per_s"] / row["of_gemm"] for row in rows)
    points = [(flops(BenchCase.of(row)) / nbytes(BenchCase.of(row)), row) for row in rows]
    low = min([x for x, _ in points] + [gemm / copy]) / 3
    high = max([x for x, _ in points] + [gemm / copy]) * 3
    axis.plot([low, gemm / copy, high], [low * copy, gemm, gemm], color="black", linewidth=1.2)
    above = {"fontsize": 8, "va": "bottom", "rotation_mode": "anchor"}
    slope = 1.3 * copy  # of the diagonal through the label, 1.3 times above the roof's
    axis.text(
        1.3 * low,
        1.3 * low * slope,
        f"copy: {1e3 * copy:.3g} GB/s",
        rotation=math.degrees(math.atan(slope)),
        transform_rotates_text=True,
        **above,
    )
    axis.text(high, gemm * 1.1, f"matrix product: {gemm:.3g} TFLOP/s", ha="right", **above)
    for name, colour in colours.items():
        points_of_backend = [(x, row) for x, row in points if row["backend"] == name]
        for x, row in points_of_backend:
            chosen = "o" if row.get("chosen") else "s"
            axis.plot(x, row["tflop_per_s"], chosen, color=colour, markersize=6, markeredgecolor="black", markeredgewidth=0.4)
    sides: dict[float, int] = {}  # labels already near this x
    for case in dict.fromkeys(case_of(row) for _, row in points):
        # A case's backends are above one another at the same x: the highest is labelled.
        x, row = max((point for point in points if case_of(point[1]) == case), key=lambda point: point[1]["tflop_per_s"])
        # A tenth of a decade: labels that near would overlap, so they alternate between left and right.
        near = round(math.log10(x), 1)
        sides[near] = sides.get(near, 0) + 1
        label, offset = abbreviated(case).partition(" ")[0], ((7, "left") if sides[near] % 2 else (-7, "right"))
        axis.annotate(
            label, (x, row["tflop_per_s"]), (offset[0], 0), textcoords="offset points", ha=offset[1], va="center", fontsize=7
        )
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title=title)
    axis.set_ylim(top=3 * gemm)
    axis.grid(True, which="both", linewidth=0.3, alpha=0.5)


def _bars(
    axis: Any,
    rows: Sequence[dict[str, Any]],
    cases: Sequence[tuple[str, str]],
    names: Sequence[str],
    colours: dict[str, str],
    several: bool,
) -> None:
    """Plot milliseconds, a group of bars per case; whiskers span p20 to p80."""
    from matplotlib.patches import Patch

    at, ticks, labelled = 0.0, [], set()
    for framework, case in cases:
        of_case = [row for row in rows if (row.get("framework", "torch"), _case(row)) == (framework, case)]
        # The same order in every case, as the colours have.
        of_case.sort(key=lambda row: names.index(row["backend"]))
        name = abbreviated(case)
        ticks.append((at + (len(of_case) - 1) / 2, f"{name} ({framework})" if several else name))
        for row in of_case:
            ms, label = row["ms"], row["backend"]
            spread = [[ms - row["ms_p20"]], [row["ms_p80"] - ms]]
            bar = {"color": colours[label], "edgecolor": "black" if row.get("chosen") else "none", "linewidth": 0.8}
            axis.barh(at, ms, 0.85, xerr=spread, error_kw={"linewidth": 0.8}, **bar)
            labelled.add(label)
            axis.annotate(f" {ms:.3g}", (row["ms_p80"], at), va="center", fontsize=7)
            at += 1
        at += 0.8
    axis.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="ms, median with p20 to p80", xscale="log")
    handles = [Patch(color=colours[name], label=name) for name in names if name in labelled]
    if any(row.get("chosen") for row in rows):
        handles.append(Patch(facecolor="none", edgecolor="black", label="framed, round: the selector's choice"))
    axis.figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=4, frameon=False)
