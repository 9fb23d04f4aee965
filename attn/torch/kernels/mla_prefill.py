"""Attention of MLA's expanded heads: `attn.kernels.mla_prefill` launched for torch's tensors, on Hopper `hopper_prefill`."""

import functools

import torch

from attn.kernels import hopper
from attn.kernels.hopper_prefill_launch import ROWS, PrefillParams
from attn.kernels.launch import LOG2E, UNBOUNDED
from attn.kernels.mla_launch import mla_prefill_launch
from attn.kernels.mla_prefill import attend, constants
from attn.torch.kernels.direct import Prepared, Signature, arch, check_stride, multiprocessors, operator, signature_of


@operator("triton_mla_prefill", "out", "lse")
def mla_prefill(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Compute out [T, H, Dv] and, unless None, lse [H, T]: each request's queries over its own keys.

    query: [T, H, D]; key: [m, H, D]; value: [m, H, Dv]; query_start_loc, key_start_loc: [R + 1] int32. Causal calls align
    both ends: row i sees keys up to i + (keys - queries).
    """
    requests, (tokens, heads, size) = query_start_loc.shape[0] - 1, query.shape
    if requests < 1 or tokens == 0:
        return
    for name, tensor in (("out", out), ("query", query), ("key", key), ("value", value)):
        check_stride(name, tensor)
    arrays = (out, lse, query, key, value, query_start_loc, key_start_loc)
    # Measured on an H200: 610 TFLOP/s for 409 at 4,096 causal rows of 128 heads.
    if arch() == "sm_90" and hopper.is_on("hopper_prefill"):
        from attn.torch.kernels import hopper_prefill

        # MLA's heads do not share keys: a group of 1. Keys have no pages, so a page is a tile.
        if hopper_prefill.serves(query, key, value, 1, ROWS):
            params, pointers = PrefillParams(negate=scale < 0, right=0 if causal else UNBOUNDED), (*arrays, None, None)
            # means over requests: each one's lengths may be on the device alone, and only the size of a tile depends on them
            params = params.seeing(key.shape[0] / requests, tokens / requests)
            hopper_prefill.prefill(pointers, params, (abs(scale) * LOG2E, 1.0), multiprocessors(query.device), ragged=True)
            return
    strides = (*out.stride()[:2], *query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    kernel, block_m = _prepared(arch(), signature_of(arrays, strides), size, value.shape[2], causal)
    lse_h = 0 if lse is None else lse.stride(0)
    # each request ends with at most one tile of rows that is not full; a program finds its request in the list of starts
    kernel(tokens // block_m + requests, arrays, scale * LOG2E, requests, lse_h, *strides, columns=heads)


@functools.lru_cache(maxsize=1024)
def _prepared(name: str, signature: Signature, size: int, width: int, causal: bool) -> tuple[Prepared, int]:
    """The kernel for calls that agree in these, and the rows of a tile."""
    query = signature[1][2]
    assert query is not None
    rule = mla_prefill_launch(name, size, width, query.itemsize)
    return Prepared(attend, **constants(rule, name, (size, width), query.itemsize, causal)), rule.block_m
