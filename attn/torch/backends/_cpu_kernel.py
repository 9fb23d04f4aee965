"""PyTorch's fused attention kernel for CPUs, and the correction of rows where its result is not exact.

`F.scaled_dot_product_attention` runs this kernel on a CPU; this module calls the operator itself, because that also returns
the log-sum-exp. For a row whose scores are all -inf the kernel's log-sum-exp is 0, where the definition says -inf. A score
of +inf or NaN makes the log-sum-exp NaN or infinite, and the output may be 0 where it should be NaN.
"""

import math

import torch

from attn.torch.backends import _ragged
from attn.torch.backends._ragged import RequestParams, Work


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on query [1, H or K, n, D] and key, value [1, K, m, D].

    Returns the output, shaped like the query, and the lse [1, H or K, n], float32 (float64 for float64 arrays).
    """
    # the kernel assumes that the elements of a head are contiguous, and is wrong if they are not
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )


def finite(log: torch.Tensor) -> bool:
    """Whether no score was +inf or NaN, according to the kernel's lse."""
    return math.isfinite(log.sum().item())


def exact(log: torch.Tensor) -> torch.Tensor:
    """Return bool, True where the kernel's lse and output are exact. A correct lse of 0 cannot be distinguished: False."""
    return log.isfinite() & (log != 0)


def all_exact(log: torch.Tensor) -> bool:
    """Return `exact(log).all()`, in fewer operators."""
    # 1 / 0 is infinite, so one sum finds zeros beside what is not finite.
    return math.isfinite((log + log.reciprocal()).sum().item())


def correct(work: Work, rules: RequestParams, log: torch.Tensor) -> None:
    """Recompute by definition the rows with an lse of 0 (log [H, n]); `work` must be filled with the kernel's result."""
    rows = (log == 0).any(0).nonzero()
    if rows.numel():
        # all rows between the first and the last such row, in one call: they are few
        start, stop = int(rows[0]), int(rows[-1]) + 1
        low, high = rules.reach(work.position + start, work.position + stop - 1, work.end)
        _ragged.attend(work.narrow(start, stop, low, high), rules)
