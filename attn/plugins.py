"""Backends that other packages bring, through entry points of group `attn.backends`.

An entry point's name is the backend's name; it loads to an `AttentionBackend` class, or to a function without
arguments that returns one (or registers by itself). Plugins load at the first selection, in order of name, each on its
own: one that fails, whatever it raises, is noted in its report and harms no other. ATTN_PLUGINS restricts which load.
"""

import threading
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from attn import envs
from attn.backend_enum import generation
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.errors import closest
from attn.logger import fork_safe_lock, init_logger

GROUP = "attn.backends"
SLOW_SECONDS = 1.0

logger = init_logger(__name__)
_lock = fork_safe_lock()
_loaded: tuple[tuple[str, ...] | None, dict[str, "PluginReport"]] | None = None
_loading: tuple[int, dict[str, "PluginReport"]] | None = None  # the thread that is at it, and what it has so far
_registered: list[AttentionBackendEnum] = []


@dataclass(frozen=True)
class PluginReport:
    """What became of one entry point: `problem` is empty for one that registered its backend."""

    name: str
    value: str
    problem: str = ""
    seconds: float = 0.0


def load() -> dict[str, PluginReport]:
    """Load plugins once (again when ATTN_PLUGINS changed since); reports by entry-point name.

    A plugin that selects while it loads sees what is loaded so far; other threads wait until all are.
    """
    global _loaded, _loading
    allowed = envs.read_list("ATTN_PLUGINS")
    current = _loaded
    if current is not None and current[0] == allowed:
        return current[1]
    with _lock():
        # this thread again, from inside a plugin; another's load can only be one that a fork cut off
        if _loading is not None and _loading[0] == threading.get_ident():
            return _loading[1]
        if _loaded is not None and _loaded[0] == allowed:
            return _loaded[1]
        reports: dict[str, PluginReport] = {}
        _loading = (threading.get_ident(), reports)
        try:
            _load_all(allowed, reports)
        finally:
            _loading = None
        _loaded = (allowed, reports)
        return reports


def _load_all(allowed: tuple[str, ...] | None, reports: dict[str, PluginReport]) -> None:
    while _registered:  # under another allow-list
        _registered.pop().clear_override()
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    known = [point.name for point in points]
    for name in (name for name in allowed or () if name not in known):
        meant = closest(name, known)
        hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(known) or 'none'}"
        logger.warning_once("ATTN_PLUGINS names %s, which no installed package brings: %s", name, hint)
    for point in points:
        if allowed is not None and point.name not in allowed:
            reports[point.name] = PluginReport(point.name, point.value, "not in ATTN_PLUGINS")
            continue
        if point.name in reports:
            problem = f"duplicate name: {reports[point.name].value} has it already"
            report = PluginReport(point.name, point.value, problem)
            reports[f"{point.name} ({point.value})"] = report
        else:
            report = reports[point.name] = _load_one(point)
        if report.problem:
            logger.warning_once("attn backend plugin %s (%s) is left out: %s", point.name, point.value, report.problem)


def forget() -> None:
    """Load plugins again at the next selection (tests, or after installing one into a running process)."""
    global _loaded
    with _lock():
        _loaded = None


def _load_one(point: metadata.EntryPoint) -> PluginReport:
    began = time.perf_counter()
    try:
        problem = _register(point.name, point.load())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a plugin may raise SystemExit or anything else; the others must not notice
        problem = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    if seconds > SLOW_SECONDS:
        logger.warning_once("attn backend plugin %s took %.1f s to load", point.name, seconds)
    return PluginReport(point.name, point.value, problem, seconds)


def _register(name: str, loaded: Any) -> str:
    """Register what an entry point loaded to; the problem in words, or nothing."""
    if name in AttentionBackendEnum:
        builtin = name in AttentionBackendEnum.__members__
        return f"{name} is {'the name of a built-in backend' if builtin else 'registered already'}"
    before = generation()
    if callable(loaded) and not isinstance(loaded, type):
        loaded = loaded()
        if loaded is None:
            return "" if generation() != before else "its function returned None and registered nothing"
    if not isinstance(loaded, type):
        return f"expected a backend class, got {loaded!r}"
    if problem := AttentionBackendEnum.complaint(loaded):
        return problem
    register_backend(name, loaded)
    _registered.append(AttentionBackendEnum[name])
    return ""
