"""What a decode over a 4-bit cache would cost on a TPU, by libtpu's static estimate: bytes, and the time to compute.

    python -m benchmarks.kernels.tpu_four_bits --compilers .venv/compilers [--chip v6e]

Not a kernel of the library: one block of 1,024 keys (8 kv heads of 128, 8 rows each; a scale for each token and head, of keys
and of values), repeated by the grid, once for each way to store keys and values. Two 4-bit codes share a byte, a key's in the
low half and a value's in the high half, so that a block of bytes is two blocks of codes without moving a lane:

    codes       unsigned codes, which are float8 codes as they are: a float8_e4m3 without a sign and the exponent's upper bits
                is linear in its lowest four bits, in units of the smallest subnormal. An offset of 8 is subtracted from
                results, where it is one number for a row. Three operations for two registers of codes.
    fp4         float4_e2m1, moved to the places of float8_e4m3: nine operations for two registers.
    widened     int4, widened to bfloat16 in registers.
    int4        arrays of int4, as Mosaic widens them.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from typing import Any

HEADS, KEYS, SIZE, ROWS = 8, 1024, 128, 8
KINDS = ("bfloat16", "float8", "int8", "int4", "widened", "fp4", "codes")
#: 64 requests of 4,096 keys
BLOCKS = 64 * 4096 // KEYS


def launch(kind: str, chip: str, blocks: int) -> Any:
    """A program of `blocks` blocks, one after the other."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from attn.jax.kernels.tpu._refs import dot
    from attn.tools.aot.libtpu import PallasProgram

    float8 = jnp.float8_e4m3fn if chip == "v7x" else jnp.float8_e4m3b11fnuz  # what the matrix unit takes
    paired = kind in ("widened", "fp4", "codes")
    stored = {"bfloat16": jnp.bfloat16, "float8": float8, "int8": jnp.int8, "int4": jnp.int4}.get(kind, jnp.uint8)

    def halves(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = pltpu.bitcast(pairs, jnp.int32)
        if kind == "codes":
            low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
        elif kind == "fp4":
            low = ((words & 0x08080808) << 4) | ((words & 0x07070707) << 2)
            high = (words & jnp.int32(-0x7F7F7F80)) | ((words & 0x70707070) >> 2)
        else:
            low, high = (words & 0x0F0F0F0F) << 4, words & jnp.int32(-0x0F0F0F10)
        return pltpu.bitcast(low, float8), pltpu.bitcast(high, float8)

    def body(query: Any, *refs: Any) -> None:
        *cache, scales, out, total = refs

        @pl.when(pl.program_id(0) == 0)
        def _clear() -> None:
            out[...] = jnp.zeros(out.shape, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)

        waiting = None
        for head in range(HEADS):
            keys, values = halves(cache[0][0, head]) if paired else (ref[0, head] for ref in cache)
            if kind == "widened":
                keys, values = (pltpu.bitcast(x, jnp.int8) for x in (keys, values))
            if kind in ("widened", "int4", "int8"):
                keys, values = keys.astype(jnp.bfloat16), values.astype(jnp.bfloat16)
            s = dot(query[head], keys, 1, 1) * scales[0, 0, head : head + 1]
            if waiting is not None:
                out[head - 1] += dot(*waiting, 1, 0)
            p = jnp.exp2(s)
            total[head] += jnp.sum(p.reshape(ROWS, -1, 128), axis=1)
            waiting = (p * scales[0, 1, head : head + 1]).astype(jnp.bfloat16), values
        out[HEADS - 1] += dot(*waiting, 1, 0)  # type: ignore[misc]

    def call(*arrays: jax.Array) -> Any:
        rows = pl.BlockSpec((HEADS, ROWS, SIZE), lambda i: (0, 0, 0))
        of_cache = [pl.BlockSpec((1, HEADS, KEYS, SIZE), lambda i: (i, 0, 0, 0))] * (1 if paired else 2)
        return pl.pallas_call(
            body,
            grid=(blocks,),
            in_specs=[rows, *of_cache, pl.BlockSpec((1, 2, HEADS, KEYS), lambda i: (i, 0, 0, 0))],
            out_specs=[rows, rows],
            out_shape=[jax.ShapeDtypeStruct((HEADS, ROWS, SIZE), jnp.float32)] * 2,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=64 << 20),
            name="four_bits",
        )(*arrays)

    of_cache = [jax.ShapeDtypeStruct((blocks, HEADS, KEYS, SIZE), stored)] * (1 if paired else 2)
    scales = jax.ShapeDtypeStruct((blocks, 2, HEADS, KEYS), jnp.float32)
    arrays = [jax.ShapeDtypeStruct((HEADS, ROWS, SIZE), jnp.bfloat16), *of_cache, scales]
    bits = {"bfloat16": 16, "float8": 8, "int8": 8}.get(kind, 4)
    moved = BLOCKS * KEYS * HEADS * 2 * (SIZE * bits // 8 + (0 if kind == "bfloat16" else 4))
    return PallasProgram(call, arrays, [], (), 0, moved, "bfloat16")


def measure(kind: str, chip: str, dump: str) -> str:
    """The figures of 64 decodes of 4,096 keys, from the difference of two launches."""
    from attn.tools.aot import libtpu

    few, many = (libtpu.estimate_program(launch(kind, chip, blocks), chip, dump)[0] for blocks in (4, 12))
    us = (many["us"] - few["us"]) / 8 * BLOCKS
    return f"{kind}: computes {us:.0f} us, bytes {launch(kind, chip, 1).floors(chip)['hbm_us']:.0f} us, {many['spills']} spills"


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate decodes over 4-bit caches with libtpu.")
    parser.add_argument("--compilers", default=".venv/compilers", help="folder with libtpu (%(default)s)")
    parser.add_argument("--chip", default="v6e", choices=("v5e", "v6e", "v7x"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(measure(*ast.literal_eval(args.worker)))
    from attn.tools.aot import libtpu

    for kind in KINDS:
        with tempfile.TemporaryDirectory() as dump:
            path = os.pathsep.join(x for x in (args.compilers, os.environ.get("PYTHONPATH", "")) if x)
            env = {**os.environ, **libtpu.environment(args.chip, dump, estimate=True), "PYTHONPATH": path}
            command = [sys.executable, "-m", "benchmarks.kernels.tpu_four_bits", "--worker", repr((kind, args.chip, dump))]
            subprocess.run(command, env=env, check=True)


if __name__ == "__main__":
    main()
