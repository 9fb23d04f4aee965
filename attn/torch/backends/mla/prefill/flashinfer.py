"""FLASHINFER: MLA prefill by FlashInfer's ragged wrapper, CUTLASS on datacentre Blackwell and the FA3 templates on Hopper.

A plan is made for a batch and a part of it (the new tokens, or a chunk of the context), and shared by the layers that
follow. The log-sum-exp is base 2, [T, H], with every one of its kernels.
"""

from typing import Any

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillMetadata
from attn.capabilities import Capabilities, Feature
from attn.torch.backends._flashinfer import lend, plan
from attn.torch.backends._vendor import LN2, arch_of, int32


class FlashInferPrefillBackend(MLAPrefillBackend):
    name = "FLASHINFER"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(192,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=("flashinfer",),
        install="flashinfer-python",
        archs=(("cuda", ("sm_90", "sm_10*")),),
    )
    v_head_dims = (128,)

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        state = self._attend(q, k, v, meta, meta.query_start_loc_cpu, True)
        return state if return_lse else state[0]

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend(q, k, v, meta, meta.chunks[chunk_idx].key_start_loc_cpu, False, chunk_idx)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: MLAPrefillMetadata,
        key_starts: Any,
        causal: bool,
        chunk: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (self.get_name(), self.num_heads, self.scale, q.dtype, chunk)
        if key not in meta.plans:
            meta.plans[key] = self._planned(q, meta, key_starts, causal)
        out, lse = meta.plans[key].run(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
        return out, (lse * LN2).T

    def _planned(self, q: torch.Tensor, meta: MLAPrefillMetadata, key_starts: Any, causal: bool) -> Any:
        import flashinfer

        kernels = "cutlass" if arch_of(q.device).startswith("sm_10") else "auto"

        def make(workspace: torch.Tensor) -> Any:
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernels)

        wrapper = lend(meta, q.device, ("mla prefill", kernels), make)
        plan(
            wrapper, q.device, int32(meta.query_start_loc_cpu), int32(key_starts), self.num_heads, self.num_heads,
            self.qk_head_dim, head_dim_vo=self.v_head_dim, causal=causal, sm_scale=self.scale, q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )  # fmt: skip
        return wrapper
