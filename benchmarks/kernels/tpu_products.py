"""What the two products of a prompt's step take on a TPU when nothing else runs, by libtpu's static estimate.

    python -m benchmarks.kernels.tpu_products --compilers .venv/compilers [--chip v6e] [--size 512] ...

Not a kernel of the library: the step of `attn.jax.kernels.tpu._long` (scores of 256 keys by 512 rows, transposed; values times
weights, delayed by three score matrices), without masks, checks and copies, for one kind of work after another:

    products        both products, the scores rounded and used as weights
    exponentials    and an exponential of each score, without a sum or a factor
    step            and what a step does to a score: a factor, a reference, a sum

The cycles of a step are the difference of launches with six and with two of them in a loop.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from typing import Any

KEY_TILE, ROW_TILE, WAITING = 256, 512, 3
KINDS = ("products", "exponentials", "step")


def launch(kind: str, size: int, heads: int, rows: int, keys: int, key_tile: int, row_tile: int, steps: int) -> Any:
    """A program that processes `keys` keys for `rows` rows of each head, `steps` times."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from attn.jax.kernels.tpu._refs import dot
    from attn.tools.aot.libtpu import PallasProgram

    def body(factor: Any, query: Any, key: Any, value: Any, out: Any, total: Any) -> None:
        out[...] = jnp.zeros(out.shape, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)

        def step(n: Any, _: None) -> None:
            # the keys of each step are elsewhere, as in a cache, so that no product is of constants
            first, waiting = pl.multiple_of(lax.rem(n, 2) * keys, key_tile), []

            def add(head: int, at: slice, keys_at: Any, p: jax.Array) -> None:
                out[head, :, at] += dot(value[head, keys_at, :], p, 0, 0)

            for head in range(heads):
                for row in range(0, rows, row_tile):
                    for offset in range(0, keys, key_tile):
                        at, keys_at = slice(row, row + row_tile), pl.ds(first + offset, key_tile)
                        p = dot(key[head, keys_at, :], query[head, at, :], 1, 1)
                        if kind == "step":
                            p = jnp.exp2(p * factor[:1, at] - factor[1:2, at])
                            total[head, :, at] += jnp.sum(p, axis=0, keepdims=True)
                        elif kind == "exponentials":
                            p = jnp.exp2(p)
                        if len(waiting) * key_tile >= WAITING * KEY_TILE:
                            add(*waiting.pop(0))
                        waiting.append((head, at, keys_at, p.astype(query.dtype)))
            for one in waiting:
                add(*one)

        lax.fori_loop(0, steps, step, None)

    def call(*arrays: jax.Array) -> Any:
        shapes = [jax.ShapeDtypeStruct((heads, n, rows), jnp.float32) for n in (size, 8)]
        return pl.pallas_call(
            body, out_shape=shapes, compiler_params=pltpu.CompilerParams(vmem_limit_bytes=100 << 20), name="products"
        )(*arrays)

    arrays = [jax.ShapeDtypeStruct((8, rows), jnp.float32)]
    arrays += [jax.ShapeDtypeStruct((heads, n, size), jnp.bfloat16) for n in (rows, 2 * keys, 2 * keys)]
    return PallasProgram(call, arrays, [], (), 0, 0, "bfloat16")


def measure(chip: str, dump: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """Print the cycles of a step, and the least that the matrix unit needs at its peak."""
    from attn.tools.aot import libtpu

    size, heads, rows, keys, *_ = shape
    depth = 128 if chip == "v5e" else 256  # of a contraction in the matrix unit; values contract over keys
    peak = libtpu.CHIPS[chip].tflops * 1e12 / 2 / (libtpu.CHIPS[chip].ghz * 1e9)
    least = (size + -(-size // depth) * depth) * heads * rows * keys / peak
    for kind in kinds:
        few, many = (libtpu.estimate_program(launch(kind, *shape, steps), chip, dump)[0] for steps in (2, 6))
        cycles = (many["cycles"] - few["cycles"]) / 4
        print(f"{chip} {shape} {kind}: {cycles:.0f} cycles, {least:.0f} at the peak, {many['spills']} spills", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate a prompt's products alone with libtpu.")
    parser.add_argument("--compilers", default=".venv/compilers", help="folder with libtpu (%(default)s)")
    parser.add_argument("--chip", default="v6e", choices=("v5e", "v6e", "v7x"))
    parser.add_argument("--size", type=int, default=512, help="head size (%(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="kv heads of a step (%(default)s)")
    parser.add_argument("--rows", type=int, default=2048, help="rows of each (%(default)s)")
    parser.add_argument("--keys", type=int, default=1024, help="keys of a step (%(default)s)")
    parser.add_argument("--tile", type=int, nargs=2, default=(KEY_TILE, ROW_TILE), help="keys and rows of a score matrix")
    parser.add_argument("--kind", action="append", choices=KINDS, help="the kinds of work (all)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return measure(*ast.literal_eval(args.worker))
    from attn.tools.aot import libtpu

    shape = args.size, args.heads, args.rows, args.keys, *args.tile
    with tempfile.TemporaryDirectory() as dump:
        path = os.pathsep.join(x for x in (args.compilers, os.environ.get("PYTHONPATH", "")) if x)
        env = {**os.environ, **libtpu.environment(args.chip, dump, estimate=True), "PYTHONPATH": path}
        spec = repr((args.chip, dump, shape, tuple(args.kind or KINDS)))
        subprocess.run([sys.executable, "-m", "benchmarks.kernels.tpu_products", "--worker", spec], env=env, check=True)


if __name__ == "__main__":
    main()
