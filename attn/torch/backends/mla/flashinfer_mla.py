"""FLASHINFER_MLA: TensorRT-LLM's kernels on datacentre Blackwell, FlashInfer's FA2/FA3 templates elsewhere.

On sm_10x `trtllm_batch_decode_with_kv_cache_mla` takes requests of one query length, pages of 32 or 64 and any scale as a
number. Elsewhere `BatchMLAPagedAttentionWrapper` takes ragged queries and any page size; it is planned once per batch, and on
sm_90 reads e4m3 caches. Both return a base-2 log-sum-exp. TensorRT-LLM's backend is passed explicitly, since "auto" may select
a backend with another base (flashinfer #4485). Interface of flashinfer-ai/flashinfer at fb28d724 (0.7).
"""

from typing import Any

import torch

from attn.capabilities import Device, Feature, Request
from attn.torch import kv_cache as caches
from attn.torch import records
from attn.torch.backends._flashinfer import plan, workspace, wrapper_for
from attn.torch.backends._paged import check_replays
from attn.torch.backends._vendor import LN2, arch_of, int32, page_list
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.torch.backends.mla._vendor import UniformMLAImpl, state

_FP8 = ("fp8", "fp8_e4m3")
_TRTLLM_PAGES = (32, 64)


class FlashInferMLABackend(MLACommonBackend):
    name = "FLASHINFER_MLA"
    capabilities = records.FLASHINFER(
        head_sizes=(576,), kv_cache_dtypes=("auto", *_FP8), features=frozenset({Feature.MLA, Feature.LSE})
    )
    latent_dims = ((512, 64),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        why = super().why_not(request, device)
        if request.kv_cache_dtype in _FP8:
            if request.dtype != "bfloat16":
                why.append(f"kv_cache_dtype={request.kv_cache_dtype} with dtype={request.dtype} (supports bfloat16)")
            if device is not None and device.arch != "sm_90":
                why.append(f"kv_cache_dtype={request.kv_cache_dtype} on {device.arch or 'an unknown arch'} (supports sm_90)")
        pages = request.block_size
        if device is not None and device.arch.startswith("sm_10") and pages is not None and pages not in _TRTLLM_PAGES:
            why.append(f"block_size={pages} on {device.arch} (supports {', '.join(map(str, _TRTLLM_PAGES))})")
        return why


class FlashInferMLAImpl(UniformMLAImpl, backend=FlashInferMLABackend):
    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, kv_cache, meta = call.q, call.kv_cache, call.meta
        if arch_of(q.device).startswith("sm_10"):
            return super()._decode(call)
        check_replays(self.backend.get_name(), q)
        rank, stored, scales = self.kv_lora_rank, 1.0, {}
        if caches.is_quantised(kv_cache.dtype):
            # the kernel would multiply rows by its scales in the query's dtype, which rounds each number a second time
            stored, scales = call.layer._k_scale_float, {"ckv_scale": 1.0, "kpe_scale": 1.0}
        # the scale is part of a plan, so layers with other scales have others
        key = (self.scale * stored, q.dtype, kv_cache.dtype)
        wrapper = self._plan(meta, *key) or self._keep(meta, self._planned(call, self.scale * stored), *key)
        out, lse = wrapper.run(
            q[..., :rank], q[..., rank:], kv_cache[..., :rank], kv_cache[..., rank:], return_lse=True, **scales
        )
        # values are latents too, so the cache's scale multiplies the result
        return state(out if stored == 1.0 else out * stored, (lse * LN2).T)

    def _planned(self, call: DecodeCall, scale: float) -> Any:
        import flashinfer

        meta, device = call.meta, call.q.device
        # owned by the batch's decodes, as its plans are
        wrapper = wrapper_for(meta, device, "mla", flashinfer.mla.BatchMLAPagedAttentionWrapper)
        starts, lens = meta.host_lens()
        indptr, pages = page_list(meta.block_table, lens, meta.block_size)
        plan(
            wrapper,
            device,
            qo_indptr=int32(starts),
            kv_indptr=indptr,
            kv_indices=pages,
            kv_len_arr=int32(lens),
            num_heads=self.num_heads,
            head_dim_ckv=self.kv_lora_rank,
            head_dim_kpe=self.qk_rope_head_dim,
            page_size=meta.block_size,
            causal=True,
            sm_scale=scale,
            q_data_type=call.q.dtype,
            kv_data_type=call.kv_cache.dtype,
        )
        return wrapper

    def _decode_uniform(
        self, call: DecodeCall, q: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import flashinfer

        out, lse = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla(
            query=q,
            # its caches have a dimension of kv heads, of which MLA has one
            kv_cache=call.kv_cache[:, None],
            workspace_buffer=workspace(q.device),
            qk_nope_head_dim=self.qk_nope_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            block_tables=block_table,
            seq_lens=lens,
            max_seq_len=call.meta.max_seq_len,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            return_lse=True,
        )
        requests, rows, heads, _ = q.shape
        return out.reshape(*q.shape[:3], -1), (lse * LN2).reshape(requests, rows, heads).transpose(1, 2)
