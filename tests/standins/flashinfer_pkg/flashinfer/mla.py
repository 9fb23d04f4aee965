"""FlashInfer 0.7's `BatchMLAPagedAttentionWrapper` on sm_90 and below: base-2 lse [T, H], e4m3 caches with two scales."""

import math

import torch
import vendor


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        vendor.check("float_workspace_buffer", float_workspace_buffer, (None,), torch.uint8)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        requests = len(kv_len_arr)
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and causal
        assert kv_data_type in (*vendor.HALVES, torch.float8_e4m3fn) and q_data_type in vendor.HALVES
        assert kv_data_type != torch.float8_e4m3fn or q_data_type == torch.bfloat16
        for name, bounds in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            vendor.check(name, bounds, (requests + 1,), torch.int32)
        vendor.check("kv_indices", kv_indices, (int(kv_indptr[-1]),), torch.int32)
        vendor.check("kv_len_arr", kv_len_arr, (requests,), torch.int32)
        pages = kv_indptr.diff()
        assert bool((pages == -(-kv_len_arr // page_size)).all())
        table = torch.zeros(requests, max(1, int(pages.max())), dtype=torch.int32)
        for r in range(requests):
            table[r, : pages[r]] = kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
        self.planned = (qo_indptr, kv_len_arr, table, num_heads, page_size, sm_scale, q_data_type, kv_data_type)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None,
        page_table=None, return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None,
    ):  # fmt: skip
        starts, lens, table, heads, page, scale, dtype, kv_dtype = self.planned
        tokens = int(starts[-1])
        vendor.check("q_nope", q_nope, (tokens, heads, 512), dtype)
        vendor.check("q_pe", q_pe, (tokens, heads, 64), dtype)
        vendor.check("ckv_cache", ckv_cache, (None, page, 512), kv_dtype)
        vendor.check("kpe_cache", kpe_cache, (None, page, 64), kv_dtype)
        quantised = kv_dtype == torch.float8_e4m3fn
        assert quantised == (ckv_scale is not None) == (kpe_scale is not None)
        ckv, kpe = ckv_cache.double() * (ckv_scale or 1.0), kpe_cache.double() * (kpe_scale or 1.0)
        got, log = vendor.latent(torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1), starts, lens, table, scale)
        log = log.T.contiguous() if return_lse_base_on_e else log.T.contiguous() / math.log(2)
        return (got, log) if return_lse else got
