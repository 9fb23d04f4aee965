"""`attn bench`: time backends, judge the choices in a report, or compare two reports."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attn.arguments import positive_number
from attn.backend_enum import off_paths
from attn.backends.registry import BLOCKSPARSE, AttentionBackendEnum
from attn.pictures.picture import check_file, check_writable
from attn.progress import Display, display
from attn.selection.choice import framework_of_backend
from attn.selection.platforms import default_framework, platform_for
from attn.selector import backend_name_to_enum
from attn.tables import folded, header, wrapped
from attn.tools.bench import dense, workloads
from attn.tools.bench import summary as summaries
from attn.tools.bench.case import CPU_SUITE, KINDS, LIMITS, MLA_CPU_SUITE, MLA_SUITE, SUITE, BenchCase, abbreviated, parse
from attn.tools.bench.judge import compare, judge, ranked, verdicts
from attn.tools.bench.roofline import draw
from attn.tools.bench.rows import BENCHES, COLUMNS, Bench, BenchReport, Entry, measured, open_bench, plan
from attn.tools.bench.sample import CPU_SIZES, SIZES, sample, sizes_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add(
        "batches",
        nargs="*",
        metavar="BATCH",
        help="such as 64q1s4k or 2q2k_32q1s1k (default: a standard set); or `compare A.json B.json`: measure nothing, "
        "report what changed between two runs",
    )
    add(
        "--registry",
        choices=("attention", "diffusion"),
        default="attention",
        help="diffusion: shapes such as 2x4608x24x128 instead of batches, every available backend (default: %(default)s)",
    )
    add("--backend", action="append", metavar="NAME", help="may be repeated (default: the selector's choice)")
    case_arguments(parser)
    add(
        "--random",
        type=int,
        metavar="N",
        help=f"N batches drawn at random ({', '.join(KINDS)}; 1 to {SIZES.requests} requests of {SIZES.shortest} to "
        f"{SIZES.length} tokens; on a CPU 1 to {CPU_SIZES.requests} of {CPU_SIZES.shortest} to {CPU_SIZES.length}) and layers "
        "where no argument sets them, with a line per batch and means at the end",
    )
    add("--seed", type=int, metavar="S", help="seed of --random (default: 0)")
    add("--framework", choices=(*BENCHES, "all"), help="(default: that of --backend, else the installed one)")
    add(
        "--peers",
        metavar="NAMES",
        help='other kernels to time on each batch: "all" or a comma-separated list (sdpa,FLASHINFER)',
    )
    add("--without", default="", metavar="NAMES", help="comma-separated kernels to exclude from --peers all")
    add("--judge", metavar="FILE", help="measure nothing: judge the choices in a file written by --json")
    add("--json", metavar="FILE", help="write the rows, the device and the versions to this file")
    add("--plot", metavar="FILE", help="draw the roofline and times to this file (.svg, .png, .pdf); also with --judge")


def case_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the compiler's time limit, and the arguments of the layer's shape, which `cases_of` reads."""
    add, default, latent = parser.add_argument, BenchCase(""), BenchCase.latent("")
    limit = "time limit for compiling each kernel, in seconds (default: %(default)s)"
    add("--limit", type=float, default=120.0, metavar="S", help=limit)
    add("--workloads", metavar="FILE", help="batches and shapes from a FlashInfer Trace file of workloads (.jsonl)")
    add("--mla", action="store_true", help="latent layers: a cached row is a token's latent and 64 rotary elements")
    add("--heads", help=f"<query heads>/<kv heads> (default: {default.heads}; --mla: {latent.heads})")
    add("--head-size", type=int, help=f"(default: {default.head_size}; --mla, the cached row: {latent.head_size})")
    add(
        "--block-size",
        type=int,
        help=f"tokens per cache block (default: {default.block_size}; --mla: {latent.block_size}; or the workload's)",
    )
    add("--dtype", choices=sorted(LIMITS), help="(default: bfloat16, float32 on a CPU)")
    add("--kv-cache-dtype", help=f"(default: {default.kv_cache_dtype})")
    add("--window", type=int, metavar="W", help="each token sees the last W keys, itself included")
    add("--sinks", action="store_true", default=None, help="give every query head a sink")
    add("--wide", action="store_true", help="print every column (default: those that fit in 100 characters)")


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `BenchCase` that arguments set."""
    names = ("heads", "head_size", "block_size", "dtype", "kv_cache_dtype", "window", "sinks")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def cases_of(args: argparse.Namespace, on_cpu: bool) -> list[BenchCase]:
    """Return the cases to time: batches, a file of workloads, or the default set for the device. Raises ValueError for
    invalid batches, and for shape arguments that contradict --workloads."""
    fields = fields_of(args)
    if args.workloads:
        if args.batches:
            raise ValueError(f"pass batches ({' '.join(args.batches)}) or --workloads {args.workloads}, not both")
        if args.mla or fields.keys() & {"heads", "head_size", "kv_cache_dtype"}:
            raise ValueError(
                "--workloads sets heads, head size, cache dtype and mla: drop --heads, --head-size, --kv-cache-dtype, --mla"
            )
        loaded = workloads.load(args.workloads, fields.pop("block_size", None))
        return [replace(case, **fields) for case in loaded]
    if args.batches:
        make = BenchCase.latent if args.mla else BenchCase
        shape = {"dtype": "float32"} | fields if on_cpu else fields
        loaded = [make(batch, **shape) for batch in args.batches]
        for case in loaded:
            parse(case.batch)
        return loaded
    tables = (MLA_SUITE, MLA_CPU_SUITE) if args.mla else (SUITE, CPU_SUITE)
    return list(dict.fromkeys(replace(case, **fields) for case in tables[on_cpu]))


def run(args: argparse.Namespace) -> int:
    """Return 1 if a row is wrong (with --judge: or a choice lost; with compare: if something became slower, or nothing
    is in both), else 0."""
    check_random(args)
    check_used(args)
    limit = positive_number("--limit", args.limit)
    if args.batches[:1] == ["compare"]:
        return _compared(args.batches[1:])
    if args.plot:  # before anything is measured
        check_file(args.plot)
    if args.json:
        check_writable(args.json)
    if args.judge:
        return _judged_file(args.judge, args.plot, args.wide)
    if args.registry == "diffusion":
        return dense.run(args)
    with_peers, without = (text.split(",") if text else [] for text in (args.peers, args.without))
    frameworks = frameworks_of(args)
    if len(frameworks) > 1:  # else jax preallocates three quarters of the GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    benches, drawn = {framework: open_bench(framework) for framework in frameworks}, {}
    # A CPU has cases of its own; drawn batches are the same for both frameworks, bounded by the smaller memory.
    if args.random is None:
        cases = {framework: cases_of(args, platform_for(framework).device().platform == "cpu") for framework in frameworks}
    else:
        seed, sizes = args.seed or 0, sizes_of([bench.free_bytes() for bench in benches.values()], args.mla)
        cases = dict.fromkeys(frameworks, sample(args.random, seed, sizes, args.mla, **fields_of(args)))
        drawn = {"random": {"batches": args.random, "seed": seed, "kinds": KINDS, "bounds": asdict(sizes)}}
        print(folded(f"random: batches {args.random}, seed {seed}: {sizes}"))
    # Of all frameworks, so that a peer of one is not unknown to the other.
    peers = [name for bench in benches.values() for name in bench.peers()]
    entries = [
        entry
        for framework, named in frameworks.items()
        for case in cases[framework]
        for entry in plan(case, framework, benches[framework].peers(), with_peers, without, named, peers, not drawn)
    ]
    report = BenchReport(about(benches, entries))
    for name, value in report.about.items():
        text = ", ".join(f"{n} {v}" for n, v in value.items()) if isinstance(value, dict) else value
        print(folded(f"{name}: {text}"))
    for line in off_paths(AttentionBackendEnum, [entry.backend for entry in entries if not entry.refused]):
        print(folded(line))
    # After the lines above, which print device and versions.
    report.about |= drawn
    print(folded(header(summaries.COLUMNS if drawn else COLUMNS, args.wide)))
    measure(entries, benches, report, limit, args.json, wide=args.wide)
    rows = report.to_dict()["rows"]
    if drawn:
        print(folded("\n".join([*(ranked(rows) if args.peers else []), summaries.summary(rows)])))
    elif args.peers:
        print(folded("\n".join(ranked(rows))))
    draw(args.plot, report.to_dict())
    return 0 if report.right else 1


def check_random(args: argparse.Namespace) -> None:
    """Raise ValueError for --random without a positive number or with arguments that name batches, and for --seed alone."""
    if args.random is None:
        if args.seed is not None:
            raise ValueError(f"--seed {args.seed} requires --random N")
        return
    if args.random < 1:
        raise ValueError(f"--random {args.random} must be at least 1: the number of batches to draw")
    options = {
        f"batches ({' '.join(args.batches)})": args.batches,
        f"--workloads {args.workloads}": args.workloads,
        f"--judge {args.judge}": args.judge,
        f"--registry {args.registry}": args.registry == "diffusion",
    }
    for name in (name for name, value in options.items() if value):
        raise ValueError(f"pass --random {args.random} or {name}, not both")


_LAYER = ("mla", "heads", "head_size", "block_size", "kv_cache_dtype", "window", "sinks", "workloads")
_MEASURED = (*_LAYER, "dtype", "backend", "framework", "peers", "without", "json")
#: The arguments that have no effect in each way to run that does not time a paged cache.
_UNUSED = {
    "compare": (*_MEASURED, "judge", "plot", "wide"),
    "--judge": ("batches", *_MEASURED),
    "--registry diffusion": (*_LAYER, "peers", "without", "wide"),
}


def check_used(args: argparse.Namespace) -> None:
    """Raise ValueError for an argument that would have no effect."""
    compares, judges = args.batches[:1] == ["compare"], args.judge is not None
    way = "compare" if compares else "--judge" if judges else "--registry diffusion" if args.registry == "diffusion" else ""
    for name in (name for name in _UNUSED.get(way, ()) if getattr(args, name)):
        words = f"batches ({' '.join(args.batches)}) have" if name == "batches" else f"--{name.replace('_', '-')} has"
        raise ValueError(f"{words} no effect with {way}")
    if args.without and not args.peers:
        raise ValueError("--without has no effect without --peers")


def frameworks_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return {framework: its backends among those requested}; for `all`, or backends of both, both frameworks.

    Raises ValueError for an unknown name, and for a backend of a framework other than --framework.
    """
    frameworks = list(BENCHES) if args.framework == "all" else [args.framework or default_framework()]
    if not args.backend:
        return {framework: [] for framework in frameworks}
    by_framework: dict[str, list[str]] = {}
    for name in args.backend:
        member = backend_name_to_enum(name)
        name = name if member is None else member.name  # in the registry's case; a peer's as it is
        if name.upper() == BLOCKSPARSE:
            raise ValueError(
                f"{name} cannot be timed by attn bench: it attends a pattern of blocks, but every case here attends all keys"
            )
        belongs_to = framework_of_backend(member) or frameworks[0]  # a peer belongs to the default framework
        if args.framework not in (None, "all", belongs_to):
            raise ValueError(f"{name} is a backend of {belongs_to}, not of {args.framework}")
        by_framework.setdefault(belongs_to, []).append(name)
    return by_framework


def about(benches: dict[str, Bench], entries: Sequence[Entry]) -> dict[str, Any]:
    """Return device, versions and ceilings of one framework, or of several under their names."""
    facts = {}
    for framework, bench in benches.items():
        # The ceiling that is printed is of the first case's dtype; rows of another dtype measure their own.
        dtype = next((entry.case.dtype for entry in entries if entry.framework == framework), "bfloat16")
        facts[framework] = bench.about(dtype)
    date = datetime.date.today().isoformat()
    [first, *others] = facts.values()
    return {**facts, "date": date} if others else {**first, "date": date}


def measure(
    entries: Sequence[Entry],
    benches: dict[str, Bench],
    report: BenchReport,
    limit: float,
    file: str | None = None,
    wide: bool = False,
) -> None:
    """Measure every entry into `report`, printing each case, its rows as they complete and a verdict; for random batches,
    an outcome after each case and only wrong rows.

    The file is written after each case, so that a kernel that hangs does not lose the earlier rows.
    """
    begin, drawn, printed = 0, "random" in report.about, None
    with display(Display(), *([sys.stdout, sys.stderr] if len(entries) > 1 else [])) as shown:
        shown.begin("", len(entries))
        if entries:
            shown.step(0, _status(entries))
        for index, row in enumerate(measured(entries, benches, limit)):
            report.rows.append(row)
            if not (drawn and row.right):
                # A case's title before its first row; the walrus keeps it for the next.
                if printed != (printed := (row.case, row.framework)):
                    shown.say(abbreviated(str(row.case)) + (f" ({row.framework})" if len(benches) > 1 else ""))
                shown.say(row.text(wide))
            remaining = entries[index + 1 :]
            shown.step(index + 1, _status(remaining))
            # The last row of a case: its verdict needs all of them.
            if not remaining or (remaining[0].case, remaining[0].framework) != (row.case, row.framework):
                if drawn:
                    shown.say(summaries.outcomes([row.to_dict() for row in report.rows])[-1].text(wide))
                else:
                    for verdict in verdicts([row.to_dict() for row in report.rows[begin:]]):
                        shown.say("\n".join(wrapped(f"-> {verdict.outcome}", more="   ")))
                begin = len(report.rows)
                report.write(file)


def _status(entries: Sequence[Entry]) -> str:
    """Describe the next entry for the progress display."""
    return f"{abbreviated(entries[0].case.batch)} {entries[0].backend}" if entries else ""


# files


def read(file: str) -> dict[str, Any]:
    """Read a report written by --json. Raises ValueError for any other file, OSError if there is none."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        rows = content["rows"]
        if not isinstance(rows, list) or not all("backend" in row and "right" in row for row in rows):
            raise TypeError('"rows" must be a list of objects with "backend" and "right"')
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: not a report written by --json: {error}") from None
    return content


def _judged_file(file: str, plot: str | None, wide: bool) -> int:
    report = read(file)
    rows = report["rows"]
    if "random" in report:
        lines = [header(summaries.COLUMNS, wide), *(outcome.text(wide) for outcome in summaries.outcomes(rows))]
        print(folded("\n".join([*lines, *ranked(rows), summaries.summary(rows)])))
    else:
        print(folded(judge(rows)))
    draw(plot, report)
    if not rows:
        raise ValueError(f"{file}: no rows to judge")
    return 0 if all(row["right"] for row in rows) and not any(verdict.lost for verdict in verdicts(rows)) else 1


def _compared(files: Sequence[str]) -> int:
    if len(files) != 2:
        raise ValueError(f"compare takes two files, as in `attn bench compare A.json B.json`, not {len(files)}")
    before, after = (read(file) for file in files)
    # What differs besides the times: device, versions, ceilings.
    names = sorted({*before, *after} - {"rows", "verdicts", "problems", "date"})
    for name in (name for name in names if before.get(name) != after.get(name)):
        print(folded(f"{name}: {before.get(name, 'not recorded')} -> {after.get(name, 'not recorded')}"))
    changes = compare(before["rows"], after["rows"])
    print(folded("\n".join(map(str, changes))))
    timed = [change.ratio for change in changes if change.ratio is not None]
    worse, better = sum(change.worse for change in changes), sum(change.better for change in changes)
    print(f"{len(timed)} times in both: {worse} worse, {better} faster, {len(changes)} in all")
    return int(worse > 0 or not timed)
