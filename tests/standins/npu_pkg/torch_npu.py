"""torch_npu 2.13's `npu_fusion_attention`: BSND, True in a mask means blocked, sparse_mode 3 is bottom-right causality."""

import torch
import vendor

from attn import reference


def npu_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None,
):  # fmt: skip
    assert input_layout == "BSND" and query.shape[2] == head_num and keep_prob == 1.0
    batch, rows, heads, size = query.shape
    vendor.check("query", query, (batch, rows, heads, size), *vendor.HALVES)
    vendor.check("key", key, (batch, None, None, size), query.dtype)
    vendor.check("value", value, tuple(key.shape), query.dtype)
    length = key.shape[1]
    if sparse_mode == 3:
        vendor.check("atten_mask", atten_mask, (2048, 2048), torch.bool)
        assert bool((atten_mask == torch.ones_like(atten_mask).triu(1)).all())
        allowed = None
    elif atten_mask is not None:
        assert atten_mask.dtype == torch.bool and atten_mask.shape[0] == batch and atten_mask.shape[1] in (1, heads)
        assert tuple(atten_mask.shape[2:]) == (rows, length)
        allowed = ~atten_mask
    else:
        allowed = None
    outs = []
    for b in range(batch):
        mask = None if allowed is None else allowed[b].numpy()
        parts = (vendor.array(x[b]) for x in (query, key, value))
        outs.append(reference.attention(*parts, scale=scale, causal=sparse_mode == 3, mask=mask)[0])
    out = torch.stack([torch.from_numpy(o) for o in outs]).to(query.dtype)
    return out, None, None, None, 0, 0, 0
