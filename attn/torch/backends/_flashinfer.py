"""FlashInfer's workspaces and wrappers, shared by every adapter of FlashInfer.

A wrapper is planned on the host for one batch and may run for every layer of it. Creating a wrapper allocates pinned
memory, so wrappers are reused: a batch's metadata owns those that were planned for it, and when the metadata is garbage
collected they return to the pool. Two batches in flight never share a plan.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attn.torch.backends._paged import is_captured

WORKSPACE = 128 << 20  #: bytes for split keys' partial results, as FlashInfer's documentation recommends

_workspaces: dict[tuple[torch.device, str], torch.Tensor] = {}
# Wrappers that no batch has, by device and by what their kernels are chosen by.
_idle: dict[Any, list[Any]] = defaultdict(list)
# Recorded after each plan: passed when the device has copied it from the wrapper's memory.
_copied: weakref.WeakKeyDictionary[Any, torch.cuda.Event] = weakref.WeakKeyDictionary()


class Group(NamedTuple):
    """Everything that a plan depends on apart from the batch; layers with equal groups share a plan."""

    wrapper: str  #: decode, prefill (both paged) or ragged
    first: int  #: the group's requests: first..last, last excluded
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
    lse: bool = False  #: whether the log-sum-exp is returned


def workspace(device: torch.device, use: str = "wrappers") -> torch.Tensor:
    """Return the device's workspace for one use, initialised to zeros.

    Some kernels keep counters in it, which they reset to zero. Launches on one stream may share it.
    """
    held = _workspaces.get((device, use))
    if held is None:
        held = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        # while a graph is captured the memory is the graph's, and its zeros are written when that is replayed
        if not is_captured(held):
            _workspaces[device, use] = held
    return held


def wrapper_for(owner: Any, device: torch.device, key: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """Return an idle wrapper of this key, or a new one, `make(workspace)`; it is reserved for the lifetime of `owner`."""
    idle = _idle[device, key]
    wrapper = idle.pop() if idle else make(workspace(device))
    weakref.finalize(owner, idle.append, wrapper)
    return wrapper


def plan(wrapper: Any, device: torch.device, *args: Any, **rules: Any) -> None:
    """Call `wrapper.plan(*args, **rules)` after the previous plan was copied from the wrapper's pinned memory.

    The host overwrites that memory, so a copy that is still queued on the device would read the wrong plan.
    """
    if (before := _copied.get(wrapper)) is not None:
        before.synchronize()
    wrapper.plan(*args, **rules)
    if device.type == "cuda":
        _copied[wrapper] = torch.cuda.current_stream(device).record_event()
