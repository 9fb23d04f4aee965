"""`attn.jax.DiffusionAttention`: dense attention as an nnx module, whose backend is chosen once, on construction, and once more
for arrays that are committed to a device of another platform."""

import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.diffusion.layer import BaseDiffusionAttention
from attn.jax.platforms import platform_of

#: Each layer's implementations for other platforms, by their names. Outside the layers: they are no part of a module's state.
_elsewhere: "weakref.WeakKeyDictionary[Any, dict[str, Any]]" = weakref.WeakKeyDictionary()


class DiffusionAttention(BaseDiffusionAttention, nnx.Module):
    __doc__ = BaseDiffusionAttention.__doc__

    framework = "jax"

    @staticmethod
    def _default_dtype() -> Any:
        return jnp.float32

    def __nnx_repr__(self) -> Iterator[reprlib.Object]:
        """Show the module in one line, by itself and within a model, as under torch."""
        # nnx would otherwise print every attribute of the module, one a line
        yield reprlib.Object(type=type(self), empty_repr=f"{self.selection.name}, {self.selection.request}")

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, attn_metadata: DiffusionAttentionMetadata | None = None
    ) -> jax.Array:
        """query: [B, S, H, D]; key, value: [B, M, K, D]. Returns [B, S, H, D]; see `DiffusionAttentionImpl.forward`."""
        impl, place = self.impl, platform_of(query)
        if place is not None and place.name != self.selection.device.platform:
            kept = _elsewhere.setdefault(self.impl, {})
            if place.name not in kept:
                kept[place.name] = self._impl_of(self._select(self.selection.request, platform=place))
            impl = kept[place.name]
        return impl.forward(query, key, value, attn_metadata)
