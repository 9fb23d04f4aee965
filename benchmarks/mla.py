"""Absorbed MLA decode on a GPU: time, bandwidth and arithmetic rate of a grid of batches, each row checked in the same run.

    python -m benchmarks.mla --json out.json                 every row
    python -m benchmarks.mla --only decode --launch 64,64,8,2  rows whose name contains "decode", with the given launch
    python -m benchmarks.mla --prefill                       the prefill kernel's rows

A row is `mla_decode` alone (TRITON_MLA's kernels, dense or by top-k indices), captured in a CUDA graph and replayed after an L2
flush (`TorchBench`): random bf16 latents of 512 + 64, pages of 64 at random places. Bytes are those of the
rows, read once (sparse: topk rows per token); flops are 2 H (576 + 512) per pair of row and key. The error is relative RMS
against float32 over the first two requests. FlashInfer's MLA wrapper is timed too if it is installed.

In contrast, `attn bench --mla` times a layer's whole call, on any dense MLA backend: the cache write, the up-projections and
attention.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from typing import Any

import torch

from attn import imports
from attn.kernels import mla_launch
from attn.kernels.launch import Launch
from attn.tools.bench.on_torch import Timing, TorchBench
from attn.torch.backends.mla import _rows
from attn.torch.kernels import mla_decode as kernels
from attn.torch.kernels.mla_prefill import mla_prefill

SCALE = 192**-0.5
#: (name, requests, tokens per request, keys per request, heads, top-k keys or 0, cache)
ROWS = [
    (f"decode {r} x {m // 1024}k q{q}", r, q, m, heads, 0, "bf16")
    for heads in (128, 16)
    for r, m in ((64, 4096), (128, 8192), (16, 32768))
    for q in (1, 4)
] + [
    ("decode 64 x 4k q1 fp8", 64, 1, 4096, 128, 0, "fp8"),
    ("decode 128 x 8k q1 fp8", 128, 1, 8192, 16, 0, "fp8"),
    ("sparse 64 x 64k q1", 64, 1, 65536, 128, 2048, "bf16"),
    ("sparse 64 x 64k q1 packed", 64, 1, 65536, 128, 2048, "packed"),
    ("sparse 64 x 64k q1 h16", 64, 1, 65536, 16, 2048, "bf16"),
]


class Workload:
    """A row's tensors on the device. Requests share pages if the cache would exceed 40 GB."""

    def __init__(self, row: tuple[Any, ...], page: int = 64) -> None:
        self.name, self.requests, self.tokens, self.keys, self.heads, self.topk, self.kind = row
        device = torch.device("cuda")
        torch.manual_seed(0)
        rows = self.requests * self.tokens
        self.query = torch.randn(rows, self.heads, 576, device=device, dtype=torch.bfloat16)
        pages = self.keys // page
        blocks = self.requests * pages
        latents = torch.randn(blocks * page, 576, device=device, dtype=torch.bfloat16)
        self.k_factor = 1.0
        if self.kind == "packed":
            packed = torch.cat([_rows.pack(part[:, :512], part[:, 512:]) for part in latents.split(1 << 18)])
            self.cache = packed.view(blocks, page, 656)
        elif self.kind == "fp8":
            self.k_factor = 0.02
            self.cache = (latents.float() / self.k_factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(blocks, page, 576)
        else:
            self.cache = latents.view(blocks, page, 576)
        self.table = torch.randperm(blocks, device=device).int().view(self.requests, pages)
        self.starts = torch.arange(0, rows + 1, self.tokens, device=device, dtype=torch.int32)
        self.lens = torch.full((self.requests,), self.keys, device=device, dtype=torch.int32)
        self.indices = None
        if self.topk:
            self.indices = torch.stack([torch.randperm(self.keys, device=device)[: self.topk] for _ in range(rows)]).int()
        self.out = torch.empty(rows, self.heads, 512, device=device, dtype=torch.bfloat16)

    def call(self) -> None:
        kernels.mla_decode(
            self.out, None, self.query, self.cache, self.starts, self.lens, self.table, self.tokens, self.keys, SCALE,
            self.kind == "packed", None, self.k_factor, None, self.indices,
        )  # fmt: skip

    def error(self) -> float:
        worst = 0.0
        for r in range(min(2, self.requests)):
            rows = self.cache[self.table[r].long()].flatten(0, 1)
            latents = _rows.unpack(rows) if self.kind == "packed" else rows.float() * self.k_factor
            for i in range(self.tokens):
                t = r * self.tokens + i
                own = latents[: self.keys - self.tokens + i + 1] if self.indices is None else latents[self.indices[t].long()]
                want = torch.softmax(self.query[t].float() @ own.T * SCALE, -1) @ own[:, :512]
                worst = max(worst, float((self.out[t].float() - want).norm() / want.norm()))
        return worst

    def counted(self, ms: float) -> tuple[float, float]:
        """Return (GB/s, TFLOP/s)."""
        keys = self.topk or self.keys
        width = {"bf16": 1152, "fp8": 576, "packed": 656}[self.kind]
        read = self.requests * keys * width * (self.tokens if self.topk else 1)
        flops = 2 * self.heads * 1088 * self.requests * self.tokens * keys
        return read / ms / 1e6, flops / ms / 1e9


def flashinfer_call(work: Workload) -> Callable[[], torch.Tensor]:
    """Run FlashInfer's MLA wrapper (fa3) on the same tensors. Raises what FlashInfer raises."""
    import flashinfer

    space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="fa3")
    pages = work.table.shape[1]
    indptr = torch.arange(work.requests + 1, device="cuda", dtype=torch.int32) * pages
    wrapper.plan(
        work.starts,
        indptr,
        work.table.flatten(),
        work.lens,
        work.heads,
        512,
        64,
        64,
        True,
        SCALE,
        torch.bfloat16,
        torch.bfloat16,
    )
    nope, rope = work.query[..., :512].contiguous(), work.query[..., 512:].contiguous()
    ckv, kpe = work.cache[..., :512].contiguous(), work.cache[..., 512:].contiguous()
    return lambda: wrapper.run(nope, rope, ckv, kpe, return_lse=False)


def measured(
    bench: TorchBench, work: Workload, name: str, call: Callable[[], object], error: Callable[[], float]
) -> dict[str, Any]:
    timing: Timing = bench.timed(call, lambda: None, lambda: work.out.fill_(torch.nan), error, 20)
    rate, flops = work.counted(timing.ms)
    row = {
        "row": work.name, "heads": work.heads, "backend": name, "ms": round(timing.ms, 4), "gb_per_s": round(rate),
        "tflop_per_s": round(flops, 1), "error": timing.error,
    }  # fmt: skip
    print(
        f"{work.name:28s} H{work.heads:<4d}{name:22s}{timing.ms:8.4f} ms {rate:6.0f} GB/s {flops:6.1f} TF  {timing.error:.1e}",
        flush=True,
    )
    return row


def prefill_row(bench: TorchBench, heads: int, requests: int, tokens: int) -> dict[str, Any]:
    """Time the prefill kernel, causal, with heads of 192 / 128."""
    total = requests * tokens
    query, key = (torch.randn(total, heads, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    value = torch.randn(total, heads, 256, device="cuda", dtype=torch.bfloat16)[..., 128:]
    starts = torch.arange(0, total + 1, tokens, device="cuda", dtype=torch.int32)
    out = torch.empty(total, heads, 128, device="cuda", dtype=torch.bfloat16)

    def error() -> float:
        q, k, v = (x[:tokens, :1].float().transpose(0, 1) for x in (query, key, value))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)[0]
        return float((out[:tokens, 0].float() - want).norm() / want.norm())

    def call() -> None:
        mla_prefill(out, None, query, key, value, starts, starts, SCALE, True)

    timing = bench.timed(call, lambda: None, lambda: out.fill_(torch.nan), error, 20)
    flops = 2 * heads * 320 * total * (tokens + 1) / 2 / timing.ms / 1e9
    name = f"prefill {requests} x {tokens}"
    print(f"{name:28s} H{heads:<4d}{'TRITON':22s}{timing.ms:8.4f} ms {flops:6.1f} TF  {timing.error:.1e}", flush=True)
    times = {"ms": round(timing.ms, 4), "tflop_per_s": round(flops, 1), "error": timing.error}
    return {"row": name, "heads": heads, "backend": "TRITON", **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--launch", action="append", default=[], help="M,N,warps,stages instead of the rule's; may be repeated")
    parser.add_argument("--prefill", action="store_true")
    args = parser.parse_args()
    bench = TorchBench()
    about = {**bench.about(), "date": datetime.date.today().isoformat()}
    print(about)
    found: list[dict[str, Any]] = []
    rule, prefers_hopper = mla_launch.mla_launch, mla_launch.prefers_hopper
    with torch.no_grad():
        if args.prefill:
            found += [prefill_row(bench, *row) for row in ((128, 1, 4096), (128, 4, 2048), (16, 4, 4096))]
        for row in ROWS:
            if args.only not in row[0] or args.heads not in (0, row[4]):
                continue
            work = Workload(row)
            for text in args.launch or [""]:
                launch = Launch(*map(int, text.split(","))) if text else None
                mla_launch.mla_launch = (lambda *_, launch=launch: launch) if launch else rule
                kernels._plan.cache_clear()
                general = launch not in (None, mla_launch.HOPPER)
                kernels.prefers_hopper = (lambda *_: False) if general else prefers_hopper
                try:
                    found.append(measured(bench, work, f"TRITON_MLA {text}", work.call, work.error))
                except Exception as refusal:  # a launch that does not fit is reported in place of its row
                    print(row[0], text, f"{type(refusal).__name__}: {str(refusal)[:160]}", flush=True)
            if imports.installed("flashinfer") and work.kind == "bf16" and not work.topk:
                call = flashinfer_call(work)

                def judge(work: Workload = work, call: Callable[[], torch.Tensor] = call) -> float:
                    work.out.copy_(call())
                    return work.error()

                found.append(measured(bench, work, "FlashInfer fa3", call, judge))
            del work
            torch.cuda.empty_cache()
            if args.json:
                with open(args.json, "w") as file:
                    json.dump({**about, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
