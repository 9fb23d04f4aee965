"""The decision, as a pure function: candidates, a request and a device in; a `Selection` with every reason out.

Nothing here probes, imports or logs, so "what would be picked on another machine?" is answered by passing another
`Device`. A backend asked for by name walks the same function with a list of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from attn.capabilities import Candidate, Device, Request
from attn.errors import BackendLoadError, UnsupportedError


@dataclass(frozen=True)
class Verdict:
    """What was found of one candidate: `reasons` why not, empty when it serves; `error` is the exception behind them,
    if the candidate broke instead of declining."""

    name: str
    path: str
    reasons: tuple[str, ...] = ()
    error: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "ok" if self.ok else "; ".join(self.reasons)


@dataclass(frozen=True)
class Selection:
    """A decision and how it came about.

    `winner` is the first candidate that serves, or None; `trace` holds a `Verdict` for every candidate, in order;
    `source` says who drew up the list: `argument`, `context` (a force), the environment variable's name, or `priority`;
    `measured` what times of this machine did to its order, or why they did nothing (empty: they were not asked for);
    `notes` what else a person should know of it: assumptions, what would change it, paths that are off (`attn.explain`).
    """

    request: Request
    device: Device
    trace: tuple[Verdict, ...]
    source: str = "priority"
    backend: type[Any] | None = None
    measured: str = ""
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Verdict | None:
        return next((v for v in self.trace if v.ok), None)

    @property
    def name(self) -> str | None:
        return self.winner.name if self.winner else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """What speaks against the candidates that do not serve, a sentence each; an empty list is a reason too."""
        if not self.trace:
            return (f"{self.device.framework} on {self.device.platform} lists no backend for such a request",)
        return tuple(f"{v.name}: {v}" for v in self.trace if not v.ok)

    def __str__(self) -> str:
        asked = "" if self.source == "priority" else f", asked for by {self.source}"
        lines = [f"{self.name or 'no backend'} for {self.request} on {self.device}{asked}"]
        width = max((len(v.name) for v in self.trace), default=0)
        for verdict in self.trace:
            mark = "->" if verdict is self.winner else "  "
            lines.append(f"  {mark} {verdict.name:<{width}}  {verdict}")
        lines += [] if self.trace else [f"     {self.reasons[0]}"]
        lines += [f"  measured here: {self.measured}"] if self.measured else []
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: the answer, what was asked, and a row a candidate, each reason on a line of its own."""
        if not self.trace:
            return f"<p>{escape(str(self))}</p>"
        asked = "the platform's list" if self.source == "priority" else f"asked for by {self.source}"
        words = "".join(f"<code style='{_CHIP}'>{escape(word)}</code> " for word in _words(str(self.request)))
        rows = "".join(_html_row(verdict, verdict is self.winner) for verdict in self.trace)
        measured = f"<p style='{_LEFT}'><i>measured here:</i> {escape(self.measured)}</p>" if self.measured else ""
        notes = "".join(f"<p style='{_LEFT}'>{escape(note)}</p>" for note in self.notes)
        return (
            f"<div><p style='{_LEFT}'><b>{escape(self.name or 'no backend')}</b> on {escape(str(self.device))} "
            f"<span style='color:gray'>({escape(asked)})</span><br>{words}</p>"
            f"<table><tr><th></th><th style='{_LEFT}'>candidate</th><th style='{_LEFT}'>verdict</th></tr>{rows}</table>"
            f"{measured}{notes}</div>"
        )

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, for `--json`."""
        return {
            "backend": self.name,
            "source": self.source,
            "measured": self.measured,
            "notes": list(self.notes),
            "request": {**vars(self.request), "features": sorted(self.request.features)},
            "device": vars(self.device).copy(),
            "reasons": list(self.reasons),
            "trace": [{"backend": v.name, "path": v.path, "ok": v.ok, "reasons": list(v.reasons)} for v in self.trace],
        }

    def require(self) -> type[Any]:
        """The winner's class. Without one, raises `UnsupportedError` with the whole table, or, for a backend asked for
        by name that broke while loading, `BackendLoadError` from what it raised."""
        if self.backend is not None:
            return self.backend
        message = f"Invalid attention backend for {self.device.name or self.device.platform}\n{self}"
        broken = next((v.error for v in self.trace if v.error is not None), None)
        if broken is not None and self.source != "priority":
            raise BackendLoadError(message) from broken
        raise UnsupportedError(message, self.reasons)


_LEFT = "text-align:left"
_CHIP = "background:#8882;border-radius:4px;padding:0 4px"  # half transparent, so that it fits dark pages too


def _words(request: str) -> list[str]:
    """The words of a request; a set of features is one of them."""
    head, found, features = request.partition(" features=")
    return [*head.split(), *([f"features={features}"] if found else [])]


def _html_row(verdict: Verdict, wins: bool) -> str:
    mark, tint = ("&rarr;", ";background:#0a02") if wins else ("", "")
    said = "<br>".join(map(escape, verdict.reasons)) or ("ok" if wins else "ok, behind it on the list")
    colour = "" if verdict.ok else ";color:gray"
    return (
        f"<tr style='vertical-align:top{tint}'><td>{mark}</td><td style='{_LEFT}'><b>{escape(verdict.name)}</b></td>"
        f"<td style='{_LEFT}{colour}'>{said}</td></tr>"
    )


def not_loadable(candidate: Candidate) -> tuple[str, ...]:
    """Why a candidate cannot run whatever the request: it did not load, or packages are missing."""
    if candidate.problem:
        return (candidate.problem,)
    install = getattr(getattr(candidate.backend, "capabilities", None), "install", "")
    hint = f" (pip install {install})" if install else ""
    return tuple(f"{package.replace('|', ' or ')} is not installed{hint}" for package in candidate.missing)


def judge(candidate: Candidate, request: Request, device: Device) -> Verdict:
    """Every reason against one candidate. A class without capabilities cannot be judged: it is taken at its word."""
    reasons, error = list(not_loadable(candidate)), candidate.error
    why_not = getattr(candidate.backend, "why_not", None)
    if why_not is not None:
        try:
            reasons += why_not(request, device)
        except Exception as broken:  # a vendor that is there but broken may show only now, and must not hinder the others
            reasons.append(f"{type(broken).__name__}: {broken}")
            error = None if candidate.missing else broken
    return Verdict(candidate.name, candidate.path, tuple(reasons), error)


def choose(candidates: Sequence[Candidate], request: Request, device: Device, source: str = "priority") -> Selection:
    """The first of `candidates` that serves `request` on `device`, with the reasons against every other one."""
    trace = tuple(judge(candidate, request, device) for candidate in candidates)
    winner = next((c.backend for c, v in zip(candidates, trace, strict=True) if v.ok), None)
    return Selection(request, device, trace, source, winner)
