"""ROCM_AITER_FA: AITER's Composable Kernel and assembly FlashAttention, the fastest on MI300 (2.7-4.4x ROCM_ATTN, by AMD).

Decodes at the start of a batch use `paged_attention_v1`, which reads pages. For the requests after them the keys are gathered
and passed to `flash_attn_varlen_func`. `paged_attention_v1` supports neither sinks nor a log-sum-exp, so this backend does not
either. Windows are rejected until the behaviour of `paged_attention_v1` has been tested on a device. Interface of ROCm/aiter
at e4048607.
"""

import numpy as np
import torch

from attn.backends.paged import PagedCall
from attn.capabilities import Feature
from attn.torch import records
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl, check_replays
from attn.torch.backends._vendor import decodes_first, fill, token_list

_PARTITION = 256  #: keys per split of a decode


class AiterFlashAttentionBackend(PagedAttentionBackend):
    name = "ROCM_AITER_FA"
    block_sizes = (16, 32)
    capabilities = records.AITER(
        head_sizes=(64, 128, 256), features=frozenset({Feature.SOFT_CAP, Feature.ALIBI, Feature.KV_SHARING})
    )


class AiterFlashAttentionImpl(PagedAttentionImpl, backend=AiterFlashAttentionBackend):
    def _attend(self, call: PagedCall) -> None:
        starts, _ = call.meta.host_lens()
        decodes = decodes_first(starts)
        if decodes:
            self._decode(call, decodes)
        if call.meta.num_actual_tokens > decodes:
            self._prefill(call, decodes)

    def _decode(self, call: PagedCall, count: int) -> None:
        """Attend the first `count` requests, of one row each."""
        import aiter

        query, meta = call.query[:count], call.meta
        keys, values = self.backend.logical_kv_cache(call.kv_cache)
        num_splits = -(-meta.max_seq_len // _PARTITION)
        states = count * self.num_heads * num_splits
        size = states * self.head_size * query.element_size() + 2 * states * 4  # as `paged_attention_v1` counts it
        out = torch.empty_like(query)
        # scales of a cache that is not quantised
        one = torch.ones(1, dtype=torch.float32, device=query.device)
        lens = meta.seq_lens[:count]
        aiter.paged_attention_v1(
            out=out,
            workspace_buffer=torch.empty(size, dtype=torch.uint8, device=query.device),
            query=query,
            key_cache=keys,
            value_cache=values,
            scale=self.scale,
            block_tables=meta.block_table[:count],
            cu_query_lens=None,
            context_lens=lens,
            max_context_len=meta.max_seq_len,
            alibi_slopes=self.alibi_slopes,
            kv_cache_dtype="auto",
            kv_cache_layout="NHD",
            logits_soft_cap=self.logits_soft_cap or 0.0,
            k_scale=one,
            v_scale=one,
            fp8_out_scale=None,
            partition_size=_PARTITION,
        )
        # rows that see no key are 0, whatever the kernel wrote
        call.output[:count] = torch.where((lens > 0)[:, None, None], out, 0)

    def _prefill(self, call: PagedCall, first: int) -> None:
        """Attend requests `first` and later; those before have one row each."""
        import aiter

        check_replays(self.backend.get_name(), call.query)
        meta, rows = call.meta, slice(first, call.meta.num_actual_tokens)
        assert meta.block_size is not None
        starts, lens = meta.host_lens()
        bounds, slots = token_list(meta.block_table, lens[first:], meta.block_size, first)
        # this function reads no pages
        keys, values = (cache.flatten(0, 1).index_select(0, slots) for cache in self.backend.logical_kv_cache(call.kv_cache))
        queries = meta.query_start_loc[first:] - meta.query_start_loc[first]
        out, log = aiter.flash_attn_varlen_func(
            call.query[rows],
            keys,
            values,
            queries,
            bounds,
            int(np.diff(starts[first:]).max()),
            int(lens[first:].max()),
            softmax_scale=self.scale,
            logits_soft_cap=self.logits_soft_cap or 0.0,
            causal=True,
            alibi_slopes=self.alibi_slopes,
            return_lse=True,
        )[:2]
        fill(out, log, None, call.output[rows], None)
