"""AITER's FlashAttention and paged decode (ROCm/aiter at e4048607), natural lse [H, T]."""

import math

import torch
import vendor


def _slopes(alibi_slopes, heads):
    if alibi_slopes is None:
        return None
    vendor.check("alibi_slopes", alibi_slopes, (heads,), torch.float32)
    return vendor.array(alibi_slopes)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None,
    logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic=False,
    return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None, cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None, sink_ptr=None,
):  # fmt: skip
    assert dropout_p == 0.0 and bias is None and block_table is None and sink_ptr is None
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("k", k, (int(cu_seqlens_k[-1]), None, q.shape[2]), q.dtype)
    vendor.check("v", v, (*k.shape[:2], None), q.dtype)
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        vendor.check(name, bounds, (len(cu_seqlens_q),), torch.int32)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    got, lse = vendor.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k.diff(),
        None,
        scale=softmax_scale,
        window=vendor.window(window_size[:2], causal, -1),
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=_slopes(alibi_slopes, q.shape[1]),
    )
    return (got, lse) if return_lse else got


def paged_attention_v1(
    out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens, context_lens, max_context_len,
    alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale, fp8_out_scale=None,
    partition_size=256, mtp=1, sliding_window=0,
):  # fmt: skip
    requests, heads, size = query.shape
    assert cu_query_lens is None and (kv_cache_dtype, kv_cache_layout) == ("auto", "NHD") and fp8_out_scale is None
    assert mtp == 1 and sliding_window == 0
    vendor.check("query", query, (requests, heads, size), *vendor.HALVES)
    vendor.check("out", out, (requests, heads, size), query.dtype, contiguous=True)
    vendor.check("key_cache", key_cache, (None, None, None, size), query.dtype)
    vendor.check("value_cache", value_cache, tuple(key_cache.shape), query.dtype)
    assert key_cache.shape[1] in (16, 32) and size in (64, 128, 256)
    vendor.check("block_tables", block_tables, (requests, None), torch.int32)
    vendor.check("context_lens", context_lens, (requests,), torch.int32)
    for scale_ in (k_scale, v_scale):
        vendor.check("scale", scale_, (1,), torch.float32)
    states = requests * heads * math.ceil(max_context_len / partition_size)
    assert workspace_buffer.numel() >= states * (size * query.element_size() + 8) and int(context_lens.max()) <= max_context_len
    got, _ = vendor.varlen(
        query,
        key_cache,
        value_cache,
        torch.arange(requests + 1),
        context_lens,
        block_tables,
        scale=scale,
        window=(None, 0),
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=_slopes(alibi_slopes, heads),
    )
    out.copy_(torch.where((context_lens > 0)[:, None, None], got, torch.nan))
    return out
