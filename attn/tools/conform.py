"""Command line of the conformance suite: `python -m attn.testing [BACKEND ...]`, also `attn conform`.

python -m attn.testing                             every backend that can run on this machine
python -m attn.testing XLA_ATTN --level full       one backend, all cases
python -m attn.testing TRITON_ATTN --jobs 16       compiled kernels: one process per core
python -m attn.testing CPU_ATTN --repro '{...}'    one case, as printed by a failure
python -m attn.testing CPU_ATTN --fuzz 60 --seed 7  random cases for a minute, failures minimized
python -m attn.testing XLA_ATTN --registry diffusion --fuzz 60      the same for dense backends
python -m attn.testing --registry entries --fuzz 60                 calls that frameworks refuse, schedulers, devices of layers
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from attn.capabilities import Candidate
from attn.errors import UnsupportedError
from attn.progress import Lines, display
from attn.selection import plugins
from attn.selection.verdicts import not_loadable
from attn.tables import folded
from attn.testing.case import Case, Recipe
from attn.testing.conformance import EXECUTED, Report, candidate_of, run_case, run_conformance
from attn.testing.suite import LEVELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("backends", nargs="*", metavar="BACKEND", help="names (default: every one that can run on this machine)")
    registries = ("attention", "mla_prefill", "diffusion", "entries")
    add(
        "--registry",
        choices=registries,
        default="attention",
        help="which backends, or entries: what --fuzz calls besides (default: %(default)s)",
    )
    add("--level", choices=LEVELS, help="how much to run (default: quick)")
    add("--only", metavar="TEXT", help="only the cases whose name contains TEXT")
    add("--dtype", action="append", help="only cases of this dtype; may be repeated")
    add("--kind", choices=EXECUTED, help="how kernels execute (default: as the implementation declares)")
    add("--jobs", type=int, metavar="N", help="number of worker processes (default: 1)")
    add("--part", type=_part, metavar="I/N", help="every N-th case from the I-th on")
    add("--record", action="store_const", const=True, help="write the result to attn/reports/evidence.json")
    add("--fuzz", type=float, metavar="SECONDS", help="run random cases instead of the suite, for about this long in total")
    add("--seed", type=int, metavar="N", help="seed of --fuzz's cases (default: 0)")
    add("--repro", metavar="JSON", help="run this one case on the given backends")
    add("--json", action="store_true", help="machine-readable output")


def _part(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    i, _, n = text.partition("/")
    # Digits only: int() would also take a sign, spaces and underscores. The range is checked by the run.
    if not (i.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N, such as 2/4: the second of four parts")
    return int(i), int(n)


# Not in the parser, which could not tell a default from the same value passed by a person.
_DEFAULTS: Any = {"level": "quick", "only": "", "dtype": [], "kind": None, "jobs": 1, "part": (1, 1)}
_DEFAULTS |= {"record": False, "seed": 0}
#: The arguments above that each way to run uses: random cases, one case, or the suite of a registry.
_USED = {
    "--fuzz": ("jobs", "seed"),
    "--repro": (),
    "--registry attention": ("level", "only", "dtype", "kind", "jobs", "part", "record"),
    "--registry diffusion": ("level", "only", "kind", "jobs", "record"),
    "--registry mla_prefill": ("only", "kind", "jobs", "record"),
}


def _check_used(args: argparse.Namespace) -> None:
    """Set what was not passed to its default. Raises ValueError for an argument that would have no effect."""
    if args.fuzz is not None and args.repro is not None:
        raise ValueError("pass --fuzz or --repro, not both")
    if args.registry == "entries" and args.fuzz is None and args.repro is None:
        raise ValueError("--registry entries has no suite: pass --fuzz SECONDS, or --repro with what a failure printed")
    way = "--fuzz" if args.fuzz is not None else "--repro" if args.repro is not None else f"--registry {args.registry}"
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif name not in _USED[way]:
            uses = ", ".join(f"--{used}" for used in _USED[way]) or "the backends and --registry only"
            raise ValueError(
                f"--{name} has no effect with {way}, which uses {uses}" if name != "seed" else "--seed requires --fuzz"
            )


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 1 if a case failed, a requested backend ran no case, or none ran, else 0.

    Raises ValueError for arguments that cannot be combined.
    """
    # Before anything is imported or listed, which takes seconds.
    _check_used(args)
    if args.fuzz is not None:
        return _fuzz(args)
    if args.repro is not None:
        return _repro(args)
    suite: Callable[..., Report] = functools.partial(run_conformance, level=args.level, dtypes=args.dtype, part=args.part)
    if args.registry != "attention":
        from attn.testing.dense import run_dense
        from attn.testing.prefill import run_prefill

        suite = functools.partial(run_dense, level=args.level) if args.registry == "diffusion" else run_prefill
    with display(Lines(sys.stderr), sys.stderr) as shown:
        options = {name: getattr(args, name) for name in ("kind", "only", "record", "jobs")}
        report = suite(args.backends or None, **options, shown=shown)
    return _show_report(args, report)


def _fuzz(args: argparse.Namespace) -> int:
    # Imported here: the campaign needs `resource`, which Windows lacks.
    from attn.tools.fuzz.campaign import Interrupted, as_json, as_text, run_fuzz

    try:
        with display(Lines(sys.stderr), sys.stderr) as shown:
            reports = run_fuzz(args.backends or None, args.fuzz, args.seed, args.jobs, shown=shown, registry=args.registry)
    except Interrupted as error:
        print("attn: interrupted: the report is of what ran until then", file=sys.stderr)
        _done(False, as_json(error.reports), "\n".join(as_text(error.reports)), args.json)
        raise
    # Skipped backends matter if they were named, or if nothing else was tested.
    nothing = not any(report.cases for report in reports)
    idle = [
        f"{report.backend}: {report.skipped or f'no case was finished in its share of {args.fuzz:g} s: pass more to --fuzz'}"
        for report in reports
        if not report.cases and (nothing or args.backends or not report.skipped)
    ]
    if idle:
        print(f"attn: not tested: {'; '.join(idle)}", file=sys.stderr)
    ok = not idle and all(report.ok for report in reports)
    return _done(ok, as_json(reports), "\n".join(as_text(reports)), args.json)


def _show_report(args: argparse.Namespace, report: Report) -> int:
    """Print a report and return the exit code."""
    # A backend that is skipped has not failed, but a person who named it expects that it ran.
    idle = [r for r in report.backends if r.skipped]
    if not args.backends and len(idle) < len(report.backends):
        idle = []  # every backend that can run was requested, and did
    if idle:
        print(f"attn: not tested: {'; '.join(f'{r.backend}: {r.skipped}' for r in idle)}", file=sys.stderr)
    return _done(report.ok and not idle, report.to_dict(), str(report), args.json)


def _repro(args: argparse.Namespace) -> int:
    """Run one case on the given backends, or calls of the given entries."""
    if not args.backends:
        raise ValueError("--repro needs a backend to run the case on")
    if args.registry not in _REPRO:
        raise ValueError(f"--repro supports --registry attention, diffusion and entries, not {args.registry}")
    plugins.load()
    rows = []
    for name in args.backends:
        case, problems = _REPRO[args.registry](name, args.repro)
        rows += [{"backend": name, **row} for row in problems]
    # A violation's text names its backend in the command that repeats it.
    lines = [row["text"] if "rule" in row else f"{row['backend']}: {row['text']}" for row in rows]
    data = {"case": json.loads(case.json()), "violations": rows}
    return _done(not rows, data, "\n".join(lines) or "no violation", args.json)


def _loaded(name: str, candidate: Candidate) -> Any:
    if reasons := not_loadable(candidate):
        raise UnsupportedError(f"{name}: {'; '.join(reasons)}", reasons)
    return candidate.backend


def _repro_paged(name: str, text: str) -> tuple[Recipe, list[dict[str, str]]]:
    case = Case.from_json(text)
    violations = run_case(_loaded(name, candidate_of(name)), case)
    return case, [{"backend": v.backend, "rule": v.rule, "text": str(v)} for v in violations]


def _repro_dense(name: str, text: str) -> tuple[Recipe, list[dict[str, str]]]:
    from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
    from attn.testing.dense import DenseCase
    from attn.tools.fuzz.dense import check

    case = DenseCase.from_json(text)
    try:
        check(_loaded(name, DiffusionAttentionBackendEnum[name].candidate()), case)
    # Any other exception of the backend is shown as it is, with its traceback.
    except AssertionError as error:
        return case, [{"text": str(error)}]
    return case, []


def _repro_entry(name: str, text: str) -> tuple[Recipe, list[dict[str, str]]]:
    from attn.tools.fuzz import entries as fuzz_entries
    from attn.tools.fuzz.campaign import examined_by

    subject = fuzz_entries.subject_of(name)
    case = subject.case.from_json(text)
    if why := subject.missing():
        raise UnsupportedError(f"{name}: {why}", (why,))
    outcome = examined_by(subject.check, case)
    return case, [{"text": f"{outcome.failure}: {outcome.text}"}] if outcome.failed else []


_REPRO = {"attention": _repro_paged, "diffusion": _repro_dense, "entries": _repro_entry}


def _done(ok: bool, data: dict[str, Any], text: str, as_json: bool) -> int:
    """Print the result as text or JSON and return the exit code."""
    print(json.dumps({**data, "ok": ok}, indent=2) if as_json else folded(text))
    return int(not ok)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m attn.testing`."""
    parser = argparse.ArgumentParser("python -m attn.testing", description="Run the conformance suite.")
    add_arguments(parser)
    return run(parser.parse_args(sys.argv[1:] if argv is None else argv))
