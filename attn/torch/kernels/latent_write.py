"""Write latents into a paged MLA cache: `attn.kernels.latent_write` launched for torch's tensors."""

import functools

import torch

from attn.kernels.latent_write import code_of, constants, write
from attn.torch.kernels.direct import Prepared, Signature, check_stride, operator, signature_of


@functools.cache
def _code(source: torch.dtype, stored: torch.dtype) -> str:
    return code_of(*(str(dtype).removeprefix("torch.") for dtype in (source, stored)))


@functools.lru_cache(maxsize=1024)
def _prepared(signature: Signature, rank: int, rope: int, page: int, code: str, heads: int, nope: int) -> Prepared:
    """The kernel for calls that agree in these."""
    return Prepared(write, **constants(rank, rope, page, code, heads, nope))


@operator("triton_write_latents", "cache", "absorbed")
def write_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    k_factor: float = 1.0,
    query: torch.Tensor | None = None,
    absorbed: torch.Tensor | None = None,
) -> None:
    """Store token t's row [kv_c | k_pe] at slot_mapping[t] = block * P + offset; -1 stores nothing.

    kv_c: [T', L], k_pe: [T', Dr], of one dtype; cache: [N, P, L + Dr] of a float dtype or fp8, or [N, P, 656] uint8 (L = 512,
    Dr = 64); slot_mapping: [T] int. Rows past the shorter of T and T' are padding. fp8 codes are x / scale: k_scale is 0-d
    float32 on the device, or k_factor if the host has the value; others ignore both. query, absorbed: [t, H, Dn + Dr] and
    [t, H, L + Dr], both or neither: query[..., Dn:] is copied to absorbed[..., L:].
    """
    tokens, (rank, rope) = min(kv_c.shape[0], slot_mapping.shape[0]), (kv_c.shape[1], k_pe.shape[1])
    # No queries: the launch then has programs for new rows alone.
    copied, heads, nope = 0, 0, 0
    q_t = q_h = a_t = a_h = 0
    if query is not None and absorbed is not None and rope:
        check_stride("absorbed", absorbed)
        copied, heads, size = query.shape
        nope = size - rope
        if query.stride(2) != 1:
            query = query.contiguous()
        (q_t, q_h, _), (a_t, a_h, _) = query.stride(), absorbed.stride()
    else:
        query = absorbed = None
    # the kernel has a program for each row of whichever there are more
    if max(tokens, copied) == 0:
        return
    check_stride("cache", cache)
    if kv_c.stride(1) != 1:
        kv_c = kv_c.contiguous()
    if k_pe.stride(1) != 1:
        k_pe = k_pe.contiguous()
    c_block, c_slot, _ = cache.stride()
    code = _code(kv_c.dtype, cache.dtype)
    if cache.itemsize == 1 and cache.dtype != torch.uint8:
        cache = cache.view(torch.uint8)  # not every architecture has a type for e4m3
    arrays = (kv_c, k_pe, cache, slot_mapping, k_scale, query, absorbed)
    strides = (kv_c.stride(0), k_pe.stride(0), c_block, c_slot, q_t, q_h, a_t, a_h)
    kernel = _prepared(signature_of(arrays, strides), rank, rope, cache.shape[1], code, heads, nope)
    # One program for a token's row and for its query's rotary part, whichever there is: a launch less than two kernels.
    kernel(max(tokens, copied), arrays, k_factor, tokens, copied, *strides)
