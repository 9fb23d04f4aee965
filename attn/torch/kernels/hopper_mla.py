"""The Hopper decode of MLA, `attn.kernels.hopper_mla`, launched for torch's tensors."""

import functools
from typing import Any

import torch

from attn.kernels import hopper
from attn.kernels.gluon import descriptor
from attn.kernels.hopper_mla import attend as _attend
from attn.kernels.hopper_mla import constants, map_of
from attn.kernels.mla_launch import MLALaunches, fits_hopper
from attn.torch.kernels.direct import Prepared, Signature, signature_of

_SERVED = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))


def serves(query: torch.Tensor, cache: torch.Tensor, rank: int, split_size: int, sparse: bool) -> bool:
    """Whether the kernel supports these shapes, dtypes and addresses; whether to use it is up to the launch rule."""
    (block, slot, _), dtypes = cache.stride(), (query.dtype, cache.dtype)
    if cache.data_ptr() % 16 or dtypes not in _SERVED:
        return False
    return fits_hopper(query.shape[1:], cache.shape[1:], (block, slot), rank, split_size, sparse)


def attend(arrays: tuple[Any, ...], factors: tuple[float, float], plan: MLALaunches, requests: int) -> None:
    """Compute what `mla_decode`'s own kernel does for the same arguments: results, or states for rows with several splits.

    arrays: the kernel's pointers; factors: of scores, into base 2, and of values.
    """
    # (out, lse, partial, partial_lse, query, None, cache, starts, lengths, limits, table of items, block table, indices)
    out, lse, _, _, query, _, cache, *_, block_table, indices = arrays
    strides = (*out.stride()[:2], *query.stride()[:2], *cache.stride()[:2])
    # Pages are copied in boxes by a tensor map; rows that a list names one by one are copied by threads.
    desc, (topk, indices_t) = None, (0, 0)
    if indices is None:
        desc = descriptor(cache.data_ptr(), cache.dtype, *map_of(cache.shape, cache.stride()))
    else:
        topk, indices_t = indices.shape[1], indices.stride(0)
    # one split of all keys, longer than any sequence
    split_size, lse_h = plan.split_size if plan.max_splits > 1 else 1 << 30, 0 if lse is None else lse.stride(0)
    numbers = plan.tiles, plan.max_splits, split_size, topk, cache.shape[0], lse_h, block_table.stride(0), indices_t
    kernel = _prepared(signature_of(arrays, strides), query.shape[1], cache.shape[1], plan.stream_k is not None)
    try:
        kernel(plan.programs(requests), arrays, desc, *factors, *numbers, *strides, columns=plan.max_splits)
    # as in `hopper_prefill`: only the compiler's errors turn it off
    except Exception as error:
        hopper.turn_off("hopper_mla", error)
        raise


@functools.lru_cache(maxsize=1024)
def _prepared(signature: Signature, heads: int, page: int, planned: bool) -> Prepared:
    """The kernel for calls that agree in these."""
    _, lse, *_, limits, _, _, indices = signature[1]
    flags: dict[str, Any] = {"limits": limits is not None, "lse": lse is not None, "sparse": indices is not None}
    return Prepared(_attend, **constants(heads, page, planned=planned, **flags))
