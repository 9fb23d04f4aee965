"""Launches of our Triton kernels measured on the device at hand, kept on disk: off unless ATTN_AUTOTUNE=1.

The launch rules (`attn.torch.kernels.launch`) are the default and the starting point: candidates differ from the rule's
choice by a factor of two in one of its numbers, and one replaces it only when it is more than 3 % faster. What is tuned is
found again by rule, architecture and shapes (group, head size, element sizes), never by the batch, so that a sequence's bits
depend on what is in the file and not on its neighbours. The first batch of such a shape is the one that is timed: let it be
a typical one. Nothing is timed while a CUDA graph is captured or a call is traced; what is tuned already is used.

A file belongs to one device model and to the versions that compiled for it (`attn.cache_file`).
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

import attn
from attn import cache_file
from attn.logger import fork_safe_lock, init_logger
from attn.torch.kernels.launch import TUNED, Launch, arch, decode_launch, prefill_launch

logger = init_logger(__name__)

_lock = fork_safe_lock()
_loaded: set[Path] = set()
_RULES = {"decode": decode_launch, "prefill": prefill_launch}
_GAIN = 0.97  #: of the rule's time: what a candidate must stay below


def tune(kind: str, shape: tuple[int, int, int, int], run: Callable[[], Any], device: torch.device) -> Launch:
    """The launch that calls of this shape take from now on: from the file, or measured now by timing `run`.

    kind: `decode` or `prefill`; shape: (group, head_size, bytes an element of the query, of the cache), the arguments of the
    kind's rule after the architecture.
    """
    rule, name = _RULES[kind], arch()
    key = (kind, name, *shape)
    if key in TUNED:
        return TUNED[key]
    with _lock():
        path = cache_file.path("launches", _device_name(device))
        if path not in _loaded:
            _loaded.add(path)
            found = cache_file.read(path, _owner(device), _entry) if path.exists() else []
            TUNED.update([] if isinstance(found, str) else found)
        if key not in TUNED and not _capturing(device):
            TUNED[key] = _fastest(key, rule(name, *shape), run)
            own = sorted((key, launch) for key, launch in TUNED.items() if key[1] == arch())
            entries = [{"key": list(key), "launch": list(astuple(launch))} for key, launch in own]
            cache_file.write(path, _owner(device), entries)
        return TUNED.get(key) or rule(name, *shape)


def _fastest(key: tuple[Any, ...], by_rule: Launch, run: Callable[[], Any]) -> Launch:
    times: dict[Launch, float] = {}
    for candidate in (by_rule, *_around(by_rule, least=key[2])):
        TUNED[key] = candidate
        try:
            times[candidate] = _time(run)
        except _unfit() as error:
            if candidate == by_rule:
                raise
            logger.debug("%s %s does not fit: %s", key, candidate, error)
        finally:
            del TUNED[key]
    best = min(times, key=lambda launch: times[launch])
    chosen = best if times[best] < _GAIN * times[by_rule] else by_rule
    logger.info("tuned %s: %s, %.4f ms (by rule %s, %.4f ms)", key, chosen, times[chosen], by_rule, times[by_rule])
    return chosen


def _around(by_rule: Launch, least: int) -> Iterator[Launch]:
    """The rule's launch with one number halved or doubled (a stage more or less), where that is a launch at all."""
    for field, low, high in (("block_m", max(16, least), 256), ("block_n", 16, 128), ("num_warps", 1, 8)):
        for value in (getattr(by_rule, field) // 2, getattr(by_rule, field) * 2):
            if low <= value <= high:
                yield replace(by_rule, **{field: value})
    for stages in (by_rule.num_stages - 1, by_rule.num_stages + 1):
        if 1 <= stages <= 10:
            yield replace(by_rule, num_stages=stages)


def _time(run: Callable[[], Any]) -> float:
    """Median milliseconds of a call, the second-level cache cleared before each."""
    from triton import testing

    return float(testing.do_bench(run, warmup=10, rep=40, return_mode="median"))


def _unfit() -> tuple[type[Exception], ...]:
    """What is raised for a launch that the device cannot hold, or that NVIDIA's assembler does not make."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _owner(device: torch.device) -> dict[str, Any]:
    """What a file must have been written by to count."""
    import triton

    return {"format": 1, "attn": attn.__version__, "triton": triton.__version__, "device": _device_name(device), "arch": arch()}


def _entry(entry: dict[str, Any]) -> tuple[tuple[Any, ...], Launch]:
    kind, name, *shape = entry["key"]
    numbers = entry["launch"]
    whole = [*shape, *numbers]
    if kind not in _RULES or name != arch() or len(shape) != 4 or any(type(n) is not int or n < 1 for n in whole):
        raise ValueError(f"{entry} is no launch")
    launch = Launch(*numbers)
    if any(n & (n - 1) for n in numbers[:3]) or launch.block_m < max(16, shape[0]) or launch.block_n < 16:
        raise ValueError(f"{entry} is no launch: tiles and warps are powers of two, and hold a group")
    return (kind, name, *shape), launch
