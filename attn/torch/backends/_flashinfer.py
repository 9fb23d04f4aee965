"""FlashInfer's workspaces and wrappers, shared by every adapter on them.

A wrapper is planned on the host for one batch and may run for every layer of it. Making one allocates pinned memory, so
wrappers are lent: a batch's metadata holds those that were planned for it, and when it dies they wait for the next batch.
Two batches in flight never share a plan.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

WORKSPACE = 128 << 20  #: bytes for split keys' partial results, as FlashInfer's documentation recommends

_workspaces: dict[tuple[torch.device, str], torch.Tensor] = {}
_idle: dict[Any, list[Any]] = defaultdict(list)
_copied: weakref.WeakKeyDictionary[Any, torch.cuda.Event] = weakref.WeakKeyDictionary()


class Group(NamedTuple):
    """Layers that share a plan: everything that a plan fixes apart from the batch."""

    kind: str  #: decode, prefill (both paged) or ragged
    first: int  #: the part of the batch: requests first..last
    last: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    lse: bool = False  #: somebody reads the log-sum-exp


def workspace(device: torch.device, use: str = "wrappers") -> torch.Tensor:
    """The device's workspace of one use, zeros when it is new: some kernels count in it, and keep it so. Launches of one stream
    may share it."""
    if (device, use) not in _workspaces:
        _workspaces[device, use] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return _workspaces[device, use]


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lend(owner: Any, device: torch.device, kind: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """A wrapper of this kind for as long as `owner` lives: an idle one, or what `make` makes of the workspace."""
    idle = _idle[device, kind]
    wrapper = idle.pop() if idle else make(workspace(device))
    weakref.finalize(owner, idle.append, wrapper)
    return wrapper


def plan(wrapper: Any, device: torch.device, *args: Any, **rules: Any) -> None:
    """`wrapper.plan(*args, **rules)`, once the plan before has left the wrapper's pinned memory: the host writes that anew, and
    a copy that still waits behind a batch on the device would take the wrong plan."""
    if (before := _copied.get(wrapper)) is not None:
        before.synchronize()
    wrapper.plan(*args, **rules)
    if device.type == "cuda":
        _copied[wrapper] = torch.cuda.current_stream(device).record_event()
