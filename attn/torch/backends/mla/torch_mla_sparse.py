"""TORCH_MLA_SPARSE: MLA over chosen keys in plain torch operators, on any device that torch supports.

The reference implementation: the keys chosen for a few tokens at a time are gathered from their pages and attended in float32
(float64 for float64). Scores of absent keys are replaced by -inf, never multiplied.
"""

import torch

from attn.capabilities import LATENT_CACHE_DTYPES, Feature
from attn.torch import records
from attn.torch.backends._paged import check_replays
from attn.torch.backends.mla import _rows
from attn.torch.backends.mla._mla import DecodeCall
from attn.torch.backends.mla._sparse import SparseMLABackend, SparseMLAImpl

_GATHERED = 1 << 24  #: elements of gathered rows in memory at once: 64 MiB in float32


class TorchMLASparseBackend(SparseMLABackend):
    name = "TORCH_MLA_SPARSE"
    capabilities = records.ANYWHERE(
        kv_cache_dtypes=LATENT_CACHE_DTYPES,
        features=frozenset({Feature.SPARSE_MLA, Feature.LSE, Feature.NAN_SAFE, Feature.BATCH_INVARIANT}),
    )


class TorchMLASparseImpl(SparseMLAImpl, backend=TorchMLASparseBackend):
    def _writes_by_kernel(self, kv_cache: torch.Tensor) -> bool:
        return False

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, meta = call.q, call.meta
        check_replays(self.backend.get_name(), q)
        exact = torch.promote_types(q.dtype, torch.float32)
        assert call.indices is not None
        indices = call.indices.long()
        starts, lengths = meta.host_lens()
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank, dtype=exact)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=exact)
        # rows at a time: each gathers `topk` rows of the cache of its own
        step = max(1, _GATHERED // max(1, indices.shape[1] * q.shape[2]))
        for r in range(meta.num_reqs):
            begin, end, total = int(starts[r]), int(starts[r + 1]), int(lengths[r])
            for start in range(begin, end, step):
                rows = slice(start, min(start + step, end))
                chosen = indices[rows]
                is_valid = (chosen >= 0) & (chosen < total)
                # position 0 exists where there is a key at all; its weight is 0
                tokens = torch.where(is_valid, chosen, 0)
                # a request without keys may have -1 in its table
                pages = meta.block_table[r].long()[tokens // meta.block_size].clamp(min=0)
                stored = _rows.gather(call.kv_cache, pages.flatten(), (tokens % meta.block_size).flatten())
                keys = _rows.decode(stored, self.kv_cache_dtype, call.layer._k_scale).to(exact).view(*tokens.shape, -1)
                # NaN in an unused row of the cache must not reach the products
                keys = torch.where(is_valid[..., None], keys, 0)
                scores = torch.bmm(q[rows].to(exact), keys.transpose(1, 2)) * self.scale
                scores = torch.where(is_valid[:, None], scores, -torch.inf)
                log = scores.logsumexp(-1)
                log = torch.where(log == torch.inf, torch.nan, log)  # the softmax of a score of +inf is undefined
                weights = torch.where(log[..., None] == -torch.inf, 0, torch.exp(scores - log[..., None]))
                out[rows] = torch.bmm(weights, keys[..., : self.kv_lora_rank])
                lse[:, rows] = log.T
        return out, lse
