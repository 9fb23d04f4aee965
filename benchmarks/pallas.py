"""Compare our TPU kernels with peers by libtpu's static estimate: benchmarks/results/pallas.json, and its table in pallas.md.

    python -m benchmarks.pallas --compilers .venv/compilers --peers FOLDER      measure missing rows, write the table
    python -m benchmarks.pallas --table                                         write the table only
    python -m benchmarks.pallas --compilers .venv/compilers --random N --seed S print rows drawn at random, which are not stored

FOLDER contains tpu-inference 0.32, unpacked (`pip download --no-deps tpu-inference==0.32.0`, then unzip); without it its
rows are omitted. Each row is compiled in a separate process, with the batch's scalars as constants, and stored in the JSON
under its name, so that a run can be stopped and resumed; our rows are repeated when the kernels' sources have changed. The
method is that of `attn aot`; `attn.tools.aot.libtpu` explains what an estimate means.

Floors: HBM and MXU as in `attn aot`. For prompts also those of the softmax, per score: one exponential (EUP, one slot),
three vector operations (VALU: maximum, subtraction, sum; four slots), and, if keys are on lanes, two reductions across
lanes (XLU, two slots); 1,024 lanes per slot and cycle.
"""

import argparse
import ast
import functools
import hashlib
import importlib
import io
import json
import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import tokenize
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from attn.tools.bench import parse
from attn.tools.bench.sample import Sizes, sample
from attn.visibility import PLAIN, BatchMask, LayerMask

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/pallas.json"
TABLE = RESULTS.with_suffix(".md")
CHIPS = ("v6e", "v5e", "v7x")
PAGES = (128, 16, 64, 256)
OURS = "attn"


class Row(NamedTuple):
    """A kind of launch.

    batch: in the grammar of `attn bench`.
    heads: query heads, kv heads, head size.
    peers: names of the peers' kernels in this module.
    images: (size, every): that many of every so many new tokens are an image's, which see each other.
    goals: microseconds by (chip, page).
    parts: rows that launch some of the requests or heads separately, and how many of each make up the whole (below 0: are taken
        from it); their sum replaces the whole if that cannot be simulated.
    covered: tokens that a row of the block table covers.
    """

    name: str
    kind: str  # paged, latent, sparse (latent, of the best TOPK keys) or dense
    batch: str
    heads: tuple[int, int, int]
    peers: tuple[str, ...]
    pages: tuple[int, ...] = PAGES
    stored: str = "bfloat16"
    window: int | None = None
    chunk_size: int | None = None
    images: tuple[int, int] | None = None
    sinks: bool = False
    goals: dict[tuple[str, int], float] = {}
    parts: tuple[tuple[str, int], ...] = ()
    chips: tuple[str, ...] = CHIPS
    covered: int = 32768

    @property
    def mask(self) -> LayerMask:
        """What the rows of every request see."""
        return LayerMask(window=(self.window and self.window - 1, None), chunk_size=self.chunk_size)

    @property
    def seen(self) -> BatchMask:
        """What the batch lets its rows see besides."""
        from attn.tools.aot.tpu import images

        return BatchMask(spans=images(*self.lens, *self.images)) if self.images else PLAIN

    @property
    def lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(new tokens, tokens in the cache, new ones included) of the requests."""
        query_lens, seq_lens = zip(*parse(self.batch), strict=True)
        return query_lens, seq_lens


RPA, RPA64, JAX = "rpa_v3", "rpa_v3_hd64", "jax_rpa"
ROWS: tuple[Row, ...] = (
    Row("decode 64 x 4k", "paged", "64q1s4k", (32, 8, 128), (RPA, JAX), goals={("v6e", 128): 560}),
    Row(
        "mixed 63 + 1,985 at 4k",
        "paged",
        "63q1s4k_q1985s4k",
        (32, 8, 128),
        (RPA, JAX),
        goals={("v6e", 128): 700},
        parts=(("decode 63 x 4k", 1), ("prefill 1,985 at 4k, 8/2 heads", 4)),
    ),
    Row("decode 63 x 4k", "paged", "63q1s4k", (32, 8, 128), ()),
    Row("prefill 1,985 at 4k, 8/2 heads", "paged", "q1985s4k", (8, 2, 128), ()),
    Row(
        "prefill 2k at 8k",
        "paged",
        "q2ks8k",
        (32, 8, 128),
        (RPA,),
        goals={("v6e", 128): 500, ("v5e", 128): 1400},
        parts=(("prefill 2k at 8k, 8/2 heads", 4),),
    ),
    Row("prefill 2k at 8k, 8/2 heads", "paged", "q2ks8k", (8, 2, 128), ()),
    Row("decode 64 x 4k, D 64, sinks", "paged", "64q1s4k", (64, 8, 64), (RPA64,), sinks=True, goals={("v6e", 128): 320}),
    Row("decode 64 x 4k, D 64, sinks, window 128", "paged", "64q1s4k", (64, 8, 64), (RPA64,), (128,), window=128, sinks=True),
    Row(
        "prefill 2k at 8k, D 64, sinks",
        "paged",
        "q2ks8k",
        (64, 8, 64),
        (RPA64,),
        (128,),
        sinks=True,
        parts=(("prefill 2k at 8k, D 64, sinks, 8/1 heads", 8),),
    ),
    Row("prefill 2k at 8k, D 64, sinks, 8/1 heads", "paged", "q2ks8k", (8, 1, 64), (), (128,), sinks=True),
    Row("decode 64 x 4k, e4m3", "paged", "64q1s4k", (32, 8, 128), (RPA,), stored="float8_e4m3fn", goals={("v6e", 128): 330}),
    Row("decode 64 x 4k, int8", "paged", "64q1s4k", (32, 8, 128), (), (128,), stored="int8"),
    Row(
        "decode 64 x 4k, window 1,024", "paged", "64q1s4k", (32, 8, 128), (RPA,), (128,), window=1024, goals={("v6e", 128): 175}
    ),
    Row("decode 16 x 32k", "paged", "16q1s32k", (32, 8, 128), (RPA,)),
    Row(
        "prefill 2k at 8k, 64/8 heads",
        "paged",
        "q2ks8k",
        (64, 8, 128),
        (RPA,),
        (128,),
        parts=(("prefill 2k at 8k, 8/1 heads", 8),),
    ),
    Row("prefill 2k at 8k, 8/1 heads", "paged", "q2ks8k", (8, 1, 128), (RPA,), (128,)),
    Row("dense causal 2k", "dense", "q2k", (32, 8, 128), ("splash", "jax_flash", "tpuinf_flash"), (0,), goals={("v6e", 0): 75}),
    Row("dense causal 2k, with gradient", "dense_backward", "q2k", (32, 8, 128), (), (0,)),
    Row(
        "MLA decode 64 x 4k, 128 heads",
        "latent",
        "64q1s4k",
        (128, 1, 576),
        ("mla_v1", "mla_v2"),
        (128,),
        goals={("v6e", 128): 250},
    ),
    Row(
        "MLA decode 64 x 4k, 128 heads, e4m3",
        "latent",
        "64q1s4k",
        (128, 1, 576),
        ("mla_v1", "mla_v2"),
        (128,),
        stored="float8_e4m3fn",
    ),
    Row(
        "MLA sparse decode, 2,048 of 64 x 64k, 128 heads",
        "sparse",
        "64q1s64k",
        (128, 1, 576),
        (),
        (128,),
        chips=("v6e", "v5e"),
    ),
    # the batches of short requests and of tensor-parallel shards
    *(
        Row(name, "paged", batch, heads, (RPA,), (128,), covered=covered)
        for name, batch, heads, covered in (
            ("decode 128 x 60", "128q1s60", (32, 8, 128), 1024),
            ("decode 128 x 500", "128q1s500", (32, 8, 128), 1024),
            ("decode 63 x 500 and one of 30,000", "63q1s500_q1s30000", (32, 8, 128), 32768),
            ("16 prompts of 500", "16q500", (32, 8, 128), 2048),
            ("decode 48 of 100 to 7,996, 8/1 heads", "_".join(f"q1s{100 + 168 * n}" for n in range(48)), (8, 1, 128), 8192),
        )
    ),
    Row("prefill 4k, 8/2 heads", "paged", "q4k", (8, 2, 128), (), (128,), chips=("v6e",)),
    Row(
        "prefill 4k, images of 256 in 1,024, 8/2 heads",
        "paged",
        "q4k",
        (8, 2, 128),
        (),
        (128,),
        images=(256, 1024),
        chips=("v6e",),
    ),
    Row(
        "prefill 4k, images of 256 in 1,000, 8/2 heads",
        "paged",
        "q4k",
        (8, 2, 128),
        (),
        (128,),
        images=(256, 1000),
        chips=("v6e",),
    ),
    Row("prefill 4k at 14k, window 4,096, 8/2 heads", "paged", "q4ks14k", (8, 2, 128), (), (128,), window=4096, chips=("v6e",)),
    Row(
        "prefill 4k at 14k, chunks of 4,096, 8/2 heads",
        "paged",
        "q4ks14k",
        (8, 2, 128),
        (),
        (128,),
        chunk_size=4096,
        chips=("v6e",),
    ),
    # its time on a TPU is public: benchmarks/notes/tpu-paged.md
    Row(
        "decode 256 x 1,523, 8/4 heads of 256, window 1,024, e4m3",
        "paged",
        "256q1s1523",
        (8, 4, 256),
        (RPA,),
        (256,),
        stored="float8_e4m3fn",
        window=1024,
        chips=("v6e", "v7x"),
    ),
    Row("decode 64 x 16k, window 4,096", "paged", "64q1s16k", (32, 8, 128), (), (128,), window=4096, chips=("v6e",)),
    Row("decode 64 x 16k, chunks of 4,096", "paged", "64q1s16k", (32, 8, 128), (), (128,), chunk_size=4096, chips=("v6e",)),
)


#: Decodes whose whole v7x's simulator does not finish, or aborts on.
DIVIDED = ("64q1s4k", "128q1s500")


def _in_parts(row: Row) -> tuple[Row, ...]:
    """A row, and for many decodes two of four and of eight: the whole is four, and what four more take for every other four.
    v7x's simulator took more than 9 GiB for sixteen requests of 4,096 keys."""
    if row.kind != "paged" or row.batch not in DIVIDED:
        return (row,)
    number, keys = len(row.lens[0]), row.batch.partition("q")[2]
    four, eight = (
        row._replace(
            name=row.name.replace(f"{number} x", f"{n} x"),
            batch=f"{n}q{keys}",
            peers=(),
            pages=(128,),
            goals={},
            chips=("v7x",),
        )
        for n in (4, 8)
    )
    if row.window == 128:  # the simulator aborts on eight of them
        return row._replace(parts=((four.name, number // 4),)), four
    return row._replace(parts=((eight.name, number // 4 - 1), (four.name, 2 - number // 4))), four, eight


ROWS = tuple(part for row in ROWS for part in _in_parts(row))
#: The bounds of rows drawn at random: what the simulator follows within minutes.
DRAWN = Sizes(64, 8192, 512, 2048, 4096, ("32/8", "16/2", "8/1"), (64, 128, 256), "bfloat16", block_sizes=(16, 64, 128))
DRAWN_LATENT = replace(DRAWN, heads=("128", "64", "32", "16"), head_sizes=(576,))
#: Peers' figures from an earlier script with the same method, in microseconds, used until this script has measured a row.
#: None: the kernel does not compile with its default block sizes (VMEM).
TPU_MD: dict[tuple[str, str, int, str], float | None] = {
    ("decode 64 x 4k", "v5e", 128, RPA): 941, ("decode 64 x 4k", "v6e", 128, RPA): 565,
    ("decode 64 x 4k", "v7x", 128, RPA): 283,
    ("decode 64 x 4k", "v6e", 16, RPA): 605, ("decode 64 x 4k", "v6e", 64, RPA): 572, ("decode 64 x 4k", "v6e", 256, RPA): 562,
    ("decode 64 x 4k", "v5e", 128, JAX): 1363, ("decode 64 x 4k", "v6e", 128, JAX): 852,
    ("mixed 63 + 1,985 at 4k", "v5e", 128, RPA): 1745, ("mixed 63 + 1,985 at 4k", "v6e", 128, RPA): 1054,
    ("mixed 63 + 1,985 at 4k", "v7x", 128, RPA): None, ("mixed 63 + 1,985 at 4k", "v6e", 128, JAX): 1673,
    ("prefill 2k at 8k", "v5e", 128, RPA): 1664, ("prefill 2k at 8k", "v6e", 128, RPA): 1017,
    ("prefill 2k at 8k", "v7x", 128, RPA): None, ("prefill 2k at 8k, 64/8 heads", "v6e", 128, RPA): 2028,
    ("decode 64 x 4k, D 64, sinks", "v5e", 128, RPA64): 617, ("decode 64 x 4k, D 64, sinks", "v6e", 128, RPA64): 383,
    ("decode 64 x 4k, e4m3", "v6e", 128, RPA): 572, ("decode 64 x 4k, e4m3", "v7x", 128, RPA): 387,
    ("decode 64 x 4k, window 1,024", "v6e", 128, RPA): 566,
    ("dense causal 2k", "v5e", 0, "splash"): 196, ("dense causal 2k", "v6e", 0, "splash"): 104,
    ("dense causal 2k", "v5e", 0, "jax_flash"): 464, ("dense causal 2k", "v6e", 0, "jax_flash"): 275,
    ("dense causal 2k", "v5e", 0, "tpuinf_flash"): 674, ("dense causal 2k", "v6e", 0, "tpuinf_flash"): 478,
    ("MLA decode 64 x 4k, 128 heads", "v5e", 128, "mla_v1"): 935, ("MLA decode 64 x 4k, 128 heads", "v6e", 128, "mla_v1"): 450,
    ("MLA decode 64 x 4k, 128 heads", "v7x", 128, "mla_v1"): 379,
}  # fmt: skip
FROM_WHEEL = (RPA, RPA64, "tpuinf_flash", "mla_v1", "mla_v2")
TOPK = 2048  #: keys that a row of a sparse layer names


# --- one row, in a process ------------------------------------------------------------------------------------------


def measure(row: Row, chip: str, page: int, kernel: str, dump: str, peers: str) -> dict[str, Any]:
    """Return the estimate of a row; runs in a process with libtpu's environment."""
    from attn.tools.aot import libtpu as _libtpu
    from attn.tools.aot import tpu as aot

    own = kernel == OURS
    program = ours(row, chip, page) if own else peer(row, chip, page, kernel, peers)
    copies = not (own and chip in aot.KERNELS[OUR_KERNELS[row.kind]].no_copies)
    parts = _libtpu.estimate_program(program, chip, dump, copies)
    us, limit = sum(part["us"] for part in parts), floors(row, chip, page)
    # A saturated HBM is not simulated, so an estimate may be below that floor, by half if all loops were simulated.
    if us < max(limit["mxu_us"], limit["hbm_us"] / 4):
        least = f"{limit['mxu_us']:.0f} us of products, {limit['hbm_us']:.0f} of bytes"
        raise RuntimeError(f"{us:.1f} us for {least}: the simulator missed a loop")
    return {
        "us": round(sum(part["us"] for part in parts), 1),
        **{name: sum(part[name] for part in parts) for name in ("cycles", "spills", "bundles")},
        "vmem_mib": round(max(part["vmem"] for part in parts) / 2**20, 1),
        "smem_kib": round(max(part["smem"] for part in parts) / 2**10, 1),
        "copies": copies,
    }


OUR_KERNELS = {
    "paged": "ragged_paged_attention",
    "latent": "mla_attention",
    "sparse": "mla_sparse_attention",
    "dense": "flash_attention",
    "dense_backward": "flash_attention",
}


def ours(row: Row, chip: str, page: int) -> Any:
    from attn.tools.aot import tpu as aot

    query_lens, seq_lens = batch = row.lens
    heads, kv_heads, size = row.heads
    if row.kind == "latent":
        return aot.latent(chip, aot.Latent(*batch, heads, page, row.covered // page, stored=row.stored))
    if row.kind == "sparse":
        return aot.sparse(chip, aot.Sparse(*batch, heads, TOPK, page))
    if row.kind.startswith("dense"):
        lengths = (query_lens[0], seq_lens[0])
        shape = aot.Dense(lengths, (heads, kv_heads), (size, size), backward=row.kind == "dense_backward")
        return aot.dense(chip, shape)
    more = {"stored": row.stored, "mask": row.mask, "seen": row.seen, "sinks": row.sinks}
    return aot.ragged(chip, aot.Ragged(*batch, (heads, kv_heads), size, page, row.covered // page, **more))


def decodes_first(query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same requests in the order that the peers expect: a longer one before the last decode has one row for them."""
    query_lens, seq_lens = zip(*sorted(zip(query_lens, seq_lens, strict=True), key=lambda lens: lens[0] > 1), strict=True)
    return query_lens, seq_lens


def peer(row: Row, chip: str, page: int, kernel: str, wheel: str) -> Any:
    """Return a peer's program, with its own block sizes and cache layout."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from attn.tools.aot.libtpu import PallasProgram

    generation = int(chip[1])
    names = {5: "TPU v5e", 6: "TPU v6e", 7: "TPU v7"}
    if kernel in FROM_WHEEL:
        _without_vllm(wheel, names[generation])
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        if not hasattr(pltpu, "reciprocal"):  # its place before jax 0.11
            pltpu.reciprocal = pl.reciprocal
    (query_lens, seq_lens), (heads, kv_heads, size) = decodes_first(*row.lens), row.heads
    requests, tokens = len(query_lens), -(-sum(query_lens) // 8) * 8
    bf16, stored = jnp.dtype("bfloat16"), jnp.dtype(row.stored)

    def shape(*extents: int, dtype: Any = bf16) -> Any:
        return jax.ShapeDtypeStruct(extents, dtype)

    def program(call: Any, arrays: Sequence[Any], known: Sequence[Any] = (), donated: tuple[int, ...] = ()) -> Any:
        return PallasProgram(call, arrays, [np.asarray(x, np.int32) for x in known], donated, 0, 0, "bfloat16")

    scale = size**-0.5
    if row.kind == "dense":
        return program(*_dense_peer(kernel, chip, heads, kv_heads, size, query_lens[0], shape, scale))
    module = importlib.import_module(
        {
            RPA: "tpu_inference.kernels.ragged_paged_attention.v3.kernel",
            RPA64: "tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64",
            JAX: "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel",
            "mla_v1": "tpu_inference.kernels.mla.v1.kernel",
            "mla_v2": "tpu_inference.kernels.mla.v2.kernel",
        }[kernel]
    )
    for name in (module.__name__, *(n for n in sys.modules if "tuned_block_sizes" in n)):
        for asked, answer in (("get_tpu_version", generation), ("get_device_name", names[generation])):
            if hasattr(sys.modules[name], asked):
                setattr(sys.modules[name], asked, lambda *args, answer=answer: answer)
    function = module.mla_ragged_paged_attention if row.kind == "latent" else None
    function = function or getattr(module, "ragged_paged_attention_hd64" if kernel == RPA64 else "ragged_paged_attention")
    function = function.__wrapped__  # without its jit, so that constants stay constants
    pages = sum(-(-length // page) for length in seq_lens) + 8
    columns = row.covered // page
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    table = np.zeros((requests, columns), np.int32)
    decodes = sum(n == 1 for n in query_lens)
    # numbers of decodes, of decodes and chunks, and of all requests
    kinds = [decodes, decodes, requests]
    window = {"sliding_window": row.window}
    vmem = _vmem(chip)
    if kernel == JAX:
        more = {
            "vmem_limit_bytes": 60 << 20,
            "num_kv_pages_per_block": max(1, 2048 // page),
            "num_queries_per_block": min(32, tokens),
        }
        arrays = [shape(tokens, heads, size), shape(pages, page, 2 * kv_heads, size)]
        known = [seq_lens, table, starts, [requests]]
        return program(lambda *a: function(*a, sm_scale=scale, **window, **more), arrays, known)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if stored.itemsize == 1 else {}
    new_latent = [shape(tokens, 512, dtype=stored), shape(tokens, 64, dtype=stored)]
    if kernel == "mla_v1":
        more = {"num_kv_pages_per_block": max(1, 1024 // page), "num_queries_per_block": 4, **scales}
        limit = (100 if chip != "v7x" else 60) << 20
        cache = module.get_kv_cache_shape(pages, page, 640, stored)
        arrays = [shape(tokens, heads, 512), shape(tokens, heads, 64), *new_latent, shape(*cache, dtype=stored)]
        known = [seq_lens, table.ravel(), starts, kinds]
        return program(lambda *a: function(*a, sm_scale=0.1, vmem_limit_bytes=limit, **more), arrays, known)
    if kernel == "mla_v2":
        # as in its layer: heads first, 32 tokens per packed row, and get_tuned_params of shapes that are in no table
        more = {"num_kv_pages_per_block": (3, 1, 1), "num_queries_per_block": (1, 16, 16), "decode_batch_size": 4}
        more |= scales
        module.xpose_pipeline = _refused  # jnp.transpose instead: layout changes are outside the launch, as for all kernels
        cache = module.get_kv_cache_shape(pages, page, 640, stored, 32)
        arrays = [shape(heads, tokens, 512), shape(tokens, heads, 64), *new_latent, shape(*cache, dtype=stored)]
        known = [seq_lens, table.ravel(), starts, kinds]
        return program(lambda *a: function(*a, sm_scale=0.1, vmem_limit_bytes=60 << 20, **more), arrays, known)
    new = shape(tokens, kv_heads, size, dtype=stored)
    cache = shape(*module.get_kv_cache_shape(pages, page, kv_heads, size, stored), dtype=stored)
    arrays = [shape(tokens, heads, size), new, new, cache, *([shape(heads, dtype=jnp.float32)] if kernel == RPA64 else [])]
    known = [seq_lens, table.ravel(), starts, kinds]

    def call(query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> Any:
        sinks, rest = (rest[:1], rest[1:]) if kernel == RPA64 else ((), rest)
        return function(query, key, value, cache, *rest, *sinks, sm_scale=scale, vmem_limit_bytes=vmem, **window, **scales)

    return program(call, arrays, known)


def _dense_peer(
    kernel: str, chip: str, heads: int, kv_heads: int, size: int, rows: int, shape: Any, scale: float
) -> tuple[Any, Any]:
    import jax

    from attn.tools.aot import libtpu as _libtpu

    if kernel == "splash":
        base = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
        splash, masks = importlib.import_module(base + "kernel"), importlib.import_module(base + "mask")
        mask = masks.MultiHeadMask([masks.CausalMask((rows, rows)) for _ in range(heads // kv_heads)])
        sizes = splash.BlockSizes(block_q=512, block_kv=1024, block_kv_compute=512)

        def call(q: Any, k: Any, v: Any) -> Any:
            one = splash.make_splash_mqa_single_device(mask, block_sizes=sizes)
            with jax.disable_jit():  # trace each of them: vmap or jit's cache would result in one launch
                return [one(q[i], k[i], v[i]) for i in range(kv_heads)]

        return call, [shape(kv_heads, heads // kv_heads, rows, size), *[shape(kv_heads, rows, size)] * 2]
    path = {
        "jax_flash": "jax.experimental.pallas.ops.tpu.flash_attention",
        "tpuinf_flash": "tpu_inference.kernels.flash_attention.kernel",
    }
    module = importlib.import_module(path[kernel])
    sizes = {}
    if kernel == "jax_flash":  # its default, 128 for all, takes nine times as long
        sizes = {"block_sizes": module.BlockSizes(block_q=512, block_k_major=1024, block_k=512, block_b=1)}

    def dense(q: Any, k: Any, v: Any) -> Any:
        with jax.sharding.use_abstract_mesh(_libtpu._mesh(chip).abstract_mesh):  # one peer queries the type of TPU
            return module.flash_attention(q, k, v, causal=True, sm_scale=scale, **sizes)

    return dense, [shape(1, heads, rows, size)] * 3


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("not measured")


def _vmem(chip: str) -> int:
    """Return the chip's properties, which the peers query from pallas."""
    import jax
    from jax.experimental.pallas import tpu as pltpu

    from attn.tools.aot import libtpu as _libtpu

    with jax.sharding.use_abstract_mesh(_libtpu._mesh(chip).abstract_mesh):
        return int(pltpu.get_tpu_info().vmem_capacity_bytes)


def _without_vllm(wheel: str, device: str) -> None:
    """Make tpu_inference's kernels importable without its package, which imports vLLM: provide the four helpers they use."""
    from jax._src import dtypes as jax_dtypes

    class Logger(logging.Logger):
        def info_once(self, *args: Any) -> None: ...

        warning_once = debug_once = info_once

    class Unset(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    package = types.ModuleType("tpu_inference")
    package.__path__ = [str(Path(wheel) / "tpu_inference")]
    log, envs, utils = (
        types.ModuleType("tpu_inference.logger"),
        Unset("tpu_inference.envs"),
        types.ModuleType("tpu_inference.utils"),
    )
    log.init_logger = Logger  # type: ignore[attr-defined]
    vars(utils).update(
        align_to=lambda x, a: -(-x // a) * a, get_device_name=lambda *args: device, TPU_HEAD_SIZE_ALIGNMENT=128,
        get_dtype_packing=lambda dtype: 32 // jax_dtypes.itemsize_bits(dtype),
    )  # fmt: skip
    package.envs = envs  # type: ignore[attr-defined]
    for module in (package, log, envs, utils):
        sys.modules[module.__name__] = module


# --- all rows -------------------------------------------------------------------------------------------------------


#: A row, a chip, a page, a kernel.
Job = tuple[Row, str, int, str]


def wanted(peers: bool) -> Iterator[Job]:
    """Yield everything to measure, the most important first: page 128 on every chip, then the other pages."""
    for rank in range(len(PAGES)):
        for row in ROWS:
            if rank < len(row.pages):
                for chip in row.chips:
                    yield row, chip, row.pages[rank], OURS
    if peers:
        for rank in range(len(PAGES)):
            for row in ROWS:
                if rank < len(row.pages):
                    for chip in row.chips:
                        for kernel in row.peers:
                            yield row, chip, row.pages[rank], kernel


def drawn(count: int, seed: int, with_peers: bool) -> Iterator[Job]:
    """Yield `count` rows drawn at random, on every chip: a third latent, half of each kind over e4m3."""
    latent, paged = sample(count, seed, DRAWN_LATENT, mla=True), sample(count, seed, DRAWN)
    for number in range(count):
        is_latent, stored = number % 3 == 2, ("bfloat16", "float8_e4m3fn")[number % 2]
        case = (latent if is_latent else paged)[number]
        peers = ("mla_v1", "mla_v2") if is_latent else (RPA64,) if case.head_size == 64 else (RPA,)
        heads = case.num_heads, case.num_kv_heads, case.head_size
        kind, sinks = "latent" if is_latent else "paged", case.head_size == 64
        row = Row(f"{case}, {stored}", kind, case.batch, heads, peers, (case.block_size,), stored, sinks=sinks)
        for chip in CHIPS:
            for kernel in (OURS, *(peers if with_peers else ())):
                yield row, chip, case.block_size, kernel


def key_of(row: Row, chip: str, page: int, kernel: str) -> str:
    return f"{row.name} | {chip} | {page} | {kernel}"


@functools.cache
def source(kind: str) -> str:
    """Return a digest of our kernel's code without comments and docstrings: all files except those of the other kernels."""
    own = {"latent": "mla", "sparse": "mla_sparse", "dense": "flash", "dense_backward": "flash"}.get(kind, "ragged")
    of_ragged = () if own == "ragged" else ("_kernel.py", "_single", "_long", "_line")

    def is_used(name: str) -> bool:
        kernel = next((word for word in ("mla_sparse", "mla", "flash", "ragged") if word in name), None)
        return kernel == own if kernel else not any(word in name for word in of_ragged)

    kept = [path for path in sorted((ROOT / "attn/jax/kernels/tpu").glob("*.py")) if is_used(path.name)]
    return hashlib.sha256("\n".join(_code(path) for path in kept).encode()).hexdigest()[:12]


def _code(path: Path) -> str:
    """Return a module's lines without comments and docstrings, which do not affect its programs."""
    text = path.read_text(encoding="utf-8")
    lines: list[str] = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            for row in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def run_one(row: Row, chip: str, page: int, kernel: str, args: argparse.Namespace) -> dict[str, Any]:
    from attn.testing.processes import last_words, one_line
    from attn.tools.aot import libtpu as _libtpu

    with tempfile.TemporaryDirectory() as dump:
        path = os.pathsep.join(x for x in (args.compilers, str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
        env = {**os.environ, **_libtpu.environment(chip, dump, estimate=True), "PYTHONPATH": path}
        spec = repr((row._asdict(), chip, page, kernel, dump, args.peers, args.memory))
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


def measured(jobs: Sequence[Job], args: argparse.Namespace) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its outcome as it completes, except those that would start after the budget."""
    begin = time.monotonic()

    def run(job: Job) -> dict[str, Any] | None:
        return None if time.monotonic() - begin > args.budget else run_one(*job, args)

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(running):
            if (made := future.result()) is not None:
                yield running[future], made


def work(spec: str) -> None:
    fields, chip, page, kernel, dump, peers, memory = ast.literal_eval(spec)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
    try:
        made = measure(Row(**fields), chip, page, kernel, dump, peers)
    except Exception as error:  # the table shows the compiler's errors
        made = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(made), flush=True)


def floors(row: Row, chip: str, page: int) -> dict[str, float]:
    """Return the microseconds required by each of the chip's limits; those of the softmax for prompts only."""
    from attn.tools.aot import libtpu as _libtpu
    from attn.tools.aot import tpu as aot

    program = ours(row, chip, page or 128)
    found = program.floors(chip)
    batch = row.lens
    if max(batch[0]) > 1:
        flops, _ = aot.cost(*batch, num_heads=row.heads[0], head_size=1, mask=row.mask, seen=row.seen)
        bundles = flops / 4 / 1024  # registers of scores
        cycle = 1e-3 / _libtpu.CHIPS[chip].ghz
        found |= {"eup_us": bundles * cycle, "valu_us": bundles * 3 / 4 * cycle, "xlu_us": bundles * 2 / 2 * cycle}
    return found


def table(rows: dict[str, Any]) -> str:
    """Return a Markdown table: one line for each launch, chip and page for which our kernel has a row."""
    head = (
        "launch", "chip", "page", "goal", "ours us", "spills", "HBM", "MXU", "VALU", "EUP", "XLU", "peers us (spills)",
        "best peer / ours",
    )  # fmt: skip
    lines = [" | ".join(("", *head, "")).strip(), "|" + "---|" * len(head)]
    for row in ROWS:
        for chip in row.chips:
            for page in sorted(row.pages):
                own = rows.get(key_of(row, chip, page, OURS))
                if own is None:
                    continue
                peers, best = [], math.inf
                limit = floors(row, chip, page)
                for kernel in row.peers:
                    text, us = _peer_cell(rows, row, chip, page, kernel, limit)
                    peers += [text] if text else []
                    best = min(best, us)
                us = own.get("us")
                shown = f"{bounded(us, limit)}{'' if own['copies'] else ' (a)'}" if us else f"none: {own['error'][:60]}"
                if us is None and (us := _by_parts(rows, row, chip, page)):
                    shown = f"{bounded(us, limit)} (a, c)"
                goal = row.goals.get((chip, page))
                cells = [
                    f"{limit[name]:.0f}" if name in limit else ""
                    for name in ("hbm_us", "mxu_us", "valu_us", "eup_us", "xlu_us")
                ]
                outcome = f"{goal:g} {'met' if us and us <= goal else 'missed'}" if goal else ""
                shown += "" if own["source"] == source(row.kind) else " (d)"
                least = limit["hbm_us"]
                ratio = f"{max(best, least) / max(us, least):.2f}" if us and best < math.inf else ""
                lines.append(
                    f"| {row.name} | {chip} | {page or '–'} | {outcome} | {shown} | {own.get('spills', '')} | "
                    + " | ".join(cells) + f" | {'; '.join(peers)} | {ratio} |"
                )  # fmt: skip
    low, high = _parts_per_whole(rows)
    lines += [
        "",
        "us by libtpu's static estimate, without a TPU; HBM to XLU are floors. The simulator does not saturate HBM: where its",
        "time is less than that of the bytes, the floor is printed, with the simulated time after `sim`; goals are for the",
        "latter. (a) compute time without copies, which the v7x simulator does not support. (b) by an earlier script. (c) the",
        "sum of separate launches of its decodes and its chunk, or of shards of its heads (rows of this table), because the",
        f"simulator does not finish the whole; where both are known the sum is {low:.2f} to {high:.2f} times the whole. Of",
        "many decodes it is four, and what eight take beyond four for every other four, or as many times four.",
        "(d) of the kernel before its last change.",
    ]
    return "\n".join(lines)


def bounded(us: float, limit: dict[str, float]) -> str:
    """Return an estimate as text, or the floor of HBM with the simulated time, if that is less."""
    return f"{us:.0f}" if us >= limit["hbm_us"] else f"{limit['hbm_us']:.0f} (sim {us:.0f})"


def _by_parts(rows: dict[str, Any], row: Row, chip: str, page: int) -> float | None:
    """Return the total microseconds of a row's parts, or None if one is missing."""
    total = 0.0
    for name, times in row.parts:
        us = rows.get(key_of(row._replace(name=name), chip, page, OURS), {}).get("us")
        if us is None:
            return None
        total += times * us
    return total or None


def _parts_per_whole(rows: dict[str, Any]) -> tuple[float, float]:
    """Return the smallest and largest ratio of the sum of parts to the whole, where both are known; NaN if there is none."""
    found = []
    for row, chip, page, kernel in wanted(False):
        whole, parts = rows.get(key_of(row, chip, page, kernel), {}).get("us"), _by_parts(rows, row, chip, page)
        if whole and parts:
            found.append(parts / whole)
    return min(found, default=math.nan), max(found, default=math.nan)


def _peer_cell(rows: dict[str, Any], row: Row, chip: str, page: int, kernel: str, limit: dict[str, float]) -> tuple[str, float]:
    made = rows.get(key_of(row, chip, page, kernel))
    if made and "us" in made:
        return f"{kernel} {bounded(made['us'], limit)} ({made['spills']})", made["us"]
    known = TPU_MD.get((row.name, chip, page, kernel), 0)
    if known:
        return f"{kernel} {bounded(known, limit)} (b)", known
    if made or known is None:
        error = made["error"] if made else "VMEM overflow at its default block sizes (b)"
        return f"{kernel}: {error[:60]}", math.inf
    return "", math.inf


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
            missing.append(job)
    if missing and not Path(args.compilers, "libtpu").is_dir():
        parser.error(f"--compilers {args.compilers}: contains no libtpu; `make compilers` installs it in .venv/compilers")
    for job, made in measured(missing, args):
        key = key_of(*job)
        if args.random:
            shown = bounded(made["us"], floors(*job[:3])) if "us" in made else made["error"]
            print(f"{key}: {shown} us ({made['seconds']} s)", flush=True)
            continue
        made |= {"date": date.today().isoformat(), "jax": _version()}
        made |= {"source": source(job[0].kind)} if job[3] == OURS else {}
        print(f"{key}: {made.get('us', made.get('error'))} ({made.get('seconds')} s)", file=sys.stderr, flush=True)
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
