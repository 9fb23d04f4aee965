"""Cases from combinations of declared features: a pairwise grid, and random combinations."""

import random
from collections.abc import Callable
from typing import Any

from attn.capabilities import ENCODER_TYPES, AttentionType, Feature
from attn.testing.bits import SCALED
from attn.testing.case import Case
from attn.testing.pairwise import Choice, pairwise
from attn.testing.subject import SPARSE, Subject, main_dtypes, per_head_scales


def _axes(subject: Subject) -> dict[str, list[Any]]:
    c = subject.capabilities

    def on(feature: Feature, *values: Any) -> list[Any]:
        return list(values) if subject.has(feature) else []

    return {
        "batch": list(_BATCHES),
        "dtype": main_dtypes(subject),
        "heads": [(6, 2), (4, 2), (5, 5), (8, 1)],
        "head_size": subject.sizes((64, 80, 128), c.head_sizes),
        "block_size": subject.sizes((16, 1, 5, 32, 128), subject.block_sizes),
        "attn_type": list(c.attn_types),
        "kv_cache_dtype": list(c.kv_cache_dtypes),
        "scales": ["one", "scalar", *on(Feature.PER_HEAD_SCALES, "per_head", "per_head_k", "per_head_v")],
        "window": [None, *on(Feature.SLIDING_WINDOW, 7, (20, None)), *on(Feature.TWO_SIDED_WINDOW, (4, 3))],
        "cap": [None, *on(Feature.SOFT_CAP, 2.0, 30.0)],
        "alibi": [False, *on(Feature.ALIBI, True)],
        "sinks": ["", *on(Feature.SINKS, "randn", "log_length")],
        "causal": [True, *on(Feature.NON_CAUSAL, False), *on(Feature.MIXED_CAUSAL, "mixed")],
        "tree": [0, *on(Feature.TREE_MASK, 6)],
        "spans": [0, *on(Feature.SPANS, 3, 20)],
        "prefix": [0, *on(Feature.SPANS, 4, 40)],
        "chunk_size": [0, *on(Feature.CHUNK_SIZE, 10)],
        "span_window": [False, *on(Feature.SPANS, True)],
        "kv_sharing": [False, *on(Feature.KV_SHARING, True)],
        "inputs": ["randn", "needle"],
        "poison": list(subject.poisons),
        "padding": [0, 3],
        "scale": [None, -0.17],  # a fixture has a positive one
        "lse": [True, False] if subject.lse else [False],
        **({"sparse": list(SPARSE)} if subject.has(Feature.BLOCK_SPARSE) else {}),
    }


#: Axes that need no new compiled program, except kv_sharing (whether it writes) and lse (whether it returns the LSE).
_DYNAMIC = ("kv_sharing", "inputs", "poison", "padding", "scale", "lse")


def _valid(subject: Subject, axes: dict[str, list[Any]], choice: Choice) -> Choice | None:
    """Return the choice with meaningless combinations replaced, or None if the subject does not support it."""
    choice = dict(choice)
    attn_type = choice["attn_type"]
    if attn_type != AttentionType.DECODER:
        choice |= {"causal": False, "tree": 0, "kv_sharing": False, "spans": 0, "prefix": 0, "chunk_size": 0}
    if attn_type in ENCODER_TYPES:
        # No cache: varying its dtype would be the same case several times.
        choice |= {"kv_cache_dtype": axes["kv_cache_dtype"][0], "scales": "one"}
    if choice["tree"]:
        # A tree replaces causality. In "verify" every request's rows are in the cache, as a tree's must be, and most fit into
        # the tree.
        choice |= {"causal": True, "batch": "verify"}
    if choice["kv_cache_dtype"] not in SCALED:
        choice["scales"] = "one"
    return choice if subject.serves(_from_choice(choice, 0)) else None


def grid(subject: Subject, few_programs: bool, least: int = 60) -> list[Case]:
    """Return cases that cover every pair of choices. `few_programs`: combine the axes that decide a program into few
    programs, then vary the other axes."""
    axes = _axes(subject)
    if not few_programs:
        choices = pairwise(axes, lambda choice: _valid(subject, axes, choice), least)
    else:
        fixed = {name: values for name, values in axes.items() if name not in _DYNAMIC}
        free = {name: axes[name] for name in _DYNAMIC}
        plain = {name: values[0] for name, values in free.items()}
        # First the axes that decide what is compiled, with the others at their first value, ...
        programs = pairwise(fixed, lambda choice: _valid(subject, axes, plain | choice), 0, most=_GRID_PROGRAMS)

        def vary(choice: Choice) -> Choice | None:
            # ... then the others, over these programs: `program` is an axis like any other, so each meets every value of them.
            program = programs[choice["program"]]
            # Decodes have a shape of their own after padding, the other batches share one (`_BATCHES`), so these may be
            # exchanged.
            batch = program["batch"] if "decode" in (program["batch"], choice["batch"]) or program["tree"] else choice["batch"]
            # with two programs rather than four, both values of each and all four pairs still occur
            odd = sum(p["attn_type"] == AttentionType.DECODER for p in programs[: choice["program"]]) % 2
            shared = choice["kv_sharing"] if len(axes["lse"]) == 1 else choice["lse"] == bool(odd)
            shared &= len(axes["kv_sharing"]) > 1
            valid = _valid(subject, axes, {**program, **choice, "batch": batch, "kv_sharing": shared})
            # `pairwise` counts the pairs of the choice that it gets back, which must contain the axis.
            return None if valid is None else valid | {"program": choice["program"]}

        choices = pairwise({"program": range(len(programs)), "batch": axes["batch"], **free}, vary, least)
    return [_from_choice(choice, i) for i, choice in enumerate(choices)]


_GRID_PROGRAMS = 10


def _from_choice(choice: Choice, index: int) -> Case:
    heads, size = choice["heads"], choice["block_size"]
    q, m = _BATCHES[choice["batch"]](size)
    scalar, per_head = {"k_scale": 0.037, "v_scale": 0.0215}, per_head_scales(heads[1])
    scales: dict[str, dict[str, Any]] = {
        "one": {},
        "scalar": scalar,
        "per_head": per_head,
        "per_head_k": per_head | {"v_scale": 1.0},
        "per_head_v": per_head | {"k_scale": 0.037},
    }
    return Case(
        f"grid {index}: {choice['batch']}",
        q,
        q if choice["attn_type"] in ENCODER_TYPES else m,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        sliding_window=choice["window"],
        logits_soft_cap=choice["cap"],
        # Enough for every batch, and few different numbers, which are part of a compiled shape.
        num_blocks=128 if size < 5 else 64 if size <= 32 else 32,
        geometry_seed=index,
        data_seed=1000 + index,
        **{name: value for name, value in choice.items() if name in Case.__dataclass_fields__},
        **scales[choice["scales"]],
    )


#: Batches for pages of P tokens: (query_lens, seq_lens). All but the decodes have 5 to 8 requests, 33 to 61 rows and a
#: longest query of 17 to 20, which is one shape after padding to powers of two.
_BATCHES: dict[str, Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "decode": lambda p: ((1,) * 5, (1, p, p + 1, 2 * p + 3, 17)),
    "prefill": lambda p: ((1, 7, min(p + 1, 17), 19, 12), (1, 7, min(p + 1, 17), 19, 12)),
    "context": lambda p: ((5, 17, 3, 1, 9), (p + 5, 2 * p + 17, p + 2, 2 * p, p + 8)),
    "mixed": lambda p: ((1, 1, 7, 17, 1, 8), (2 * p, 17, 7, 2 * p + 17, p + 1, 8)),
    "verify": lambda p: ((4, 6, 3, 1, 17, 3), (4, p + 6, 2 * p + 3, p + 1, 17, 20)),
    "edges": lambda p: ((0, 3, 1, 0, 2, 19, 9), (5, 0, 2 * p - 1, 0, p + 2, p + 19, 9)),
    "longer": lambda p: ((5, 20, 3, 2, 4), (3, 9, 0, 2, p + 4)),
}


def random_cases(subject: Subject, count: int) -> list[Case]:
    """Return cases of random declared features; a case's name contains its seed."""
    axes, cases, seed = _axes(subject), list[Case](), 0
    while len(cases) < count and seed < 40 * count:
        rng = random.Random(seed)
        choice = _valid(subject, axes, {name: rng.choice(values) for name, values in axes.items()})
        q = [rng.choice((0, 1, 1, 2, rng.randrange(3, 40))) for _ in range(rng.randrange(1, 8))]
        m = [max(0, n + rng.choice((0, 0, 1, -1, rng.randrange(120)))) for n in q]
        padding, width = rng.choice((0, 0, 1, 4)), rng.choice((None, rng.randrange(1, 60)))
        seed += 1
        if choice is None:
            continue
        case = _from_choice(choice, seed - 1)
        m = q if case.is_encoder else [max(a, b) for a, b in zip(q, m, strict=True)] if case.tree else m
        # Another width where the choice has a window; a pair, too, becomes one.
        window = case.sliding_window and (width or case.sliding_window)
        shape = {"query_lens": tuple(q), "seq_lens": tuple(m), "padding": padding, "sliding_window": window, "num_blocks": None}
        cases.append(case.replace(name=f"random {seed - 1}", **shape))
    return cases
