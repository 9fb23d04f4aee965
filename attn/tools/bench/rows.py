"""Cases times backends: which kernels to measure, their rows, and the report that stores them."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attn.backends.registry import AttentionBackendEnum
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.selection.platforms import platform_for
from attn.selection.verdicts import choose
from attn.selector import select
from attn.tables import Column, line, shown, wrapped
from attn.tools.bench.case import LIMITS, BenchCase, Timing, flops, kind_of, nbytes, parse
from attn.tools.bench.judge import verdicts

#: Each framework's timer.
BENCHES = {"torch": "attn.tools.bench.on_torch.TorchBench", "jax": "attn.tools.bench.on_jax.JaxBench"}


class Bench(Protocol):
    """A framework's timer on one device, with the device's ceilings."""

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Return the device, the versions of the software that runs on it, and its ceilings in `dtype`."""

    def ceilings(self, dtype: str) -> tuple[float, float]:
        """Return (GB/s of a copy, read plus written; TFLOP/s of a matrix product in `dtype`), measured on first use."""

    def free_bytes(self) -> int | None:
        """Return the device's free memory in bytes; None for a CPU."""

    def peers(self) -> Sequence[str]:
        """List kernels that are not backends of `attn`, and single packages of a backend (`BACKEND:package`)."""

    def measure(self, case: BenchCase, name: str, limit: float = 0.0) -> Timing:
        """Time a backend or a peer. Raises what it raises; TimeoutError when it is not ready after `limit` seconds (0: no
        limit)."""


def open_bench(framework: str) -> Bench:
    """Return the framework's timer on its default device. Raises ValueError for an unknown framework."""
    if framework not in BENCHES:
        raise ValueError(f"framework={framework!r} has no benchmark (supports {', '.join(BENCHES)})")
    return resolve_obj_by_qualname(BENCHES[framework])()


@dataclass(frozen=True)
class Entry:
    """One measurement to make: a case on a backend or a peer of a framework. `refused` says why it is not made; `chosen`
    marks the selector's choice for the case; `must` marks one requested by name, whose refusal ends the run."""

    case: BenchCase
    backend: str
    framework: str
    refused: str = ""
    chosen: bool = False
    peer: bool = False
    must: bool = False

    @property
    def marks(self) -> dict[str, Any]:
        """The fields that a row copies from its entry."""
        return {name: getattr(self, name) for name in ("case", "backend", "chosen", "peer", "framework")}


@dataclass(frozen=True)
class BenchRow:
    """One case on one backend: `timing`, and its rates as fractions of the device's measured copy and matrix product.

    `chosen` marks the selector's choice for the case, `peer` a kernel that is not a backend of `attn`.
    """

    case: BenchCase
    backend: str
    timing: Timing
    gb_per_s: float
    tflop_per_s: float
    of_copy: float
    of_gemm: float
    right: bool
    chosen: bool = False
    peer: bool = False
    framework: str = "torch"

    def text(self, wide: bool = False) -> str:
        """Format the row without its case; `wide`: with every column."""
        return line([column.of(self) for column in COLUMNS], COLUMNS, wide)

    def to_dict(self) -> dict[str, Any]:
        # One level, so that a file's rows can be read as a table; no names of the three collide.
        flat = {**asdict(self), **asdict(self.case), **asdict(self.timing)}
        return {name: value for name, value in flat.items() if name not in ("case", "timing")}


@dataclass(frozen=True)
class Refusal:
    """A kernel that did not run a case, and why. `failed`: it raised, although its capabilities cover the case."""

    case: BenchCase
    backend: str
    refused: str
    failed: bool = False
    chosen: bool = False
    peer: bool = False
    framework: str = "torch"

    @property
    def right(self) -> bool:
        """False for a backend that failed on a case it declares to serve; peers may fail."""
        return self.peer or not self.failed

    def text(self, wide: bool = False) -> str:
        """Format the row without its case; `wide`: in one line."""
        head = COLUMNS[0].of(self).ljust(COLUMNS[0].width)
        text = f"{head} {'FAILED' if self.failed else 'not timed'}: {' '.join(self.refused.split())[:200]}"
        return text if wide else "\n".join(wrapped(text, more=" " * (COLUMNS[0].width + 1)))

    def to_dict(self) -> dict[str, Any]:
        flat = {**asdict(self), **asdict(self.case), "right": self.right}
        return {name: value for name, value in flat.items() if name != "case"}


def _ms(value: float) -> str:
    """Format milliseconds: to 0.1 us, from a second on to 0.1 ms."""
    return f"{value:.4f}" if value < 1000 else f"{value:.1f}"


#: Columns of a row.
COLUMNS = (
    Column(" backend", 25, text=True, of=lambda row: f"{'*' if row.chosen else ' '}{row.backend}"),
    Column("ms", 10, of=lambda row: _ms(row.timing.ms)),
    Column("p20 .. p80", 19, of=lambda row: f"{_ms(row.timing.ms_p20)} .. {_ms(row.timing.ms_p80)}"),
    Column("GB/s", 6, wide=True, of=lambda row: f"{row.gb_per_s:.4g}"),
    Column("% copy", 6, of=lambda row: f"{100 * row.of_copy:.1f}"),
    Column("TFLOP/s", 8, of=lambda row: f"{row.tflop_per_s:.3g}"),
    Column("% gemm", 6, of=lambda row: f"{100 * row.of_gemm:.1f}"),
    Column("clean ms", 9, wide=True, of=lambda row: shown(row.timing.ms_clean, ".4f")),
    Column("kernel ms", 9, wide=True, of=lambda row: shown(row.timing.kernel_ms, ".4f")),
    Column("launch us", 9, wide=True, of=lambda row: shown(row.timing.host_us, ".0f")),
    Column("metadata us", 11, wide=True, of=lambda row: shown(row.timing.build_us, ".0f")),
    Column("error", 8, of=lambda row: f"{row.timing.error:.1e}"),
    Column("remarks", text=True, of=lambda row: " ".join(["WRONG"] * (not row.right) + ["eager"] * (not row.timing.replayed))),
)


@dataclass
class BenchReport:
    """Rows and their origin: `about` holds device, versions, date, and the two ceilings."""

    about: dict[str, Any]
    rows: list[BenchRow | Refusal] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(row.right for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**row.to_dict(), "kind": kind_of(parse(row.case.batch))} for row in self.rows]
        judged = [asdict(verdict) for verdict in verdicts(rows)]
        return {**self.about, "rows": rows, **({"verdicts": judged} if judged else {})}

    def write(self, file: str | None) -> None:
        if file:
            Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


# which kernels are measured


def entrants(case: BenchCase, framework: str, peers: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return (the selector's choice for the case, {name: why it does not serve, or ""}).

    The names are those on the platform's list, any other backend of the framework that serves, and `peers`. Saved
    measurements (`attn tune`) are ignored, since the kernels are measured again.
    """
    request = case.request()
    # Not by earlier measurements: `attn tune` would then time the choice that it made before.
    selection = select(request, framework=framework, measured=False)
    reasons = {verdict.name: "" if verdict.ok else str(verdict) for verdict in selection.trace}
    device = platform_for(framework).device()
    for name in sorted(set(AttentionBackendEnum.names()) - reasons.keys()):
        member = AttentionBackendEnum[name]
        path = member.get_path() if member.value or member.is_overridden() else "attn."
        # By its path, since loading the other framework's backend would import that framework.
        if path.startswith("attn.") and not path.startswith(f"attn.{framework}."):
            continue  # of another framework, or of neither: skip the import
        # Of backends off the list only those that serve: the others' reasons would fill the table.
        if choose([member.candidate()], request, device).winner:
            reasons[name] = ""
    # The choice itself is timed even if interpreted: something must be.
    for name in (name for name, reason in reasons.items() if not reason and name != selection.name):
        from attn.testing.conformance import is_interpreted  # imports NumPy, needed only when measuring

        if is_interpreted(AttentionBackendEnum[name].candidate().backend):
            reasons[name] = (
                "its kernels are interpreted on this machine: times would be meaningless (--backend times it anyway)"
            )
    return selection.name, {**reasons, **dict.fromkeys(peers, "")}


def requested_names(names: Collection[str], requested: Sequence[str], known: Collection[str]) -> list[str]:
    """Return those of `names` that are requested: by name, in any case, by the part before a colon, or by `all`.

    Raises ValueError for a word that matches none of `known`.
    """
    # A peer `FLASH_ATTN:package` answers to FLASH_ATTN.
    called = {name: {name.upper(), name.partition(":")[0].upper(), "ALL"} for name in {*names, *known}}
    for word in requested:
        if word != "all" and not any(word.upper() in called[name] for name in known):
            raise ValueError(f"peer {word!r} is unknown; known: all, {', '.join(sorted(known))}")
    return [name for name in names if called[name] & {word.upper() for word in requested}]


def plan(
    case: BenchCase,
    framework: str,
    peers: Sequence[str],
    requested: Sequence[str] = (),
    without: Sequence[str] = (),
    named: Sequence[str] = (),
    others: Collection[str] = (),
    must: bool = True,
) -> list[Entry]:
    """List the kernels to measure on a case: those `named`, else the selector's choice; and those `requested` except `without`.

    `others` are peers of another framework, which may also be requested. Raises `UnsupportedError` with its reasons for a
    backend in `named` that does not serve the case (with `must` False, its entry is refused), ValueError for an unknown name.
    """
    reasons = dict.fromkeys(named, "")
    for name in (name for name in named if name not in peers):
        selection = select(case.request(), framework=framework, backend=name)
        if must:
            selection.require()
        elif not selection.winner:
            reasons[name] = "; ".join(map(str, selection.trace))
    if named and not requested:
        return [Entry(case, name, framework, reasons[name], peer=name in peers, must=must) for name in named]
    choice, refusals = entrants(case, framework, peers)
    known = {*AttentionBackendEnum.names(), *peers, *others}
    left_out = {*requested_names(refusals, without, known), *named}
    names = [name for name in requested_names(refusals, requested, known) if name not in left_out]
    # Raises, with every candidate's reasons.
    if choice is None and not requested:
        select(case.request(), framework=framework, measured=False).require()
    names = [choice, *names] if choice and choice not in names and not named else names
    entries = [Entry(case, name, framework, reasons[name], name == choice, name in peers, must) for name in named]
    return entries + [Entry(case, name, framework, refusals[name], name == choice, name in peers) for name in names]


def measured(entries: Sequence[Entry], benches: dict[str, Bench], limit: float = 0.0) -> Iterator[BenchRow | Refusal]:
    """Yield each entry's time, or the reason why it has none.

    An exception of an entry that `must` run propagates; that of any other becomes a `Refusal` and the run continues.
    """
    for entry in entries:
        bench = benches[entry.framework]
        if entry.refused:
            yield Refusal(refused=entry.refused, **entry.marks)
            continue
        try:
            timing = bench.measure(entry.case, entry.backend, limit)
        except Exception as error:
            if entry.must:
                raise
            # A refusal, or a compiler that takes too long, is no failure of the backend.
            declined = isinstance(error, UnsupportedError | TimeoutError)
            reason = str(error) if declined else f"{type(error).__name__}: {error}"
            yield Refusal(refused=reason, failed=not declined, **entry.marks)
            continue
        yield judged(entry, timing, bench.ceilings(entry.case.dtype))


def judged(entry: Entry, timing: Timing, ceilings: tuple[float, float]) -> BenchRow:
    """Make a row of a timing."""
    case = entry.case
    gb, tflop = nbytes(case) / timing.ms / 1e6, flops(case) / timing.ms / 1e9
    return BenchRow(
        timing=timing,
        gb_per_s=gb,
        tflop_per_s=tflop,
        of_copy=gb / ceilings[0],
        of_gemm=tflop / ceilings[1],
        right=timing.error <= LIMITS[case.dtype],  # NaN is not
        **entry.marks,
    )
