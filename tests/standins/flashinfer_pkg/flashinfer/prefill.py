"""FlashInfer 0.7's `trtllm_ragged_attention_deepseek` on sm_100: base-2 lse [T, H]."""

import math

import torch
import vendor


def trtllm_ragged_attention_deepseek(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size,
    window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
    skip_softmax_threshold_scale_factor=None, out=None, lse=None, sage_attn_sfs=(None, None, None, None),
    num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend="trtllm-gen", q_seq_lens_cpu=None, kv_seq_lens_cpu=None,
    use_fp16_softmax=None, uses_spcompress=None,
):  # fmt: skip
    assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128) and window_left == -1 and bmm2_scale == 1.0
    vendor.check("query", query, (int(cum_seq_lens_q[-1]), None, 192), *vendor.HALVES, contiguous=True)
    vendor.check("key", key, (int(cum_seq_lens_kv[-1]), query.shape[1], 192), query.dtype, contiguous=True)
    vendor.check("value", value, (len(key), query.shape[1], 128), query.dtype, contiguous=True)
    for name, bounds, lens in (("q", cum_seq_lens_q, q_seq_lens_cpu), ("kv", cum_seq_lens_kv, kv_seq_lens_cpu)):
        vendor.check(f"{name}_seq_lens_cpu", lens, (batch_size,), torch.int32)
        assert bool((bounds.diff() == lens).all()), "the mirrors are trusted"
    vendor.check("seq_lens", seq_lens, (batch_size,), torch.int32)
    assert bool((seq_lens == kv_seq_lens_cpu).all()) and int(q_seq_lens_cpu.max()) <= max_q_len
    assert int(seq_lens.max()) <= max_kv_len
    got, log = vendor.varlen(
        query, key, value, cum_seq_lens_q, seq_lens, None, scale=bmm1_scale, window=(None, 0 if is_causal else None)
    )
    return (got, log.T.contiguous() / math.log(2)) if return_lse else got
