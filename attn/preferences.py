"""What was measured on this machine, and when the selector follows it: off unless ATTN_PREFERENCES is set.

A platform's priority list says which of several valid backends is usually the fastest. `attn tune` measures it here and keeps
the times in a file; with ATTN_PREFERENCES=1 (or the file's path) the selector lets a valid backend go before the list's first
when it was measured to be faster by more than `MARGIN`, over the same batches, for the same request. Two times whose middle
three fifths overlap count as equal. Nothing else moves: a backend asked for by name stays, one that does not serve the request
stays out, and where the list's first was not measured, or bits are asked to be the same (a request for `batch_invariant`, a
framework told to be deterministic), the list decides alone. `attn explain` says which it was, and why.

A file belongs to one machine: a device, its framework's version, this library's (`attn.cache_file`). Why one is ignored is in
the log and in the selection.
"""

import math
import os
import platform as host
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import attn
from attn import cache_file, envs
from attn.capabilities import Candidate, Device, Feature, Request
from attn.imports import version_of
from attn.logger import fork_safe_lock
from attn.platforms import Platform
from attn.verdicts import Selection

#: How much slower than the fastest a choice may be: kernels measured twice differ by 1 to 3 % (benchmarks/notes/triton.md).
MARGIN = 0.05
_VARIABLE = "ATTN_PREFERENCES"

_lock = fork_safe_lock()
_read_files: dict[Path, tuple[tuple[int, int], "list[Entry] | str"]] = {}


@dataclass(frozen=True)
class Time:
    """Milliseconds of a call: the median, and the bounds of the middle three fifths."""

    ms: float
    ms_p20: float
    ms_p80: float

    def __post_init__(self) -> None:
        numbers = [self.ms_p20, self.ms, self.ms_p80]
        fine = all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
        if not fine or numbers != sorted(numbers):
            raise ValueError(f"{self} is no time")

    def ratio(self, other: "Time") -> float:
        """This over the other; 1 where they cannot be told apart."""
        return self.ms / other.ms if self.ms_p80 < other.ms_p20 or other.ms_p80 < self.ms_p20 else 1.0


@dataclass(frozen=True)
class Entry:
    """One request's measurements: {(backend, class path): {batch: time}}."""

    request: Request
    times: Mapping[tuple[str, str], Mapping[str, Time]]

    def serves(self, request: Request) -> bool:
        """Whether the measurements are of such a request; heads and block size that it leaves open match any."""
        free: dict[str, Any] = {f.name: None for f in fields(Request) if f.default is None and getattr(request, f.name) is None}
        return replace(self.request, **free) == request


def on() -> bool:
    """Whether measurements are asked for."""
    return _asked() not in ("", "0")


def _asked() -> str:
    """The variable's value. Raises ValueError for a bare word, which is neither a switch nor a file's path."""
    value = (envs.read(_VARIABLE) or "0").strip()
    if value not in ("", "0", "1") and not re.search(r"[./\\]", value):
        raise ValueError(f"{_VARIABLE}={value!r} must be 0, 1 or a file's path, such as ./{value}.json")
    return value


def place(device: Device) -> Path:
    """The file of a device: ATTN_PREFERENCES where that is a path, else one in the cache directory."""
    asked = _asked()
    if asked not in ("", "0", "1"):
        return Path(asked)
    return cache_file.path("preferences", f"{device.framework}-{device.name or device.platform}")


def owner(device: Device) -> dict[str, Any]:
    """What a file must have been written by to count."""
    machine = _processor() if device.platform == "cpu" else ""
    return {
        "format": 1, "attn": attn.__version__, "framework": device.framework, "version": version_of(device.framework),
        "platform": device.platform, "device": device.name, "arch": device.arch, "machine": machine,
    }  # fmt: skip


def _processor() -> str:
    """The host's processor, as far as it tells, and how many of it: `x86_64 CPU` is many machines' name."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next((line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or host.processor() or host.machine()} x {os.cpu_count()}"


# choosing


def preferred(selection: Selection, candidates: Sequence[Candidate], platform: Platform) -> Selection:
    """The selection, with the backend in front that was measured to be faster than its winner, or with the reason why the
    list decides. As it is where measurements are not asked for, or do not enter: a choice by name, or nobody serves."""
    if not on() or selection.source != "priority" or selection.winner is None:
        return selection
    if selection.device != platform.device():
        return replace(selection, measured="the list decides: measurements are of the device that is here")
    asked = f"{Feature.BATCH_INVARIANT.value} is asked for" if Feature.BATCH_INVARIANT in selection.request.features else ""
    if why := asked or platform.deterministic():
        return replace(selection, measured=f"the list decides: {why}")
    file = place(selection.device)
    found = read(file, selection.device)
    if isinstance(found, str):
        return replace(selection, measured=f"the list decides: {found}")
    entries = [entry for entry in found if entry.serves(selection.request)]
    if not entries:
        return replace(selection, measured=f"the list decides: {file.name} has no times of such a request (attn tune)")
    return consulted(selection, entries, file.name, candidates)


def consulted(
    selection: Selection, entries: Sequence[Entry], file: str, candidates: Sequence[Candidate] = ()
) -> Selection:  # fmt: skip
    """A selection that somebody serves, in the light of measurements of its request. The winner's class is taken from
    `candidates`; without them the outcome has none."""
    first = selection.winner
    assert first is not None
    ratios = {
        verdict.name: ratio
        for verdict in selection.trace
        if verdict.ok and (ratio := _ratio((verdict.name, verdict.path), (first.name, first.path), entries)) is not None
    }
    if first.name not in ratios:
        return replace(selection, measured=f"the list decides: {first.name} was not measured ({file})")
    count = sum(len(times) for entry in entries for key, times in entry.times.items() if key[0] == first.name)
    best = min(ratios, key=lambda name: ratios[name])
    batches = f"{count} batch{'es' if count > 1 else ''}, {file}"
    if ratios[best] >= 1 / (1 + MARGIN):
        return replace(selection, measured=f"the list's first stays: nobody takes less than 95 % of its time ({batches})")
    winner = next(verdict for verdict in selection.trace if verdict.name == best)
    at = selection.trace.index(first)
    rest = tuple(verdict for verdict in selection.trace[at:] if verdict is not winner)
    backend = next((candidate.backend for candidate in candidates if candidate.name == best), None)
    said = f"{best} takes {ratios[best]:.2f} of the time of {first.name}, the list's first ({batches})"
    return replace(selection, trace=(*selection.trace[:at], winner, *rest), backend=backend, measured=said)


def _ratio(key: tuple[str, str], base: tuple[str, str], entries: Sequence[Entry]) -> float | None:
    """Geometric mean of one backend's times over another's; None unless it has one wherever the other has."""
    logs = []
    for entry in entries:
        own = entry.times.get(key, {})
        for batch, time in entry.times.get(base, {}).items():
            if batch not in own:
                return None
            logs.append(math.log(own[batch].ratio(time)))
    return math.exp(sum(logs) / len(logs)) if logs else None


# files


def state(device: Device) -> tuple[Path, int, int] | None:
    """The file of a device and what changes with its content, or None when it is not there."""
    file = place(device)
    try:
        found = file.stat()
    except OSError:
        return None
    return file, found.st_mtime_ns, found.st_size


def read(file: Path, device: Device) -> list[Entry] | str:
    """A file's measurements of a device, or the sentence that says why they do not count."""
    try:
        state = file.stat()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    seen = (state.st_mtime_ns, state.st_size)
    with _lock():
        if file not in _read_files or _read_files[file][0] != seen:
            _read_files[file] = seen, cache_file.read(file, owner(device), _entry)
        return _read_files[file][1]


def _entry(entry: dict[str, Any]) -> Entry:
    asked = dict(entry["request"])
    request = Request(**{**asked, "features": frozenset(asked.get("features", ()))})
    times = {
        (str(name), str(of["path"])): {str(batch): Time(*numbers) for batch, numbers in of["times"].items()}
        for name, of in entry["backends"].items()
    }
    return Entry(request, times)


def record(entries: Collection[Entry], device: Device, file: Path | None = None) -> Path:
    """Write entries into a device's file, each in the place of an earlier one of the same request; the file.

    A file that does not count is replaced.
    """
    file = file or place(device)
    with _lock():
        before = read(file, device) if file.exists() else []
        kept = {} if isinstance(before, str) else {entry.request: entry for entry in before}
        kept |= {entry.request: entry for entry in entries}
        plain = [_plain(kept[request]) for request in sorted(kept, key=str)]
        cache_file.write(file, owner(device), plain)
        _read_files.pop(file, None)
    return file


def _plain(entry: Entry) -> dict[str, Any]:
    backends = {
        name: {"path": path, "times": {batch: [t.ms, t.ms_p20, t.ms_p80] for batch, t in times.items()}}
        for (name, path), times in entry.times.items()
    }
    return {"request": {**vars(entry.request), "features": sorted(entry.request.features)}, "backends": backends}
