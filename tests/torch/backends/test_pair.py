"""Pairs: the conformance suite through both backends, who serves which part of a batch, and what a pair refuses."""

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attn
from attn import selector
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.capabilities import Device
from attn.errors import MetadataError, UnsupportedError
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch import Attention, graphs
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends import pair
from attn.torch.backends._paged import PagedAttentionImpl
from attn.torch.backends.sdpa import TorchSDPABackend, TorchSDPAImpl
from attn.torch.metadata import PagedAttentionMetadataBuilder
from tests.levels import some
from tests.testing import covering

H, K, D, P = 4, 2, 32, 16
#: The backend of each call so far, and what it served: (name, lengths of the queries).
CALLS: list[tuple[str, list[int]]] = []


class _Told(TorchSDPAImpl):
    def _attend(self, call: Any) -> None:
        CALLS.append((self.backend.get_name(), np.diff(call.meta.host_lens()[0]).tolist()))
        own = self.visible(call.meta)
        assert call.mask.layer == own.layer and call.mask.batch is own.batch
        super()._attend(call)


class Decodes(TorchSDPABackend):
    name = "DECODES"


class DecodesImpl(_Told, backend=Decodes):
    pass


class Prompts(TorchSDPABackend):
    name = "PROMPTS"


class PromptsImpl(_Told, backend=Prompts):
    pass


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_backend("DECODES", Decodes)
    register_backend("PROMPTS", Prompts)
    CALLS.clear()
    yield
    providers.chosen.cache_clear()
    torch.compiler.reset()


def pair_class() -> Any:
    return AttentionBackendEnum["DECODES+PROMPTS"].get_class()


def batch_of(q_lens: list[int], m_lens: list[int] | None = None, **more: Any) -> CommonAttentionMetadata:
    m_lens = m_lens or [max(n, 1) + 7 for n in q_lens]
    starts = np.cumsum([0, *(-(-m // P) for m in m_lens)])
    tables = [list(range(a, b)) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    return CommonAttentionMetadata.from_lens(q_lens, m_lens, tables, P, **more)


def called(layer: Any, batch: CommonAttentionMetadata, cache: Any = None) -> torch.Tensor:
    rows = batch.num_actual_tokens
    torch.manual_seed(rows)
    query, key, value = (torch.randn(rows, heads, D) for heads in (H, K, K))
    cache = layer.new_kv_cache(64) if cache is None else cache
    with torch.no_grad():
        return layer(query, key, value, cache, layer.build(batch))  # type: ignore[no-any-return]


# --- the suite -------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows are few, so that most of the suite's batches are divided."""
    monkeypatch.setattr(pair, "FEW_ROWS", 4)


def test_a_pair_passes_the_suite_and_divides_most_of_its_batches(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: Counter[tuple[int, ...]] = Counter()
    run = pair.PairedImpl._run_first

    def told(self: Any, call: Any, given: Any) -> Any:
        ways[tuple(own.member for own in call.meta.member_batches)] += 1
        return run(self, call, given)

    monkeypatch.setattr(pair.PairedImpl, "_run_first", told)
    backend = pair_class()
    for case in cases_of(subject_of(backend), "quick"):
        check_conformance(backend, case)
    assert ways[(0, 1)] > 200 and ways[()] > 50 and ways[(1,)] > 20


def test_prompts_by_a_vendors_stand_in(few: None, monkeypatch: pytest.MonkeyPatch, standins: Callable[..., None]) -> None:
    """Each backend has metadata of its own: FlashAttention's has the sums of the keys' lengths."""
    standins("fa4")
    monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if p.name == "FlashAttention 4"])
    backend = AttentionBackendEnum["DECODES+FLASH_ATTN"].get_class()
    cases = cases_of(subject_of(backend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in some(cases, 30, "pair", partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(backend, case)
    assert any(name == "DECODES" for name, _ in CALLS)


# --- who serves what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_lens", "served"),
    [
        ([1, 1, 1], [("DECODES", [1, 1, 1])]),
        ([16, 2], [("DECODES", [16, 2])]),
        ([17, 40], [("PROMPTS", [17, 40])]),
        ([1, 5, 17, 40], [("DECODES", [1, 5]), ("PROMPTS", [17, 40])]),
        ([1, 40, 3, 17], [("DECODES", [1]), ("PROMPTS", [40, 3, 17])]),  # the last chunk of a prompt may be short
        ([40, 1, 17, 1, 1], [("DECODES", [40, 1, 17, 1, 1])]),  # in no order
        ([40, 1], [("DECODES", [40, 1])]),
        ([1, 40, 0, 0], [("DECODES", [1]), ("PROMPTS", [40, 0, 0])]),  # rows of padding are of neither
    ],
)
def test_who_serves_a_batch(q_lens: list[int], served: list[tuple[str, list[int]]]) -> None:
    layer, alone = (Attention(H, D, num_kv_heads=K, backend=name) for name in ("decodes+prompts", "TORCH_SDPA"))
    batch = batch_of(q_lens)
    out = called(layer, batch)
    assert served == CALLS
    torch.testing.assert_close(out, called(alone, batch), rtol=1e-5, atol=1e-5)


def test_causality_of_the_part_is_not_that_of_the_batch() -> None:
    layer, alone = (Attention(H, D, num_kv_heads=K, backend=name) for name in ("DECODES+PROMPTS", "TORCH_SDPA"))
    batch = batch_of([2, 2, 40, 17], causal=[False, False, True, True])
    assert [own.meta.causal for own in layer.build(batch).member_batches] == [False, True]
    torch.testing.assert_close(called(layer, batch), called(alone, batch), rtol=1e-5, atol=1e-5)


def test_a_batch_whose_lengths_are_assigned_is_not_divided_by_those_before() -> None:
    """They are of the lengths at `build`, so the decodes' backend serves it whole."""
    layer = Attention(H, D, num_kv_heads=K, backend="DECODES+PROMPTS")
    cache, query = layer.new_kv_cache(64).normal_(), torch.randn(41, H, D)
    meta, other = (layer.build(batch_of([1, 40], lens)) for lens in ([30, 60], [20, 60]))
    with torch.no_grad():
        want = layer(query, None, None, cache, other)
        assert not torch.allclose(layer(query, None, None, cache, meta), want)
        for name in ("seq_lens", "seq_lens_cpu", "block_table"):
            setattr(meta, name, getattr(other, name))
        torch.testing.assert_close(layer(query, None, None, cache, meta), want, rtol=1e-5, atol=1e-5)


def test_lengths_that_only_the_device_knows_are_not_waited_for() -> None:
    layer = Attention(H, D, num_kv_heads=K, backend="DECODES+PROMPTS")
    batch = batch_of([1, 40, 17])
    there = batch.replace(query_start_loc=torch.from_numpy(batch.query_start_loc), query_start_loc_cpu=None)
    there.query_start_loc_cpu = None
    assert layer.build(there).member_batches == () and len(layer.build(batch).member_batches) == 2


def test_a_batch_on_the_device_is_divided_like_one_on_the_host() -> None:
    """Engines keep tables and lengths on the device and pass mirrors."""
    layer, batch = Attention(H, D, num_kv_heads=K, backend="DECODES+PROMPTS"), batch_of([1, 4, 40, 17])
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    there = batch.replace(**{name: torch.from_numpy(getattr(batch, name)) for name in names})
    assert torch.equal(called(layer, there), called(layer, batch))
    assert [names for names, _ in CALLS] == ["DECODES", "PROMPTS"] * 2


def test_what_a_layer_is_given_later_reaches_both() -> None:
    """Sinks that are loaded, the log-sum-exp, and a dtype that the layer is cast to."""
    layers = [
        Attention(
            H, D, num_kv_heads=K, backend=name, sinks=torch.nn.Parameter(torch.zeros(H)), return_lse=True, logits_soft_cap=4.0
        )
        for name in ("DECODES+PROMPTS", "TORCH_SDPA")
    ]
    for layer in layers:
        layer.load_state_dict({"sinks": torch.linspace(-1, 2, H)})
    for (one, other), batch in ((layers, batch_of([1, 1, 40])), (layers, batch_of([1, 3]))):
        for mine, theirs in zip(called(one, batch), called(other, batch), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert layers[0].to(torch.float16).selection.name == "DECODES+PROMPTS"


def test_decodes_are_repeated_as_their_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one shape repeat each other's launches over a batch."""
    again: list[Any] = []

    def run_first(self: Any, call: Any, given: Any) -> Any:
        self._run(call)
        return lambda *tensors: again.append(tensors) or True

    monkeypatch.setattr(DecodesImpl, "_run_first", run_first)
    layer = Attention(H, D, num_kv_heads=K, backend="DECODES+PROMPTS")
    for q_lens, repeated in (([1, 2], 2), ([40, 1, 1], 2), ([40, 1, 1], 3), ([1, 1, 40], 0)):  # the last two are of one kind
        again.clear()
        meta, rows, cache = layer.build(batch_of(q_lens)), sum(q_lens), layer.new_kv_cache(16)
        for _ in range(3):
            with torch.no_grad():
                layer(torch.randn(rows, H, D), torch.randn(rows, K, D), torch.randn(rows, K, D), cache, meta)
        assert len(again) == repeated


def test_the_decodes_backend_writes_and_both_read() -> None:
    """A prompt's keys are read by the next decode, and the other way round."""
    layer, alone = (Attention(H, D, num_kv_heads=K, backend=name) for name in ("DECODES+PROMPTS", "TORCH_SDPA"))
    caches = [each.new_kv_cache(16) for each in (layer, alone)]
    for q_len, m_len in ((40, 40), (1, 41), (20, 61), (2, 63)):
        batch = batch_of([q_len], [m_len])
        outs = [called(each, batch, cache) for each, cache in zip((layer, alone), caches, strict=True)]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        assert torch.equal(*caches)
    assert [name for name, _ in CALLS] == ["PROMPTS", "DECODES"] * 2


# --- graphs ----------------------------------------------------------------------------------------------------------


def test_a_pair_is_one_operator_of_a_graph() -> None:
    """Which is rebuilt from its description, in another process too."""
    layer = Attention(H, D, num_kv_heads=K, backend="DECODES+PROMPTS", sinks=[0.5] * H)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for q_lens in ([1, 2], [1, 40], [30, 17]):
        batch = layer.build(batch_of(q_lens))
        rows = torch.randn(sum(q_lens), H, D), torch.randn(sum(q_lens), K, D), torch.randn(sum(q_lens), K, D)
        with torch.no_grad():
            caches = [layer.new_kv_cache(16) for _ in range(2)]
            assert torch.equal(compiled(*rows, caches[0], batch), layer(*rows, caches[1], batch))
            assert torch.equal(*caches)
    impl, _ = graphs._made(layer.graph_key, False)
    assert type(impl) is type(layer.impl)


def test_batches_are_traced_whose_backend_is() -> None:
    class Traced(TorchSDPABackend):
        name = "TRACED"

    class Impl(PagedAttentionImpl, backend=Traced):
        traceable = True

        def _attend(self, call: Any) -> None:
            call.output.copy_(call.query * 2)

    register_backend("TRACED", Traced)
    layer = Attention(H, D, num_kv_heads=K, backend="TRACED+PROMPTS")
    for q_lens, is_traced in (([1, 2], True), ([40, 30], False)):
        torch.compiler.reset()
        rows = torch.randn(sum(q_lens), H, D), torch.randn(sum(q_lens), K, D), torch.randn(sum(q_lens), K, D)
        counter = CompileCounterWithBackend("eager")
        with torch.no_grad():
            out = torch.compile(layer, fullgraph=True, backend=counter)(
                *rows, layer.new_kv_cache(16), layer.build(batch_of(q_lens))
            )
        assert torch.equal(out, rows[0] * 2) is is_traced
        assert any("attn.layer" in str(node.target) for node in counter.graphs[0].graph.nodes) is not is_traced


def test_a_graph_is_captured_with_the_decodes_backend() -> None:
    assert not hasattr(pair_class().get_builder_cls(), "build_for_cudagraph_capture")

    class Builder(PagedAttentionMetadataBuilder):
        def build_for_cudagraph_capture(self, batch: Any) -> Any:
            return "captured", batch

    class Captured(TorchSDPABackend):
        name, builder_cls = "CAPTURED", Builder

    class Impl(TorchSDPAImpl, backend=Captured):
        pass

    register_backend("CAPTURED", Captured)
    layer, batch = Attention(H, D, num_kv_heads=K, backend="CAPTURED+PROMPTS"), batch_of([1, 40])
    assert layer.builder().build_for_cudagraph_capture(batch) == ("captured", batch)


# --- names and refusals ----------------------------------------------------------------------------------------------


def why_not(name: str, head_size: int = 64, device: Device | None = None, **asked: Any) -> str:
    request = selector.make_request(head_size, "bfloat16", None, 16, **asked)
    selection = selector.select(request, framework="torch", backend=name, device=device)
    return str(selection.trace[0])


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("DECODES+PROMPTS", {}, "ok"),
        (
            "CPU_ATTN+TORCH_SDPA",
            {},
            r"out differently: \[2, 7, 3, 16, 64\] and \[2, 7, 16, 3, 64\] for 7 blocks",
        ),
        ("TORCH_SDPA+TORCH_MLA", {}, "TORCH_MLA: a pair is of two backends for torch over pages of keys and values"),
        ("PALLAS+XLA_ATTN", {}, "PALLAS and XLA_ATTN: a pair is of two backends for torch"),
        ("TORCH_SDPA+FLEX_ATTENTION", {"features": ["per_head_scales"]}, "FLEX_ATTENTION, for prompts: per_head_scales not"),
        ("DECODES+PROMPTS", {"features": ["batch_invariant"]}, "batch_invariant not supported by a pair"),
        ("DECODES+PROMPTS", {"attn_type": "encoder_only"}, r"attn_type=encoder_only \(a pair supports decoder\)"),
    ],
)
def test_what_a_pair_refuses(name: str, asked: dict[str, Any], reason: str) -> None:
    assert re.search(reason, why_not(name, **asked))


def test_a_pair_knows_why_a_member_refuses() -> None:
    record = AttentionBackendEnum["TRITON_ATTN+FLASHINFER"].get_class().capabilities
    assert record.not_supported("spans").startswith("spans not supported: FlashInfer's kernels for spans are FA2's")
    assert record.not_supported("alibi") == "alibi not supported"


def test_a_layer_of_a_pair_that_refuses_is_not_built() -> None:
    with pytest.raises(UnsupportedError, match="lay their caches out differently"):
        Attention(H, D, num_kv_heads=K, backend="CPU_ATTN+TORCH_SDPA")


def test_names_of_pairs() -> None:
    member = AttentionBackendEnum["torch_sdpa+Flex_Attention"]
    assert member.name == "TORCH_SDPA+FLEX_ATTENTION" and member is AttentionBackendEnum["TORCH_SDPA+FLEX_ATTENTION"]
    assert [part.name for part in member.parts] == ["TORCH_SDPA", "FLEX_ATTENTION"]
    assert member.name not in AttentionBackendEnum.names() and pickle.loads(pickle.dumps(member)) is member
    backend = member.get_class()
    assert pickle.loads(pickle.dumps(backend)) is backend and backend.get_name() == member.name
    for wrong in ("TORCH_SDPA+TORCH_SDPA", "TORCH_SDPA+NOPE", "TORCH_SDPA+", "TORCH_SDPA+FLEX_ATTENTION+DECODES"):
        with pytest.raises(ValueError, match="Unknown attention backend"):
            AttentionBackendEnum[wrong]
    with pytest.raises(AttributeError, match="has no attribute 'NOPE__TORCH_SDPA'"):
        pair.NOPE__TORCH_SDPA  # noqa: B018


def test_a_pair_is_asked_for_like_any_backend_and_a_backend_alone_serves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND", "DECODES+PROMPTS")
    layer = Attention(H, D, num_kv_heads=K)
    assert (layer.selection.name, layer.selection.source) == ("DECODES+PROMPTS", "ATTN_BACKEND")
    called(Attention(H, D, num_kv_heads=K, backend="DECODES"), batch_of([1, 40]))
    assert CALLS == [("DECODES", [1, 40])]


def test_a_list_may_name_a_pair_which_is_as_good_as_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ("DECODES+PROMPTS", "TORCH_SDPA")
    monkeypatch.setattr("attn.torch.platforms.CpuPlatform.dense", {"*": order})
    assert attn.explain(64, "float32", framework="torch").name == "DECODES+PROMPTS"
    assert attn.explain(64, "float32", framework="torch", features=["batch_invariant"]).name == "TORCH_SDPA"
    selection = attn.explain(64, "float32", framework="torch", disable=["PROMPTS"])
    assert selection.name == "TORCH_SDPA" and "DECODES+PROMPTS: disabled by the caller" in selection.reasons
    monkeypatch.setenv("ATTN_DISABLE", "decodes+prompts")
    assert "DECODES+PROMPTS: disabled by ATTN_DISABLE" in attn.explain(64, "float32", framework="torch").reasons


def test_explain_says_which_backend_serves_which_phase() -> None:
    text = str(attn.explain(64, "float32", framework="torch", backend="DECODES+PROMPTS"))
    assert "DECODES serves requests of up to 16 new tokens, PROMPTS longer ones" in text


# --- a batch's part --------------------------------------------------------------------------------------------------


def test_selected_requests_are_a_batch_of_their_own() -> None:
    q_lens, m_lens = [1, 3, 20], [9, 3, 40]
    masks: dict[str, Any] = {"prefix": [2, 0, 5], "spans": [[-1, -1]] * 23 + [[39, 39]], "causal": [True, False, True]}
    whole = batch_of(q_lens, m_lens, **masks)
    part = whole.select(1, 3)
    want = CommonAttentionMetadata.from_lens(
        q_lens[1:], m_lens[1:], whole.block_table[1:], P, prefix=[0, 5], spans=masks["spans"][1:], causal=[False, True]
    )
    for name in vars(want):
        np.testing.assert_array_equal(getattr(part, name), getattr(want, name), err_msg=name)
    part.validate(P)
    with pytest.raises(MetadataError, match="a NumPy mirror of the lengths, by which a batch is divided"):
        whole.replace(seq_lens=torch.from_numpy(whole.seq_lens).to("meta"), seq_lens_cpu=None).select(0, 1)
