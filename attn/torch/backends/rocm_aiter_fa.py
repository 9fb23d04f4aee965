"""ROCM_AITER_FA: AITER's Composable Kernel and assembly FlashAttention, the fastest on MI300 (2.7-4.4x ROCM_ATTN, AMD).

Decodes at the head of a batch read their pages through `paged_attention_v1`; everything after them has its keys gathered
into one row and takes `flash_attn_varlen_func`. The first knows neither sinks nor a log-sum-exp, so that neither is
promised; windows are refused until their meaning in the first has been seen on a device. Interface of ROCm/aiter at
e4048607.
"""

import numpy as np
import torch

from attn.backends.abstract import AttentionLayer
from attn.capabilities import Capabilities, Feature
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.backends._vendor import decodes_first, fill, token_list
from attn.torch.metadata import PagedAttentionMetadata

_PARTITION = 256  #: keys of a decode's part


class AiterFlashAttentionBackend(PagedAttentionBackend):
    name = "ROCM_AITER_FA"
    block_sizes = (16, 32)
    capabilities = Capabilities(
        framework="torch",
        platforms=("rocm",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(64, 128, 256),
        features=frozenset({Feature.SOFT_CAP, Feature.ALIBI, Feature.KV_SHARING}),
        packages=("aiter",),
        install="git+https://github.com/ROCm/aiter",
        archs=(("rocm", ("gfx942", "gfx950")),),
    )


class AiterFlashAttentionImpl(PagedAttentionImpl, backend=AiterFlashAttentionBackend):
    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        starts, _ = attn_metadata.host_lens()
        decodes = decodes_first(starts)
        if decodes:
            self._decode(query[:decodes], kv_cache, attn_metadata, decodes, output[:decodes])
        rows = slice(decodes, attn_metadata.num_actual_tokens)
        if rows.stop > rows.start:
            self._prefill(query[rows], kv_cache, attn_metadata, decodes, output[rows])

    def _decode(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: PagedAttentionMetadata, count: int, output: torch.Tensor
    ) -> None:
        import aiter

        keys, values = self.backend.logical_kv_cache(kv_cache)
        parts = -(-meta.max_seq_len // _PARTITION)
        states = count * self.num_heads * parts
        size = states * self.head_size * query.element_size() + 2 * states * 4  # as `paged_attention_v1` counts it
        out = torch.empty_like(query)
        one = torch.ones(1, dtype=torch.float32, device=query.device)
        lens = meta.seq_lens[:count]
        aiter.paged_attention_v1(
            out, torch.empty(size, dtype=torch.uint8, device=query.device), query, keys, values, self.scale,
            meta.block_table[:count], None, lens, meta.max_seq_len, self.alibi_slopes, "auto", "NHD",
            self.logits_soft_cap or 0.0, one, one, None, _PARTITION,
        )  # fmt: skip
        output[...] = torch.where((lens > 0)[:, None, None], out, 0)

    def _prefill(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: PagedAttentionMetadata, first: int, output: torch.Tensor
    ) -> None:
        import aiter

        assert meta.block_size is not None
        starts, lens = meta.host_lens()
        bounds, slots = token_list(meta.block_table, lens[first:], meta.block_size, first)
        keys, values = (part.flatten(0, 1).index_select(0, slots) for part in self.backend.logical_kv_cache(kv_cache))
        queries = meta.query_start_loc[first:] - meta.query_start_loc[first]
        out, log = aiter.flash_attn_varlen_func(
            query, keys, values, queries, bounds, int(np.diff(starts[first:]).max()), int(lens[first:].max()),
            softmax_scale=self.scale, logits_soft_cap=self.logits_soft_cap or 0.0, causal=True,
            alibi_slopes=self.alibi_slopes, return_lse=True,
        )[:2]  # fmt: skip
        fill(out, log, None, output, None)
