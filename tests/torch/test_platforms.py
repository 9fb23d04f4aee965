"""The torch wing's platforms, present or not."""

import pytest
import torch

from attn.capabilities import Device, Feature, Request
from attn.torch import platforms

DENSE = Request(head_size=128, dtype="bfloat16", block_size=16)
MLA = Request(head_size=576, dtype="bfloat16", block_size=64, features=frozenset({Feature.MLA}))


def test_here_is_what_torch_has() -> None:
    here = platforms.platform()
    assert here is platforms.platform(here.name) and here.device().framework == "torch"
    assert (here.name == "cpu") == (not torch.cuda.is_available() and not (hasattr(torch, "xpu") and torch.xpu.is_available()))
    with pytest.raises(ValueError, match="torch platform 'tpu' is unknown; known: cuda, rocm, xpu, cpu"):
        platforms.platform("tpu")


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu"])
def test_a_platform_that_is_not_here_answers_too(name: str) -> None:
    if platforms.platform().name != "cpu":
        pytest.skip("an accelerator is here")
    assert "none here" in str(platforms.platform(name).device())


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "cpu"])
def test_orders(name: str) -> None:
    """Every platform ends in a backend that needs no package, and names none twice."""
    here = platforms.platform(name)
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120", ""):
        order = here.priorities(DENSE, Device("torch", name, arch=arch))
        assert "TORCH_SDPA" in order and len(set(order)) == len(order)
        assert not set(here.priorities(MLA, Device("torch", name, arch=arch))) & set(order)


def test_generations_differ() -> None:
    cuda = platforms.platform("cuda")
    first = {arch: cuda.priorities(DENSE, Device("torch", "cuda", arch=arch))[0] for arch in ("sm_90", "sm_100", "sm_120")}
    assert first == {"sm_90": "FLASH_ATTN", "sm_100": "FLASHINFER", "sm_120": "FLASH_ATTN"}
