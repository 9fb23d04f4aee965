"""TRITON_ATTN against its peers on a GPU: the table of issue rows, each checked and timed in one run.

    python -m benchmarks.triton_attn --json out.json

TRITON_ATTN's rows are `attn bench`'s (attn/bench.py: the grammar, the counting; attn/torch/bench.py: the stopwatch). The
peers at hand attend the same queries, keys and values, copied out of the pages beforehand where they take none ("dense"):
PyTorch's FlashAttention 2 and cuDNN through `scaled_dot_product_attention`, compiled FlexAttention, and FlashInfer over the
pages where it is installed. A peer that refuses a row says why in its place.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn import imports
from attn.bench import SUITE, Case, judged
from attn.torch.bench import TorchBench, Workload

Call = Callable[[], torch.Tensor]


def _dense(workload: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [R, H, Q, D], key and value [R, K, S, D]. Raises ValueError for requests of several lengths."""
    if len(set(workload.lens)) > 1 or workload.lens[0][0] not in (1, workload.lens[0][1]):
        raise ValueError("takes requests of one length, all new or one token each")
    dtype, requests = workload.query.dtype, len(workload.lens)
    pairs = [workload.dense(r) for r in range(requests)]
    key, value = (torch.stack([p[i] for p in pairs]).to(dtype).transpose(1, 2).contiguous() for i in (0, 1))
    return workload.query.unflatten(0, (requests, -1)).transpose(1, 2).contiguous(), key, value


def _packed(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa(backend: SDPBackend) -> Callable[[Workload], Call]:
    def prepare(workload: Workload) -> Call:
        q, k, v = _dense(workload)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return _packed(scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True))

        return call

    return prepare


def _flex(workload: Workload) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _dense(workload)
    mask = None
    if q.shape[2] > 1:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")
    attend = torch.compile(flex_attention)
    return lambda: _packed(attend(q, k, v, block_mask=mask, enable_gqa=True))


def _flashinfer(kind: str) -> Callable[[Workload], Call]:
    def prepare(workload: Workload) -> Call:
        import flashinfer

        case, device = workload.case, "cuda"
        lens = torch.tensor([m for _, m in workload.lens], dtype=torch.int32)
        pages = (lens + case.block_size - 1) // case.block_size
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int().to(device)
        indices = torch.cat([torch.from_numpy(t) for t in workload.tables]).to(device)
        last = ((lens - 1) % case.block_size + 1).int().to(device)
        space = torch.empty(512 << 20, dtype=torch.uint8, device=device)
        cache = (workload.key_cache, workload.value_cache)
        shape = (case.num_heads, case.num_kv_heads, case.head_size)
        dtypes = {"q_data_type": workload.query.dtype, "kv_data_type": workload.cache.dtype}
        if kind == "decode":
            if any(q > 1 for q, _ in workload.lens):
                raise ValueError("takes one token a request")
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            decode.plan(indptr, indices, last, *shape, case.block_size, **dtypes)
            return lambda: decode.run(workload.query, cache)
        starts = workload.metadata.query_start_loc
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=kind)
        prefill.plan(starts, indptr, indices, last, *shape, case.block_size, causal=True, **dtypes)
        return lambda: prefill.run(workload.query, cache)

    return prepare


def peers() -> Iterator[tuple[str, Callable[[Workload], Call]]]:
    yield "torch FA2, dense", _sdpa(SDPBackend.FLASH_ATTENTION)
    yield "cuDNN, dense", _sdpa(SDPBackend.CUDNN_ATTENTION)
    yield "Flex, dense", _flex
    if imports.installed("flashinfer"):
        for kind in ("decode", "fa2", "fa3"):
            yield f"FlashInfer {kind}", _flashinfer(kind)


def against(case: Case, name: str, prepare: Callable[[Workload], Call], bench: TorchBench) -> dict[str, Any]:
    """A peer's row, or why there is none: whatever a peer raises is its answer to the row."""
    workload = Workload(case, "TRITON_ATTN", bench.device)
    try:
        call = prepare(workload)
        timing = bench.timed(call, lambda: None, lambda: None, lambda: _judge(workload, call))
    except Exception as refusal:
        return {"batch": case.batch, "backend": name, "refused": f"{type(refusal).__name__}: {str(refusal)[:200]}"}
    return judged(case, name, timing, bench).to_dict()


def _judge(workload: Workload, call: Call) -> float:
    workload.output.copy_(call().view_as(workload.output))
    return workload.error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = TorchBench()
    about = {**bench.about(), "date": datetime.date.today().isoformat()}
    print(about)
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for case in SUITE:
            row = judged(case, "TRITON_ATTN", bench.measure(case, "TRITON_ATTN"), bench)
            found.append(row.to_dict())
            print(row, flush=True)
            if case.kv_cache_dtype != "auto":
                continue
            for name, prepare in peers():
                row_of_peer = against(case, name, prepare, bench)
                found.append({**row_of_peer, "heads": case.heads, "head_size": case.head_size, "block_size": case.block_size})
                short = row_of_peer.get("refused") or f"{row_of_peer['ms']:.4f} ms, error {row_of_peer['error']:.1e}"
                print(f"    {name:18s} {short}"[:150], flush=True)
            torch.cuda.empty_cache()
            if args.json:
                with open(args.json, "w") as file:
                    json.dump({**about, "rows": found}, file, indent=1)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**about, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
