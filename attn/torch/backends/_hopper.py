"""What backends whose kernels have a schedule for Hopper say of it: that it is off, where it is."""

import torch

from attn.capabilities import Device
from attn.torch.kernels import hopper

_WORDS = {"hopper_prefill": "Hopper prefill kernel", "hopper_mla": "Hopper MLA decode kernel"}


def off_paths(kernel: str, device: Device | None) -> tuple[str, ...]:
    """A sentence where `device` (None: the one here) is a Hopper GPU and a kernel of `_WORDS` cannot be used with the installed
    Triton. Without Triton there is none: the backend itself is refused then."""
    if not (_is_here() if device is None else (device.platform, device.arch) == ("cuda", "sm_90")) or not hopper.has_triton():
        return ()
    why = hopper.why_off(kernel)
    return (f"{_WORDS[kernel]} off: {why}; the general kernels take its place",) if why else ()


def _is_here() -> bool:
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
