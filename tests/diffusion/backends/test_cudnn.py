"""The heads that cuDNN serves, by architecture, under both frameworks."""

import importlib

import pytest

from attn.capabilities import Device
from attn.diffusion.backends.abstract import DiffusionRequest
from attn.diffusion.selector import make_diffusion_request, select_diffusion

BACKENDS = {"torch": ("attn.torch.diffusion.backends.cudnn_attn", "cuda"), "jax": ("attn.jax.diffusion.backends.cudnn", "gpu")}


@pytest.mark.parametrize(("arch", "widest"), [("sm_80", 128), ("sm_89", 128), ("sm_90", 256), ("sm_100", 128), ("sm_120", 128)])
@pytest.mark.parametrize("framework", BACKENDS)
def test_wide_heads_are_hoppers(framework: str, arch: str, widest: int) -> None:
    path, platform = BACKENDS[framework]
    backend = importlib.import_module(path).CuDNNAttentionBackend
    device = Device(framework, platform, "a GPU", arch)
    for size in (64, 128, 136, 192, 256):
        why = backend.why_not(DiffusionRequest(size, "bfloat16"), device)
        assert (not why) == (size <= widest), (size, why)
    assert any("supports up to 128" in reason for reason in backend.why_not(DiffusionRequest(256, "bfloat16"), device)) == (
        widest < 256
    )
    assert any("multiples of 8 up to 256" in reason for reason in backend.why_not(DiffusionRequest(264, "bfloat16"), device))


def test_jax_on_hopper_takes_cudnn_for_heads_of_256() -> None:
    request = make_diffusion_request(256, "bfloat16", num_heads=8)
    chosen = [
        select_diffusion(request, device=Device("jax", "gpu", "a GPU", arch), framework="jax").name
        for arch in ("sm_90", "sm_100")
    ]
    assert chosen == ["CUDNN", "XLA_ATTN"]


def test_blackwell_ultra_needs_a_newer_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.jax.diffusion.backends import cudnn

    device = Device("jax", "gpu", "NVIDIA B300", "sm_103")
    for version, served in (("9.10.2.21", False), ("9.11.0.98", True), (None, True)):
        monkeypatch.setattr(cudnn, "version_of", lambda package, version=version: version)
        assert (not cudnn.CuDNNAttentionBackend.why_not(DiffusionRequest(64, "bfloat16"), device)) == served
