"""Merge attention over disjoint sets of keys: `attn.kernels.merge_states` launched for torch's tensors."""

import functools

import torch
from torch import library

from attn.kernels.launch import FUSED, power_of_two
from attn.kernels.merge_states import merge
from attn.torch.kernels.direct import Prepared, Signature, check_stride, on_device, operator, signature_of


@library.custom_op("attn::triton_merge_states", mutates_args=())
def merge_states(outputs: torch.Tensor, lses: torch.Tensor, nan_is_empty: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge S partial results over disjoint keys. Returns (output [T, H, D], lse [H, T] float32) over all keys.

    outputs: [S, T, H, D], bfloat16, float16 or float32; lses: [S, H, T] float32, natural log, sinks excluded. S may be 0.
    If all states are empty, a row is 0 and its lse -inf. With `nan_is_empty=False` a NaN among the lses propagates.
    """
    return _launch(*_results(outputs, lses), outputs, lses, None, None, nan_is_empty)


@library.custom_op("attn::triton_merge_two_states", mutates_args=())
def merge_two_states(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, nan_is_empty: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of two separate states, such as a shared prefix and the rest: outputs [T, H, D], lses [H, T]."""
    state = output[None], lse[None]
    return _launch(*_results(*state), *state, other, other_lse, nan_is_empty)


@operator("triton_merge_into", "output", "lse")
def merge_into(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge the state (other, other_lse) into (output, lse), in place; NaN among the lses propagates.

    output, other: [T, H, D], bfloat16, float16 or float32 each; lse, other_lse: [H, T] float32.
    """
    _launch(output, lse, output[None], lse[None], other, other_lse, False)


@on_device
def _launch(
    output: torch.Tensor,
    lse: torch.Tensor,
    outputs: torch.Tensor,
    lses: torch.Tensor,
    other: torch.Tensor | None,
    other_lse: torch.Tensor | None,
    nan_is_empty: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the merged state to `output` and `lse`, which may be the state that `outputs` and `lses` hold, and return them."""
    states, tokens, heads, head_size = outputs.shape
    # S may be 0, for which the kernel stores 0 and -inf; no tokens are no programs, which cannot be launched
    if tokens == 0:
        return output, lse
    for name, tensor in (("output", output), ("outputs", outputs), ("lses", lses), ("other", other), ("other_lse", other_lse)):
        if tensor is not None:
            check_stride(name, tensor)
    # In place, no element is lost: each program loads all states of its token and heads before it stores the result.
    arrays = (output, lse, outputs, lses, other, other_lse)
    other_t, other_h = (0, 0) if other is None else other.stride()[:2]
    other_lse_h = 0 if other_lse is None else other_lse.stride(0)
    strides = (*output.stride()[:2], *outputs.stride()[:3], other_t, other_h)
    kernel, block_h = _prepared(signature_of(arrays, strides), heads, head_size, nan_is_empty)
    # Counts and strides of the log-sum-exps are not specialised: they change with the batch, and would compile it each time.
    numbers = states, heads, lse.stride(0), lses.stride(0), lses.stride(1), other_lse_h, *strides
    kernel(tokens, arrays, *numbers, columns=-(-heads // block_h))
    return output, lse


@functools.lru_cache(maxsize=1024)
def _prepared(signature: Signature, heads: int, size: int, nan_is_empty: bool) -> tuple[Prepared, int]:
    """The kernel for calls that agree in these, and the heads of a program."""
    block_d = power_of_two(size)
    # 2,048 elements of a float32 state in each program: 16 registers of each thread of four warps
    block_h = min(power_of_two(heads), max(1, 2048 // block_d))
    sizes = {"D": size, "BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": 4}
    # the fifth array is `other`: without it the states are all in `outputs`
    return Prepared(merge, STACKED=signature[1][4] is None, NAN_IS_EMPTY=nan_is_empty, **sizes, **FUSED), block_h


def _results(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised memory for a merged state."""
    return outputs.new_empty(outputs.shape[1:]), lses.new_empty(lses.shape[1:], dtype=torch.float32)


@merge_states.register_fake
def _(outputs, lses, nan_is_empty=True):  # type: ignore[no-untyped-def]
    return _results(outputs, lses)


@merge_two_states.register_fake
def _(output, lse, other, other_lse, nan_is_empty=True):  # type: ignore[no-untyped-def]
    return _results(output[None], lse[None])
