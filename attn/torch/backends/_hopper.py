"""Report that a backend's Hopper kernels are disabled, and why."""

import torch

from attn.capabilities import Device
from attn.kernels import hopper

_WORDS = {"hopper_prefill": "Hopper prefill kernel", "hopper_mla": "Hopper MLA decode kernel"}


def off_paths(kernel: str, device: Device | None) -> tuple[str, ...]:
    """Return one sentence if `device` is a Hopper GPU and the installed Triton cannot run `kernel`, a key of `_WORDS`.

    device: None means the GPU of this machine. Without Triton the result is empty, since the backend itself is unavailable.
    """
    # a device that is asked about need not be present; the installed Triton is this machine's in any case
    if not (_is_here() if device is None else (device.platform, device.arch) == ("cuda", "sm_90")) or not hopper.has_triton():
        return ()
    why = hopper.why_off(kernel)
    return (f"{_WORDS[kernel]} off: {why}; the general kernels are used instead",) if why else ()


def _is_here() -> bool:
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
