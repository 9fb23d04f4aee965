"""XLA_MLA: multi-head latent attention in `jax.numpy`, compiled by XLA for whatever it runs on.

It serves every cache dtype, the 656-byte rows of `fp8_ds_mla` included, on every platform, and is the second opinion that
PALLAS_MLA is judged by; there a chunk's scores travel through memory, which a kernel spares.
"""

from typing import Any

import jax

from attn.capabilities import Capabilities, Feature
from attn.jax.backends.mla._mla import MLACommonBackend, MLACommonImpl
from attn.jax.kernels import xla_mla
from attn.jax.metadata import PagedAttentionMetadata


class XLAMLABackend(MLACommonBackend):
    name = "XLA_MLA"
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "gpu", "cpu"),
        dtypes=("float32", "bfloat16", "float16"),
        kv_cache_dtypes=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
        features=frozenset({Feature.MLA, Feature.NON_CAUSAL, Feature.DCP, Feature.NAN_SAFE}),
    )


class XLAMLAImpl(MLACommonImpl, backend=XLAMLABackend):
    def _decode(
        self, query: jax.Array, kv_cache: jax.Array, attn_metadata: PagedAttentionMetadata, k_scale: Any, indices: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        meta = attn_metadata
        return xla_mla.latent_attention(
            query, kv_cache, meta.query_start_loc, meta.seq_lens, meta.block_table,
            kv_lora_rank=self.kv_lora_rank, scale=self.scale, max_query_len=meta.max_query_len, causal=meta.causal,
            k_scale=k_scale,
        )  # fmt: skip
