"""`attn.torch.DiffusionAttention`: dense attention as an `nn.Module`, which follows the dtype and the device of its calls."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.layer import BaseDiffusionAttention
from attn.torch.autocast import lossy
from attn.torch.ops import cast_by
from attn.torch.platforms import platform, platform_of


class DiffusionAttention(BaseDiffusionAttention, nn.Module):
    __doc__ = BaseDiffusionAttention.__doc__

    framework = "torch"

    #: What was chosen for the platforms that calls were on; replaced, never changed.
    _kept: Mapping[str, tuple[Any, Any, Any]] = {}

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.get_default_dtype()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Select a backend for a new dtype of activations. Raises `UnsupportedError` if none serves them."""
        # before the module's own tensors move: a dtype that no backend serves leaves the layer as it was
        dtype = cast_by(fn, self.selection.request.dtype)
        if dtype != self.selection.request.dtype:
            self._choose(replace(self.selection.request, dtype=dtype))
            self._kept = {}
        return super()._apply(fn, recurse)

    def follow(self, device: torch.device) -> None:
        """Take the backend of a device's platform, such as a GPU machine's host; it is chosen at the first call there."""
        name = platform_of(device.type)
        if name is None or name == self.selection.device.platform:
            return
        self._kept = {**self._kept, self.selection.device.platform: (self.backend, self.selection, self.impl)}
        if name in self._kept:
            self.backend, self.selection, self.impl = self._kept[name]
        else:
            self._choose(self.selection.request, platform(name))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DiffusionAttentionMetadata | None = None,
    ) -> torch.Tensor:
        """query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D]; see `DiffusionAttentionImpl.forward`."""
        self.follow(query.device)
        if lossy(query):
            with torch.autocast(query.device.type, enabled=False):
                return self.impl.forward(query, key, value, attn_metadata)
        return self.impl.forward(query, key, value, attn_metadata)

    def extra_repr(self) -> str:
        return f"{self.selection.name}, {self.selection.request}"
