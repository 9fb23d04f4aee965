"""ROCM_AITER_MLA: AMD's assembly MLA decode kernels for CDNA 3 and later.

AITER reads the cache with pages of one token, so the page list has every token's slot, for any block size of the cache. That
list is made once per batch. The kernels support 16 or 128 heads (other numbers only with some query lengths); fewer are padded
with zeros. Interface of ROCm/aiter at e4048607. The log-sum-exp is natural, [T, H].
"""

import torch

from attn.capabilities import Feature
from attn.torch import records
from attn.torch.backends._paged import check_replays
from attn.torch.backends._vendor import token_list
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.torch.backends.mla._vendor import UniformMLAImpl, state, with_heads

_HEADS = (16, 128)


class AiterMLABackend(MLACommonBackend):
    name = "ROCM_AITER_MLA"
    capabilities = records.AITER(head_sizes=(576,), features=frozenset({Feature.MLA, Feature.LSE}))
    latent_dims = ((512, 64),)
    most_heads = _HEADS[-1]


class AiterMLAImpl(UniformMLAImpl, backend=AiterMLABackend):
    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        from aiter.mla import mla_decode_fwd

        meta, kv_cache = call.meta, call.kv_cache
        check_replays(self.backend.get_name(), call.q)
        indptr, slots, ones = self._plan(meta, "slots") or self._keep(meta, _slots(meta), "slots")
        heads = next(known for known in _HEADS if known >= self.num_heads)
        q = with_heads(call.q, heads)
        out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        _, lse = mla_decode_fwd(
            q=q,
            kv_buffer=kv_cache.reshape(-1, 1, 1, kv_cache.shape[2]),
            o=out,
            qo_indptr=meta.query_start_loc,
            kv_indptr=indptr,
            kv_indices=slots,
            kv_last_page_lens=ones,
            max_seqlen_q=meta.max_query_len,
            sm_scale=self.scale,
            return_lse=True,
        )
        return state(out[:, : self.num_heads], lse.reshape(q.shape[:2])[:, : self.num_heads].T)


def _slots(meta: MLADecodeMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (indptr [R + 1], every token's slot, the length of each request's last page: 1), on the device."""
    _, lens = meta.host_lens()
    indptr, slots = token_list(meta.block_table, lens, meta.block_size)
    return indptr, slots, torch.ones_like(meta.seq_lens)
