"""What an MLA prefill does beside attention in torch, counted from its plan: without a device, and without a clock.

    python -m benchmarks.mla_plan 63q1s4k_8q512s32k      named batches
    python -m benchmarks.mla_plan --random 6 --seed 77   those of `attn bench --mla --random 6 --seed 77` on a GPU of 80 GB

A line counts the requests of a batch that are expanded (more than 16 new tokens): their rows, their tokens of context, the
turns over the context, the rows that these turns attend and merge, the bytes of keys and values that they write, the bytes
that the merges read and write, and the operations. The last two columns are the operations if each request took the cheaper
form, absorbed or expanded, and how many of them would be absorbed.
"""

import argparse
from typing import Any

import numpy as np

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.dtypes import DTYPES
from attn.reports.machines import pairs
from attn.tables import Column, block, cells
from attn.tools.bench.case import NOPE, ROPE, VALUE, BenchCase, abbreviated, parse
from attn.tools.bench.sample import sample, sizes_of
from attn.torch.backends.mla import _mla
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder

COLUMNS = (
    Column("requests", key="requests"),
    Column("rows", key="rows", form=","),
    Column("context", key="context", form=","),
    Column("turns", key="turns"),
    Column("rows merged", key="merged", form=","),
    Column("GB written", key="written", form=".1f"),
    Column("GB merged", key="merging", form=".2f"),
    Column("TFLOP", key="tflop", form=".1f"),
    Column("cheaper", key="cheaper", form=".1f"),
    Column("absorbed", key="absorbed"),
)
_PAGE = 1 << 20  # one page per request: a plan depends on lengths only


def counted(case: BenchCase) -> dict[str, Any]:
    """Count the prefill of one batch in one layer, by the columns' keys; empty if every request is a decode."""
    lens = np.array(parse(case.batch))
    tables = [[r] for r in range(len(lens))]
    batch = CommonAttentionMetadata.from_lens(*lens.T.tolist(), tables, _PAGE)
    spec = KVCacheSpec(_PAGE, 1, case.head_size, case.dtype)
    prefill = MLACommonMetadataBuilder(spec).build(0, batch).prefill
    if prefill is None:
        return {}
    size, heads, rank = DTYPES[case.dtype].itemsize, case.num_heads, case.kv_lora_rank
    per_token = heads * (NOPE + ROPE + VALUE) * size
    plan = prefill.plan(_mla._WORKSPACE // per_token)
    merged, context = sum(turn.rows.stop - turn.rows.start for turn in plan.turns), int(prefill.context_lens.sum())
    state = size if plan.once else max(4, size)  # bytes of an element of the merged output
    forms = []
    for n, c in zip(prefill.query_lens.tolist(), prefill.context_lens.tolist(), strict=True):
        seen, projection = pairs(n, n + c, n + c), rank * (NOPE + VALUE)
        expanded = (NOPE + ROPE + VALUE) * seen + projection * (n + c)
        forms.append((2 * heads * expanded, 2 * heads * ((case.head_size + rank) * seen + projection * n)))
    return {
        "requests": len(forms),
        "rows": prefill.num_tokens,
        "context": context,
        "turns": len(plan.turns),
        "merged": merged,
        "written": per_token * context / 1e9,
        "merging": merged * heads * (VALUE * (2 * state + size) + 3 * 4) / 1e9,
        "tflop": sum(expanded for expanded, _ in forms) / 1e12,
        "cheaper": sum(map(min, forms)) / 1e12,
        "absorbed": sum(absorbed < expanded for expanded, absorbed in forms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", metavar="BATCH")
    parser.add_argument("--heads", help="query heads (default: 128)")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fixed = {} if args.heads is None else {"heads": args.heads}
    cases = [BenchCase.latent(batch, **fixed) for batch in args.batches]
    cases += sample(args.random, args.seed, sizes_of([80 << 30], mla=True), mla=True, **fixed)
    lines = [["batch", "heads", *(column.name for column in COLUMNS)]]
    lines += [[abbreviated(case.batch), case.heads, *cells(counted(case), COLUMNS)] for case in cases]
    print("\n".join(block(lines, numbers=range(1, len(lines[0])))))


if __name__ == "__main__":
    main()
