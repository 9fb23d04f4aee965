"""FLASH_ATTN: FlashAttention over the paged cache, by the best installed provider that serves the layer.

It is the fastest prefill on Ampere, Hopper and Blackwell. PyTorch alone is enough if it has its own paged `varlen_attn`.
`_flash_providers` chooses the package once per layer request and device; if none serves, the error lists each provider's
reasons. This backend applies sinks itself, from the log-sum-exp (docs/semantics.md §7): at the cost of one more rounding, the
result is the same for every provider. Masks besides causality and the window are served by FlashAttention 4 only, in the
batches that have them: other batches use the same provider and arguments as a layer without such masks.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch

from attn.arguments import batch_features
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.capabilities import ATTN_TYPES, MASK_FEATURES, Capabilities, Device, MultipleOf, Request
from attn.dtypes import dtype_name
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._flash_providers import VarlenCall
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.backends._vendor import arch_of, fill, halves
from attn.torch.metadata import LAUNCHED_BY, PagedAttentionMetadata, PagedAttentionMetadataBuilder


@dataclass
class FlashAttentionMetadata(PagedAttentionMetadata):
    """The batch, and key_starts [R + 1] int32: the cumulative key lengths, which FlashAttention 2 requires."""

    key_starts: torch.Tensor | None = None

    _launched_by: ClassVar = attrgetter(*LAUNCHED_BY, "key_starts")


class FlashAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builder that adds the cumulative key lengths, once per batch."""

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

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        masks = ", ".join(sorted(MASK_FEATURES))
        return tuple(
            f"with {masks}, {provider.name} computes every tile of keys, those that no row sees too"
            for provider in providers.present()
            if provider.mask_needs and not (device and provider.capabilities.device_reasons(device))
        )


class FlashAttentionImpl(PagedAttentionImpl, backend=FlashAttentionBackend):
    can_return_lse_for_decode = makes_output = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: By dtype, block size, device and features of the batch: the provider that was chosen, and its module.
        self._chosen = dict[Any, tuple[providers.Provider, Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chosen": {}}  # modules are neither copied nor pickled; a copy chooses again

    @staticmethod
    def get_supported_kernel_block_size() -> list[int | MultipleOf]:
        """Return the smallest block size of the installed providers; of all providers if none is installed."""
        sizes = {p.block_size for p in providers.present() or providers.PROVIDERS}
        return [min(sizes, key=lambda size: size.base)]  # the others are multiples of it

    def _attend(self, call: PagedCall) -> torch.Tensor:
        return self._compute(call, *halves(call.kv_cache), is_paged=True)

    def _attend_ragged(self, call: PagedCall) -> torch.Tensor:
        rows = call.meta.num_actual_tokens
        return self._compute(call, call.key[:rows], call.value[:rows], is_paged=False)

    def _compute(self, call: PagedCall, key: torch.Tensor, value: torch.Tensor, is_paged: bool) -> torch.Tensor:
        """Attend keys and values of the cache, or of the batch's own rows; return the output."""
        rows, held, query, output = call.meta.num_actual_tokens, {} if call.held is None else call.held, call.query, call.output
        if rows == 0:
            return torch.empty_like(query) if output is None else output
        unpadded = query if rows == query.shape[0] else query[:rows]
        # derived from the batch once for all layers of this shape
        if "attend" not in held:
            held["attend"] = self._bind(call, unpadded, key, value, is_paged)
        slopes = {} if self.alibi_slopes is None else {"alibi_slopes": self.alibi_slopes}
        # slopes are a layer's own, and passed with each call
        out, log = held["attend"](unpadded, key, value, **slopes)
        # nothing left to correct: the provider's output is the result
        is_complete = self.sinks is None and call.lse is None and not self._may_lack_keys(call)
        if is_complete and output is None and unpadded is query and out.is_contiguous():
            return out  # type: ignore[no-any-return]
        output = torch.empty_like(query) if output is None else output
        if is_complete:
            (output if unpadded is query else output[:rows]).copy_(out)
        else:
            fill(out, log, self.sinks, output, call.lse)
        return output

    def _bind(
        self, call: PagedCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_paged: bool
    ) -> providers.Bound:
        """Return the function that computes calls like this one over the batch. query, key, value: its arguments."""
        meta, (layer, batch) = call.meta, call.mask
        assert isinstance(meta, FlashAttentionMetadata) and meta.key_starts is not None
        longest = meta.max_seq_len if is_paged else meta.max_query_len
        # Only batches with masks need FlashAttention 4: others keep the provider that serves them best.
        batch_needs = frozenset[str]() if batch.is_plain else batch_features(batch)
        # a chunk as long as the longest request hides nothing
        window_is_all = not batch_needs and (layer.chunk_size is None or layer.chunk_size >= longest)
        provided = VarlenCall(
            query=query,
            key=key,
            value=value,
            starts=meta.query_start_loc,
            key_starts=meta.key_starts if is_paged else meta.query_start_loc,
            max_query_len=meta.max_query_len,
            max_seq_len=longest,
            scale=self.scale,
            window=call.window,
            lens=meta.seq_lens if is_paged else None,
            block_table=meta.block_table if is_paged else None,
            soft_cap=self.logits_soft_cap or 0.0,
            mask=None if window_is_all else call.mask,
        )
        block_size = meta.block_size if is_paged else None
        chosen_by = call.query.dtype, block_size, call.query.device, batch_needs
        if chosen_by not in self._chosen:
            request = self.request()
            features = request.features | batch_needs
            request = replace(request, dtype=dtype_name(call.query.dtype), block_size=block_size, features=features)
            provider = self._provider(request, arch_of(call.query.device))
            # with its module: a look-up in `sys.modules` is left out of each call
            self._chosen[chosen_by] = provider, provider.load()
        provider, module = self._chosen[chosen_by]
        return provider.bind(module, provided)

    def _provider(self, request: Request, arch: str) -> providers.Provider:
        """Return the best provider that serves a request."""
        return providers.chosen(request, arch)
