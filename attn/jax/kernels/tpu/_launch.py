"""The launch of a paged kernel: the device, buffers, the limit on scalars, and the pallas_call."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attn.jax.kernels.tpu._chips import chip_of, target
from attn.jax.kernels.tpu._plan import Plan
from attn.jax.kernels.tpu._refs import PagedConfig, block_shape


class TpuDevice(NamedTuple):
    """A chip, and how it is interpreted: False or `pltpu.InterpretParams`."""

    chip: str
    interpret: Any


def device(chip: str | None, interpret: Any) -> TpuDevice:
    """For None: the TPU that is compiled for, without interpreting; without a TPU, a v5e in the interpreter."""
    if chip is None:
        chip = target()
    if interpret is None:
        interpret = pltpu.InterpretParams() if chip is None else False
    return TpuDevice(chip or "v5e", interpret)


def compiler_params(chip: str, *semantics: str) -> pltpu.CompilerParams:
    """One word per dimension of the grid; all of VMEM except a sixteenth, which is reserved for the compiler."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics,  # type: ignore[arg-type]
        vmem_limit_bytes=chip_of(chip).vmem * 15 // 16,
        disable_bounds_checks=True,
    )


class Buffers(NamedTuple):
    """What a launch allocates, by the names of the kernel's refs."""

    scratch: dict[str, Any]
    results: dict[str, jax.ShapeDtypeStruct]
    spaces: dict[str, Any] = {}  #: the memories of arrays that are not in HBM


def page_buffers(cfg: PagedConfig, stored: Any) -> dict[str, Any]:
    """The scratch of `_pages.attend`, for a cache of dtype `stored`."""
    return {
        "kv": pltpu.VMEM((cfg.slots, cfg.planes, cfg.stored_heads, *block_shape(cfg)), stored),
        "kv_sem": pltpu.SemaphoreType.DMA((cfg.num_signals,)),
        "q_sem": pltpu.SemaphoreType.DMA((2,)),
        "o_sem": pltpu.SemaphoreType.DMA(()),
    }


def write_buffers(cfg: PagedConfig, stored: Any) -> dict[str, Any]:
    """The scratch of `_pages.writing`, if the launch writes."""
    if not cfg.write:
        return {}
    stage = pltpu.VMEM((cfg.ring, cfg.planes, cfg.stored_heads, cfg.tile, cfg.lanes), stored)
    ring = pltpu.SemaphoreType.DMA((cfg.ring,))
    scratch = {"old": stage, "new": stage, "read_sem": ring, "write_sem": ring}
    return scratch | ({"run_sem": pltpu.SemaphoreType.DMA(())} if cfg.num_runs else {})


def paged(
    body: Callable[[dict[str, Any]], None],
    cfg: PagedConfig,
    device: TpuDevice,
    plan: Plan,
    arrays: Mapping[str, jax.Array],
    cache: jax.Array,
    buffers: Buffers,
    name: str,
) -> dict[str, jax.Array]:
    """The pallas_call of a kernel that writes into `cache` in place: its results by name, including the cache.

    `body` receives the refs by name: of the plan, which is prefetched into SMEM, the arrays, the results, `cache` and the
    scratch. Raises ValueError if the plan exceeds the chip's SMEM.
    """
    scalars = {"items": plan.items, "tiles": plan.tiles, "counts": plan.counts, "table": plan.table}
    if plan.runs is not None:
        scalars["runs"] = plan.runs
    # One copy of all scalars: what the launch waits for before its first instruction comes at once.
    scalars |= {name: arrays[name] for name in arrays if buffers.spaces.get(name) == pltpu.SMEM}
    arrays = {name: x for name, x in arrays.items() if name not in scalars}
    # prefetched scalars stay in SMEM for the whole launch
    needed, chip = 4 * sum(x.size for x in scalars.values()), chip_of(device.chip)
    if needed > chip.smem:
        raise ValueError(
            f"block_table of {cfg.num_requests} requests x {cfg.columns} blocks and its plan take {needed} bytes of SMEM: "
            f"{device.chip} has {chip.smem}; use fewer requests a batch or a larger block_size"
        )
    # The cache is the last operand and the last result, which are one memory: where it is not donated, XLA copies it before.
    operands = {**scalars, **arrays, "cache_in": cache}
    out_shapes = {**buffers.results, "cache": jax.ShapeDtypeStruct(cache.shape, cache.dtype)}
    names = [*operands, *out_shapes, *buffers.scratch]

    def kernel(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        named.pop("cache_in")  # the same memory as `cache`
        body(named)

    def spec(name: str) -> pl.BlockSpec:
        return pl.BlockSpec(memory_space=buffers.spaces.get(name, pltpu.HBM))

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # one step: the kernel walks its lists itself, since their lengths are values
            grid=(1,),
            in_specs=[*map(spec, arrays), spec("cache_in")],
            out_specs=[*map(spec, out_shapes)],
            scratch_shapes=list(buffers.scratch.values()),
        ),
        out_shape=list(out_shapes.values()),
        input_output_aliases={len(operands) - 1: len(out_shapes) - 1},
        compiler_params=compiler_params(device.chip, "arbitrary"),
        interpret=device.interpret,
        name=name,
    )(*operands.values())
    return dict(zip(out_shapes, results, strict=True))
