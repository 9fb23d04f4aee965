"""FlashInfer 0.7's decode without a plan: `trtllm_batch_decode_with_kv_cache_mla` on sm_100 (one query length, base-2 lse
[R * n, H]), `trtllm_batch_decode_with_kv_cache` on sm_100 (base-2 lse [R, H]) and, as XQA, on sm_120 (no lse)."""

import math

import torch
import vendor

#: What a backend has been called for.
calls = []


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
    out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None,
    backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
    skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
    bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, cp_world=1, cp_rank=0,
    causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None, request_order_plan=None,
):  # fmt: skip
    calls.append(backend)
    if backend == "xqa":
        assert not return_lse, "xqa backend does not support return_lse/lse output"
        assert not workspace_buffer[: 8 << 20].any(), "the semaphores must be zeros"
        assert query.is_contiguous(), "a bare pointer is read"
        pages, codes = (16, 32, 64, 128), vendor.HALVES
    else:
        assert backend == "trtllm-gen"
        pages, codes = (16, 32, 64), (torch.bfloat16,)
    requests, heads, _ = query.shape
    k, v = paged(query, kv_cache, block_tables, seq_lens, max_seq_len, requests, kv_layout, pages, codes)
    room(workspace_buffer, return_lse, heads, requests, 1)
    got, log = vendor.varlen(
        query,
        k,
        v.double() * bmm2_scale,
        torch.arange(requests + 1),
        seq_lens,
        block_tables,
        scale=bmm1_scale,
        window=(None if window_left < 0 else window_left, 0),
    )
    got[seq_lens == 0] = log[:, seq_lens == 0] = torch.nan  # nothing is promised of a request without keys
    return (got, log.T.contiguous() / math.log(2)) if return_lse else got


def paged(query, kv_cache, block_tables, seq_lens, max_seq_len, requests, kv_layout, pages, codes):
    """The caches [N, P, K, D] of a call, checked; `codes`: the queries' dtypes beside which an e4m3 cache is read."""
    assert kv_layout == "NHD" and isinstance(kv_cache, tuple)
    vendor.check("query", query, (None, None, None), *vendor.HALVES)
    dtypes = (query.dtype, torch.float8_e4m3fn) if query.dtype in codes else (query.dtype,)
    for name, part in zip("kv", kv_cache, strict=True):
        vendor.check(name, part, (None, None, None, query.shape[2]), *dtypes)
        vendor.bulk_copied(name, part)
    k, v = kv_cache
    assert k.stride() == v.stride() and k.dtype == v.dtype, "one set of strides, one dtype"
    assert k.shape[1] in pages and query.shape[2] in (64, 128, 256) and query.shape[1] % k.shape[2] == 0
    vendor.check("block_tables", block_tables, (requests, None), torch.int32, contiguous=True)
    vendor.check("seq_lens", seq_lens, (requests,), torch.int32)
    assert int(seq_lens.max()) <= max_seq_len <= block_tables.shape[1] * k.shape[1]
    return k, v


def room(workspace_buffer, return_lse, heads, requests, rows):
    """AssertionError unless softmax's statistics have room in the workspace."""
    vendor.check("workspace_buffer", workspace_buffer, (None,), torch.uint8)
    statistics = 8 * heads * requests * -(-rows // 256) * 256 + (1 << 20) if return_lse else 0
    assert statistics < workspace_buffer.numel()


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
