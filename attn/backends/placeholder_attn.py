"""The backend of models without attention layers (Mamba and the like).

It exists so that an engine finds a backend, a metadata class and a builder where it expects them; it has no cache, and
calling its attention is a mistake that it names.
"""

from dataclasses import dataclass
from typing import Any

from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType
from attn.backends.metadata import AttentionMetadata, CommonAttentionMetadata
from attn.errors import UnsupportedError


@dataclass
class PlaceholderAttentionMetadata(AttentionMetadata):
    """The neutral batch itself: state-space layers read its lengths."""

    common: CommonAttentionMetadata


class PlaceholderAttentionMetadataBuilder(AttentionMetadataBuilder[PlaceholderAttentionMetadata]):
    """Passes the batch through."""

    metadata_cls = PlaceholderAttentionMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PlaceholderAttentionMetadata:
        return self.metadata_cls(common_attn_metadata)


class PlaceholderAttentionBackend(AttentionBackend):
    """Stands where an attention-free model's engine looks for a backend."""

    name = "NO_ATTENTION"
    metadata_cls = PlaceholderAttentionMetadata
    builder_cls = PlaceholderAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (0,)


class PlaceholderAttentionImpl(AttentionImpl[PlaceholderAttentionMetadata], backend=PlaceholderAttentionBackend):
    """Can be built with any arguments and computes nothing."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("NO_ATTENTION computes nothing: this model was selected as attention-free, yet calls it")
