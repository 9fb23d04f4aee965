"""vLLM: the functions that it calls, tested with a stand-in of its interface. `benchmarks/vllm_cpu.py` runs the real engine."""

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn.backends.registry import registered_backend  # noqa: E402
from attn.errors import BackendLoadError, UnsupportedError  # noqa: E402
from attn.integrations import vllm as integration  # noqa: E402

#: Choices of a machine without a GPU, whatever this one has.
pytestmark = pytest.mark.usefixtures("no_gpu")

CONFIGURATION = {
    "head_size": 64,
    "dtype": torch.float32,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": "decoder",
}


@pytest.fixture
def vllm(standins: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, `attn` registered with it, and the checks that the real one gets."""
    standins("vllm_engine_pkg")
    integration.register()
    yield importlib.import_module("tests.integrations.vllm_interface")
    for name in ("attn.integrations._vllm", "tests.integrations.vllm_interface"):
        sys.modules.pop(name, None)


@pytest.fixture
def named(vllm: Any) -> Any:
    """`named(**arguments)`: an implementation built by a layer called layers.3.attn."""

    class Layer(torch.nn.Module):
        def __init__(self, prefix: str, **arguments: Any) -> None:
            super().__init__()
            self.impl = vllm.implementation(**arguments)

    return lambda **arguments: Layer("layers.3.attn", **arguments).impl


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"]["attn"] == "attn.integrations.vllm:plugin"


def test_custom_leads_to_attn_again_and_again_and_nothing_else_does(vllm: Any) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    assert integration.register() == integration.PATH == AttentionBackendEnum.CUSTOM.get_path()
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    plain = AttentionSelectorConfig(64, torch.float32, "auto", None)
    for asked in (None, AttentionBackendEnum.CPU_ATTN):
        assert current_platform.get_attn_backend_cls(asked, plain) == AttentionBackendEnum.CPU_ATTN.value
    assert current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, plain, num_heads=4) == integration.PATH
    with pytest.raises(ValueError, match="CUSTOM is not valid.*use_mla not supported"):
        current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, plain._replace(use_mla=True))


def test_another_interface_or_owner_is_reported(vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    with pytest.raises(BackendLoadError, match="is already another.Backend"):
        integration.register()
    monkeypatch.delattr(backend.AttentionBackend, "supported_kv_cache_layouts")
    with pytest.raises(BackendLoadError, match="has no AttentionBackend.supported_kv_cache_layouts"):
        integration.register()
    integration.plugin()  # in vLLM's processes, which go on
    assert "attn is not available as vLLM's CUSTOM attention backend" in caplog.text


def test_the_interface_is_the_documented_one_and_drift_would_show(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention import backend

    assert vllm.drift() == []
    monkeypatch.setattr(backend.AttentionMetadataBuilder, "build", lambda self, batch, layer, common_prefix_len: None)
    monkeypatch.delattr(backend.AttentionBackend, "get_name")
    assert vllm.drift() == [
        "AttentionBackend has no get_name",
        "AttentionMetadataBuilder.build has no common_attn_metadata",
        "AttentionMetadataBuilder.build has no fast_build",
        "AttentionMetadataBuilder.build wants batch too",
        "AttentionMetadataBuilder.build wants layer too",
    ]


def test_our_classes_take_what_the_interface_gives(vllm: Any) -> None:
    """Whatever vLLM passes by the documented names, or by position, is taken."""
    import inspect

    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    ours = importlib.import_module("attn.integrations._vllm")
    pairs = [
        (ours.AttnImpl, CPUAttentionBackendImpl, ("__init__", "forward", "do_kv_cache_update")),
        (ours.AttnMetadataBuilder, backend.AttentionMetadataBuilder, ("__init__", "build")),
        (ours.AttnBackend, backend.AttentionBackend, ("get_supported_kernel_block_sizes", "supported_kv_cache_layouts")),
    ]
    for own, documented, names in pairs:
        for name in names:
            want = list(inspect.signature(getattr(documented, name)).parameters)
            assert list(inspect.signature(getattr(own, name)).parameters)[: len(want)] == want, name


def test_batches_agree_with_the_formula(vllm: Any) -> None:
    found = dict(vllm.batches())
    assert len(found) == 19
    assert {what: worst for what, worst in found.items() if worst > 2e-6} == {}


@pytest.mark.parametrize("ours", ["CPU_ATTN", "TORCH_SDPA"])
def test_the_choice_is_the_librarys_and_a_name_is_obeyed(
    vllm: Any, ours: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Chosen once for each size of blocks; vLLM's log says so when the first batch comes."""
    monkeypatch.setenv("ATTN_BACKEND", ours)
    impl, step = vllm.implementation(logits_soft_cap=2.0), vllm.common([3], [3], 32)
    query, key, cache = torch.randn(3, 4, 32), torch.randn(3, 2, 32), vllm.new_cache("LBHNC", 2, 2, 32, 64)
    impl.do_kv_cache_update(vllm.layer(), key, key, cache, step.slot_mapping)
    with caplog.at_level("INFO", "vllm.attn"):
        impl.forward(vllm.layer(), query, key, key, cache, vllm.builder().build(0, step), torch.empty_like(query))
    assert {size: layer.selection.name for size, layer in impl.layers.items()} == {16: ours, 32: ours}
    assert f"Using {ours} of attn for head_size=32 dtype=float32 block_size=32" in caplog.text


def test_sinks_loaded_after_a_layer_was_built_count(vllm: Any) -> None:
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    impl = vllm.implementation(sinks=sinks)
    step, cache = vllm.common([3], [3], 16), vllm.new_cache("LBHNC", 2, 2, 16, 64)
    query, key = torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    impl.do_kv_cache_update(vllm.layer(), key, key, cache, step.slot_mapping)
    outputs = []
    for value in (-torch.inf, 3.0):
        sinks.data.fill_(value)
        outputs.append(torch.empty_like(query))
        impl.forward(vllm.layer(), query, key, key, cache, vllm.builder().build(0, step), outputs[-1])
    import attn

    for got, sink in zip(outputs, ([-torch.inf] * 4, [3.0] * 4), strict=True):
        want = attn.attention(query, key, key, causal=True, sinks=torch.tensor(sink))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_cache_that_replaces_another_is_written(vllm: Any) -> None:
    """vLLM measures memory with caches that it frees again."""
    impl, step, key = vllm.implementation(), vllm.common([3], [3], 16), torch.ones(3, 2, 32)
    caches = [vllm.new_cache("LBHNC", 2, 2, 16, 64) for _ in range(2)]
    for cache in caches:
        impl.do_kv_cache_update(vllm.layer(), key, key, cache.zero_(), step.slot_mapping)
    assert torch.equal(*caches) and caches[1].sum() == 3 * 2 * 64


def test_an_int8_cache_without_scales_warns_once(vllm: Any, caplog: Any) -> None:
    """At the first write, when vLLM has loaded the scales."""
    step, key = vllm.common([3], [3], 16), torch.ones(3, 2, 32)
    cache = torch.zeros(2, 2, 16, 64, dtype=torch.int8)
    for loaded, said in ((1.0, ["k_scale", "v_scale"]), (0.25, ["v_scale"])):
        impl, layer = vllm.implementation(kv_cache_dtype="int8"), vllm.layer()
        layer._k_scale_float, layer._v_scale_float = loaded, 1.0
        caplog.clear()
        with caplog.at_level("WARNING", "vllm.attn"):
            for _ in range(2):
                impl.do_kv_cache_update(layer, key, key, cache, step.slot_mapping)
        (message,) = [record.getMessage() for record in caplog.records]
        assert f"kv_cache_dtype='int8' without {' and '.join(said)}: " in message and "attn.kv_cache_scales" in message


def test_a_quantised_cache_that_comes_as_bytes(vllm: Any) -> None:
    impl, step = vllm.implementation(kv_cache_dtype="fp8"), vllm.common([5], [5], 16)
    cache = torch.zeros(2, 2, 16, 64, dtype=torch.uint8)
    query, key = torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    impl.do_kv_cache_update(vllm.layer(), key, key, cache, step.slot_mapping)
    output = torch.empty_like(query)
    impl.forward(vllm.layer(), query, key, key, cache, vllm.builder().build(0, step), output)
    import attn

    rounded = key.to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(output, attn.attention(query, rounded, rounded, causal=True), rtol=1e-5, atol=1e-6)


def test_a_profiling_run_has_no_batch(vllm: Any) -> None:
    output = torch.full((3, 4, 32), torch.nan)
    vllm.implementation().forward(vllm.layer(), output, None, None, torch.empty(0), None, output)
    assert not output.any()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(make_backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PLAIN, a backend without features, asked for by name."""
    monkeypatch.setenv("ATTN_BACKEND", "PLAIN")
    with registered_backend("PLAIN", make_backend("PLAIN")):
        yield


def test_an_unsupported_layer_is_named_with_backends_that_would_serve(named: Any, plain: None) -> None:
    with pytest.raises(UnsupportedError) as caught:
        named(sinks=torch.zeros(4), logits_soft_cap=2.0)
    said = str(caught.value)
    assert said.startswith("layers.3.attn: ") and "sinks not supported; soft_cap not supported" in said
    *_, who = said.splitlines()
    assert who.startswith("backends that support it on their devices:") and "CPU_ATTN" in who and "PLAIN" not in who


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype=int8_per_token_head not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype=nvfp4 not supported"),
        ({"chunk_lookback": 1}, "chunk_lookback=1 not supported"),
        ({"of_a_later_vllm": 0.5}, "of_a_later_vllm=0.5 not supported"),
    ],
)
def test_arguments_of_a_layer_that_are_not_known_are_refused(named: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"layers\.3\.attn: {words}"):
        named(**arguments)
    named(chunk_lookback=-1, use_alibi_sqrt=False, of_a_later_vllm=None)


def test_fields_of_a_batch_that_are_not_known_are_refused(vllm: Any) -> None:
    for more in (
        {"rswa_prefix_lens": torch.tensor([4])},
        {"dcp_local_seq_lens": torch.tensor([2], dtype=torch.int32)},
    ):
        with pytest.raises(UnsupportedError, match=rf"layers\.0\.attn: {next(iter(more))} not supported"):
            vllm.builder().build(0, vllm.common([3], [3], 16, **more))
    with pytest.raises(UnsupportedError, match="per-request causality"):
        vllm.builder().build(0, vllm.common([3], [3], 16, causal=torch.tensor([True])))
    vllm.builder().build(0, vllm.common([3], [3], 16, mm_req_doc_ranges={}, positions=torch.arange(3)))


def test_images_that_a_chunk_cuts_are_refused(vllm: Any) -> None:
    build = vllm.builder().build
    with pytest.raises(UnsupportedError, match=r"ends at token 20, within image tokens 10 to 20 .*--disable-chunked-mm-input"):
        build(0, vllm.common([20], [20], 16, mm_req_doc_ranges={0: [(10, 20)]}))
    assert build(0, vllm.common([20], [20], 16, mm_req_doc_ranges={0: [(20, 30)]})).batch.spans is None  # a later chunk's
    assert build(0, vllm.common([1, 2], [31, 5], 16, mm_req_doc_ranges={0: [(20, 29)]})).batch.spans is None  # an earlier one's
    assert build(0, vllm.common([4], [4], 16, mm_req_doc_ranges={0: [(2, 2)]})).batch.spans is None  # one token
    spans = build(0, vllm.common([2, 3], [9, 4], 16, 1, mm_req_doc_ranges={0: [(0, 3)], 1: [(1, 2)]})).batch.spans
    assert spans.tolist() == [[-1, -1], [-1, -1], [1, 2], [1, 2], [-1, -1], [-1, -1]]


def test_a_model_with_images_needs_a_backend_with_spans(
    vllm: Any, named: Any, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = importlib.import_module("attn.integrations._vllm")
    assert ours.AttnBackend.supports_mm_prefix()
    asked = {**CONFIGURATION, "use_mm_prefix": True}
    assert "PLAIN: spans not supported" in str(ours.AttnBackend.validate_configuration(**asked))
    assert "spans" not in str(ours.AttnBackend.validate_configuration(**{**asked, "attn_type": "encoder_only"}))
    model = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    monkeypatch.setattr(ours, "get_current_vllm_config_or_none", lambda: model)
    with pytest.raises(UnsupportedError, match=r"layers\.3\.attn: (?s:.*)spans not supported"):
        named()


def test_values_of_another_size_are_refused(named: Any, vllm: Any) -> None:
    key = torch.randn(3, 2, 32)
    with pytest.raises(UnsupportedError, match=r"layers\.3\.attn: .*rows of 48 elements.*head_size_v not supported"):
        slots = vllm.common([3], [3], 16).slot_mapping
        named().do_kv_cache_update(vllm.layer(), key, key, torch.zeros(2, 2, 16, 48), slots)


@pytest.mark.parametrize("flag", ["use_mla", "use_sparse", "use_dcp", "use_rswa", "use_adaptive_verification"])
def test_flags_of_a_configuration_that_are_not_served(vllm: Any, flag: str) -> None:
    backend = importlib.import_module("attn.integrations._vllm").AttnBackend
    assert backend.validate_configuration(**CONFIGURATION, use_kv_connector=True) == []
    assert [reason for reason in backend.validate_configuration(**{**CONFIGURATION, flag: True}) if flag in reason]


def test_batch_invariance_is_that_of_the_environment(vllm: Any, named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM passes it to the backend, but not to a layer, which reads the variable that vLLM reads."""
    backend = importlib.import_module("attn.integrations._vllm").AttnBackend
    asked = {**CONFIGURATION, "use_batch_invariant": True}
    assert "use_batch_invariant not supported without VLLM_BATCH_INVARIANT=1" in str(backend.validate_configuration(**asked))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert backend.validate_configuration(**asked) == []
    assert named()._layer(16).impl.batch_invariant


def test_an_unsupported_configuration_lists_every_reason(vllm: Any, plain: None) -> None:
    backend = importlib.import_module("attn.integrations._vllm").AttnBackend
    why = backend.validate_configuration(**{**CONFIGURATION, "has_sink": True})
    assert "PLAIN: sinks not supported" in why[0] and "CPU_ATTN" in why[-1]
    assert "kv_cache_dtype=nvfp4" in str(backend.validate_configuration(**{**CONFIGURATION, "kv_cache_dtype": "nvfp4"}))


def test_lengths_of_a_draft_on_the_host_are_bounds_and_not_taken(vllm: Any) -> None:
    """On a device the host's lengths are taken only where vLLM says that they are exact."""
    step = vllm.common([3], [3], 16, seq_lens_cpu_upper_bound=torch.tensor([3], dtype=torch.int32))
    step.seq_lens = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(1,), dtype="int32")
    exact = vllm.builder()
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    draft = type(exact)(SimpleNamespace(block_size=16), ["layers.0.attn"], config, torch.device("cpu"))
    assert exact.build(0, step).batch.seq_lens_cpu.tolist() == [3]
    assert draft.build(0, step).batch.seq_lens_cpu is None
