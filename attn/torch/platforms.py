"""The platforms of torch: CUDA, ROCm, XPU and CPU, each with its priority list of backends and the reasons for the order.

A priority list is a literal that maps hardware generations (rules of `attn.capabilities.arch_matches`) to backends. The first
rule that matches applies; `*` matches every other generation and devices that are not present. Where a reason says "measured",
`attn bench --judge` checks the figures; "vLLM's order" is that of vLLM 0.33, unmeasured.

A platform is queried only when a layer is selected. Nothing in this module runs at import, and no device is initialised before
it is described.
"""

import functools
import platform as host
from collections.abc import Mapping
from typing import ClassVar

import torch

from attn.capabilities import MASK_FEATURES, Device, Feature, Request, arch_matches
from attn.kernels import hopper
from attn.selection.platforms import Platform

Orders = Mapping[str, tuple[str, ...]]


class TorchPlatform(Platform):
    """Base class: the default priority lists and their lookup."""

    framework = "torch"
    dense: ClassVar[Orders]
    mla: ClassVar[Orders] = {"*": ("TORCH_MLA",)}
    sparse_mla: ClassVar[Orders] = {"*": ("TORCH_MLA_SPARSE",)}
    mla_prefill: ClassVar[Orders] = {"*": ("TRITON", "TORCH_SDPA")}
    diffusion: ClassVar[Orders] = {
        "*": ("TRITON_ATTN", "TORCH_SDPA", "TRITON_INT8_ATTN")  # the last only by name: never measured to be faster
    }

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        if Feature.SPARSE_MLA in request.features:
            return _order(self.sparse_mla, device)
        return _order(self.mla if Feature.MLA in request.features else self.dense, device)

    def deterministic(self) -> str:
        return "torch.use_deterministic_algorithms is on" if torch.are_deterministic_algorithms_enabled() else ""

    def host(self) -> Platform:
        return platform("cpu")

    def mla_prefill_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return _order(self.mla_prefill, device)

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        return _order(self.diffusion, device)


def _order(orders: Orders, device: Device) -> tuple[str, ...]:
    return next(names for rule, names in orders.items() if arch_matches(device.arch, rule))


def rows_that_decide(rows: int) -> int:
    """Return the class of a number of rows for the order of dense backends: 0 unknown, 1 one, 2 more."""
    return min(rows, 2)


class CudaPlatform(TorchPlatform):
    """NVIDIA GPUs."""

    name = "cuda"

    @functools.cache  # noqa: B019  (one platform object per process)
    def device(self) -> Device:
        if not torch.cuda.is_available():
            return Device("torch", "cuda", "NVIDIA GPU (none here)")
        # of the current device, once a process: selection asks for no other, so a host of several kinds of GPU is taken for one
        major, minor = torch.cuda.get_device_capability()
        return Device("torch", "cuda", torch.cuda.get_device_name(), f"sm_{major}{minor}")

    dense: ClassVar[Orders] = {
        "sm_7*": (
            "XFORMERS",  # CUTLASS: the only vendor kernel for GPUs before Ampere
            "FLEX_ATTENTION",
            "TORCH_SDPA",
            "TRITON_ATTN",  # this and the next two need sm_80 and reject older GPUs: no bf16 tensor cores there
            "FLASH_ATTN",
            "FLASHINFER",
        ),
        "sm_90": (
            # measured on an H200, 13 batches: the fastest backend in each, or equal within the spread
            "TRITON_ATTN",
            "FLASHINFER",  # measured: 1.01 to 1.3x TRITON_ATTN's time in decode, 1.3x in prefill, 1.8 to 4x in mixed batches
            # measured: 1.01 to 1.4x TRITON_ATTN's time with FlashAttention 3; with FlashAttention 4, which does not split keys
            # on sm_90, 9x for one request of 32k
            "FLASH_ATTN",
            "FLEX_ATTENTION",  # measured on dense keys: 1.5x TRITON_ATTN's time in prefill, 1 to 22x in decode
            "XFORMERS",  # gathers keys first, except from pages of 64 in a decode batch
            "TORCH_SDPA",  # supports any shape and feature, but is slow: the last resort
        ),
        "sm_10*": (
            "FLASHINFER",  # TRT-LLM's kernels are fastest in decode and prefill on datacentre Blackwell (vLLM's order)
            "FLASH_ATTN",  # FlashAttention 4 splits keys on this generation
            "TRITON_ATTN",  # this package has no kernel for this generation's tensor cores; Triton compiles its general one
            "FLEX_ATTENTION",
            "XFORMERS",
            "TORCH_SDPA",
        ),
        "sm_12*": (
            "FLASH_ATTN",  # FlashAttention 2 (vLLM's order); 4 does not support pages on sm_12 and is rejected
            "TRITON_ATTN",
            "FLASHINFER",  # after TRITON_ATTN: vLLM's automatic choice of it gave degenerate outputs on sm_12 (vllm#53481)
            "FLEX_ATTENTION",
            "XFORMERS",
            "TORCH_SDPA",
        ),
        "*": (  # Ampere and Ada
            "FLASH_ATTN",  # FlashAttention 2 is fastest in prefill (vLLM's order)
            "FLASHINFER",
            "TRITON_ATTN",
            "FLEX_ATTENTION",
            "XFORMERS",
            "TORCH_SDPA",
        ),
    }

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        order = super().priorities(request, device)
        if request.features & {Feature.MLA, Feature.SPARSE_MLA}:
            return order
        if request.features & MASK_FEATURES:  # for these FlashAttention 4 computes tiles that no row sees
            return _moved(order, "FLASH_ATTN", behind="TRITON_ATTN")
        return order

    mla: ClassVar[Orders] = {
        "sm_90": (
            # measured on an H200, 12 batches: the fastest in ten; FlashAttention 3 is faster in two, by 5
            # and by 3 to 12 %
            "TRITON_MLA",
            "FLASHINFER_MLA",  # 1.01 to 1.12x TRITON_MLA's time
            "FLASH_ATTN_MLA",  # 0.89 to 1.17x, FlashAttention 3
            "FLASHMLA",  # 1.04 to 1.26x
            "TORCH_MLA",
        ),
        # vLLM's orders; vendors have no kernel for sm_12*
        "sm_10*": ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "TORCH_MLA"),
        "sm_12*": ("TRITON_MLA", "FLASHINFER_MLA", "TORCH_MLA"),
        "*": (
            "FLASHINFER_MLA",  # its FA2 template, measured on Hopper: 260 TFLOP/s, equal to TRITON_MLA there
            "TRITON_MLA",
            "TORCH_MLA",
        ),
    }
    sparse_mla: ClassVar[Orders] = {
        "*": (
            "FLASHMLA_SPARSE",  # publishes 410 TFLOP/s on an H800; TRITON_MLA_SPARSE reaches 64 over packed rows
            "TRITON_MLA_SPARSE",
            "TORCH_MLA_SPARSE",
        )
    }
    mla_prefill: ClassVar[Orders] = {
        "sm_10*": ("TRTLLM_RAGGED", "FLASHINFER", "FLASH_ATTN", "TOKENSPEED_MLA", "TRITON", "TORCH_SDPA"),
        "*": (
            "FLASH_ATTN",  # FlashAttention 3 supports 192 / 128 heads without padding (vLLM's order)
            "FLASHINFER",
            "TRITON",  # this package's kernel
            "TORCH_SDPA",
        ),
    }
    diffusion: ClassVar[Orders] = {  # approximate kernels serve only requests whose error budget allows them
        "sm_1*": (
            "SAGE_ATTN_3",
            "CUDNN_ATTN",
            "FLASH_ATTN",
            "FLASHINFER_ATTN",
            "TRITON_ATTN",
            "TORCH_SDPA",
            "TRITON_INT8_ATTN",
        ),
        "sm_90": (
            # measured on H100s: 1.03 to 1.35x as fast as cuDNN where a call takes 0.2 ms and more, 0.90 to 0.97 in three of
            # four shorter ones; FlashInfer on an H200: 629 TFLOP/s at Flux, 660 at Wan 480p, where this has 755 and 775
            "TRITON_ATTN",
            "FLASHINFER_ATTN",
            "CUDNN_ATTN",
            "FLASH_ATTN",
            "SAGE_ATTN",
            "TORCH_SDPA",
            "TRITON_INT8_ATTN",
        ),
        "*": (
            "CUDNN_ATTN",
            "FLASHINFER_ATTN",
            "FLASH_ATTN",
            "SAGE_ATTN",
            "TRITON_ATTN",
            "TORCH_SDPA",
            "TRITON_INT8_ATTN",  # only when requested by name, until measured to be faster
        ),
    }

    def diffusion_priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        order = super().diffusion_priorities(request, device)
        on_hopper = arch_matches(device.arch, "sm_90")
        if rows_that_decide(getattr(request, "rows", None) or 0) == 1:
            # A decoded token. cuDNN builds a plan at each new number of keys (60 to 900 ms, measured on an H100); TRITON_ATTN
            # and FlashAttention, which TORCH_SDPA launches, do not. TRITON_ATTN takes 0.67 to 1.5x cuDNN's time there.
            first = ("TRITON_ATTN", "TORCH_SDPA") if on_hopper else ("TORCH_SDPA",)
            return (*first, *(name for name in order if name not in first))
        if on_hopper and hopper.why_off("hopper_prefill"):  # the general kernel takes 1.1 to 1.4x cuDNN's time
            order = _moved(order, "TRITON_ATTN", behind="SAGE_ATTN")
        if on_hopper and getattr(request, "causal", False):
            # Prompts, whose lengths seldom repeat, unlike images': cuDNN builds a plan for each length (75 to 900 ms).
            order = _moved(order, "CUDNN_ATTN", behind="FLASH_ATTN")
        return order


def _moved(order: tuple[str, ...], name: str, behind: str) -> tuple[str, ...]:
    others = [other for other in order if other != name]
    after = others.index(behind) + 1
    return (*others[:after], name, *others[after:])


class RocmPlatform(TorchPlatform):
    """AMD GPUs. torch calls their device type `cuda` too."""

    name = "rocm"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        if not torch.cuda.is_available():
            return Device("torch", "rocm", "AMD GPU (none here)")
        properties = torch.cuda.get_device_properties(0)
        return Device("torch", "rocm", properties.name, getattr(properties, "gcnArchName", "").partition(":")[0])

    dense: ClassVar[Orders] = {
        "gfx9*": (
            "ROCM_AITER_FA",  # AMD's own kernels: 2.7-4.4x ROCM_ATTN on MI300 (ROCm/vLLM blog, 2026-02); rejected before gfx942
            "ROCM_AITER_UNIFIED_ATTN",
            "ROCM_ATTN",  # this package's Triton kernels with AMD's launch rules
            "TRITON_ATTN",
            "FLEX_ATTENTION",
            "TORCH_SDPA",
        ),
        # RDNA: AITER has no kernels for it, and its backends are rejected
        "*": ("ROCM_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA"),
    }
    mla: ClassVar[Orders] = {"*": ("ROCM_AITER_MLA", "TRITON_MLA", "TORCH_MLA")}  # vLLM's order
    sparse_mla: ClassVar[Orders] = {"*": ("TRITON_MLA_SPARSE", "TORCH_MLA_SPARSE")}


class XpuPlatform(TorchPlatform):
    """Intel GPUs."""

    name = "xpu"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        # builds of torch for other devices may lack the module
        present = hasattr(torch, "xpu") and torch.xpu.is_available()
        return Device("torch", "xpu", torch.xpu.get_device_name() if present else "Intel GPU (none here)")

    #: Not measured: no backend was run on an Intel GPU. IPEX is listed so that its reason for rejection is shown (its kernels
    #: of the same names need another cache layout), then backends that may compile, then those that need no compiler.
    dense: ClassVar[Orders] = {"*": ("IPEX", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA")}


class CpuPlatform(TorchPlatform):
    """Any host processor."""

    name = "cpu"

    @functools.cache  # noqa: B019
    def device(self) -> Device:
        return Device("torch", "cpu", f"{host.machine()} CPU", host.machine())

    dense: ClassVar[Orders] = {
        "*": (
            "CPU_ATTN",  # measured: 1 to 3.7x as fast as a loop over gathered keys and SDPA
            "TORCH_SDPA",
            "FLEX_ATTENTION",  # needs a compiler, seconds per variant; as fast as SDPA once compiled
            "IPEX",  # requires an older torch, so it is rarely installed
        )
    }


PLATFORMS: dict[str, type[TorchPlatform]] = {p.name: p for p in (CudaPlatform, RocmPlatform, XpuPlatform, CpuPlatform)}


@functools.cache
def platform(name: str | None = None) -> TorchPlatform:
    """Return the platform called `name`, by default that of this machine's accelerator, or the CPU without one.

    Raises ValueError for an unknown name.
    """
    if name is None:
        return platform(_present_platform())
    if name not in PLATFORMS:
        raise ValueError(f"torch platform {name!r} is unknown; known: {', '.join(PLATFORMS)}")
    return PLATFORMS[name]()


def platform_of(device_type: str) -> str | None:
    """Return the name of the platform of a `torch.device`'s type; None for types that no platform has, such as meta."""
    if device_type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return device_type if device_type in PLATFORMS else None


def _present_platform() -> str:
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "cpu"
