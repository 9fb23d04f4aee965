"""ROCM_AITER_UNIFIED_ATTN: AITER's Triton kernel for mixed batches, tuned by AMD for CDNA 3 and 4.

Causal attention over pages of a multiple of 16, with windows, ALiBi and sinks. This adapter rejects two features that the
kernel has: its soft cap computes exp(s / cap) / exp(-s / cap), which is NaN above |s / cap| = 88, and its fp8 caches are
e4m3fnuz on MI300, unlike this library's. It returns no log-sum-exp. Interface of ROCm/aiter at e4048607.
"""

from attn.backends.paged import PagedCall
from attn.capabilities import Feature, MultipleOf
from attn.torch import records
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl


class RocmAiterUnifiedAttentionBackend(PagedAttentionBackend):
    name = "ROCM_AITER_UNIFIED_ATTN"
    block_sizes = (MultipleOf(16),)
    capabilities = records.AITER(
        head_sizes=(MultipleOf(8, 32, 256),),
        features=frozenset({Feature.SLIDING_WINDOW, Feature.ALIBI, Feature.SINKS, Feature.KV_SHARING}),
    )


class RocmAiterUnifiedAttentionImpl(PagedAttentionImpl, backend=RocmAiterUnifiedAttentionBackend):
    def _attend(self, call: PagedCall) -> None:
        from aiter.ops.triton.attention.unified_attention import unified_attention

        meta, rows, left = call.meta, call.meta.num_actual_tokens, call.window[0]
        if rows == 0:
            return
        keys, values = self.backend.logical_kv_cache(call.kv_cache)
        unified_attention(
            q=call.query[:rows],
            k=keys,
            v=values,
            out=call.output[:rows],
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            seqused_k=meta.seq_lens,
            max_seqlen_k=meta.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1) if left is None else (left, 0),
            block_table=meta.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
