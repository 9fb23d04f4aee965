"""FLASH_ATTN: MLA prefill by an installed FlashAttention that supports heads of 192.

FlashAttention 3 takes values of 128 with keys of 192. For other versions the values are padded with zeros to the keys' width,
and the padding is removed from the result. The providers are those of the attention backend of the same name.
"""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Device, Feature, MultipleOf, Request
from attn.dtypes import dtype_name
from attn.torch import records
from attn.torch.alignment import aligned
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._flash_providers import VarlenCall
from attn.torch.backends._vendor import arch_of


class FlashAttnPrefillBackend(MLAPrefillBackend):
    name = "FLASH_ATTN"
    capabilities = records.CUDA(head_sizes=(MultipleOf(8, 32, 256),), features=frozenset({Feature.MLA, Feature.LSE}))
    v_head_dims = (MultipleOf(8, 8, 256),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) or providers.why_none(_plain(request), device)

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
        # values are views behind keys, at any address
        q, k, v, meta = aligned(call.q), aligned(call.k), aligned(call.v), call.meta
        # at each call, because a layer's dtype may change; the choice is cached
        provider = providers.chosen(Request(q.shape[2], dtype_name(q.dtype)), arch_of(q.device))
        width = v.shape[2]
        # Zeros in the values are zeros in the result, and do not enter the log-sum-exp.
        if width < k.shape[2] and not provider.narrow_values(k.shape[2], width):
            v = torch.nn.functional.pad(v, (0, k.shape[2] - width))
        provided = VarlenCall(
            query=q,
            key=k,
            value=v,
            starts=meta.query_start_loc,
            key_starts=call.key_start_loc,
            max_query_len=meta.max_query_len,
            max_seq_len=call.max_keys,
            scale=self.scale,
            # new tokens are causal, a chunk of the context is seen whole
            window=(None, 0 if call.causal else None),
        )
        out, lse = provider.attend(provider.load(), provided)
        # providers return either infinity for a row without a key
        return out[..., :width], torch.where(lse.isinf(), -torch.inf, lse)


def _plain(request: Request) -> Request:
    """Return the request for ordinary attention with heads as wide as the keys."""
    return Request(request.head_size, request.dtype)
