"""XLA_MLA_SPARSE: latent attention over the keys that an indexer chose (DeepSeek-V3.2), in `jax.numpy`.

A row costs as much as its `topk` keys, at any context length. Gathering keys one by one is slower than reading pages, so use
XLA_MLA for short contexts. `attn.jax.kernels.xla_mla.lightning_indexer` chooses the keys.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attn import envs
from attn.capabilities import LATENT_CACHE_DTYPES, Feature
from attn.errors import DTypeError, ShapeError
from attn.jax import records
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl, check_indices
from attn.jax.kernels import xla_mla
from attn.jax.metadata import PagedAttentionMetadata


class XLAMLASparseBackend(MLACommonBackend):
    name = "XLA_MLA_SPARSE"
    capabilities = records.XLA(
        kv_cache_dtypes=LATENT_CACHE_DTYPES, features=frozenset({Feature.SPARSE_MLA, Feature.DCP, Feature.NAN_SAFE})
    )


class XLAMLASparseImpl(MLACommonImpl, backend=XLAMLASparseBackend):
    """Uses the layer's `indexer.topk_indices` if `indices` is None."""

    def expands(self, attn_metadata: PagedAttentionMetadata) -> bool:
        return False  # an expanded prompt would attend every key, not only the chosen ones

    def _decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
        query = call.query
        indices = getattr(self.indexer, "topk_indices", None) if call.indices is None else call.indices
        _check(indices, query.shape[0])
        rules = {"kv_lora_rank": self.kv_lora_rank, "scale": self.scale, "k_scale": call.k_scale}
        return xla_mla.sparse_attention(query, call.kv_cache, indices, call.meta.requests, **rules)


def _check(indices: Any, rows: int) -> None:
    if indices is None or indices.ndim != 2 or indices.shape[0] != rows:
        got = "None" if indices is None else list(indices.shape)
        raise ShapeError(f"XLA_MLA_SPARSE: indices has shape {got}: must be [{rows}, topk], one row per query row")
    if indices.dtype != jnp.int32:
        raise DTypeError(f"XLA_MLA_SPARSE: indices has dtype {indices.dtype}: must be int32")
    if envs.debug("device") and not isinstance(indices, jax.core.Tracer):
        check_indices(indices)
