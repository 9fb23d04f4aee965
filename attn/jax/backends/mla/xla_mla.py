"""XLA_MLA: multi-head latent attention in `jax.numpy`, compiled by XLA for any device.

It serves every cache dtype, including the 656-byte rows of `fp8_ds_mla`, on every platform, and PALLAS_MLA is tested against
it. It stores a chunk's scores in memory, which PALLAS_MLA avoids.
"""

import jax

from attn.capabilities import LATENT_CACHE_DTYPES, Feature
from attn.jax import records
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl
from attn.jax.kernels import xla_mla


class XLAMLABackend(MLACommonBackend):
    name = "XLA_MLA"
    capabilities = records.XLA(
        kv_cache_dtypes=LATENT_CACHE_DTYPES,
        features=frozenset({Feature.MLA, Feature.NON_CAUSAL, Feature.DCP, Feature.NAN_SAFE}),
        refusals=records.NOT_INVARIANT,
    )


class XLAMLAImpl(MLACommonImpl, backend=XLAMLABackend):
    def _decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
        meta, rules = call.meta, {"kv_lora_rank": self.kv_lora_rank, "scale": self.scale, "k_scale": call.k_scale}
        # `max_query_len` and causality change the program, the other numbers do not
        static = {"max_query_len": meta.max_query_len, "causal": meta.causal}
        return xla_mla.latent_attention(call.query, call.kv_cache, meta.requests, **rules, **static)
