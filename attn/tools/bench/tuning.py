"""`attn tune`: time every backend that serves a layer on this machine and save the times for the selector.

`attn.selection.preferences` reads them. Outputs are checked in the same run, and a backend that is wrong in any batch is not
saved. If decodes are fastest by one backend and prompts by another that can share its cache, the pair of both is timed over the
same batches, and competes with them by what it took: its parts' times would not say what dividing a batch costs. Runs
accumulate: each replaces the file's entries of the same layers.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn import envs
from attn.arguments import positive_number
from attn.backend_enum import PAIR, ranked
from attn.backends.metadata import FEW_ROWS
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Request
from attn.pictures.picture import check_writable
from attn.selection import preferences
from attn.selection.platforms import default_framework, platform_for
from attn.selection.verdicts import Selection, choose
from attn.selector import forget, select
from attn.tables import folded, header
from attn.tools.bench.case import BenchCase, parse
from attn.tools.bench.command import case_arguments, cases_of, measure
from attn.tools.bench.rows import BENCHES, COLUMNS, BenchReport, BenchRow, Entry, Refusal, open_bench, plan

#: Batches typical of a server, by phase: decodes (many, and a long one), a few rows of each request (speculation), prompts
#: (whole, and a short chunk), and both, decodes first, as engines order them. The CPU's are smaller.
BATCHES = ("64q1s4k", "q1s32k", "16q4s4k", "4q4k", "q256s2k", "32q1s1k_2q2k")
CPU_BATCHES = ("16q1s1k", "q1s4k", "4q4s1k", "q1k", "16q1s1k_q512")


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
    file = args.file or preferences.file_of(device)
    # Before hours of measuring; in the cache directory an unreadable file is replaced.
    if file.exists() and file.parent != envs.cache_dir() and isinstance(problem := preferences.read(file, device), str):
        raise ValueError(f"{problem}: move it away, or pass another --file")
    file.parent.mkdir(parents=True, exist_ok=True)  # before hours of measuring, as the check is
    check_writable(file)
    if not args.batches and not args.workloads:
        args.batches = list(CPU_BATCHES if on_cpu else BATCHES)
    cases, without = cases_of(args, on_cpu), args.without.split(",") if args.without else []
    entries = [entry for case in cases for entry in plan(case, framework, (), ["all"], without)]
    bench = open_bench(framework)
    report = BenchReport(bench.about(cases[0].dtype))
    print(folded(header(COLUMNS, args.wide)))
    # Refusals are known to `attn explain`; here only times matter.
    measure([entry for entry in entries if not entry.refused], {framework: bench}, report, limit, wide=args.wide)
    # A second round, since which pairs are promising follows from the first one's times.
    pairs = [entry for entry in pairs_of(cases, framework, report.rows, without) if entry not in entries]
    measure(pairs, {framework: bench}, report, limit, wide=args.wide)
    measured_times = kept_of(report.rows)
    if not measured_times:
        print("nothing to save: no backend has a valid time")
        return 1
    preferences.record(measured_times, device, file)
    # The selector of this process has cached choices without these times.
    forget()
    print(f"saved: {file}")
    for entry in measured_times:
        selection = preferences.consulted(_judged(entry, framework), [entry], file.name)
        print(f"{entry.request}: {selection.name}; {selection.measured}")
    where = "1" if file == preferences.file_of(device) else str(file.absolute())
    print(f"to use these times, set ATTN_PREFERENCES={where}" + (" (already set)" if preferences.is_enabled() else ""))
    return 0 if report.right else 1


def _judged(entry: preferences.RequestTimes, framework: str) -> Selection:
    """Return the choice by the platform's list, with verdicts on the measured pairs too."""
    platform = platform_for(framework)
    names = (*platform.priorities(entry.request, platform.device()), *preferences.pairs_in([entry]))
    members = ranked(AttentionBackendEnum, list(dict.fromkeys(names)))
    return choose([member.candidate() for member in members], entry.request, platform.device())


def pairs_of(
    cases: Sequence[BenchCase], framework: str, rows: Sequence[BenchRow | Refusal], without: Sequence[str] = ()
) -> list[Entry]:
    """Return the measurements to make of pairs: for each layer, over all of its batches, the backend that was fastest in its
    decodes with the one that was in its prompts, if they differ and serve together, and neither is in `without`."""
    entries = []
    for shape in dict.fromkeys(map(layer, cases)):
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            if isinstance(row, BenchRow) and row.right and layer(row.case) == shape and PAIR not in row.backend:
                times.setdefault(row.backend, {})[row.case.batch] = row.timing.ms
        of_layer = [case for case in cases if layer(case) == shape]
        lens = {case.batch: [q for q, _ in parse(case.batch)] for case in of_layer}
        # Batches of both phases say nothing about either.
        decodes = fastest(times, [batch for batch, q in lens.items() if max(q) <= FEW_ROWS])
        prompts = fastest(times, [batch for batch, q in lens.items() if min(q) > FEW_ROWS])
        if decodes is None or prompts is None or decodes == prompts or {decodes, prompts} & {name.upper() for name in without}:
            continue
        pair = f"{decodes}{PAIR}{prompts}"
        # Members of a pair share a cache: layouts or records may not agree.
        if select(of_layer[0].request(), framework=framework, backend=pair).winner is not None:
            entries += [Entry(case, pair, framework) for case in of_layer]
    return entries


def fastest(times: dict[str, dict[str, float]], batches: Sequence[str]) -> str | None:
    """Return the backend with the least geometric mean over `batches`, of those with a time for each; None: there is none."""
    complete = {name: by_batch for name, by_batch in times.items() if batches and all(batch in by_batch for batch in batches)}
    return min(complete, key=lambda name: sum(math.log(complete[name][batch]) for batch in batches), default=None)


def kept_of(rows: Sequence[BenchRow | Refusal]) -> list[preferences.RequestTimes]:
    """Return the rows' times, an entry per layer; a backend that is wrong in a batch is left out of its layer."""
    # Left out everywhere: a backend that is wrong in one batch must not be chosen for its speed in another.
    wrong = {(layer(row.case), row.backend) for row in rows if not row.right}
    by_layer: dict[Request, dict[tuple[str, str], dict[str, preferences.Time]]] = {}
    for row in rows:
        if isinstance(row, BenchRow) and (layer(row.case), row.backend) not in wrong:
            t, path = row.timing, AttentionBackendEnum[row.backend].get_path()
            times = by_layer.setdefault(row.case.request(), {}).setdefault((row.backend, path), {})
            times[row.case.batch] = preferences.Time(t.ms, t.ms_p20, t.ms_p80)
    return [preferences.RequestTimes(request, times) for request, times in by_layer.items()]


def layer(case: BenchCase) -> BenchCase:
    """Return the case without its batch."""
    return replace(case, batch="")
