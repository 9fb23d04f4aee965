"""FlashInfer's workspaces and wrappers, shared by every adapter on them.

A wrapper is planned on the host for one batch and may run for every layer of it. Making one allocates pinned memory, so
wrappers are lent: a batch's metadata holds those that were planned for it, and when it dies they wait for the next batch.
Two batches in flight never share a plan.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

WORKSPACE = 128 << 20  #: bytes for split keys' partial results, as FlashInfer's documentation recommends

_workspaces: dict[torch.device, torch.Tensor] = {}
_idle: dict[Any, list[Any]] = defaultdict(list)


def workspace(device: torch.device) -> torch.Tensor:
    """The device's workspace, zeros when it is new: some kernels count in it. Launches of one stream may share it."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return _workspaces[device]


def lend(owner: Any, device: torch.device, kind: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """A wrapper of this kind for as long as `owner` lives: an idle one, or what `make` makes of the workspace."""
    idle = _idle[device, kind]
    wrapper = idle.pop() if idle else make(workspace(device))
    weakref.finalize(owner, idle.append, wrapper)
    return wrapper
