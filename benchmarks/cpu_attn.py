"""Compare CPU_ATTN with plain PyTorch: gather the pages, call `scaled_dot_product_attention`.

All variants use the same keys, values and block table, the plain ones in their fastest layout (NHD). Rounds are interleaved;
medians of wall time and of processor time per thread are reported, since the machine may be shared. Each variant's output is
compared with the float64 oracle in the same run. Bytes are those of the keys and values that the rows attend to; copy
bandwidth counts bytes read and written.

    python benchmarks/cpu_attn.py --threads 1 --json out.json
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.torch import Attention

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
GROUP = NUM_HEADS // NUM_KV_HEADS
ROW_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}  #: hard limits of the conformance suite


@dataclass
class Case:
    name: str
    query_lens: list[int]
    seq_lens: list[int]
    sliding_window: int | None = None


CASES = (
    Case("decode 16 x 2k", [1] * 16, [2048] * 16),
    Case("decode 1 x 2k", [1], [2048]),
    Case("prefill 2k", [2048], [2048]),
    Case("chunk 512 of 2k", [512], [2048]),
    Case("decode 16 x 2k window 512", [1] * 16, [2048] * 16, 512),
    Case("prefill 2k window 512", [2048], [2048], 512),
)


class Setup:
    """A case's tensors, and its implementations: `variants` maps a name to a function that returns [T, H, D]."""

    def __init__(self, case: Case, dtype: torch.dtype, block_size: int) -> None:
        self.case, self.block_size = case, block_size
        rng = np.random.default_rng(0)
        used = [-(-length // block_size) for length in case.seq_lens]
        num_blocks = sum(used) + 64
        order = rng.permutation(num_blocks)[: sum(used)]
        table = np.split(order, np.cumsum(used)[:-1])
        self.batch = CommonAttentionMetadata.from_lens(case.query_lens, case.seq_lens, table, block_size)
        layer = Attention(
            NUM_HEADS,
            HEAD_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            dtype=dtype,
            block_size=block_size,
            sliding_window=case.sliding_window,
            backend="CPU_ATTN",
        )
        self.scale = layer.impl.scale
        generator = torch.Generator().manual_seed(0)
        cache = layer.new_kv_cache(num_blocks)
        for part in cache:
            part.copy_(torch.randn(part.shape, generator=generator))
        # a copy for each plain variant, so that none finds its data in the last-level cache after another has read it
        logical = layer.backend.logical_kv_cache(cache)
        self.nhd, second, third = ([part.clone(memory_format=torch.contiguous_format) for part in logical] for _ in range(3))
        self.query = torch.randn(sum(case.query_lens), NUM_HEADS, HEAD_SIZE, generator=generator).to(dtype)
        metadata = layer.build(self.batch)
        self.table = metadata.block_table
        self.starts = self.batch.query_start_loc.tolist()
        self.variants: dict[str, Callable[[], torch.Tensor]] = {
            "CPU_ATTN": lambda: layer.impl.forward(layer, self.query, None, None, cache, metadata),
            "index + sdpa gqa": lambda: self.by_request(self.nhd, self.indexed, self.grouped),
            "select + sdpa gqa": lambda: self.by_request(second, self.selected, self.grouped),
            "select + sdpa folded": lambda: self.by_request(third, self.selected, self.folded),
        }

    def indexed(self, part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return part[blocks]

    def selected(self, part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return part.index_select(0, blocks)

    def by_request(
        self, parts: list[torch.Tensor], gather: Callable[..., torch.Tensor], attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        output = torch.empty_like(self.query)
        for r, length in enumerate(self.case.seq_lens):
            rows = slice(self.starts[r], self.starts[r + 1])
            n, window = rows.stop - rows.start, self.case.sliding_window
            low = 0 if window is None else max(0, length - n - window + 1)  # the first key that any row attends to
            first = low // self.block_size
            blocks = self.table[r, first : -(-length // self.block_size)]
            keys = slice(low - first * self.block_size, length - first * self.block_size)
            key, value = (gather(part, blocks).flatten(0, 1)[keys].transpose(0, 1)[None] for part in parts)
            output[rows] = attend(self.query[rows], key, value, n)
        return output

    def mask(self, n: int, m: int) -> torch.Tensor | None:
        """Return the mask, or None if every row attends to every key."""
        window = self.case.sliding_window
        distance = torch.arange(m) - torch.arange(m - n, m)[:, None]
        seen = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
        return None if n == 1 else seen

    def grouped(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n: int) -> torch.Tensor:
        square = n == key.shape[2] and self.case.sliding_window is None and n > 1
        result = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if square else self.mask(n, key.shape[2]),
            is_causal=square,
            scale=self.scale,
            enable_gqa=True,
        )
        return result[0].transpose(0, 1)

    def folded(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n: int) -> torch.Tensor:
        if n > 1:  # folding repeats the mask: for one row only
            return self.grouped(query, key, value, n)
        rows = query.view(1, NUM_KV_HEADS, GROUP, HEAD_SIZE)
        return F.scaled_dot_product_attention(rows, key, value, scale=self.scale).view(1, NUM_HEADS, HEAD_SIZE)

    def oracle(self) -> np.ndarray:
        keys, values = (part.double().numpy() for part in self.nhd)
        batch = self.batch
        out, _ = reference.paged_attention(
            self.query.double().numpy(),
            keys,
            values,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=np.maximum(batch.block_table, 0),
            scale=self.scale,
            window=reference.sliding_window_to_pair(self.case.sliding_window),
        )
        return out

    def bytes_seen(self) -> int:
        window = self.case.sliding_window
        total = 0
        for n, m in zip(self.case.query_lens, self.case.seq_lens, strict=True):
            total += m if window is None else min(m, n + window - 1)
        return 2 * total * NUM_KV_HEADS * HEAD_SIZE * self.query.itemsize


def row_error(output: torch.Tensor, want: np.ndarray) -> float:
    """Return the worst row's relative RMS error."""
    difference = np.sqrt(((output.double().numpy() - want) ** 2).mean(-1))
    return float((difference / (np.sqrt((want**2).mean(-1)) + 1e-3)).max())


def interleaved(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median (wall, processor) seconds of each, with its data flushed from the core's caches, as between layers."""
    other = torch.ones(1 << 24)
    wall: dict[str, list[float]] = {name: [] for name in functions}
    busy: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    for _ in range(rounds):
        random.shuffle(order)  # neighbours in the order affect each other
        for name, function in order:
            other.add_(1)
            start, start_busy = time.perf_counter(), time.process_time()
            function()
            busy[name].append(time.process_time() - start_busy)
            wall[name].append(time.perf_counter() - start)
    return {name: (statistics.median(wall[name]), statistics.median(busy[name])) for name in functions}


def copy_bandwidth(rounds: int) -> float:
    """Return the bytes per second read and written by a large copy, the best of several."""
    source = torch.ones(1 << 26, dtype=torch.float32)
    target = torch.ones_like(source)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def measure(case: Case, dtype_name: str, block_size: int, rounds: int, threads: int, bandwidth: float) -> list[dict]:
    setup = Setup(case, getattr(torch, dtype_name), block_size)
    want = setup.oracle()
    errors = {name: row_error(variant(), want) for name, variant in setup.variants.items()}
    wrong = {name: error for name, error in errors.items() if error > ROW_ERROR[dtype_name]}
    if wrong:
        raise SystemExit(f"{case.name} {dtype_name}: row error {wrong} above {ROW_ERROR[dtype_name]}")
    times = interleaved(setup.variants, rounds)
    _, ours = times["CPU_ATTN"]
    return [
        {
            "case": case.name,
            "dtype": dtype_name,
            "variant": name,
            "wall_ms": wall * 1e3,
            "cpu_ms_per_thread": busy * 1e3 / threads,
            "speedup_of_ours": busy / ours,
            "copy_bandwidth_share": setup.bytes_seen() / wall / bandwidth,
            "row_error": errors[name],
        }
        for name, (wall, busy) in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(ROW_ERROR))
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES], metavar="NAME", help="by default all")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="PATH", help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bandwidth = copy_bandwidth(5)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), copy {bandwidth / 1e9:.1f} GB/s (read + written)")
    print(f"{'case':26} {'dtype':9} {'variant':21} {'wall ms':>8} {'cpu/T ms':>8} {'ours x':>7} {'of copy':>8} {'error':>8}")
    rows = []
    for case in (case for case in CASES if case.name in arguments.cases):
        for dtype in arguments.dtypes:
            for row in measure(case, dtype, arguments.block_size, arguments.rounds, arguments.threads, bandwidth):
                rows.append(row)
                print(
                    f"{row['case']:26} {row['dtype']:9} {row['variant']:21} {row['wall_ms']:8.2f} "
                    f"{row['cpu_ms_per_thread']:8.2f} {row['speedup_of_ours']:7.2f} {row['copy_bandwidth_share']:8.1%} "
                    f"{row['row_error']:8.1e}",
                    flush=True,
                )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "copy_bytes_per_s": bandwidth, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
