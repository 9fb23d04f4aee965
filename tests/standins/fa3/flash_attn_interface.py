"""FlashAttention 3's `hopper/flash_attn_interface.py` at 0251105a: a paged cache of any page, natural log-sum-exp."""

import torch
import vendor


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
    pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    left_out = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
    assert all(x is None for x in left_out), "not part of the adapter's call"
    tokens, heads, size = q.shape
    requests = len(cache_seqlens)
    pages, page, kv_heads, _ = k_cache.shape
    value_size = v_cache.shape[3]
    vendor.check("q", q, (tokens, heads, size), *vendor.HALVES)
    vendor.check("k_cache", k_cache, (pages, page, kv_heads, size), q.dtype)
    vendor.check("v_cache", v_cache, (pages, page, kv_heads, value_size), q.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        vendor.bulk_copied(name, cache)
    vendor.check("cache_seqlens", cache_seqlens, (requests,), torch.int32)
    vendor.check("page_table", page_table, (requests, None), torch.int32)
    vendor.check("cu_seqlens_q", cu_seqlens_q, (requests + 1,), torch.int32)
    assert cu_seqlens_q[-1] == tokens and int(cu_seqlens_q.diff().max()) <= max_seqlen_q and softcap >= 0
    if qv is not None:  # the absorbed form: scores of q over k and of qv over v
        vendor.check("qv", qv, (tokens, heads, value_size), q.dtype)
        assert kv_heads == 1 and value_size == 512 and size == 64, "qv is for latent attention of 64 + 512"
        q, k_cache = torch.cat([q, qv], -1), torch.cat([k_cache, v_cache], -1)
    out, lse = vendor.varlen(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        scale=softmax_scale,
        window=vendor.window(window_size, causal, -1),
        logits_soft_cap=softcap,
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert all(x is None for x in (seqused_q, seqused_k, qv)), "not part of the adapter's call"
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("k", k, (int(cu_seqlens_k[-1]), None, q.shape[2]), q.dtype)
    vendor.check("v", v, (*k.shape[:2], None), q.dtype)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        vendor.check(name, starts, (None,), torch.int32)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    out, lse = vendor.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k.diff(),
        None,
        scale=softmax_scale,
        window=vendor.window(window_size, causal, -1),
        logits_soft_cap=softcap,
    )
    return (out, lse) if return_attn_probs else out
