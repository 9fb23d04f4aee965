"""ROCM_AITER_UNIFIED_ATTN: AITER's Triton kernel for mixed batches, tuned by AMD for CDNA 3 and 4.

Causal attention over pages of a multiple of 16, with windows, ALiBi and sinks. Two things that it takes are refused here:
its soft cap computes exp(s / cap) / exp(-s / cap), which is NaN above |s / cap| = 88, and its fp8 caches are e4m3fnuz on
MI300, another format than this library's. It returns no log-sum-exp. Interface of ROCm/aiter at e4048607.
"""

import torch

from attn.backends.abstract import AttentionLayer
from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.metadata import PagedAttentionMetadata


class RocmAiterUnifiedAttentionBackend(PagedAttentionBackend):
    name = "ROCM_AITER_UNIFIED_ATTN"
    block_sizes = (MultipleOf(16),)
    capabilities = Capabilities(
        framework="torch",
        platforms=("rocm",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 32, 256),),
        features=frozenset({Feature.SLIDING_WINDOW, Feature.ALIBI, Feature.SINKS, Feature.KV_SHARING}),
        packages=("aiter",),
        install="git+https://github.com/ROCm/aiter",
        archs=(("rocm", ("gfx942", "gfx950")),),
    )


class RocmAiterUnifiedAttentionImpl(PagedAttentionImpl, backend=RocmAiterUnifiedAttentionBackend):
    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        from aiter.ops.triton.attention.unified_attention import unified_attention

        rows = attn_metadata.num_actual_tokens
        if rows == 0:
            return
        keys, values = self.backend.logical_kv_cache(kv_cache)
        left = self.window[0]
        unified_attention(
            query[:rows], keys, values, output[:rows], attn_metadata.query_start_loc, attn_metadata.max_query_len,
            attn_metadata.seq_lens, attn_metadata.max_seq_len, self.scale, True, (-1, -1) if left is None else (left, 0),
            attn_metadata.block_table, 0.0, None, None, None, alibi_slopes=self.alibi_slopes, sinks=self.sinks,
        )  # fmt: skip
