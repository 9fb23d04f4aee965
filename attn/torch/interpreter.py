"""Corrections of bfloat16 in Triton's interpreter, to test this package's kernels without a GPU; not for serving.

The interpreter stores bfloat16 as its bits in uint16. Releases up to 3.9 multiply those bits in `tl.dot`, convert integers to
bfloat16 by value, and truncate float32 where hardware rounds to nearest even (triton-lang/triton issue 11584, declined). This
module replaces all three with the behaviour of a device. Sums and products of bfloat16 tensors stay wrong: this package's
kernels have none.

The switch is Triton's own: with TRITON_INTERPRET=1 in the environment before triton is imported, layers of TRITON_ATTN and
related backends can be built for tensors on the host if requested by name. Results are evidence of kind `interpreted`.
"""

import functools
import os
from typing import Any

import numpy as np

from attn.capabilities import Device
from attn.imports import installed
from attn.logger import init_logger

logger = init_logger(__name__)


def interpreting() -> bool:
    """Whether Triton's kernels are interpreted in this process (TRITON_INTERPRET)."""
    # asked first, because selection asks this for each layer, and importing Triton takes long
    if "TRITON_INTERPRET" not in os.environ or not installed("triton"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def judged_on(device: Device | None) -> Device | None:
    """The device whose limits apply to this package's Triton kernels: None on a CPU where they are interpreted."""
    return None if device is not None and device.platform == "cpu" and interpreting() else device


def prepare(name: str) -> None:
    """Correct bfloat16 and warn once if backend `name` will be interpreted. Called by the constructors of layers."""
    if interpreting():
        correct_bfloat16()
        logger.warning_once("TRITON_INTERPRET is set: Triton's interpreter executes %s; it is slow and meant for tests.", name)


@functools.cache
def correct_bfloat16() -> None:
    """Replace the interpreter's conversions and products, once per process. Needs triton; compiled kernels are unaffected."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    # Kept for all other dtypes: only conversions from and to bfloat16 are replaced.
    plain_cast = builder.cast_impl

    def widened(x: Any) -> Any:
        element = x.dtype.scalar
        if element == tl.bfloat16:
            # bfloat16 is the upper half of float32
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        # NumPy has no fp8: the interpreter holds its bits too
        if element.is_floating() and element.primitive_bitwidth == 8:
            return interpreter._convert_float(x.data, element, tl.float32, None).view(np.float32)
        return x.data

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return plain_cast(self, source, target)
        values = widened(source)
        if kinds[1] == tl.bfloat16:
            return handle(_nearest(values.astype(np.float32)), kinds[1])
        return handle(values.astype(interpreter._get_np_dtype(kinds[1])), kinds[1])

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return handle(np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast, dot


def _nearest(values: Any) -> Any:
    """The bits of float32 values rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Half of the lower 16 bits, less one unless the bit that stays is odd: a tie goes to the even neighbour.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
