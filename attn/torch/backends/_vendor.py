"""What adapters of vendors' kernels share: lists of pages as plans take them, and one convention for the answer.

Vendors disagree on the log-sum-exp of a row that sees no key (-inf, +inf), on what its output holds, and on what sinks
mean; here the first two are settled, and sinks are applied by formula (SEMANTICS 4.7): no vendor is asked for them.
"""

import math
from typing import Any

import numpy as np
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


def int32(values: Any) -> torch.Tensor:
    """Host integers as vendors' plans take them: a tensor of their own."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


def page_list(block_table: torch.Tensor, lens: Any, block_size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [R + 1] on the host, page ids [indptr[-1]] on the device) of requests first, first + 1, ...

    block_table: [.., B] on the device; lens: [R] tokens, on the host.
    """
    pages = -(-np.asarray(lens) // block_size)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    row = np.repeat(np.arange(first, first + len(pages)), pages)
    column = np.arange(indptr[-1]) - np.repeat(indptr[:-1], pages)
    at = torch.from_numpy(row * block_table.shape[1] + column).to(block_table.device)
    return int32(indptr), block_table.reshape(-1)[at]


def token_list(block_table: torch.Tensor, lens: Any, block_size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(bounds [R + 1], every token's slot in the cache [bounds[-1]]), int32 on the device, as `page_list`."""
    indptr, pages = page_list(block_table, lens, block_size, first)
    bounds = np.concatenate([[0], np.cumsum(lens)])
    token = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lens)
    page = torch.from_numpy(np.repeat(indptr[:-1].numpy(), lens) + token // block_size).to(pages.device)
    return int32(bounds).to(pages.device), pages[page] * block_size + int32(token % block_size).to(pages.device)


def decodes_first(starts: Any) -> int:
    """How many requests at the head of a batch have one query each; starts: [R + 1] on the host."""
    longer = np.flatnonzero(np.diff(starts) != 1)
    return int(longer[0]) if len(longer) else len(starts) - 1


def arch_of(device: torch.device) -> str:
    """`sm_90`; empty where tensors live on no GPU (stand-ins in tests)."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""
