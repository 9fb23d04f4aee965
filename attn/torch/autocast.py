"""Autocast: entries that stand for torch's own attention cast their arguments as torch does; layers compute without it.

A layer and `attn.attention` compute in the dtype of their arguments (docs/semantics.md §16), where autocast would round the
operands of products inside them, with some backends only.
"""

from typing import Any

import torch


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors (or None) as `torch.autocast` passes them to `F.scaled_dot_product_attention`.

    While it is enabled for the device of the first, tensors of floats on that device are cast to its dtype, except float64.
    """
    device = tensors[0].device.type
    if not enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # a mask of bools stays: autocast concerns floats
    return tuple(x.to(dtype) if x is not None and _is_cast(x, device) else x for x in tensors)


def lossy(x: Any) -> bool:
    """Whether autocast is on for the device of a tensor; False for anything else. Cheap where it is on for no device."""
    return torch._C._is_any_autocast_enabled() and isinstance(x, torch.Tensor) and enabled(x.device.type)


#: Types that need not be asked about, which takes longer than the rest.
_WITH_AUTOCAST = ("cpu", "cuda")


def enabled(device: str) -> bool:
    """Whether autocast is on for a type of device; some types have none, and torch raises for them."""
    return (device in _WITH_AUTOCAST or _available(device)) and torch.is_autocast_enabled(device)


@torch.compiler.assume_constant_result
def _available(device: str) -> bool:
    """Whether autocast supports the type of device: a constant in graphs, as Dynamo before torch 2.13 cannot trace the call."""
    return torch.amp.is_autocast_available(device)


def _is_cast(x: torch.Tensor, device: str) -> bool:
    return x.device.type == device and x.is_floating_point() and x.dtype != torch.float64
