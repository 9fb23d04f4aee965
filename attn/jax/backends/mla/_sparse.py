"""The base of the sparse MLA backends of jax: rows attend the keys in their indices, and prompts are never expanded."""

from typing import Any

import jax
import jax.numpy as jnp

from attn import envs
from attn.errors import DTypeError, ShapeError
from attn.jax.backends.mla._mla import DecodeCall, MLACommonImpl, check_indices
from attn.jax.metadata import PagedAttentionMetadata


class SparseMLAImpl(MLACommonImpl):
    """Base of sparse implementations. Uses the layer's `indexer.topk_indices` if `indices` is None."""

    def expands(self, attn_metadata: PagedAttentionMetadata) -> bool:
        return False  # an expanded prompt would attend every key, not only the chosen ones

    def _indices(self, call: DecodeCall) -> Any:
        """Return the call's indices [T, topk], or the indexer's, checked."""
        name, rows = self.backend.get_name(), call.q.shape[0]
        indices = getattr(self.indexer, "topk_indices", None) if call.indices is None else call.indices
        if indices is None or indices.ndim != 2 or indices.shape[0] != rows:
            shape = "None" if indices is None else list(indices.shape)
            raise ShapeError(f"{name}: indices has shape {shape}: must be [{rows}, topk], one row per query row")
        if indices.dtype != jnp.int32:
            raise DTypeError(f"{name}: indices has dtype {indices.dtype}: must be int32")
        # a tracer has no values, and reading those of an array waits for the device
        if envs.debug("device") and not isinstance(indices, jax.core.Tracer):
            check_indices(indices)
        return indices
