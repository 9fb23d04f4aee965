"""Plot what every backend serves as a heat map."""

from collections.abc import Iterable, Sequence
from typing import Any

from attn.capabilities import Feature
from attn.pictures.picture import HIDDEN, SEEN, Picture, drawn

_HERE, _ELSEWHERE = "#009e73", SEEN
GROUPS = ("platforms", "dtypes", "kv_cache_dtypes", "attn_types", "features")


def capabilities(table: Iterable[Any], groups: Sequence[str] = GROUPS) -> Picture:
    """Plot a table of `attn.reports.report.backends()`: backends as rows, what they serve as columns. Green: serves, and the
    backend runs on this machine; blue: serves, but the backend is not available; grey: does not serve.

    `groups`: some of platforms, dtypes, kv_cache_dtypes, attn_types, features. Raises ValueError for any other, and for a table
    in which no backend has capabilities.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"groups={unknown[0]!r} is unknown; known: {', '.join(GROUPS)}")
    rows = [row for row in table if row.capabilities is not None]
    if not rows:
        raise ValueError("no backend of the table has capabilities")
    columns = [(group, value) for group in groups for value in _values(rows, group)]
    # 0 does not serve, 1 serves elsewhere, 2 serves here: the indices of the palette.
    cells = [[_served(row, group, value) * (1 if row.reasons else 2) for group, value in columns] for row in rows]
    # Names repeat between registries (TORCH_SDPA is in all three).
    several = len({row.registry for row in rows}) > 1

    def draw(axis: Any) -> None:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        palette = ListedColormap([HIDDEN, _ELSEWHERE, _HERE])
        axis.imshow(cells, cmap=palette, vmin=0, vmax=2, interpolation="nearest", aspect="auto")
        axis.set_xticks(range(len(columns)), [value for _, value in columns], rotation=90, fontsize=7)
        axis.set_yticks(range(len(rows)), [f"{row.registry} {row.name}" if several else row.name for row in rows], fontsize=7)
        axis.xaxis.tick_top()
        axis.set_xticks([x - 0.5 for x in range(len(columns))], minor=True)
        axis.set_yticks([y - 0.5 for y in range(len(rows))], minor=True)
        axis.grid(which="minor", color="white", linewidth=0.8)
        axis.tick_params(which="both", length=0)
        begin = 0
        for group in groups:
            count = sum(column_group == group for column_group, _ in columns)
            axis.axvline(begin - 0.5, color="black", linewidth=1)
            axis.text(begin - 0.4, len(rows) - 0.3, group.replace("_", " "), fontsize=8, va="top")
            begin += count
        everywhere = not any(row.reasons for row in rows)
        named = [Patch(color=_HERE, label="serves" if everywhere else "serves, available")]
        named += [] if everywhere else [Patch(color=_ELSEWHERE, label="serves, not available")]
        named += [Patch(color=HIDDEN, label="does not serve")]
        axis.legend(handles=named, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))

    return drawn(3.5 + 0.19 * len(columns), 1.8 + 0.19 * len(rows), draw)


def _values(rows: Sequence[Any], group: str) -> list[str]:
    """Return the values that any row declares in a group: features in `Feature`'s order, others in order of appearance."""
    declared = {
        value: None for row in rows for value in (row.features if group == "features" else getattr(row.capabilities, group))
    }
    return [feature.value for feature in Feature if feature.value in declared] if group == "features" else list(declared)


def _served(row: Any, group: str, value: str) -> bool:
    return value in (row.features if group == "features" else getattr(row.capabilities, group))
