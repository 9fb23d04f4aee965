"""`intel_extension_for_pytorch/llm/functional/fusions.py` at v2.8.0+cpu: on a CPU the scale is ignored."""

import torch
import vendor

KINDS = (torch.float32, *vendor.HALVES)


def varlen_attention(
    query, key, value, out, seqlen_q, seqlen_k, alibi_slopes, max_seqlen_q, max_seqlen_k, pdropout, softmax_scale,
    zero_tensors, is_causal, return_softmax, gen_, window_size_left=-1, window_size_right=-1, softcap=-1.0,
):  # fmt: skip
    assert alibi_slopes is None and pdropout == 0.0 and not zero_tensors and not return_softmax and gen_ is None
    assert window_size_left == window_size_right == -1 and softcap == -1.0, "ipex do not support this option"
    size = query.shape[2]
    assert softmax_scale == size**-0.5, "another scale would be ignored"
    vendor.check("query", query, (int(seqlen_q[-1]), None, None), *KINDS)
    vendor.check("key", key, (int(seqlen_k[-1]), None, size), query.dtype)
    vendor.check("value", value, tuple(key.shape), query.dtype)
    vendor.check("out", out, tuple(query.shape), query.dtype)
    for name, bounds in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        vendor.check(name, bounds, (len(seqlen_q),), torch.int32)
    assert int(seqlen_q.diff().max()) <= max_seqlen_q and int(seqlen_k.diff().max()) <= max_seqlen_k
    # its triangle starts at the upper left, which is ours only for as many queries as keys
    assert not is_causal or bool((seqlen_q == seqlen_k).all())
    got, _ = vendor.varlen(
        query, key, value, seqlen_q, seqlen_k.diff(), None, scale=softmax_scale, window=(None, 0 if is_causal else None)
    )
    out.copy_(got)
    return out
