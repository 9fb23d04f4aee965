"""tokenspeed-mla 2.0.4's prefill: strides come from shapes, so a view that is not contiguous is garbage there."""

import torch
import vendor


def tokenspeed_mla_prefill(
    query, key, value, seq_lens, cum_seq_lens, max_seq_len, batch_size, softmax_scale, is_causal=True, return_lse=False,
    cum_seq_lens_q=None, max_seq_len_q=None, enable_pdl=False, out=None,
):  # fmt: skip
    cum_seq_lens_q = cum_seq_lens if cum_seq_lens_q is None else cum_seq_lens_q
    vendor.check("query", query, (int(cum_seq_lens_q[-1]), None, 192), torch.bfloat16, contiguous=True)
    vendor.check("key", key, (int(cum_seq_lens[-1]), query.shape[1], 192), torch.bfloat16, contiguous=True)
    vendor.check("value", value, (len(key), query.shape[1], 128), torch.bfloat16, contiguous=True)
    assert len(cum_seq_lens) == len(cum_seq_lens_q) == batch_size + 1 and bool((seq_lens == cum_seq_lens.diff()).all())
    assert int(seq_lens.max()) <= max_seq_len and int(cum_seq_lens_q.diff().max()) <= max_seq_len_q
    got, lse = vendor.varlen(
        query, key, value, cum_seq_lens_q, seq_lens, None, scale=softmax_scale, window=(None, 0 if is_causal else None)
    )
    return (got, lse.T.contiguous()) if return_lse else got
