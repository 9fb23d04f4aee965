"""The jax wing's platforms, present or not."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from attn import selector
from attn.capabilities import Device, Request
from attn.jax import platforms


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


@pytest.mark.parametrize(("name", "first"), [("tpu", "XLA_ATTN"), ("gpu", "XLA_ATTN"), ("cpu", "XLA_ATTN")])
def test_order(name: str, first: str) -> None:
    platform, device = platforms.platform(name), Device("jax", name)
    order = platform.priorities(Request(64, "float32"), device)
    assert order[0] == first and set(order) == {"PALLAS", "XLA_ATTN"}
    assert platform.priorities(Request(576, "bfloat16", features=frozenset({"mla"})), device) == ("PALLAS_MLA",)


def test_xla_attn_serves_every_platform() -> None:
    for name in platforms.PLATFORMS:
        request = Request(96, "float16", features=frozenset({"sinks", "alibi", "tree_mask", "lse"}))
        selection = selector.select(request, device=Device("jax", name), backend="XLA_ATTN")
        assert selection.name == "XLA_ATTN", str(selection)
