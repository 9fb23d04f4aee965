"""XLA prefill for MLA: expanded heads in `jax.numpy`, ragged, on whatever XLA compiles for."""

from typing import Any

import jax

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillMetadata
from attn.capabilities import Capabilities, Feature
from attn.jax.kernels import xla_mla


class XLAPrefillBackend(MLAPrefillBackend):
    name = "XLA"
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "gpu", "cpu"),
        dtypes=("float32", "bfloat16", "float16"),
        features=frozenset({Feature.MLA, Feature.NAN_SAFE}),
    )

    def run_prefill_new_tokens(
        self, q: jax.Array, k: jax.Array, v: jax.Array, meta: MLAPrefillMetadata, return_lse: bool
    ) -> Any:
        starts = meta.query_start_loc
        out, lse = self._attend(q, k, v, starts, starts, meta.max_query_len, meta.max_query_len, True)
        return (out, lse) if return_lse else out

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: jax.Array, k: jax.Array, v: jax.Array, meta: MLAPrefillMetadata
    ) -> tuple[jax.Array, jax.Array]:
        chunk = meta.chunks[chunk_idx]
        return self._attend(q, k, v, meta.query_start_loc, chunk.key_start_loc, meta.max_query_len, chunk.max_keys, False)

    def _attend(
        self, q: Any, k: Any, v: Any, starts: Any, key_starts: Any, max_query_len: int, max_keys: int, causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        return xla_mla.expanded_attention(
            q, k, v, starts, key_starts, scale=self.scale, max_query_len=max_query_len, max_keys=max_keys, causal=causal
        )
