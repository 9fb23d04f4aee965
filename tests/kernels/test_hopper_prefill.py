"""The Hopper prefill's own source, run by NumPy (`tests.gluon`), against the definition: which keys its rows see. 15 s."""

from typing import Any

import numpy as np
import pytest

from attn.kernels import hopper_prefill_launch as launch
from attn.kernels.launch import LOG2E, UNBOUNDED
from attn.visibility import BatchMask, LayerMask, Visibility
from tests import gluon

LENS = [(150, 150), (1, 40), (70, 333), (0, 10), (5, 3)]  # rows and keys of each request


def spans_of(lens: list[tuple[int, int]], every: int, size: int, elsewhere: bool) -> Any:
    """Images of `size` tokens in every `every`; with `elsewhere` some rows see a range that they are not in too."""
    rng, made = np.random.default_rng(0), []
    for n, m in lens:
        position = np.arange(m - n, m)
        start = position // every * every
        image = (position >= 0) & (position % every < size) & (start + size <= m)
        own = np.where(image, [start, start + size - 1], -1).T.astype(np.int32)
        if elsewhere and m > 2:
            for i in rng.choice(n, n // 8, replace=False):
                own[i] = np.sort(rng.integers(0, m, 2))
        made.append(own)
    return np.ascontiguousarray(np.concatenate(made))


def run(
    lens: list[tuple[int, int]],
    *,
    mask: Visibility,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    page: int = 16,
    programs: int = 2,
    rules: dict[str, Any] | None = None,
    wild: bool = False,
    freed: bool = False,
    scores_of: Any = None,
    bfloat16: Any = np.float32,
    again: bool = True,
    apart: str = "",
    equal: bool = False,
    broken_head: tuple[int, str] | None = None,
) -> None:
    """Compare output and log-sum-exp of every row with the definition; memory that no row may use is NaN.

    freed: whether entries of pages before the first key that a row sees name no page, while a later value is not finite.
    scores_of: a function of keys' positions, which is added to their scores; bfloat16: see `gluon.module`; again: whether
    rows may be computed again, key by key.
    apart: "heads" of all arrays, or "slots" of caches that have a page for each request, if these are so far apart that offsets
    do not fit in 32 bits. equal: whether requests are: as of `Variant`; their keys may be fewer than a page's. broken_head: a
    kv head of which all keys, or values, are NaN; its rows are not compared.
    """
    (H, K), rng, page_keys = heads, np.random.default_rng(1), page
    starts = np.cumsum([0, *(n for n, _ in lens)]).astype(np.int32)
    tokens, counts = int(starts[-1]), [1 if equal else -(-m // page) for _, m in lens]
    query = rng.standard_normal((tokens, H, size)).astype(np.float32)
    key, value = (rng.standard_normal((sum(counts) + 2, page, K, size)).astype(np.float32) for _ in "kv")
    if scores_of is not None:
        query[..., 0] = size**0.5
    ids = np.arange(len(lens), dtype=np.int32) if equal else rng.permutation(sum(counts)).astype(np.int32)
    table = np.full((len(lens), max(counts)), -1, np.int32)
    seen_of = []
    for r, (n, m) in enumerate(lens):
        own = table[r, : counts[r]]
        own[:] = ids[sum(counts[:r]) :][: counts[r]]
        seen_of.append(mask.select(r, slice(int(starts[r]), int(starts[r + 1]))).as_array(n, m))
        if scores_of is not None:
            at = np.arange(m)
            key[own[at // page], at % page, :, 0] = scores_of(at)[:, None]
        unseen = ~seen_of[-1].any(0) if n > 1 else np.zeros(m, bool)
        for cache in (key, value):
            cache[own[-1], m - (counts[r] - 1) * page :] = np.nan  # slots after the last key
            at = np.arange(m)[unseen]
            cache[own[at // page], at % page] = np.nan  # keys that no row sees
        if wild and n > 1 and m > 40:
            broken = min(2 * page + 3, m - 10)
            value[own[broken // page], broken % page] = np.nan
        if freed and n > 1:
            value[own[-1], 0] = np.nan
    if broken_head is not None:
        (key if broken_head[1] == "keys" else value)[..., broken_head[0], :] = np.nan
    pages = table.copy()
    for r in range(len(lens) if freed else 0):
        pages[r, : int(np.argmax(seen_of[r].any(0))) // page] = 2**31 - 1
    left, right = mask.layer.window
    module = gluon.module("hopper_prefill")
    settings = {"left": UNBOUNDED if left is None else left, "right": UNBOUNDED if right is None else right}
    if mask.layer.causal:
        settings["right"] = 0
    span_right = (right or UNBOUNDED) if mask.layer.span_window else 0
    settings |= {"chunk": mask.layer.chunk_size or 0, "span_right": span_right, "min_query": 1, **(rules or {})}
    output, lse = np.full((tokens, H, size), 9.0, np.float32), np.full((H, tokens), 9.0, np.float32)
    counters = np.zeros(2, np.int32)
    strides = [tuple(s // 4 for s in x.strides) for x in (query, key, value, output)]
    masks, lengths = mask.batch._asdict(), np.array([m for _, m in lens], np.int32)
    del masks["tree"]
    arrays = {"output": output, "lse": lse, "query": query, "key_cache": key, "value_cache": value, "query_start_loc": starts}
    arrays |= {"seq_lens": lengths, "block_table": pages, "sinks": None, **masks, "counters": counters}
    if apart == "heads":
        arrays |= {x: gluon.Apart(arrays[x], arrays[x].ndim - 2, 2**30) for x in list(arrays)[:5]}
    if apart == "slots":
        page = launch.ONE_PAGE
        arrays |= {x: gluon.Apart(arrays[x], 1, 2**24) for x in ("key_cache", "value_cache")}
    if equal or settings.get("ends"):
        page = launch.ONE_PAGE
    if equal:
        arrays |= dict.fromkeys(("query_start_loc", "block_table"))
        if all(m == page_keys for _, m in lens):
            arrays["seq_lens"] = None
    own = [gluon.strides(arrays[name])[:-1] for name in ("output", "query", "key_cache", "value_cache", "lse")]
    own.append((0 if equal else gluon.strides(pages)[0], lens[0][0] if equal else 0))
    for program in range(programs):
        module = gluon.module("hopper_prefill", (program, programs), bfloat16)
        if not again:
            module._nan_safe = _never
        its = launch.PrefillParams(**settings)
        plan = launch.plan_of(launch.Arrays(query.shape, key.shape, value.shape, *strides), len(lens), page, True, its, True)
        q_map, k_map, v_map = plan.maps
        placed = [gluon.strides(arrays[x]) for x in ("query", "key_cache", "value_cache", "output")]
        at = launch.Arrays(query.shape, key.shape, value.shape, *placed)
        far = launch.plan_of(at, len(lens), page, True, its, True).far
        assert far == bool(apart)
        given = launch.Variant(not equal, False, q_map is not None, False, True, mask.batch.is_causal is not None, far, equal)
        constants = launch.constants(plan.sizes, its, given)
        for option in ("num_warps", "maxnreg", "enable_fp_fusion"):
            constants.pop(option, None)
        names = (
            "o_t", "o_h", "q_t", "q_h", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "lse_h", "table_r",
            "rows",
        )  # fmt: skip
        module.prefill(
            **{name: None if x is None else gluon.Pointer(x) for name, x in arrays.items()},
            q_desc=None if q_map is None else gluon.Boxes(query, *q_map), k_desc=gluon.Boxes(key, *k_map),
            v_desc=gluon.Boxes(value, *v_map), factor=size**-0.5 * LOG2E, v_factor=1.0, num_reqs=len(lens),
            num_pages=key.shape[1] if equal else len(key),
            **{name: gluon.integer(x) for name, x in zip(names, sum(own, ()), strict=True)}, **constants,
        )  # fmt: skip
    assert counters.tolist() == [0, 0]
    compared = np.ones(H, bool)
    if broken_head is not None:
        compared = np.arange(H) // (H // K) != broken_head[0]
        key[..., broken_head[0], :] = value[..., broken_head[0], :] = 0
    for r, (n, m) in enumerate(lens):
        rows = slice(int(starts[r]), int(starts[r + 1]))
        if n <= 1:
            assert (output[rows] == 9).all()
            continue
        own, seen = table[r, : counts[r]], seen_of[r]
        k, v = (np.repeat(x[own].reshape(-1, K, size)[:m], H // K, 1).astype(np.float64) for x in (key, value))
        used = seen.any(0)
        scores = np.einsum("thd,shd->hts", query[rows], np.where(used[:, None, None], k, 0)) * size**-0.5
        scores = np.where(seen, scores, -np.inf)
        most = np.where(seen.any(1), scores.max(-1, initial=-np.inf), 0)[..., None]
        with np.errstate(divide="ignore"):
            log = np.log(np.exp(scores - most).sum(-1)) + most[..., 0]
        weights = np.exp(scores - np.where(np.isinf(log), 0, log)[..., None])
        broken = np.isnan(v).any((1, 2)) & used
        want = np.einsum("hts,shd->thd", weights, np.where(used[:, None, None] & ~np.isnan(v), v, 0))
        np.testing.assert_allclose(lse[compared, rows], log[compared], rtol=1e-4, atol=1e-4)
        hit = (seen & broken).any(1)
        assert np.isnan(output[rows][hit]).any((1, 2)).all()
        np.testing.assert_allclose(output[rows][~hit][:, compared], want[~hit][:, compared], rtol=1e-3, atol=1e-4)


def _never(*_: Any) -> None:
    raise AssertionError("rows are computed again")


CAUSAL, BOTH = LayerMask(), LayerMask(causal=False)
T = sum(n for n, _ in LENS)
MIXED = np.array([True, True, False, True, False])
PREFIX = np.array([140, 5, 300, 10, 0], np.int32)  # beyond the first tile's rows, too
IMAGES, RANGES = spans_of(LENS, 64, 40, False), spans_of(LENS, 64, 40, True)
MASKS = {
    "causal": Visibility(CAUSAL),
    "both directions": Visibility(BOTH),
    "window": Visibility(LayerMask(True, (50, None))),
    "two-sided window": Visibility(LayerMask(False, (50, 20))),
    "chunks": Visibility(LayerMask(chunk_size=48)),
    "chunks in a window": Visibility(LayerMask(False, (40, 3), 100)),
    "mixed causality": Visibility(BOTH, BatchMask(is_causal=MIXED)),
    "mixed causality in a window": Visibility(LayerMask(False, (60, 20)), BatchMask(is_causal=MIXED)),
    "prefix": Visibility(CAUSAL, BatchMask(prefix=PREFIX)),
    "prefix in chunks": Visibility(LayerMask(chunk_size=48), BatchMask(prefix=PREFIX)),
    "images": Visibility(CAUSAL, BatchMask(spans=IMAGES)),
    "images in a window": Visibility(LayerMask(True, (30, None), None, False), BatchMask(spans=IMAGES)),
    "images cut by a window": Visibility(LayerMask(False, (30, 9), None, True), BatchMask(spans=IMAGES)),
    "ranges": Visibility(CAUSAL, BatchMask(spans=RANGES)),
    "ranges in a window": Visibility(LayerMask(True, (30, None), None, False), BatchMask(spans=RANGES)),
    "everything": Visibility(LayerMask(False, (None, None), 80), BatchMask(None, RANGES, PREFIX, MIXED)),
}


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_rows_see_what_the_definition_says(name: str, wild: bool) -> None:
    run(LENS, mask=MASKS[name], wild=wild, rules={"keys_below": 190 if wild else UNBOUNDED})  # tiles of 64 keys and of 128


@pytest.mark.parametrize("spans", [False, True])
def test_pages_before_every_window_may_be_freed(spans: bool) -> None:
    """Also where rows are computed again key by key, by plain loads: only the engine fills in zeros for what is no page."""
    lens = [(20, 141)]
    batch = BatchMask(spans=spans_of(lens, 16, 10, False) if spans else None)
    run(lens, mask=Visibility(LayerMask(True, (30, None), None, False), batch), freed=True, programs=1)


SCORES = {
    "larger at first": lambda at: (127.0 - at) / 2,
    "much larger at first": lambda at: np.where(at < 40, 80.0, 0.0),
    "beyond float32 at first": lambda at: np.where(at < 40, 300.0, 0.0),
    "all small": lambda at: -200.0 + 0 * at,
    "small but for a few, beyond float32": lambda at: np.where(at % 64 > 61, 0.0, -200.0),
    "large at once": lambda at: 500.0 + 0 * at,
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_scores_of_any_size(name: str, few: bool) -> None:
    """In tiles without a mask the sums decide what is subtracted from scores."""
    lens = [(150, 277), (64, 512)]  # the first row sees nothing of its first tile, and all of the next one
    for mask in (MASKS["causal"], MASKS["both directions"]):
        run(lens, mask=mask, rules={"keys_below": 190 if few else UNBOUNDED}, scores_of=SCORES[name], again="beyond" in name)


@pytest.mark.parametrize("name", ["causal", "window", "everything"])
def test_float16_needs_the_maximum(name: str) -> None:
    run(LENS, mask=MASKS[name], bfloat16=None, rules={"keys_below": 190 if name == "window" else UNBOUNDED})


@pytest.mark.parametrize(
    ("heads", "size", "page"),
    [
        ((6, 2), 128, 48),
        ((2, 2), 64, 16),
        ((8, 1), 256, 128),
        ((4, 2), 96, 16),
        ((2, 1), 160, 32),
        ((8, 2), 512, 32),
        ((2, 1), 320, 16),
        ((2, 1), 264, 16),
        ((8, 4), 40, 32),
        ((4, 2), 136, 16),
        ((12, 2), 248, 16),
    ],
)
@pytest.mark.parametrize("name", ["images in a window", "everything"])
def test_other_heads_and_pages(name: str, heads: tuple[int, int], size: int, page: int) -> None:
    run(LENS, mask=MASKS[name], heads=heads, size=size, page=page)


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3)])
def test_heads_that_are_far_apart(heads: tuple[int, int], wild: bool) -> None:
    """More than 2**31 elements: heads may be outermost in every array. The engine copies queries of one head a kv head."""
    run([(70, 90), (5, 60)], mask=MASKS["causal"], heads=heads, wild=wild, apart="heads")


def test_slots_that_are_far_apart() -> None:
    """A request's one page may have more than 2**31 elements. Only what is computed again is read without the engine."""
    run([(20, 141)], mask=MASKS["causal"], page=144, wild=True, apart="slots")


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("size", [64, 96, 256])
@pytest.mark.parametrize("keys", [31, 97, 150])
def test_pages_that_end_with_the_last_key(keys: int, size: int, few: bool) -> None:
    """The engine fills in zeros after them, so no value is overwritten."""
    rules = {"keys_below": 190 if few else UNBOUNDED, "ends": True}
    for mask in (MASKS["causal"], MASKS["both directions"]):
        run([(keys, keys), (keys - 9, keys)], mask=mask, size=size, page=keys, rules=rules)


@pytest.mark.parametrize("below", [190, 1000, UNBOUNDED])  # above 64: one consumer, two with 64 keys a tile, two with 128
@pytest.mark.parametrize("size", [64, 96, 256])
@pytest.mark.parametrize("name", ["causal", "both directions", "window"])
def test_equal_requests_have_no_lists(name: str, size: int, below: int) -> None:
    rules = {"keys_below": below, "ends": name != "window"}
    for rows, keys in ((31, 31), (150, 150), (40, 150), (150, 40)):
        run([(rows, keys)] * 3, mask=MASKS[name], size=size, page=keys, rules=rules, wild=below == 190, equal=True)


@pytest.mark.parametrize("below", [190, 1000, UNBOUNDED])
@pytest.mark.parametrize("size", [64, 96, 256])
def test_equal_requests_of_fewer_keys(size: int, below: int) -> None:
    """Padding, whose memory is NaN: of a tile's last keys, of whole tiles, of all but one key, of all keys."""
    rules, mask = {"keys_below": below}, MASKS["both directions"]
    for rows in (31, 150):
        lens = [(rows, m) for m in (300, 150, 257, 20, 1, 0)]
        run(lens, mask=mask, size=size, page=300, rules=rules, wild=below == 190, equal=True)


@pytest.mark.parametrize(("heads", "size"), [((4, 2), 72), ((6, 2), 128), ((4, 2), 160)])
def test_more_stages_of_fewer_keys(heads: tuple[int, int], size: int) -> None:
    """Rings that are passed several times by a unit, and a consumer without rows."""
    run([(70, 700), (65, 65), (129, 333)], mask=MASKS["causal"], heads=heads, size=size, rules={"keys_below": 1000})


@pytest.mark.parametrize("size", [72, 96, 512])
def test_values_that_are_not_finite_in_several_heads(size: int) -> None:
    run([(70, 90), (5, 60)], mask=MASKS["causal"], heads=(8, 4), size=size, wild=True)


@pytest.mark.parametrize("below", [190, 1000, UNBOUNDED])
@pytest.mark.parametrize(("heads", "size"), [((4, 4), 56), ((4, 2), 72), ((12, 4), 72), ((10, 2), 88), ((2, 2), 120)])
def test_heads_of_one_row(heads: tuple[int, int], size: int, below: int) -> None:
    """Their boxes have columns of the heads beside them."""
    rules = {"keys_below": below, "ends": True}
    for rows, keys in ((31, 31), (40, 150)):
        run([(rows, keys)] * 2, mask=MASKS["both directions"], heads=heads, size=size, page=keys, rules=rules, equal=True)
    run([(70, 333)], mask=MASKS["window"], heads=heads, size=size, rules={"keys_below": below})


@pytest.mark.parametrize("of", ["keys", "values"])
@pytest.mark.parametrize("head", range(4))
def test_numbers_of_a_head_beside_are_not_used(head: int, of: str) -> None:
    """One head's keys or values are NaN, of which others' tiles have columns: no row of theirs changes."""
    run([(70, 90), (5, 60)], mask=MASKS["causal"], heads=(8, 4), size=72, broken_head=(head, of))


def test_heads_are_one_row_where_only_their_size_misaligns_them() -> None:
    def joined(size: int, kv_heads: int = 4, width: int = 0, head: int = 0, token: int = 0) -> bool:
        of = ((1, token or kv_heads * size, head or own, 1) for own in (size, width or size))
        return launch._are_joined(size, width or size, kv_heads, *of)

    assert [size for size in range(32, 513, 8) if joined(size)] == list(range(40, 257, 16))
    assert joined(72, 24) and joined(72, 7, token=3 * 8 * 72)
    # one head; tokens of an odd number of heads; other sizes of values; heads that are outermost, or apart
    assert not (joined(72, 1) or joined(72, 3) or joined(72, width=40) or joined(72, head=72 * 100) or joined(72, head=80))


@pytest.mark.parametrize(
    ("name", "lens", "tiles"),
    [
        ("causal", (192, 192), 1 + 2 + 3),
        ("causal", (130, 130), 1 + 2 + 3),
        ("window", (192, 400), 3 + 3 + 3),  # the unit's keys are five tiles
        ("two-sided window", (192, 400), 3 + 3 + 3),
        ("chunks", (192, 192), 1 + 2 + 2),
        ("prefix", (192, 200), 3 + 3 + 4),  # of 180 keys
        ("images", (192, 192), 3 + 3 + 3),
    ],
)
def test_consumers_compute_no_tile_that_only_others_see(
    name: str, lens: tuple[int, int], tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, made = list[int](), gluon.module

    def counting(*args: Any) -> Any:
        module = made(*args)
        scores = module._scores
        module._scores = lambda *operands: computed.append(1) or scores(*operands)
        return module

    monkeypatch.setattr(gluon, "module", counting)
    own = {"prefix": PREFIX[2:3] - 120, "images": spans_of([lens], 64, 40, False)}
    batch = BatchMask(**{{"images": "spans"}.get(name, name): own[name]}) if name in own else BatchMask()
    # tiles of 64 keys, and three consumers of a head's 64 rows each
    run([lens], mask=MASKS[name]._replace(batch=batch), heads=(1, 1), programs=1)
    assert len(computed) == tiles


@pytest.mark.parametrize("seed", range(4))
def test_launches_drawn_at_random(seed: int) -> None:
    """Lengths, heads, tiles and masks that no other test combines."""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        lens = [(int(rng.integers(2, 200)), int(rng.integers(1, 400))) for _ in range(rng.integers(1, 4))]
        left, right, chunk = (int(x) for x in rng.integers((0, 0, 16), (200, 150, 100)))
        mixed = BatchMask(is_causal=rng.integers(2, size=len(lens)) > 0)
        prefix = BatchMask(prefix=np.array([rng.integers(m + 1) for _, m in lens], np.int32))
        masks = [
            Visibility(LayerMask()),
            Visibility(LayerMask(False)),
            Visibility(LayerMask(), prefix),
            Visibility(LayerMask(False), mixed),
            Visibility(LayerMask(True, (left, None))),
            Visibility(LayerMask(False, (left, right))),
            Visibility(LayerMask(False, (left, right)), mixed),
            Visibility(LayerMask(True, (left, None), chunk)),
        ]
        run(
            lens,
            mask=masks[rng.integers(len(masks))],
            heads=[(2, 2), (2, 1), (3, 1), (4, 2), (5, 1), (4, 1)][rng.integers(6)],
            size=[64, 72, 96, 120, 256][rng.integers(5)],
            rules={"keys_below": [None, 190, 1000, 2000, UNBOUNDED][rng.integers(5)]},
            wild=bool(rng.integers(4) == 0),
        )


def test_rows_see_keys_on_both_sides() -> None:
    """On average: causal rows half of their request's keys, and those of a window no more than it has on either side."""

    def below(keys: float, rows: float, left: int | None = None, right: int | None = None) -> int:
        return launch.keys_below(keys, rows, *(UNBOUNDED if bound is None else bound for bound in (left, right)))

    assert [below(n, n, right=0) for n in (379, 381, 499, 501)] == [190, 250, 250, 1000]
    assert [below(n, n) for n in (189, 191, 251)] == [190, 250, 1000]
    assert [below(5000, 5000, 100, right) for right in (0, 80, 100, 200)] == [190, 190, 250, 1000]
    assert below(1739, 1739, 226, 226) == 1000
    assert below(5000, 10, 100) == 190  # few rows come after one


def test_tiles_are_smaller_where_rows_see_few_keys() -> None:
    def tiles(size: int, seen: float | None, width: int | None = None, copied: bool = True, **more: Any) -> tuple[int, int]:
        rules = launch.PrefillParams(**{"right": 0, **more})
        if seen is not None:
            rules = rules.seeing(2 * seen, 2 * seen) if rules.right == 0 else rules.seeing(seen, seen)
        sizes = (8, 4, 1, size, width or size, 16, False)
        constants = launch.constants(sizes, rules, launch.Variant(True, False, copied, False, False))
        assert ("maxnreg" in constants) == (constants["CONSUMERS"] == 1)
        assert constants["BLOCK_Q"] == constants["CONSUMERS"] * 64 // 4 and constants["CONSUMER_REGS"] % 8 == 0
        return int(constants["BLOCK_N"]), int(constants["CONSUMERS"])

    def keys(*arguments: Any, **more: Any) -> int:
        return tiles(*arguments, **more)[0]

    assert [keys(size, 400) for size in (64, 96, 128)] == [64] * 3
    assert [keys(size, 1999) for size in (64, 96, 128)] == [64] * 3
    assert [keys(size, seen, ends=True) for size in (96, 128) for seen in (999, 1000)] == [64, 128] * 2
    assert [keys(size, 4000) for size in (64, 128, 256)] == [128, 128, 64]
    assert keys(192, 400, 128) == 64 and keys(192, 4000, 128) == 128 and keys(192, 4000) == 64
    assert [keys(size, None) for size in (64, 128)] == [64, 128]  # not known
    assert keys(128, 4000, left=256) == 64  # a window hides the others
    assert [keys(size, 300, right=UNBOUNDED) for size in (64, 128)] == [64, 64]
    assert [keys(size, seen, right=UNBOUNDED) for size, seen in ((64, 2500), (96, 2000), (96, 1999))] == [128, 128, 64]
    for right in (0, UNBOUNDED):
        assert [tiles(64, seen, right=right)[1] for seen in (300, 2400, 2500, None)] == [1, 1, 3, 3]
        assert [tiles(64, seen, right=right, ends=True)[1] for seen in (300, 900, 1000)] == [1, 1, 3]
        for ends in (False, True):
            few = 190 if right else 250
            assert [tiles(128, seen, right=right, ends=ends)[1] for seen in (few - 1, few, None)] == [1, 2, 2]
    # two programs of wider heads do not fit in a multiprocessor's memory
    assert [tiles(size, 200)[1] for size in (192, 256, 512)] == [2, 2, 2]
    assert [tiles(192, 200, 128, copied)[1] for copied in (True, False)] == [1, 2]


@pytest.mark.parametrize(
    ("size", "below", "units", "programs"), [(64, 190, 64, 396), (128, 190, 64, 264), (128, 1000, 128, 132)]
)
def test_programs_of_one_consumer_share_a_multiprocessor(size: int, below: int, units: int, programs: int) -> None:
    tokens, heads = 4000, 8
    shape = tokens, heads, size
    arrays = launch.Arrays(shape, shape, shape, *[(heads * size, size, 1)] * 4)
    params = launch.PrefillParams(right=0, keys_below=below)
    plan = launch.plan_of(arrays, 10, 128, False, params, True)
    assert plan.tiles == (tokens // units + 10) * heads and plan.programs(132) == programs
    assert plan.programs(1000) == plan.tiles
    made = launch.constants(plan.sizes, params, launch.Variant(False, False, True, False, False))
    if made["CONSUMERS"] == 1:  # eight warps, and queries, keys and values, of each program
        assert plan.resident * 8 * 32 * made["maxnreg"] <= 65536 and made["maxnreg"] % 8 == 0
        used = 2 * 64 * size * (made["Q_STAGES"] + 2 * made["STAGES"])
        assert plan.resident * (used + 4096 + 1024) <= 228 * 1024


@pytest.mark.parametrize("below", [None, 190, 2000])
@pytest.mark.parametrize("group", [1, 33, 64, 65, 71, 128])
def test_a_unit_holds_a_token(group: int, below: int | None) -> None:
    """One consumer has 64 rows: fewer than a token's where a kv head has more query heads."""
    params = launch.PrefillParams(right=0, keys_below=below)
    query, keys = ((300, heads, 64) for heads in (group, 1))
    strides = [(heads * 64, 64, 1) for heads in (group, 1, 1, group)]
    plan = launch.plan_of(launch.Arrays(query, keys, keys, *strides), 3, 128, False, params, True)
    variant = launch.Variant(False, False, plan.maps[0] is not None, False, False)
    constants = launch.constants(plan.sizes, params, variant)
    assert constants["BLOCK_Q"] >= 1 and plan.tiles == (300 // constants["BLOCK_Q"] + 3) * constants["SHARED"]
    assert plan.resident == (3 if constants["CONSUMERS"] == 1 else 1)


@pytest.mark.parametrize("heads", [(10, 2), (7, 1), (12, 2)])
def test_units_of_some_heads_of_a_group(heads: tuple[int, int]) -> None:
    """Groups of 5, 7 and 6 do not divide a consumer's 64 rows: units have 1, 1 and 2 heads, unless requests have few rows."""
    lens = [(150, 150), (200, 333)]
    run(lens, mask=MASKS["two-sided window"], heads=heads, rules={"keys_below": 190})
    run(lens, mask=MASKS["causal"], heads=heads, rules={"keys_below": 190}, wild=True)
    run(
        [(144, 144)] * 2,
        mask=MASKS["both directions"],
        heads=heads,
        page=144,
        rules={"keys_below": 190, "ends": True},
        equal=True,
    )
    query, keys = ((350, n, 64) for n in heads)
    strides = [(n * 64, 64, 1) for n in (heads[0], heads[1], heads[1], heads[0])]
    for requests, below, shared in ((2, 190, True), (2, None, False), (10, 190, False)):
        params = launch.PrefillParams(right=0, keys_below=below)
        plan = launch.plan_of(launch.Arrays(query, keys, keys, *strides), requests, 16, False, params, True)
        assert (plan.sizes[2] > 1) is (plan.maps[0] is not None) is shared and plan.sizes[1] * plan.sizes[2] == heads[
            0
        ] // heads[1]


@pytest.mark.parametrize(("size", "below"), [(64, 190), (64, None), (128, None), (512, None), (72, 1000)])
def test_consumers_of_a_token_or_none(size: int, below: int | None) -> None:
    """64 rows are 32 tokens: of units of 64 or 96 tokens, the last one has one token of a later consumer, or none."""
    lens = [(32, 40), (33, 33), (64, 100), (65, 65), (97, 110), (160, 161)]
    run(lens, mask=MASKS["causal"], size=size, rules={"keys_below": below})


def test_programs_without_a_unit_read_no_spans() -> None:
    """They look up a unit beyond the last one, whose rows would be before the first row of the batch."""
    lens = [(20, 20)]
    run(lens, mask=Visibility(CAUSAL, BatchMask(spans=spans_of(lens, 8, 4, False))), programs=5)


def test_which_heads_it_serves() -> None:
    """Heads above 256 leave no memory in which consumers could store queries."""
    dense = 16 * 512, 512, 1
    assert launch.copies(4, dense, False, True)
    assert not any(
        (launch.copies(3, dense, False, True), launch.copies(4, dense, True, True), launch.copies(4, dense, False, False))
    )
    assert not launch.copies(4, (1 << 20, 8192, 514, 1), False, True)  # of a batch [B, S, H, D]
    for copied in (False, True):
        assert launch.fits(512, 512, copied, 4, 16) == launch.fits(320, 264, copied, 4, 16) == copied
        assert launch.fits(256, 256, copied, 3, 16) and launch.fits(512, 128, copied, 4, 16) == copied
    assert not launch.fits(520, 520, True, 4, 16)
