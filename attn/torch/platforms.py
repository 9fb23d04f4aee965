"""The torch wing's platforms: CUDA, ROCm, XPU and CPU, each with its order of backends and the reasons for it.

A platform is asked only when a layer is selected; nothing here runs at import, and describing a device initialises it
no earlier than that.
"""

import functools
import platform as host

import torch

from attn.capabilities import Device, Feature, Request
from attn.platforms import Platform


class TorchPlatform(Platform):
    """Base: a framework name and the MLA branch that all share."""

    framework = "torch"

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        raise NotImplementedError

    def mla(self, request: Request, device: Device) -> tuple[str, ...]:
        """Multi-head latent attention: the portable backends, wherever no other is listed."""
        return ("TORCH_MLA_SPARSE",) if Feature.SPARSE_MLA in request.features else ("TORCH_MLA",)

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return ("TRITON", "TORCH_SDPA")

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return ("TRITON_ATTN", "TORCH_SDPA", "TRITON_INT8_ATTN")  # the last by name alone: nowhere was it seen to be faster

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        if {Feature.MLA, Feature.SPARSE_MLA} & request.features:
            return self.mla(request, device)
        return self.dense(request, device)


class CudaPlatform(TorchPlatform):
    """NVIDIA GPUs."""

    name = "cuda"

    @functools.cache  # noqa: B019  (one platform object a process)
    def device(self) -> Device:
        if not torch.cuda.is_available():
            return Device("torch", "cuda", "NVIDIA GPU (none here)")
        major, minor = torch.cuda.get_device_capability()
        return Device("torch", "cuda", torch.cuda.get_device_name(), f"sm_{major}{minor}")

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        if device.arch.startswith("sm_10"):
            return (
                "FLASHINFER",  # TRT-LLM kernels lead decode and prefill on datacentre Blackwell (vLLM's order)
                "FLASH_ATTN",
                "TRITON_ATTN",
                "FLEX_ATTENTION",
                "XFORMERS",
                "TORCH_SDPA",  # any shape and feature, none of the speed: the last resort
            )
        return (
            "FLASH_ATTN",  # FA3 leads prefill on Hopper, FA2 on Ampere and Ada (vLLM's order)
            "FLASHINFER",  # level with it in decode; fewer features
            "TRITON_ATTN",  # our own kernels: every feature
            "FLEX_ATTENTION",
            "XFORMERS",
            "TORCH_SDPA",
        )

    def mla(self, request: Request, device: Device) -> tuple[str, ...]:
        if Feature.SPARSE_MLA in request.features:
            return ("FLASHMLA_SPARSE", "TRITON_MLA_SPARSE", "TORCH_MLA_SPARSE")
        if device.arch.startswith("sm_10"):
            return ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "TORCH_MLA")
        return ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "TORCH_MLA")

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        if device.arch.startswith("sm_10"):
            return ("TRTLLM_RAGGED", "FLASHINFER", "FLASH_ATTN", "TOKENSPEED_MLA", "TRITON", "TORCH_SDPA")
        return (
            "FLASH_ATTN",  # FA3 takes 192 / 128 heads as they are (vLLM's order)
            "FLASHINFER",
            "TRITON",  # our own
            "TORCH_SDPA",
        )

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        # Approximate kernels come first, and serve only those whose error budget lets them.
        if device.arch.startswith(("sm_10", "sm_12")):
            return (
                "SAGE_ATTN_3", "CUDNN_ATTN", "FLASH_ATTN", "FLASHINFER_ATTN", "TRITON_ATTN", "TORCH_SDPA", "TRITON_INT8_ATTN",
            )  # fmt: skip
        return (
            "CUDNN_ATTN",  # H200 at Flux's shape: 604-611 TFLOP/s, FlashInfer FA3 653, FlashAttention 4 574, ours 473
            "FLASHINFER_ATTN",
            "FLASH_ATTN",
            "SAGE_ATTN",  # 342-441 there: int8 in Triton does not pay on Hopper
            "TRITON_ATTN",
            "TORCH_SDPA",
            "TRITON_INT8_ATTN",  # by name alone until it is seen to be faster
        )


class RocmPlatform(TorchPlatform):
    """AMD GPUs; torch calls their device type `cuda` too."""

    name = "rocm"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        if not torch.cuda.is_available():
            return Device("torch", "rocm", "AMD GPU (none here)")
        properties = torch.cuda.get_device_properties(0)
        return Device("torch", "rocm", properties.name, getattr(properties, "gcnArchName", "").partition(":")[0])

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return (
            "ROCM_AITER_FA",  # AMD's own kernels: 2.7-4.4x ROCM_ATTN on MI300 (ROCm/vLLM blog, 2026-02)
            "ROCM_AITER_UNIFIED_ATTN",
            "ROCM_ATTN",  # our Triton kernels with AMD's launch rules
            "TRITON_ATTN",
            "FLEX_ATTENTION",
            "TORCH_SDPA",
        )

    def mla(self, request: Request, device: Device) -> tuple[str, ...]:
        if Feature.SPARSE_MLA in request.features:
            return ("TRITON_MLA_SPARSE", "TORCH_MLA_SPARSE")
        return ("ROCM_AITER_MLA", "TRITON_MLA", "TORCH_MLA")


class XpuPlatform(TorchPlatform):
    """Intel GPUs."""

    name = "xpu"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        present = hasattr(torch, "xpu") and torch.xpu.is_available()
        return Device("torch", "xpu", torch.xpu.get_device_name() if present else "Intel GPU (none here)")

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return ("IPEX", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA")


class CpuPlatform(TorchPlatform):
    """Any host processor."""

    name = "cpu"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        return Device("torch", "cpu", f"{host.machine()} CPU", host.machine())

    def dense(self, request: Request, device: Device) -> tuple[str, ...]:
        return (
            "CPU_ATTN",  # paged, heads folded: see benchmarks/NOTES.md for the margin over gather + SDPA
            "TORCH_SDPA",
            "FLEX_ATTENTION",
            "IPEX",  # pins an older torch, so it is rarely there
        )


PLATFORMS: dict[str, type[TorchPlatform]] = {p.name: p for p in (CudaPlatform, RocmPlatform, XpuPlatform, CpuPlatform)}


@functools.cache
def platform(name: str | None = None) -> TorchPlatform:
    """The platform called `name`, or the one of the accelerator that torch has here (the CPU without one).

    Raises ValueError for an unknown name.
    """
    if name is None:
        return platform(_here())
    if name not in PLATFORMS:
        raise ValueError(f"torch platform {name!r} is unknown; known: {', '.join(PLATFORMS)}")
    return PLATFORMS[name]()


def _here() -> str:
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "cpu"
