"""Minimise a failing case: fewer and shorter requests, fewer heads and features."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from attn.testing.case import Case, Recipe

C = TypeVar("C")

#: The plain values of a case's fields; a failure that needs another value concerns that field.
_SHAPE = ("num_heads", "num_kv_heads", "head_size", "block_size", "num_blocks", "mla", "topk", "sparse")
PLAIN = Case.plain((*_SHAPE, "output_scale", "features", "geometry_seed", "data_seed"), poison="zero")


def features_of(case: Recipe, plain: Mapping[str, Any] = PLAIN) -> dict[str, Any]:
    """Return the fields of a case that are not plain."""
    return {name: getattr(case, name) for name in plain if getattr(case, name) != plain[name]}


def minimised(
    case: C,
    fails: Callable[[C], bool],
    attempts: int = 60,
    *,
    plain: Mapping[str, Any] = PLAIN,
    simpler: Callable[[C], Iterator[C]] | None = None,
) -> C:
    """Return the smallest simplification of `case` that was found to fail; each attempt takes one step.

    Each field of `plain` is tried once: a field that a failure needs, a smaller case needs too. `simpler` yields the steps;
    None: those of a paged case. With empty `plain` a case may be anything that `simpler` takes.
    """
    steps: Callable[[Any], Iterator[Any]] = simpler or _simpler
    # Fields first: a tree, for instance, forbids the steps that make a sequence shorter than its query.
    for name, value in plain.items():
        if getattr(case, name) != value and fails(changed := case.replace(**{name: value})):  # type: ignore[attr-defined]
            case = changed
    for _ in range(attempts):
        # Greedy: the first step that still fails is taken, and all steps are tried again from there; `attempts` bounds them.
        smaller = next((c for c in steps(case) if fails(c)), None)
        if smaller is None:
            return case
        case = smaller
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Yield the cases that are one step simpler."""
    count = len(case.query_lens)
    # A whole request less, before any is made shorter: most failures need only one.
    for r in range(count if count > 1 else 0):
        keep = [i for i in range(count) if i != r]
        yield case.replace(query_lens=tuple(case.query_lens[i] for i in keep), seq_lens=tuple(case.seq_lens[i] for i in keep))
    for r, (n, m) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        # Halves before ones, so that long requests need few attempts.
        steps = [(n // 2, m), (n, (n + m) // 2), (n, m // 2), (n - 1, m), (n, m - 1)]
        for q, s in [(n // 2, n // 2), (n - 1, n - 1)] if case.is_encoder else steps:
            # A tree's nodes must be in the cache: s >= q.
            if (q, s) != (n, m) and min(q, s) >= 0 and (not case.tree or s >= q):
                lens = [list(case.query_lens), list(case.seq_lens)]
                lens[0][r], lens[1][r] = q, s
                yield case.replace(query_lens=tuple(lens[0]), seq_lens=tuple(lens[1]))
    yield from _fewer_features(case)


def _fewer_features(case: Case) -> Iterator[Case]:
    if case.num_heads != case.num_kv_heads:
        yield case.replace(num_heads=case.num_kv_heads)
    smaller = [size for size in (16, 64) if size < case.head_size and not case.mla]
    yield from (case.replace(head_size=size) for size in smaller)
    if case.block_size != 16:
        # More, smaller pages in proportion: a cache that is too small fails as well, but by an error of `draw`.
        num_blocks = case.num_blocks and case.num_blocks * -(-case.block_size // 16)
        yield case.replace(block_size=16, num_blocks=num_blocks)
    group, scales = case.num_heads // case.num_kv_heads, {name: getattr(case, name) for name in ("k_scale", "v_scale")}
    if case.num_kv_heads > 1:
        # A scale of each kv head must have as many entries as there are heads.
        first = {name: scale[0] if isinstance(scale, tuple) else scale for name, scale in scales.items()}
        yield case.replace(num_heads=group, num_kv_heads=1, **first)
    if case.num_kv_heads > 2:
        two = {name: scale[:2] if isinstance(scale, tuple) else scale for name, scale in scales.items()}
        yield case.replace(num_heads=2 * group, num_kv_heads=2, **two)
