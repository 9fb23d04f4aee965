"""`intel_extension_for_pytorch/llm/modules/mha_fusion.py` at v2.8.0+cpu: paged attention, with the limits of its kernels.

What comes back for a row without a key is whatever memory held: NaN here.
"""

import torch
import vendor

from intel_extension_for_pytorch.llm.functional import KINDS


def _cache(key_cache, value_cache, dtype, size):
    vendor.check("key_cache", key_cache, (None, None, None, size), dtype, contiguous=True)
    vendor.check("value_cache", value_cache, tuple(key_cache.shape), dtype, contiguous=True)
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


class PagedAttention:
    @classmethod
    def single_query_cached_kv_attention(
        cls, output, query, key_cache, value_cache, head_mapping, scale, block_tables, context_lens, block_size,
        max_context_len, alibi_slopes, window_size=-1, k_scale=1.0, v_scale=1.0, softcap=-1.0,
    ):  # fmt: skip
        requests, heads, size = query.shape
        vendor.check("query", query, (requests, heads, size), *KINDS, contiguous=True)
        vendor.check("output", output, (requests, heads, size), query.dtype)
        keys, values = _cache(key_cache, value_cache, query.dtype, size)
        assert block_size == key_cache.shape[2] and 128 % block_size == 0, "a part of 128 keys is not whole pages"
        groups = key_cache.shape[1]
        vendor.check("head_mapping", head_mapping, (heads,), torch.int32)
        assert head_mapping.tolist() == [h * groups // heads for h in range(heads)]
        vendor.check("block_tables", block_tables, (requests, None), torch.int32, contiguous=True)
        vendor.check("context_lens", context_lens, (requests,), torch.int32)
        assert int(context_lens.max()) <= max_context_len and alibi_slopes is None and k_scale == v_scale == 1.0
        assert not (window_size > 0 and softcap != -1.0), "TORCH_CHECK(!(window_size > 0 && use_softcap == true))"
        beams = int((block_tables[:, 0] == block_tables[0, 0]).int().cumprod(0).sum())
        assert window_size > 0 or beams < 4, "Sliding window unsupported"
        assert window_size >= max_context_len, "keys outside a window are merged as if they had scores of 0"
        got, _ = vendor.varlen(query, keys, values, torch.arange(requests + 1), context_lens, block_tables, scale=scale)
        output.copy_(torch.where((context_lens > 0)[:, None, None], got, torch.nan))
        return output

    @classmethod
    def flash_attn_varlen_func(
        cls, output, query, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, scale, is_cusal,
        block_tables, alibi_slopes, window_size_left=-1, window_size_right=-1, kv_cache_dtype="auto", k_scale=1.0, v_scale=1.0,
        softcap=-1.0,
    ):  # fmt: skip
        requests = len(cu_seqlens_q) - 1
        vendor.check("query", query, (int(cu_seqlens_q[-1]), None, None), *KINDS)
        vendor.check("output", output, tuple(query.shape), query.dtype)
        keys, values = _cache(key_cache, value_cache, query.dtype, query.shape[2])
        for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
            vendor.check(name, bounds, (requests + 1,), torch.int32)
        vendor.check("block_tables", block_tables, (requests, None), torch.int32, contiguous=True)
        assert 0 < int(cu_seqlens_q.diff().max()) <= max_seqlen_q and 0 < int(cu_seqlens_kv.diff().max()) <= max_seqlen_kv
        assert alibi_slopes is None, "alibi_slopes is not supported for flash_attn_varlen yet"
        assert kv_cache_dtype == "auto" and k_scale == v_scale == 1.0 and window_size_right == -1
        assert window_size_left != 0, "a left side of 0 is taken for no window"
        for r in range(requests if is_cusal else 0):
            n, m = int(cu_seqlens_q[r + 1] - cu_seqlens_q[r]), int(cu_seqlens_kv[r + 1] - cu_seqlens_kv[r])
            last = 0 if window_size_left == -1 else max(0, m - 1 - window_size_left)  # the last row's first key
            held = values[block_tables[r, : -(-m // values.shape[1])].long()].flatten(0, 1)[:m]
            hidden = torch.cat([held[:last], held[max(0, m - n + 1) :]]) if n > 1 else held[:0]
            assert bool(hidden.isfinite().all()), "what a row does not see is multiplied by 0"
        sides = (None if window_size_left == -1 else window_size_left, 0 if is_cusal else None)
        got, lse = vendor.varlen(
            query,
            keys,
            values,
            cu_seqlens_q,
            cu_seqlens_kv.diff(),
            block_tables,
            scale=scale,
            window=sides,
            logits_soft_cap=None if softcap == -1.0 else softcap,
        )
        output.copy_(torch.where(lse.T[..., None] == -torch.inf, torch.nan, got))
        return output
