"""FLASHMLA_SPARSE: DeepSeek's kernels for sparse attention, on Hopper and Blackwell.

The prefill kernel reads bfloat16 caches, as one long list of rows; the decode kernel reads 656-byte `fp8_ds_mla` caches, with
one token per request. Both need physical slots, lists of a multiple of 128 (shorter ones are padded with -1), and 64 or 128
heads (fewer are padded with zeros). Both log-sum-exps are natural (the repository's README says base 2 for prefill, but its
kernel and its reference use natural logarithms), and +inf for a row without keys. Interface of deepseek-ai/FlashMLA at
9241ae3e, as a separate package or within vLLM.
"""

import torch

from attn.capabilities import Device, Feature, Request
from attn.torch import records
from attn.torch.backends.mla._metadata import MLADecodeMetadata
from attn.torch.backends.mla._mla import DecodeCall
from attn.torch.backends.mla._sparse import SparseMLABackend, SparseMLAImpl
from attn.torch.backends.mla._vendor import FLASH_MLA, flash_mla, state, with_heads, without_flash_mla

_HEADS = (64, 128)
_LIST = 128  #: lists of keys have a multiple of this length
_PACKED_PAGE = 64


class FlashMLASparseBackend(SparseMLABackend):
    name = "FLASHMLA_SPARSE"
    capabilities = records.CUDA(
        dtypes=("bfloat16",),
        head_sizes=(576,),
        kv_cache_dtypes=("auto", "bfloat16", "fp8_ds_mla"),
        features=frozenset({Feature.SPARSE_MLA, Feature.LSE}),
        packages=(FLASH_MLA,),
        install="vllm",
        archs=(("cuda", ("sm_90", "sm_100")),),
    )
    latent_dims = ((512, 64),)
    most_heads = _HEADS[-1]

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if request.kv_cache_dtype == "fp8_ds_mla" and request.block_size not in (None, _PACKED_PAGE):
            why.append(f"block_size={request.block_size} of an fp8_ds_mla cache (supports {_PACKED_PAGE})")
        return why or without_flash_mla()


class FlashMLASparseImpl(SparseMLAImpl, backend=FlashMLASparseBackend):
    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        kernels, kv_cache = flash_mla(), call.kv_cache
        assert call.indices is not None
        slots = _slots(call.indices, call.meta)
        # one exists: `most_heads` refuses layers with more heads
        heads = next(known for known in _HEADS if known >= self.num_heads)
        q, real = with_heads(call.q, heads), slice(0, self.num_heads)
        if self.kv_cache_dtype == "fp8_ds_mla":
            schedule, _ = kernels.get_mla_metadata()
            out, lse = kernels.flash_mla_with_kvcache(
                q[:, None],
                kv_cache[:, :, None],
                block_table=None,
                cache_seqlens=None,
                head_dim_v=self.kv_lora_rank,
                tile_scheduler_metadata=schedule,
                softmax_scale=self.scale,
                is_fp8_kvcache=True,
                indices=slots[:, None],
            )
            return state(out[:, 0, real], lse[:, real, 0].T)
        rows = kv_cache.reshape(-1, 1, kv_cache.shape[2])
        out, _, lse = kernels.flash_mla_sparse_fwd(q, rows, slots[:, None], self.scale, self.kv_lora_rank)
        return state(out[:, real], lse[:, real].T)


def _slots(indices: torch.Tensor, meta: MLADecodeMetadata) -> torch.Tensor:
    """Convert positions in each row's own request to cache slots, padded with -1 to a multiple of `_LIST` per row."""
    # Everything on the device: indices are made there by the layer's indexer.
    row = torch.arange(len(indices), device=indices.device, dtype=torch.int32)
    # the last request that begins at or before the row
    request = torch.searchsorted(meta.query_start_loc, row, right=True) - 1
    is_valid = (indices >= 0) & (indices < meta.seq_lens[request][:, None])
    # 0 where there is no key: an index that the table has
    tokens = torch.where(is_valid, indices, 0)
    pages = meta.block_table[request].gather(1, (tokens // meta.block_size).long())
    slots = torch.where(is_valid, pages * meta.block_size + tokens % meta.block_size, -1)
    return torch.nn.functional.pad(slots, (0, -slots.shape[1] % _LIST), value=-1)
