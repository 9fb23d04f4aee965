"""FlashAttention 4's `flash_attn/cute/interface.py` at 4.0.0b36: unbounded is None, keys' lengths by `seqused_k`.

A `mask_mod` decides alone which keys a row sees: causality and the window are then ignored. It is called as the kernel calls
it, with vectors of one number for the request, the head, the row and the key, also for rows past a request's last.
"""

from types import SimpleNamespace

import numpy as np
import torch
import vendor
from flash_attn.cute import utils  # noqa: F401  (the adapter's)

from attn import reference

TILE = 128  #: rows of a request that are computed together


def seen_by(mask_mod, request, first, rows, keys, heads, aux_tensors):
    """[H, rows, keys] bool: what `mask_mod` says of a request whose first row is row `first` of the batch."""
    lens = SimpleNamespace(offset_q=torch.tensor(first), seqlen_q=torch.tensor(rows), seqlen_k=torch.tensor(keys))
    indices = torch.tensor(request), torch.arange(heads)[:, None, None], torch.arange(-(-rows // TILE) * TILE)[:, None]
    (seen,) = mask_mod(*((x,) for x in (*indices, torch.arange(keys))), lens, aux_tensors)
    assert seen.dtype == torch.bool
    return seen.expand(heads, len(indices[2]), keys)[:, :rows]


def masked(q, k, v, starts, lens, table, aux_tensors, mask_mod, **rules):
    """`vendor.varlen` by a `mask_mod`."""
    assert mask_mod.__cute_hash__, "what a program is kept by"
    begin, parts, row = starts.tolist(), [], 0
    for r, length in enumerate(lens.tolist()):
        rows, keys = slice(begin[r], begin[r + 1]), slice(row, row + length)
        if table is not None:
            pages = table[r, : -(-length // k.shape[1])].long()
            key, value = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        else:
            key, value = k[keys], v[keys]
        count = begin[r + 1] - begin[r]
        seen = seen_by(mask_mod, r, begin[r], count, length, q.shape[1], aux_tensors).numpy()
        parts.append(reference.attention(*map(vendor.array, (q[rows], key, value)), mask=seen, **rules))
        row += length
    out, lse = (np.concatenate([part[i] for part in parts], axis=i) for i in (0, 1))
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse).float()


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    left_out = (qv, seqused_q, gather_kv_indices, learnable_sink, score_mod, block_sparse_tensors, aux_scalars)
    assert all(x is None for x in left_out), "not part of the adapter's call"
    assert -1 not in window_size, "unbounded is None here"
    assert not (causal and window_size != (None, None)), "a window says everything: causal is its right side"
    assert aux_tensors is None or mask_mod is not None and all(x.is_contiguous() for x in aux_tensors)
    assert mask_mod is None or (causal, window_size) == (False, (None, None)), "a mask_mod says everything"
    vendor.check("q", q, (int(cu_seqlens_q[-1]), None, None), *vendor.HALVES)
    vendor.check("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32)
    if page_table is None:
        vendor.check("k", k, (int(cu_seqlens_k[-1]), None, q.shape[2]), q.dtype)
        lens = cu_seqlens_k.diff()
    else:
        assert cu_seqlens_k is None, "page_table goes with seqused_k"
        assert q.shape[2] % 16 == 0, "Paged KV does not support irregular head dim"
        vendor.check("k", k, (None, None, None, q.shape[2]), q.dtype)
        vendor.check("page_table", page_table, (len(cu_seqlens_q) - 1, None), torch.int32)
        vendor.check("seqused_k", seqused_k, (len(cu_seqlens_q) - 1,), torch.int32)
        lens = seqused_k
    vendor.check("v", v, tuple(k.shape), q.dtype)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(lens.max()) <= max_seqlen_k
    batch, rules = (q, k, v, cu_seqlens_q, lens, page_table), {"scale": softmax_scale, "logits_soft_cap": softcap}
    if mask_mod is None:
        out, lse = vendor.varlen(*batch, **rules, window=vendor.window(window_size, causal, None))
    else:
        out, lse = masked(*batch, aux_tensors, mask_mod, **rules)
    return (out, lse) if return_lse else (out, None)
