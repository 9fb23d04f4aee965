"""Plots of masks, draft trees and attention weights, computed by the oracle.

A mask is computed by calling `attn.reference.attention` with equal scores and one-hot values: the output is the weight of
each key, so a plot cannot disagree with the definition.
"""

from collections.abc import Callable, Sequence
from typing import Any

from attn.arguments import positive_int
from attn.pictures.picture import HIDDEN, SEEN, SPECIAL, Picture, drawn

_INCHES = 0.16  #: size of a mask's cell
_LEAST, _MOST = 2.2, 7.0  #: limits of a panel's size, in inches
_TICKS = 12  #: numbers along an axis of weights


def weights_of(query: Any, key: Any, sinks: Any = None, **rules: Any) -> Any:
    """Return the weight of each key for each query: [H, n, m] float64, plus a column for the sink if `sinks` [H] are given.

    query: [n, H, D]; key: [m, K, D]; rules are those of `attn.reference.attention`.
    """
    import numpy as np

    from attn import reference

    m, kv_heads = np.shape(key)[:2]
    # Value j is the j-th unit vector, so column j of an output is the weight of key j.
    values = np.broadcast_to(np.eye(m)[:, None], (m, kv_heads, m))
    out, _ = reference.attention(query, key, values, sinks=sinks, **rules)
    # [n, H, m] -> [H, n, m]. With a sink the weights of a row add up to less than 1; the rest is the sink's.
    weights = out.transpose(1, 0, 2)
    return weights if sinks is None else np.concatenate([weights, 1 - weights.sum(-1, keepdims=True)], -1)


def visible(n: int, m: int | None = None, **rules: Any) -> Any:
    """Return which of m keys (default n) each of n queries sees, bool [heads, n, m]; one head unless a rule has more.

    rules are those of `attn.reference.attention`: causal, window, mask, bias, query_positions, key_positions; or those of
    `attn.reference.visible_mask`: causal, window, spans, prefix, chunk_size, span_window. Raises ValueError unless n and m are
    positive ints.
    """
    import numpy as np

    from attn.reference import visible_mask

    n = positive_int("n", n)
    m = n if m is None else positive_int("m", m)
    # `reference.attention` has no such rules: it takes their mask.
    if rules.keys() & {"spans", "prefix", "chunk_size", "span_window"}:
        return visible_mask(n, m, **{"causal": False, **rules})[None]
    shapes = [np.shape(rules[name]) for name in ("mask", "bias") if rules.get(name) is not None]
    heads = max((shape[0] for shape in shapes if len(shape) == 3), default=1)
    # Equal scores give every visible key the same weight above 0.
    return weights_of(np.zeros((n, heads, 1)), np.zeros((m, heads, 1)), scale=1.0, **rules) > 0


def mask(n: int, m: int | None = None, *, title: str = "", **rules: Any) -> Picture:
    """Plot which keys (columns) n queries (rows) see; a panel per head if heads differ.

        mask(8)                                       everything
        mask(8, causal=True, window=(3, 0))           a sliding window of four keys
        mask(2, 10, causal=True)                      two new tokens after eight
        mask(6, causal=True, spans=attn.spans_of([[-1, 0, 0, 0, -1, -1]], [6]))   an image of three tokens

    rules: those of `attn.reference.attention`, with `window=(left, right)`, inclusive; or spans, prefix, chunk_size and
    span_window beside causal and window (docs/semantics.md §18).
    """
    seen = visible(n, m, **rules)
    # One panel if all heads see the same.
    seen = seen[:1] if (seen == seen[0]).all() else seen
    names = [title] if len(seen) == 1 else [f"{title} head {head}".strip() for head in range(len(seen))]
    return _panels(list(zip(names, seen, strict=True)))


def masks(n: int = 12) -> Picture:
    """Plot every kind of mask that a request may need, for n tokens."""
    n = positive_int("n", n)
    return _panels([(name, example(n)[0]) for name, example in KINDS.items()], columns=4)


#: A draft tree: two children of the root, each with children.
TREE: Sequence[Sequence[int]] = ((0,), (1,), (0, 0), (0, 1), (1, 0))
#: Kind of mask -> visibility for n tokens, bool [1, n, m].
KINDS: dict[str, Callable[[int], Any]] = {
    "full (encoder)": lambda n: visible(n),
    "causal": lambda n: visible(n, causal=True),
    "causal after a context": lambda n: visible(n // 2, n, causal=True),
    "cross (encoder's keys)": lambda n: visible(n // 2, n),
    "sliding window of 4": lambda n: visible(n, causal=True, window=(3, 0)),
    "two-sided window (2, 2)": lambda n: visible(n, window=(2, 2)),
    "chunks of 4 (Llama 4)": lambda n: visible(n, causal=True, chunk_size=4),
    "prefix of 4 (both ways)": lambda n: visible(n, causal=True, prefix=min(4, n)),
    "spans (images), causal": lambda n: visible(n, causal=True, spans=_images(n)),
    "block-sparse: 1 local, every 3rd": lambda n: visible(n, mask=_blocks(n)),
    "tree after a context": lambda n: visible(len(TREE) + 1, n, mask=_tree_mask(TREE, n)),
    "chosen keys (sparse MLA)": lambda n: visible(n, causal=True, mask=_chosen(n, 4)),
    "more rows than keys": lambda n: visible(n, n // 2, causal=True),
}


def _blocks(n: int) -> Any:
    """Return a block-sparse mask of n tokens."""
    from attn.reference import block_sparse_mask

    return block_sparse_mask(n, n, num_heads=1, block_size=2, local_blocks=1, vert_stride=3, homo_head=True)


def _images(n: int) -> Any:
    """Return spans of n tokens, of which every other three are an image."""
    from attn.backends.metadata import spans_of

    return spans_of([[i // 3 if i // 3 % 2 else -1 for i in range(n)]], [n])


def _tree_mask(choices: Sequence[Sequence[int]], m: int) -> Any:
    """Return the tree's mask after a context, m keys in total."""
    import numpy as np

    from attn.reference import tree_mask_from_choices

    tree = tree_mask_from_choices(choices)
    if m < len(tree):
        raise ValueError(f"m={m} keys are fewer than the tree's {len(tree)} nodes")
    return np.concatenate([np.ones((len(tree), m - len(tree)), bool), tree], axis=1)


def _chosen(n: int, count: int) -> Any:
    """Return a mask of `count` keys per row, as an indexer would select them."""
    import numpy as np

    scores = np.random.default_rng(0).random((n, n))
    # Below every drawn score (0 to 1), so that later keys are chosen only where earlier ones run out; `causal` hides them.
    scores[np.arange(n)[:, None] < np.arange(n)] = -1.0
    chosen = np.zeros((n, n), bool)
    np.put_along_axis(chosen, np.argsort(-scores, 1)[:, :count], True, 1)
    return chosen


def tree(choices: Sequence[Sequence[int]], context: int = 4) -> Picture:
    """Plot a draft tree (a path of child indices per node, as for `attn.reference.tree_mask_from_choices`) and its mask, after
    `context` tokens that every node sees."""
    seen = visible(len(choices) + 1, context + len(choices) + 1, mask=_tree_mask(choices, context + len(choices) + 1))[0]
    nodes = {(): 0} | {tuple(path): number for number, path in enumerate(choices, 1)}

    def draw(axes: Any) -> None:
        left, right = axes
        points = _layout(list(nodes))
        for path, (x, y) in points.items():
            if path:
                px, py = points[path[:-1]]
                left.plot([px, x], [py, y], color="black", linewidth=0.8, zorder=1)
            left.scatter([x], [y], s=260, color=SPECIAL if not path else SEEN, zorder=2)
            left.text(x, y, str(nodes[path]), ha="center", va="center", color="white", fontsize=9, zorder=3)
        left.set(title="the tree: nodes are draft tokens", ylabel="depth", xticks=[])
        depths = sorted({-y for _, y in points.values()})
        left.set_yticks([-depth for depth in depths], [str(depth) for depth in depths])
        left.margins(0.2)
        left.set_frame_on(False)
        _grid(right, seen, "what each node sees")
        right.axvline(context - 0.5, color=SPECIAL, linewidth=1.5)

    return drawn(8, max(_LEAST, _INCHES * len(seen) + 1.2), draw, 1, 2)


def _layout(paths: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, int]]:
    """Return each node's position: leaves side by side, a parent above the middle of its children."""
    children = {path: [child for child in paths if child and child[:-1] == path] for path in paths}
    leaves = sorted(path for path in paths if not children[path])
    positions = {path: (float(x), -len(path)) for x, path in enumerate(leaves)}
    # From the leaves up: a parent's children have their places first.
    for path in sorted(paths, key=len, reverse=True):
        below = [positions[child][0] for child in children[path]]
        if below:
            positions[path] = (sum(below) / len(below), -len(path))
    return positions


def weights(
    query: Any, key: Any, *, sinks: Any = None, heads: Sequence[int] | None = None, labels: Sequence[str] = (), **rules: Any
) -> Picture:
    """Plot the weight of each key for each query, a heat map per head, from the float64 oracle; a sink is the last column.
    Keys that a query does not see are grey, which no weight is.

    query: [n, H, D]; key: [m, K, D], NumPy; `heads`: heads to plot (default: all); `labels`: of the m keys; rules: those of
    `attn.reference.attention` (causal, window, logits_soft_cap, alibi_slopes, mask, ...).
    """
    import numpy as np

    weights = weights_of(query, key, sinks, **rules)
    # Seen is computed without scores: a weight may underflow to 0 for a key that is seen.
    masking = {name: value for name, value in rules.items() if name not in ("alibi_slopes", "logits_soft_cap", "scale")}
    seen = weights_of(np.zeros_like(query), np.zeros_like(key), scale=1.0, **masking) > 0
    seen = np.pad(seen, ((0, 0), (0, 0), (0, weights.shape[-1] - seen.shape[-1])), constant_values=True)  # the sink
    shown = range(len(weights)) if heads is None else heads
    if not len(shown):
        raise ValueError(f"heads={heads!r}: must name at least one of {len(weights)} heads")
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)

    def draw(axes: Any) -> None:
        from matplotlib.patches import Patch

        flat = _flat(axes)
        for axis, head in zip(flat, shown, strict=False):
            axis.set_facecolor(HIDDEN)
            cells = np.ma.masked_array(weights[head], ~seen[head])
            image = axis.imshow(cells, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            axis.set(title=f"head {head}", xlabel="key", ylabel="query")
            names = [*(labels or map(str, range(np.shape(key)[0]))), *(["sink"] if sinks is not None else [])]
            # Labels of tokens are all shown, since the reader looks a word up; numbers only as many as an axis holds.
            every = 1 if labels else -(-len(names) // _TICKS)
            ticks = [x for x in range(len(names)) if x % every == 0 or names[x] == "sink"]
            axis.set_xticks(ticks, [names[x] for x in ticks], rotation=90 if labels or sinks is not None else 0)
            axis.set_yticks(range(0, len(cells), -(-len(cells) // _TICKS)))
            axis.tick_params(labelsize=7)
        for axis in flat[len(shown) :]:
            axis.set_axis_off()
        flat[0].figure.colorbar(image, ax=flat, shrink=0.8, label="weight")
        if not seen.all():
            grey = Patch(facecolor=HIDDEN, edgecolor="grey", label="not seen")
            flat[0].figure.legend(handles=[grey], loc="outside lower right", fontsize=8, frameon=False)

    return drawn(2.7 * columns + 0.9, 2.9 * rows + 0.2, draw, rows, columns)


def _panels(panels: Sequence[tuple[str, Any]], columns: int = 4) -> Picture:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    widest = max(seen.shape[1] for _, seen in panels)
    side = min(max(_INCHES * widest + 0.8, _LEAST), _MOST)
    tallest = max(seen.shape[0] for _, seen in panels)

    def draw(axes: Any) -> None:
        flat = _flat(axes)
        for axis, (name, seen) in zip(flat, panels, strict=False):
            _grid(axis, seen, name)
        for axis in flat[len(panels) :]:
            axis.set_axis_off()

    return drawn(side * columns, min(max(_INCHES * tallest + 0.9, 1.4), _MOST) * rows, draw, rows, columns)


def _flat(axes: Any) -> list[Any]:
    # matplotlib returns one Axes, not an array, for one panel.
    return list(axes.flat) if hasattr(axes, "flat") else [axes]


def _grid(axis: Any, seen: Any, title: str) -> None:
    from matplotlib.colors import ListedColormap

    axis.imshow(seen, cmap=ListedColormap([HIDDEN, SEEN]), vmin=0, vmax=1, interpolation="nearest")
    n, m = seen.shape
    axis.set_xticks([x - 0.5 for x in range(m + 1)], minor=True)
    axis.set_yticks([y - 0.5 for y in range(n + 1)], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    axis.tick_params(labelsize=7)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("key", fontsize=8)
    axis.set_ylabel("query", fontsize=8)
