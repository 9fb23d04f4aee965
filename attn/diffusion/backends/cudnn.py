"""Limits of cuDNN's fused attention, for both frameworks.

Head sizes up to 256 on Hopper (sm_90), forward and backward; up to 128 elsewhere. PyTorch 2.13 rejects larger ones on other
architectures; JAX 0.10 accepts them from sm_90 on, although cuDNN's table lists no such backward pass for Blackwell.
"""

from attn.capabilities import Device, MultipleOf, Request

HEAD_SIZES = (MultipleOf(8, 8, 256),)
_WIDEST = 128  #: the largest head size on architectures other than those below
_WIDE_ON = "sm_90"


def head_size_reasons(request: Request, device: Device | None) -> list[str]:
    """Return why a device does not support a head size in `HEAD_SIZES`."""
    # Without a device, or on one whose architecture is not known, the kernel's own refusal decides.
    if device is None or not device.arch.startswith("sm_") or device.arch == _WIDE_ON:
        return []
    # A size outside `HEAD_SIZES` has its reason from the record; a second one would repeat it.
    if request.head_size not in HEAD_SIZES[0] or request.head_size <= _WIDEST:
        return []
    return [f"head_size={request.head_size} on {device.arch} (supports up to {_WIDEST}; {_WIDE_ON}: up to 256)"]
