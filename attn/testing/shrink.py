"""Making a failing case smaller, so that what is wrong can be seen: fewer requests, shorter ones, fewer heads and features."""

from collections.abc import Callable, Iterator
from typing import Any

from attn.testing.case import Case


def minimised(case: Case, fails: Callable[[Case], bool], attempts: int = 60) -> Case:
    """The smallest case found, among simplifications of `case`, that still fails; each attempt takes one step."""
    for _ in range(attempts):
        simpler = next((c for c in _simpler(case) if fails(c)), None)
        if simpler is None:
            return case
        case = simpler
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """One step down in every direction."""
    yield from _fewer_requests(case)
    yield from _fewer_tokens(case)
    yield from _fewer_features(case)


def _fewer_requests(case: Case) -> Iterator[Case]:
    count = len(case.query_lens)
    for r in range(count if count > 1 else 0):
        keep = [i for i in range(count) if i != r]
        yield case.replace(query_lens=tuple(case.query_lens[i] for i in keep), seq_lens=tuple(case.seq_lens[i] for i in keep))


def _fewer_tokens(case: Case) -> Iterator[Case]:
    for r, (n, m) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        steps = [(n // 2, m), (n, (n + m) // 2), (n, m // 2), (n - 1, m), (n, m - 1)]
        for q, s in [(n // 2, n // 2), (n - 1, n - 1)] if case.is_encoder else steps:
            if (q, s) != (n, m) and min(q, s) >= 0 and (not case.tree or s >= q):
                lens = [list(case.query_lens), list(case.seq_lens)]
                lens[0][r], lens[1][r] = q, s
                yield case.replace(query_lens=tuple(lens[0]), seq_lens=tuple(lens[1]))


def _fewer_features(case: Case) -> Iterator[Case]:
    plain: dict[str, Any] = {
        "sinks": "", "alibi": False, "logits_soft_cap": None, "sliding_window": None, "padding": 0, "scale": None,
        "shared_prefix": 0, "inputs": "randn", "lse": False, "kv_sharing": False, "tree": 0, "dtype": "float32",
        "num_heads": case.num_kv_heads,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield case.replace(**{name: value})
    if case.num_kv_heads > 1:
        group = case.num_heads // case.num_kv_heads
        first = {n: s[0] if isinstance(s := getattr(case, n), tuple) else s for n in ("k_scale", "v_scale")}
        yield case.replace(num_heads=group, num_kv_heads=1, **first)
