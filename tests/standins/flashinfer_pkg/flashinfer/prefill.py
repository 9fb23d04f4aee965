"""FlashInfer 0.7's `trtllm_ragged_attention_deepseek` and `trtllm_batch_context_with_kv_cache` on sm_100: base-2 lse [T, H]."""

import math

import torch
import vendor

from flashinfer.decode import paged, room

#: What a backend has been called for.
calls = []


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch_size,
    cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
    kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False, multi_ctas_kv_counter_buffer=None,
    use_fp16_softmax=None, uses_spcompress=None, backend="trtllm-gen",
):  # fmt: skip
    calls.append(backend)
    assert backend == "trtllm-gen" and (causal or window_left < 0)
    k, v = paged(query, kv_cache, block_tables, seq_lens, max_kv_len, batch_size, kv_layout, (16, 32, 64), ())
    room(workspace_buffer, return_lse, query.shape[1], batch_size, max_q_len)
    for name, bounds in (("cum_seq_lens_q", cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        vendor.check(name, bounds, (batch_size + 1,), torch.int32)
    rows = cum_seq_lens_q.diff()
    assert cum_seq_lens_q[0] == cum_seq_lens_kv[0] == 0 and cum_seq_lens_q[-1] == len(query)
    assert bool((cum_seq_lens_kv.diff() == seq_lens).all()) and int(rows.max()) <= max_q_len
    assert bool(((rows > 0) & (rows <= seq_lens)).all()), "requests need rows, at most as many as keys"
    got, log = vendor.varlen(
        query,
        k,
        v.double() * bmm2_scale,
        cum_seq_lens_q,
        seq_lens,
        block_tables,
        scale=bmm1_scale,
        window=(None if window_left < 0 else window_left, 0 if causal else None),
    )
    return (got, log.T.contiguous() / math.log(2)) if return_lse else got


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
