"""FLASHINFER on a stand-in: the suite, plans that are shared and never mixed up, and what is refused."""

import gc
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attn import reference
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Feature, Request
from attn.errors import MetadataError, UnsupportedError
from attn.testing import check_conformance
from attn.testing.case import Case
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch import graphs
from attn.torch.backends import _flashinfer, _flashinfer_trtllm, flashinfer
from attn.torch.backends._flashinfer import Group
from attn.torch.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
)
from tests.levels import some
from tests.testing import covering

H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")


@pytest.fixture(autouse=True)
def vendor(standins: Callable[..., None]) -> Iterator[None]:
    standins("flashinfer_pkg")
    yield
    _flashinfer._idle.clear()
    _flashinfer_trtllm._installed.cache_clear()
    _flashinfer_trtllm.backend_for.cache_clear()


def test_the_suite_on_a_stand_in() -> None:
    cases = cases_of(subject_of(FlashInferBackend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in some(cases, 20, "FLASHINFER", partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(FlashInferBackend, case)


def _batch(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    tables, free = [], iter(range(100))
    for length in seq_lens:
        tables.append([next(free) for _ in range(-(-length // 16))])
    return CommonAttentionMetadata.from_lens(query_lens, seq_lens, tables, 16, strict=False)


def _built(builder: object, query_lens: list[int], seq_lens: list[int]) -> FlashInferMetadata:
    return builder.build(0, _batch(query_lens, seq_lens))  # type: ignore[attr-defined]


SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")


def _group(wrapper: str = "decode", last: int = 2, **changes: object) -> Group:
    plain = Group(wrapper, 0, last, 8, 2, 64, True, -1, 0.0, 0.125, torch.bfloat16, torch.bfloat16)
    return plain._replace(**changes)  # type: ignore[arg-type]


def test_layers_that_agree_share_a_plan_and_others_do_not() -> None:
    meta = _built(FlashInferBackend.get_builder_cls()(SPEC), [1, 1], [40, 5])
    plan = meta.planned(_group())
    assert meta.planned(_group()) is plan
    assert meta.planned(_group(window_left=7)) is not plan and meta.planned(_group(scale=0.5)) is not plan


@torch.no_grad()
def test_its_call_is_one_operator_of_a_graph_and_finds_the_plan_there(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, impl = FlashInferBackend.get_builder_cls()(SPEC), FlashInferBackend.get_impl_cls()(8, 64, 0.125, 2)
    one = torch.ones(())
    key = graphs.paged_key(impl, SPEC)
    layer = SimpleNamespace(impl=impl, _k_scale=one, _v_scale=one, graph_key=key)
    torch.manual_seed(0)
    given = [torch.randn(4, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    caches = [torch.zeros(FlashInferBackend.get_kv_cache_shape(8, 16, 2, 64), dtype=torch.bfloat16) for _ in range(2)]
    metadata = _built(builder, [3, 1], [40, 5])
    want = impl.forward(layer, *given, caches[0], metadata)

    def step(*arrays: torch.Tensor) -> torch.Tensor:
        return graphs.call(layer, *arrays, metadata, (8, 64)) * 2  # type: ignore[no-any-return]

    torch.compiler.reset()
    monkeypatch.setattr(type(builder), "build", None)  # a plan made again would show
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given, caches[1]), want * 2)
    assert torch.equal(*caches)


def test_two_batches_in_flight_never_share_a_wrapper_and_dead_ones_give_theirs_back() -> None:
    builder = FlashInferBackend.get_builder_cls()(SPEC)
    first, second = _built(builder, [1, 1], [40, 5]), _built(builder, [1, 1], [3, 70])
    held = first.planned(_group())
    assert second.planned(_group()) is not held
    np.testing.assert_array_equal(held.planned["lens"], [40, 5])
    del first
    gc.collect()
    assert _built(builder, [1, 1], [9, 9]).planned(_group()) is held


def test_a_wrapper_is_reused_for_the_same_dtypes_only() -> None:
    """A paged wrapper's first plan decides between FA3 and FA2 for good; FA3 takes no fp8 cache."""
    builder, group = FlashInferBackend.get_builder_cls()(SPEC), _group("prefill")
    first = _built(builder, [2, 2], [40, 5])
    held = first.planned(group)
    del first
    gc.collect()
    second = _built(builder, [2, 2], [9, 9])
    assert second.planned(group._replace(kv_dtype=torch.float8_e4m3fn)) is not held
    assert second.planned(group) is held


@pytest.mark.parametrize(("query_lens", "decodes"), [([1, 1, 5], 2), ([5, 1, 1], 0), ([1, 0, 1], 1), ([1, 1], 2), ([], 0)])
def test_decodes_count_only_at_the_head_of_the_batch(query_lens: list[int], decodes: int) -> None:
    meta = _built(FlashInferBackend.get_builder_cls()(SPEC), query_lens, [20] * len(query_lens))
    assert meta.num_decodes == decodes


@pytest.mark.parametrize("feature", [Feature.ALIBI, Feature.TWO_SIDED_WINDOW, Feature.TREE_MASK])
def test_what_flashinfer_would_drop_in_silence_is_refused(feature: Feature) -> None:
    """vLLM gives FlashInfer an ALiBi model and loses the slopes."""
    request = Request(head_size=128, dtype="bfloat16", block_size=16, features=frozenset({feature}))
    assert f"{feature.value} not supported" in "; ".join(FlashInferBackend.why_not(request, H200))


@pytest.mark.parametrize("arrays", [{"spans": [[-1, -1], [1, 3], [1, 3], [1, 3]]}, {"prefix": [2]}], ids=str)
def test_a_batch_with_spans_is_refused_with_the_reason(arrays: dict[str, Any]) -> None:
    why = "spans not supported: FlashInfer's kernels for spans are FA2's, with one range a row, and are not wrapped"
    request = Request(head_size=64, dtype="bfloat16", block_size=16, features=frozenset({Feature.SPANS}))
    assert why in FlashInferBackend.why_not(request, H200)
    step = _Step()
    step.query = torch.randn(4, 8, 64).to(torch.bfloat16)
    batch = CommonAttentionMetadata.from_lens([4], [4], [[0]], 16, **arrays)
    with pytest.raises(UnsupportedError, match=f"FLASHINFER: {why}"):
        step(FlashInferMetadataBuilder(SPEC).build(0, batch))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_a_log_sum_exp_is_refused_where_only_fa2_serves(arch: str) -> None:
    def reasons(arch: str, *features: Feature) -> str:
        request = Request(head_size=128, dtype="bfloat16", block_size=16, features=frozenset(features))
        return "; ".join(FlashInferBackend.why_not(request, Device("torch", "cuda", "", arch)))

    assert f"lse on {arch}: FlashInfer's FA2 kernels sum rounded weights" in reasons(arch, Feature.LSE)
    assert "lse" not in reasons(arch) + reasons("sm_90", Feature.LSE, Feature.SOFT_CAP) + reasons("sm_100", Feature.LSE)
    assert "lse on sm_100" in reasons("sm_100", Feature.LSE, Feature.SOFT_CAP)


def test_a_log_sum_exp_comes_from_kernels_that_sum_unrounded_weights() -> None:
    builder = FlashInferBackend.get_builder_cls()(SPEC)
    few, decodes = _built(builder, [4, 33], [40, 40]), _built(builder, [1, 1], [40, 5])
    assert few.planned(_group("prefill", lse=True)).backend == "auto"
    assert decodes.planned(_group()).fa2 and not decodes.planned(_group(lse=True)).fa2


@pytest.mark.parametrize("heads", [8, 10, 14])
def test_a_log_sum_exp_of_decodes_in_groups_of_every_size(heads: int) -> None:
    """4 query heads a kv head have decode kernels without tensor cores, 5 and 7 have none."""
    check_conformance(FlashInferBackend, Case("grouped", (1, 1, 1), (40, 1, 130), dtype="bfloat16", num_heads=heads, lse=True))


def test_a_prefill_of_few_rows_a_request_asks_for_fa2_in_wrappers_of_its_own() -> None:
    builder, group = FlashInferBackend.get_builder_cls()(SPEC), _group("prefill")
    few, many = _built(builder, [4, 33], [40, 40]), _built(builder, [31, 33], [40, 40])
    held = few.planned(group)
    assert held.backend == "fa2" and many.planned(group).backend == "auto"
    del few
    gc.collect()
    assert _built(builder, [64, 64], [64, 64]).planned(group) is not held
    assert _built(builder, [4, 2], [64, 64]).planned(group) is held


def _decodes(seq_lens: list[int], pages: list[list[int]]) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lens([1] * len(seq_lens), seq_lens, pages, 16, strict=False)


class _Step:
    """A decode of three requests over a cache of random numbers, and the oracle's answer."""

    def __init__(self, **layer: object) -> None:
        torch.manual_seed(0)
        self.impl = FlashInferImpl(8, 64, 0.125, 2, **layer)  # type: ignore[arg-type]
        self.layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        self.cache = torch.randn(FlashInferBackend.get_kv_cache_shape(12, 16, 2, 64)).to(torch.bfloat16)
        self.query = torch.randn(3, 8, 64).to(torch.bfloat16)

    def __call__(self, metadata: FlashInferMetadata) -> torch.Tensor:
        with torch.no_grad():
            return self.impl.forward(self.layer, self.query, None, None, self.cache, metadata)  # type: ignore[arg-type, no-any-return]

    def want(self, batch: CommonAttentionMetadata) -> torch.Tensor:
        out, _ = reference.paged_attention(
            self.query.double().numpy(),
            *self.cache.double().numpy(),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            scale=0.125,
            window=self.impl.window,
            sinks=None if self.impl.sinks is None else self.impl.sinks.numpy(),
        )
        return torch.from_numpy(out).to(torch.bfloat16)


FIRST, SECOND = _decodes([40, 5, 16], [[0, 1, 2], [3], [4]]), _decodes([3, 60, 33], [[9], [5, 6, 7, 8], [11, 3, 0]])
WIDE = _decodes([48, 50, 17], [[0, 1, 2], [3, 10, 5, 9], [4, 8]])


def test_a_captured_graphs_wrappers_attend_the_batch_built_last() -> None:
    step, windowed, builder = _Step(), _Step(sliding_window=9), FlashInferMetadataBuilder(SPEC)
    captured = builder.build_for_cudagraph_capture(WIDE)
    assert captured.max_seq_len == 64
    for layer in (step, windowed):
        torch.testing.assert_close(layer(captured), layer.want(WIDE))
    held = dict(captured.plans)
    assert len(held) == 2
    for batch in (FIRST, SECOND):
        replayed = builder.build(0, batch)
        for layer in (step, windowed):  # what a replay launches again: the wrappers of the metadata that was captured
            torch.testing.assert_close(layer(captured), layer.want(batch))
            torch.testing.assert_close(layer(replayed), layer.want(batch))
        assert all(replayed.plans[group] is wrapper for group, wrapper in held.items())
    assert not torch.equal(step.want(FIRST), step.want(SECOND))


def test_lengths_that_are_assigned_to_a_batch_are_planned_anew() -> None:
    step, builder = _Step(), FlashInferMetadataBuilder(SPEC)
    meta, other = builder.build(0, FIRST), builder.build(0, SECOND)
    torch.testing.assert_close(step(meta), step.want(FIRST))
    for name in ("seq_lens", "seq_lens_cpu", "max_seq_len", "block_table"):
        setattr(meta, name, getattr(other, name))
    torch.testing.assert_close(step(meta), step.want(SECOND))


def test_a_captured_graph_is_left_alone_by_batches_of_another_shape() -> None:
    step, builder = _Step(), FlashInferMetadataBuilder(SPEC)
    captured = builder.build_for_cudagraph_capture(WIDE)
    step(captured)
    for query_lens in ([1, 1], [1, 1, 2], [2, 1, 1]):
        other = _built(builder, query_lens, [20] * len(query_lens))
        assert not other.captured and other.plans is not captured.plans
        other.planned(_group("prefill", 1))
    torch.testing.assert_close(step(captured), step.want(WIDE))


@pytest.mark.parametrize("query_lens", [[1, 1, 2], [1, 0], []])
def test_a_graph_is_captured_for_decodes_alone(query_lens: list[int]) -> None:
    builder = FlashInferMetadataBuilder(SPEC)
    with pytest.raises(UnsupportedError, match="can be captured for decodes only"):
        builder.build_for_cudagraph_capture(_batch(query_lens, [20] * len(query_lens)))


def test_nothing_is_planned_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    step, builder = _Step(), FlashInferMetadataBuilder(SPEC)
    captured = builder.build_for_cudagraph_capture(WIDE)
    monkeypatch.setattr(flashinfer, "is_captured", lambda x: True)
    with pytest.raises(UnsupportedError, match="run the layer once before the capture"):
        step(captured)
    with monkeypatch.context() as patch:
        patch.setattr(flashinfer, "is_captured", lambda x: False)
        step(captured)
    torch.testing.assert_close(step(captured), step.want(WIDE))


def test_a_graph_of_a_batch_that_was_built_for_eager_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan would be overwritten, or attend the lengths of the capture at every replay."""
    step, meta = _Step(), FlashInferMetadataBuilder(SPEC).build(0, FIRST)
    step(meta)
    monkeypatch.setattr(flashinfer, "is_captured", lambda x: True)
    with pytest.raises(UnsupportedError, match="with the metadata of build_for_cudagraph_capture"):
        step(meta)


def test_a_workspace_that_a_graph_makes_serves_no_call_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its zeros are written when the graph is replayed."""
    device = torch.device("cpu")
    monkeypatch.setattr(_flashinfer, "_workspaces", {})
    with monkeypatch.context() as patch:
        patch.setattr(_flashinfer, "is_captured", lambda x: True)
        captured = _flashinfer.workspace(device, "xqa")
    kept = _flashinfer.workspace(device, "xqa")
    assert kept is not captured and _flashinfer.workspace(device, "xqa") is kept
    monkeypatch.setattr(_flashinfer, "is_captured", lambda x: True)
    assert _flashinfer.workspace(device, "xqa") is kept


def test_a_graph_of_decodes_holds_no_encoder_and_no_more_pages_than_it_was_captured_for() -> None:
    builder = FlashInferMetadataBuilder(SPEC)
    captured = builder.build_for_cudagraph_capture(_decodes([5, 9], [[0], [1]]))
    with pytest.raises(UnsupportedError, match="cannot contain ragged attention"):
        captured.planned(_group("ragged"))
    with pytest.raises(MetadataError, match="3 pages: must be at most 2 pages"):
        builder.build(0, _decodes([5, 20], [[0], [1, 2]]))
    with pytest.raises(MetadataError, match="4 entries: must be at most 2"):
        builder.build_for_cudagraph_capture(_decodes([5, 9], [[0, 2], [1, 3]]))


@pytest.mark.parametrize(("arch", "names"), [("sm_100", {"trtllm-gen"}), ("sm_120", {"xqa"})])
def test_the_suite_on_blackwells_kernels(arch: str, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "arch_of", lambda device: arch)
    cases = cases_of(subject_of(FlashInferBackend), "quick")
    for case in some(cases, 12, arch, lambda case: covering.is_kept("TRITON_ATTN", case) or set(case.query_lens) == {1}):
        check_conformance(FlashInferBackend, case)
    decode, prefill = _calls()
    assert set(decode) == names and bool(prefill) == (names == {"trtllm-gen"})


def _calls() -> tuple[list[str], ...]:
    return tuple(importlib.import_module(f"flashinfer.{name}").calls for name in ("decode", "prefill"))


@pytest.mark.parametrize(
    "case",
    [
        Case("grouped", (1, 1, 1), (40, 1, 130), num_heads=8),
        Case("windowed", (1, 1, 1), (40, 9, 130), sliding_window=17),
        Case("one kv head, far pages", (1, 1), (40, 100), num_heads=4, num_kv_heads=1, head_size=128, block_size=64),
        Case("e4m3", (1, 1), (40, 100), kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0),
        Case("not causal", (1, 1), (40, 100), causal=False, head_size=256, block_size=32),
        Case("float16", (1, 1), (40, 100), dtype="float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("arch", "name"), [("sm_100", "trtllm-gen"), ("sm_120", "xqa")])
def test_decodes_on_blackwells_kernels(case: Case, arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "arch_of", lambda device: arch)
    case = case.replace(dtype="float16" if case.dtype == "float16" else "bfloat16")
    check_conformance(FlashInferBackend, case)
    decode, prefill = _calls()
    assert decode == [name] and not prefill


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 17}, {"lse": True}, {"sinks": "randn"}, {"causal": False}, {"sliding_window": 5, "sinks": "randn"}],
    ids=str,
)
@pytest.mark.parametrize("query_lens", [(1, 1, 30), (30, 1, 7), (5, 20, 130)], ids=str)
def test_mixed_batches_on_trtllms_kernels(
    query_lens: tuple[int, ...], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "arch_of", lambda device: "sm_100")
    case = Case("mixed", query_lens, (40, 20, 130), dtype="bfloat16", **changes)
    check_conformance(FlashInferBackend, case)
    decode, prefill = _calls()
    assert decode == ["trtllm-gen"] * (query_lens[0] == 1) and prefill == ["trtllm-gen"]


def test_what_trtllms_kernels_need_is_of_the_lengths_that_were_assigned_last() -> None:
    builder = FlashInferMetadataBuilder(SPEC)
    meta, other, more = (_built(builder, [2, 2], lens) for lens in ([40, 5], [9, 0], [9, 7]))
    assert meta.plain and meta.prefill_bounds(0)[1].tolist() == [0, 40, 45]
    for now, plain, bounds in ((other, False, [0, 9, 9]), (more, True, [0, 9, 16])):
        meta.seq_lens, meta.seq_lens_cpu = now.seq_lens, now.seq_lens_cpu
        assert meta.plain is plain and meta.prefill_bounds(0)[1].tolist() == bounds


def test_a_graph_sums_the_lengths_of_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of decodes are prefills where a log-sum-exp is read: their sums are recorded, not those of the call before."""
    meta = _built(FlashInferMetadataBuilder(SPEC), [1, 1], [40, 5])
    before = meta.prefill_bounds(0)
    with monkeypatch.context() as patched:
        patched.setattr(_flashinfer_trtllm, "is_captured", lambda x: True)
        assert meta.prefill_bounds(0)[1] is not before[1]
    assert meta.prefill_bounds(0)[1] is before[1]


def test_decodes_in_groups_of_seven_are_rows_of_trtllms_prefill_where_a_log_sum_exp_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer, "arch_of", lambda device: "sm_100")
    case = Case("mixed", (1, 1, 30), (40, 20, 130), dtype="bfloat16", num_heads=14, lse=True)
    check_conformance(FlashInferBackend, case)
    decode, prefill = _calls()
    assert not decode and prefill == ["trtllm-gen"]


@pytest.mark.parametrize(
    ("arch", "changes", "block_size", "logs", "served"),
    [
        ("sm_90", {}, 16, False, None),
        ("sm_110", {}, 16, False, None),
        ("", {}, 16, False, None),
        ("sm_100", {}, 16, True, "trtllm-gen"),
        ("sm_100", {}, 128, False, None),
        ("sm_100", {"soft_cap": 30.0}, 16, False, None),
        ("sm_103", {"wrapper": "prefill", "window_left": 7}, 64, True, "trtllm-gen"),
        ("sm_103", {"wrapper": "prefill", "window_left": 7, "causal": False}, 64, True, None),
        ("sm_100", {"kv_dtype": torch.float8_e4m3fn}, 32, False, "trtllm-gen"),
        ("sm_100", {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.float16}, 32, False, None),
        ("sm_100", {"kv_dtype": torch.float8_e4m3fn, "wrapper": "prefill"}, 32, False, None),
        ("sm_100", {"kv_dtype": torch.float8_e5m2}, 32, False, None),
        ("sm_120", {}, 128, False, "xqa"),
        ("sm_121", {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.float16}, 16, False, "xqa"),
        ("sm_120", {}, 16, True, None),
        ("sm_120", {"wrapper": "prefill"}, 16, False, None),
        ("sm_120", {"num_heads": 64}, 16, False, None),
    ],
)
def test_which_layers_need_no_plan(
    arch: str, changes: dict[str, object], block_size: int, logs: bool, served: str | None
) -> None:
    assert _flashinfer_trtllm.backend_for(arch, _group(**changes), block_size, logs) == served  # type: ignore[arg-type]


def test_an_older_flashinfer_keeps_the_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("flashinfer.prefill.trtllm_batch_context_with_kv_cache")
    assert _flashinfer_trtllm.backend_for("sm_100", _group(), 16, False) is None


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "logs", "fits"),
    [([1, 1], [4, 9], True, True), ([1, 1], [4, 0], True, False), ([4, 1], [3, 9], True, False), ([0, 1], [3, 9], True, False)],
)
def test_batches_that_the_kernels_are_not_made_for_take_the_wrappers(
    query_lens: list[int], seq_lens: list[int], logs: bool, fits: bool
) -> None:
    meta = _built(FlashInferMetadataBuilder(SPEC), query_lens, seq_lens)
    assert _flashinfer_trtllm.fits(meta, _group(last=2), logs) is fits
    assert not _flashinfer_trtllm.fits(meta, _group(last=2, num_heads=1 << 15), True)


@pytest.mark.parametrize(("arch", "sinks"), [("sm_100", None), ("sm_100", [0.5] * 8), ("sm_120", None)])
def test_a_captured_graph_without_plans_reads_the_captured_tensors(
    arch: str, sinks: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "arch_of", lambda device: arch)
    step, builder = _Step(sinks=sinks), FlashInferMetadataBuilder(SPEC)
    first = _decodes([48, 50, 17], [[0, 1, 2], [3, 10, 5, 9], [4, 8]])  # its arrays are written over
    captured = builder.build_for_cudagraph_capture(first)
    torch.testing.assert_close(step(captured), step.want(first))
    assert not captured.plans
    padded = _decodes([3, 60, 0], [[9], [5, 6, 7, 8], [0]])
    captured.block_table.copy_(torch.from_numpy(np.asarray(padded.block_table)))
    captured.seq_lens.copy_(torch.from_numpy(np.asarray(padded.seq_lens)))
    torch.testing.assert_close(step(captured), step.want(padded))


@torch.no_grad()
def test_layers_of_a_shape_divide_a_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches, queries and outputs are each layer's and each call's own; another batch is divided anew."""
    groups, divided = FlashInferImpl._groups_of, list[Any]()
    monkeypatch.setattr(FlashInferImpl, "_groups_of", lambda self, *of: divided.append(self) or groups(self, *of))
    builder, one = FlashInferBackend.get_builder_cls()(SPEC), torch.ones(())
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    torch.manual_seed(0)
    impls = [FlashInferImpl(8, 64, 0.125, 2) for _ in range(2)]
    caches = [torch.randn(FlashInferBackend.get_kv_cache_shape(8, 16, 2, 64), dtype=torch.bfloat16) for _ in impls]
    calls = [(which, torch.randn(4, 8, 64, dtype=torch.bfloat16)) for which in (0, 1, 0, 1)]

    def call(which: int, query: torch.Tensor, meta: Any) -> torch.Tensor:
        return impls[which].forward(layer, query, None, None, caches[which], meta)  # type: ignore[no-any-return]

    shared, other = _built(builder, [1, 3], [40, 5]), _built(builder, [3, 1], [33, 12])
    got = [call(*given, shared) for given in calls]
    assert len(divided) == 1
    for given, result in zip(calls, got, strict=True):
        assert torch.equal(result, call(*given, _built(builder, [1, 3], [40, 5])))
        assert torch.equal(call(*given, other), call(*given, _built(builder, [3, 1], [33, 12])))
