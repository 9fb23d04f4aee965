"""tpu-inference: the registration, and the classes that its engine calls, tested with a stand-in of its interface of 0.32.
`benchmarks/tpu_inference_cpu.py` runs the real package."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from attn.errors import AttnError, BackendLoadError, ShapeError, UnsupportedError  # noqa: E402
from attn.integrations import tpu_inference as integration  # noqa: E402
from tests.integrations import tpu_interface, tpu_models  # noqa: E402
from tests.levels import sampled  # noqa: E402

ROOT = Path(__file__).parents[2]
LAYER = {
    "num_heads": 4,
    "head_size": 64,
    "scale": 0.125,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
}


@pytest.fixture
def engine(standins: Any) -> Iterator[Any]:
    """The stand-in, with `attn` registered: its module of the registry."""
    standins("vllm_engine_pkg", "tpu_inference_pkg")
    integration.register()
    yield importlib.import_module("tpu_inference.layers.common.attention_backend")
    sys.modules.pop("attn.integrations._tpu_inference", None)


@pytest.fixture
def call(engine: Any) -> Any:
    """`call(**changes)`: one step of the backend that the engine creates, with an argument of it changed; traced only if it is
    not to `compute`."""
    backend = engine.create_attention_backend(integration.NAME)

    def run(
        mesh: Any = None, cache: Any = None, batch: Any = None, compute: bool = True, arrays: Any = None, **changes: Any
    ) -> Any:
        from tpu_inference.layers.common.attention_interface import attention

        shape = backend.get_kv_cache_shape(tpu_interface.BLOCKS, tpu_interface.PAGE, 2, 64, jnp.dtype("float32"))
        x, kv = arrays or (np.ones((4, 4, 64), np.float32), np.ones((4, 2, 64), np.float32))
        batch = batch or tpu_interface.metadata([4], [4])[0]
        on = mesh or tpu_interface.mesh()
        step = jax.jit(lambda cache: attention(cache, x, kv, kv, batch, on, **{"attention_backend": backend, **changes}))
        return (step if compute else step.eval_shape)(np.zeros(shape, np.float32) if cache is None else cache)

    return run


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["attn_tpu"].partition(":")
    assert getattr(importlib.import_module(module), name) is integration.plugin


def test_without_tpu_inference_the_plugin_does_nothing(caplog: Any) -> None:
    integration.plugin()
    assert not caplog.records
    with pytest.raises(BackendLoadError, match=r"cannot be imported: .*pip install tpu-inference==0\.32\.0"):
        integration.register()


def test_the_name_leads_to_attn_again_and_again_and_nothing_else_does(engine: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert integration.register() == "attn" and AttentionBackendEnum["ATTN"].get_path() == integration.PATH
    backend = AttentionBackendEnum["ATTN"].get_class()
    assert backend.get_name() == "ATTN" and backend.get_impl_cls().attention_backend == "attn"
    assert type(engine.create_attention_backend("rpa")) is engine.RPAAttentionBackend
    assert type(engine.create_attention_backend("attn")).__name__ == "AttnKernels"


def test_another_interface_or_owner_is_refused_with_what_was_looked_for(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from tpu_inference.layers.common import attention_metadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def attention(self: Any, kv_cache: Any, q: Any, k: Any, v: Any, md: Any, mesh: Any, *, spans: Any) -> Any: ...

    with monkeypatch.context() as patch:
        patch.setattr(engine.AttentionBackend, "attention", attention)
        patch.setattr(attention_metadata.AttentionMetadata, "__dataclass_fields__", {})
        with pytest.raises(BackendLoadError) as error:
            integration.register()
        for looked_for in (
            "attention has no shared_md",
            "attention has the unknown spans",
            "AttentionMetadata has no seq_lens",
        ):
            assert looked_for in str(error.value)
        integration.plugin()  # in the engine's processes, which go on
        assert "attn is not available as an attention backend of tpu-inference" in caplog.text
    with monkeypatch.context() as patch:
        patch.delattr(engine, "register_attention_backend")
        with pytest.raises(BackendLoadError, match="has no register_attention_backend"):
            integration.register()
    monkeypatch.setattr(AttentionBackendEnum["ATTN"], "_value_", "another.Backend")
    with pytest.raises(BackendLoadError, match="already has an attention backend named ATTN, at another.Backend"):
        integration.register()


def test_the_interface_is_the_documented_one(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpu_interface.drift() == []
    monkeypatch.setattr(engine, "register_attention_backend", lambda name: None)
    assert "tpu_inference.layers.common.attention_backend.register_attention_backend has no attention" in tpu_interface.drift()


@pytest.mark.parametrize(
    "case",
    sampled(tpu_interface.CASES, 2, "tpu-inference", lambda case: case.what == "no causal mask, a window of 9"),
    ids=lambda case: case.what,
)
def test_batches_agree_with_the_reference(engine: Any, case: Any) -> None:
    found, control = tpu_interface.differences(case)
    assert found <= tpu_interface.tolerance(case)
    assert control > 10 * tpu_interface.tolerance(case) or case.without is None


@pytest.mark.parametrize(
    "case", sampled([tpu_interface.CASES[6], tpu_interface.CASES[10]], 1, "tpu-inference on PALLAS"), ids=lambda case: case.what
)
def test_pallas_interpreted_agrees_with_the_reference(engine: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.integrations import _tpu_inference

    monkeypatch.setenv("ATTN_BACKEND", "PALLAS")
    monkeypatch.delitem(_tpu_inference._IMPLS, "XLA_ATTN")
    found, control = tpu_interface.differences(case)
    assert found <= tpu_interface.tolerance(case) < control


def test_a_layer_that_shares_a_cache_writes_nothing(engine: Any) -> None:
    """It is passed other keys than those in the cache."""
    found, _ = tpu_interface.differences(tpu_interface.CASES[0], share=True)
    assert found <= tpu_interface.tolerance(tpu_interface.CASES[0])


MESHES = """
import os
from attn.integrations import tpu_inference
from tests.integrations import tpu_interface as t
tpu_inference.register()
both = t.CASES[6]
runs = ((t.CASES[2], {"model": 2}, 1), (both, {"data": 2, "model": 2}, 2), (both, {"model": 2}, 1))
for case, on, shards in runs if os.environ["SUITE_LEVEL"] == "full" else runs[:2]:
    found, control = t.differences(case, t.mesh(**on), shards)
    assert found <= t.tolerance(case) < control, (case.what, on, found, control)
"""


def test_heads_and_requests_shard_over_the_engines_mesh() -> None:
    """Sinks are sharded too, a kv head is repeated where there are more devices, and data shards have batches of their own."""
    path = [ROOT, *(ROOT / "tests/standins" / name for name in ("vllm_engine_pkg", "tpu_inference_pkg"))]
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    done = subprocess.run([sys.executable, "-c", MESHES], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_not_supported_raises(call: Any) -> None:
    import dataclasses

    call(compute=False)
    for changes, feature in (
        ({"mesh": SimpleNamespace(shape={"dcp": 2})}, r"context parallelism \(dcp = 2\)"),
        ({"mesh": SimpleNamespace(shape={"pcp": 4})}, r"context parallelism \(pcp = 4\)"),
        ({"q_scale": 0.5}, r"quantised queries \(q_scale = 0.5\)"),
        ({"k_scale": 2.0}, r"k_scale = 2.0, v_scale = None over a cache of float32"),
        ({"batch": dataclasses.replace(tpu_interface.metadata([4], [4])[0], pcp=object())}, "pcp of a batch"),
    ):
        with pytest.raises(UnsupportedError, match=f"a layer of 4 heads of 64: {feature} not supported: use tpu-inference's"):
            call(**changes, compute=False)
    with pytest.raises(ShapeError, match=r"kv_cache has shape \[24, 16, 2, 1, 128\]: must be \[N, 1 or 2, K, P, 128 or more\]"):
        call(cache=np.zeros((24, 16, 2, 1, 128), np.float32), compute=False)


def test_fields_of_later_versions_are_refused_if_they_are_set(engine: Any) -> None:
    import dataclasses

    ours = importlib.import_module("attn.integrations._tpu_inference")
    later = dataclasses.make_dataclass("Later", [("seq_lens", Any), ("spans", Any, None), ("mode", int, 3)])
    assert ours._unknown(later(1)) == [] and ours._unknown(later(1, spans=[2], mode=4)) == ["spans", "mode"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi_slopes": [0.5] * 4}, "alibi not supported by tpu-inference"),
        ({"chunk_lookback": 3}, "unexpected keyword argument 'chunk_lookback'"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4"),
    ],
)
def test_a_vllm_layer_is_refused_by_name_when_it_is_built(engine: Any, changes: dict[str, Any], reason: str) -> None:
    from attn.integrations._tpu_inference import TPUAttnImpl

    class Layer(torch.nn.Module):
        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.impl = TPUAttnImpl(**{**LAYER, **changes})

    with pytest.raises(UnsupportedError, match=rf"layers\.3\.attn: .*{re.escape(reason)}"):
        Layer("layers.3.attn")


def test_a_vllm_layer_passes_its_soft_cap(engine: Any) -> None:
    """The engine's layers drop it: two layers of different caps must not share a name, by which compiled calls are cached."""
    from attn.integrations._tpu_inference import TPUAttnImpl

    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw((4, heads, 64), np.float32) for heads in (4, 2, 2))
    batch, _ = tpu_interface.metadata([4], [4])
    layers = [TPUAttnImpl(**LAYER, logits_soft_cap=cap) for cap in (0.0, 0.25, 50.0, 0.25)]
    assert [layer.attention_backend for layer in layers] == [
        "attn",
        "attn_soft_cap_0_25",
        "attn_soft_cap_50_0",
        "attn_soft_cap_0_25",
    ]
    shape = engine.create_attention_backend("attn").get_kv_cache_shape(24, 16, 2, 64, jnp.dtype("float32"))
    for layer, cap in zip(layers[:2], (None, 0.25), strict=True):
        step = jax.jit(lambda cache, layer=layer: layer.forward(None, q, k, v, cache, (batch, tpu_interface.mesh())))
        _, got = step(np.zeros(shape, np.float32))
        want, _ = tpu_interface.reference.attention(q, k, v, causal=True, scale=0.125, logits_soft_cap=cap)
        assert abs(got - want).max() < 1e-5, cap


def of_vllm(module: Any, window: int | None, chunk: int | None) -> Any:
    """A layer of vLLM's models; that of Llama 4 is its `ChunkedLocalAttention`, whose attribute is the chunk."""
    from attn.integrations._tpu_inference import TPUAttnImpl

    config = module.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    impl = TPUAttnImpl(heads, module.head_dim, module.scaling, kv_heads, None, window, "auto")
    layer = SimpleNamespace(layer_name=f"layers.{module.layer_idx}.attn", attention_chunk_size=chunk)
    return lambda q, k, v, cache, batch, mesh: impl.forward(layer, q, k, v, cache, (batch, mesh))


def as_a_window(module: Any, window: int | None, chunk: int | None) -> Any:
    """The control: a chunk passed as a window, as by the engine's own backend."""
    return of_vllm(module, chunk or window, None)


def test_gemma3s_images_are_seen_in_both_directions(engine: Any) -> None:
    pytest.importorskip("transformers", minversion="5.16")
    served = tpu_models.gemma3()
    want = tpu_models.eager(served)
    assert tpu_models.engine(served, of_vllm) == want
    assert tpu_models.engine(served, of_vllm, images=False) != want


def test_llama4s_chunks_are_no_windows(engine: Any) -> None:
    pytest.importorskip("transformers", minversion="5.16")
    served = tpu_models.llama4()
    want = tpu_models.eager(served)
    assert tpu_models.engine(served, of_vllm, images=False) == want
    assert tpu_models.engine(served, as_a_window, images=False) != want


def test_the_engines_runner_says_where_images_are(engine: Any) -> None:
    """A batch without images is the engine's own; groups stay groups; a step that cuts an image is an error."""
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    for _ in range(2):
        integration.create()
    assert TPUModelRunner._prepare_inputs.__wrapped__.__qualname__ == "TPUModelRunner._prepare_inputs"  # once
    at = lambda first, new, images=True: tpu_models.batch_of(first, new, images, tpu_interface.mesh())  # noqa: E731
    found = at([0, 5], [29, 16])
    assert type(found).__name__ == "ImageMetadata" and (found.window_cuts, found.full_layers) == (True, True)
    want = np.full((tpu_models.ROWS, 2), -1)
    want[4:13], want[18:25], want[29 + 4 : 29 + 16] = (4, 12), (18, 24), (9, 20)
    assert (np.asarray(found.spans) == want).all() and (found.seq_lens[:2] == jnp.array([29, 21])).all()
    assert type(at([29, 21], [1, 2])) is type(at([0, 0], [29, 8], images=False)) is AttentionMetadata
    with pytest.raises(UnsupportedError, match=r"request 1: a chunk that ends at token 12, within image tokens 9 to 20"):
        at([0, 0], [29, 12])
    with pytest.raises(UnsupportedError, match="a step of this form with images not supported"):
        tpu_models.batch_of([0], [29], True, tpu_interface.mesh(), parts=11)


def test_full_layers_of_gemma4_are_causal(call: Any) -> None:
    """Its windows cut images; a layer without a window has none."""
    import dataclasses

    batch = tpu_models.batch_of([0, 0], [29, 8], True, tpu_interface.mesh(), model="gemma4_text")
    assert (batch.window_cuts, batch.full_layers) == (True, False)
    q, kv = (np.random.default_rng(0).standard_normal((tpu_models.ROWS, heads, 64), np.float32) for heads in (4, 2))
    outs = {}
    for window in (None, 6):
        for spans in (batch.spans, jnp.full_like(batch.spans, -1)):
            given = {"batch": dataclasses.replace(batch, spans=spans), "attention_chunk_size": window}
            outs[window, spans is batch.spans] = call(**given, arrays=(q, kv))[1]
    assert (outs[None, True] == outs[None, False]).all() and abs(outs[6, True] - outs[6, False]).max() > 0.01


def test_a_running_vllm_layer_is_named(engine: Any) -> None:
    from attn.integrations._tpu_inference import TPUAttnImpl

    context = (None, SimpleNamespace(shape={"dcp": 2}))
    with pytest.raises(AttnError, match=r"layers\.3\.attn: a layer of 4 heads of 64: context parallelism"):
        cache = np.zeros((24, 1, 2, 16, 128), np.float32)
        batch, _ = tpu_interface.metadata([4], [4])
        x = np.ones((4, 4, 64), np.float32)
        TPUAttnImpl(**LAYER).forward(SimpleNamespace(layer_name="layers.3.attn"), x, x, x, cache, (batch, context[1]))


def test_a_model_that_names_no_backend_runs_the_one_of_its_cache(call: Any) -> None:
    """JAX models pass none, so the engine's own kernel would read this library's cache."""
    cache, named = call()
    _, default = call(attention_backend=None)
    assert (named == default).all() and named.any()
    with pytest.raises(NotImplementedError, match="the engine's own kernel"):
        call(attention_backend=None, cache=np.zeros((24, 16, 2, 1, 128), np.float32))


def test_a_step_updates_the_donated_cache_in_place(engine: Any) -> None:
    """Two layers in one compiled step: both caches are outputs in the memory of the inputs, and nothing copies one."""
    from tpu_inference.layers.common.attention_interface import attention

    backend, mesh = engine.create_attention_backend("attn"), tpu_interface.mesh()
    batch, _ = tpu_interface.metadata([20, 1], [40, 19])
    shape = backend.get_kv_cache_shape(24, 16, 2, 128, jnp.dtype("float32"))

    def step(caches: Any, q: Any, kv: Any, batch: Any) -> Any:
        made = []
        for cache in caches:
            cache, q = attention(cache, q, kv, kv, batch, mesh, attention_backend=backend)
            made.append(cache)
        return made, q

    zeros, (q, kv) = jnp.zeros(shape), (np.ones((24, heads, 128), np.float32) for heads in (4, 2))
    arguments = [zeros] * 2, q, kv, batch
    text = jax.jit(step, donate_argnums=0).lower(*arguments).compile().as_text()
    header = text.splitlines()[0]
    assert re.findall(r"\{(\d)\}: \((\d), \{\}, may-alias\)", header) == [("0", "0"), ("1", "1")]
    words = "f32[" + ",".join(map(str, shape)) + "]"
    assert [
        line for line in text.splitlines() if words in line.partition(" = ")[2].partition("(")[0] and " copy(" in line
    ] == []
