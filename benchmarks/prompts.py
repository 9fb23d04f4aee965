"""Prompts drawn at random, on a backend and on its peers, each output checked in the same run.

    python -m benchmarks.prompts --random 24 --seed 7 --json out.json
    python -m benchmarks.prompts --random 24 --seed 7 --only 3,11      two of these launches
    python -m benchmarks.prompts --random 24 --seed 7 --list           print them
    python -m benchmarks.prompts --launch "2x914 8/1x128 causal p16"   launches as they are printed, of equal lengths
    python -m benchmarks.prompts --launch "64x1@4096 32/8x128 causal p16" --invariant   beside the same with batch_invariant

`attn bench` times batches over pages and dense shapes of models; here heads of 32 to 256, any group, windows on one side or
both, caps, sinks and ragged lengths meet, in three kinds of launches: dense (equal lengths), encoders' batches over their own
keys, and prompts and chunks over pages. Peers are backends of this package for packages that are installed (FlashInfer,
FlashAttention, cuDNN); one that does not serve a launch says why. A launch depends on the seed and its number only.

A call is captured in a CUDA graph. "cold": before each replay 256 MiB are written; "warm": a quarter of a graph of four
calls. A row says so where the capture fails: such calls are launched behind a kernel that waits, so that their time is the
device's too. On a CPU calls are plain. The error is relative RMS against TORCH_SDPA in float32 on the same inputs.
At the end: the fastest peer's time by ours, its geometric mean, and the launches below 0.97.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from attn import CommonAttentionMetadata
from attn.tools.bench.on_torch import TorchBench
from attn.tools.bench.sample import Draw
from attn.torch import Attention, DiffusionAttention

ENOUGH = 0.97  #: of the fastest peer's speed
#: Peers of each kind of launch: backends for attention over pages or own keys, or dense ones.
PEERS = {
    "dense": ("CUDNN_ATTN", "FLASH_ATTN", "FLASHINFER_ATTN", "TORCH_SDPA"),
    "encoder": ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TORCH_SDPA"),
    "paged": ("FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"),
}


INVARIANT = ", batch_invariant"


@dataclass(frozen=True)
class Sizes:
    """Bounds of what is drawn. rows: of a launch; pairs: of rows and keys, times query heads and head size."""

    longest: int = 16384
    requests: int = 48
    rows: int = 32768
    pairs: int = 1 << 40
    heads: tuple[str, ...] = ("32/8", "64/8", "28/4", "40/8", "24/24", "16/16", "12/2", "8/1")
    sizes: tuple[int, ...] = (32, 40, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)


_LAUNCH = re.compile(
    r"(\d+)x(\d+)(?:@(\d+))? (\d+)/(\d+)x(\d+) (causal|full) (?:(dense|encoder)|p(\d+))"
    r"(?: window (\d+)\+(\d+))?(?: cap ([\d.]+))?( sinks)?"
)
ON_CPU = Sizes(64, 4, 128, 1 << 24, ("4/2", "3/3", "7/1"), (32, 40, 64))


@dataclass(frozen=True)
class Launch:
    """kind: of `PEERS`; lens: rows and keys of each request; window: keys before and after a row, or None."""

    kind: str
    lens: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    size: int
    causal: bool
    window: tuple[int, int] | None = None
    cap: float | None = None
    sinks: bool = False
    page: int = 16

    def __str__(self) -> str:
        (n, m), least, most = self.lens[0], min(self.lens), max(self.lens)
        of_one = (f"{n}" if n == m else f"{n}@{m}") if least == most else f"({least[0]}..{most[0]})"
        words = ["causal" if self.causal else "full", f"p{self.page}" if self.kind == "paged" else self.kind]
        words += [f"window {self.window[0]}+{self.window[1]}"] if self.window else []
        words += [f"cap {self.cap:g}"] if self.cap else []
        words += ["sinks"] if self.sinks else []
        return f"{len(self.lens)}x{of_one} {self.heads}/{self.kv_heads}x{self.size} {' '.join(words)}"

    @property
    def pairs(self) -> int:
        return sum(n * m for n, m in self.lens) * self.heads * self.size


def parsed(text: str) -> Launch:
    """Return the launch that is printed as `text`. Raises ValueError for any other text, and for lengths that differ."""
    found = _LAUNCH.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: must be as --list prints it, of equal lengths, such as '2x914@1462 8/1x128 causal p16'")
    count, rows, keys, heads, kv_heads, size, mask, kind, page, before, after, cap, sinks = found.groups()
    lens = ((int(rows), int(keys or rows)),) * int(count)
    launch = Launch(
        "paged" if page else kind, lens, int(heads), int(kv_heads), int(size), mask == "causal",
        (int(before), int(after)) if before else None, float(cap) if cap else None, sinks is not None, int(page or 16),
    )  # fmt: skip
    if launch.kind == "dense" and str(launch) != str(replace(launch, window=None, cap=None, sinks=False)):
        raise ValueError(f"{text!r}: a dense launch has no window, cap or sinks (an encoder's has)")
    return launch


def drawn(number: int, seed: int, sizes: Sizes) -> Launch:
    """Return launch `number` of a seed; one beyond the bounds is drawn again."""
    draw = Draw(f"{seed} prompts {number}")
    while True:
        kind = draw.one_of(tuple(PEERS))
        heads, kv_heads = map(int, draw.one_of(sizes.heads).split("/"))
        count, longest = draw.log_uniform(1, sizes.requests), draw.log_uniform(32, sizes.longest)
        ragged = kind != "dense" and draw.uniform(0, 1) == 1
        rows = [draw.log_uniform(max(16, longest // 8), longest) if ragged else longest for _ in range(count)]
        context = draw.log_uniform(1, sizes.longest) if kind == "paged" and draw.uniform(0, 2) == 0 else 0
        causal = kind == "paged" or (kind == "dense" and draw.uniform(0, 1) == 1)
        window = None
        if kind != "dense" and draw.uniform(0, 2) == 0:
            width = draw.log_uniform(16, 4096)
            window = (width, 0 if causal else width)
        launch = Launch(
            kind, tuple((n, n + context) for n in rows), heads, kv_heads, draw.one_of(sizes.sizes), causal, window,
            30.0 if kind != "dense" and draw.uniform(0, 5) == 0 else None,
            kind != "dense" and draw.uniform(0, 3) == 0,
            draw.one_of((16, 32, 64, 128)),
        )  # fmt: skip
        if sum(rows) <= sizes.rows and launch.pairs <= sizes.pairs:
            return launch


class Inputs:
    """A launch's tensors; `call` makes the call of a backend, which returns [T, H, D]."""

    def __init__(self, launch: Launch, device: torch.device, dtype: torch.dtype) -> None:
        self.launch, self.device, self.dtype = launch, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

        rows, keys = (sum(x) for x in zip(*launch.lens, strict=True))
        self.query = noise(rows, launch.heads, launch.size)
        self.key, self.value = (noise(keys, launch.kv_heads, launch.size) for _ in "kv")
        self.sinks = noise(launch.heads).float() + math.log(launch.lens[0][1]) if launch.sinks else None

    def call(self, backend: str | None, dtype: torch.dtype | None = None) -> tuple[str, Callable[[], torch.Tensor]]:
        """Return the backend's name (None: the selector's choice) and its call. Raises `UnsupportedError` with the reasons of
        one that does not serve the launch. A name that ends in `INVARIANT` is of a layer that requests `batch_invariant`."""
        features = ["batch_invariant"] if backend is not None and backend.endswith(INVARIANT) else []
        backend = backend.removesuffix(INVARIANT) if backend is not None else None
        launch, dtype = self.launch, dtype or self.dtype
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        if launch.kind == "dense":
            dense = DiffusionAttention(
                launch.heads, launch.size, causal=launch.causal, num_kv_heads=launch.kv_heads, dtype=dtype, backend=backend
            ).to(self.device)  # fmt: skip
            batched = [x.view(len(launch.lens), launch.lens[0][0], *x.shape[1:]) for x in (query, key, value)]
            return dense.selection.name, lambda: dense(*batched).flatten(0, 1)
        paged = launch.kind == "paged"
        window = None if launch.window is None else launch.window[0] + 1 if launch.causal else launch.window
        layer = Attention(
            launch.heads, launch.size, num_kv_heads=launch.kv_heads, sliding_window=window, logits_soft_cap=launch.cap,
            sinks=self.sinks, dtype=dtype, block_size=launch.page, attn_type="decoder" if paged else "encoder_only",
            features=features, backend=backend,
        ).to(self.device)  # fmt: skip
        counts = [-(-m // launch.page) for _, m in launch.lens]
        pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[pages.pop() for _ in range(count)] for count in counts]
        new, cached = ([x[i] for x in launch.lens] for i in (0, 1))
        batch = CommonAttentionMetadata.from_lens(new, cached, tables, launch.page, causal=launch.causal)
        if not paged:
            metadata = layer.build(batch)
            return layer.selection.name + INVARIANT * len(features), lambda: layer(query, key, value, None, metadata)
        cache = layer.new_kv_cache(num_blocks=sum(counts), device=self.device)
        # all keys are written once, as a prompt of its own; the call that is timed writes none
        whole = CommonAttentionMetadata.from_lens(cached, cached, tables, launch.page)
        layer.impl.do_kv_cache_update(layer, key, value, cache, layer.build(whole).slot_mapping)
        metadata = layer.build(batch)
        return layer.selection.name + INVARIANT * len(features), lambda: layer(query, None, None, cache, metadata)


@dataclass(frozen=True)
class Row:
    """A backend's outcome for a launch: milliseconds and error, or why there are none. plain: why it was not captured."""

    launch: str
    backend: str
    cold: float = 0.0
    warm: float = 0.0
    error: float = 0.0
    refused: str = ""
    plain: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"    {self.backend:16s} refused: {self.refused}"
        note = f"  not captured: {self.plain}" if self.plain else ""
        return f"    {self.backend:16s} {self.cold:9.4f} {self.warm:9.4f} ms  error {self.error:.1e}{note}"


def times(bench: TorchBench, call: Callable[[], torch.Tensor]) -> tuple[float, float, str]:
    """Milliseconds of a call with cold and with warm caches, and why a GPU's call was not captured (or nothing)."""
    if not bench.on_gpu:
        cold, warm = (statistics.median(bench.times(call, flush, 3)) for flush in (bench.evict.zero_, lambda: None))
        return cold, warm, ""
    once: Callable[[], object] = call
    several: Callable[[], object] = lambda: [call() for _ in range(4)]  # noqa: E731
    plain, wait = "", lambda: None
    try:
        once, several = bench.captured(call), bench.captured(several)
    except RuntimeError as error:  # for example, a kernel that reads a value back from the device
        torch.cuda.synchronize()
        plain = _line(error)
        # about 2 ms: the host is done with its part when the kernels begin
        wait = lambda: torch.cuda._sleep(4_000_000)  # noqa: E731, SLF001
    bench.times(several, wait, 10)
    cold = statistics.median(bench.times(once, lambda: (bench.evict.zero_(), wait()), 20))
    return cold, statistics.median(bench.times(several, wait, 20)) / 4, plain


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def measured(launch: Launch, names: Sequence[str], bench: TorchBench, dtype: torch.dtype) -> Iterator[Row]:
    """Time a launch on each backend."""
    inputs = Inputs(launch, bench.device, dtype)
    want = inputs.call("TORCH_SDPA", torch.float32)[1]()
    for name in names:
        try:
            backend, call = inputs.call(name)
            error = float((call().float() - want).norm() / want.norm())
            cold, warm, plain = times(bench, call)
        except Exception as refusal:
            yield Row(str(launch), name, refused=_line(refusal))
        else:
            yield Row(str(launch), backend, cold, warm, error, plain=plain)


def summary(rows: Sequence[Row], ours: str, limit: float) -> str:
    """The fastest right peer's time by ours, over all launches that have one."""
    by_launch: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_launch.setdefault(row.launch, {})[row.backend] = row
    lines, wrong = [], [row for row in rows if not row.refused and not row.error <= limit]
    for what in ("cold", "warm"):
        ratios = {
            launch: min(peers) / getattr(own[ours], what)
            for launch, own in by_launch.items()
            if ours in own and not own[ours].refused
            and (peers := [getattr(row, what) for name, row in own.items()
                           if name.removesuffix(INVARIANT) != ours and not row.refused and row.error <= limit])
        }  # fmt: skip
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            below = "; ".join(f"{launch} {ratio:.2f}" for launch, ratio in ratios.items() if ratio < ENOUGH)
            of = f"{what}: geometric mean {mean:.3f} of the best peer over {len(ratios)} launches"
            lines.append(f"{of}; below {ENOUGH}: {below or 'none'}")
    return "\n".join([*lines, *(f"WRONG: {row.launch} {row}" for row in wrong)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Time prompts drawn at random on a backend and its peers.")
    add = parser.add_argument
    add("--random", type=int, default=24, metavar="N", help="number of launches (%(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="(%(default)s)")
    add("--launch", action="append", metavar="LAUNCH", help="this launch instead; may be repeated")
    add("--invariant", action="store_true", help="also time our layer with batch_invariant")
    add("--ours", default="TRITON_ATTN", metavar="NAME", help="the backend that is compared (%(default)s)")
    add("--only", metavar="N,N", help="numbers of launches")
    add("--without", default="", metavar="NAMES", help="peers to leave out, by commas")
    add("--list", action="store_true", help="print the launches and measure nothing")
    add("--json", metavar="FILE", help="write rows, device and versions to this file, after each launch")
    args = parser.parse_args()
    if args.random < 1:
        parser.error(f"--random {args.random}: at least 1")
    numbers = range(args.random)
    if args.only:
        numbers = [int(x) for x in args.only.split(",") if x.isdigit()]
        if not numbers or max(numbers) >= args.random or len(numbers) <= args.only.count(","):
            parser.error(f"--only {args.only}: numbers from 0 to {args.random - 1}, with commas between")
    on_gpu = torch.cuda.is_available()
    try:
        launches = dict(enumerate(map(parsed, args.launch))) if args.launch else {
            number: drawn(number, args.seed, Sizes() if on_gpu else ON_CPU) for number in numbers
        }  # fmt: skip
    except ValueError as error:
        parser.error(f"--launch {error}")
    if args.launch and args.only:
        parser.error("--only selects launches of --random, not of --launch")
    if args.invariant and (dense := [str(launch) for launch in launches.values() if launch.kind == "dense"]):
        parser.error(f"--invariant: {dense[0]} is dense, and such layers have no batch_invariant")
    if args.list:
        print("\n".join(f"{number:3d} {launch}" for number, launch in launches.items()))
        return 0
    bench, dtype = TorchBench(), torch.bfloat16 if on_gpu else torch.float32
    about = bench.about(str(dtype).removeprefix("torch."))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{' ' * 21}      cold      warm")
    rows, without = list[Row](), args.without.split(",")
    with torch.no_grad():
        for number, launch in launches.items():
            print(f"{number:3d} {launch}", flush=True)
            peers = [name for name in PEERS[launch.kind] if name not in without and name != args.ours]
            ours = [args.ours, args.ours + INVARIANT] if args.invariant else [args.ours]
            for row in measured(launch, [*ours, *peers], bench, dtype):
                print(row, flush=True)
                rows.append(row)
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump({**about, "seed": args.seed, "rows": [asdict(row) for row in rows]}, file, indent=1)
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    print(summary(rows, args.ours, limit))
    return int(any(not row.refused and not row.error <= limit for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
