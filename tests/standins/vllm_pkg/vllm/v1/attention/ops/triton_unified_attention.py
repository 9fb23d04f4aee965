"""Stand-in for vLLM's unified attention kernel: the signature of vllm 0.33, v1/attention/ops/triton_unified_attention.py."""

import enum

import torch
from vendor import check, varlen, window


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
    softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None, alibi_slopes=None, output_scale=None,
    qq_bias=None, sinks=None, mm_prefix_range=None, rswa_prefix_lens=None, rswa_window=None, use_alibi_sqrt=False,
    kv_quant_mode=KVQuantMode.NONE, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1, use_td=False,
    mm_prefix_clamp_sliding_window=False,
):  # fmt: skip
    tokens, heads, size = q.shape
    check("k", k, (None, None, None, size))
    check("cu_seqlens_q", cu_seqlens_q, (len(seqused_k) + 1,), torch.int32)
    check("block_table", block_table, (len(seqused_k), None), torch.int32)
    assert max_seqlen_k == int(seqused_k.max()) and max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert kv_quant_mode == (KVQuantMode.NONE if k.dtype == q.dtype else KVQuantMode.FP8_PER_TENSOR)
    if max_seqlen_q <= 8 and len(seqused_k) <= seq_threshold_3D:
        check("softmax_segm_output", softmax_segm_output, (tokens, heads, num_par_softmax_segments, size), torch.float32)
        check("softmax_segm_max", softmax_segm_max, (tokens, heads, num_par_softmax_segments), torch.float32)
        check("softmax_segm_expsum", softmax_segm_expsum, (tokens, heads, num_par_softmax_segments), torch.float32)
    rules = {"window": window(window_size, causal, -1), "scale": softmax_scale, "logits_soft_cap": softcap or None}
    out.copy_(varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, **rules)[0])
