"""XLA_ATTN: attention as XLA compiles it, on any device, with any mask, differentiable: the universal fallback."""

import jax
import jax.numpy as jnp

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.functional import attention
from attn.jax.diffusion.backends._dense import DenseBackend
from attn.jax.diffusion.backends._dot_product import DotProductImpl


class XLAAttentionBackend(DenseBackend):
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "gpu", "cpu"),
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(MultipleOf(1),),
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
    )

    @staticmethod
    def get_name() -> str:
        return "XLA_ATTN"

    @staticmethod
    def get_impl_cls() -> type["XLAAttentionImpl"]:
        return XLAAttentionImpl


class XLAAttentionImpl(DotProductImpl):
    backend = XLAAttentionBackend
    can_return_lse = True
    implementation = "xla"

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> jax.Array:
        if query.dtype != jnp.float16:
            return super()._attend(query, key, value, keys)
        # XLA has no float16 product with a float32 sum on a CPU
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        return super()._attend(query, key, value, keys).astype(jnp.float16)

    def _attend_lse(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array]:
        # the written-out formula has the log-sum-exp in float32, whatever goes in
        mask = keys.mask if keys.present is None else keys.present[:, None, None, :]
        out, lse = attention(query, key, value, causal=self.causal, scale=self.scale, mask=mask, return_lse=True)
        return out, lse
