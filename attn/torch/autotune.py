"""Autotuning of this package's Triton launches on the current device, cached on disk; off unless ATTN_AUTOTUNE=1.

The launch rules (`attn.kernels.launch`) are the default and the starting point. Candidates differ from the rule's choice
by a factor of two in one number; a candidate replaces it only if it is more than 3 % faster. Tuned launches are stored by rule,
architecture and shapes (group, head size, element sizes), never by batch, so a sequence's bits depend on the file, not on the
rest of the batch. The first batch of a shape is timed, so it should be a typical one. Nothing is timed during CUDA graph
capture or tracing; launches that are already tuned are used.

A file belongs to one device model and the versions of the software that compiled for it (`attn.cache_file`).
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

import attn
from attn import cache_file
from attn.kernels.launch import TUNED, Launch, decode_launch, prefill_launch
from attn.logger import fork_safe_lock, init_logger
from attn.torch.kernels.direct import arch

logger = init_logger(__name__)

_lock = fork_safe_lock()
_loaded: set[Path] = set()
_RULES = {"decode": decode_launch, "prefill": prefill_launch}
_GAIN = 0.97  #: a candidate must take less than this fraction of the rule's time


def tune(kernel: str, shape: tuple[int, int, int, int], run: Callable[[], Any], device: torch.device) -> Launch:
    """Return the launch for calls of this shape: from the file, or else measured by timing `run`.

    kernel: `decode` or `prefill`. shape: (group, head_size, bytes per element of the query, of the cache), the arguments of the
    kernel's rule after the architecture.
    """
    rule, name = _RULES[kernel], arch()
    key = (kernel, name, *shape)
    # without the lock, which a thread that measures holds for seconds
    if (tuned := TUNED.get(key)) is not None:
        return tuned
    with _lock():
        path = cache_file.path("launches", _device_name(device))
        # once a path, also where the file is missing or another machine's
        if path not in _loaded:
            _loaded.add(path)
            stored = cache_file.read(path, _owner(device), _entry) if path.exists() else []
            TUNED.update([] if isinstance(stored, str) else stored)
        if key not in TUNED and not _capturing(device):
            TUNED[key] = _fastest(key, rule(name, *shape), run)
            # A file is of one device, and this process may have tuned several.
            launches = sorted((key, launch) for key, launch in TUNED.items() if key[1] == arch())
            entries = [{"key": list(key), "launch": list(astuple(launch))} for key, launch in launches]
            cache_file.write(path, _owner(device), entries)
        return TUNED.get(key) or rule(name, *shape)


def _fastest(key: tuple[Any, ...], by_rule: Launch, run: Callable[[], Any]) -> Launch:
    times: dict[Launch, float] = {}
    for candidate in (by_rule, *_around(by_rule, least=key[2])):
        # the kernel's launcher looks the candidate up here, as it will the chosen one
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
    """Yield the rule's launch with one number halved or doubled (one stage more or less), if that launch is valid."""
    # A tile must hold a group's heads (`least`), and products on tensor cores have at least 16 rows and keys.
    for field, low, high in (("block_m", max(16, least), 256), ("block_n", 16, 128), ("num_warps", 1, 8)):
        for value in (getattr(by_rule, field) // 2, getattr(by_rule, field) * 2):
            if low <= value <= high:
                yield replace(by_rule, **{field: value})
    for stages in (by_rule.num_stages - 1, by_rule.num_stages + 1):
        if 1 <= stages <= 10:
            yield replace(by_rule, num_stages=stages)


def _time(run: Callable[[], Any]) -> float:
    """Return the median time of a call in milliseconds, with the L2 cache cleared before each."""
    from triton import testing

    return float(testing.do_bench(run, warmup=10, rep=40, return_mode="median"))


def _unfit() -> tuple[type[Exception], ...]:
    """Return the exceptions raised for a launch that exceeds the device's resources, or that ptxas does not compile."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _owner(device: torch.device) -> dict[str, Any]:
    """Return the properties that a file must have been written with to be used."""
    import triton

    return {"format": 1, "attn": attn.__version__, "triton": triton.__version__, "device": _device_name(device), "arch": arch()}


def _entry(entry: dict[str, Any]) -> tuple[tuple[Any, ...], Launch]:
    kernel, name, *shape = entry["key"]
    numbers = entry["launch"]
    whole = [*shape, *numbers]
    if kernel not in _RULES or name != arch() or len(shape) != 4 or any(type(n) is not int or n < 1 for n in whole):
        raise ValueError(f"{entry} is not a valid launch")
    launch = Launch(*numbers)
    # a file that was edited could otherwise ask for tiles that the kernels compute wrongly or do not compile
    if any(n & (n - 1) for n in numbers[:3]) or launch.block_m < max(16, shape[0]) or launch.block_n < 16:
        raise ValueError(f"{entry} is not a valid launch: tiles and warps must be powers of two, and tiles must hold a group")
    return (kernel, name, *shape), launch
