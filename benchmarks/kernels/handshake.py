"""Minimal kernels with the partitions of the Hopper prefill, for comparison in `benchmarks.sanitizer`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.hopper_prefill_launch import _REGISTERS

ROUNDS = gl.constexpr(3)
REGISTERS = gl.constexpr(_REGISTERS[2])


@gluon.jit
def _alone(out, WHICH: gl.constexpr, WARPS: gl.constexpr, BARRIERS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A partition that shares nothing: it writes its own row."""
    if BARRIERS:
        gl.thread_barrier()
    for n in gl.static_range(4 // WARPS):
        i = n * 32 + gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        gl.store(out + WHICH * 128 + i, i + WHICH)


@gluon.jit
def _bare(out, BARRIERS: gl.constexpr):  # type: ignore[no-untyped-def]
    if BARRIERS:
        gl.thread_barrier()
    gl.warp_specialize(
        [(_alone, (out, 0, 4, BARRIERS)), (_alone, (out, 1, 4, BARRIERS)), (_alone, (out, 2, 1, BARRIERS))],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )


@gluon.jit
def _write(tile, full, empty, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for n in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(empty, (n & 1) ^ 1)
        tile.store((i + n).to(gl.int64))
        if ORDERED:
            gl.thread_barrier()
            mbarrier.arrive(full, count=1)


@gluon.jit
def _read(out, tile, full, empty, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    for n in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(full, n & 1)
        gl.store(out + n * 128 + i, tile.load(layout).to(gl.int32))
        if ORDERED:
            gl.thread_barrier()
            mbarrier.arrive(empty, count=1)


@gluon.jit
def _idle():  # type: ignore[no-untyped-def]
    return


@gluon.jit
def _handover(out, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """One partition repeatedly passes a tile to the other. The words have 64 bits, so that plain stores and loads move them."""
    tile = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_write, (tile, full, empty, ORDERED)), (_read, (out, tile, full, empty, ORDERED)), (_idle, ())],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )
