"""TRITON: MLA prefill by our own ragged kernel, on NVIDIA and AMD GPUs, for heads of any size up to 256."""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillMetadata
from attn.capabilities import Capabilities, Feature, MultipleOf


class TritonPrefillBackend(MLAPrefillBackend):
    name = "TRITON"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm"),
        dtypes=("bfloat16", "float16", "float32"),
        head_sizes=(MultipleOf(8, 24, 256),),
        features=frozenset({Feature.MLA, Feature.LSE, Feature.NAN_SAFE}),
        packages=("triton",),
        archs=(("cuda", ("sm_80+",)),),
    )
    v_head_dims = (MultipleOf(8, 16, 256),)

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._run(q, k, v, meta.query_start_loc, meta.query_start_loc, True, return_lse)
        return out if lse is None else (out, lse)

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._run(q, k, v, meta.query_start_loc, meta.chunks[chunk_idx].key_start_loc, False, True)
        assert lse is not None
        return out, lse

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        causal: bool,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from attn.torch.kernels.mla_prefill import mla_prefill

        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
        mla_prefill(out, lse, q, k, v, queries, keys, self.scale, causal)
        return out, lse
