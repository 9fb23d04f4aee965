"""Run the Triton kernels under compute-sanitizer on a GPU: the suite's cases for memory errors, the Hopper prefill for races.

    python -m benchmarks.sanitizer memcheck
    python -m benchmarks.sanitizer racecheck [--logs FOLDER]

memcheck runs cases of the conformance suite for TRITON_ATTN and TRITON_MLA (`chosen`), with a separate allocation for each
tensor, the batch's too, so that accesses outside a tensor are detected: each feature alone, which on Hopper are prompts under
every kind of mask, layers that share a batch, requests of a batch-invariant layer among others, and some of the other cases.
What is compared with the oracle runs twice, the second time by the launches that the first one kept.

racecheck needs a Hopper GPU. It reports hazards in the Gluon prefill's shared memory; this script identifies what the bytes
are. Besides `hopper_prefill` it runs kernels with the same partitions: `bare` and `barriers`, which share nothing (the
second has barriers among a partition's warps), `ordered`, in which two partitions pass a tile back and forth with mbarriers
as in the prefill, and `planted`, which does so without mbarriers, so that the tile must be reported. A report is identified
by its place in shared memory and its two machine instructions. The bytes by which Triton assigns work to partitions (the
handshake) are the last ones: PTX shows which byte a worker warp reads. Exit code 0 means: the reports in the prefill
concern the handshake only, each of its writes is followed and each of its reads preceded by barrier 1 of all threads,
another kernel has the same report, and the planted race was reported. The tool does not model mbarriers (`ordered` is
reported), so it proves nothing about rings.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CASES = 20  #: of each backend, beside those of launches and of layers that share a batch
CHECKED = ("TRITON_ATTN", "TRITON_MLA")
RACED = ("hopper_prefill", "bare", "barriers", "ordered", "planted")
_WORKERS = 4  #: the first worker warp, after those of the default partition


# --- the programs under test -----------------------------------------------------------------------------------------


def chosen(cases: list[Any]) -> list[Any]:
    """Return the cases of a backend's quick suite that memcheck runs, with each array of a batch on the device."""
    alone = [case for case in cases if case.name.startswith("alone: ")]
    half = len(alone) // 2  # the same features in short contexts, and in long ones
    found = [case.replace(check="oracle") for case in (*alone[:half:2], *alone[half + 1 :: 2])]
    found += [case for case in cases if case.check == "layers_in_turn"]
    found += sorted((case for case in cases if case.check == "any_batch"), key=lambda case: sum(case.seq_lens))[:2]
    others = [case for case in cases if case.check == "oracle" and case not in alone]
    found += [others[i * len(others) // CASES] for i in range(CASES)]
    return [case.replace(arrays="device") for case in found]


def _all_chosen() -> list[tuple[Any, Any]]:
    from attn.backends.registry import AttentionBackendEnum
    from attn.testing.conformance import cases_for

    backends = [AttentionBackendEnum[name].get_class() for name in CHECKED]
    return [(backend, case) for backend in backends for case in chosen(cases_for(backend))]


def memory_cases(part: int, parts: int) -> int:
    """Run every `parts`-th of the cases and return the number of violations."""
    from attn.testing.conformance import run_case

    own = _all_chosen()[part::parts]
    times = [(backend, case) for backend, case in own for _ in range(2 if case.check == "oracle" else 1)]
    wrong = [str(v) for backend, case in times for v in run_case(backend, case)]
    print("\n".join([*(f"case {case.name}" for _, case in own), *wrong]))
    return len(wrong)


def race(name: str) -> int:
    """Launch one of `RACED` and print the paths of its code and its shared memory as a line of JSON."""
    import torch
    import triton

    kernel = "prefill" if name == "hopper_prefill" else "_bare" if name in ("bare", "barriers") else "_handover"
    facts: dict[str, Any] = {}

    def listen(*, metadata: Any, metadata_group: Any, **_: Any) -> None:
        if metadata["name"] == kernel:
            files = {Path(file).suffix[1:]: path for file, path in metadata_group.items()}
            facts.update(kernel=kernel, shared=metadata["shared"], ptx=files["ptx"], cubin=files["cubin"])

    triton.knobs.compilation.listener = listen
    out = torch.full((3, 128), -1, dtype=torch.int32, device="cuda")
    want = torch.arange(128, dtype=torch.int32, device="cuda") + torch.arange(3, device="cuda")[:, None]
    if name == "hopper_prefill":
        right = _prefill()
    else:
        from benchmarks.kernels import handshake

        if kernel == "_bare":
            handshake._bare[(2,)](out, BARRIERS=name == "barriers", num_warps=4)
            right = bool((out == want).all())
        else:
            handshake._handover[(1,)](out, ORDERED=name == "ordered", num_warps=4)
            torch.cuda.synchronize()
            right = name == "planted" or bool((out == want).all())  # the result of a race is not checked
    torch.cuda.synchronize()
    print("FACTS " + json.dumps({**facts, "right": right}))
    return int(not right)


def _prefill() -> bool:
    """Run two prompts, one with a context, with pages of 16 and unused pages: two kinds of tile, several rounds each."""
    import torch

    from attn.kernels.hopper_prefill_launch import PrefillParams
    from attn.torch.kernels import hopper_prefill

    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    page, lens = 16, [(300, 300), (77, 403)]
    counts = [-(-s // page) for _, s in lens]
    table = torch.full((2, max(counts)), -1, dtype=torch.int32, device="cuda")
    for r, n in enumerate(counts):
        table[r, :n] = torch.arange(sum(counts[:r]), sum(counts[:r]) + n)
    query, key, value = random(377, 8, 128), random(sum(counts), page, 2, 128), random(sum(counts), page, 2, 128)
    starts = torch.tensor([0, 300, 377], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor([s for _, s in lens], dtype=torch.int32, device="cuda")
    output, lse = torch.empty_like(query), torch.empty(8, 377, device="cuda")
    arrays = output, lse, query, key, value, starts, seq_lens, table, None
    hopper_prefill.prefill(arrays, PrefillParams(right=0, min_query=1), (128**-0.5 * 1.4426950408889634, 1.0), programs=3)
    for r, (n, s) in enumerate(lens):
        rows = slice(int(starts[r]), int(starts[r + 1]))
        k, v = (x[table[r, : counts[r]].long()].flatten(0, 1)[:s].double().repeat_interleave(4, 1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query[rows].double(), k) * 128**-0.5
        hidden = torch.arange(s, device="cuda") > torch.arange(n, device="cuda")[:, None] + s - n
        want = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        if float((output[rows] - want).square().mean().sqrt()) > 5e-3:
            return False
    return True


# --- the tool's reports ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The result of a process under the tool."""

    code: int
    output: str
    log: str
    seconds: float


def run(tool: str, command: list[str], log: Path, extra: tuple[str, ...] = ()) -> Run:
    """Run `command` (arguments of this module) under a tool for at most 75 s, or alone if `tool` is empty, which compiles."""
    import time

    whole = [sys.executable, "-m", "benchmarks.sanitizer", *command]
    if tool:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        whole = [sanitizer, "--tool", tool, "--log-file", str(log), "--print-limit", "100000", *extra, *whole]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(log.parent / "cache")}
    begin = time.monotonic()
    try:
        done = subprocess.run(whole, capture_output=True, text=True, timeout=75 if tool else 150, env=environment)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        parts = [x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (late.stdout, late.stderr)]
        code, output = 124, "".join(parts)
    seconds = time.monotonic() - begin
    return Run(code, output, log.read_text(errors="replace") if log.exists() else "", seconds)


def at_once(jobs: dict[str, Callable[[], Run]]) -> dict[str, Run]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


@dataclass(frozen=True)
class Access:
    kind: str  #: Read or Write
    place: str  #: kernel+0xoffset
    source: str

    @property
    def offset(self) -> int:
        return int(self.place.rpartition("+0x")[2], 16)


@dataclass(frozen=True)
class Hazard:
    """A byte of shared memory that two threads accessed without a synchronisation that the tool detects."""

    kind: str
    address: int
    first: Access
    second: Access


_HEAD = re.compile(r"Potential (\w+) hazard detected at __shared__ 0x([0-9a-f]+) in block")
_ACCESS = re.compile(r"(Read|Write) Thread \([\d,]+\) at (\S.*?\+0x[0-9a-f]+)(?: in (\S+))?")


def hazards(log: str) -> list[Hazard]:
    """Return the records of `--racecheck-report hazard`."""
    found, lines = [], log.splitlines()
    for i, line in enumerate(lines):
        if head := _HEAD.search(line):
            accesses = [Access(*(x or "" for x in m.groups())) for m in map(_ACCESS.search, lines[i + 1 : i + 3]) if m]
            if len(accesses) == 2:
                found.append(Hazard(head[1], int(head[2], 16), accesses[0], accesses[1]))
    return found


@dataclass
class Places:
    """A kernel's shared memory: the handshake's bytes, mbarriers, and the rest; and its machine code."""

    shared: int
    state: range
    barriers: range
    code: dict[int, str] = field(default_factory=dict)

    def named(self, offset: int) -> str:
        if offset in self.state:
            return "handshake"
        return "mbarriers" if offset in self.barriers else "tiles and scratch" if 0 <= offset < self.shared else "nowhere"

    def parted(self, h: Hazard) -> bool:
        """Whether the barrier of all threads directly follows the write and directly precedes the read."""
        write, read = sorted((h.first, h.second), key=lambda access: access.kind == "Read")
        if (write.kind, read.kind) != ("Write", "Read"):
            return False
        order = sorted(self.code)
        after, before = order.index(write.offset) + 1, order.index(read.offset)
        sides = order[after : after + 2], order[max(0, before - 3) : before]
        return all(any(re.fullmatch(r"BAR\.SYNC\S* 0x1", self.code[at]) for at in side) for side in sides)


def places(facts: dict[str, Any]) -> Places:
    """Return a kernel's places from its PTX: worker warp w reads byte `state + w - 4`; mbarriers are at their `init`."""
    ptx = Path(facts["ptx"]).read_text()
    reads = [int(n or 0) for n in re.findall(r"ld\.shared\.[bsu]8\s+%\w+, \[%\w+(?:\+(-?\d+))?\]", ptx)]
    state = max(reads) + _WORKERS  # the handshake is last
    sums = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    inits = [int(sums.get(r, 0)) for r in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)]
    barriers = range(min(inits), max(inits) + 8) if inits else range(0)
    cuobjdump = shutil.which("cuobjdump")
    if not cuobjdump:
        from triton import knobs

        cuobjdump = knobs.nvidia.cuobjdump.path
    sass = subprocess.run([cuobjdump, "-sass", facts["cubin"]], capture_output=True, text=True).stdout
    code = {int(at, 16): " ".join(text.split()) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);", sass)}
    return Places(facts["shared"], range(state, facts["shared"]), barriers, code)


def judge(runs: dict[str, Run]) -> int:
    """Print every report by place and instruction, and the verdict."""
    facts, found = {}, {}
    for name, done in runs.items():
        lines = [line for line in done.output.splitlines() if line.startswith("FACTS ")]
        if not lines:
            print(f"{name}: no result (exit code {done.code})\n{done.output[-3000:]}\n{done.log[-3000:]}")
            return 2
        facts[name], found[name] = json.loads(lines[-1][6:]), hazards(done.log)
        if not facts[name]["right"]:
            print(f"{name}: its numbers are wrong")
            return 2
    known = {name: places(t) for name, t in facts.items()}
    # the tool's addresses start at the window, whose first KiB the system reserves on Hopper
    base = 0x400 if all(h.address >= 0x400 for h in found["planted"]) else 0
    seen: dict[str, set[str]] = {}
    loose: dict[str, int] = collections.Counter()
    for name, spot in known.items():
        log, t = runs[name].log, facts[name]
        summary = [line.strip("= ") for line in log.splitlines() if "RACECHECK SUMMARY" in line]
        print(f"\n== {name} ({t['kernel']}, {t['shared']} bytes of shared memory, {runs[name].seconds:.0f} s): {summary}")
        print(f"   handshake {spot.state}, mbarriers {spot.barriers}; addresses below are less {base:#x}")
        if not summary:
            print(log[-2000:])
        seen[name] = set()
        groups: dict[tuple[str, Hazard], list[int]] = collections.defaultdict(list)
        for h in found[name]:
            where = spot.named(h.address - base)
            seen[name].add(where)
            groups[where, Hazard(h.kind, 0, h.first, h.second)].append(h.address - base)
        for (where, h), at in groups.items():
            parted = where == "handshake" and spot.parted(h)
            loose[name] += where == "handshake" and not parted
            note = ", barrier 1 between them" if parted else ""
            print(f"   {h.kind} in {where}, bytes {min(at)}..{max(at)} ({len(set(at))} of them, {len(at)} reports){note}")
            for access in (h.first, h.second):
                text = spot.code.get(access.offset, "?")
                print(f"      {access.kind:5s} {access.place.rpartition('+')[2]} {access.source or '-'}: {text}")
        for line in log.splitlines():
            if "Race reported" in line or " and " in line and "access at" in line or "Warning" in line:
                print(f"   | {line.strip('= ')[:200]}")
    reasons = []
    if not seen["planted"] & {"tiles and scratch"}:
        reasons.append("the planted race was not reported, so the absence of reports proves nothing")
    for name in ("bare", "barriers"):
        if seen[name] - {"handshake"}:
            reasons.append(f"{name}, whose partitions share nothing, is reported for {sorted(seen[name])}")
    if ours := seen["hopper_prefill"] - {"handshake"}:
        reasons.append(f"the prefill is reported for {sorted(ours)}: a race, or synchronisation that the tool does not detect")
    if loose["hopper_prefill"]:
        reasons.append("a write and a read of the handshake have no barrier of all threads between them")
    others = [name for name in RACED[1:] if "handshake" in seen[name]]
    if "handshake" in seen["hopper_prefill"] and not others:
        reasons.append("the handshake is reported in the prefill and in no other kernel")
    for reason in reasons:
        print(f"\nOPEN: {reason}")
    if not reasons:
        count = len(found["hopper_prefill"])
        print(f"\nVERDICT: {count} reports in the prefill, all of the handshake's bytes, a barrier of all threads in between;")
        print(f"the handshake is reported in {', '.join(others) or 'no other kernel'} too")
    if seen["ordered"] - {"handshake"}:
        print("The tool does not model mbarriers: its reports on rings prove nothing")
    return int(bool(reasons))


def racecheck(folder: Path) -> int:
    runs = at_once({name: lambda name=name: run("", ["race", name], folder / f"{name}.warm") for name in RACED})  # type: ignore[misc]
    if failed := {name: done.output[-2000:] for name, done in runs.items() if done.code}:
        print("\n".join(f"{name} fails without the tool: {output}" for name, output in failed.items()))
        return 2

    def job(name: str) -> Run:
        kernel = json.loads(re.findall(r"^FACTS (.*)$", runs[name].output, re.MULTILINE)[-1])["kernel"]
        extra = ("--racecheck-report", "all", "--kernel-name", f"kernel_substring={kernel}", "--num-cuda-barriers", "16")
        return run("racecheck", ["race", name], folder / f"{name}.log", extra)

    return judge(at_once({name: lambda name=name: job(name) for name in RACED}))  # type: ignore[misc]


def memcheck(folder: Path, parts: int = 16) -> int:
    def everywhere(tool: str, name: str) -> dict[str, Run]:
        # a launcher counts a kernel's parameters by asking for one more than there are
        extra = ("--leak-check", "no", "--report-api-errors", "no") if tool else ()
        return at_once(
            {
                str(i): lambda i=i: run(tool, ["memory", str(i), str(parts)], folder / f"{name}{i}", extra)  # type: ignore[misc]
                for i in range(parts)
            }
        )

    for name, done in everywhere("", "warm").items():
        if done.code:
            print(f"part {name} fails without the tool: {done.output[-2000:]}")
            return 2
    errors = cases = 0
    for done in everywhere("memcheck", "memcheck").values():
        cases += done.output.count("\ncase ") + done.output.startswith("case ")
        summary = re.findall(r"ERROR SUMMARY: (\d+) error", done.log)
        if done.code or not summary or summary != ["0"]:
            print(f"exit code {done.code}\n{done.output[-2000:]}\n{done.log[:6000]}")
            errors += 1
        errors += sum(map(int, summary))
    print(f"memcheck: {cases} cases, {errors} errors")
    return int(errors > 0 or cases != len(_all_chosen()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="racecheck", choices=("memcheck", "racecheck", "memory", "race"))
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--logs", type=Path, help="keep the tool's logs in this folder")
    args = parser.parse_args()
    if args.what == "memory":
        return memory_cases(*map(int, args.rest))
    if args.what == "race":
        return race(*args.rest)
    import torch

    if not torch.cuda.is_available():
        print("this machine has no CUDA device")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            return (memcheck if args.what == "memcheck" else racecheck)(Path(folder))
        finally:
            if args.logs:
                args.logs.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, args.logs)


if __name__ == "__main__":
    sys.exit(main())
