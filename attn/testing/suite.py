"""The cases of a backend, positive and negative, derived from its capabilities.

Declared features are tested by fixtures, a pairwise grid, random configurations, long context and metamorphic properties, and
each alone in batches that kernels launch in many ways. Undeclared features must be rejected, by selection and by the
constructor, with a reason that names them. No case is specific to a backend. Level `quick` is for every push; `full` has more
of the same cases and, on a GPU, caches whose page numbers and offsets need more than 16 and 32 bits; `smoke` has the fixtures
only, for interpreted kernels.
"""

from collections.abc import Sequence
from typing import Any

from attn.backends.metadata import next_power_of_two
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, AttentionType, Feature, supports_size
from attn.dtypes import DTYPES, KV_CACHE_DTYPES
from attn.errors import UnsupportedError
from attn.testing import mla
from attn.testing.bits import SCALED, SELF_SCALED
from attn.testing.case import Case
from attn.testing.fixtures import fixtures, long_context, variety, vast
from attn.testing.grid import grid, random_cases
from attn.testing.subject import M_LENS, Q_LENS, Subject, base_case, main_dtypes, per_head_scales

LEVELS = ("smoke", "quick", "full")


def cases_of(subject: Subject, level: str = "quick") -> list[Case]:
    """Return all cases of the suite for this subject, positive ones first.

    Raises ValueError for an unknown level, and UnsupportedError if the backend serves no case on the subject's device.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} (supports {', '.join(LEVELS)})")
    full = level == "full"
    few_programs = subject.compiles and not full
    positive = mla.latent_cases(subject, level) if subject.is_latent else fixtures(subject)
    # Without this a backend that rejects everything would pass, as its refusals are the only cases that are left.
    if not any(map(subject.serves, positive)):
        raise _nothing_served(subject, positive[0])
    # MLA has a grid of its own (`latent_cases`): the other cases are about separate keys and values.
    if subject.is_latent:
        positive += invariance(subject, full) if level != "smoke" else []
        positive += mla.vast(subject) if full and _on_gpu(subject) else []
        return [case for case in positive if subject.serves(case)] + refusals(subject)
    if level != "smoke":
        positive += [*grid(subject, few_programs), *properties(subject, full), *long_context(subject, full)]
        positive += invariance(subject, full)
        positive += [*variety(subject), *random_cases(subject, 100 if full else 12)]
        positive += [] if few_programs else features_alone(subject)
    if full and _on_gpu(subject):
        positive += vast(subject)
    # Unsupported features are covered by `refusals`.
    served = [case for case in positive if subject.serves(case)]
    return (_affordable(served) if few_programs else served) + refusals(subject)


def _on_gpu(subject: Subject) -> bool:
    return subject.device is not None and subject.device.platform in ("cuda", "rocm", "gpu")  # "gpu" is jax's


def _nothing_served(subject: Subject, case: Case) -> UnsupportedError:
    """Return the error of a backend that serves no case, with its reasons to reject one of them."""
    request = case.request()
    reasons = list(subject.refuses(request)) or subject.capabilities.reasons(request)
    return UnsupportedError(
        f"{subject.name} serves no case of the conformance suite on {subject.device or 'any device'}: {'; '.join(reasons)}. "
        "Pass kind='interpreted' to run_conformance to execute it without such a device, or device=Device(...) for its cases",
        reasons,
    )


# limiting the number of compiled programs

_PROGRAMS = 49  #: programs of a quick run's base cases; each takes a second or two to compile


def _affordable(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, in order, that need no more programs than a quick run may compile."""
    seen: set[object] = set()
    affordable = []
    for case in cases:
        # A case whose program is compiled already is kept, however late it comes: it costs only its run.
        key = program_of(case)
        if key in seen or len(seen) < _PROGRAMS:
            seen.add(key)
            affordable.append(case)
    return affordable


def program_of(case: Case) -> object:
    """Return the key of a case's compiled program: shapes rounded to powers of two, dtypes, features.

    A property counts as its base case; properties whose variants have other shapes come early in the list.
    """
    # 8 as in `draw._tables`. A window's width is an argument of a compiled program, whether it has a bound is not.
    (left, right), pages = case.window, max(8, -(-max(case.seq_lens, default=0) // case.block_size))
    lens = sum(case.query_lens) + case.padding, len(case.query_lens), max(case.query_lens, default=0), pages
    layer = case.num_blocks, case.block_size, case.num_heads, case.num_kv_heads, case.head_size, case.dtype, case.is_encoder
    stored = "" if case.is_encoder else case.element, isinstance(case.k_scale, tuple), isinstance(case.v_scale, tuple)
    mask = case.causal, left is None, right is None, case.tree, case.sparse
    reach = not case.spans, not case.prefix, not case.chunk_size, case.span_window and bool(case.spans)
    scores = case.logits_soft_cap is None, case.alibi, not case.sinks
    return tuple(map(next_power_of_two, lens)), layer, stored, mask, reach, scores


def properties(subject: Subject, full: bool) -> list[Case]:
    """Return cases of the metamorphic properties; each requests every feature that the property's variants use."""
    quantized = [s for s in subject.capabilities.kv_cache_dtypes if s in SCALED]
    dtypes = main_dtypes(subject) if full else main_dtypes(subject)[:2]
    cached = not base_case(subject, "").is_encoder
    vectors: dict[str, Any] = {name: "randn" for name in ("alibi", "sinks") if name in subject.capabilities.features}
    scales: dict[str, Any] = per_head_scales(2) if subject.has(Feature.PER_HEAD_SCALES) else {"k_scale": 0.037, "v_scale": 0.02}
    cases = []
    for dtype in dtypes:

        def make(check: str, q: Sequence[int] = Q_LENS, m: Sequence[int] = M_LENS, dtype: str = dtype, **changes: Any) -> Case:
            return base_case(
                subject, f"{check.partition('=')[0]}, {dtype}", q, m, **{"dtype": dtype, "check": check, **changes}
            )

        cases += [make("rerun"), make("without_mirrors"), make("empty_tree")]
        # Encoders have no pages, and their keys are in the call: the other properties do not apply.
        if not cached:
            cases += [make("batch_order"), make("head_groups"), make("repeated_heads")]
            continue
        page = make("").block_size
        cases += [
            *map(make, ("poison", "permute_pages", "table_tail", "written_before", "live_nan", "neighbours", "future_edit")),
            make("ignored_keys", kv_sharing=True),
            make(
                "shared_pages",
                # Each of `Q_LENS` new tokens follows two pages of context, the shared ones.
                m=(2 * page + 18, 2 * page + 6, 2 * page + 18, 2 * page + 1, 2 * page + 9),
                shared_prefix=2 * page,
            ),
        ]
        # codes of e4m3 reach 448 steps of 0.004, just above the usual output of about 1
        cases.append(make("oracle", output_scale=0.004).replace(name=f"fp8_output, {dtype}"))
        if dtype != "float16":  # powers of two reach float16's subnormals
            folded = [make("scales_fold", kv_cache_dtype=s, k_scale=0.037, v_scale=0.02) for s in quantized[:1]]
            cases += [make("powers_of_two"), *folded]
        if subject.compiles and not full and dtype != dtypes[0]:
            continue  # the following properties need further programs
        if subject.compiles:
            cases.append(make("captured"))
        if not subject.compiles or full:
            cases += [make("layers_in_turn", data_seed=1, **vectors)]
            of_caches = [make("layers_in_turn", kv_cache_dtype=s, **scales) for s in quantized[:1]]
            cases += [case.replace(name=f"layers_in_turn, {case.kv_cache_dtype} cache, {dtype}") for case in of_caches]
            cases.append(make("reach_limits", features=("spans", "non_causal", "mixed_causal", "chunk_size")))
            cases.append(make("whole_span", features=("spans", "non_causal")))
        other = [s for s in subject.sizes((32, 8, 16, 64, 128), subject.block_sizes) if s != page][:1]
        cases += [
            make("window_of_everything", sliding_window=7),
            make("hidden_keys", sliding_window=7),
            make("causal_by_window", causal=False),
            make("key_order", causal=False),
            make("soft_cap_limits", logits_soft_cap=5.0),
            make("flat_alibi", alibi=True),
            make("sinks_off", sinks="randn"),
            # Six rows are a whole tree, four a part of one, and 18 are more than a tree, so that request is causal.
            make("tree_paths", (6, 4, 18, 1, 6), (20, 4, 18, 9, 40), tree=6),
            make("batch_order"),
            make("head_groups"),
            make("repeated_heads"),
            make("chunked", (24, 18), (24, 40)),
            make("steps", (24, 18, 1, 3), (24, 40, 9, 3)),
            *(  # split keys start again at position 0, where the block-sparse pattern differs
                make("split_and_merge", (1,) * 5, (33, 20, 7, 40, 2), inputs=inputs).replace(
                    name=f"split_and_merge, {inputs}, {dtype}"
                )
                for inputs in (() if subject.has(Feature.BLOCK_SPARSE) else ("randn", "infinite"))
            ),
            *(make(f"page_size={size}") for size in other),
        ]
        if full:
            cases += [
                make("batch_order", sliding_window=7, sinks="randn"),
                make("neighbours", sliding_window=7),
                make("chunked", (33, 40), (33, 70), sliding_window=9),
                make("head_groups", alibi=True, sinks="randn"),
                make("poison", sliding_window=7),
            ]
    return cases


#: Requests of every kind, as <new tokens>/<length>: decodes, drafts, chunks, prompts, one without tokens, one without keys,
#: two contexts that are longer than any kernel's part of a split.
_REQUESTS = (
    "1/33 18/18 1/2305 4/20 1/1 33/70 1/16 6/9 0/5 64/64 1/17 3/2100 2/2 1/257 17/40 1/64 5/131 1/300 21/90 3/0 1/40 16/16 "
    "1/15 8/48 1/513 9/40 1/5 2/33 1/129 12/12 7/7 1/90 40/41"
)
_ANY_BATCH = tuple((int(n), int(m)) for n, m in (request.split("/") for request in _REQUESTS.split()))


def invariance(subject: Subject, full: bool) -> list[Case]:
    """Return cases of requests that have the same bits in any batch, for a subject that declares `batch_invariant`.

    The other cases do not request the feature: their plans are those of the default.
    """
    if not subject.has(Feature.BATCH_INVARIANT):
        return []
    is_encoder = base_case(subject, "").is_encoder
    main, stored = main_dtypes(subject), subject.capabilities.kv_cache_dtypes[1:]
    # Short contexts among the first: `any_batch` runs a case more than a dozen times.
    every, few = _ANY_BATCH, tuple((n, m) for n, m in _ANY_BATCH[:14] if m < 300)
    if subject.compiles and subject.device is None:  # each batch is a program to interpret
        few = few[:5]

    def make(words: str, lens: Sequence[tuple[int, int]] = few, check: str = "any_batch", **changes: Any) -> Case:
        more = {"check": check, "features": (Feature.BATCH_INVARIANT.value,), "num_blocks": None, **changes}
        return base_case(subject, f"batch_invariant: {check}, {words}", *zip(*lens, strict=True), **more)

    size = subject.sizes((40, 72, 80, 64), subject.capabilities.head_sizes)[0]
    # 7 heads of one group do not fill a tile, and a size of 40, 72 or 80 is no power of two.
    odd: dict[str, Any] = {} if subject.is_latent else {"num_heads": 7, "num_kv_heads": 1, "head_size": size}
    cases = [
        # not all of them where kernels are interpreted
        *(make(dtype, every if full or (dtype == main[0] and subject.device) else few, dtype=dtype) for dtype in main),
        make("window, sinks", sliding_window=20, sinks="randn"),
        make("odd heads, sinks", **odd, sinks="log_length"),
        make("not causal, cap, alibi", causal=False, logits_soft_cap=2.0, alibi=True),
        make("trees", [(n, max(n, m)) for n, m in few], tree=6),
        *(make(f"{s} cache", kv_cache_dtype=s) for s in (stored if full else stored[-1:])),
        *(
            make(attn_type, [(n, n if attn_type in ENCODER_TYPES else m) for n, m in few], attn_type=attn_type, causal=False)
            for attn_type in subject.capabilities.attn_types
            if attn_type in ENCODER_TYPES[:1] or (full and attn_type != AttentionType.DECODER)
        ),
    ]
    if is_encoder:
        return cases
    mixed, page = tuple(zip(Q_LENS, M_LENS, strict=True)), base_case(subject, "").block_size
    cases += [make(main[0], mixed, check) for check in ("permute_pages", "table_tail", "batch_order", "neighbours")]
    shared = tuple((n, 2 * page + tail) for n, tail in zip(Q_LENS, (18, 6, 18, 1, 9), strict=True))
    return [*cases, make(main[0], shared, "shared_pages", shared_prefix=2 * page)]


def _changes_for(feature: Feature, reach: int) -> dict[str, Any]:
    """Return the changes of a case that request a feature. reach: about how many keys a row sees in a window or chunk."""
    changes: dict[Feature, dict[str, Any]] = {
        Feature.NON_CAUSAL: {"causal": False},
        Feature.SLIDING_WINDOW: {"sliding_window": reach},
        Feature.TWO_SIDED_WINDOW: {"sliding_window": (None, 2), "causal": False},
        Feature.SOFT_CAP: {"logits_soft_cap": 30.0},
        Feature.ALIBI: {"alibi": True},
        Feature.SINKS: {"sinks": "randn"},
        Feature.TREE_MASK: {"tree": 8},
        Feature.SPANS: {"spans": 2 + reach // 8},
        Feature.MIXED_CAUSAL: {"causal": "mixed"},
        Feature.CHUNK_SIZE: {"chunk_size": 2 * reach},
        Feature.KV_SHARING: {"kv_sharing": True},
        Feature.PER_HEAD_SCALES: per_head_scales(2),
        Feature.OUTPUT_SCALE: {"output_scale": 0.02},
    }
    return changes.get(feature, {})


#: Batches of a draft, a decode, a prompt, another decode and a short prompt, as (new tokens, length). Kernels hold few rows in
#: a tile, split the keys of decodes, and may launch prompts with the decodes: that depends on a batch's lengths.
_SHORT = ((8, 20), (1, 33), (70, 80), (1, 17), (20, 40))
_LONG = ((8, 450), (1, 450), (70, 100), (1, 17), (20, 450))
#: With a prompt that fills a GPU, which kernels launch apart from the decodes: these are whole, or split.
_PROMPT = ((1, 33), (1000, 1020), (1, 17))
_PROMPT_LONG = ((8, 450), (1, 450), (1000, 1020), (1, 17))


def features_alone(subject: Subject) -> list[Case]:
    """Return cases of each feature, kind of attention and quantised cache alone, in batches that kernels launch in many ways.

    A kernel for common layers leaves some features to a general one, as most of the grid's combinations are. These cases reach
    every launch that serves a feature: those of the whole batch, of a request alone, and of decodes and prompts apart.
    """
    c = subject.capabilities
    sizes, dtypes = subject.sizes((64, 96, 128, 256), c.head_sizes), [d for d in main_dtypes(subject) if d != "float32"]
    quantised = [stored for stored in c.kv_cache_dtypes if stored in (*SCALED, *SELF_SCALED)]
    cases = []
    batches = ((4, _SHORT), (150, _LONG), (80, _PROMPT), (230, _PROMPT_LONG))
    for reach, lens in batches[: 4 if _on_gpu(subject) else 1]:  # long ones are slow elsewhere
        changes_of = {feature.value: changes for feature in Feature if (changes := _changes_for(feature, reach))}
        # Not `_changes_for`'s, whose left side is open: with both bounds a kernel may skip keys on each side.
        changes_of["two_sided_window"] = {"sliding_window": (reach, 2), "causal": False}
        # Scales of each head mean nothing without a cache of codes.
        changes_of["per_head_scales"] |= {"kv_cache_dtype": "int8" if "int8" in quantised else "fp8"}
        variants: dict[str, dict[str, Any]] = {
            **{"no feature": {}, **changes_of},
            "spans cut by a window": changes_of["spans"] | changes_of["two_sided_window"] | {"span_window": True},
            "a prefix": {"prefix": 3 * reach},
            "a prefix under a window": {"prefix": 3 * reach, "sliding_window": reach},
            **{f"{stored} cache": {"kv_cache_dtype": stored} for stored in quantised},
            **{name: {"attn_type": name, "causal": False} for name in c.attn_types if name != AttentionType.DECODER},
        }
        for i, (words, changes) in enumerate(variants.items()):
            q, m = zip(*((n, n if changes.get("attn_type") in ENCODER_TYPES else m) for n, m in lens), strict=True)
            # Sizes, dtypes and the LSE change at different rates from way to way, so that most combinations occur in one pass.
            more = {"head_size": sizes[(i + reach // 75) % len(sizes)], "check": "batch_order", "num_blocks": None}
            more |= {"dtype": dtypes[i // 2 % len(dtypes)]} if dtypes else {}
            name = f"alone: {words}, {len(m)} requests of up to {max(m)} keys"
            cases.append(base_case(subject, name, q, m, **{"lse": subject.lse and i % 2 == 0, **more, **changes}))
    return cases


def refusals(subject: Subject) -> list[Case]:
    """Return one case for each undeclared feature, dtype or size; `check` is `refusal=<what the rejection must name>`."""
    c = subject.capabilities
    plain = base_case(subject, "", (1, 4), (20, 4), lse=False, num_heads=4)

    def refused(setting: str, **changes: Any) -> Case:
        return plain.replace(name=f"refuses {setting}", check=f"refusal={setting}", **changes)

    cases = []
    for feature in Feature:
        # An implementation says itself whether it returns the LSE; records of jax do not list it.
        if not (subject.lse if feature == Feature.LSE else feature.value in c.features):
            cases.append(refused(feature.value, features=(feature.value,), **_changes_for(feature, 4)))
    for name, known, declared in (
        ("dtype", [d for d, info in DTYPES.items() if info.kind == "float"], c.dtypes),
        ("kv_cache_dtype", list(KV_CACHE_DTYPES), c.kv_cache_dtypes),
        ("attn_type", list(ATTN_TYPES), c.attn_types),
    ):
        cases += [refused(f"{name}={x}", **{name: x}) for x in known if x not in declared]
    for name, allowed in (("head_size", c.head_sizes), ("block_size", subject.block_sizes)):
        # Numbers that some rule of records (multiples of 8, 16 or 32, a maximum) excludes; three, since each is a case.
        beyond = [s for s in (8, 20, 33, 40, 64, 72, 96, 257, 1024) if not supports_size(s, allowed)][:3]
        cases += [refused(f"{name}={s}", **{name: s}) for s in beyond]
    return cases
