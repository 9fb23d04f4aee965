"""XLA_ATTN: paged attention written in `jax.numpy`, compiled by XLA for any device.

It serves every feature on every platform, and the Pallas kernels are tested against it. On CPUs it is also the fastest backend.
On GPU and TPU a hand-written kernel is faster, because this one stores a chunk's scores in memory. XLA on CPUs writes float32,
float16 and int8 caches in place, but converts a whole bfloat16 or fp8 cache to a wider dtype and back to change one row (1 ns
per element). On CPUs, use one of the former dtypes unless the cache is small.
"""

from typing import Any

import jax

from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, Capabilities, Feature
from attn.jax.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.jax.kernels import xla


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
                Feature.SPANS,
                Feature.MIXED_CAUSAL,
                Feature.CHUNK_SIZE,
                Feature.KV_SHARING,
                Feature.PER_HEAD_SCALES,
                Feature.NAN_SAFE,
            }
        ),
    )


class XLAAttentionImpl(PagedAttentionImpl, backend=XLAAttentionBackend):
    can_return_lse_for_decode = True
    _over_cache: Any = staticmethod(xla.paged_attention)  #: a subclass with another layout overrides it

    def _attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array]:
        meta = call.meta
        return self._over_cache(  # type: ignore[no-any-return]
            call.query,
            call.kv_cache,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            batch=meta.mask,
            chunk_size=self.mask.chunk_size,
            span_window=bool(self.mask.span_window),
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            **self._rules(call),
        )

    def _attend_ragged(self, call: PagedCall) -> tuple[jax.Array, jax.Array]:
        return xla.ragged_attention(call.query, call.key, call.value, call.meta.query_start_loc, **self._rules(call))

    def _rules(self, call: PagedCall) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "max_query_len": call.meta.max_query_len,
            "causal": call.mask.layer.causal,
            "window": self.window,
            "logits_soft_cap": self.logits_soft_cap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
