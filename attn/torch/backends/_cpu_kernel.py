"""PyTorch's fused attention kernel for CPUs, and what has to be done again where its answer is not exact.

`F.scaled_dot_product_attention` runs this kernel on a CPU; it is called by its own name because it also returns the
log-sum-exp. Of a row whose scores are all -inf it says 0 where the definition says -inf; a score of +inf or NaN makes the
log-sum-exp NaN or infinite, and the output may be 0 where it should be NaN.
"""

import math

import torch

from attn.torch.backends import _ragged
from attn.torch.backends._ragged import Rules, Work


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: [1, H or K, n, D]; key, value: [1, K, m, D]; returns the output like the query, lse [1, H or K, n].

    The lse is float32, or float64 for float64 arrays.
    """
    # the kernel takes for granted that a head's elements lie side by side, and is wrong where they do not
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )
    return result


def finite(log: torch.Tensor) -> bool:
    """Whether no score was +inf or NaN, by the kernel's lse."""
    return math.isfinite(log.sum().item())


def exact(log: torch.Tensor) -> torch.Tensor:
    """bool, where the kernel's lse is beyond doubt: a true 0 is doubted too, as is the output beside it."""
    return log.isfinite() & (log != 0)


def all_exact(log: torch.Tensor) -> bool:
    """`exact(log).all()`, in fewer operators."""
    return math.isfinite((log + log.reciprocal()).sum().item())


def correct(work: Work, rules: Rules, log: torch.Tensor) -> None:
    """Attend by definition the rows that the kernel gave an lse of 0 (log [H, n]), once `work` is filled with its answer."""
    rows = (log == 0).any(0).nonzero()
    if rows.numel():
        start, stop = int(rows[0]), int(rows[-1]) + 1
        low, high = rules.span(work.position + start, work.position + stop - 1, work.end)
        _ragged.attend(work.cut(start, stop, low, high), rules)
