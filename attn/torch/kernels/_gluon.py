"""Gluon, Triton's language for kernels that are scheduled by hand, under one set of names for Triton 3.6 and later.

Gluon is experimental, and releases rename what it has. `hopper_prefill` and `hopper_mla` import it from here: each name stands
for the newest one that the installed Triton has, because a removed name may stay as a function that only raises.

| here | 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| `barrier` | `thread_barrier` | `barrier` | `barrier` | `barrier` |
| `load_box` | `tma.async_copy_global_to_shared` | the same | `tma.async_load` | `tma.async_load` |
| `copy_rows` | `async_copy.async_copy_global_to_shared` | the same | `async_copy.async_load` | `async_copy.async_load` |
| `reinterpret` | `shared_memory_descriptor._reinterpret` | the same | the same | `shared_memory_descriptor.reinterpret` |

Where a module or one of these names is missing, the import fails; `lacking` finds what else is. `hopper` gives the reasons.
"""

import inspect
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor", "async_copy", "barrier", "copy_rows", "fence_async_shared", "gl", "gluon", "lacking", "load_box",
    "mbarrier", "reinterpret", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip


def _newest(module: Any, *names: str) -> Any:
    """The first of `names` that `module` has; AttributeError for the last one where it has none."""
    return getattr(module, next((name for name in names if hasattr(module, name)), names[-1]))


#: Synchronises the threads of a partition, their accesses to shared memory included.
barrier = _newest(gl, "barrier", "thread_barrier")
#: Copies one box of a tensor into shared memory by the bulk tensor engine.
load_box = _newest(tma, "async_load", "async_copy_global_to_shared")
#: Copies the elements that pointers name into shared memory, by the threads of a partition.
copy_rows = _newest(async_copy, "async_load", "async_copy_global_to_shared")
#: The same shared memory under another dtype, shape and layout: a method, called with the memory as its first argument.
reinterpret = _newest(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")

#: What the kernels use of `gl`.
NAMES = (
    "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "SwizzledSharedLayout",
    "abs", "allocate_shared_memory", "arange", "associative_scan", "constexpr", "convert_layout", "exp2", "float32", "full",
    "inline_asm_elementwise", "int32", "int64", "load", "log2", "max", "maximum", "minimum", "num_programs", "program_id",
    "static_range", "store", "sum", "warp_specialize", "where", "zeros",
)  # fmt: skip


def lacking() -> str:
    """The first thing that the kernels call and the installed Gluon does not have; empty where it has all of them."""
    for name in NAMES:
        if not hasattr(gl, name):
            return f"gluon.language.{name}"
    needed: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("warp_specialize", gl.warp_specialize, ("functions_and_args", "worker_num_warps", "worker_num_regs")),
        ("mbarrier.init", mbarrier.init, ("count",)),
        ("mbarrier.arrive", mbarrier.arrive, ("count",)),
        ("mbarrier.expect", mbarrier.expect, ()),
        ("mbarrier.wait", mbarrier.wait, ("phase",)),
        ("mbarrier.MBarrierLayout", mbarrier.MBarrierLayout, ()),
        ("async_copy.mbarrier_arrive", async_copy.mbarrier_arrive, ("increment_count",)),
        ("async_copy.async_load", copy_rows, ("mask",)),
        ("warpgroup_mma", warpgroup_mma, ("use_acc", "is_async")),
        ("warpgroup_mma_wait", warpgroup_mma_wait, ("num_outstanding", "deps")),
        ("TensorDescriptor", TensorDescriptor, ("shape", "strides", "block_shape", "layout")),
        ("NVMMASharedLayout", gl.NVMMASharedLayout, ("rank",)),
    )
    for name, function, arguments in needed:
        has = inspect.signature(function).parameters
        if missing := [argument for argument in arguments if argument not in has]:
            return f"gluon.language.{name}({', '.join(missing)})"
    return ""
