"""TRITON_ATTN_JAX: TRITON_ATTN's kernels under jax, compiled by Triton without torch and launched by XLA.

They read pages where they are, and scores never leave a multiprocessor; XLA_ATTN gathers the pages and stores a chunk's
scores. The cache is XLA_ATTN's, [2, N, P, K, D], and is written in place where it is donated. One program serves every batch of
a bucket: the plan that divides the keys of decodes into splits of equal size is computed on the device, from the lengths.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, Device, Feature, MultipleOf, Request
from attn.jax import kv_cache as caches
from attn.jax import records
from attn.jax.backends._paged import FEATURES, PagedAttentionBackend, PagedAttentionImpl
from attn.jax.kernels.gpu.launch import reasons
from attn.kernels.paged_launch import LayerParams


class TritonAttentionBackend(PagedAttentionBackend):
    name = "TRITON_ATTN_JAX"
    block_sizes = (MultipleOf(16),)
    capabilities = records.TRITON(
        head_sizes=(MultipleOf(8, 32, 256), 512),
        kv_cache_dtypes=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
        attn_types=ATTN_TYPES,
        features=FEATURES | {Feature.BATCH_INVARIANT},
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) + reasons(request, device)


class TritonAttentionImpl(PagedAttentionImpl, backend=TritonAttentionBackend):
    can_return_lse_for_decode = True

    def _write(
        self, key: jax.Array, value: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array, k_scale: Any, v_scale: Any
    ) -> jax.Array:
        # Imported where it is called: Triton need not be installed to ask whether the backend serves a layer.
        from attn.jax.kernels.gpu.paged_attention import write_kv

        return write_kv(key, value, kv_cache, slot_mapping, *_scales(kv_cache, k_scale, v_scale))

    def _attend(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None]:
        _, lens, table = call.meta.requests
        k_scale, v_scale = _scales(call.kv_cache, call.k_scale, call.v_scale)
        keys = {"cache": call.kv_cache, "lens": lens, "table": table, "k_scale": k_scale, "v_scale": v_scale}
        return self._launch(call, keys, call.meta.max_seq_len, mask=call.meta.mask)

    def _attend_ragged(self, call: PagedCall) -> tuple[jax.Array, jax.Array | None]:
        # encoders: keys and rows are the same tokens, so max_query_len bounds the keys too
        return self._launch(call, {"keys": call.key, "values": call.value}, call.meta.max_query_len)

    def _launch(
        self, call: PagedCall, keys: dict[str, Any], max_seq_len: int, **more: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        from attn.jax.kernels.gpu.paged_attention import BatchBounds, KVInputs, PerHead, paged_attention

        layer = LayerParams(
            scale=self.scale,
            soft_cap=self.logits_soft_cap or 0.0,
            left=call.window[0],
            right=call.window[1],
            # the layer's own right bound, which a tree has in place of causality (docs/semantics.md §11)
            tree_right=self.window[1],
            chunk_size=self.mask.chunk_size,
            span_window=bool(self.mask.span_window),
            invariant=self.batch_invariant,
            sparse=None,
        )
        extents, per_head = BatchBounds(call.meta.max_query_len, max_seq_len), PerHead(self.alibi_slopes, self.sinks)
        more |= {"per_head": per_head, "return_lse": self.need_to_return_lse_for_decode}
        return paged_attention(call.query, call.meta.query_start_loc, KVInputs(**keys), layer, extents, **more)


def _scales(kv_cache: jax.Array, *scales: Any) -> tuple[Any, ...]:
    """Return the scales of a quantised cache as arrays, which are no part of the program; None for any other cache."""
    coded = caches.is_quantised(kv_cache.dtype)
    return tuple(jnp.asarray(scale, jnp.float32) if coded else None for scale in scales)
