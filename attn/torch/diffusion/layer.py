"""`attn.torch.DiffusionAttention`: dense attention as an `nn.Module`, which follows the dtype of its model."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.layer import BaseDiffusionAttention
from attn.torch.autocast import lossy
from attn.torch.ops import cast_by


class DiffusionAttention(BaseDiffusionAttention, nn.Module):
    __doc__ = BaseDiffusionAttention.__doc__

    framework = "torch"

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.get_default_dtype()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Select a backend for a new dtype of activations. Raises `UnsupportedError` if none serves them."""
        # before the module's own tensors move: a dtype that no backend serves leaves the layer as it was
        dtype = cast_by(fn, self.selection.request.dtype)
        if dtype != self.selection.request.dtype:
            self._choose(replace(self.selection.request, dtype=dtype))
        return super()._apply(fn, recurse)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        """query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D]; see `DiffusionAttentionImpl.forward`."""
        if lossy(query):
            with torch.autocast(query.device.type, enabled=False):
                return self.impl.forward(query, key, value, attn_metadata)
        return self.impl.forward(query, key, value, attn_metadata)

    def extra_repr(self) -> str:
        return f"{self.selection.name}, {self.selection.request}"
