"""Selection as a pure function: takes candidates, a request and a device; returns a `Selection` with every reason.

Nothing in this module probes, imports or logs, so passing another `Device` answers what would be chosen on that device. A
backend requested by name goes through the same function, as a list of one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from attn.capabilities import Candidate, Device, Request
from attn.errors import BackendLoadError, UnsupportedError
from attn.tables import LEFT, block, html, paragraph, plain


@dataclass(frozen=True)
class Verdict:
    """The result for one candidate: `reasons` for rejection, empty when it serves; `error` is the exception behind them,
    if the candidate failed to load."""

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
    """A decision, with the reasons for it.

    `winner` is the first candidate that serves, or None; `trace` holds a `Verdict` for every candidate, in order; `source`
    says where the candidates come from: `argument`, `context` (a force), `backend_per_kind['full']`, the environment variable's
    name (with the kind for ATTN_BACKEND_PER_KIND), or `priority`;
    `measured` says how times measured on this machine changed the order, or why they did not (empty: not consulted);
    `notes` list assumptions, what would change the answer, and faster paths that are off (`attn.explain`).
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
        # Derived from the trace, so that it cannot disagree with the reasons shown.
        return next((v for v in self.trace if v.ok), None)

    @property
    def name(self) -> str | None:
        return self.winner.name if self.winner else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each other candidate was rejected, a sentence each; an empty candidate list is a reason too."""
        if not self.trace:
            return (f"no backend registered for this request on {self.device.framework}/{self.device.platform}",)
        return tuple(f"{v.name}: {v}" for v in self.trace if not v.ok)

    def __str__(self) -> str:
        requested = "" if self.source == "priority" else f", requested by {self.source}"
        lines = [f"{self.name or 'no backend'} for {self.request} on {self.device}{requested}"]
        lines += block([(f"{'->' if v is self.winner else '  '} {v.name}", str(v)) for v in self.trace], "  ")
        lines += [] if self.trace else [f"     {self.reasons[0]}"]
        lines += [f"  measured on this machine: {self.measured}"] if self.measured else []
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the answer, the request, and a row per candidate with one reason per line."""
        if not self.trace:
            return f"<p>{escape(str(self))}</p>"
        source = "the platform's list" if self.source == "priority" else f"requested by {self.source}"
        words = "".join(f"<code style='{_CHIP}'>{escape(word)}</code> " for word in _words(str(self.request)))
        rows, tints = zip(*(_html_row(verdict, verdict is self.winner) for verdict in self.trace), strict=True)
        measured = [f"<i>measured on this machine:</i> {escape(self.measured)}"] if self.measured else []
        return (
            f"<div><p style='{LEFT}'><b>{escape(self.name or 'no backend')}</b> on {escape(str(self.device))} "
            f"<span style='color:gray'>({escape(source)})</span><br>{words}</p>"
            f"{html(['', 'candidate', 'verdict'], rows, tints)}"
            f"{''.join(map(paragraph, [*measured, *map(escape, self.notes)]))}</div>"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the selection as plain data, for `--json`."""
        return {
            "backend": self.name,
            "source": self.source,
            "measured": self.measured,
            **{name: plain(getattr(self, name)) for name in ("notes", "request", "device", "reasons")},
            "trace": [{"backend": v.name, "path": v.path, "ok": v.ok, "reasons": list(v.reasons)} for v in self.trace],
        }

    def require(self) -> type[Any]:
        """Return the winner's class. Without one, raise `UnsupportedError` with the whole table, or `BackendLoadError` with
        its cause for a backend that was requested by name and failed to load."""
        # The class was taken with the decision: a backend registered since does not change it.
        if self.backend is not None:
            return self.backend
        message = f"Invalid attention backend for {self.device.name or self.device.platform}\n{self}"
        # Of an automatic choice, one that fails to load is one reason among others; a backend that was requested has
        # failed to import, which is an ImportError.
        broken = next((v.error for v in self.trace if v.error is not None), None)
        if broken is not None and self.source != "priority":
            raise BackendLoadError(message) from broken
        raise UnsupportedError(message, self.reasons)


_CHIP = "background:#8882;border-radius:4px;padding:0 4px"  # half transparent, readable on light and dark pages


def _words(request: str) -> list[str]:
    """Split a request into words; the set of features is one word."""
    head, separator, features = request.partition(" features=")
    return [*head.split(), *([f"features={features}"] if separator else [])]


def _html_row(verdict: Verdict, wins: bool) -> tuple[list[Any], str]:
    """Return the cells of a candidate, and the row's style."""
    text = "<br>".join(map(escape, verdict.reasons)) or ("ok" if wins else "ok, but later in the list")
    cells = ["&rarr;" if wins else "", f"<b>{escape(verdict.name)}</b>", (text, "" if verdict.ok else "color:gray")]
    return cells, "vertical-align:top" + ";background:#0a02" * wins


def not_loadable(candidate: Candidate) -> tuple[str, ...]:
    """Why a candidate can serve no request: it did not load, or packages are missing."""
    if candidate.problem:
        return (candidate.problem,)
    # The pip argument differs from the module's name (flash_attn.cute is in flash-attn-4).
    install = getattr(getattr(candidate.backend, "capabilities", None), "install", "")
    hint = f" (pip install {install})" if install else ""
    return tuple(f"{package.replace('|', ' or ')} is not installed{hint}" for package in candidate.missing)


def judge(candidate: Candidate, request: Request, device: Device) -> Verdict:
    """Collect every reason to reject one candidate. A class without capabilities states no limits and is accepted."""
    reasons, error = list(not_loadable(candidate)), candidate.error
    # Asked even if packages are missing: a reader should see all reasons, and not install a package for a device that
    # it does not support.
    why_not = getattr(candidate.backend, "why_not", None)
    if why_not is not None:
        try:
            why = why_not(request, device)
            if isinstance(why, str) or not isinstance(why, Iterable):
                raise TypeError(f"why_not() returned {why!r}: must be a list of sentences")
            reasons += why
        except Exception as broken:  # a broken vendor package may fail only here; the other candidates must still be judged
            reasons.append(f"{type(broken).__name__}: {broken}")
            # Without its package a backend is expected to fail, and that is no error of its own.
            error = None if candidate.missing else broken
    return Verdict(candidate.name, candidate.path, tuple(reasons), error)


def choose(candidates: Sequence[Candidate], request: Request, device: Device, source: str = "priority") -> Selection:
    """Choose the first of `candidates` that serves `request` on `device`, with the reasons for rejecting the others."""
    trace = tuple(judge(candidate, request, device) for candidate in candidates)
    winner = next((c.backend for c, v in zip(candidates, trace, strict=True) if v.ok), None)
    return Selection(request, device, trace, source, winner)
