"""The jax platforms, present or not."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn.jax
from attn import selector
from attn.capabilities import Device, Request
from attn.jax import platforms
from attn.jax.kernels.tpu import _chips


def test_here_is_the_default_backend() -> None:
    assert platforms.platform().name == jax.default_backend()
    assert platforms.platform("cpu").device().platform == "cpu"
    with pytest.raises(ValueError, match="jax platform 'rocm' is unknown; known: tpu, gpu, cpu"):
        platforms.platform("rocm")


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_a_platform_that_is_not_here_answers_too(name: str) -> None:
    if jax.default_backend() == name:
        pytest.skip(f"a {name} is here")
    assert str(platforms.platform(name).device()) == f"{name.upper()} (none here) (jax)"


@pytest.fixture
def a_gpu_beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose default backend is a GPU, as the selector sees it; the host's device."""
    gpu = Device("jax", "gpu", "NVIDIA H100 80GB HBM3", "sm_90")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(platforms.GpuPlatform, "device", lambda self: gpu)
    return jax.devices("cpu")[0]


def test_the_default_device_decides(a_gpu_beside: Any) -> None:
    def chosen() -> list[str]:
        explained = attn.explain(64, "float32", block_size=16, framework="jax")
        cls = selector.get_attn_backend(64, jnp.float32, None, 16)
        layer, dense = attn.jax.Attention(4, 64, backend="XLA_ATTN"), attn.jax.DiffusionAttention(4, 64, backend="XLA_ATTN")
        places = [x.device.platform for x in (explained, layer.selection, dense.selection)]
        return [platforms.platform().name, cls.get_name() if places[0] == "cpu" else "", *places]

    assert chosen() == ["gpu", "", "gpu", "gpu", "gpu"]
    for host in (a_gpu_beside, "cpu"):
        with jax.default_device(host):
            assert chosen() == ["cpu", "XLA_ATTN", "cpu", "cpu", "cpu"]
    assert chosen() == ["gpu", "", "gpu", "gpu", "gpu"]


def test_arrays_that_are_committed_are_served_where_they_are(a_gpu_beside: Any) -> None:
    free = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    there = jax.device_put(free, a_gpu_beside)
    want = jax.nn.dot_product_attention(there, there, there)
    assert (attn.jax.dot_product_attention(there, there, there) == want).all()
    with jax.default_device(a_gpu_beside):
        assert (jax.jit(attn.jax.dot_product_attention)(free, free, free) == want).all()
    layer = attn.jax.DiffusionAttention(2, 64, dtype=jnp.bfloat16)
    assert layer.selection.device.platform == "gpu"
    for _ in range(2):
        assert (layer(there, there, there) == want).all() and layer.selection.device.platform == "gpu"
    for call in (attn.jax.dot_product_attention, layer):
        with pytest.raises(Exception, match="(?i)gpu|cudnn|cuda"):
            call(free, free, free)


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "v7x"),
        ("TPU v9 mega", "v9_mega"),
    ],
)
def test_tpu_generations(kind: str, arch: str) -> None:
    assert platforms.tpu_arch(kind) == arch


@pytest.mark.parametrize(("capability", "arch"), [("9.0", "sm_90"), ("12.0", "sm_120"), ("gfx942", "gfx942"), ("", "")])
def test_gpu_generations(capability: str, arch: str) -> None:
    device: Any = SimpleNamespace(compute_capability=capability)
    assert platforms.platform("gpu").arch(device) == arch


@pytest.mark.parametrize(("name", "first"), [("tpu", "PALLAS"), ("gpu", "TRITON_ATTN_JAX"), ("cpu", "XLA_ATTN")])
def test_order(name: str, first: str) -> None:
    platform, device = platforms.platform(name), Device("jax", name)
    order = platform.priorities(Request(64, "float32"), device)
    own = ["TRITON_ATTN_JAX"] if name == "gpu" else []
    assert order[0] == first and set(order) == {"PALLAS", "XLA_ATTN", *own}
    mla = platform.priorities(Request(576, "bfloat16", features=frozenset({"mla"})), device)
    assert mla == (*(["TRITON_MLA_JAX"] if own else []), "XLA_MLA", "PALLAS_MLA")
    sparse = platform.priorities(Request(576, "bfloat16", features=frozenset({"sparse_mla"})), device)
    both = ("PALLAS_MLA_SPARSE", "XLA_MLA_SPARSE")
    assert sparse == (both if name == "tpu" else both[::-1])


def test_on_a_tpu_pallas_is_chosen_and_xla_attn_takes_the_rest() -> None:
    v6e = Device("jax", "tpu", "TPU v6 lite", "v6e")
    assert selector.select(Request(128, "bfloat16", block_size=128), device=v6e).name == "PALLAS"
    odd = selector.select(Request(72, "float16", block_size=24), device=v6e)
    assert odd.name == "XLA_ATTN" and "head_size=72" in str(odd)
    sparse = {"features": frozenset({"sparse_mla"}), "block_size": 64}
    assert selector.select(Request(576, "bfloat16", **sparse), device=v6e).name == "PALLAS_MLA_SPARSE"
    coded = selector.select(Request(576, "bfloat16", "fp8", **sparse), device=v6e)
    assert coded.name == "XLA_MLA_SPARSE" and "kv_cache_dtype=fp8" in str(coded)


def test_compiling_for_a_generation_that_is_not_here() -> None:
    for arch in ("v5e", "v6e", "v7x"):
        with platforms.compiling_for(arch):
            assert _chips.target() == arch
    assert _chips.target() is None or jax.default_backend() == "tpu"
    words = "arch='v3' is not a known TPU generation or GPU; known: "
    with pytest.raises(ValueError, match=words), platforms.compiling_for("v3"):
        pass


def test_xla_attn_serves_every_platform() -> None:
    for name in platforms.PLATFORMS:
        request = Request(96, "float16", features=frozenset({"sinks", "alibi", "tree_mask", "lse"}))
        selection = selector.select(request, device=Device("jax", name), backend="XLA_ATTN")
        assert selection.name == "XLA_ATTN", str(selection)
