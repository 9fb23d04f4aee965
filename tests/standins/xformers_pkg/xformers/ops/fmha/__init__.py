"""xformers 0.0.35's `ops/fmha/__init__.py`: the forward pass with its log-sum-exp, and which operator takes which mask.

Left to choose (op=None), xformers takes FlashAttention, whose log-sum-exp is packed, or CUTLASS, which pads it for each
block: here an even number of blocks goes to the first and an odd one to the second. Neither reads pages.
"""

import torch
import vendor

from xformers.ops.fmha import attn_bias as attn_bias
from xformers.ops.fmha import triton_splitk as triton_splitk


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    assert p == 0.0 and output_dtype is None and isinstance(scale, float)
    batch, tokens, groups, heads, size = query.shape
    assert batch == 1, "Expected batch_size=1 when using block-diagonal bias"
    vendor.check("query", query, (1, tokens, groups, heads, size), *vendor.HALVES)
    vendor.check("key", key, (1, None, groups, heads, size), query.dtype)
    vendor.check("value", value, tuple(key.shape), query.dtype)
    for x in (query, key, value):
        assert size % 8 == 0 and x.stride(-2) % 8 == 0, "stride(-2) % 8 != 0"
    assert query.stride(2) == query.stride(3) * heads or 1 in (groups, heads), "G/H dimensions are not contiguous"
    assert heads == 1 or key.stride(3) == value.stride(3) == 0, "keys were copied for the heads of a group"
    assert attn_bias.q_seqinfo.seqstart.device == query.device and attn_bias.q_seqinfo.seqstart_py[-1] == tokens
    if op is not None:
        reasons = op.not_supported_reasons(query, key, attn_bias)
        if reasons:
            raise ValueError(f"Operator `memory_efficient_attention` does not support inputs:\n{reasons}")
    elif not isinstance(attn_bias, _attn_bias.BlockDiagonalMask):
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")
    else:
        assert attn_bias.k_seqinfo.seqstart_py[-1] == key.shape[1]
    flat, keys, values = query[0].flatten(1, 2), key[0, :, :, 0], value[0, :, :, 0]
    lens, table = attn_bias.k_seqinfo.lengths(), None
    if op is not None:
        table = attn_bias.block_tables
        vendor.check("block_tables", table, (len(lens), None), torch.int32)
        keys, values = (x.unflatten(0, (-1, attn_bias.page_size)) for x in (keys, values))
    out, lse = vendor.varlen(
        flat, keys, values, attn_bias.q_seqinfo.seqstart, lens, table, scale=scale, window=attn_bias.window
    )
    out, lse = out.unflatten(1, (groups, heads))[None], lse.unflatten(0, (groups, heads))[None]
    if op is not None or len(lens) % 2 == 0:
        return out, lse
    bounds, longest = attn_bias.q_seqinfo.seqstart_py, attn_bias.q_seqinfo.max_seqlen
    padded = torch.full((len(lens), groups, heads, -(-longest // 32) * 32), torch.inf)
    for r, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        padded[r, ..., : stop - start] = lse[0, ..., start:stop]
    return out, padded


_attn_bias = attn_bias
