"""`attn tune`: time every backend that serves a layer on this machine and save the times for the selector.

`attn.selection.preferences` reads them. Outputs are checked in the same run, and a backend that is wrong in any batch is not
saved. Runs accumulate: each replaces the file's entries of the same layers.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn import envs
from attn.arguments import positive_number
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Request
from attn.selection import preferences
from attn.selection.platforms import default_framework, platform_for
from attn.selector import forget, select
from attn.tables import folded, header
from attn.tools.bench.case import BenchCase
from attn.tools.bench.command import case_arguments, cases_of, measure
from attn.tools.bench.rows import BENCHES, COLUMNS, BenchReport, BenchRow, Refusal, open_bench, plan

#: Batches typical of a server: many decodes, one long decode, prompts, both. The CPU's are smaller.
BATCHES = ("64q1s4k", "q1s32k", "4q4k", "2q2k_32q1s1k")
CPU_BATCHES = ("16q1s1k", "q1s4k", "q1k", "q512_16q1s1k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("batches", nargs="*", metavar="BATCH", help=f"as in attn bench (default: {' '.join(BATCHES)}; smaller on a CPU)")
    case_arguments(parser)
    add("--framework", choices=tuple(BENCHES), help="(default: the installed one)")
    add("--without", default="", metavar="NAMES", help="comma-separated backends to exclude")
    add("--file", metavar="FILE", type=Path, help="file for the times (default: one per device, in the cache directory)")


def run(args: argparse.Namespace) -> int:
    """Return 1 if a backend that serves a case is wrong, else 0."""
    framework, limit = args.framework or default_framework(), positive_number("--limit", args.limit)
    device = platform_for(framework).device()
    on_cpu = device.platform == "cpu"
    file = args.file or preferences.place(device)
    if file.exists() and file.parent != envs.cache_dir() and isinstance(problem := preferences.read(file, device), str):
        raise ValueError(f"{problem}: move it away, or pass another --file")
    if not args.batches and not args.workloads:
        args.batches = list(CPU_BATCHES if on_cpu else BATCHES)
    cases, without = cases_of(args, on_cpu), args.without.split(",") if args.without else []
    entries = [entry for case in cases for entry in plan(case, framework, (), ["all"], without)]
    bench = open_bench(framework)
    report = BenchReport(bench.about(cases[0].dtype))
    print(folded(header(COLUMNS, args.wide)))
    measure([entry for entry in entries if not entry.refused], {framework: bench}, report, limit, wide=args.wide)
    kept = kept_of(report.rows)
    if not kept:
        print("nothing to save: no backend has a valid time")
        return 1
    preferences.record(kept, device, file)
    forget()
    print(f"saved: {file}")
    for entry in kept:
        selection = preferences.consulted(select(entry.request, framework=framework, measured=False), [entry], file.name)
        print(f"{entry.request}: {selection.name}; {selection.measured}")
    where = "1" if file == preferences.place(device) else str(file.absolute())
    print(f"to use these times, set ATTN_PREFERENCES={where}" + (" (already set)" if preferences.on() else ""))
    return 0 if report.right else 1


def kept_of(rows: Sequence[BenchRow | Refusal]) -> list[preferences.Entry]:
    """Return the rows' times, an entry per layer; a backend that is wrong in a batch is left out of its layer."""
    wrong = {(layer(row.case), row.backend) for row in rows if not row.right}
    by_layer: dict[Request, dict[tuple[str, str], dict[str, preferences.Time]]] = {}
    for row in rows:
        if isinstance(row, BenchRow) and (layer(row.case), row.backend) not in wrong:
            t, path = row.timing, AttentionBackendEnum[row.backend].get_path()
            times = by_layer.setdefault(row.case.request(), {}).setdefault((row.backend, path), {})
            times[row.case.batch] = preferences.Time(t.ms, t.ms_p20, t.ms_p80)
    return [preferences.Entry(request, times) for request, times in by_layer.items()]


def layer(case: BenchCase) -> BenchCase:
    """Return the case without its batch."""
    return replace(case, batch="")
