"""SageAttention 1.0.6's `sageattn`: it changes its caller's keys, and knows no mask, not even at the end of its last tile
of 64 keys, whose rest has score 0. Exact here, but for that."""

import torch
import vendor


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    assert tensor_layout == "NHD" and not kwargs and smooth_k
    batch, rows, heads, size = q.shape
    vendor.check("q", q, (batch, rows, heads, size), *vendor.HALVES, contiguous=True)
    vendor.check("k", k, (batch, None, None, size), q.dtype)
    vendor.check("v", v, tuple(k.shape), q.dtype)
    assert size in (64, 96, 128) and (not is_causal or rows == k.shape[1])
    k -= k.mean(1, keepdim=True)
    if not is_causal:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 64)) for x in (k, v))
    return exact(q, k, v, is_causal, sm_scale)


def exact(q, k, v, is_causal, sm_scale):
    batch, rows = q.shape[:2]
    starts = torch.arange(batch + 1) * rows
    out, _ = vendor.varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        starts,
        [k.shape[1]] * batch,
        None,
        scale=sm_scale,
        window=(None, 0 if is_causal else None),
    )
    return out.unflatten(0, (batch, rows))
