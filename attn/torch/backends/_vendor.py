"""What adapters of vendors' kernels do with a kernel's answer, so that every one gives the same.

Vendors disagree on the log-sum-exp of a row that sees no key (-inf, +inf), on what its output holds, and on what sinks
mean; here the first two are settled, and sinks are applied by formula (SEMANTICS 4.7): no vendor is asked for them.
"""

import math

import torch

LN2 = math.log(2)  #: natural log-sum-exp = base-2 log-sum-exp * LN2


def fill(
    out: torch.Tensor, log: torch.Tensor, sinks: torch.Tensor | None, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Write a kernel's out [n, H, D] and natural log-sum-exp [H, n] (an infinity: no key) to output and lse [H, n]."""
    empty = log.isinf()
    log = torch.where(empty, -torch.inf, log)
    if sinks is not None:
        out = out * torch.sigmoid(log - sinks[:, None]).T[..., None]
    output[...] = torch.where(empty.T[..., None], 0, out)
    if lse is not None:
        lse[...] = log
