"""FlashInfer 0.7's `trtllm_batch_decode_with_kv_cache_mla` on sm_100: one query length, base-2 lse [R * n, H]."""

import math

import torch
import vendor


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
    sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None,
    enable_pdl=None, backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
    cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None,
    sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None,
    use_fp16_softmax=None,
):  # fmt: skip
    assert backend == "trtllm-gen", "auto may answer in another base"
    requests, rows, heads, width = query.shape
    assert (kv_lora_rank, qk_rope_head_dim, width) == (512, 64, 576)
    vendor.check("query", query, (requests, rows, heads, width), *vendor.HALVES, contiguous=True)
    vendor.check("kv_cache", kv_cache, (None, 1, None, width), query.dtype)
    assert kv_cache.shape[2] in (32, 64), "page of 32 or 64"
    vendor.check("block_tables", block_tables, (requests, None), torch.int32)
    vendor.check("seq_lens", seq_lens, (requests,), torch.int32)
    assert int(seq_lens.max()) <= max_seq_len and bmm2_scale == 1.0
    starts = torch.arange(requests + 1) * rows
    got, log = vendor.latent(query.flatten(0, 1), kv_cache[:, 0], starts, seq_lens, block_tables, bmm1_scale)
    got = got.unflatten(0, (requests, rows))
    return (got, log.T.contiguous() / math.log(2)) if return_lse else got
