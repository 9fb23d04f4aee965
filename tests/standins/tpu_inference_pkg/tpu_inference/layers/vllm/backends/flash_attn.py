"""The engine's backend and layer for vLLM's models. The real `forward` reads vLLM's context; this one takes arrays."""

from tpu_inference.layers.common.attention_backend import RPAAttentionBackend, create_attention_backend
from tpu_inference.layers.common.attention_interface import attention


class PallasAttentionBackend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        return PallasAttentionBackendImpl


class PallasAttentionBackendImpl:
    attention_backend = RPAAttentionBackend.name

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap=None,
        attn_type="decoder", kv_sharing_target_layer_name=None, sinks=None,
    ):  # fmt: skip
        self.scale, self.sliding_window, self.sinks = float(scale), sliding_window, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None
    ):
        metadata, mesh = attn_metadata
        return attention(
            kv_cache,
            query,
            key,
            value,
            metadata,
            mesh,
            sm_scale=self.scale,
            sinks=self.sinks,
            attention_chunk_size=self.sliding_window,
            update_kv_cache=self.kv_sharing_target_layer_name is None,
            attention_backend=create_attention_backend(self.attention_backend),
        )
