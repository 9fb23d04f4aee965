"""SageAttention 3's `sageattn3_blackwell`: [B, H, S, D], scale 1 / sqrt(D), as many kv heads as heads; it changes its
caller's keys."""

import vendor
from sageattention import exact


def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True):
    assert attn_mask is None and q.shape[1] == k.shape[1] and q.shape[3] in (64, 128)
    for name, x in (("q", q), ("k", k), ("v", v)):
        vendor.check(name, x, (q.shape[0], q.shape[1], None, q.shape[3]), *vendor.HALVES, contiguous=True)
    k -= k.mean(-2, keepdim=True)
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    scale = q.shape[3] ** -0.5
    return exact(*rows, is_causal, scale).transpose(1, 2)
