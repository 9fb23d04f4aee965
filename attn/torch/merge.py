"""Merge partial attention in torch: by the formula of `attn.merge` on any device and for gradients, by a kernel on a GPU."""

from collections.abc import Sequence

import torch

from attn.imports import installed
from attn.merge import check_states, merged
from attn.torch.ops import Ops


def merge_attn_states(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, nan_is_empty: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention over all keys from partial results, each over some of them.

    outputs: [T, H, D] each; lses: [H, T] each, natural log, sinks excluded; sequences, or stacked. One with an lse of
    -inf, +inf or NaN is empty and its output is never read; with `nan_is_empty=False` NaN propagates. If all are empty,
    the result is 0 and -inf.
    Returns (output [T, H, D] in the first output's dtype, lse [H, T] float32, or float64 if all are). Raises `ShapeError`.
    """
    check_states(outputs, lses)
    # states of several dtypes cannot be stacked for the kernel
    if len({output.dtype for output in outputs}) > 1 or not _has_kernel(outputs, lses):
        return merged(Ops, outputs, lses, nan_is_empty)
    from attn.torch.kernels.merge_states import merge_states, merge_two_states

    # two are read where they are; stacking copies them
    if len(outputs) == 2:
        return merge_two_states(outputs[0], lses[0], outputs[1], lses[1], nan_is_empty)
    stacked = (x if isinstance(x, torch.Tensor) else torch.stack(list(x)) for x in (outputs, lses))
    return merge_states(*stacked, nan_is_empty)


def merge_into(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge the state (other, other_lse) over further keys into (output, lse), in place; NaN among the lses propagates.

    output, other: [T, H, D], of any dtypes; lse, other_lse: [H, T], natural log, sinks excluded.
    """
    other_lse = other_lse.contiguous()  # some kernels return a transposed [T, H]
    if _has_kernel([output, other], [lse, other_lse]):
        from attn.torch.kernels import merge_states

        merge_states.merge_into(output, lse, other, other_lse)
        return
    whole, log = merged(Ops, [output, other], [lse, other_lse], False)
    output.copy_(whole)
    lse.copy_(log)


def _has_kernel(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> bool:
    """Whether the Triton kernel supports these tensors: dtypes, one device, dense rows, no gradients."""
    tensors = [*outputs, *lses]
    return (
        # the kernel has no derivative, the formula has
        all(x.is_cuda and x.stride(-1) == 1 and not x.requires_grad for x in tensors)
        # a kernel reads addresses of its own GPU; torch's operators name both in their error
        and all(x.device == tensors[0].device for x in tensors)
        and {output.dtype for output in outputs} <= {torch.float32, torch.float16, torch.bfloat16}
        and all(lse.dtype == torch.float32 for lse in lses)
        and installed("triton")
    )
