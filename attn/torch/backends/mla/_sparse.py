"""Base classes of the sparse MLA backends: every row attends the keys that an indexer chose, absorbed, at any query length.

`indexer` is any object with `topk_indices`: int32 [>= T, topk] on the queries' device. Row t lists positions of keys in its
own request, in any order; -1, or a position at or past the sequence's end, means no key (DeepSeek Sparse Attention). It is
read at every call, so one buffer serves all layers. Indices alone decide what a row sees; no causal mask is applied. A
position listed twice in a row would count twice; ATTN_DEBUG=device checks for this and raises.
"""

import torch

from attn import envs
from attn.errors import DTypeError, MetadataError, ShapeError
from attn.torch.backends.mla._metadata import MLACommonMetadataBuilder, MLADecodeMetadata
from attn.torch.backends.mla._mla import MLACommonBackend, MLACommonImpl, rows_of


class SparseMLABuilder(MLACommonMetadataBuilder):
    """Builder that makes every request a decode."""

    # Absorbed at any length: an expanded prefill would compute keys that no index names.
    decode_threshold = None


class SparseMLABackend(MLACommonBackend):
    builder_cls = SparseMLABuilder


class SparseMLAImpl(MLACommonImpl):
    """Base of sparse MLA implementations. A subclass names its backend and implements `_decode`, over `call.indices`."""

    can_return_lse_for_decode = True

    def _indices(self, meta: MLADecodeMetadata, count: int) -> torch.Tensor:
        """Return the indices of the decodes, [count, topk] int32.

        Raises `ShapeError`, `DTypeError`, or (under ATTN_DEBUG=device) `MetadataError`.
        """
        name = self.backend.get_name()
        chosen = getattr(self.indexer, "topk_indices", None)
        if not isinstance(chosen, torch.Tensor):
            raise DTypeError(f"{name}: indexer.topk_indices is a {type(chosen).__name__}: must be an int32 tensor [T, topk]")
        if chosen.dtype != torch.int32:
            raise DTypeError(f"{name}: indexer.topk_indices has dtype {chosen.dtype}: must be torch.int32")
        if chosen.dim() != 2 or chosen.shape[0] < count:
            raise ShapeError(f"{name}: indexer.topk_indices has shape {list(chosen.shape)}: must be [{count} or more, topk]")
        # the buffer may have more rows than the batch
        slots = rows_of(chosen, meta.rows)
        if envs.debug("device"):
            ordered = slots.sort(1).values
            # -1 may be listed any number of times
            twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
            if len(twice):
                row, column = twice[0].tolist()
                raise MetadataError("topk_indices", row, int(ordered[row, column]), "listed at most once per row")
        return slots
