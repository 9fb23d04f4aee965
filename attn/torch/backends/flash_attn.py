"""FLASH_ATTN: FlashAttention over the paged cache, by the best of its providers that is installed and serves the layer.

It leads prefill on Ampere, Hopper and Blackwell, and needs nothing but PyTorch where that brings its own paged
`varlen_attn`. Which package computes is decided once for a layer's request and device, by `_flash_providers`; the
reasons against the others stand in the refusal. Sinks are applied here, from the log-sum-exp (docs/semantics.md §7): one
rounding more, and the same for every provider.
"""

from dataclasses import dataclass, replace

import torch

from attn.backends.abstract import AttentionLayer, AttentionType
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import ATTN_TYPES, ENCODER_TYPES, Capabilities, Device, MultipleOf, Request
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._flash_providers import Call
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.backends._vendor import arch_of, canonical, fill
from attn.torch.metadata import PagedAttentionMetadata, PagedAttentionMetadataBuilder


@dataclass
class FlashAttentionMetadata(PagedAttentionMetadata):
    """The batch, and key_starts [R + 1] int32: where each request's keys begin, were they in one row (no list but
    FlashAttention 2's own takes their lengths that way)."""

    key_starts: torch.Tensor | None = None


class FlashAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Adds the running sum of the lengths, once a batch."""

    metadata_cls = FlashAttentionMetadata

    def extend(self, metadata: FlashAttentionMetadata, batch: CommonAttentionMetadata, fast_build: bool) -> None:
        metadata.key_starts = torch.zeros_like(metadata.query_start_loc)
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=metadata.key_starts[1:])


class FlashAttentionBackend(PagedAttentionBackend):
    name = "FLASH_ATTN"
    metadata_cls = FlashAttentionMetadata
    builder_cls = FlashAttentionMetadataBuilder
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 32, 256),),
        attn_types=ATTN_TYPES,
        features=frozenset().union(*(p.capabilities.features for p in providers.PROVIDERS)),
        archs=(("cuda", ("sm_80+",)),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) or providers.why_none(request, device)


class FlashAttentionImpl(PagedAttentionImpl, backend=FlashAttentionBackend):
    can_return_lse_for_decode = True

    @staticmethod
    def get_supported_kernel_block_size() -> list[int | MultipleOf]:
        """Those of the providers that are here; without one, what the family takes."""
        sizes = {p.block_size for p in providers.present() or providers.PROVIDERS}
        return [min(sizes, key=lambda size: size.base)]  # every other is a multiple of it

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        causal = attn_metadata.causal and self.attn_type == AttentionType.DECODER
        key_cache, value_cache = map(canonical, self.backend.logical_kv_cache(kv_cache))
        window = (self.window[0], 0 if causal else self.window[1])
        self._compute(query, key_cache, value_cache, attn_metadata, window, output, lse)

    def _attend_ragged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        self._compute(query, key, value, attn_metadata, self.window, output, lse)

    def _compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        meta: PagedAttentionMetadata,
        window: tuple[int | None, int | None],
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert isinstance(meta, FlashAttentionMetadata) and meta.key_starts is not None
        rows, ragged = meta.num_actual_tokens, self.attn_type in ENCODER_TYPES
        if rows == 0:
            return
        call = Call(
            query=query[:rows],
            key=key[:rows] if ragged else key,
            value=value[:rows] if ragged else value,
            starts=meta.query_start_loc,
            key_starts=meta.query_start_loc if ragged else meta.key_starts,
            lens=None if ragged else meta.seq_lens,
            block_table=None if ragged else meta.block_table,
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_query_len if ragged else meta.max_seq_len,
            scale=self.scale,
            window=window,
            soft_cap=self.logits_soft_cap or 0.0,
            alibi_slopes=self.alibi_slopes,
        )
        request = replace(self.request(), dtype=str(query.dtype).removeprefix("torch."), block_size=meta.block_size)
        if ragged:
            request = replace(request, block_size=None)
        provider = self._provider(request, arch_of(query.device))
        out, log = provider.attend(provider.load(), call)
        fill(out, log, self.sinks, output[:rows], None if lse is None else lse[:, :rows])

    def _provider(self, request: Request, arch: str) -> providers.Provider:
        """Who computes a request: the best that serves it."""
        return providers.chosen(request, arch)
