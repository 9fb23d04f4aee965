"""Cases of multi-head latent attention: the same rules and properties, on latent rows that are both keys and values.

A call's keys and values are the latent rows [T, 1, L + Dr]; the up-projection belongs to the case (`Call.weights`). A driver
passes the rows as kv_c and k_pe. Batches mix decodes, which use the absorbed form, and prefills longer than any threshold,
which use the expanded form, so that both forms and the threshold are checked against the same oracle.
"""

import random
from collections.abc import Sequence
from typing import Any

from attn.capabilities import Feature
from attn.dtypes import KV_CACHE_DTYPES
from attn.testing.case import Case
from attn.testing.subject import Subject, base_case, main_dtypes

#: Decodes, drafts to verify and prefills (for most backends, more than 16 tokens), with and without context.
_Q, _M = (1, 6, 18, 1, 21), (33, 9, 18, 20, 70)
#: Sizes for backends that support any; the last has values wider than a query, and prompts in expanded form.
_DIMS = ((32, 24, 16, 40), (128, 64, 64, 32), (256, 128, 64, 128), (64, 32, 0, 48), (128, 8, 8, 24))


def latent_cases(subject: Subject, level: str) -> list[Case]:
    """Return the positive cases of a subject that serves MLA; the caller removes those that the subject does not support."""
    positive = _fixtures(subject)
    if level != "smoke":
        positive += [*properties(subject, level == "full"), *_random(subject, 60 if level == "full" else 12)]
        # The 24 of short cases would contain few of the keys that needles look for among 4096.
        more: dict[str, Any] = {} if subject.has(Feature.MLA) else {"topk": 700}
        positive.append(_at(subject, "4096 keys, needle", (1, 3), (4096, 1027), inputs="needle", num_blocks=None, **more))
    return positive


def vast(subject: Subject) -> list[Case]:
    """Return a case of a cache of more than 2**31 elements: its decodes, and a prompt's context, lie beyond them."""
    case = _at(subject, "2**31 elements", (1, 5, 18), (70, 33, 90), dtype=main_dtypes(subject)[-1], lse=False, inputs="needle")
    # twice the pages that the requests use, the last ones, which `draw._tables` gives them in so large a cache
    pages = 2**31 // (case.head_size * case.block_size) + 2 * sum(-(-m // case.block_size) for m in case.seq_lens)
    return [case.replace(num_blocks=pages)]


def _at(subject: Subject, name: str, q: Sequence[int] = _Q, m: Sequence[int] = _M, **changes: Any) -> Case:
    return base_case(subject, name, q, m, **changes)


def _fixtures(subject: Subject) -> list[Case]:
    page = _at(subject, "").block_size
    edges = (1, page - 1 or 1, page, page + 1, 2 * page)
    cases = [
        _at(subject, "mixed batch"),
        _at(subject, "mixed batch, needle", inputs="needle"),
        _at(subject, "decodes", (1,) * 5, edges, inputs="needle"),
        _at(subject, "decodes of equal length", (1,) * 3, (70,) * 3, inputs="needle"),  # others take a plan on the device
        # Up to 16 rows most backends take a request for a decode, in absorbed form; the 17 of the next case are a prefill.
        _at(subject, "drafts to verify", (4, 2, 16, 4, 3), (page + 5, 2, 16, 40, 2 * page), inputs="needle"),
        _at(subject, "prefills with context", (17, 40, 23), (page + 17, 40, 2 * page + 23), inputs="needle"),
        _at(subject, "prefills before decodes", (19, 1, 30, 2), (40, 20, 30, 9), inputs="needle"),
        _at(subject, "no request", (), ()),
        _at(subject, "no token", (0, 0), (5, 0)),
        _at(subject, "no key", (3, 1, 2, 18, 9), (0, 0, 5, 18, 0), padding=2),
        _at(subject, "dummy batch", m=(0,) * 5, padding=3),  # as in a server's warm-up: all rows are padding
        _at(subject, "dummy prefills among decodes", m=(33, 9, 0, 20, 0)),
        _at(subject, "query longer than keys", (5, 20, 3, 2, 34), (3, 1, 0, 2, 2), inputs="needle"),
        _at(subject, "padding rows", padding=5),
        _at(subject, "huge numbers in masked slots", poison="huge"),
        _at(subject, "without lse", lse=False),
        _at(subject, "explicit scale", scale=0.31, inputs="needle"),
        _at(subject, "scores of -inf, prefills", (17, 40, 23), (33, 40, 39), inputs="infinite"),  # the last: only -inf
        _at(subject, "negative scale", scale=-0.31, inputs="needle"),
    ]
    if subject.capabilities.framework == "torch":  # torch views have strides, even if they are empty
        cases += [
            _at(subject, f"no token, {stored} cache, as views", (0,), (5,), kv_cache_dtype=stored, layout="heads_first")
            for stored in subject.capabilities.kv_cache_dtypes
        ]
        cases += [
            _at(subject, f"{dtype}, views at odd addresses", dtype=dtype, layout="fused")
            for dtype in subject.capabilities.dtypes
        ]
    if subject.has(Feature.NAN_SAFE):
        cases += [
            _at(subject, f"NaN and infinities in a {array}, {words}", q, m, inputs="nonfinite", data_seed=seed)
            for words, q, m in (("decodes", (1,) * 5, edges), ("prefills", (17, 40, 23), (page + 17, 40, 2 * page + 23)))
            for array, seed in (("query", 0), ("query", 3), ("key", 1), ("key", 4))
        ]
    for dtype in main_dtypes(subject):
        cases += [_at(subject, f"{dtype}, {inputs}", dtype=dtype, inputs=inputs) for inputs in ("randn", "needle")]
        # -0.072 is about -1 / sqrt(192), the default's size: rounding errors of 16-bit scores grow with the scale.
        cases.append(_at(subject, f"{dtype}, negative scale, prompts", m=_Q, dtype=dtype, scale=-0.072, lse=False))
        cases.append(_at(subject, f"{dtype}, scores of -inf", dtype=dtype, inputs="infinite"))
    others = [dtype for dtype in subject.capabilities.dtypes if dtype not in main_dtypes(subject)]
    cases += [
        _at(subject, f"{dtype}, {inputs}", dtype=dtype, inputs=inputs) for dtype in others for inputs in ("randn", "needle")
    ]
    for stored in subject.capabilities.kv_cache_dtypes:
        # One scale for both: a latent row is key and value. `fp8_ds_mla` has scales in its rows.
        is_scaled = KV_CACHE_DTYPES[stored] in ("float8_e4m3fn", "float8_e5m2")
        scales: dict[str, Any] = {"k_scale": 0.037, "v_scale": 0.037} if is_scaled else {}
        cases += [
            _at(subject, f"{stored} cache, {dtype}", kv_cache_dtype=stored, inputs="needle", dtype=dtype, **scales)
            for dtype in main_dtypes(subject)[:2]
        ]
    cases += [
        _at(subject, f"{heads} heads", num_heads=heads, dtype=main_dtypes(subject)[-1], inputs="needle") for heads in (1, 5, 16)
    ]
    # as many heads as rows of a kernel's tile: some backends use other kernels
    cases.append(_at(subject, "64 heads", (1, 3, 1, 18), (70, 130, 5, 40), num_heads=64, inputs="needle"))
    cases += [
        _at(subject, f"block size {size}", block_size=size, num_blocks=None, inputs="needle")
        for size in subject.sizes((1, 7, 32, 64, 128), subject.block_sizes)
    ]
    if subject.latent_dims is None:
        cases += [
            _at(subject, f"L, Dn, Dr, Dv = {dims}", mla=dims, head_size=dims[0] + dims[2], inputs="needle") for dims in _DIMS
        ]
    return cases


def properties(subject: Subject, full: bool) -> list[Case]:
    """Return cases of the metamorphic properties of latent attention."""
    dtypes = main_dtypes(subject) if full else main_dtypes(subject)[:2]
    cases = []
    for dtype in dtypes:
        page = _at(subject, "").block_size
        other = [s for s in subject.sizes((32, 8, 16, 64, 128), subject.block_sizes) if s != page][:1]
        checks: list[tuple[str, Sequence[int], Sequence[int]]] = [
            *(
                (check, _Q, _M)
                for check in ("rerun", "without_mirrors", "empty_tree", "poison", "permute_pages", "table_tail", "live_nan")
            ),
            *((check, _Q, _M) for check in ("written_before", "neighbours", "batch_order", "future_edit")),
            ("chunked", (48, 30), (48, 64)),
            ("steps", (48, 30, 1), (48, 64, 9)),
            # split keys start again at position 0, where an indexer selects other keys
            *([("split_and_merge", (1,) * 5, (33, 20, 7, 40, 2))] if subject.has(Feature.MLA) else []),
            *((f"page_size={size}", _Q, _M) for size in other),
        ]
        cases += [_at(subject, f"{check.partition('=')[0]}, {dtype}", q, m, dtype=dtype, check=check) for check, q, m in checks]
    return cases


def _random(subject: Subject, count: int) -> list[Case]:
    """Return cases of random declared features; a case's name contains its seed."""
    cases = []
    for seed in range(count):
        rng = random.Random(seed)
        q = [rng.choice((0, 1, 1, 2, 16, 17, rng.randrange(3, 60))) for _ in range(rng.randrange(1, 8))]
        m = [max(0, n + rng.choice((0, 0, 1, -1, rng.randrange(120)))) for n in q]
        stored = rng.choice(subject.capabilities.kv_cache_dtypes)
        scale = 0.037 if KV_CACHE_DTYPES[stored] in ("float8_e4m3fn", "float8_e5m2") else 1.0
        cases.append(
            _at(
                subject,
                f"random {seed}",
                q,
                m,
                kv_cache_dtype=stored,
                k_scale=scale,
                v_scale=scale,
                num_blocks=None,
                dtype=rng.choice(main_dtypes(subject)),
                num_heads=rng.choice((1, 3, 4, 8)),
                padding=rng.choice((0, 0, 3)),
                block_size=rng.choice(subject.sizes((1, 16, 32, 64), subject.block_sizes)),
                inputs=rng.choice(("randn", "needle")),
                poison=rng.choice(subject.poisons),
                lse=rng.choice((True, False)) and subject.lse,
                geometry_seed=seed,
                data_seed=1000 + seed,
            )
        )
    return cases
