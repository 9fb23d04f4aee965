"""FlashMLA's `flash_mla_interface.py` (deepseek-ai/FlashMLA at 9241ae3e): dense decode for sm_90 and both sparse kernels;
natural log-sum-exp, +inf for an empty row."""

import numpy as np
import torch
import vendor

from attn import reference


class FlashMLASchedMeta:
    def __init__(self):
        self.config = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None,
):  # fmt: skip
    if indices is not None:
        assert block_table is None and cache_seqlens is None and head_dim_v == 512 and is_fp8_kvcache and not causal
        assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
        return _sparse_decode(q, k_cache, softmax_scale, indices)
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None and attn_sink is None
    requests, rows, heads, _ = q.shape
    config = (requests, rows, heads, k_cache.shape[1], causal, is_fp8_kvcache)
    assert tile_scheduler_metadata.config in (None, config), "the schedule is for another batch"
    tile_scheduler_metadata.config = config
    vendor.check("q", q, (requests, rows, heads, 576), *vendor.HALVES)
    assert head_dim_v == 512 and k_cache.shape[1] == 64, "page must be 64"
    assert indices is None and not is_fp8_kvcache, "dense decode reads 16-bit caches"
    vendor.check("k_cache", k_cache, (None, 64, 1, 576), q.dtype)
    vendor.check("block_table", block_table, (requests, None), torch.int32)
    vendor.check("cache_seqlens", cache_seqlens, (requests,), torch.int32)
    assert causal or rows == 1
    starts = torch.arange(requests + 1) * rows
    out, lse = vendor.latent(q.flatten(0, 1), k_cache[:, :, 0], starts, cache_seqlens, block_table, softmax_scale)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return out.unflatten(0, (requests, rows)), lse.unflatten(1, (requests, rows)).transpose(0, 1).contiguous()


def _sparse_decode(q, k_cache, softmax_scale, indices):
    tokens, rows, heads, _ = q.shape
    assert heads in (64, 128) and rows == 1
    vendor.check("q", q, (tokens, 1, heads, 576), torch.bfloat16)
    vendor.check("k_cache", k_cache, (None, 64, 1, 656), torch.uint8)
    vendor.check("indices", indices, (tokens, 1, None), torch.int32)
    packed = k_cache.reshape(-1, 656).numpy()
    latent, rope = reference.unpack_fp8_ds_mla(packed)
    kv = np.concatenate([latent, rope], 1)
    out, lse = _chosen(q[:, 0], kv, indices[:, 0], softmax_scale)
    return out[:, None], lse[:, :, None]


def _chosen(q, kv, indices, scale):
    assert indices.shape[1] % 128 == 0 and int(indices.max()) < len(kv)
    out, lse = reference.sparse_mla(vendor.array(q), kv, vendor.array(indices), scale=scale, kv_lora_rank=512)
    lse = torch.from_numpy(lse.T.copy()).float()
    return torch.from_numpy(out).to(q.dtype), torch.where(lse == -torch.inf, torch.inf, lse)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    tokens, heads, _ = q.shape
    assert heads in (64, 128) and d_v == 512 and attn_sink is None and topk_length is None
    vendor.check("q", q, (tokens, heads, 576), torch.bfloat16)
    vendor.check("kv", kv, (None, 1, 576), torch.bfloat16)
    vendor.check("indices", indices, (tokens, 1, None), torch.int32)
    out, lse = _chosen(q, vendor.array(kv[:, 0]), indices[:, 0], sm_scale)
    return out, lse, lse
