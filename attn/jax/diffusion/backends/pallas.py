"""PALLAS: the dense TPU flash kernel for image and video models; scores never leave VMEM. Interpreted on a CPU, for tests.

Keys that are there are lengths where they are prefixes, and segments otherwise: a row of segment 1 sees keys of segment 1.
"""

import jax
import jax.numpy as jnp

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.jax.diffusion.backends._dense import DenseBackend, DenseImpl


class PallasAttentionBackend(DenseBackend):
    name = "PALLAS"
    interpreted_on = ("cpu",)
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "cpu"),
        dtypes=("bfloat16", "float32"),
        head_sizes=(MultipleOf(8, 32, 256),),
        features=frozenset({Feature.BACKWARD}),
    )


class PallasAttentionImpl(DenseImpl, backend=PallasAttentionBackend):
    can_return_lse = True

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> jax.Array:
        return self._attend_lse(query, key, value, keys)[0]

    def _attend_lse(self, query: jax.Array, key: jax.Array, value: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array]:
        from attn.jax.kernels.tpu.flash_attention import flash_attention

        lens = None if keys.lens is None else jnp.asarray(keys.lens, jnp.int32)
        segments = None if keys.lens is not None or keys.present is None else keys.present.astype(jnp.int32)
        out, lse = flash_attention(
            query, key, value, causal=self.causal, scale=self.scale, return_lse=True, kv_lens=lens, kv_segment_ids=segments,
            q_segment_ids=None if segments is None else jnp.ones(query.shape[:2], jnp.int32),
        )  # fmt: skip
        return out, lse
