"""The torch platforms, present or not."""

from dataclasses import replace

import pytest
import torch

import attn
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import MASK_FEATURES, Device, Feature, Request
from attn.diffusion.selector import make_diffusion_request
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
    archs = {"sm_75": "XFORMERS", "sm_86": "FLASH_ATTN", "sm_90": "TRITON_ATTN", "sm_103": "FLASHINFER", "sm_121": "FLASH_ATTN"}
    assert {arch: cuda.priorities(DENSE, Device("torch", "cuda", arch=arch))[0] for arch in archs} == archs
    rocm = platforms.platform("rocm")
    archs = {"gfx942": "ROCM_AITER_FA", "gfx1100": "ROCM_ATTN", "": "ROCM_ATTN"}
    assert {arch: rocm.priorities(DENSE, Device("torch", "rocm", arch=arch))[0] for arch in archs} == archs


HOPPER = Device("torch", "cuda", "NVIDIA H200", "sm_90")


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_prompts_on_hopper_stay_with_triton_beside_flash_attention_4(head_size: int) -> None:
    """Measured over pages of 16 (`benchmarks/notes/triton.md`): a pair with FLASH_ATTN is slower at each of these sizes."""
    selection = attn.explain(head_size, "bfloat16", device=HOPPER, assume=["triton", "flash-attn-4"])
    assert selection.name == "TRITON_ATTN"


@pytest.mark.parametrize("feature", sorted(MASK_FEATURES))
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_masks_that_flash_attention_computes_whole_go_to_triton_first(arch: str, feature: Feature) -> None:
    cuda, device = platforms.platform("cuda"), Device("torch", "cuda", arch=arch)
    plain, masked = (
        cuda.priorities(replace(DENSE, features=features), device) for features in (frozenset(), frozenset({feature}))
    )
    assert set(plain) == set(masked) and masked.index("FLASH_ATTN") == masked.index("TRITON_ATTN") + 1
    mla = replace(MLA, features=MLA.features | {feature})
    assert cuda.priorities(mla, device) == cuda.priorities(MLA, device)


def test_every_generation_of_a_platform_knows_the_same_backends_and_all_of_them_exist() -> None:
    for cls in platforms.PLATFORMS.values():
        assert len({frozenset(names) for names in cls.dense.values()}) == 1
        for orders in (cls.dense, cls.mla, cls.sparse_mla):
            assert {name for names in orders.values() for name in names} <= set(AttentionBackendEnum.names())
            assert list(orders)[-1] == "*" and all(len(set(names)) == len(names) for names in orders.values())


@pytest.mark.parametrize("rows", [2, 1 << 14, 1 << 15])
@pytest.mark.parametrize("head_size", [64, 128])
def test_prompts_on_hopper_do_not_wait_for_plans_of_their_length(rows: int, head_size: int) -> None:
    hopper = Device("torch", "cuda", "NVIDIA H100", "sm_90")
    causal, images = (
        platforms.platform("cuda").diffusion_priorities(
            make_diffusion_request(head_size, "bfloat16", causal=causal, rows=rows, keys=rows), hopper
        )
        for causal in (True, False)
    )
    assert sorted(causal) == sorted(images)
    assert causal.index("CUDNN_ATTN") == causal.index("FLASH_ATTN") + 1
    assert images.index("CUDNN_ATTN") < images.index("FLASH_ATTN")
    assert [name for name in causal if name != "CUDNN_ATTN"] == [name for name in images if name != "CUDNN_ATTN"]
