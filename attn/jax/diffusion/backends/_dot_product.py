"""Dense attention by `jax.nn.dot_product_attention`, with either of its implementations; shared by XLA_ATTN and CUDNN."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from attn.diffusion.backends.dense import DenseCall
from attn.jax.diffusion.backends._dense import DenseImpl


class DotProductImpl(DenseImpl):
    """Base of the implementations: the call, its masks, and rows without keys."""

    implementation: ClassVar[Literal["xla", "cudnn"]]
    can_return_lse = True

    def _attend(self, call: DenseCall) -> jax.Array:
        key, value, mask, square = self._masked(call)
        out = self._dot(call.query, key, value, mask=mask, is_causal=square)
        # `jax.nn` gives a row without keys a mean of values, and 0 is its result here (docs/semantics.md §1)
        return out if mask is None else jnp.where(_rows(mask.any(-1)), out, 0)

    def _attend_lse(self, call: DenseCall) -> tuple[jax.Array, jax.Array]:
        key, value, mask, square = self._masked(call)
        out, lse = self._dot(call.query, key, value, mask=mask, is_causal=square, return_residual=True)
        # [B, S, H] there, [B, H, S] here
        lse = jnp.swapaxes(lse, 1, 2)
        if mask is None:
            return out, lse
        return jnp.where(_rows(mask.any(-1)), out, 0), jnp.where(mask.any(-1), lse, -jnp.inf)

    def _dot(self, query: jax.Array, key: jax.Array, value: jax.Array, **rules: Any) -> Any:
        # by default GPUs and TPUs multiply float32 with lower precision
        with jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else None):
            return jax.nn.dot_product_attention(
                query, key, value, scale=self.scale, implementation=self.implementation, **rules
            )

    def _masked(self, call: DenseCall) -> tuple[jax.Array, jax.Array, jax.Array | None, bool]:
        """Return (key, value, mask or None, is_causal).

        The function's own causality is aligned top left, so is_causal is set only for square scores without a mask.
        """
        key, value, mask = call.key, call.value, call.mask
        rows, length = call.query.shape[1], key.shape[1]
        if call.present is not None:
            # absent keys and values may hold anything, and would be multiplied by 0
            present = call.present[:, :, None, None]
            key, value = jnp.where(present, key, 0), jnp.where(present, value, 0)
            mask = jnp.broadcast_to(call.present[:, None, None, :], (key.shape[0], 1, rows, length))
        # its own causality needs no array, and lets fused kernels skip the keys that it hides
        square = self.causal and rows == length and mask is None
        if self.causal and not square:
            # aligned at the bottom right: row i sees keys up to i + length - rows (docs/semantics.md §3)
            triangle = jnp.tril(jnp.ones((rows, length), bool), length - rows)[None, None]
            mask = triangle if mask is None else mask & triangle
        return key, value, mask, square


def _rows(seen: jax.Array) -> jax.Array:
    """Reshape [B, H, S] to broadcast against an output [B, S, H, D]."""
    return jnp.swapaxes(seen, 1, 2)[..., None]
