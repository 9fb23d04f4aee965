"""Alignment of tensors for kernels that read vectors of 16 bytes.

Vendors' GPU kernels read queries, keys and values in vectors of 16 bytes, so addresses and strides must be multiples of 16
bytes. Those of views of one array of odd width are not. Not every kernel checks this: PyTorch's memory-efficient kernel
checks strides only (pytorch#183484). A misaligned read fails, after which the process cannot use the device, or returns other
elements. This package's Triton kernels need no alignment, because Triton compiles them separately for misaligned arguments.
"""

import torch
from torch import library

_VECTOR = 16  #: bytes
#: Types of devices whose kernels read vectors (ROCm's is "cuda" too); kernels for CPUs need no alignment.
VECTOR_DEVICES = ("cuda",)


def aligned(tensor: torch.Tensor, strides: bool = True) -> torch.Tensor:
    """Return the tensor itself, or a contiguous copy if it is on a GPU and kernels cannot read it in vectors.

    The tensor itself is returned if its last dimension is dense, and its address and its other strides are multiples of 16
    bytes. Strides of dimensions of size 1 count too: PyTorch's memory-efficient kernel and kernels that copy in bulk (TMA)
    check them. strides: False to check the address only.
    """
    if tensor.device.type not in VECTOR_DEVICES:
        return tensor
    if torch.compiler.is_compiling():  # `storage_offset()` can be traced within an operator only
        return torch.ops.attn.aligned(tensor, strides)
    address: int | torch.SymInt
    try:
        # outside of graphs the address itself: a storage may begin anywhere, as one of another library's memory does
        address = tensor.data_ptr()
    except RuntimeError:  # within a transform, such as `torch.vmap`
        address = _offset(tensor)
    return _at(tensor, address, strides)


def _offset(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the offset of the tensor in its storage, in bytes."""
    return tensor.storage_offset() * tensor.element_size()


def _at(tensor: torch.Tensor, address: int | torch.SymInt, strides: bool) -> torch.Tensor:
    ok = address % _VECTOR == 0
    if ok and strides:
        *outer, last = tensor.stride()
        # from the right: an outer stride may be a symbol, and a graph that branches on it has a guard
        ok = last == 1 and all(step * tensor.element_size() % _VECTOR == 0 for step in reversed(outer))
    # `contiguous` would return a dense tensor at an odd address as it is
    return tensor if ok else tensor.clone(memory_format=torch.contiguous_format)


def _traced(tensor: torch.Tensor, strides: bool) -> torch.Tensor:
    return _at(tensor, _offset(tensor), strides)


# Storages are aligned. A graph's inputs are too: Inductor copies an input that is less aligned than when it was traced.
_library = library.Library("attn", "FRAGMENT")
_library.define("aligned(Tensor tensor, bool strides) -> Tensor")
_library.impl("aligned", _traced, "CompositeImplicitAutograd")
