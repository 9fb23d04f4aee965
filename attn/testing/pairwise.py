"""Greedy pairwise generator: a few cases that cover every pair of choices from the axes that a backend declares.

The full product of the axes has millions of cases, and nearly all bugs need a combination of two choices (a window in a
decode, a sink under a cap). `to_valid` turns a meaningless combination (a tree in an encoder) into a meaningful one, so
that axes can be defined independently; pairs that it removes need not be covered.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

# Random completions of a pair, of which the one that covers most open pairs is kept.
_TRIES = 24


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    to_valid: Callable[[Choice], Choice | None],
    least: int = 60,
    most: int = 400,
    seed: int = 0,
) -> list[Choice]:
    """Return choices, at least `least` of them, that cover every pair of values that `to_valid` keeps.

    `to_valid` may change a choice to make it meaningful, or return None to reject it. If it rejects nearly all, there are fewer
    than `least`. Deterministic for a given `seed`.
    """
    rng = random.Random(seed)
    # An axis of one value is part of every choice already.
    names = [name for name in axes if len(axes[name]) > 1]
    # Values by their index in the axis: a value may be a list or None, which could neither be hashed nor sorted.
    open_pairs: set[Pair] = {
        ((a, i), (b, j)) for a, b in combinations(names, 2) for i in range(len(axes[a])) for j in range(len(axes[b]))
    }
    choices: list[Choice] = []
    while open_pairs and len(choices) < most:
        # Sorted, because the order of a set of strings differs between processes, and the choices must not.
        target = min(open_pairs) if len(choices) % 2 else rng.choice(sorted(open_pairs))
        best, gain = None, frozenset[Pair]()
        for _ in range(_TRIES):
            choice = {name: rng.choice(list(values)) for name, values in axes.items()}
            choice |= {name: axes[name][index] for name, index in target}
            valid = to_valid(choice)
            if valid is not None:
                covers = frozenset(_pairs(axes, names, valid)) & open_pairs
                # `to_valid` may have changed the values of the pair itself.
                if target in covers and len(covers) > len(gain):
                    best, gain = valid, covers
        open_pairs -= gain or {target}  # a pair that no attempt kept is taken to be meaningless
        if best is not None:
            choices.append(best)
    # Bounded, as a backend may serve so few combinations that `least` of them are never found.
    draws = _TRIES * max(0, least - len(choices))
    while draws and len(choices) < least:
        valid = to_valid({name: rng.choice(list(values)) for name, values in axes.items()})
        draws -= 1
        if valid is not None:
            choices.append(valid)
    return choices


def _pairs(axes: Mapping[str, Sequence[Any]], names: Sequence[str], choice: Choice) -> list[Pair]:
    # `to_valid` may set a value that is not on the axis ("scales" of an encoder): it is part of no pair.
    positions = [(name, list(axes[name]).index(choice[name])) for name in names if choice[name] in axes[name]]
    return list(combinations(positions, 2))
