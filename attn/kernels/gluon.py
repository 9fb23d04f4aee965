"""Gluon, Triton's language for manually scheduled kernels, under one set of names for Triton 3.6 and later.

Gluon is experimental, and its releases rename functions. `hopper_prefill` and `hopper_mla` import them from this module.
Each name refers to the newest function that the installed Triton has, because a removed name may remain as a function that
only raises.

| name | 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| `barrier` | `thread_barrier` | `barrier` | `barrier` | `barrier` |
| `load_box` | `tma.async_copy_global_to_shared` | the same | `tma.async_load` | `tma.async_load` |
| `copy_rows` | `async_copy.async_copy_global_to_shared` | the same | `async_copy.async_load` | `async_copy.async_load` |
| `reinterpret` | `shared_memory_descriptor._reinterpret` | the same | the same | `shared_memory_descriptor.reinterpret` |

If a module or one of these names is missing, the import fails; `lacking` finds other missing names. `hopper` gives the
reasons.
"""

import functools
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
    "async_copy", "barrier", "copy_rows", "descriptor", "fence_async_shared", "gl", "gluon", "lacking", "layout_of", "load_box",
    "mbarrier", "reinterpret", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip


def _newest(module: Any, *names: str) -> Any:
    """The first of `names` that `module` has. Raises AttributeError for the last one if it has none."""
    return getattr(module, next((name for name in names if hasattr(module, name)), names[-1]))


#: Synchronises the threads of a partition and their accesses to shared memory.
barrier = _newest(gl, "barrier", "thread_barrier")
#: Copies one box of a tensor into shared memory with the bulk tensor engine (TMA).
load_box = _newest(tma, "async_load", "async_copy_global_to_shared")
#: Copies the elements that pointers address into shared memory, with the threads of a partition.
copy_rows = _newest(async_copy, "async_load", "async_copy_global_to_shared")
#: Reinterprets shared memory with another dtype, shape and layout: a method, called with the memory as its first argument.
reinterpret = _newest(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


class _Address:
    """A tensor's address and dtype in place of the tensor, so that a cached descriptor keeps no memory alive."""

    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=1024)
def descriptor(
    address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor:
    """A descriptor of copies of boxes of 16-bit elements, with swizzled rows of 128 bytes."""
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), list(box), layout_of(box))


def layout_of(box: tuple[int, ...]) -> Any:
    """The shared-memory layout of boxes of 16-bit elements: swizzled rows of 128 bytes."""
    return gl.NVMMASharedLayout(128, 16, rank=len(box))


#: The names in `gl` that the kernels use.
NAMES = """
    BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout NVMMASharedLayout SliceLayout
    SwizzledSharedLayout abs allocate_shared_memory arange associative_scan atomic_add bfloat16 broadcast constexpr
    convert_layout exp2 float32 full inline_asm_elementwise int16 int32 int64 join load log2 max maximum min minimum
    num_programs program_id reduce reshape split static_range store sum warp_specialize where zeros
"""


def lacking() -> str:
    """The first function or parameter that the kernels need and the installed Gluon lacks; "" if it has all of them."""
    for name in NAMES.split():
        if not hasattr(gl, name):
            return f"gluon.language.{name}"
    needed: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("warp_specialize", gl.warp_specialize, ("functions_and_args", "worker_num_warps", "worker_num_regs")),
        # parameters that the kernels pass by name
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
