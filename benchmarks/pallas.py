"""Compare our TPU kernels with peers by libtpu's static estimate: benchmarks/results/pallas.json, and its table in pallas.md.

    python -m benchmarks.pallas --compilers .venv/compilers --peers FOLDER      measure missing rows, write the table
    python -m benchmarks.pallas --table                                         write the table only
    python -m benchmarks.pallas --compilers .venv/compilers --random N --seed S print rows drawn at random, which are not stored

FOLDER contains tpu-inference 0.32, unpacked (`pip download --no-deps tpu-inference==0.32.0`, then unzip); without it its
rows are omitted. Each row is compiled in a separate process, with the batch's scalars as constants, and stored in the JSON
under its name, so that a run can be stopped and resumed; when the kernels' sources have changed, our rows are traced again,
and measured again if their programs have changed. The method is that of `attn aot`; `attn.tools.aot.libtpu` explains what an
estimate means.
"""

import argparse
import ast
import functools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.estimates.launches import OURS, Job, Row, drawn, key_of, wanted
from benchmarks.estimates.programs import floors, measure, ours, peer, program_digest, source
from benchmarks.estimates.table import bounded, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/pallas.json"
TABLE = RESULTS.with_suffix(".md")


def run_one(row: Row, chip: str, page: int, kernel: str, known: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """known: the digest of a program whose estimate is there; if the row still has it, the outcome is that digest alone."""
    from attn.testing.processes import last_words, one_line
    from attn.tools.aot import libtpu as _libtpu

    with tempfile.TemporaryDirectory() as dump:
        path = os.pathsep.join(x for x in (args.compilers, str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
        env = {**os.environ, **_libtpu.environment(chip, dump, estimate=True), "PYTHONPATH": path}
        spec = repr((row._asdict(), chip, page, kernel, dump, args.peers, args.memory, known))
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.pallas", "--worker", spec],
                env=env, cwd=ROOT, capture_output=True, text=True, timeout=args.seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {args.seconds:g} s", "seconds": args.seconds}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    made = json.loads(results[-1][7:]) if results else {"error": last_words(done.stderr, done.returncode)}
    if "error" in made:
        made["error"] = one_line(made["error"])
    return {**made, "seconds": round(time.monotonic() - begin, 1)}


def measured(jobs: Sequence[tuple[Job, str | None]], args: argparse.Namespace) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its outcome as it completes, except those that would start after the budget."""
    begin = time.monotonic()

    def run(job: Job, known: str | None) -> dict[str, Any] | None:
        return None if time.monotonic() - begin > args.budget else run_one(*job, known, args)

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, *job): job[0] for job in jobs}
        for future in as_completed(running):
            if (made := future.result()) is not None:
                yield running[future], made


def work(spec: str) -> None:
    fields, chip, page, kernel, dump, peers, memory, known = ast.literal_eval(spec)
    row, own = Row(**fields), {}
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
    try:
        program = ours(row, chip, page) if kernel == OURS else peer(row, chip, page, kernel, peers)
        own = {"program": program_digest(program)} if kernel == OURS else {}
        made = {} if known and own == {"program": known} else measure(row, chip, page, kernel, dump, program)
    except Exception as error:  # the table shows the compiler's errors
        made = {"error": f"{type(error).__name__}: {error}"}
    made |= own
    print("RESULT " + json.dumps(made), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate our TPU kernels and the peers' with libtpu.")
    parser.add_argument("--compilers", default=str(Path(sys.prefix) / "compilers"), help="folder with libtpu (%(default)s)")
    parser.add_argument("--peers", default="", help="folder with tpu-inference, unpacked")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose key contains it; may be repeated (all must match)"
    )
    parser.add_argument("--seconds", type=float, default=1500, help="time limit of a row (%(default)g)")
    parser.add_argument("--budget", type=float, default=math.inf, help="start no more rows after this time, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes (%(default)s)")
    parser.add_argument("--memory", type=float, default=20, help="memory limit in GiB (%(default)g; v7x's prompts take 32)")
    parser.add_argument("--again", action="store_true", help="measure rows that are in the JSON too")
    parser.add_argument("--table", action="store_true", help="write and print the table only")
    parser.add_argument("--random", type=int, metavar="N", help="print N rows drawn at random, with the peers if there are any")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of --random (%(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker)
    if args.random is not None and args.random < 1:
        parser.error(f"--random {args.random}: at least 1")
    everything = wanted if args.random is None else functools.partial(drawn, args.random, args.seed)
    keys = [key_of(*job) for job in everything(True)]
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    if not any(all(text in key for text in args.only) for key in keys):
        parser.error(f"--only {' --only '.join(args.only)}: no row's key contains this; the first key is {keys[0]!r}")
    if args.peers and not Path(args.peers, "tpu_inference").is_dir():
        parser.error(
            f"--peers {args.peers}: contains no tpu_inference; unzip the file of `pip download --no-deps tpu-inference==0.32.0`"
        )
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    rows = stored["rows"]
    missing = []
    for job in everything(bool(args.peers)):
        key, digest = key_of(*job), source(job[0].kind)
        known = None if args.random else rows.get(key)
        stale = known is None or args.again or (job[3] == OURS and known.get("source") != digest)
        if stale and not args.table and all(text in key for text in args.only):
            # an error may be the limit's of that run, so it stands for no program
            missing.append((job, known.get("program") if known and "us" in known and not args.again else None))
    if missing and not Path(args.compilers, "libtpu").is_dir():
        parser.error(f"--compilers {args.compilers}: contains no libtpu; `make compilers` installs it in .venv/compilers")
    for job, made in measured(missing, args):
        key = key_of(*job)
        if args.random:
            shown = bounded(made["us"], floors(*job[:3])) if "us" in made else made["error"]
            print(f"{key}: {shown} us ({made['seconds']} s)", flush=True)
            continue
        is_same = not {"us", "error"} & set(made)
        made = rows[key] if is_same else made | {"date": date.today().isoformat(), "jax": _version()}
        made |= {"source": source(job[0].kind)} if job[3] == OURS else {}
        shown = made.get("us", made.get("error"))
        print(f"{key}: {shown} ({'the same program' if is_same else made.get('seconds')})", file=sys.stderr, flush=True)
        # another run may have written meanwhile
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
        rows = stored["rows"]
        rows[key] = made
        about = {"libtpu": "0.0.51", "tpu-inference": "0.32.0", "method": "libtpu's static estimate, no TPU"}
        RESULTS.write_text(json.dumps({**about, "rows": dict(sorted(rows.items()))}, indent=1) + "\n")
    if args.random:
        return
    TABLE.write_text(table(rows) + "\n")
    print(TABLE.read_text(), end="")


def _version() -> str:
    import jax

    return str(jax.__version__)


if __name__ == "__main__":
    main()
