"""XLA_ATTN: attention as XLA compiles it, on any device, with any mask, differentiable: the universal fallback."""

import jax
import jax.numpy as jnp

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.jax.diffusion.backends._dense import DenseBackend
from attn.jax.diffusion.backends._dot_product import DotProductImpl


class XLAAttentionBackend(DenseBackend):
    name = "XLA_ATTN"
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "gpu", "cpu"),
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(MultipleOf(1),),
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
    )


class XLAAttentionImpl(DotProductImpl, backend=XLAAttentionBackend):
    implementation = "xla"

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> jax.Array:
        return super()._attend(*_wide(query, key, value), keys).astype(query.dtype)

    def _attend_lse(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array]:
        out, lse = super()._attend_lse(*_wide(query, key, value), keys)
        return out.astype(query.dtype), lse


def _wide(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float16 as float32: XLA has no float16 product with a float32 sum on a CPU."""
    if query.dtype != jnp.float16:
        return query, key, value
    return query.astype(jnp.float32), key.astype(jnp.float32), value.astype(jnp.float32)
