"""What launches of the paged kernels share: the chip and the interpreter, the limit on scalars, and the pallas_call."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu._chips import CHIPS, target
from attn.jax.kernels.tpu._plan import Plan


def device(chip: str | None, interpret: Any) -> tuple[str, Any]:
    """Return (the chip, how it is interpreted).

    For None: the TPU that is compiled for, without interpreting; without a TPU, a v5e in the interpreter.
    """
    if chip is None:
        chip = target()
    if interpret is None:
        interpret = pltpu.InterpretParams() if chip is None else False
    return chip or "v5e", interpret


def compiler_params(chip: str, *semantics: str) -> pltpu.CompilerParams:
    """One word per dimension of the grid; all of VMEM except a sixteenth, which is reserved for the compiler."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics,  # type: ignore[arg-type]
        vmem_limit_bytes=CHIPS[chip].vmem * 15 // 16,
        disable_bounds_checks=True,
    )


def scalars(plan: Plan, block_table: jax.Array, chip: str) -> dict[str, jax.Array]:
    """The arrays of a plan that are prefetched into SMEM, by name. Raises ValueError if they exceed the chip's SMEM."""
    found = {"items": plan.items, "tiles": plan.tiles, "counts": plan.counts, "table": plan.table}
    needed = 4 * sum(x.size for x in found.values())
    if needed > CHIPS[chip].smem:
        num_requests, columns = block_table.shape
        raise ValueError(
            f"block_table of {num_requests} requests x {columns} blocks and its plan take {needed} bytes of SMEM: {chip} has "
            f"{CHIPS[chip].smem}; use fewer requests a batch or a larger block_size"
        )
    return found


def paged(
    name: str,
    body: Callable[[dict[str, Any]], None],
    scalars: Mapping[str, jax.Array],
    arrays: Mapping[str, jax.Array],
    cache: jax.Array,
    made: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    spaces: Mapping[str, Any],
    *,
    chip: str,
    interpret: Any,
) -> dict[str, jax.Array]:
    """The pallas_call of a kernel that writes into `cache` in place: its results by name, including the cache.

    `body` receives the refs by name: of the scalars, the arrays, the results `made`, `cache` and the `scratch`. Arrays and
    results are in HBM unless `spaces` specifies another memory.
    """
    given = {**scalars, **arrays, "cache_in": cache}
    made = {**made, "cache": jax.ShapeDtypeStruct(cache.shape, cache.dtype)}
    names = [*given, *made, *scratch]

    def kernel(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        named.pop("cache_in")  # the same memory as `cache`
        body(named)

    def spec(name: str) -> pl.BlockSpec:
        return pl.BlockSpec(memory_space=spaces.get(name, pltpu.HBM))

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[*map(spec, arrays), spec("cache_in")],
            out_specs=[*map(spec, made)],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(made.values()),
        input_output_aliases={len(given) - 1: len(made) - 1},
        compiler_params=compiler_params(chip, "arbitrary"),
        interpret=interpret,
        name=name,
    )(*given.values())
    return dict(zip(made, results, strict=True))
