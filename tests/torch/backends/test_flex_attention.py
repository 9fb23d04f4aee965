"""FLEX_ATTENTION on a CPU: the suite on PyTorch's written-out form of the mods, two compiled programs, and the plans that
only compiled kernels read, against brute force (about a minute; `attn conform FLEX_ATTENTION` compiles everything)."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Feature, Request
from attn.errors import UnsupportedError
from attn.reference import visible_mask
from attn.testing import Case, cases_for, check_conformance
from attn.torch import Attention
from attn.torch.backends import _flex, flex_attention
from attn.torch.backends._flex import MaskKey
from attn.torch.backends.flex_attention import FlexAttentionBackend, FlexAttentionMetadata, check_span
from attn.visibility import LayerMask
from tests.levels import sampled
from tests.testing import covering

CPU = Device("torch", "cpu", "a CPU", "x86_64")
H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")
H, K, D, P = 4, 2, 32, 16
_PROPERTIES = ("shared_pages", "table_tail", "permute_pages", "tree_paths", "split_and_merge", "neighbours", "poison")


def _written_out() -> list[Case]:
    """What needs no compiler: refusals, every fixture, some of the grid and of the properties, with an lse or sinks."""
    found, count = [], 0
    smoke = {case.name for case in cases_for(FlexAttentionBackend, CPU, "smoke")}
    for case in cases_for(FlexAttentionBackend, CPU):
        if case.check.startswith("refusal"):
            found.append(case)
        elif case.lse or case.sinks:
            count += case.name.startswith("grid")
            chosen = case.name.startswith("grid") and count % 16 == 0
            if chosen or (case.dtype == "float32" and (case.name in smoke or case.check in _PROPERTIES)):
                found.append(case)
    return found


def _always(case: Case) -> bool:
    return covering.is_kept("TRITON_ATTN", case) or case.name in ("window of 1", "mixed causality, spans, prefix, chunks")


@pytest.mark.parametrize("case", sampled(_written_out(), 12, "FLEX", _always), ids=str)
def test_the_suite_without_a_compiler(case: Case) -> None:
    check_conformance(FlexAttentionBackend, case)


def test_lengths_that_are_assigned_to_a_batch_are_planned_anew() -> None:
    layer = Attention(num_heads=H, head_size=D, num_kv_heads=K, block_size=P, backend="FLEX_ATTENTION", sinks=torch.zeros(H))
    cache, query = layer.new_kv_cache(4).normal_(), torch.randn(1, H, D)

    def built(length: int) -> FlexAttentionMetadata:
        batch = CommonAttentionMetadata.from_lens([1], [length], block_table=[[1, 2]], block_size=P)
        return layer.build(batch)  # type: ignore[no-any-return]

    batch, shorter = built(30), built(10)
    with torch.no_grad():
        want = layer(query, None, None, cache, shorter)
        assert not torch.allclose(layer(query, None, None, cache, batch), want)
        batch.seq_lens, batch.seq_lens_cpu, batch.max_seq_len = shorter.seq_lens, shorter.seq_lens_cpu, shorter.max_seq_len
        torch.testing.assert_close(layer(query, None, None, cache, batch), want)


# compiled


def _compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed (g++)")


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # what the compiler itself says
def test_a_graph_plans_the_lengths_of_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture makes has no value before a replay, and what was made before is of the lengths then."""
    layer = Attention(num_heads=H, head_size=D, num_kv_heads=K, block_size=P, backend="FLEX_ATTENTION")
    meta = layer.build(CommonAttentionMetadata.from_lens([1], [9], [[1, 2]], P))
    plans = []
    for captured in (False, True, False):
        monkeypatch.setattr(flex_attention, "is_captured", lambda x, captured=captured: captured)
        plans.append(meta.planned(4, P, 16, MaskKey(LayerMask())))
    assert plans[0] is plans[2] and plans[1] is not plans[0]


def test_one_program_serves_batches_of_every_shape() -> None:
    """Every rule at once; the tables, lengths, trees and the cache's extent differ from batch to batch."""
    before = _compilations()
    rules: dict[str, Any] = {
        "sliding_window": 21,
        "logits_soft_cap": 2.0,
        "alibi": True,
        "tree": 6,
        "inputs": "needle",
        "poison": "huge",
    }
    for i, (q, m) in enumerate(
        [
            ((6, 4, 18, 1, 6), (20, 4, 18, 9, 40)),
            ((1,) * 9, (1, 15, 16, 17, 33, 64, 90, 2, 3)),
            ((5,), (5,)),
            ((1, 2, 3), (100, 200, 70)),
        ]
    ):
        case = Case(f"batch {i}", q, m, num_blocks=(64, 64, 32, 48)[i], geometry_seed=i, **rules)
        check_conformance(FlexAttentionBackend, case)
    assert _compilations() - before == 1


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_long_blocks_in_bfloat16() -> None:
    """Pages that are seen whole among others, a page that two requests share, rows that see no key."""
    q, m = (90, 70, 60), (90, 130, 60)
    assert _flex.block_rows(sum(q), len(q)) == 64
    case = Case("compiled", q, m, dtype="bfloat16", inputs="needle", poison="huge", num_blocks=64, shared_prefix=48)
    check_conformance(FlexAttentionBackend, case)
    check_conformance(FlexAttentionBackend, case.replace(seq_lens=(0, 33, 60), shared_prefix=0, padding=3))


# plans


def _metadata(
    q: list[int], m: list[int], num_blocks: int = 64, tree: Any = None, tables: Any = None, causal: bool = True, **spec: Any
) -> flex_attention.FlexAttentionMetadata:
    free = iter(np.random.default_rng(0).permutation(num_blocks).tolist())
    tables = tables or [[next(free) for _ in range(-(-length // P))] for length in m]
    batch = CommonAttentionMetadata.from_lens(q, m, tables, P, causal=causal).replace(tree_mask=tree)
    builder = FlexAttentionBackend.get_builder_cls()(KVCacheSpec(P, K, D, "float32", num_blocks=num_blocks, **spec))
    return builder.build(0, batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("left", [None, 0, 20])
@pytest.mark.parametrize(("right", "causal"), [(None, True), (None, False), (3, False), (0, False)])
@pytest.mark.parametrize("block", [16, 64])
def test_a_block_of_rows_visits_what_its_rows_see(left: int | None, right: int | None, causal: bool, block: int) -> None:
    """Nothing else of its request, nothing of another's, and what is listed as whole is seen by all of its rows."""
    q, m = [1, 0, 70, 33, 5, 1], [100, 40, 170, 33, 0 if not causal else 5, 1]
    meta = _metadata(q, m, causal=causal)
    masks = MaskKey(LayerMask(causal, (left, right)))
    plan = _flex.lay_out(meta, meta.block_table, meta.seq_lens, 64, P, block, masks)
    starts, first = meta.query_start_loc.tolist(), 0
    for r, (n, total) in enumerate(zip(q, m, strict=True)):
        table = meta.block_table[r].tolist()
        for nth in range(-(-n // block)):
            tokens = np.arange(nth * block, min(n, (nth + 1) * block))
            assert plan.source[(first + nth) * block :][: len(tokens)].tolist() == (starts[r] + tokens).tolist()
            p, j = (tokens + total - n)[:, None], np.arange(total)
            seen = np.ones((len(tokens), total), bool) if left is None else j >= p - left
            seen = seen & (j <= p) if causal else seen if right is None else seen & (j <= p + right)
            by_page = [seen[:, i * P : (i + 1) * P] for i in range(-(-total // P))]
            some, whole = (plan.lists[i + 1][first + nth, : plan.lists[i][first + nth]].tolist() for i in (0, 2))
            assert set(some) | set(whole) >= {table[i] for i, part in enumerate(by_page) if part.any()}
            assert set(some + whole) <= set(table[: len(by_page)]) and len(set(some + whole)) == len(some + whole)
            assert all(by_page[table.index(page)].all() and by_page[table.index(page)].shape[1] == P for page in whole)
            if left is not None or causal:  # and little else: the pages at the ends of the range
                assert len(some + whole) <= sum(part.any() for part in by_page) + 1
            want = (~seen.any(1)).tolist()
            assert plan.unseeing[starts[r] + tokens].tolist() == want
        first += -(-n // block)
    assert not plan.lists[0][first:].any() and not plan.lists[2][first:].any()
    assert plan.source[plan.back].tolist() == list(range(sum(q)))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    "masks",
    [
        MaskKey(LayerMask(True, (None, 0)), ranges=True),
        MaskKey(LayerMask(True, (20, 0)), ranges=True),
        MaskKey(LayerMask(True, (20, 0), span_window=True), ranges=True),
        MaskKey(LayerMask(False, chunk_size=24), ranges=True),
        MaskKey(LayerMask(False, (9, 0), 40), mixed=True, ranges=True),
        MaskKey(LayerMask(False), mixed=True),
    ],
)
def test_pages_of_spans_prefixes_chunks_and_mixed_causality(masks: MaskKey, block: int) -> None:
    """Each block visits every page of which a row sees a key, and calls whole only those that all of its rows see."""
    q, m = [1, 0, 70, 33, 5, 1], [100, 40, 170, 33, 5, 1]
    rng = np.random.default_rng(block)
    spans, prefix = np.full((sum(q), 2), -1, np.int32), np.array([17, 0, 3, 0, 5, 0], np.int32)
    totals = np.repeat(m, q)
    spans[::3, 0] = rng.integers(0, totals[::3])
    spans[::3, 1] = rng.integers(spans[::3, 0], totals[::3])
    causal = [True, False, False, True, True, False]
    tables, pages = [], iter(rng.permutation(64).tolist())
    for length in m:
        tables.append([next(pages) for _ in range(-(-length // P))])
    layer = masks.layer
    said: Any = causal if masks.mixed else layer.causal
    extra = {"spans": spans, "prefix": prefix} if masks.ranges else {}
    batch = CommonAttentionMetadata.from_lens(q, m, tables, P, causal=said, **extra)
    meta = FlexAttentionBackend.get_builder_cls()(KVCacheSpec(P, K, D, "float32", num_blocks=64)).build(0, batch)
    plan = _flex.lay_out(meta, meta.block_table, meta.seq_lens, 64, P, block, masks)
    starts, first, visited = np.cumsum([0, *q]), 0, 0
    for r, (n, total) in enumerate(zip(q, m, strict=True)):
        own = spans[starts[r] : starts[r + 1]] if masks.ranges else None
        bounds = {"spans": own, "prefix": int(prefix[r]) if masks.ranges else 0, "chunk_size": layer.chunk_size}
        by_order = causal[r] if masks.mixed else layer.causal
        cuts = bool(layer.span_window)
        seen = visible_mask(n, total, causal=by_order, window=layer.window, span_window=cuts, **bounds)
        for nth in range(-(-n // block)):
            rows = seen[nth * block : (nth + 1) * block]
            by_page = {page: rows[:, i * P : (i + 1) * P] for i, page in enumerate(tables[r])}
            some, whole = (plan.lists[i + 1][first + nth, : plan.lists[i][first + nth]].tolist() for i in (0, 2))
            assert set(some) | set(whole) >= {page for page, part in by_page.items() if part.any()}
            assert all(by_page[page].all() and by_page[page].shape[1] == P for page in whole)
            visited += len(whole)
        assert plan.unseeing[starts[r] : starts[r + 1]].tolist() == (~seen.any(1)).tolist()
        first += -(-n // block)
    assert visited or block == 64 or layer.window[0] == 9


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_spans_compiled() -> None:
    """One program for batches with spans of other lengths and places, beside a window and within chunks."""
    before = _compilations()
    for seed, (q, m) in enumerate([((40, 1, 20), (60, 33, 20)), ((3, 40, 2), (30, 90, 50))]):
        rules: dict[str, Any] = {"sliding_window": 21, "spans": 9, "chunk_size": 48, "inputs": "needle", "poison": "huge"}
        case = Case(f"spans {seed}", q, m, geometry_seed=seed, num_blocks=32 + 16 * seed, **rules)
        check_conformance(FlexAttentionBackend, case)
    assert _compilations() - before == 1


def test_pages_that_trees_decide_on_are_never_whole() -> None:
    tree = np.tri(20, dtype=np.bool_)[None].repeat(2, 0)
    meta = _metadata([20, 30], [60, 70], tree=tree)
    plan = _flex.lay_out(meta, meta.block_table, meta.seq_lens, 64, P, 16, MaskKey(LayerMask(), tree=True))
    assert plan.lists[2].tolist()[:4] == [2, 2, 2, 3]  # whole pages before token 40, and before tokens 41 and 57
    begin = plan.rows[0, 0, 4]
    assert begin == 2 * 64 + 1 and plan.places[begin:].view(2, 20, 20).tolist() == tree.astype(int).tolist()
    assert (plan.rows[:2, :, 4].flatten()[:20] - begin == torch.arange(20) * 20).all() and (plan.rows[2:, :, 4] == -1).all()


def _layer(**changes: Any) -> tuple[Attention, Attention]:
    layers = tuple(
        Attention(H, D, num_kv_heads=K, dtype=torch.float32, backend=name, **changes)
        for name in ("FLEX_ATTENTION", "TORCH_SDPA")
    )
    for layer in layers:
        layer.impl.need_to_return_lse_for_decode = True
    return layers  # type: ignore[return-value]


def _same(q: list[int], m: list[int], tables: list[list[int]], **changes: Any) -> None:
    """FLEX_ATTENTION against TORCH_SDPA on the same cache and tables."""
    flex, plain = _layer(**changes)
    cache, query = torch.randn(2, 16, P, K, D), torch.randn(sum(q), H, D)
    batch = CommonAttentionMetadata.from_lens(q, m, tables, P)
    results = [
        layer(query, None, None, cache, layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch))
        for layer in (flex, plain)
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_incident_22_one_page_in_two_requests_at_different_places() -> None:
    """vLLM #30915: a physical page mapped back to one logical page."""
    _same([2, 3, 1], [40, 48, 30], [[3, 5, 7], [5, 9, 3], [7, 5]])


def test_incident_22_a_page_handed_out_anew_behind_a_window() -> None:
    _same([2], [60], [[5, 3, 7, 5]], sliding_window=17)


def test_a_page_named_twice_where_both_are_seen_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"block_table\[1\] lists block 3 twice"):
        _metadata([1, 1], [20, 40], tables=[[3, 4], [3, 5, 3]])
    with pytest.raises(UnsupportedError, match=r"block_table\[0\] lists block 5 twice"):
        _metadata([2], [60], tables=[[5, 3, 7, 5]], sliding_window=48)


def test_incident_6_indices_are_64_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #50427: requests times pages of a cache outgrow 32 bits before anything else does."""
    monkeypatch.setattr(_flex, "_places", lambda *args: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(_flex, "_columns", lambda *args: 2)
    meta = _metadata([1, 1, 1], [5, 6, 7])
    pages = 2**31 - 5
    plan = _flex.lay_out(meta, meta.block_table, meta.seq_lens, pages, P, 16, MaskKey(LayerMask()))
    assert plan.rows.dtype == torch.int64
    assert plan.rows[:3, 0, 0].tolist() == [0, pages, 2 * pages]


def test_incident_6_a_cache_that_kernels_cannot_count_is_refused() -> None:
    small, large = (torch.empty(n, 16, 8, 128, device="meta") for n in (2**17, 2**17 + 1))
    check_span(small)
    with pytest.raises(
        UnsupportedError, match=r"131073 blocks spans 2147500032 elements \(supports 2147483648, 131072 blocks\)"
    ):
        check_span(large)


# refusals


def test_what_the_machine_lacks_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(64, "float32", block_size=16)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(flex_attention, "installed", lambda name: False)
    assert FlexAttentionBackend.why_not(request, CPU) == ["no C++ compiler is installed (g++, or the one set by CXX)"]
    assert FlexAttentionBackend.why_not(request, H200) == ["triton is not installed"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 (supports auto)"),
        ({"features": frozenset({Feature.NAN_SAFE})}, "nan_safe not supported"),
        ({"block_size": 8}, "block_size=8 (supports multiples of 16)"),
        ({"head_size": 320}, "head_size=320 (supports multiples of 8 from 16 up to 256)"),
    ],
)
def test_what_it_does_not_serve(asked: dict[str, Any], why: str) -> None:
    assert why in FlexAttentionBackend.why_not(
        Request(**{"head_size": 64, "dtype": "bfloat16", "block_size": 16, **asked}), H200
    )


@pytest.mark.parametrize(("head_size", "dtype", "page"), [(64, 2, 16), (128, 2, 64), (256, 2, 128), (128, 4, 48), (256, 4, 16)])
def test_tiles_divide_a_block_and_a_page_and_fit(head_size: int, dtype: int, page: int) -> None:
    for block in (16, 64):
        rules = _flex.FlexRules(MaskKey(LayerMask()), 1.0, None, False, True, block, page)
        tiles = _flex.tiles(rules, head_size * dtype)
        assert block % tiles["BLOCK_M"] == 0 and page % tiles["BLOCK_N"] == 0
        assert tiles["BLOCK_M"] * head_size * dtype + 4 * tiles["BLOCK_N"] * head_size * dtype <= 96 << 10
