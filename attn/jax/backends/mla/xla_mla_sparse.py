"""XLA_MLA_SPARSE: latent attention over the keys that an indexer chose (DeepSeek-V3.2), in `jax.numpy`.

A row costs as much as its `topk` keys, at any context length. Gathering keys one by one is slower than reading pages, so use
XLA_MLA for short contexts. `attn.jax.kernels.xla_mla.lightning_indexer` chooses the keys.
"""

import jax

from attn.capabilities import LATENT_CACHE_DTYPES, Feature
from attn.jax import records
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.jax.backends.mla._sparse import SparseMLAImpl
from attn.jax.kernels import xla_mla


class XLAMLASparseBackend(MLACommonBackend):
    name = "XLA_MLA_SPARSE"
    capabilities = records.XLA(
        kv_cache_dtypes=LATENT_CACHE_DTYPES,
        features=frozenset({Feature.SPARSE_MLA, Feature.DCP, Feature.NAN_SAFE}),
        refusals=records.NOT_INVARIANT,
    )


class XLAMLASparseImpl(SparseMLAImpl, backend=XLAMLASparseBackend):
    def _decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
        rules = {"kv_lora_rank": self.kv_lora_rank, "scale": self.scale, "k_scale": call.k_scale}
        return xla_mla.sparse_attention(call.query, call.kv_cache, self._indices(call), call.meta.requests, **rules)
