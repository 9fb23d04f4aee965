"""What cuDNN's fused attention takes, whichever framework calls it.

Heads of up to 256 on Hopper (sm_90), forward and backward; up to 128 elsewhere. PyTorch 2.13 refuses more on other
architectures; JAX 0.10 lets everything from sm_90 on through, though cuDNN's table gives Blackwell no such backward pass.
"""

from attn.capabilities import Device, MultipleOf, Request

HEAD_SIZES = (MultipleOf(8, 8, 256),)
_WIDEST = 128  #: the widest heads on architectures other than those below
_WIDE_ON = "sm_90"


def head_size_reasons(request: Request, device: Device | None) -> list[str]:
    """Why a device does not serve heads of that size, which `HEAD_SIZES` have among them."""
    if device is None or not device.arch.startswith("sm_") or device.arch == _WIDE_ON:
        return []
    if request.head_size not in HEAD_SIZES[0] or request.head_size <= _WIDEST:
        return []
    return [f"head_size={request.head_size} on {device.arch} (supports up to {_WIDEST} there, {_WIDE_ON} up to 256)"]
