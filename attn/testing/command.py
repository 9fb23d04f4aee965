"""The suite's command line: `python -m attn.testing [BACKEND ...]`, and what `attn conform` is made of.

python -m attn.testing                             every backend that can run here
python -m attn.testing XLA_ATTN --level full       one of them, at length
python -m attn.testing TRITON_ATTN --jobs 16       kernels that compile: one process a core
python -m attn.testing CPU_ATTN --repro '{...}'    one case, as a failure printed it
python -m attn.testing CPU_ATTN --fuzz 60 --seed 7  random cases for a minute, each failure made small
python -m attn.testing XLA_ATTN --registry diffusion --fuzz 60      the same for dense backends
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from attn import plugins
from attn.errors import UnsupportedError
from attn.testing.case import Case
from attn.testing.conformance import EXECUTED, Report, candidate_of, run_case, run_conformance
from attn.testing.suite import LEVELS
from attn.verdicts import not_loadable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("backends", nargs="*", metavar="BACKEND", help="names (default: every one that can run here)")
    which = ("attention", "mla_prefill", "diffusion")
    add("--registry", choices=which, default="attention", help="which backends (default: %(default)s)")
    add("--level", choices=LEVELS, default="quick", help="how much to run (default: %(default)s)")
    add("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    add("--dtype", action="append", default=[], help="only cases of this dtype; may be repeated")
    add("--kind", choices=EXECUTED, help="how kernels execute (default: what the implementation says)")
    add("--jobs", type=int, default=1, metavar="N", help="processes that share the cases (default: %(default)s)")
    add("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th case from the I-th on")
    add("--record", action="store_true", help="write the outcome into attn/evidence.json")
    add("--fuzz", type=float, metavar="SECONDS", help="random cases instead of the suite's, for so long in all")
    add("--seed", type=int, default=0, metavar="N", help="of --fuzz: the same seed draws the same cases (default: %(default)s)")
    add("--repro", metavar="JSON", help="run this one case, on the backends named")
    add("--json", action="store_true", help="machine-readable output")


def _part(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N, such as 2/4: the second of four parts")
    return int(i), int(n)


def run(args: argparse.Namespace) -> int:
    """Run what the arguments say; 1 when a case failed, or a backend that was named ran no case."""
    if args.fuzz is not None:
        return _fuzz(args)
    if args.repro is not None:
        return _repro(args)
    if args.registry != "attention":
        from attn.testing.dense import run_dense
        from attn.testing.prefill import run_prefill

        run_part = functools.partial(run_dense, level=args.level) if args.registry == "diffusion" else run_prefill
        return _told(args, run_part(args.backends or None, kind=args.kind, only=args.only, record=args.record))
    report = run_conformance(
        args.backends or None, args.level, kind=args.kind, record=args.record, only=args.only, dtypes=args.dtype,
        jobs=args.jobs, part=args.part,
    )  # fmt: skip
    return _told(args, report)


def _fuzz(args: argparse.Namespace) -> int:
    from attn.testing.fuzz import as_json, run_fuzz, told

    reports = run_fuzz(args.backends or None, args.fuzz, args.seed, args.jobs, to=sys.stderr, registry=args.registry)
    idle = [f"{report.backend}: {report.skipped}" for report in reports if report.skipped and args.backends]
    if idle:
        print(f"attn: not examined: {'; '.join(idle)}", file=sys.stderr)
    ok = not idle and all(report.ok for report in reports)
    return _done(ok, as_json(reports), "\n".join(told(reports)), args.json)


def _told(args: argparse.Namespace, report: Report) -> int:
    """Print a report; the exit code."""
    idle = [r for r in report.backends if r.skipped]
    if not args.backends and len(idle) < len(report.backends):
        idle = []  # whatever can run here was asked for, and did
    if idle:
        print(f"attn: not examined: {'; '.join(f'{r.backend}: {r.skipped}' for r in idle)}", file=sys.stderr)
    return _done(report.ok and not idle, report.to_dict(), str(report), args.json)


def _repro(args: argparse.Namespace) -> int:
    names, text = args.backends, args.repro
    if not names:
        raise ValueError("--repro needs the backend to run the case on")
    if args.registry == "mla_prefill":
        raise ValueError("--repro repeats cases of --registry attention and diffusion, not of mla_prefill")
    if args.registry == "diffusion":
        return _repro_dense(args)
    case = Case.from_json(text)
    plugins.load()
    violations = []
    for name in names:
        candidate = candidate_of(name)
        if reasons := not_loadable(candidate):
            raise UnsupportedError(f"{name}: {'; '.join(reasons)}", reasons)
        violations += run_case(candidate.backend, case)
    told = [{"backend": v.backend, "rule": v.rule, "text": str(v)} for v in violations]
    data = {"case": json.loads(case.json()), "violations": told}
    return _done(not violations, data, "\n".join(map(str, violations)) or "no violation", args.json)


def _repro_dense(args: argparse.Namespace) -> int:
    from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
    from attn.testing.dense import DenseCase
    from attn.testing.fuzz_dense import check

    case = DenseCase.from_json(args.repro)
    plugins.load()
    wrong = []
    for name in args.backends:
        candidate = DiffusionAttentionBackendEnum[name].candidate()
        if reasons := not_loadable(candidate):
            raise UnsupportedError(f"{name}: {'; '.join(reasons)}", reasons)
        try:
            check(candidate.backend, case)
        except AssertionError as error:
            wrong.append({"backend": name, "text": str(error)})
    data = {"case": json.loads(case.json()), "violations": wrong}
    lines = [f"{one['backend']}: {one['text']}" for one in wrong] or ["no violation"]
    return _done(not wrong, data, "\n".join(lines), args.json)


def _done(ok: bool, data: dict[str, Any], text: str, as_json: bool) -> int:
    """Print an outcome in the form that was asked for; the exit code."""
    print(json.dumps({**data, "ok": ok}, indent=2) if as_json else text)
    return int(not ok)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m attn.testing`."""
    parser = argparse.ArgumentParser("python -m attn.testing", description="Run the conformance suite.")
    add_arguments(parser)
    return run(parser.parse_args(sys.argv[1:] if argv is None else argv))
