"""Triton's interpreter with bfloat16 that counts: for examining our kernels without a GPU, never for serving.

The interpreter keeps bfloat16 as its bits in uint16. Releases up to 3.9 multiply those bits in `tl.dot`, convert integers to
them by value, and cut float32 off where hardware rounds to nearest even (triton-lang/triton issue 11584, declined). Here the
three are replaced by what a device does. Sums and products of bfloat16 tensors stay wrong: our kernels have none.

The switch is Triton's own: with TRITON_INTERPRET=1 in the environment before triton is imported, layers of TRITON_ATTN and its
relatives may be built for tensors on the host, where asked for by name. What runs there is evidence of kind `interpreted`.
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
    """Whether TRITON_INTERPRET has Triton's kernels interpreted in this process."""
    if "TRITON_INTERPRET" not in os.environ or not installed("triton"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def judged_on(device: Device | None) -> Device | None:
    """The device whose limits count for our Triton kernels: none on a CPU where they are interpreted."""
    return None if device is not None and device.platform == "cpu" and interpreting() else device


def prepare(name: str) -> None:
    """For the constructor of a layer of backend `name`: where it will be interpreted, let bfloat16 count, and say so once."""
    if interpreting():
        correct_bfloat16()
        logger.warning_once("TRITON_INTERPRET is set: Triton's interpreter executes %s, for tests and not for speed.", name)


@functools.cache
def correct_bfloat16() -> None:
    """Replace the interpreter's conversions and products, once a process. Needs triton; changes nothing that is compiled."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_cast = builder.cast_impl

    def widened(x: Any) -> Any:
        kind = x.dtype.scalar
        if kind == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        if kind.is_floating() and kind.primitive_bitwidth == 8:
            return interpreter._convert_float(x.data, kind, tl.float32, None).view(np.float32)
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
    """The bits of float32 values in bfloat16, to nearest even; NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
