"""XLA_ATTN: paged attention written in `jax.numpy`, compiled by XLA for whatever it runs on.

It serves every feature on every platform, and is the second opinion that the Pallas kernels are judged by. On CPUs it is
the fast path too; on GPU and TPU a hand-written kernel wins, since here a chunk's scores travel through memory. XLA on CPUs
writes float32, float16 and int8 caches in place, but widens and narrows a whole bfloat16 or fp8 one to change a row of it
(1 ns an element): there, prefer one of the former for a cache of any size.
"""

from typing import Any

import jax

from attn.capabilities import ATTN_TYPES, Capabilities, Feature
from attn.jax.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.jax.kernels import xla
from attn.jax.metadata import PagedAttentionMetadata


class XLAAttentionBackend(PagedAttentionBackend):
    name = "XLA_ATTN"
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "gpu", "cpu"),
        dtypes=("float32", "bfloat16", "float16"),
        kv_cache_dtypes=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
        attn_types=ATTN_TYPES,
        features=frozenset(
            {
                Feature.NON_CAUSAL,
                Feature.SLIDING_WINDOW,
                Feature.TWO_SIDED_WINDOW,
                Feature.SOFT_CAP,
                Feature.ALIBI,
                Feature.SINKS,
                Feature.TREE_MASK,
                Feature.KV_SHARING,
                Feature.PER_HEAD_SCALES,
                Feature.NAN_SAFE,
            }
        ),
    )


class XLAAttentionImpl(PagedAttentionImpl, backend=XLAAttentionBackend):
    can_return_lse_for_decode = True

    def _attend(
        self, query: jax.Array, kv_cache: jax.Array, attn_metadata: PagedAttentionMetadata, k_scale: Any, v_scale: Any
    ) -> tuple[jax.Array, jax.Array]:
        meta = attn_metadata
        return xla.paged_attention(
            query,
            kv_cache,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            tree_mask=meta.tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            **self._rules(meta),
        )

    def _attend_ragged(
        self, query: jax.Array, key: jax.Array, value: jax.Array, attn_metadata: PagedAttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        return xla.ragged_attention(query, key, value, attn_metadata.query_start_loc, **self._rules(attn_metadata))

    def _rules(self, attn_metadata: PagedAttentionMetadata) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "max_query_len": attn_metadata.max_query_len,
            "causal": self.is_causal(attn_metadata),
            "window": self.window,
            "logits_soft_cap": self.logits_soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
