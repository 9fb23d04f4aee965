"""A decode of one sequence of 32k tokens (1q1s32k, 32/8 heads of 128, pages of 16): the cost of its parts, and the best launch.

    python -m benchmarks.long_decode [--json out.json] [--quick]

The call is timed as by `attn bench`, in many versions, interleaved so that the device's state is the same for all:
TRITON_ATTN with its own launch (`rule`, from `long_decode`) and others, without its second stage (the result is wrong; the
difference is the cost of the merge), and without launching that stage early. For comparison: cuDNN over dense keys, and a
kernel that only reads as many bytes, as a lower bound. `ramp` is the first version in groups of forty replays, starting
from an idle device. Every version that computes attention is checked against float32.
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn.bench import Case
from attn.torch.bench import TorchBench, Workload
from attn.torch.kernels import paged_attention as kernels
from attn.torch.kernels.launch import Launch

CASE = Case("1q1s32k")
#: (rows, keys, warps, stages) and keys per split
LAUNCHES = [
    (16, 64, 2, 5, 1024), (16, 64, 2, 5, 512), (16, 64, 2, 5, 2048), (16, 64, 2, 4, 1024), (16, 64, 2, 6, 1024),
    (16, 64, 4, 6, 2048), (16, 128, 4, 4, 2048), (16, 32, 2, 8, 1024), (16, 32, 2, 8, 704), (16, 32, 1, 8, 704),
]  # fmt: skip


@triton.jit
def _read(target, source, size, STEP: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum all elements: the cost of reading them once."""
    i = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    for start in tl.range(tl.program_id(0) * STEP, size, PROGRAMS * STEP, num_stages=4):
        total += tl.load(source + start + i).to(tl.float32)
    tl.store(target + tl.program_id(0), tl.sum(total, 0))


@contextmanager
def launched(launch: Launch | None, split: int) -> Iterator[None]:
    """Run TRITON_ATTN with a given launch; None: the launch of the general rule."""
    given = None if launch is None else (launch, split)
    with mock.patch.object(kernels, "long_decode", lambda *_: given):
        yield


class _Nothing:
    """Stands for a kernel and launches nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def versions(work: Workload, bench: TorchBench, quick: bool) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Yield (name, function to time, whether it writes attention to `work.output`)."""

    def attend(**patches: Any) -> Callable[[], object]:
        with mock.patch.multiple(kernels, **patches):
            return bench.captured(work.forward)

    yield "long_decode", bench.captured(work.forward), True
    yield "long_decode, no second stage", attend(_merge=_Nothing()), False
    yield "long_decode, second stage late", attend(can_launch_early=lambda arch: False), True
    with launched(None, 0):
        yield "rule", bench.captured(work.forward), True
        yield "rule, no second stage", attend(_merge=_Nothing()), False
    for *shape, split in LAUNCHES[:4] if quick else LAUNCHES:
        with launched(Launch(*shape), split):
            try:
                replay = bench.captured(work.forward)
            except Exception as refusal:  # a launch that does not fit is reported in place of its row
                print(shape, split, f"{type(refusal).__name__}: {str(refusal)[:120]}", flush=True)
                torch.cuda.synchronize()
                continue
        yield f"{','.join(map(str, shape))} split {split}", replay, True
    k, v = (x.to(work.query.dtype).transpose(0, 1)[None].contiguous() for x in work.dense(0))
    q = work.query.transpose(0, 1)[None].contiguous()

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    try:
        cudnn()
        yield "cuDNN, dense", bench.captured(cudnn), False
    except RuntimeError as refusal:
        print(f"cuDNN: {refusal}")
    many = torch.empty(2 * k.numel(), dtype=k.dtype, device=k.device).copy_(torch.cat([k.flatten(), v.flatten()]))
    for programs in (132, 264, 528):
        target = torch.empty(programs, device=k.device)

        def read(programs: int = programs, target: torch.Tensor = target) -> None:
            _read[(programs,)](target, many, many.numel(), STEP=8192, PROGRAMS=programs, num_warps=4)

        read()
        yield f"reading alone, {programs} programs", bench.captured(read), False
    yield "a nearly empty graph", bench.captured(lambda: target[:1].zero_()), False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="a few launches only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA device")
        return
    bench = TorchBench()
    about = {**bench.about(), "date": datetime.date.today().isoformat()}
    print(about)
    rows: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        work = Workload(CASE, "TRITON_ATTN", bench.device)
        work.forward()
        first = bench.captured(work.forward)
        torch.cuda.synchronize()
        time.sleep(1.0)
        ramp = []
        for _ in range(30):
            events = [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in range(40)]
            for begin, end in events:
                bench._evict.zero_()
                begin.record()
                first()
                end.record()
            torch.cuda.synchronize()
            ramp.append(round(statistics.median(b.elapsed_time(e) for b, e in events), 4))
        print("ramp:", *ramp, flush=True)
        ready = list(versions(work, bench, args.quick))
        times: dict[str, dict[str, list[float]]] = {name: {"dirty": [], "clean": []} for name, _, _ in ready}
        for turn in range(6):
            for name, call, is_attention in ready if turn % 2 == 0 else reversed(ready):
                if is_attention and turn == 0:
                    work.output.fill_(torch.nan)
                times[name]["dirty"] += bench.times(call, bench._evict.zero_, 20)
                times[name]["clean"] += bench.times(call, bench._evict.amax, 20)
                if is_attention and turn == 0:
                    rows[name] = {"error": work.error()}
        nbytes = 2 * 32768 * 8 * 128 * 2
        for name, _, _ in ready:
            row = rows.setdefault(name, {})
            for kind, found in times[name].items():
                row[kind] = round(statistics.median(found), 4)
                row[f"{kind}_p20"] = round(sorted(found)[len(found) // 5], 4)
            error = f"error {row['error']:.1e}" if "error" in row else ""
            rate = nbytes / row["clean"] / 1e6
            print(
                f"{name:34s} {row['dirty']:.4f} (p20 {row['dirty_p20']:.4f}) clean {row['clean']:.4f} {rate:6.0f} GB/s {error}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**about, "case": CASE.batch, "ramp_ms": ramp, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
