"""AITER's `unified_attention` (ROCm/aiter at e4048607): causal, output in place, sinks counted in, no log-sum-exp."""

import torch
import vendor


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None,
    shuffled_kv_cache=False, skip_reduce=False,
):  # fmt: skip
    assert causal, "Only causal attention is supported"
    assert softcap == 0 and output_scale is None and qq_bias is None
    requests = len(seqused_k)
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("out", out, tuple(q.shape), q.dtype)
    vendor.check("k", k, (None, None, None, q.shape[2]), q.dtype)
    vendor.check("v", v, tuple(k.shape), q.dtype)
    assert k.shape[1] % 16 == 0
    vendor.check("cu_seqlens_q", cu_seqlens_q, (requests + 1,), torch.int32)
    vendor.check("seqused_k", seqused_k, (requests,), torch.int32)
    vendor.check("block_table", block_table, (requests, None), torch.int32)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(seqused_k.max()) <= max_seqlen_k
    rules = {}
    for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if values is not None:
            vendor.check(name, values, (q.shape[1],), torch.float32)
            rules[name] = vendor.array(values)
    sides = (window_size[0] if window_size[0] >= 0 else None, 0)
    got, _ = vendor.varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, scale=softmax_scale, window=sides, **rules)
    out.copy_(got)
