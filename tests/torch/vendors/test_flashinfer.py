"""FLASHINFER on a stand-in: the suite, plans that are shared and never mixed up, and what is refused."""

import gc
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Feature, Request
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch import graphs
from attn.torch.backends.flashinfer import FlashInferBackend, FlashInferMetadata, Group

H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")


@pytest.fixture(autouse=True)
def vendor(standins: Callable[..., None]) -> None:
    standins("flashinfer_pkg")


def test_the_suite_on_a_stand_in() -> None:
    cases = cases_of(subject_of(FlashInferBackend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in cases:
        check_conformance(FlashInferBackend, case)


def _batch(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    tables, free = [], iter(range(100))
    for length in seq_lens:
        tables.append([next(free) for _ in range(-(-length // 16))])
    return CommonAttentionMetadata.from_lens(query_lens, seq_lens, tables, 16)


def _built(builder: object, query_lens: list[int], seq_lens: list[int]) -> FlashInferMetadata:
    return builder.build(0, _batch(query_lens, seq_lens))  # type: ignore[attr-defined]


SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")


def _group(kind: str = "decode", last: int = 2, **changes: object) -> Group:
    plain = Group(kind, 0, last, 8, 2, 64, True, -1, 0.0, 0.125, torch.bfloat16, torch.bfloat16)
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


def test_a_wrapper_is_lent_again_for_the_same_dtypes_alone() -> None:
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
