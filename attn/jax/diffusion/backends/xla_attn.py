"""XLA_ATTN: attention compiled by XLA, on any device, with any mask, differentiable: the universal fallback."""

import jax
import jax.numpy as jnp

from attn.capabilities import Feature
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.jax import records
from attn.jax.diffusion.backends._dot_product import DotProductImpl


class XLAAttentionBackend(DiffusionAttentionBackend):
    name = "XLA_ATTN"
    capabilities = records.XLA(dtypes=("float32", "float16", "bfloat16"), features=frozenset({Feature.MASK, Feature.BACKWARD}))


class XLAAttentionImpl(DotProductImpl, backend=XLAAttentionBackend):
    implementation = "xla"

    def _attend(self, call: DenseCall) -> jax.Array:
        return super()._attend(_wide(call)).astype(call.query.dtype)

    def _attend_lse(self, call: DenseCall) -> tuple[jax.Array, jax.Array]:
        out, lse = super()._attend_lse(_wide(call))
        return out.astype(call.query.dtype), lse


def _wide(call: DenseCall) -> DenseCall:
    """Convert float16 to float32: on a CPU, XLA has no float16 product with a float32 sum."""
    if call.query.dtype != jnp.float16:
        return call
    query, key, value = (x.astype(jnp.float32) for x in (call.query, call.key, call.value))
    return call._replace(query=query, key=key, value=value)
