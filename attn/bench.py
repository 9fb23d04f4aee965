"""How fast a backend is: batches in vLLM's grammar, each timed configuration checked in the same run.

A batch is `[count]q<new tokens>[k][s<tokens in the cache>[k]]`, joined by `_`, where k multiplies by 1,024: `64q1s4k` is 64
decodes, `2q2k_32q1s1k` two prompts beside 32 decodes. A row tells the time of a call (on a GPU: of a replayed graph, caches
flushed before each), what it costs the host, and two rates, as shares of what a copy and a matrix product reach on the same
device in the same run. The bytes counted are those that must move: keys, values, queries and outputs once. The operations
are 4 H D for each pair of a query and a key that it sees.

With peers, every backend that serves a case and every other kernel at hand attends it in one run, what the selector takes
is marked, and a verdict says whether something else would have been faster.
"""

import argparse
import datetime
import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from attn import dtypes
from attn.backends.registry import AttentionBackendEnum
from attn.errors import UnsupportedError
from attn.imports import resolve_obj_by_qualname
from attn.platforms import default_framework, platform_for
from attn.selector import make_request, select
from attn.verdicts import choose

_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")
#: Relative RMS error against float32 above which a time counts for nothing: twice the rounding of one product's operands.
LIMITS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-4}
#: How much slower than the fastest a choice may be: kernels measured twice differ by 1 to 3 % (benchmarks/NOTES.md).
MARGIN = 0.05


@dataclass(frozen=True)
class Case:
    """What is timed. `heads` is `query heads/kv heads`; block_size is in tokens."""

    batch: str
    heads: str = "32/8"
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"

    @property
    def num_heads(self) -> int:
        return int(self.heads.partition("/")[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.heads.partition("/")[2] or self.num_heads)

    def __str__(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}"
        return f"{self.batch} {self.heads}x{self.head_size} p{self.block_size}{cache}"


#: The rows of the table in benchmarks/NOTES.md: decode, long decode, speculative, prefill, mixed.
SUITE = (
    Case("64q1s4k"), Case("16q1s32k", "64/8", block_size=64), Case("128q1s2k"), Case("q1s32k"), Case("64q1s4k", "64/8", 64),
    Case("16q4s1k"), Case("4q4k"), Case("4q4k", block_size=128), Case("2q2k_32q1s1k"), Case("1q512s8k_63q1s4k"),
    Case("64q1s4k", kv_cache_dtype="fp8"), Case("64q1s4k", kv_cache_dtype="int8"), Case("4q4k", kv_cache_dtype="fp8"),
)  # fmt: skip


def parse(batch: str) -> list[tuple[int, int]]:
    """[(new tokens, tokens in the cache with them)], one a request; the cache holds what is new unless said otherwise.

    Raises ValueError for what the grammar has no reading of, and for a cache that holds less than what is new.
    """
    found = []
    for part in batch.split("_"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"batch={batch!r}: {part!r} is not <count>q<new tokens>[k][s<tokens in the cache>[k]]")
        count, q, q_k, kv, kv_k = match.groups()
        n = int(q) * (1024 if q_k else 1)
        m = int(kv) * (1024 if kv_k else 1) if kv else n
        if n < 1 or m < n:
            raise ValueError(f"batch={batch!r}: {part!r} has {n} new of {m} tokens: need 1 or more, and no more than there are")
        found += [(n, m)] * int(count or 1)
    return found


def flops(case: Case) -> int:
    """Operations of the two products over the pairs that a causal mask allows."""
    return 4 * case.num_heads * case.head_size * sum(q * m - q * (q - 1) // 2 for q, m in parse(case.batch))


def nbytes(case: Case) -> int:
    """Bytes that must move: keys and values once, queries and outputs once."""
    lens = parse(case.batch)
    stored = dtypes.DTYPES[dtypes.kv_cache_element(case.kv_cache_dtype, case.dtype)].itemsize
    cache = 2 * case.num_kv_heads * case.head_size * stored * sum(m for _, m in lens)
    return cache + 2 * case.num_heads * case.head_size * dtypes.DTYPES[case.dtype].itemsize * sum(q for q, _ in lens)


@dataclass(frozen=True)
class Timing:
    """What a wing measures. Milliseconds of a call: median and percentiles with a cache full of lines to write back, and the
    median with a clean one; microseconds of the host: to build a batch's metadata, and to make one call."""

    ms: float
    ms_p20: float
    ms_p80: float
    ms_clean: float
    build_us: float
    host_us: float
    error: float
    replayed: bool = False  #: by a captured graph


@dataclass(frozen=True)
class Row:
    """One case on one backend: `timing`, and its rates as shares of the device's own copy and matrix product.

    `chosen` marks what the selector takes for the case, `peer` what it cannot take: a kernel that is no backend here.
    """

    case: Case
    backend: str
    timing: Timing
    gb_per_s: float
    tflop_per_s: float
    of_copy: float
    of_gemm: float
    right: bool
    chosen: bool = False
    peer: bool = False

    def __str__(self) -> str:
        t = self.timing
        verdict = f"error {t.error:.1e}" if self.right else f"WRONG: error {t.error:.1e}"
        return (
            f"{self.case!s:36s} {'*' if self.chosen else ' '}{self.backend:18s} {t.ms:8.4f} ms "
            f"[{t.ms_p20:.4f} {t.ms_p80:.4f}] clean {t.ms_clean:.4f}"
            f"{self.gb_per_s:6.0f} GB/s {100 * self.of_copy:5.1f} % of copy {self.tflop_per_s:6.1f} TF "
            f"{100 * self.of_gemm:4.1f} % of gemm, host {t.host_us:.0f} us, build {t.build_us:.0f} us, {verdict}"
            + ("" if t.replayed else ", calls")
        )

    def to_dict(self) -> dict[str, Any]:
        flat = {**asdict(self), **asdict(self.case), **asdict(self.timing)}
        return {name: value for name, value in flat.items() if name not in ("case", "timing")}


@dataclass(frozen=True)
class Refusal:
    """What stands in a row's place: who did not attend the case, and why. `failed` where it had said that it would."""

    case: Case
    backend: str
    refused: str
    failed: bool = False
    chosen: bool = False
    peer: bool = False

    @property
    def right(self) -> bool:
        """A kernel that is not this library's may do as it likes; a backend that serves a case must."""
        return self.peer or not self.failed

    def __str__(self) -> str:
        said = " ".join(self.refused.split())
        mark = "*" if self.chosen else " "
        return f"{self.case!s:36s} {mark}{self.backend:18s} {'FAILED' if self.failed else 'no row'}: {said[:200]}"

    def to_dict(self) -> dict[str, Any]:
        flat = {**asdict(self), **asdict(self.case), "right": self.right}
        return {name: value for name, value in flat.items() if name != "case"}


@dataclass
class Report:
    """Rows and where they come from: `about` names device, versions and date, and the two ceilings."""

    about: dict[str, Any]
    rows: list[Row | Refusal] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(row.right for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        found = [row.to_dict() for row in self.rows]
        judged = [asdict(verdict) for verdict in verdicts(found)]
        return {**self.about, "rows": found, **({"verdicts": judged} if judged else {})}

    def write(self, file: str | None) -> None:
        if file:
            Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


class Bench(Protocol):
    """A wing's side: one device, its ceilings, and the stopwatch."""

    copy_gb_per_s: float
    gemm_tflop_per_s: float

    def about(self) -> dict[str, Any]: ...

    def peers(self) -> Sequence[str]:
        """Kernels that are no backends here, and single packages behind a backend (`BACKEND:package`)."""

    def measure(self, case: Case, name: str, limit: float = 0.0) -> Timing:
        """A backend's or a peer's time. Raises what it raises, TimeoutError when it is not ready after `limit` seconds
        (0: however long it takes)."""


def judged(case: Case, backend: str, timing: Timing, bench: Bench, chosen: bool = False, peer: bool = False) -> Row:
    """A timing as a row."""
    gb, tflop = nbytes(case) / timing.ms / 1e6, flops(case) / timing.ms / 1e9
    shares = (gb / bench.copy_gb_per_s, tflop / bench.gemm_tflop_per_s)
    return Row(case, backend, timing, gb, tflop, *shares, timing.error <= LIMITS[case.dtype], chosen, peer)


def rows(cases: Sequence[Case], backends: Sequence[str], bench: Bench) -> Iterator[Row]:
    """Every case on every backend, as they come. Raises `UnsupportedError` when a backend does not serve a case."""
    for case in cases:
        for backend in backends:
            yield judged(case, backend, bench.measure(case, backend), bench)


# side by side


def entrants(case: Case, framework: str, peers: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """(what the selector takes for the case, {name: why it does not serve, or nothing}).

    The names are those on the platform's list, any other backend of the wing that serves, and `peers`.
    """
    request = make_request(
        case.head_size, case.dtype, case.kv_cache_dtype, case.block_size, num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
    )  # fmt: skip
    selection = select(request, framework=framework)
    found = {verdict.name: "" if verdict.ok else str(verdict) for verdict in selection.trace}
    device = platform_for(framework).device()
    for name in sorted(set(AttentionBackendEnum.names()) - found.keys()):
        member = AttentionBackendEnum[name]
        path = member.get_path() if member.value or member.is_overridden() else "attn."
        if path.startswith("attn.") and not path.startswith(f"attn.{framework}."):
            continue  # another wing's, or nobody's: not worth importing
        if choose([member.candidate()], request, device).winner:
            found[name] = ""
    return selection.name, {**found, **dict.fromkeys(peers, "")}


def asked_for(names: Collection[str], asked: Sequence[str], known: Collection[str]) -> list[str]:
    """Those of `names` that are asked for: by name, by what stands before a colon, or `all`.

    Raises ValueError for a word that asks for none of `known`.
    """
    for word in asked:
        if word != "all" and not any(word in (name, name.partition(":")[0]) for name in known):
            raise ValueError(f"peer {word!r} is unknown; known: all, {', '.join(sorted(known))}")
    return [name for name in names if "all" in asked or name in asked or name.partition(":")[0] in asked]


def side_by_side(
    case: Case, asked: Sequence[str], without: Sequence[str], bench: Bench, framework: str, limit: float = 0.0
) -> Iterator[Row | Refusal]:
    """The case on the selector's choice and on everyone asked for, each with its time or with the reason for none."""
    peers = bench.peers()
    choice, found = entrants(case, framework, peers)
    known = {*AttentionBackendEnum.names(), *peers}
    left_out = asked_for(found, without, known)
    names = [name for name in asked_for(found, asked, known) if name not in left_out]
    for name in [choice, *names] if choice and choice not in names else names:
        marks = {"chosen": name == choice, "peer": name in peers}
        if found[name]:
            yield Refusal(case, name, found[name], **marks)
            continue
        try:
            yield judged(case, name, bench.measure(case, name, limit), bench, **marks)
        except Exception as error:  # whatever is raised is the answer, and must not end the run of the others
            declined = isinstance(error, UnsupportedError | TimeoutError)
            said = str(error) if declined else f"{type(error).__name__}: {error}"
            yield Refusal(case, name, said, not declined, **marks)


@dataclass(frozen=True)
class Verdict:
    """What a choice was worth: `behind` is how much longer it takes than the fastest backend (0.12: 12 %), `apart` whether
    their middle three fifths of times lie apart; `peer` is the fastest kernel that could not be chosen."""

    case: str
    choice: str
    ms: float
    fastest: str
    behind: float
    apart: bool
    peer: str = ""
    ahead: float = 0.0  #: how much longer the choice takes than `peer`

    @property
    def lost(self) -> bool:
        return self.apart and self.behind > MARGIN

    def __str__(self) -> str:
        said = f"{self.case:36s} {self.choice} is the fastest"
        if self.behind > 0:
            by = f"{100 * self.behind:.1f} %{'' if self.apart else ' (spreads overlap)'}"
            said = f"{self.case:36s} {self.choice} {'LOSES' if self.lost else 'holds'}: {self.fastest} is ahead by {by}"
        return said + (f"; of the rest, {self.peer} by {100 * self.ahead:.1f} %" if self.ahead > MARGIN else "")


def _name_of(row: dict[str, Any]) -> str:
    return str(Case(**{name: row[name] for name in ("batch", "heads", "head_size", "block_size", "dtype", "kv_cache_dtype")}))


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The right rows of each case."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("right") and "ms" in row:
            found.setdefault(_name_of(row), []).append(row)
    return found


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """One for each case whose choice has a right row; `rows` as `Report.to_dict` gives them."""
    found = []
    for case, right in _by_case(rows).items():
        choice = next((row for row in right if row.get("chosen")), None)
        if choice is None:
            continue
        first = min((row for row in right if not row["peer"]), key=lambda row: row["ms"])
        peer = min((row for row in right if row["peer"]), key=lambda row: row["ms"], default=None)
        apart = bool(first["ms_p80"] < choice["ms_p20"])
        more = {} if peer is None else {"peer": peer["backend"], "ahead": choice["ms"] / peer["ms"] - 1}
        behind = choice["ms"] / first["ms"] - 1
        found.append(Verdict(case, choice["backend"], choice["ms"], first["backend"], behind, apart, **more))
    return found


def ranking(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, float, float, str]]:
    """(backend, cases, geometric mean of its time over the fastest's, the worst such ratio, its case), the best first.

    A backend that serves fewer cases comes after those that serve more: on a list it would only stand before them.
    """
    ratios: dict[str, list[tuple[float, str]]] = {}
    for case, right in _by_case(rows).items():
        own = [row for row in right if not row["peer"]]
        for row in own:
            ratios.setdefault(row["backend"], []).append((row["ms"] / min(r["ms"] for r in own), case))
    found = [
        (name, len(of), math.exp(sum(math.log(ratio) for ratio, _ in of) / len(of)), *max(of)) for name, of in ratios.items()
    ]
    return sorted(found, key=lambda entry: (-entry[1], entry[2]))


def judge(rows: Sequence[dict[str, Any]]) -> str:
    """Verdicts and ranking as text."""
    lines = [str(verdict) for verdict in verdicts(rows)]
    for name, cases, mean, worst, where in ranking(rows):
        lines.append(f"{name:18s} {cases:3d} cases, {mean:.3f} of the fastest on average, at worst {worst:.2f} ({where})")
    return "\n".join(lines)


# the command


def open_bench(framework: str) -> Bench:
    """The wing's stopwatch on its default device. Raises ValueError for a wing that has none."""
    if framework != "torch":
        raise ValueError(f"framework={framework!r} has no benchmark (torch has)")
    return resolve_obj_by_qualname("attn.torch.bench.TorchBench")()  # type: ignore[no-any-return]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, Case("")
    add("batches", nargs="*", metavar="BATCH", help="such as 64q1s4k or 2q2k_32q1s1k (default: a table of a dozen)")
    add(
        "--registry", choices=("attention", "diffusion"), default="attention",
        help="diffusion: shapes such as 2x4608x24x128 instead of batches, every backend that is here (default: %(default)s)",
    )  # fmt: skip
    add("--backend", action="append", metavar="NAME", help="may be repeated (default: TRITON_ATTN)")
    add("--heads", default=default.heads, help="query heads/kv heads (default: %(default)s)")
    add("--head-size", type=int, default=default.head_size, help="(default: %(default)s)")
    add("--block-size", type=int, default=default.block_size, help="tokens a block of the cache (default: %(default)s)")
    add("--dtype", default=default.dtype, choices=sorted(LIMITS), help="(default: %(default)s)")
    add("--kv-cache-dtype", default=default.kv_cache_dtype, help="(default: %(default)s)")
    add("--framework", help="(default: the one that is here)")
    add("--peers", metavar="NAMES", help="who else attends each batch: all, or names with commas between (sdpa, FLASHINFER)")
    add("--without", default="", metavar="NAMES", help="who is left out of --peers all")
    add("--limit", type=float, default=120.0, metavar="S", help="seconds that each may take to be ready (default: %(default)s)")
    add("--judge", metavar="FILE", help="measure nothing: judge the choices in a file that --json wrote")
    add("--json", metavar="FILE", help="write the rows, the device and the versions there")


def run(args: argparse.Namespace) -> int:
    """1 when some row is not right (or, judging a file, a choice lost), else 0."""
    if args.judge:
        return _judged_file(args.judge)
    if args.registry == "diffusion":
        from attn.diffusion import bench as dense

        return dense.run(args)
    model = Case("", args.heads, args.head_size, args.block_size, args.dtype, args.kv_cache_dtype)
    cases = [replace(model, batch=batch) for batch in args.batches] or list(SUITE)
    for case in cases:
        parse(case.batch)
    framework = args.framework or default_framework()
    bench = open_bench(framework)
    report = Report({**bench.about(), "date": datetime.date.today().isoformat()})
    print(", ".join(f"{name} {value}" for name, value in report.about.items()))
    for case in cases:
        if args.peers:
            asked, without = (text.split(",") if text else [] for text in (args.peers, args.without))
            found: Iterator[Row | Refusal] = side_by_side(case, asked, without, bench, framework, args.limit)
        else:
            found = rows([case], args.backend or ["TRITON_ATTN"], bench)
        begin = len(report.rows)
        for row in found:
            report.rows.append(row)
            print(row, flush=True)
        for verdict in verdicts([row.to_dict() for row in report.rows[begin:]]):
            print(f"-> {verdict}", flush=True)
        report.write(args.json)  # after each case: a kernel that hangs must not cost the rows before it
    if args.peers:
        print(judge([row.to_dict() for row in report.rows]))
    return 0 if report.right else 1


def _judged_file(file: str) -> int:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
        text = judge(found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--judge {file}: not a file of rows as --peers and --json write it: {error}") from None
    print(text)
    return 0 if all(row["right"] for row in found) and not any(verdict.lost for verdict in verdicts(found)) else 1
