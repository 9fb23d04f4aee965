"""Times measured on this machine, and how the selector uses them: off unless ATTN_PREFERENCES is set.

A platform's priority list says which of several valid backends is usually the fastest. `attn tune` measures it on this
machine and saves the times in a file; with ATTN_PREFERENCES=1 (or the file's path) the selector moves a valid backend before
the list's first if it was measured to be faster by more than `MARGIN`, over the same batches, for the same request. Two times
whose middle three fifths overlap count as equal. A pair of backends that was measured (`attn.torch.backends.pair`) competes
like those on the list. Nothing else changes: a backend requested by name stays, one that does not serve the request stays
excluded, and the list's order applies if its first was not measured, or if reproducible bits are required (a request for
`batch_invariant`, or a framework set to deterministic). `attn explain` says which applied, and why, batch by batch.

A file belongs to one machine: a device, its framework's version, this library's version (`attn.cache_file`). If a file is
ignored, the reason is in the log and in the selection.
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
from attn.backend_enum import PAIR
from attn.capabilities import Candidate, Device, Feature, Request
from attn.imports import version_of
from attn.logger import fork_safe_lock
from attn.selection.platforms import Platform
from attn.selection.verdicts import Selection

#: Relative slowdown against the fastest that a choice may have: repeated measurements differ by 1 to 3 %.
MARGIN = 0.05
_VARIABLE = "ATTN_PREFERENCES"

_lock = fork_safe_lock()
#: By device too, since ATTN_PREFERENCES may name one file for devices of both frameworks, which belongs to one of them.
_read_files: dict[tuple[Path, Device], tuple[tuple[int, int], "list[RequestTimes] | str"]] = {}


@dataclass(frozen=True)
class Time:
    """Milliseconds per call: the median, and the bounds of the middle three fifths."""

    ms: float
    ms_p20: float
    ms_p80: float

    def __post_init__(self) -> None:
        numbers = [self.ms_p20, self.ms, self.ms_p80]
        valid = all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
        # A file may have been edited: a time of 0 would win every comparison, NaN would make it undefined.
        if not valid or numbers != sorted(numbers):
            raise ValueError(f"invalid timing {self}: need 0 < p20 <= median <= p80")

    def ratio(self, other: "Time") -> float:
        """Return this time over the other; 1 if their middle three fifths overlap."""
        # Disjoint ranges are a difference that noise does not explain; all else is a tie.
        return self.ms / other.ms if self.ms_p80 < other.ms_p20 or other.ms_p80 < self.ms_p20 else 1.0


@dataclass(frozen=True)
class RequestTimes:
    """One request's measurements: {(backend, class path): {batch: time}}."""

    request: Request
    times: Mapping[tuple[str, str], Mapping[str, Time]]

    def serves(self, request: Request) -> bool:
        """Whether the measurements apply to `request`; heads and block size match any if it leaves them open."""
        # `attn.explain` may ask without heads or block size; requests that were measured have both.
        free: dict[str, Any] = {f.name: None for f in fields(Request) if f.default is None and getattr(request, f.name) is None}
        return replace(self.request, **free) == request


def is_enabled() -> bool:
    """Whether ATTN_PREFERENCES enables measured times."""
    return _setting() not in ("", "0")


def _setting() -> str:
    """Return the variable's value. Raises ValueError for a bare word, which is neither a switch nor a path."""
    value = (envs.read(_VARIABLE) or "0").strip()
    # "true" would otherwise be taken for a file of that name, which does not exist, and measurements would silently be off.
    if value not in ("", "0", "1") and not re.search(r"[./\\]", value):
        raise ValueError(f"{_VARIABLE}={value!r} must be 0, 1 or a file's path, such as ./{value}.json")
    return value


def file_of(device: Device) -> Path:
    """Return the file of a device: ATTN_PREFERENCES if it is a path, else one in the cache directory."""
    setting = _setting()
    if setting not in ("", "0", "1"):
        return Path(setting)
    return cache_file.path("preferences", f"{device.framework}-{device.name or device.platform}")


def owner(device: Device) -> dict[str, Any]:
    """Return the machine and versions of this process. A file of times that states others is ignored."""
    # A GPU's name identifies it; the host's processor has little part in its times.
    machine = _processor() if device.platform == "cpu" else ""
    facts = {"device": device.name, **{name: getattr(device, name) for name in ("framework", "platform", "arch")}}
    return {"format": 1, "attn": attn.__version__, "version": version_of(device.framework), "machine": machine, **facts}


def _processor() -> str:
    """Return the CPU's model, if known, and count, since `x86_64 CPU` does not identify a machine."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or host.processor() or host.machine()} x {os.cpu_count()}"


# choosing


def preferred(selection: Selection, candidates: Sequence[Candidate], platform: Platform) -> Selection:
    """Return the selection with a backend measured to be faster than its winner moved first, or with the reason why the
    list's order applies. Unchanged if measurements are off or do not apply: a choice by name, or no backend serves."""
    if not is_enabled() or selection.source != "priority" or selection.winner is None:
        return selection
    # `device=` may describe a machine that is not this one.
    if selection.device != platform.device():
        return replace(selection, measured="priority list used: measurements are of this machine's device only")
    # Measured times differ from run to run, and so might the choice and its bits.
    invariant = f"{Feature.BATCH_INVARIANT.value} is requested" if Feature.BATCH_INVARIANT in selection.request.features else ""
    if why := invariant or platform.deterministic():
        return replace(selection, measured=f"priority list used: {why}")
    file = file_of(selection.device)
    stored = read(file, selection.device)
    if isinstance(stored, str):
        return replace(selection, measured=f"priority list used: {stored}")
    entries = [entry for entry in stored if entry.serves(selection.request)]
    if not entries:
        return replace(selection, measured=f"priority list used: {file.name} has no times for this request (run attn tune)")
    return consulted(selection, entries, file.name, candidates)


def pairs_for(request: Request, platform: Platform) -> list[str]:
    """Return the pairs that were measured for a request on this machine's device; none if measurements are off or ignored."""
    if not is_enabled():
        return []
    stored = read(file_of(platform.device()), platform.device())
    return [] if isinstance(stored, str) else pairs_in([entry for entry in stored if entry.serves(request)])


def pairs_in(entries: Sequence[RequestTimes]) -> list[str]:
    """Return the names of pairs that have times."""
    return sorted({name for entry in entries for name, _ in entry.times if PAIR in name})


def consulted(
    selection: Selection, entries: Sequence[RequestTimes], file: str, candidates: Sequence[Candidate] = ()
) -> Selection:
    """Apply measurements of its request to a selection that has a winner. The new winner's class is taken from
    `candidates`; without them the result has none."""
    first = selection.winner
    assert first is not None
    ratios = {
        verdict.name: ratio
        for verdict in selection.trace
        if verdict.ok and (ratio := _ratio((verdict.name, verdict.path), (first.name, first.path), entries)) is not None
    }
    if first.name not in ratios:
        return replace(selection, measured=f"priority list used: {first.name} was not measured ({file})")
    count = sum(len(times) for entry in entries for key, times in entry.times.items() if key[0] == first.name)
    best = min(ratios, key=lambda name: ratios[name])
    batches = f"{count} batch{'es' if count > 1 else ''}, {file}"
    # The first of the list is among the ratios, at 1: it stays unless another takes under 95 % of its time.
    if ratios[best] >= 1 / (1 + MARGIN):
        return replace(selection, measured=f"priority list used: nothing takes under 95 % of the first's time ({batches})")
    winner = next(verdict for verdict in selection.trace if verdict.name == best)
    position = selection.trace.index(first)
    # Candidates before the list's first valid one were rejected, and keep their places.
    others = tuple(verdict for verdict in selection.trace[position:] if verdict is not winner)
    backend = next((candidate.backend for candidate in candidates if candidate.name == best), None)
    of_each = ", ".join(
        f"{batch} {entry.times[winner.name, winner.path][batch].ratio(time):.2f}"
        for entry in entries
        for batch, time in entry.times.get((first.name, first.path), {}).items()
    )
    note = f"{best} takes {ratios[best]:.2f} of the time of {first.name}, the list's first ({batches}: {of_each})"
    return replace(selection, trace=(*selection.trace[:position], winner, *others), backend=backend, measured=note)


def _ratio(key: tuple[str, str], base: tuple[str, str], entries: Sequence[RequestTimes]) -> float | None:
    """Geometric mean of one backend's times over another's; None unless it has a measurement for each of the other."""
    logs = []
    for entry in entries:
        times = entry.times.get(key, {})
        for batch, time in entry.times.get(base, {}).items():
            # A backend that was not timed in every batch of the first may be slow in the missing one.
            if batch not in times:
                return None
            # The geometric mean weighs a batch of microseconds as much as one of milliseconds, and is the reciprocal if
            # both change places.
            logs.append(math.log(times[batch].ratio(time)))
    return math.exp(sum(logs) / len(logs)) if logs else None


# files


def state(device: Device) -> tuple[Path, int, int] | None:
    """Return a device's file with a fingerprint of its content, or None if it does not exist."""
    file = file_of(device)
    try:
        status = file.stat()
    except OSError:
        return None
    return file, status.st_mtime_ns, status.st_size


def read(file: Path, device: Device) -> list[RequestTimes] | str:
    """Return a file's measurements of a device, or the reason why they are ignored."""
    try:
        # Before the content is read: if the file changes in between, the older fingerprint is kept with the newer
        # content, and the next call reads it again.
        state = file.stat()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    seen = (state.st_mtime_ns, state.st_size)
    with _lock():
        known = _read_files.get((file, device))
        if known is None or known[0] != seen:
            known = _read_files[file, device] = seen, cache_file.read(file, owner(device), _entry)
        return known[1]


def _entry(entry: dict[str, Any]) -> RequestTimes:
    fields = dict(entry["request"])
    # JSON has lists only. Unknown fields raise TypeError, which makes the whole file invalid.
    request = Request(**{**fields, "features": frozenset(fields.get("features", ()))})
    times = {
        (str(name), str(backend["path"])): {str(batch): Time(*numbers) for batch, numbers in backend["times"].items()}
        for name, backend in entry["backends"].items()
    }
    return RequestTimes(request, times)


def record(entries: Collection[RequestTimes], device: Device, file: Path | None = None) -> Path:
    """Write entries into a device's file, each replacing an earlier one of the same request; return the file.

    An ignored file is replaced.
    """
    file = file or file_of(device)
    with _lock():
        before = read(file, device) if file.exists() else []
        # Another machine's times, or those of other versions, say nothing about this one: they go.
        by_request = {} if isinstance(before, str) else {entry.request: entry for entry in before}
        by_request |= {entry.request: entry for entry in entries}
        # Sorted, so that two runs of one measurement differ in the times only.
        plain = [_plain(by_request[request]) for request in sorted(by_request, key=str)]
        cache_file.write(file, owner(device), plain)
        for key in [key for key in _read_files if key[0] == file]:
            del _read_files[key]
    return file


def _plain(entry: RequestTimes) -> dict[str, Any]:
    backends = {
        name: {"path": path, "times": {batch: [t.ms, t.ms_p20, t.ms_p80] for batch, t in times.items()}}
        for (name, path), times in entry.times.items()
    }
    return {"request": {**vars(entry.request), "features": sorted(entry.request.features)}, "backends": backends}
