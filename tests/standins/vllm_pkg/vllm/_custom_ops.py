"""The two operators of vLLM 0.33's `_custom_ops` that CUTLASS_MLA calls: 128 heads, one token a request, in place."""

import torch
import vendor


def sm100_cutlass_mla_get_workspace_size(max_seq_len, num_batches, sm_count, num_kv_splits):
    assert max_seq_len >= 1 and num_batches >= 1 and sm_count >= 1 and num_kv_splits == -1
    return 1024 * num_batches


def sm100_cutlass_mla_decode(
    out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, num_kv_splits
):
    requests = len(seq_lens)
    vendor.check("q_nope", q_nope, (requests, 128, 512), *vendor.HALVES)
    vendor.check("q_pe", q_pe, (requests, 128, 64), q_nope.dtype)
    vendor.check("out", out, (requests, 128, 512), q_nope.dtype, contiguous=True)
    vendor.check("lse", lse, (requests, 128), torch.float32, contiguous=True)
    vendor.check("kv_c_and_k_pe_cache", kv_c_and_k_pe_cache, (None, 128, 576), q_nope.dtype)
    vendor.check("seq_lens", seq_lens, (requests,), torch.int32)
    vendor.check("page_table", page_table, (requests, None), torch.int32)
    vendor.check("workspace", workspace, (1024 * requests,), torch.uint8)
    q = torch.cat([q_nope, q_pe], -1)
    got, log = vendor.latent(q, kv_c_and_k_pe_cache, torch.arange(requests + 1), seq_lens, page_table, scale)
    out.copy_(got)
    lse.copy_(log.T)
