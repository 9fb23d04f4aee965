"""Helpers of the adapters for vendors' kernels: page lists, and one convention for their results.

Vendors differ in the log-sum-exp of a row that sees no key (-inf or +inf), in the output of such a row, and in what sinks
mean. `fill` normalises the first two and applies sinks by formula (docs/semantics.md §7), so vendors' kernels run without
sinks.
"""

import functools
import inspect
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LN2 = math.log(2)  #: natural log-sum-exp = base-2 log-sum-exp * LN2


def fill(
    out: torch.Tensor, log: torch.Tensor, sinks: torch.Tensor | None, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Write a kernel's results to the first n rows of output and, unless None, of lse [H, ..].

    out: [n, H, D]. log: natural log-sum-exp [H, n]; either infinity means that the row sees no key.
    """
    empty = log.isinf()
    log = torch.where(empty, -torch.inf, log)
    if sinks is not None:
        # before empty rows are cleared, for which the factor is NaN if the sink is -inf too
        out = out * torch.sigmoid(log - sinks[:, None]).T[..., None]
    output[: len(out)] = torch.where(empty.T[..., None], 0, out)
    if lse is not None:
        lse[:, : len(out)] = log


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose dimensions of size 1 have the strides of a dense tensor.

    Indexing never uses those strides, but kernels that copy in bulk (TMA) require multiples of 16 bytes there too, and a
    permuted view may have any value (vllm#40737).
    """
    if 1 not in tensor.shape:
        return tensor
    strides, step = list(tensor.stride()), 1
    for i in reversed(range(tensor.dim())):
        strides[i] = step if tensor.shape[i] == 1 else strides[i]
        step = strides[i] * tensor.shape[i]
    return tensor if tuple(strides) == tensor.stride() else tensor.as_strided(tensor.shape, strides)


#: By the id of a cache: it, its address, shape and strides when its halves were made, and these.
_halves: dict[int, tuple[Any, int, Any, Any, tuple[torch.Tensor, torch.Tensor]]] = {}


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [N, P, K, D] of a cache [2, N, P, K, D], `canonical`; to be read only.

    Two views take as long as a vendor's function, so they are kept for the next call as long as the cache is.
    """
    at, here = id(kv_cache), (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
    kept = _halves.get(at)
    # Its owner may exchange a cache's memory in place.
    if kept is not None and kept[0]() is kv_cache and kept[1:4] == here:
        return kept[4]
    # detached: a view refers to the tensor that it is of, and the cache would never be freed
    key, value = canonical(kv_cache.detach())
    if type(kv_cache) is torch.Tensor:
        _halves[at] = weakref.ref(kv_cache, functools.partial(_halves.pop, at)), *here, (key, value)
    return key, value


def int32(values: Any) -> torch.Tensor:
    """Copy host integers to a new int32 tensor, as vendors' plans take them."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


def page_list(block_table: torch.Tensor, lens: Any, block_size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indptr [R + 1] on the host, page ids [indptr[-1]] on the device) of requests first, first + 1, ...

    block_table: [.., B] on the device; lens: [R] tokens, on the host.
    """
    pages = -(-np.asarray(lens) // block_size)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    row = np.repeat(np.arange(first, first + len(pages)), pages)
    column = np.arange(indptr[-1]) - np.repeat(indptr[:-1], pages)
    # one index into the flat table for each page: a gather, instead of a loop over requests
    index = torch.from_numpy(row * block_table.shape[1] + column).to(block_table.device)
    return int32(indptr), block_table.reshape(-1)[index]


def token_list(block_table: torch.Tensor, lens: Any, block_size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bounds [R + 1], the cache slot of every token [bounds[-1]]), int32 on the device; arguments as `page_list`."""
    bounds, begin = np.concatenate([[0], np.cumsum(lens)]), np.zeros(len(lens), int)
    slots = token_slots(block_table, block_size, np.arange(first, first + len(lens)), begin, np.asarray(lens))
    return int32(bounds).to(slots.device), slots


def token_slots(block_table: torch.Tensor, block_size: int, requests: Any, begin: Any, end: Any) -> torch.Tensor:
    """Return the slots [sum(end - begin)] int32, on the device, of tokens begin[i]..end[i] of requests[i], concatenated.

    block_table: [.., B] on the device; requests, begin, end: [n] on the host, begin <= end.
    """
    counts = end - begin
    # each token's position in its request
    token = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    entry = np.repeat(requests, counts) * block_table.shape[1] + token // block_size
    device = block_table.device
    pages = block_table.reshape(-1)[torch.from_numpy(entry).to(device)]
    return pages * block_size + int32(token % block_size).to(device)


def decodes_first(starts: Any) -> int:
    """Return the number of requests at the start of a batch with one query each; starts: [R + 1] on the host."""
    # a request without rows ends the decodes too, since rows and requests then no longer agree
    longer = np.flatnonzero(np.diff(starts) != 1)
    return int(longer[0]) if len(longer) else len(starts) - 1


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the architecture, such as `sm_90`; empty for devices other than GPUs (test doubles)."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def lacking(package: str, module: Any, needs: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """Return the missing features of an installed version, as reasons. Inspects signatures rather than version numbers.

    package: its name, for the reasons. needs: dotted names within the module, each with the arguments that it must take.
    """
    why = []
    for name, arguments in needs:
        member = module
        for part in name.split("."):
            member = getattr(member, part, None)
        if member is None:
            why.append(f"{package} has no {name}")
            continue
        parameters = inspect.signature(member).parameters
        why += [f"{package}.{name} has no {argument}" for argument in arguments if argument not in parameters]
    return tuple(why)
