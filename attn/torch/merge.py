"""Merge partial attention: (output, lse) pairs over disjoint sets of keys form a commutative monoid (docs/semantics.md §6).

The state is fp32 whatever the dtype of the outputs. Sinks are not part of it: they are applied once, after the last merge.
Written in torch operators for any device and for gradients; on a GPU one Triton kernel does the same if Triton is installed.
"""

from collections.abc import Sequence

import torch

from attn.errors import ShapeError
from attn.imports import installed


def merge_attn_states(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, nan_is_empty: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention over all keys from the attention over parts of them.

    outputs: [T, H, D] each; lses: [H, T] each, natural log, sinks excluded; sequences, or stacked. A part with an lse of
    -inf, +inf or NaN is empty and its output is never read; with `nan_is_empty=False` NaN propagates. If all parts are empty,
    the result is 0 and -inf.
    Returns (output [T, H, D] in the first output's dtype, lse [H, T] float32, or float64 if all are). Raises `ShapeError`.
    """
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ShapeError(f"got {len(outputs)} outputs and {len(lses)} lses: needs equal numbers of both, at least one")
    tokens, heads, _ = shape = outputs[0].shape
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or lse.shape != (heads, tokens):
            raise ShapeError(
                f"outputs[{i}] has shape {list(output.shape)} and lses[{i}] {list(lse.shape)}: "
                f"must be {list(shape)} and {[heads, tokens]}"
            )
    if _has_kernel([*outputs, *lses]):
        from attn.torch.kernels.merge_states import merge_states, merge_two_states

        if len(outputs) == 2:
            return merge_two_states(outputs[0], lses[0], outputs[1], lses[1], nan_is_empty)
        stacked = (x if isinstance(x, torch.Tensor) else torch.stack(list(x)) for x in (outputs, lses))
        return merge_states(*stacked, nan_is_empty)
    logs = torch.stack(list(lses))
    logs = logs.to(torch.promote_types(logs.dtype, torch.float32))
    empty = logs.isinf() | (logs.isnan() & nan_is_empty)
    logs = torch.where(empty, -torch.inf, logs)
    top = logs.amax(0)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(logs - top)
    norm = weights.sum(0)
    merged = torch.zeros(shape, dtype=logs.dtype, device=logs.device)
    for output, weight, nothing in zip(outputs, weights, empty, strict=True):
        # select, do not multiply: the output of an empty part may contain anything
        merged += torch.where(nothing.T[..., None], 0, output.to(logs.dtype)) * weight.T[..., None]
    merged = torch.where(norm.T[..., None] == 0, 0, merged / norm.T[..., None])
    return merged.to(outputs[0].dtype), top + torch.log(norm)


def _has_kernel(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the Triton kernel supports these outputs followed by as many lses: dtypes, device, dense rows, no gradients."""
    count = len(tensors) // 2
    kinds = {output.dtype for output in tensors[:count]}
    return (
        all(x.is_cuda and x.stride(-1) == 1 and not x.requires_grad for x in tensors)
        and len(kinds) == 1
        and kinds <= {torch.float32, torch.float16, torch.bfloat16}
        and all(lse.dtype == torch.float32 for lse in tensors[count:])
        and installed("triton")
    )
