"""A machine with a GPU, as the selector sees it: `pytest -p tests.testing.gpu_here` runs tests as if there were one.

Tensors are on the host, so a test fails where a call with them is given a GPU's backend, or where it expects the choice of a
machine without a GPU and does not say so. Tests that put tensors on a GPU that they find cannot run this way.
"""

from collections.abc import Callable
from typing import Any

from attn.capabilities import Device
from attn.torch import platforms

_ITS = platforms.CudaPlatform.device
GPU = Device("torch", "cuda", "NVIDIA H100 80GB HBM3", "sm_90")


def patch(set_attribute: Callable[[object, str, Any], None]) -> None:
    """Replace what tells the selector which device this machine has."""
    forget()
    set_attribute(platforms, "_present_platform", lambda: "cuda")
    set_attribute(platforms.CudaPlatform, "device", lambda self: GPU if platforms._present_platform() == "cuda" else _ITS(self))


def forget() -> None:
    """Make the next question for this machine's platform look again."""
    platforms.platform.cache_clear()


def pytest_configure(config: Any) -> None:
    patch(setattr)
