"""FLASH_ATTN: the best installed FlashAttention (4, 3, 2, vLLM's or PyTorch's); padded keys are packed, not masked.

The providers are those of the attention backend of the same name; each receives the batch as a ragged batch.
"""

import functools

import torch

from attn.capabilities import Capabilities, Device, MultipleOf, Request
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.dtypes import dtype_name
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._flash_providers import VarlenCall
from attn.torch.backends._vendor import arch_of, int32
from attn.torch.diffusion.backends._dense import DenseImpl, pack, state_of_nothing, without_keys_zeroed
from attn.torch.kernels.runs import numbers, stream_of


class FlashAttentionBackend(DiffusionAttentionBackend):
    name = "FLASH_ATTN"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 32, 256),),
        archs=(("cuda", ("sm_80+",)),),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        # asked last, because it imports packages
        return super().why_not(request, device) or providers.why_none(Request(request.head_size, request.dtype), device)


class FlashAttentionImpl(DenseImpl, backend=FlashAttentionBackend):
    can_return_lse = True

    def _attend(self, call: DenseCall) -> torch.Tensor:
        return self._attend_lse(call)[0]

    def _attend_lse(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        if (nothing := state_of_nothing(call)) is not None:
            return nothing
        query, (batch, rows) = call.query, call.query.shape[:2]
        key, value, lens = pack(call)
        multiples = functools.partial(numbers, batch + 1, 0, device=query.device, stream=stream_of(query.device))
        starts, keys = multiples(rows), int(lens.max())
        # a copy from the host, which waits for the device and cannot be captured, only where lengths differ
        bounds = multiples(keys) if keys == lens.min() else int32([0, *lens.cumsum()]).to(query.device)
        provider = providers.chosen(Request(self.head_size, dtype_name(query.dtype)), arch_of(query.device))
        ragged = VarlenCall(
            query=query.flatten(0, 1),
            key=key,
            value=value,
            starts=starts,
            key_starts=bounds,
            max_query_len=rows,
            max_seq_len=max(1, keys),
            scale=self.scale,
            # causality is bottom right in all providers
            window=(None, 0 if self.causal else None),
        )
        out, lse = provider.attend(provider.load(), ragged)
        out, lse = out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1)
        return without_keys_zeroed(call, out, lse, self.causal)
