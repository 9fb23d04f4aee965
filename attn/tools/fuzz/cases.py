"""The fuzzer's random programs and their cases, drawn from the features that a subject declares.

A program consists of what a compiler specialises on: sizes, dtypes and features. Its cases differ in lengths, numbers and
the way the batch is passed. Everything follows from (seed, subject, number of the program), so that a seed repeats a run, and
JSON repeats a case. Undeclared features are not drawn; fields that a case does not change are plain, so that special paths are
taken as often as general ones.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from attn.capabilities import ENCODER_TYPES, AttentionType, Feature, supports_size
from attn.testing.bits import PACKED, SCALED, SELF_SCALED
from attn.testing.case import Case
from attn.testing.subject import SPARSE, Subject, base_case
from attn.testing.wrong import wrongs_for

# 64 and 128 are what models have; most others are no multiples of a tile or no powers of two. A size that is listed twice is
# drawn twice as often.
HEAD_SIZES = (64, 64, 128, 32, 80, 16, 8, 96, 24, 48, 72, 112, 192, 256, 40, 20, 33, 7, 5, 4, 3, 100, 160)
_BLOCK_SIZES = (16, 16, 1, 2, 3, 5, 7, 8, 16, 24, 32, 48, 64, 128, 256)
HEADS = (
    *((2, 2), (4, 2), (6, 2), (1, 1), (5, 5), (8, 1), (3, 1), (7, 7), (10, 5), (9, 3), (16, 2), (15, 3), (12, 4), (21, 3)),
    (32, 8),
)
_LATENT_HEADS = (1, 2, 3, 4, 5, 8, 16, 17)
_LATENT_DIMS = (
    *((32, 24, 16, 40), (512, 128, 64, 128), (64, 32, 32, 32), (128, 64, 64, 32), (40, 8, 8, 24), (17, 5, 3, 7)),
    (96, 1, 2, 7),
)
# Up to the largest int32, to which a kernel must not add a position.
_WINDOWS = (1, 2, 7, 16, 17, 100, 10**6, 2**31 - 1)
_PAIRS = ((0, None), (3, 0), (0, 0), (5, None), (None, 0), (20, None), (10**6, None), (10**6, 0), (15, 0))
_TWO_SIDED = ((20, 2), (0, 3), (None, 2), (7, 7), (10**6, 10**6), (None, 10**6), (4, 1))
SMALLEST_16_BIT = 16  #: shorter rows of 16-bit numbers may cancel to about 0, where a relative error is meaningless
#: The same for MLA, which rounds more often and needs sums as long as a model's.
_LATENT_DIMS_16_BIT = ((512, 128, 64, 128), (128, 64, 64, 64), (72, 40, 24, 72), (136, 33, 30, 65), (256, 96, 32, 96))
_MOST_ROWS, _MOST_KEYS = 160, 1200
_BLOCKS = 256  #: pages of a cache that all programs share


Lens = tuple[tuple[int, ...], tuple[int, ...]]


class ProgramExtents(NamedTuple):
    """Extents that all batches of a program share: requests, rows, the longest query and the longest sequence."""

    requests: int
    rows: int
    longest_query: int
    longest: int
    loose: int


def program(subject: Subject, seed: int, number: int, cases: int, one_shape: bool = False) -> list[Case]:
    """Return the cases of program `number`: `cases` of them, fewer if the subject rejects some combinations.

    `one_shape`: pad the batches to the same extents, for backends that compile for them.
    """
    # A string's hash differs between processes, but `Random` seeds itself by its SHA-512.
    rng = random.Random(f"{seed}/{subject.name}/{number}")
    # Rejected frames are drawn again: a record with few combinations serves few of them.
    for _ in range(200):
        frame = _frame(subject, rng)
        if subject.serves(frame):
            break
    else:
        frame = base_case(subject, "")
    shape = _shape(rng, frame) if one_shape else None
    drawn = [_variant(subject, rng, frame, shape) for _ in range(cases)]
    if rng.random() < 0.25:
        # One program in four also has a mistake of a user, on a layer like its own.
        drawn.append(_mistaken(frame, rng.choice(wrongs_for(frame, subject.capabilities.framework))))
    served = [case for case in drawn if subject.serves(case)]
    return [case.replace(name=f"fuzz {seed}/{number}.{i}") for i, case in enumerate(served)]


def _mistaken(frame: Case, mistake: str) -> Case:
    """Return a plain batch with one mistake, for a layer like the frame's."""
    q, m = (1, 4, 2), (20, 4, 2)
    # Mistakes are refused by the layer, and some need tokens that are written.
    plain = {"through": "layer", "new": "written", "kv_sharing": False, "tree": 0, "inputs": "randn"}
    return frame.replace(query_lens=q, seq_lens=q if frame.is_encoder else m, check=f"wrong={mistake}", **plain)


def _chance(rng: random.Random, probability: float, values: Sequence[Any], otherwise: Any) -> Any:
    return rng.choice(values) if values and rng.random() < probability else otherwise


def _frame(subject: Subject, rng: random.Random) -> Case:
    """Return the fields that the cases of a program share."""
    c = subject.capabilities

    def sizes(preferred: Sequence[int], allowed: Any) -> list[int]:
        return [size for size in preferred if supports_size(size, allowed)] or subject.sizes(preferred, allowed)

    def if_served(feature: Feature, *values: Any) -> list[Any]:
        return list(values) if subject.has(feature) else []

    attn_type = rng.choice(c.attn_types) if rng.random() < 0.25 else base_case(subject, "").attn_type
    is_decoder = attn_type == AttentionType.DECODER
    stored = rng.choice(c.kv_cache_dtypes) if rng.random() < 0.6 else c.kv_cache_dtypes[0]
    dtype = rng.choice(c.dtypes)
    heads = rng.choice(HEADS)
    head_sizes = [s for s in sizes(HEAD_SIZES, c.head_sizes) if s >= SMALLEST_16_BIT or dtype in ("float32", "float64")]
    # The layer's constructor has no argument for a block-sparse pattern.
    through = "impl" if subject.has(Feature.BLOCK_SPARSE) else rng.choice(("impl", "layer", "layer"))
    case = base_case(
        subject,
        "",
        num_heads=heads[0],
        num_kv_heads=heads[1],
        dtype=dtype,
        attn_type=attn_type,
        num_blocks=None,
        causal=True,
        block_size=rng.choice(sizes(_BLOCK_SIZES, subject.block_sizes)),
        poison=rng.choice(subject.poisons),
        through=through,
        lse=subject.lse and rng.random() < 0.6,
        kv_cache_dtype=c.kv_cache_dtypes[0] if attn_type in ENCODER_TYPES else stored,
    )
    if subject.is_latent:
        case = _latent_frame(subject, rng, case)
    else:
        # The base case's size serves if the record has none of the list.
        case = case.replace(head_size=rng.choice(head_sizes or [case.head_size]))
    windows = [*if_served(Feature.SLIDING_WINDOW, *_WINDOWS, *_PAIRS), *if_served(Feature.TWO_SIDED_WINDOW, *_TWO_SIDED)]
    case = case.replace(
        causal=not (is_decoder and _chance(rng, 0.2, if_served(Feature.NON_CAUSAL, True), False)),
        sliding_window=_chance(rng, 0.4, windows, None),
        logits_soft_cap=_chance(rng, 0.2, if_served(Feature.SOFT_CAP, 2.0, 30.0, 0.5, 0.0, 50), None),
        alibi=_chance(rng, 0.2, if_served(Feature.ALIBI, True, "randn"), False),
        sinks=_chance(rng, 0.2, if_served(Feature.SINKS, "randn", "log_length", "infinite"), ""),
        kv_sharing=is_decoder and _chance(rng, 0.1, if_served(Feature.KV_SHARING, True), False),
        sparse=rng.choice(SPARSE) if subject.has(Feature.BLOCK_SPARSE) else (),
    )
    # A tree replaces causality: a tree in a layer that is not causal has no meaning.
    if is_decoder and case.causal:
        case = case.replace(tree=_chance(rng, 0.15, if_served(Feature.TREE_MASK, 6, 1, 3, 9, -1), 0))
    if is_decoder:
        mixed = if_served(Feature.MIXED_CAUSAL, "mixed") if not case.tree else []
        case = case.replace(
            causal=_chance(rng, 0.1, mixed, case.causal),
            spans=_chance(rng, 0.15, if_served(Feature.SPANS, 1, 4, 30, -1), 0),
            prefix=_chance(rng, 0.15, if_served(Feature.SPANS, 1, 8, 100, -1), 0),
            chunk_size=_chance(rng, 0.1, if_served(Feature.CHUNK_SIZE, 1, 7, 16, 100, 1000), 0),
            # Without spans it has no effect.
            span_window=rng.random() < 0.5,
        )
    return case.replace(**_scales(subject, rng, case))


def _latent_frame(subject: Subject, rng: random.Random, case: Case) -> Case:
    """Set the sizes of an MLA program."""
    halves = case.dtype not in ("float32", "float64")
    dims = rng.choice(_LATENT_DIMS_16_BIT if halves else _LATENT_DIMS)
    # Kernels of a vendor are built for one or two sizes of a latent; the sizes of heads are the model's.
    if subject.latent_dims is not None:
        rank, rope = rng.choice(subject.latent_dims)
        dims = (rank, 128, rope, 128)
    # Its rows have 512 + 64 elements, whatever the model.
    if case.kv_cache_dtype == "fp8_ds_mla":
        dims = (512, rng.choice((128, 64, 40)), 64, rng.choice((128, 72) if halves else (128, 48, 8)))
    topk = 0 if subject.has(Feature.MLA) else rng.choice((4, 24, 64))
    return case.replace(num_heads=rng.choice(_LATENT_HEADS), num_kv_heads=1, mla=dims, head_size=dims[0] + dims[2], topk=topk)


def _scales(subject: Subject, rng: random.Random, case: Case) -> dict[str, Any]:
    """Return scales of keys and values, each a number or one per kv head; an unquantised cache ignores them."""
    # Scales are computed by the writer there, and an encoder has no cache.
    if case.kv_cache_dtype in SELF_SCALED or case.is_encoder or rng.random() < 0.3:
        return {}
    # One case in five passes scales to an unquantised cache, which must ignore them.
    if case.kv_cache_dtype not in SCALED and rng.random() < 0.8:
        return {}

    def scale() -> Any:
        # Log-uniform from 0.003 to 0.5: with values of about 1, codes from a few units up to saturation.
        values = tuple(round(10 ** rng.uniform(-2.5, -0.3), 5) for _ in range(case.num_kv_heads))
        per_head = subject.has(Feature.PER_HEAD_SCALES) and not case.mla and rng.random() < 0.5
        return values if per_head else values[0]

    on_host = subject.device is not None and subject.device.platform == "cpu" and subject.capabilities.framework == "torch"
    # other devices round dequantised latents before expanding them, unless the scale is a power of two
    if case.mla and case.dtype not in ("float32", "float64") and not on_host:
        return dict.fromkeys(("k_scale", "v_scale"), 2.0 ** rng.randrange(-7, 0))
    if case.mla:  # one row is key and value
        return dict.fromkeys(("k_scale", "v_scale"), scale())
    return {"k_scale": scale(), "v_scale": scale()}


def _variant(subject: Subject, rng: random.Random, frame: Case, shape: ProgramExtents | None) -> Case:
    """Return a case of a program: its lengths, numbers, and how they are passed."""
    q, m = _lens(rng, frame) if shape is None else _lens_of(rng, frame, shape)
    layouts = ["heads", "heads", "flat", *(["fused", "heads_first"] if subject.capabilities.framework == "torch" else [])]
    seeds = {"geometry_seed": rng.randrange(1 << 20), "data_seed": rng.randrange(1 << 20)}
    case = frame.replace(
        query_lens=q,
        seq_lens=m,
        scale=_scale(rng, frame),
        padding=rng.choice((0, 0, 0, 1, 4)),
        arrays=rng.choice(("numpy", "numpy", "device", "bare")),
        loose=rng.choice((0, 0, 0, 1, 37, 4096)),
        layout=rng.choice(layouts),
        **seeds,
    )
    kinds = ["randn", "randn", "randn", "needle", "needle", "constant"]
    kinds += ["wide"] * (frame.kv_cache_dtype in SCALED) + ["hollow"]
    # Codes saturate, so they are finite. On CPUs, torch's 16-bit products of rows whose size is not a multiple of 32 read past
    # the row's end.
    isolated = not frame.mla or frame.dtype in ("float32", "float64") or not any(size % 32 for size in frame.mla[:2])
    if subject.has(Feature.NAN_SAFE) and frame.element != PACKED and not frame.is_quantized and isolated:
        kinds += ["infinite", *(["nonfinite"] if frame.sinks != "infinite" and not frame.alibi else [])]
    case = case.replace(inputs=rng.choice(kinds))
    if case.inputs == "nonfinite":  # an infinity times an underflowed weight would be NaN
        case = case.replace(scale=None)
    # A layer that shares a cache writes nothing anyway.
    if frame.attn_type == AttentionType.DECODER and not frame.kv_sharing and rng.random() < 0.15:
        case = case.replace(new=rng.choice(("cached", "shared")))
    page = frame.block_size
    if frame.attn_type == AttentionType.DECODER and case.new == "written" and page <= 64 and rng.random() < 0.1:
        # Whole pages: only these are shared.
        case = case.replace(shared_prefix=page * rng.choice((1, 2)))
    if shape is not None:
        # Rows, pages and bounds of the shape, so that the batch has the extents of the compiled program.
        case = case.replace(num_blocks=_BLOCKS, padding=max(0, shape.rows - sum(q)), loose=shape.loose)
    return case.replace(check=_check(subject, rng, case, 0.15 if shape is None else 0.03))


def _scale(rng: random.Random, frame: Case) -> float | None:
    """Return a softmax scale of either sign; for 16-bit MLA of the usual size, since rounding errors grow with the scale."""
    if rng.random() < 0.6:
        return None
    if frame.mla and frame.dtype not in ("float32", "float64"):
        return round(rng.choice((1.0, -1.0, 0.5)) * frame.query_size**-0.5, 4)
    return rng.choice((0.31, 0.05, -0.2, 1.0, -0.7, 0.125))


def _check(subject: Subject, rng: random.Random, case: Case, steps: float) -> str:
    decoder = case.attn_type == AttentionType.DECODER
    whole = case.tree or case.spans or case.prefix or case.causal == "mixed"  # of a batch: it cannot be run in steps
    if decoder and case.new == "written" and not case.kv_sharing and not whole and rng.random() < steps:
        return "steps"
    if rng.random() < 0.06:
        return "rerun"
    if decoder and case.through == "impl" and rng.random() < 0.06:
        return "poison"
    return "oracle"


def _shape(rng: random.Random, frame: Case) -> ProgramExtents:
    rows = rng.choice((8, 16, 32, 64, 128))
    query = rng.choice((1, rng.randrange(1, rows + 1), rows))
    # At most three pages of context: with pages of one token, 130 of the `_BLOCKS` for the longest request.
    keys = query if frame.is_encoder else query + rng.randrange(min(3 * frame.block_size, 200))
    return ProgramExtents(rng.choice((1, 2, 4, 8)), rows, query, keys, rng.choice((0, 0, 1, 100)))


def _lens_of(rng: random.Random, frame: Case, shape: ProgramExtents) -> Lens:
    """Return random lengths within a shape's extents; one request has the longest query and sequence."""
    q, m = [shape.longest_query], [shape.longest]
    # More than half of the extent, so that the builder pads to it and not to less.
    count = rng.randrange(shape.requests // 2 + 1, shape.requests + 1)
    pages = -(-shape.longest // frame.block_size)
    while len(q) < count:
        rows = min(rng.choice((0, 1, 1, 2, rng.randrange(1, 40))), shape.longest_query, shape.rows - sum(q))
        keys = min(rng.choice((rows, rows, 0, rng.randrange(rows + 1), rows + rng.randrange(100))), shape.longest)
        if frame.is_encoder or (frame.tree > 0 and keys < rows):
            keys = rows
        pages += -(-keys // frame.block_size)
        # A request that no page is left for is empty.
        if pages > _BLOCKS - 2:
            keys, rows = 0, 0
        q.append(rows)
        m.append(keys)
    # The longest request is drawn first, and need not be the first of the batch.
    order = rng.sample(range(count), count)
    return tuple(q[r] for r in order), tuple(m[r] for r in order)


def _lens(rng: random.Random, frame: Case) -> Lens:
    """Return (query_lens, seq_lens): decodes, prompts, chunks, drafts; requests without rows, without keys, with fewer keys
    than rows."""
    page, share = frame.block_size, rng.random()
    if share < 0.03:
        return (), ()
    if share < 0.06:
        return (0,) * 2, (rng.choice((0, 5)), 0)
    count = rng.choice((1, 1, 2, 3, 4, 5, 7, 8))
    kinds = ["decode"] if share < 0.3 else ["decode", "prompt", "prompt", "chunk", "chunk", "empty", "dummy", "short", "draft"]
    q: list[int] = []
    m: list[int] = []
    for _ in range(count):
        request = rng.choice(kinds)
        # Around multiples of a page, where off-by-one errors of tables show.
        context = rng.choice(
            (0, 1, page - 1, page, page + 1, 2 * page, 2 * page + 3, rng.randrange(3 * page + 8), rng.randrange(40))
        )
        rows = rng.choice((1, 2, 3, 5, page, page + 1, 16, 17, 18, 33, rng.randrange(1, 60)))
        rows = {"decode": 1, "draft": rng.randrange(1, 10), "empty": 0}.get(request, rows)
        keys = {"prompt": rows, "dummy": 0, "short": rng.randrange(rows + 1)}.get(request, rows + context)
        # The oracle computes every score in NumPy: this bounds a case's time.
        if sum(q) + rows > _MOST_ROWS or sum(m) + keys > _MOST_KEYS:
            continue
        q.append(rows)
        m.append(keys)
    if frame.is_encoder:
        m = q
    elif frame.tree > 0:
        m = [max(a, b) for a, b in zip(q, m, strict=True)]
    return tuple(q), tuple(m)
