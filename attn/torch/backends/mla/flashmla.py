"""FLASHMLA: DeepSeek's MLA decode kernel for Hopper.

A page holds 64 tokens, a row 512 + 64. Requests of one query length share a call; its tile schedule depends only on the
batch, and the following layers reuse it. Interface of the deepseek-ai/FlashMLA repository at 9241ae3e, built from source or
included in vLLM's wheels. Dense decode needs sm_90 and a bfloat16 or float16 cache. The log-sum-exp is natural, +inf for a row
that sees no key.
"""

import torch

from attn.capabilities import Device, Feature, Request
from attn.torch import records
from attn.torch.backends._paged import is_captured
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.torch.backends.mla._vendor import FLASH_MLA, UniformMLAImpl, flash_mla, without_flash_mla


class FlashMLABackend(MLACommonBackend):
    name = "FLASHMLA"
    block_sizes = (64,)
    capabilities = records.CUDA(
        head_sizes=(576,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=(FLASH_MLA,),
        install="vllm",
        archs=(("cuda", ("sm_90",)),),
    )
    latent_dims = ((512, 64),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) or without_flash_mla()


class FlashMLAImpl(UniformMLAImpl, backend=FlashMLABackend):
    def _decode_uniform(
        self, call: DecodeCall, q: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels, key = flash_mla(), (q.shape[1], q.dtype)
        # an object that the first call fills: layers of one batch, and one query length, share it
        schedule = None if is_captured(q) else self._plan(call.meta, *key)
        if schedule is None:
            schedule = kernels.get_mla_metadata()[0]
            # A graph fills its own, for the lengths of each replay; calls outside of it would read it before the first one.
            if not is_captured(q):
                self._keep(call.meta, schedule, *key)
        out, lse = kernels.flash_mla_with_kvcache(
            q, call.kv_cache[:, :, None], block_table, lens, self.kv_lora_rank, schedule, softmax_scale=self.scale, causal=True
        )
        return out, lse
