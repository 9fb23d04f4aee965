"""FlashAttention 2's `flash_attn/flash_attn_interface.py` at 0251105a: pages of a multiple of 256, ALiBi, and a
log-sum-exp of +inf for a row without keys."""

import torch
import vendor


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert dropout_p == 0.0
    requests = len(cu_seqlens_q) - 1
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    if block_table is None:
        vendor.check("k", k, (int(cu_seqlens_k[-1]), None, q.shape[2]), q.dtype)
        vendor.check("v", v, tuple(k.shape), q.dtype)
    else:
        vendor.check("k", k, (None, None, None, q.shape[2]), q.dtype)
        vendor.check("v", v, tuple(k.shape), q.dtype)
        vendor.check("block_table", block_table, (requests, None), torch.int32)
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        vendor.looked_up(block_table, cu_seqlens_k.diff(), k.shape[1], len(k), 128)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        vendor.check(name, starts, (requests + 1,), torch.int32)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    if alibi_slopes is not None:
        vendor.check("alibi_slopes", alibi_slopes, (q.shape[1],), torch.float32)
    out, lse = vendor.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k.diff(),
        block_table,
        scale=softmax_scale,
        window=vendor.window(window_size, causal, -1),
        logits_soft_cap=softcap,
        alibi_slopes=None if alibi_slopes is None else vendor.array(alibi_slopes),
    )
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return (out, lse, None) if return_attn_probs else out
