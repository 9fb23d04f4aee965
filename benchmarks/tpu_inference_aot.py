"""Compile calls of tpu-inference's attention for TPUs that are not present, and estimate them: `attn` beside its own kernels.

    python benchmarks/tpu_inference_aot.py --record FILE.json

The environment is that of `benchmarks/tpu_inference_cpu.py`, with libtpu. Method and rows are those of
`benchmarks/pallas.py`: a process for each figure, the batch's scalars as constants, libtpu's static simulator. `attn` is called
as the engine calls it, so that the longest query is not known. A step of two layers through the engine's `attention`, with its
mesh and donated caches, is compiled as well: its caches must be updated in place, without a copy of their size.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, COLUMNS = 128, 256
#: rows of `benchmarks.pallas`, and the kernels of tpu-inference that serve them
ROWS = {
    "decode 64 x 4k": ("rpa_v3", "batched_rpa", "stacked_rpa"),
    "decode 64 x 4k, window 1,024": ("rpa_v3", "batched_rpa", "stacked_rpa"),
    "decode 64 x 4k, e4m3": ("rpa_v3", "batched_rpa", "stacked_rpa"),
    "decode 64 x 4k, D 64, sinks": ("rpa_v3_hd64", "stacked_rpa"),
    "prefill 2k at 8k, 8/1 heads": ("rpa_v3", "batched_rpa", "stacked_rpa"),
}
CHIPS = ("v6e", "v7x")
_KERNELS = "tpu_inference.kernels"
MODULES = {
    "rpa_v3": f"{_KERNELS}.ragged_paged_attention.v3.kernel",
    "rpa_v3_hd64": f"{_KERNELS}.ragged_paged_attention.v3.kernel_hd64",
    "batched_rpa": f"{_KERNELS}.experimental.batched_rpa.wrapper",
    "stacked_rpa": f"{_KERNELS}.experimental.stacked_rpa.wrapper",
}


def estimate(row: Any, chip: str, kernel: str, dump: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from attn.tools.aot import libtpu as _libtpu

    (query_lens, seq_lens), (heads, kv_heads, size) = row.lens, row.heads
    tokens, stored = -(-sum(query_lens) // 8) * 8, jnp.dtype(row.stored)
    pages = sum(-(-n // PAGE) for n in seq_lens) + 8
    decodes = sum(n == 1 for n in query_lens)
    known = [
        seq_lens, np.zeros(len(seq_lens) * COLUMNS), np.concatenate([[0], np.cumsum(query_lens)]),
        [decodes, decodes, len(query_lens)],
    ]  # fmt: skip
    scales = {"k_scale": 1.0, "v_scale": 1.0} if stored.itemsize == 1 else {"k_scale": None, "v_scale": None}
    on = jax.sharding.use_abstract_mesh
    abstract = _libtpu._mesh(chip).abstract_mesh
    with on(abstract):
        if kernel == "attn":
            ours = importlib.import_module("attn.integrations._tpu_inference")
            pallas = importlib.import_module("attn.jax.backends.pallas")
            pallas._attend = pallas._attend.__wrapped__  # without its jit, so that constants stay constants
            shape = ours.AttnKernels().get_kv_cache_shape(pages, PAGE, kv_heads, size, stored)
        else:
            module = importlib.import_module(MODULES[kernel])
            for found in [module, *(m for n, m in sys.modules.items() if n.startswith(_KERNELS))]:
                for asked, answer in (("get_tpu_version", int(chip[1])), ("get_device_name", f"TPU {chip}"[:6])):
                    if hasattr(found, asked):
                        setattr(found, asked, lambda *args, answer=answer: answer)
            shape = module.get_kv_cache_shape(pages, PAGE, kv_heads, size, stored)
    arrays = [
        jax.ShapeDtypeStruct((tokens, heads, size), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((tokens, kv_heads, size), stored)] * 2,
        jax.ShapeDtypeStruct(shape, stored),
        *([jax.ShapeDtypeStruct((heads,), jnp.float32)] if row.sinks else []),
    ]

    def call(q: Any, k: Any, v: Any, cache: Any, *rest: Any) -> Any:
        sinks, batch = (rest[:1], rest[1:]) if row.sinks else ((), rest)
        with on(abstract):
            if kernel == "attn":
                return ours._local(
                    q, k, v, cache, *batch, *sinks, scale=size**-0.5, window=row.window, soft_cap=None, shares=False,
                    causal=True, **{name: scale or 1.0 for name, scale in scales.items()},
                )  # fmt: skip
            name = "ragged_paged_attention_hd64" if kernel == "rpa_v3_hd64" else "ragged_paged_attention"
            function = getattr(module, name)
            function = getattr(function, "__wrapped__", function)
            return function(q, k, v, cache, *batch, *sinks, sm_scale=size**-0.5, sliding_window=row.window, **scales)

    program = _libtpu.PallasProgram(call, arrays, [np.asarray(x, np.int32) for x in known], (3,), 0, 0, "bfloat16")
    copies = chip != "v7x" or kernel != "attn"
    parts = _libtpu.estimate_program(program, chip, dump, copies)
    us, limit = (
        sum(part["us"] for part in parts),
        importlib.import_module("benchmarks.estimates.programs").floors(row, chip, PAGE),
    )
    if us < max(limit["mxu_us"], limit["hbm_us"] / 4):  # as in `benchmarks.pallas`
        least = f"{limit['mxu_us']:.0f} us of products, {limit['hbm_us']:.0f} of bytes"
        raise RuntimeError(f"{us:.1f} us for {least}: the simulator missed a loop")
    return {
        "us": round(us, 1),
        "launches": [part["name"] for part in parts],
        "spills": sum(part["spills"] for part in parts),
        "vmem_mib": round(max(part["vmem"] for part in parts) / 2**20, 1),
        "copies": copies,
    }


def step(chip: str) -> dict[str, Any]:
    """Compile two layers in one step through the engine's call, heads over two devices, caches donated."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from tpu_inference.layers.common.attention_interface import attention
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata
    from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh

    from attn.integrations import tpu_inference as integration
    from attn.tools.aot import libtpu as _libtpu

    backend = integration.create()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=_libtpu.CHIPS[chip].topology).devices[:2]
    mesh = Mesh(np.array(devices).reshape(1, 2), ("data", "model"))

    def shape(extents: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        return jax.ShapeDtypeStruct(extents, dtype, sharding=NamedSharding(mesh, P(*axes)))

    found = {}
    for what, size, stored in (("D 128", 128, jnp.bfloat16), ("D 64", 64, jnp.bfloat16), ("e4m3", 128, jnp.float8_e4m3fn)):
        extents = get_kv_cache_shape_with_mesh(mesh, 512, PAGE, 8, size, jnp.dtype(stored), attention_backend=backend)
        cache = shape(extents, stored, "data", None, "model")
        batch = AttentionMetadata(
            input_positions=shape((64,), jnp.int32),
            block_tables=shape((64 * 32,), jnp.int32, "data"),
            seq_lens=shape((64,), jnp.int32, "data"),
            query_start_loc=shape((65,), jnp.int32, "data"),
            request_distribution=shape((3,), jnp.int32, "data"),
        )
        scales = {"k_scale": 1.0, "v_scale": 1.0} if jnp.dtype(stored).itemsize == 1 else {}

        def two(caches: Any, q: Any, kv: Any, batch: Any, scales: Any = scales) -> Any:
            made = []
            for cache in caches:
                cache, q = attention(cache, q, kv, kv, batch, mesh, attention_backend=backend, **scales)
                made.append(cache)
            return made, q

        arrays = shape((256, 32, size), jnp.bfloat16, None, "model"), shape((256, 8, size), stored, None, "model")
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(two, donate_argnums=0).lower([cache] * 2, *arrays, batch).compile()
        text = compiled.as_text()
        local = ",".join(map(str, (extents[0], extents[1], extents[2] // 2, *extents[3:])))
        copies = [
            line.strip() for line in text.splitlines() if re.search(rf"= \w+\[{local}\]\S* (copy|transpose|fusion)\(", line)
        ]
        found[what] = {
            "aliased": len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])),
            "copies": copies,
            "cache_mib": round(np.prod(extents) * jnp.dtype(stored).itemsize / 2**20 / 2, 1),
            "temporaries_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        }
    return found


def separately(*spec: str) -> dict[str, Any]:
    """Run `estimate` or `step` in a process with libtpu's environment."""
    from attn.tools.aot import libtpu as _libtpu

    chip = spec[0]
    with tempfile.TemporaryDirectory() as dump:
        env = {**os.environ, **_libtpu.environment(chip, dump, estimate=len(spec) > 1), "ATTN_BACKEND": "PALLAS"}
        command = [sys.executable, __file__, "--worker", json.dumps([*spec, dump])]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        except subprocess.TimeoutExpired:
            return {"error": "not done within 600 s"}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    made: dict[str, Any] = json.loads(results[-1][7:]) if results else {"error": f"exit {done.returncode}: {last[:300]}"}
    return {**made, "seconds": round(time.monotonic() - begin)}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--record", type=Path, help="write the figures as JSON; figures that it contains are not measured again"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.worker:
        chip, *rest, dump = json.loads(args.worker)
        if rest:
            launches = importlib.import_module("benchmarks.estimates.launches")
            (row,) = [row for row in launches.ROWS if row.name == rest[0]]
            made = estimate(row, chip, rest[1], dump)
        else:
            made = step(chip)
        print("RESULT " + json.dumps(made), flush=True)
        return 0
    found: dict[str, Any] = json.loads(args.record.read_text()) if args.record and args.record.exists() else {}
    specs = [(chip,) for chip in CHIPS] + [
        (chip, row, kernel) for row in ROWS for kernel in ("attn", *ROWS[row]) for chip in CHIPS
    ]
    for spec in specs:
        key = " | ".join(spec)
        if key not in found:
            found[key] = separately(*spec)
            if args.record:
                args.record.write_text(json.dumps(found, indent=1) + "\n")
        print(key, found[key], flush=True)
    return (
        1
        if any(
            "error" in found[chip] or any(x["copies"] for x in found[chip].values() if isinstance(x, dict)) for chip in CHIPS
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
