"""FlashAttention 4's `flash_attn/cute/interface.py` at 0251105a: unbounded is None, keys' lengths by `seqused_k`."""

import torch
import vendor


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
):  # fmt: skip
    left_out = (qv, seqused_q, gather_kv_indices, learnable_sink, score_mod, mask_mod, block_sparse_tensors, aux_tensors)
    assert all(x is None for x in left_out), "not part of the adapter's call"
    assert -1 not in window_size, "unbounded is None here"
    assert not (causal and window_size != (None, None)), "a window says everything: causal is its right side"
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32)
    if page_table is None:
        vendor.check("k", k, (int(cu_seqlens_k[-1]), None, q.shape[2]), q.dtype)
        lens = cu_seqlens_k.diff()
    else:
        assert cu_seqlens_k is None, "page_table goes with seqused_k"
        vendor.check("k", k, (None, None, None, q.shape[2]), q.dtype)
        vendor.check("page_table", page_table, (len(cu_seqlens_q) - 1, None), torch.int32)
        vendor.check("seqused_k", seqused_k, (len(cu_seqlens_q) - 1,), torch.int32)
        lens = seqused_k
    vendor.check("v", v, tuple(k.shape), q.dtype)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(lens.max()) <= max_seqlen_k
    out, lse = vendor.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        lens,
        page_table,
        scale=softmax_scale,
        window=vendor.window(window_size, causal, None),
        logits_soft_cap=softcap,
    )
    return (out, lse) if return_lse else (out, None)
