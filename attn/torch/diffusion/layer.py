"""`attn.torch.DiffusionAttention`: dense attention as an `nn.Module`, whose backend is chosen once, on construction."""

import torch
from torch import nn

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.layer import BaseDiffusionAttention


class DiffusionAttention(BaseDiffusionAttention, nn.Module):
    __doc__ = BaseDiffusionAttention.__doc__

    framework = "torch"

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.get_default_dtype()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        """query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D]; see `DiffusionAttentionImpl.forward`."""
        result: torch.Tensor = self.impl.forward(query, key, value, attn_metadata)
        return result

    def extra_repr(self) -> str:
        return f"{self.selection.name}, {self.selection.request}"
