"""The programs of a launch, ours and the peers', their floors and their estimates by libtpu, in a process with its environment.

Floors: HBM and MXU as in `attn aot`. For prompts also those of the softmax, per score: one exponential (EUP, one slot),
three vector operations (VALU: maximum, subtraction, sum; four slots), and, if keys are on lanes, two reductions across
lanes (XLU, two slots); 1,024 lanes per slot and cycle.
"""

import ast
import functools
import hashlib
import importlib
import io
import logging
import re
import sys
import tokenize
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimates.launches import JAX, MLA, OURS, RPA, RPA64, TOPK, Row

ROOT = Path(__file__).resolve().parents[2]
FROM_WHEEL = (RPA, RPA64, "tpuinf_flash", *MLA)


def measure(row: Row, chip: str, page: int, kernel: str, dump: str, program: Any) -> dict[str, Any]:
    """Return the estimate of a row's program; runs in a process with libtpu's environment."""
    from attn.tools.aot import libtpu as _libtpu
    from attn.tools.aot import tpu as aot

    copies = not (kernel == OURS and chip in aot.KERNELS[OUR_KERNELS[row.kind]].no_copies)
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


def program_digest(program: Any) -> str:
    """Return a digest of a program's kernels as JAX traces them: code that does not change it does not change their time.

    Scalars of the batch are constants of the trace, and names of variables follow from their order. The method and the versions
    of libtpu and JAX, which a figure depends on too, are not in it.
    """
    import jax
    import numpy as np

    from attn.tools.aot.libtpu import launches

    found = hashlib.sha256()
    for launch in launches(program.call, program.arrays, program.batch):
        traced = jax.make_jaxpr(launch.call)(*launch.operands)
        # neither addresses of functions nor lines of source belong to it
        texts = launch.name, launch.donated, launch.operands, re.sub(r"0x[0-9a-f]+| at \S+\.py:\d+", "", str(traced))
        maps = [str(block.index_map_jaxpr) for grid in _grids(traced.jaxpr) for block in grid.block_mappings]
        found.update(repr((texts, maps)).encode())
        for constant in traced.consts:
            found.update(np.asarray(constant).tobytes())
    return found.hexdigest()[:16]


def _grids(jaxpr: Any) -> Iterator[Any]:
    """Yield the grid of each `pallas_call` in a jaxpr, which its text shows without the maps of its blocks."""
    for equation in jaxpr.eqns:
        if "grid_mapping" in equation.params:
            yield equation.params["grid_mapping"]
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _grids(inner)


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
