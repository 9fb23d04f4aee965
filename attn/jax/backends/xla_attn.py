"""XLA_ATTN: paged attention written in `jax.numpy`, compiled by XLA for any device.

It serves every feature on every platform, and the Pallas kernels are tested against it. On CPUs it is also the fastest backend.
On GPU and TPU a hand-written kernel is faster, because this one stores a chunk's scores in memory. XLA on CPUs writes float32,
float16 and int8 caches in place, but converts a whole bfloat16 or fp8 cache to a wider dtype and back to change one row (1 ns
per element). On CPUs, use one of the former dtypes unless the cache is small.
"""

from typing import Any

import jax

from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES
from attn.jax import records
from attn.jax.backends._paged import FEATURES, PagedAttentionBackend, PagedAttentionImpl
from attn.jax.kernels import xla

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4_per_token_head")


class XLAAttentionBackend(PagedAttentionBackend):
    name = "XLA_ATTN"
    capabilities = records.XLA(
        kv_cache_dtypes=KV_CACHE_DTYPES,
        attn_types=ATTN_TYPES,
        features=FEATURES,
        refusals=records.NOT_INVARIANT,
    )


class XLAAttentionImpl(PagedAttentionImpl, backend=XLAAttentionBackend):
    can_return_lse_for_decode = True
    _over_cache: Any = staticmethod(xla.paged_attention)  #: a subclass with another layout overrides it

    def _attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array]:
        # encoders have neither chunks nor masks of a batch, so `_rules` leaves these out
        of_layer = {"chunk_size": self.mask.chunk_size, "span_window": bool(self.mask.span_window)}
        of_call = {"batch": call.meta.mask, "k_scale": call.k_scale, "v_scale": call.v_scale}
        rules = {**self._rules(call), **of_layer, **of_call}
        return self._over_cache(call.query, call.kv_cache, call.meta.requests, **rules)

    def _attend_ragged(self, call: PagedCall) -> tuple[jax.Array, jax.Array]:
        return xla.ragged_attention(call.query, call.key, call.value, call.meta.query_start_loc, **self._rules(call))
