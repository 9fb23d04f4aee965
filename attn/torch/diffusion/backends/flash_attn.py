"""FLASH_ATTN: FlashAttention 4, 3, 2, vLLM's or PyTorch's own, the best that is installed; padded keys are packed, not masked.

The providers are those of the attention backend of the same name; each gets the batch as a ragged one.
"""

import torch

from attn.capabilities import Capabilities, Device, MultipleOf, Request
from attn.diffusion.backends.dense import Keys
from attn.dtypes import dtype_name
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends._flash_providers import Call
from attn.torch.backends._vendor import arch_of, int32
from attn.torch.diffusion.backends._dense import DenseBackend, DenseImpl, pack, without_keys_zeroed


class FlashAttentionBackend(DenseBackend):
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
        return super().why_not(request, device) or providers.why_none(Request(request.head_size, request.dtype), device)


class FlashAttentionImpl(DenseImpl, backend=FlashAttentionBackend):
    can_return_lse = True

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys) -> torch.Tensor:
        return self._attend_lse(query, key, value, keys)[0]

    def _attend_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (batch, rows), length = query.shape[:2], key.shape[1]
        (key, value), lens = pack(keys, key, value)
        starts = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=query.device)
        bounds = int32([0, *lens.cumsum()]).to(query.device)
        provider = providers.chosen(Request(self.head_size, dtype_name(query.dtype)), arch_of(query.device))
        call = Call(
            query.flatten(0, 1), key, value, starts, bounds, None, None, rows, max(1, int(lens.max())), self.scale,
            (None, 0 if self.causal else None), 0.0, None,
        )  # fmt: skip
        out, lse = provider.attend(provider.load(), call)
        out, lse = out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1)
        return without_keys_zeroed(out, lse, keys, self.causal, length)
