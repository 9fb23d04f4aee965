"""The pairwise generator (under a second)."""

from itertools import combinations

from attn.testing.pairwise import pairwise

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, 0, 5, 7], "d": [True, False], "e": ["only"]}


def pairs(choices: list[dict]) -> set:
    return {((m, c[m]), (n, c[n])) for c in choices for m, n in combinations(AXES, 2)}


def test_every_pair_is_covered_by_few_choices() -> None:
    choices = pairwise(AXES, lambda choice: choice, least=0)
    want = {((m, x), (n, y)) for m, n in combinations(AXES, 2) for x in AXES[m] for y in AXES[n]}
    assert pairs(choices) == want
    assert 12 <= len(choices) <= 20  # 3 x 4 is the least there can be; the full product has 48


def test_refused_pairs_are_left_out_and_all_others_covered() -> None:
    choices = pairwise(AXES, lambda choice: None if choice["a"] == 1 and choice["b"] == "x" else choice, least=0)
    assert (("a", 1), ("b", "x")) not in pairs(choices)
    assert (("a", 1), ("b", "y")) in pairs(choices) and (("a", 2), ("b", "x")) in pairs(choices)


def test_settled_choices_count_as_what_they_became() -> None:
    choices = pairwise(AXES, lambda choice: choice | {"d": False} if choice["a"] == 3 else choice, least=0)
    assert (("a", 3), ("d", True)) not in pairs(choices)
    assert (("a", 3), ("d", False)) in pairs(choices) and (("a", 2), ("d", True)) in pairs(choices)


def test_at_least_and_at_most() -> None:
    assert len(pairwise(AXES, lambda choice: choice, least=60)) == 60
    assert len(pairwise(AXES, lambda choice: choice, least=0, most=5)) == 5


def test_few_valid_choices_are_fewer_than_the_least() -> None:
    """The search ends where `to_valid` rejects every choice, as it does for a backend that its device rules out."""
    assert pairwise(AXES, lambda choice: None) == []
    only = {"a": 1, "b": "x", "c": 5, "d": True, "e": "only"}
    assert 0 < len(pairwise(AXES, lambda choice: choice if choice == only else None, least=400)) < 400


def test_the_same_seed_gives_the_same_choices() -> None:
    assert pairwise(AXES, dict, seed=3) == pairwise(AXES, dict, seed=3) != pairwise(AXES, dict, seed=4)
