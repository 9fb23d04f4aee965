"""The backend of models without attention layers, such as Mamba.

It gives an engine the backend, metadata class and builder that it expects. It has no cache, and calling its attention raises
an error.
"""

from dataclasses import dataclass
from typing import Any

from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attn.backends.metadata import AttentionMetadata, CommonAttentionMetadata
from attn.errors import UnsupportedError


@dataclass
class PlaceholderAttentionMetadata(AttentionMetadata):
    """The framework-neutral batch, unchanged: state-space layers read its lengths."""

    common: CommonAttentionMetadata


class PlaceholderAttentionMetadataBuilder(AttentionMetadataBuilder[PlaceholderAttentionMetadata]):
    """Returns the batch as metadata."""

    metadata_cls = PlaceholderAttentionMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PlaceholderAttentionMetadata:
        return self.metadata_cls(common_attn_metadata)


class PlaceholderAttentionBackend(AttentionBackend):
    """The backend that an engine selects for an attention-free model."""

    name = "NO_ATTENTION"
    metadata_cls = PlaceholderAttentionMetadata
    builder_cls = PlaceholderAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        # An engine that allocates by shape allocates nothing.
        return (0,)


class PlaceholderAttentionImpl(AttentionImpl[PlaceholderAttentionMetadata], backend=PlaceholderAttentionBackend):
    """Accepts any arguments and computes nothing."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("NO_ATTENTION was selected (is_attention_free=True), but the model calls attention")
