"""`attn tune`: measure every backend that serves a layer here, and keep the times for the selector (`attn.preferences`).

Correctness is checked in the same run, and a backend that is wrong in one batch is not kept. Runs add up: each replaces what
the file holds of the same layer.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn import envs, preferences
from attn.backends.registry import AttentionBackendEnum
from attn.bench import rows as bench_rows
from attn.bench.case import Case
from attn.bench.command import case_arguments, cases_of, measure
from attn.bench.rows import BENCHES, Refusal, Report, Row, open_bench, plan
from attn.capabilities import Request
from attn.platforms import default_framework, platform_for
from attn.selector import forget, select

#: What a server does: many decodes, one long one, prompts, both. On a CPU the same at sizes that it serves.
BATCHES = ("64q1s4k", "q1s32k", "4q4k", "2q2k_32q1s1k")
CPU_BATCHES = ("16q1s1k", "q1s4k", "q1k", "q512_16q1s1k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` reads."""
    add = parser.add_argument
    add("batches", nargs="*", metavar="BATCH", help=f"as in attn bench (default: {' '.join(BATCHES)}; smaller on a CPU)")
    case_arguments(parser)
    add("--framework", choices=tuple(BENCHES), help="(default: the one that is here)")
    add("--without", default="", metavar="NAMES", help="backends that are not measured, with commas between")
    add("--limit", type=float, default=120.0, metavar="S", help="seconds that each may take to be ready (default: %(default)s)")
    add("--file", metavar="FILE", type=Path, help="where the times are kept (default: one a device, in the cache directory)")


def run(args: argparse.Namespace) -> int:
    """1 when some backend that serves is wrong, else 0."""
    framework = args.framework or default_framework()
    device = platform_for(framework).device()
    on_cpu = device.platform == "cpu"
    file = args.file or preferences.place(device)
    if file.exists() and file.parent != envs.cache_dir() and isinstance(said := preferences.read(file, device), str):
        raise ValueError(f"{said}: move it away, or give another --file")
    if not args.batches and not args.workloads:
        args.batches = list(CPU_BATCHES if on_cpu else BATCHES)
    cases, without = cases_of(args, on_cpu), args.without.split(",") if args.without else []
    entries = [entry for case in cases for entry in plan(case, framework, (), ["all"], without)]
    bench = open_bench(framework)
    report = Report(bench.about(cases[0].dtype))
    print(bench_rows.header())
    measure([entry for entry in entries if not entry.refused], {framework: bench}, report, args.limit)
    kept = kept_of(report.rows)
    if not kept:
        print("nothing to keep: no backend has a right time")
        return 1
    preferences.record(kept, device, file)
    forget()
    print(f"kept: {file}")
    for entry in kept:
        told = preferences.consulted(select(entry.request, framework=framework, measured=False), [entry], file.name)
        print(f"{entry.request}: {told.name}; {told.measured}")
    where = "1" if file == preferences.place(device) else str(file.absolute())
    print(f"selection follows it with ATTN_PREFERENCES={where}" + (" (set)" if preferences.on() else ""))
    return 0 if report.right else 1


def kept_of(rows: Sequence[Row | Refusal]) -> list[preferences.Entry]:
    """The rows' times, an entry a layer; a backend that did not come out right in a batch is left out of its layer."""
    wrong = {(layer(row.case), row.backend) for row in rows if not row.right}
    found: dict[Request, dict[tuple[str, str], dict[str, preferences.Time]]] = {}
    for row in rows:
        if isinstance(row, Row) and (layer(row.case), row.backend) not in wrong:
            t, path = row.timing, AttentionBackendEnum[row.backend].get_path()
            times = found.setdefault(row.case.request(), {}).setdefault((row.backend, path), {})
            times[row.case.batch] = preferences.Time(t.ms, t.ms_p20, t.ms_p80)
    return [preferences.Entry(request, times) for request, times in found.items()]


def layer(case: Case) -> Case:
    """The case without its batch."""
    return replace(case, batch="")
