"""vLLM's `vllm_flash_attn/flash_attn_interface.py` at 0.24 (0.33 adds arguments of FlashAttention 4): FlashAttention 3 with any
page, 2 with pages of a multiple of 16 and a log-sum-exp of +inf for a row without keys."""

import torch
import vendor

try:
    from vllm.vllm_flash_attn import _vllm_fa2_C  # noqa: F401

    FA2_AVAILABLE = True
except ImportError:
    FA2_AVAILABLE = False
try:
    from vllm.vllm_flash_attn import _vllm_fa3_C  # noqa: F401

    FA3_AVAILABLE = True
except ImportError:
    FA3_AVAILABLE = False


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None,
    k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0,
    cp_tot_seqused_k=None, mask_mod=None, aux_tensors=None, dynamic_causal=None,
):  # fmt: skip
    left_out = (out, scheduler_metadata, q_descale, k_descale, v_descale, output_scale, s_aux, cp_tot_seqused_k, mask_mod)
    assert all(x is None for x in (*left_out, aux_tensors, dynamic_causal)), "not part of the adapter's call"
    assert fa_version == 3 or (fa_version == 2 and q_v is None), "a second query is FlashAttention 3's"
    assert FA3_AVAILABLE if fa_version == 3 else FA2_AVAILABLE
    assert dropout_p == 0.0 and softcap >= 0 and (cu_seqlens_k is None) != (seqused_k is None)
    assert (block_table is None) == (seqused_k is None)
    requests, (tokens, heads, size) = len(cu_seqlens_q) - 1, q.shape
    window = vendor.window(window_size or (-1, -1), causal, -1)
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("cu_seqlens_q", cu_seqlens_q, (requests + 1,), torch.int32, contiguous=True)
    value_size = v.shape[-1] if fa_version == 3 else size
    if block_table is None:
        vendor.check("cu_seqlens_k", cu_seqlens_k, (requests + 1,), torch.int32, contiguous=True)
        lens = cu_seqlens_k.diff()
        vendor.check("k", k, (int(cu_seqlens_k[-1]), None, size), q.dtype)
        vendor.check("v", v, (*k.shape[:2], value_size), q.dtype)
    else:
        lens = seqused_k
        vendor.check("seqused_k", seqused_k, (requests,), torch.int32, contiguous=True)
        vendor.check("block_table", block_table, (requests, None), torch.int32)
        vendor.check("k", k, (None, None, None, size), q.dtype)
        vendor.check("v", v, (*k.shape[:3], value_size), q.dtype)
        assert k.shape[1] % 16 == 0, "Paged KV cache block size must be divisible by 16"
        for name, cache in (("k", k), ("v", v)):
            vendor.bulk_copied(name, cache)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(lens.max()) <= max_seqlen_k
    if alibi_slopes is not None:
        assert fa_version == 2, "Alibi is not supported in FA3"
        vendor.check("alibi_slopes", alibi_slopes, (heads,), torch.float32)
    if fa_version == 2 and max_seqlen_q == 1 and heads > k.shape[-2] and window_size == (-1, -1) and alibi_slopes is None:
        assert tokens == requests, "q is reshaped to [requests, kv heads, group, size] where each request has one row"
    if q_v is not None:  # the absorbed form: scores of q over k and of q_v over v
        vendor.check("q_v", q_v, (tokens, heads, value_size), q.dtype)
        assert k.shape[-2] == 1 and value_size == 512 and size == 64, "q_v is for latent attention of 64 + 512"
        q, k = torch.cat([q, q_v], -1), torch.cat([k, v], -1)
    answer, lse = vendor.varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        lens,
        block_table,
        scale=softmax_scale,
        window=window,
        logits_soft_cap=softcap,
        alibi_slopes=None if alibi_slopes is None else vendor.array(alibi_slopes),
    )
    if fa_version == 2:
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return (answer, lse) if return_softmax_lse else answer
