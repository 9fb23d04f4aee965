"""Fixed cases: known bugs of attention libraries, each feature on its own, and contexts and caches of unusual sizes."""

from collections.abc import Callable, Sequence
from typing import Any

from attn.capabilities import ENCODER_TYPES, AttentionType, Feature
from attn.testing.bits import SCALED, SELF_SCALED
from attn.testing.case import Case
from attn.testing.subject import M_LENS, Q_LENS, SPARSE, Subject, base_case, main_dtypes, per_head_scales

#: Makes a case of the subject's usual shape: its name, the lengths of queries and keys, and changed fields.
Make = Callable[..., Case]

_ONES = (1,) * 5  #: five decodes, or five requests of one key


def fixtures(subject: Subject) -> list[Case]:
    """Return the cases of known bugs: boundary lengths, extreme scores and each feature on its own."""

    def make(name: str, q: Sequence[int] = Q_LENS, m: Sequence[int] = M_LENS, **changes: Any) -> Case:
        return base_case(subject, name, q, m, **changes)

    page = make("").block_size
    # `or 1`: a page of one token has no length below it.
    edges = (1, page - 1 or 1, page, page + 1, 2 * page)
    return [
        *_lengths(make, page, edges),
        *_features(make),
        *(_non_finite(make, edges) if subject.has(Feature.NAN_SAFE) else ()),
        *(make(f"pattern {pattern}", sparse=pattern) for pattern in (SPARSE if subject.has(Feature.BLOCK_SPARSE) else ())),
        *(case for dtype in main_dtypes(subject) for case in _scores(make, dtype, edges)),
        *(_views(make, subject, page, edges) if subject.capabilities.framework == "torch" else ()),
        *_attn_types(make, subject),
        *(reach(make, subject.compiles) if subject.has(Feature.SPANS) else ()),
        *(_sized(subject, case) for stored in subject.capabilities.kv_cache_dtypes for case in _caches(make, stored)),
    ]


def _lengths(make: Make, page: int, edges: tuple[int, ...]) -> list[Case]:
    """Return batches of boundary lengths: around a page's size, of no tokens, no keys and no requests."""
    return [
        make("mixed batch"),
        make("mixed batch, needle", inputs="needle"),
        make("page boundaries, decode", _ONES, edges),
        make("page boundaries, prefill", (1, *(min(n, 17) for n in edges[1:4]), 3), (1, *edges[1:4], 3), inputs="needle"),
        make(
            "page boundaries, context",
            (2, 3, 2, 1, 18, 9),
            (page + 1, page + 3, 2 * page, 2 * page + 1, page + 18, 9),
            inputs="needle",
        ),
        make("no request", (), ()),
        make("no token", (0, 0), (5, 0)),
        make("no key", (3, 1, 2, 18, 9), (0, 0, 5, 18, 0), padding=2),
        make("dummy batch", m=(0,) * 5, padding=3),  # as in a server's warm-up: all rows are padding
        make("empty among others", (0, 3, 1, 0, 2, 18, 9), (5, 7, 17, 0, 2, 18, 9), inputs="needle"),
        make("query longer than keys", (5, 20, 3, 2, 4), (3, 1, 0, 2, 30), inputs="needle"),
        # As in FlashInfer's tests (flashinfer#4267): 33 rows before the sequence's start must be 0, with an LSE of -inf.
        make("query much longer than keys", (34, 2), (1, 2)),
        make("padding rows", padding=5),
    ]


def _features(make: Make) -> list[Case]:
    """Return each feature on its own, and pairs that have gone wrong together."""
    return [
        make("huge numbers in masked slots", poison="huge"),
        make("without lse", lse=False),
        make("explicit scale", scale=0.31, inputs="needle"),
        make("negative scale", scale=-0.31, inputs="needle"),
        make("sharing another layer's cache", kv_sharing=True),
        make("window of 1", sliding_window=1),
        make("window of 16", sliding_window=16, inputs="needle"),
        make("window of 17", sliding_window=17, inputs="needle"),
        make("window (3, 2)", sliding_window=(3, 2), causal=False, inputs="needle"),
        make("scores of 1e4 under a cap", inputs="loud", logits_soft_cap=30.0),
        make("cap of 2", inputs="needle", logits_soft_cap=2.0),
        make("alibi", alibi=True),
        # Distances of later keys are positive: a bias of slope * (j - p) without the absolute value would raise them.
        make("alibi without causality", alibi=True, causal=False),
        make("sinks near ln of the length", sinks="log_length"),
        make("sinks in rows without keys", (3, 1, 2, 18, 9), (0, 0, 5, 18, 0), sinks="randn"),
        make("scores of -inf, prompts, sinks", m=Q_LENS, inputs="infinite", sinks="randn"),
        make("sinks under a cap", sinks="log_length", logits_soft_cap=2.0),
        make("alibi under a cap", alibi=True, logits_soft_cap=2.0),
        make("not causal", causal=False, inputs="needle"),
        make("tree", (6, 4, 18, 1, 6), (20, 4, 18, 9, 40), tree=6),
        make("fp8 output", output_scale=0.01),
        make("fp8 output, saturated, sinks", output_scale=0.001, sinks="randn"),
        make("tree in a window", (6, 4, 18, 1, 6), (20, 4, 18, 9, 40), tree=6, sliding_window=5),
    ]


def _non_finite(make: Make, edges: tuple[int, ...]) -> list[Case]:
    """Return cases of NaN and infinities that rows see, which must reach these rows alone."""
    return [
        make("NaN and infinities in values, spans", m=Q_LENS, inputs="nonfinite", data_seed=2, spans=4),
        make("NaN and infinities in values, prefix", inputs="nonfinite", data_seed=2, prefix=5, sliding_window=4),
        *(
            make(f"NaN and infinities in {array}, {words}", q, m, inputs="nonfinite", data_seed=seed)
            for words, q, m in (("decodes of a key", _ONES, _ONES), ("decodes", _ONES, edges), ("prompts", Q_LENS, Q_LENS))
            # `draw._spoil` takes the seed modulo 3 as the array to spoil.
            for array, seed in (("a query", 0), ("a key", 1), ("a value", 2), ("another value", 5))
        ),
    ]


def _scores(make: Make, dtype: str, edges: tuple[int, ...]) -> list[Case]:
    """Return a dtype's cases of ordinary, extreme and known scores."""
    return [
        make(f"{dtype}, randn", dtype=dtype),
        make(f"{dtype}, needle", dtype=dtype, inputs="needle"),
        make(f"{dtype}, negative scale, prompts", m=Q_LENS, dtype=dtype, scale=-0.31, lse=False),
        make(f"{dtype}, scores of -inf", dtype=dtype, inputs="infinite"),
        make(f"{dtype}, scores of -inf, decodes", _ONES, edges, dtype=dtype, inputs="infinite"),
        make(f"{dtype}, constant V", dtype=dtype, inputs="constant", check="constant_value"),
        # long enough that sums in 16 bits miss the value by more than the unit that rule C leaves
        make(f"{dtype}, constant V, long", _ONES, (300, 257, 400, 90, 700), dtype=dtype, inputs="constant", num_blocks=None),
        make(f"{dtype}, one key of score -524288", _ONES, _ONES, dtype=dtype, inputs="far", scale=0.125, check="single_key"),
        make(f"{dtype}, one key of any score", _ONES, _ONES, dtype=dtype, inputs="magnitudes", check="single_key"),
    ]


def _views(make: Make, subject: Subject, page: int, edges: tuple[int, ...]) -> list[Case]:
    """Return cases of views at odd addresses and strides, for kernels that read vectors of 16 bytes."""
    views: dict[str, Any] = {"layout": "fused", "lse": False}
    decoders = [
        make(f"{dtype}, {words}, views at odd addresses", q, m, dtype=dtype, **views)
        for dtype in subject.capabilities.dtypes
        for words, q, m in (("decodes", _ONES, edges), ("a decode", (1,), (page + 1,)), ("prompts", Q_LENS, Q_LENS))
    ]
    encoders = [
        make(f"{attn_type}, {dtype}, views at odd addresses", m=Q_LENS, attn_type=attn_type, causal=False, dtype=dtype, **views)
        for attn_type in subject.capabilities.attn_types
        if attn_type in ENCODER_TYPES
        for dtype in subject.capabilities.dtypes
    ]
    return decoders + encoders


def _attn_types(make: Make, subject: Subject) -> list[Case]:
    """Return cases of encoders and of cross attention."""
    return [
        make(f"{attn_type}, {words}", attn_type=attn_type, causal=False, inputs="needle", **more).replace(
            # An encoder attends the call's own keys: n = m.
            **({"seq_lens": Q_LENS} if attn_type in ENCODER_TYPES else {})
        )
        for attn_type in subject.capabilities.attn_types
        if attn_type != AttentionType.DECODER
        for words, more in (
            ("plain", {}),
            ("window of 4", {"sliding_window": 4}),
            ("alibi and a cap", {"alibi": True, "logits_soft_cap": 2.0}),
        )
    ]


def _sized(subject: Subject, case: Case) -> Case:
    """Return the case, with pages and heads of 128 if the subject serves its cache in these only."""
    large = case.replace(head_size=128, block_size=128, num_blocks=None)
    return large if not subject.serves(case) and subject.serves(large) else case


def _caches(make: Make, stored: str) -> list[Case]:
    """Return cases of a cache's dtype."""
    cases = [make(f"{stored} cache", kv_cache_dtype=stored)]
    # The writer computes a scale for each row, which is 0 for a token of zeros.
    if stored in SELF_SCALED:
        cases += [
            make(f"{stored} cache, needle", kv_cache_dtype=stored, inputs="needle"),
            make(f"{stored} cache, tokens of zeros", kv_cache_dtype=stored, inputs="hollow"),
        ]
    if stored in SCALED:
        cases += [
            make(f"{stored} cache, scales", kv_cache_dtype=stored, inputs="needle", k_scale=0.037, v_scale=0.0215),
            make(f"{stored} cache, saturated", kv_cache_dtype=stored, inputs="wide", k_scale=0.02, v_scale=0.5),
        ]
    return cases


def variety(subject: Subject) -> list[Case]:
    """Return a case for each size."""
    c, small = subject.capabilities, main_dtypes(subject)[-1]
    cases = [
        base_case(subject, f"head size {s}", head_size=s, dtype=small)
        for s in subject.sizes((80, 72, 256, 96, 192, 128, 64, 512), c.head_sizes)
    ]
    heads = ((5, 5), (8, 1), (12, 3), (1, 1), (3, 1), (8, 8), (4, 2))
    cases += [base_case(subject, f"{h} heads on {k}", num_heads=h, num_kv_heads=k, inputs="needle") for h, k in heads]
    cases += [
        base_case(subject, f"block size {s}", block_size=s, num_blocks=None)
        for s in subject.sizes((1, 8, 32, 64, 128, 256), subject.block_sizes)
    ]
    cases += [base_case(subject, f"{s} cache, {small}", kv_cache_dtype=s, dtype=small) for s in c.kv_cache_dtypes]
    scaled = [s for s in c.kv_cache_dtypes if s in SCALED]
    cases += [base_case(subject, f"{s} cache, per-head scales", kv_cache_dtype=s).replace(**per_head_scales(2)) for s in scaled]
    cases += [
        base_case(subject, f"{s} cache, per-head {name}", kv_cache_dtype=s).replace(**{name: per_head_scales(2)[name]})
        # The last dtype only: scales are applied in the same way to all codes.
        for s in scaled[-1:]
        for name in ("k_scale", "v_scale")
    ]
    others = [dtype for dtype in c.dtypes if dtype not in main_dtypes(subject)]
    for dtype in others:
        cases += [
            base_case(subject, f"{dtype}, needle", dtype=dtype, inputs="needle"),
            base_case(subject, f"{dtype}, decodes", (1,) * 5, (33, 9, 18, 20, 40), dtype=dtype),
            base_case(subject, f"{dtype}, negative scale, cap", dtype=dtype, scale=-0.17, logits_soft_cap=30.0),
            base_case(subject, f"{dtype}, scores of -inf", dtype=dtype, inputs="infinite"),
        ]
    return cases


def reach(make: Make, few_programs: bool) -> list[Case]:
    """Return the cases of what a row sees besides causality and the window (docs/semantics.md §18)."""
    long, chunks = (40, 18, 1, 33, 9), (60, 18, 50, 33, 40)
    every = {"causal": "mixed", "spans": 6, "prefix": 9, "chunk_size": 20}
    # Each of these is a program to compile; together they have every kind of added key.
    least = [
        make("spans in prompts", m=Q_LENS, spans=4, inputs="needle"),
        make("spans in a window, a prefix", spans=9, prefix=11, sliding_window=5, inputs="needle"),
        make("mixed causality, spans, prefix, chunks", **every),
        make("mixed causality, spans cut by a window, prefix, chunks", sliding_window=(5, 3), span_window=True, **every),
        make("chunks", chunk_size=10, inputs="needle"),
    ]
    if few_programs:
        return least
    return [
        *least,
        make("spans", long, chunks, spans=12),
        make("spans longer than a tile", (150, 20), (170, 20), spans=70),
        make("spans in a window", long, chunks, spans=9, sliding_window=5, inputs="needle"),
        make("spans cut by a window", long, chunks, spans=9, sliding_window=5, span_window=True, inputs="needle"),
        make("spans under sinks, cap and alibi", spans=5, sinks="log_length", logits_soft_cap=2.0, alibi=True),
        make("spans beside a tree", (6, 4, 18, 1, 6), (20, 4, 18, 9, 40), spans=3, tree=6),
        make("spans, rows before the sequence", (5, 20, 3, 2, 4), (3, 9, 0, 2, 30), spans=4),
        make("a prefix", prefix=7, inputs="needle"),
        make("a prefix before a window", long, chunks, prefix=11, sliding_window=4, inputs="needle"),
        make("spans in chunks", long, chunks, spans=9, prefix=5, chunk_size=16),
        make("chunks of one page in a window", long, chunks, chunk_size=16, sliding_window=7),
        make("chunks, not causal", causal=False, chunk_size=10),
        make("mixed causality", causal="mixed", inputs="needle"),
        make("mixed causality in a window", long, chunks, causal="mixed", sliding_window=(6, 3)),
    ]


def long_context(subject: Subject, full: bool) -> list[Case]:
    """Return cases of long context, where random values average to about 0: with needles, and a sink near ln of the length."""
    length = 32768 if full else 4096
    dtype = "bfloat16" if "bfloat16" in subject.capabilities.dtypes else main_dtypes(subject)[0]
    more: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "num_blocks": None}
    # A decode over the whole context and a few rows over a part of it: both are split over the keys.
    q, m = (1, 3), (length, length // 4 + 3)
    return [
        base_case(subject, f"{length} keys, sinks near ln of the length", q, m, sinks="log_length", dtype=dtype, **more),
        base_case(subject, f"{length} keys, needle", q, m, inputs="needle", dtype=dtype, **more),
        base_case(subject, f"{length} keys, randn", q, m, dtype=dtype, **more),
        base_case(subject, f"{length} keys, window", q, m, inputs="needle", sliding_window=129, dtype=dtype, **more),
        base_case(subject, f"{length} keys, {main_dtypes(subject)[0]}", q, m, **more),
    ]


def vast(subject: Subject) -> list[Case]:
    """Return cases of caches that need wide indices: more than 65536 pages, and more than 2**31 elements."""
    small: dict[str, Any] = {"dtype": main_dtypes(subject)[-1], "lse": False}
    size = subject.sizes((128,), subject.capabilities.head_sizes)[0]
    # More than 2**16 pages, as in AITER's regression test of page numbers above 65,535.
    base = base_case(subject, "70000 pages", (1, 5), (70, 33), num_heads=2, num_kv_heads=1, **{**small, "num_blocks": 70000})
    # The last 4096 pages begin beyond 2**31 elements: `draw._tables` gives these to the requests of so large a cache.
    pages = 2**31 // (size * 2 * base.block_size) + 4096
    large = base.replace(name="2**31 elements", head_size=size, num_heads=4, num_kv_heads=2, num_blocks=pages)
    # The backend may declare that its kernels' offsets have 32 bits: it must then reject the cache.
    counted = subject.max_cache_span is None or pages * base.block_size * 2 * size <= subject.max_cache_span
    return [base, large if counted else large.replace(check="too_large")]
