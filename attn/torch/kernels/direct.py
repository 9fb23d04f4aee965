"""Kernels launched without Triton's handling of arguments, which examines each of them at every launch.

The first launch with certain constants is Triton's own, which compiles if necessary; later ones pass the arguments to the
compiled kernel, in its order.
"""

import types
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


class Direct:
    """A Triton kernel for launches from one place, which passes the same names in the same order each time."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        #: by device, constants, and the dtypes and alignment of tensors: the compiled kernel, its arguments in order, and the
        #: places of those that change
        self._kept: dict[tuple[Any, ...], tuple[Any, list[Any], list[int]]] = {}

    def launch(
        self,
        programs: int,
        changing: Mapping[str, Any],
        constants: Mapping[str, Any],
        columns: int = 1,
        strides: Mapping[str, int] = types.MappingProxyType({}),
    ) -> None:
        """Launch a grid of `programs` x `columns`.

        changing: tensors, None, floats, and integers of less than 2^31 that the kernel declares in `do_not_specialize`.
        strides: integers for which Triton compiles a kernel per class: 1, multiples of 16, 64-bit, others.
        constants: all other arguments, and the options of the launch.
        """
        if not isinstance(self._kernel, JITFunction):  # interpreted
            self._kernel[(programs, columns)](**changing, **strides, **constants)
            return
        variant = [
            (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, torch.Tensor) else value is None
            for value in changing.values()
        ]
        classes = [value == 1 or (value % 16 == 0, value >= 1 << 31) for value in strides.values()]
        key = (triton.runtime.driver.active.get_current_device(), *constants.values(), *classes, *variant)
        found = self._kept.get(key)
        if found is not None:
            kernel, template, places = found
            arguments = template.copy()
            for place, value in zip(places, (*changing.values(), *strides.values()), strict=True):
                arguments[place] = value
            kernel[programs, columns, 1](*arguments)
            return
        kernel = self._kernel[(programs, columns)](**changing, **strides, **constants)
        names = self._kernel.arg_names
        if isinstance(kernel, triton.compiler.CompiledKernel):  # else it is still being compiled
            self._kept[key] = (
                kernel,
                [constants.get(name) for name in names],
                [names.index(name) for name in (*changing, *strides)],
            )
