"""`attn aot`: compile kernels for accelerators that are not present, and report the compilers' figures.

The real compilers need no device: libtpu compiles for any TPU on any host, Triton for any GPU. `tpu` and `triton` each
declare a grid of cases and compile one of them; this module lists the targets, runs cases in separate processes and formats
the table. Processes, because a compiler may abort, run out of memory or never return, and because libtpu reads its flags
only once; a failure affects one row. No kernel is executed.

A framework's module has
    STEPS                                   the steps of a case, in order; a failure of a later step loses its figures only
    COLUMNS                                 the table's columns, each with its key among the figures
    cases(target) -> list[CompileCase]             the declared grid, including refused cases with the reason
    environment(target, step, dump) -> dict environment variables of the compiling process; `dump` is its own folder
    measure(case, target, step, dump) -> dict      figures of one case, {"parts": [{"name": ...}, ...], "notes": [], ...}
"""

import argparse
import contextlib
import functools
import importlib
import importlib.machinery
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from attn.arguments import positive_number
from attn.capabilities import AttentionType, Feature, Request, check_known
from attn.errors import BackendLoadError
from attn.imports import resolve_obj_by_qualname
from attn.pictures.picture import check_writable
from attn.progress import Quiet, display
from attn.tables import Column, block, cells, folded
from attn.testing.processes import Ended, Lost, Worker, one_line

#: Tested compiler versions, by the module whose presence shows that the compiler is installed.
COMPILERS = {"libtpu": "libtpu==0.0.51", "triton": "triton==3.6.0"}


Choice = dict[str, Any]
Outcome = dict[str, Any]


class Target(NamedTuple):
    """A compilation target: the framework's module that compiles, and the compiler it needs."""

    module: str
    compiler: str


TARGETS = {
    **{f"tpu-{chip}": Target("attn.tools.aot.tpu", "libtpu") for chip in ("v5e", "v6e", "v7x")},
    **{
        arch: Target("attn.tools.aot.triton", "triton")
        for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")
    },
}


@dataclass(frozen=True)
class CompileCase:
    """A kernel to compile with all its static choices (`choice`, plain data).

    `name` is unique within its kernel. `subset`: part of the selection that tests compile. `refused`: why the kernel does
    not support it, in which case it is not compiled.
    """

    kernel: str
    name: str
    choice: Mapping[str, Any]
    subset: bool = False
    refused: str = ""

    @property
    def label(self) -> str:
        return f"{self.kernel}/{self.name}"


def switches(*names: str) -> dict[str, tuple[bool, ...]]:
    """Return axes that are off or on."""
    return dict.fromkeys(names, (False, True))


def numbered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number repeated names, in order of launch."""
    names = [part["name"] for part in parts]
    return [
        {**part, "name": name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}"}
        for i, (part, name) in enumerate(zip(parts, names, strict=True))
    ]


def grid(
    kernel: str,
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Choice], Choice | None] = lambda choice: choice,
    refusal: Callable[[Choice], str] = lambda choice: "",
) -> list[CompileCase]:
    """Return a kernel's cases, covering every pair of values of two axes that `allowed` permits (`attn.testing.pairwise`).

    `allowed(choice)` returns the choice, possibly adjusted, or None to reject it. The subset has every value of every axis
    that is not refused, in few cases.
    """
    from attn.testing.pairwise import pairwise  # its package imports NumPy

    # Two choices that `allowed` made equal have one name, and are compiled once.
    choices = {_named(axes, choice): choice for choice in pairwise(axes, allowed, least=0)}
    refused = {name: refusal(choice) for name, choice in choices.items()}
    served = {name: set(choice.items()) for name, choice in choices.items() if not refused[name]}
    # A greedy cover: the case with most values that no chosen case has yet, until every value of every axis occurs.
    left = {item for items in served.values() for item in items}
    subset = []
    while left:
        subset.append(max(served, key=lambda name: len(left & served[name])))
        left -= served[subset[-1]]
    return [CompileCase(kernel, name, choice, name in subset, refused[name]) for name, choice in choices.items()]


class Kernel(NamedTuple):
    """A kernel's part of a framework's grid.

    axes: choices, of which the grid has every pair that `normalise` allows. make: what is compiled for a choice. normalise:
    replaces choices that have no meaning together, or returns None. refusal: why the kernel does not support a choice on an
    architecture, or "". only_on: the architectures that it is written for (empty: all).
    """

    axes: Mapping[str, Sequence[Any]]
    make: Callable[..., Any]
    normalise: Callable[[Choice], Choice | None] = lambda choice: choice
    refusal: Callable[[Choice, str], str] = lambda choice, arch: ""
    only_on: tuple[str, ...] = ()
    #: Chips whose simulator does not support this kernel's copies: it aborts on waits for copies that were started under
    #: another predicate ("No DMA issue node found"), and without the waits its figures are meaningless.
    no_copies: tuple[str, ...] = ()


def grids(kernels: Mapping[str, Kernel], arch: str) -> list[CompileCase]:
    """Return every case of every kernel for an architecture, without kernels that are not written for it."""
    cases = []
    for name, kernel in kernels.items():
        if not kernel.only_on or arch in kernel.only_on:
            cases += grid(name, kernel.axes, kernel.normalise, lambda choice, kernel=kernel: kernel.refusal(choice, arch))  # type: ignore[misc]
    return cases


def _named(axes: Mapping[str, Sequence[Any]], choice: Choice) -> str:
    """Name a choice by its values, leaving out switches that are off and the first value of an axis of two."""
    words = []
    for axis, values in axes.items():
        value = choice[axis]
        if value is True:
            words.append(axis)
        elif value is not False and (len(values) != 2 or value != values[0]):
            words.append(f"{axis}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return ",".join(words)


def request_of(choice: Mapping[str, Any]) -> Request:
    """Return the `Request` of a layer that needs what a paged attention kernel's choice names."""
    mask = choice["mask"]
    features = {
        Feature.NON_CAUSAL: mask in ("bidirectional", "two-sided", "reach"),
        Feature.SLIDING_WINDOW: mask in ("window", "two-sided", "spans"),
        Feature.TWO_SIDED_WINDOW: mask == "two-sided",
        Feature.TREE_MASK: mask == "tree",
        Feature.MIXED_CAUSAL: mask == "reach",
        Feature.CHUNK_SIZE: mask in ("chunks", "reach"),
        Feature.SPANS: mask in ("spans", "reach"),
        **{feature: True for feature in Feature if choice.get(feature.value) is True},
    }
    heads, kv_heads = choice["heads"]
    return Request(
        choice["head_size"],
        choice["dtype"],
        choice["kv"],
        choice["block_size"],
        AttentionType.DECODER,
        frozenset(feature for feature, needed in features.items() if needed),
        heads,
        kv_heads,
    )


@dataclass
class CompileRow:
    """The result of a case. `status` is compiled, failed or refused, and `reason` says why in one line.

    `figures` are the case's, `parts` those of each program it launches; `notes` say which figures are missing and why.
    """

    target: str
    kernel: str
    case: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.kernel}/{self.case}"


@dataclass(frozen=True)
class Limits:
    """Limits of one case: wall-clock seconds per step, and GiB of memory."""

    seconds: float = 600.0
    memory: float = 12.0


Report = Callable[[str, str], None]  # (case label, result)


def compiler_path(target: str) -> str:
    """Return the folder to add to a process's path so that it finds the compiler; empty if it can be imported already.

    Raises BackendLoadError, with the command that installs it, if it is not found.
    """
    # Found without an import: compilers belong to the processes that compile.
    needed = TARGETS[target].compiler
    importlib.invalidate_caches()  # it may have been installed since the last import
    # Not `importlib.util.find_spec`, which takes a module of that name that is loaded already, such as a test's stand-in, for
    # the compiler.
    if importlib.machinery.PathFinder.find_spec(needed):
        return ""
    folder = str(Path(sys.prefix) / "compilers")
    if importlib.machinery.PathFinder.find_spec(needed, [folder]):
        return folder
    raise BackendLoadError(
        f"{target} needs {needed}, which is not installed: "
        f"pip install --no-deps --target {folder} {COMPILERS[needed]} (or anywhere on PYTHONPATH)"
    )


def compiler_here(target: str) -> str:
    """The compiler that `compiler_path` finds, as `triton==3.6.0`; its module's name alone where no distribution names it."""
    needed, folder = TARGETS[target].compiler, compiler_path(target)
    spec = importlib.machinery.PathFinder.find_spec(needed, [folder] if folder else None)
    assert spec is not None  # `compiler_path` raises where there is none
    # The folder that contains the package is that of its distribution's metadata; `metadata.version` would search the whole
    # path, and find an installed release where PYTHONPATH has another one.
    location = spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin
    for distribution in metadata.distributions(path=[str(Path(str(location)).parent)]):
        modules = (distribution.read_text("top_level.txt") or "").split()  # PyTorch's Triton has another name
        if needed in (distribution.name, *modules):
            return f"{distribution.name}=={distribution.version}"
    return needed


def cases(target: str) -> list[CompileCase]:
    """Return the declared grid of `target`. Raises ValueError for an unknown target."""
    return _attr(check_known("target", target, TARGETS), "cases")(target)


def compile_cases(
    target: str,
    selected: Sequence[CompileCase],
    *,
    jobs: int = 1,
    limits: Limits | None = None,
    report: Report | None = None,
    compile_only: bool = False,
) -> list[CompileRow]:
    """Return a row per case, in their order, compiled by `jobs` processes at a time. `report` is called as each completes,
    from the thread that waits for its process.

    `compile_only`: skip the steps after the first (a TPU's estimates).
    """
    limits = limits or Limits()
    path = compiler_path(target)
    rows = {
        case.label: CompileRow(target, case.kernel, case.name, "refused" if case.refused else "", case.refused)
        for case in selected
    }
    assert len(rows) == len(selected), "two cases have the same name"
    steps = _steps(target, compile_only)
    for step in steps:
        # later steps run only on what compiled
        labels = [label for label, row in rows.items() if row.status == ("" if step == steps[0] else "compiled")]

        # `step=step` binds the loop's value. Called by several threads, each for labels of its own.
        def done(label: str, outcome: Outcome, step: str = step) -> None:
            row = rows[label]
            row.seconds = round(row.seconds + outcome.pop("seconds", 0.0), 1)
            if error := outcome.pop("error", ""):
                # An estimate that fails loses figures, not the evidence that the kernel compiles.
                if step == steps[0]:
                    row.status, row.reason = "failed", error
                else:
                    row.notes.append(f"no {step}: {error}")
            else:
                row.status = "compiled"
                _merge(row, outcome)
            if report:
                report(label, f"{step}: {error or 'ok'}")

        _compile(target, step, labels, path, jobs, limits, done)
    return list(rows.values())


def _steps(target: str, compile_only: bool) -> tuple[str, ...]:
    steps: tuple[str, ...] = _attr(target, "STEPS")
    return steps[:1] if compile_only else steps


def _merge(row: CompileRow, outcome: dict[str, Any]) -> None:
    """Merge a step's figures into `row`; parts are matched by name."""
    for part in outcome.pop("parts", []):
        # The estimate's programs are those of the compilation, launched in the same order (`numbered`).
        known = next((p for p in row.parts if p["name"] == part["name"]), None)
        if known is None:
            row.parts.append(part)
        else:
            known.update(part)
    row.notes += outcome.pop("notes", [])
    row.figures.update(outcome)


def _attr(target: str, name: str) -> Any:
    return resolve_obj_by_qualname(f"{TARGETS[target].module}.{name}")


# --- processes ------------------------------------------------------------------------------------------------------

# A new process every dozen cases bounds what a compiler accumulates; one for each case would import a framework each time.
_AT_ONCE = 12  #: cases that a process compiles before it is replaced


def _compile(
    target: str, step: str, labels: Sequence[str], path: str, jobs: int, limits: Limits, done: Callable[[str, Outcome], None]
) -> None:
    """Call `done(label, outcome)` for every label, with `jobs` processes at a time; a thread waits for each."""
    # No group longer than a job's share, so that few cases still use all jobs.
    size = max(1, min(_AT_ONCE, -(-len(labels) // jobs)))
    running: list[Worker] = []
    stop = threading.Event()

    def group(first: int) -> None:
        left = list(labels[first : first + size])
        while left and not stop.is_set():  # a process that dies fails its case; a new one continues
            # A folder for each process: the dumps of one that died must not be taken for the next one's.
            with tempfile.TemporaryDirectory(prefix="attn-aot-") as dump:
                function = functools.partial(_measured, TARGETS[target].module, target, step, dump, path, limits.memory)
                with Worker(function, _attr(target, "environment")(target, step, dump), quiet=True) as worker:
                    # For the `finally` below: an interrupt reaches the main thread, and the others wait for their processes.
                    running.append(worker)
                    died = False
                    while left and not died and not stop.is_set():
                        label = left.pop(0)
                        try:
                            outcome = worker(label, limits.seconds)
                        # Both, since the out-of-memory killer's signal is one from outside.
                        except (Lost, Ended) as error:
                            outcome, died = {"error": str(error)}, True
                        done(label, outcome)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            # `list` raises what a thread raised.
            list(pool.map(group, range(0, len(labels), size)))
        finally:
            stop.set()
            for worker in running:
                worker.kill()


def _measured(module: str, target: str, step: str, dump: str, path: str, memory: float, label: str) -> Outcome:
    """Compile a case in a process of its own."""
    # In this process only: in the caller's path libtpu would make jax look for a TPU.
    if path and path not in sys.path:
        sys.path.insert(0, path)
    if sys.platform == "linux":
        import resource

        # Not RLIMIT_AS, which counts reserved address space too. The limit turns a compiler that would make the machine swap
        # into one failed case. One of the machine that is lower stands: it cannot be raised.
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        least = int(memory * 2**30) if hard == resource.RLIM_INFINITY else min(int(memory * 2**30), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (least, least))
    begin = time.monotonic()
    try:
        outcome = importlib.import_module(module).measure(_labelled(module, target)[label], target, step, dump)
    except Exception as error:  # compilers may raise anything
        outcome = {"error": one_line(f"{type(error).__name__}: {error}")}
    return {"seconds": round(time.monotonic() - begin, 2), **outcome}


@functools.cache
def _labelled(module: str, target: str) -> dict[str, CompileCase]:
    return {case.label: case for case in importlib.import_module(module).cases(target)}


# --- the command ----------------------------------------------------------------------------------------------------


def table(target: str, rows: Sequence[CompileRow]) -> str:
    """Format rows as text: a line per program that a case launches, then failures, refusals and missing figures."""
    columns: Sequence[Column] = _attr(target, "COLUMNS")
    body = [("case", *(column.name for column in columns))]
    for row in rows:
        for i, part in enumerate(row.parts):
            name = row.label if len(row.parts) == 1 else f"{row.label} [{part['name']}]"
            # Figures of the whole case (floors, the ratio) stand in the row of its first program.
            body.append((name, *cells({**(row.figures if i == 0 else {}), **part}, columns)))
    lines = block(body, numbers=range(1, len(columns) + 1)) if body[1:] else []
    for status in ("failed", "refused"):
        lines += [f"{status}: {row.label}: {row.reason}" for row in rows if row.status == status]
    # One line per note, not per case: most notes are about a chip.
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        labels = [row.label for row in rows if note in row.notes]
        lines.append(f"{note}: {labels[0]}" + (f" and {len(labels) - 1} more" if len(labels) > 1 else ""))
    counts = [f"{sum(row.status == s for row in rows)} {s}" for s in ("compiled", "failed", "refused")]
    return "\n".join([*lines, f"{target}: {', '.join(counts)}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    packages = " ".join(COMPILERS.values())
    parser.epilog = f"""\
example: attn aot --target tpu-v6e --kernel ragged_paged_attention --case decode

No device is needed. The compiler must be outside the environment (libtpu inside it makes jax look for a TPU):
    pip install --no-deps --target {Path(sys.prefix) / "compilers"} {packages}
or any other folder on PYTHONPATH.

TPU figures come from libtpu: memory after allocation, and its static simulator's cycles for a small batch, with the time
that the batch's bytes and products would take at the chip's peak rates. The simulator models the latency and issue of
transfers but not a saturated HBM: read max(estimate, HBM floor) as the bound. GPU figures come from ptxas and LLVM.
Exit code 0: every case that is not refused compiled; 1: a case failed."""
    add = parser.add_argument
    add("--target", required=True, choices=TARGETS, help="target architecture")
    add("--kernel", default="", metavar="NAME", help="compile this kernel only")
    add("--case", default="", metavar="SUBSTRING", help="compile only cases whose name contains SUBSTRING")
    add("--subset", action="store_true", help="compile only the few cases that tests use")
    add("--list", action="store_true", help="list the cases without compiling")
    add("--compile-only", action="store_true", help="skip a TPU's estimates, which take longer than compiling")
    add("--jobs", type=int, default=1, metavar="N", help="number of worker processes (default: %(default)s)")
    add("--seconds", type=float, default=Limits.seconds, help="time limit per step, in seconds (default: %(default)g)")
    add("--memory", type=float, default=Limits.memory, metavar="GIB", help="GiB of memory per process (default: %(default)g)")
    add("--json", action="store_true", help="print JSON")
    add("--out", type=Path, metavar="FILE", help="also write the JSON to this file")


def run(args: argparse.Namespace) -> int:
    """Compile the selected cases. Return 1 if one failed, else 0."""
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be at least 1")
    if args.out:
        check_writable(args.out)
    limits = Limits(positive_number("--seconds", args.seconds), positive_number("--memory", args.memory))
    if not args.list:
        compiler_path(args.target)  # fail before any slow import
    grid = cases(args.target)
    kernels = dict.fromkeys(case.kernel for case in grid)
    if args.kernel and args.kernel not in kernels:
        raise ValueError(f"--kernel {args.kernel} is unknown; {args.target} has {', '.join(kernels)}")
    chosen = [
        case
        for case in grid
        if args.kernel in ("", case.kernel) and args.case in case.label and (case.subset or not args.subset)
    ]
    if not chosen:
        raise ValueError(f"no case of {args.target} matches; list them with attn aot --target {args.target} --list")
    if args.list:
        shown = [asdict(case) for case in chosen]
        lines = [case.label + (f"  (refused: {case.refused})" if case.refused else "") for case in chosen]
        _show(args, {"target": args.target, "cases": shown}, "\n".join(lines))
        return 0
    begin = time.monotonic()
    with _progress(sum(not case.refused for case in chosen) * len(_steps(args.target, args.compile_only))) as report:
        rows = compile_cases(args.target, chosen, jobs=args.jobs, limits=limits, report=report, compile_only=args.compile_only)
    ok = not any(row.status == "failed" for row in rows)
    data = {
        "target": args.target,
        "compiler": compiler_here(args.target),
        "seconds": round(time.monotonic() - begin, 1),
        "rows": [asdict(row) for row in rows],
        "ok": ok,
    }
    _show(args, data, table(args.target, rows))
    return int(not ok)


def _show(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Print data as JSON or as text, and write the JSON to `--out`."""
    if args.out:
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=2) if args.json else folded(text))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Report]:
    """Show a progress bar on a terminal, separate from the output."""
    with display(Quiet(), sys.stderr) as shown:
        shown.begin("", total)
        done = itertools.count(1)
        yield lambda label, outcome: shown.step(next(done), f"{label} {outcome}"[:100])
