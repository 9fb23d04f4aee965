"""Backends from other packages, through entry points of group `attn.backends`.

An entry point's name is the backend's name; it loads an `AttentionBackend` class, or a function without arguments that
returns one (or registers it itself). Plugins load at the first selection, in order of name, independently: the failure of
one is recorded in its report and does not affect the others. ATTN_PLUGINS restricts which load.
"""

import threading
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from attn import envs
from attn.backend_enum import generation, register, registries
from attn.errors import closest
from attn.logger import fork_safe_lock, init_logger

GROUP = "attn.backends"
SLOW_SECONDS = 1.0

logger = init_logger(__name__)
_lock = fork_safe_lock()
_loaded: tuple[tuple[str, ...] | None, dict[str, "PluginReport"]] | None = None
_loading: tuple[int, dict[str, "PluginReport"]] | None = None  # the loading thread, and its reports so far
_registered: list[Any] = []  # members that plugins registered, of any registry


@dataclass(frozen=True)
class PluginReport:
    """The result of one entry point: `problem` is empty if it registered its backend."""

    name: str
    value: str
    problem: str = ""
    seconds: float = 0.0


def load() -> dict[str, PluginReport]:
    """Load plugins once (again if ATTN_PLUGINS has changed since) and return reports by entry-point name.

    A plugin that selects while loading sees the plugins loaded so far; other threads wait until all are loaded.
    """
    global _loaded, _loading
    allowed = envs.read_list("ATTN_PLUGINS")
    # Read once, without the lock: every selection comes here, and the tuple is replaced as a whole.
    current = _loaded
    if current is not None and current[0] == allowed:
        return current[1]
    with _lock():
        # a plugin of this thread selects while it loads; another thread's entry is of a load that a fork interrupted
        if _loading is not None and _loading[0] == threading.get_ident():
            return _loading[1]
        # Another thread may have loaded them while this one waited.
        if _loaded is not None and _loaded[0] == allowed:
            return _loaded[1]
        reports: dict[str, PluginReport] = {}
        _loading = (threading.get_ident(), reports)
        try:
            _load_all(allowed, reports)
        finally:
            _loading = None
        # After an interrupt this is not reached: the next selection loads all again.
        _loaded = (allowed, reports)
        return reports


def _load_all(allowed: tuple[str, ...] | None, reports: dict[str, PluginReport]) -> None:
    while _registered:  # admitted by an earlier value of ATTN_PLUGINS
        _registered.pop().clear_override()
    # The order of `entry_points` is that of sys.path and of installation; with one of its own, two machines with the
    # same packages choose the same backend.
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    known = [point.name for point in points]
    for name in (name for name in allowed or () if name not in known):
        meant = closest(name, known)
        hint = f"did you mean {meant}?" if meant else f"installed: {', '.join(known) or 'none'}"
        logger.warning_once("ATTN_PLUGINS lists %s, which no installed package provides: %s", name, hint)
    for point in points:
        if allowed is not None and point.name not in allowed:
            reports[point.name] = PluginReport(point.name, point.value, "not in ATTN_PLUGINS")
            continue
        # Two packages with one name: the first keeps it, and the second is reported under a key of its own, so that
        # neither report is lost.
        if point.name in reports:
            problem = f"duplicate name: {reports[point.name].value} already has it"
            report = PluginReport(point.name, point.value, problem)
            reports[f"{point.name} ({point.value})"] = report
        else:
            report = reports[point.name] = _load_one(point)
        if report.problem:
            logger.warning_once("attn backend plugin %s (%s) is not loaded: %s", point.name, point.value, report.problem)


def forget() -> None:
    """Reload plugins at the next selection (for tests, or after installing one into a running process)."""
    global _loaded
    with _lock():
        _loaded = None


def _load_one(point: metadata.EntryPoint) -> PluginReport:
    began = time.perf_counter()
    try:
        problem = _register(point.name, point.load())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a plugin may raise anything, even SystemExit; the others must not be affected
        problem = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    if seconds > SLOW_SECONDS:
        logger.warning_once("attn backend plugin %s took %.1f s to load", point.name, seconds)
    return PluginReport(point.name, point.value, problem, seconds)


def _overridden() -> list[Any]:
    """Return every member of the three registries that is registered."""
    return [member for registry in registries().values() for member in list(registry.overrides)]


def _register(name: str, loaded: Any) -> str:
    """Register the object of an entry point; return the problem, or ""."""
    registry = registries()["attention"]
    if name in registry:
        # A plugin adds backends; to replace a built-in one takes an explicit `register_backend`.
        builtin = name in registry.__members__
        return f"{name} is {'the name of a built-in backend' if builtin else 'already registered'}"
    before = generation()
    if callable(loaded) and not isinstance(loaded, type):
        known = {*_overridden()}
        try:
            loaded = loaded()
        finally:  # what a function registers itself is withdrawn with its entry point, also what it did before it failed
            _registered.extend(member for member in _overridden() if member not in known)
        if loaded is None:
            return "" if generation() != before else "its function returned None and registered nothing"
    if not isinstance(loaded, type):
        return f"expected a backend class, got {loaded!r}"
    # Reported when it loads, not when the first layer calls the missing method.
    if problem := registry.complaint(loaded):
        return problem
    register(registry, name, loaded)
    _registered.append(registry[name])
    return ""
