"""Few cases that meet every pair of choices: a greedy pairwise generator over the axes that a backend declares.

The full product of the axes is millions of cases and nearly all bugs need two things to meet (a window in a decode, a
sink under a cap). `settle` turns a combination that means nothing (a tree in an encoder) into one that does, so an axis
never has to know the others; a pair that does not survive it is not asked for.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

_TRIES = 24


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    settle: Callable[[Choice], Choice | None],
    least: int = 60,
    most: int = 400,
    seed: int = 0,
) -> list[Choice]:
    """Choices that cover every pair of values that `settle` lets stand together; at least `least` of them.

    `settle` may change a choice to keep it meaningful, or return None to refuse it. Deterministic for a seed.
    """
    rng = random.Random(seed)
    names = [name for name in axes if len(axes[name]) > 1]
    open_pairs: set[Pair] = {
        ((a, i), (b, j)) for a, b in combinations(names, 2) for i in range(len(axes[a])) for j in range(len(axes[b]))
    }
    found: list[Choice] = []
    while open_pairs and len(found) < most:
        target = min(open_pairs) if len(found) % 2 else rng.choice(sorted(open_pairs))
        best, gain = None, frozenset[Pair]()
        for _ in range(_TRIES):
            choice = {name: rng.choice(list(values)) for name, values in axes.items()}
            choice |= {name: axes[name][index] for name, index in target}
            settled = settle(choice)
            if settled is not None:
                covers = frozenset(_pairs(axes, names, settled)) & open_pairs
                if target in covers and len(covers) > len(gain):
                    best, gain = settled, covers
        open_pairs -= gain or {target}  # a pair that no try could keep together means nothing
        if best is not None:
            found.append(best)
    while len(found) < least:
        settled = settle({name: rng.choice(list(values)) for name, values in axes.items()})
        if settled is not None:
            found.append(settled)
    return found


def _pairs(axes: Mapping[str, Sequence[Any]], names: Sequence[str], choice: Choice) -> list[Pair]:
    at = [(name, list(axes[name]).index(choice[name])) for name in names if choice[name] in axes[name]]
    return list(combinations(at, 2))
