"""AITER's `mla_decode_fwd` (ROCm/aiter at e4048607): a cache of pages of one token, 16 or 128 heads, output in place."""

import torch
import vendor


def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1, nhead_kv=1,
    sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None,
    work_info_set=None, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None,
    intra_batch_mode=False, return_logits=False, return_lse=False, g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True,
):  # fmt: skip
    assert logit_cap <= 0 and page_size == 1 and nhead_kv == 1
    tokens, heads, width = q.shape
    requests = len(qo_indptr) - 1
    assert heads in (16, 128) and width == 576
    vendor.check("q", q, (tokens, heads, width), *vendor.HALVES, contiguous=True)
    vendor.check("kv_buffer", kv_buffer, (None, 1, 1, width), q.dtype)
    vendor.check("o", o, (tokens, heads, 512), q.dtype, contiguous=True)
    for name, bounds in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        vendor.check(name, bounds, (requests + 1,), torch.int32)
    vendor.check("kv_indices", kv_indices, (int(kv_indptr[-1]),), torch.int32)
    vendor.check("kv_last_page_lens", kv_last_page_lens, (requests,), torch.int32)
    assert bool((kv_last_page_lens == 1).all()) and int(qo_indptr.diff().max()) <= max_seqlen_q
    lens = kv_indptr.diff()
    table = torch.zeros(requests, max(1, int(lens.max())), dtype=torch.int32)
    for r in range(requests):
        table[r, : lens[r]] = kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
    out, lse = vendor.latent(q, kv_buffer[:, 0], qo_indptr, lens, table, sm_scale)
    o.copy_(out)
    return out, lse.T.contiguous() if return_lse else None
