"""TRTLLM_RAGGED: TensorRT-LLM's ragged MLA prefill, by way of FlashInfer, for datacentre Blackwell.

It takes no request without keys and waits for the device to look for one unless it is given the lengths on the host, so it
is. The log-sum-exp is base 2, [T, H]. Interface of flashinfer-ai/flashinfer at fb28d724 (0.7).
"""

from typing import Any

import numpy as np
import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillMetadata
from attn.capabilities import Capabilities, Feature
from attn.torch.backends._flashinfer import workspace
from attn.torch.backends._vendor import LN2, int32


class TrtllmRaggedPrefillBackend(MLAPrefillBackend):
    name = "TRTLLM_RAGGED"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(192,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=("flashinfer",),
        install="flashinfer-python",
        archs=(("cuda", ("sm_10*",)),),
    )
    v_head_dims = (128,)

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        starts = meta.query_start_loc
        state = self._attend(q, k, v, meta, starts, meta.query_start_loc_cpu, meta.max_query_len, True)
        return state if return_lse else state[0]

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = meta.chunks[chunk_idx]
        return self._attend(q, k, v, meta, chunk.key_start_loc, chunk.key_start_loc_cpu, chunk.max_keys, False)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: MLAPrefillMetadata,
        key_starts: torch.Tensor,
        key_starts_cpu: Any,
        max_keys: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import flashinfer

        out, lse = flashinfer.prefill.trtllm_ragged_attention_deepseek(
            q.contiguous(), k.contiguous(), v.contiguous(), workspace(q.device), key_starts.diff(), meta.max_query_len,
            max_keys, self.scale, 1.0, 1.0, meta.num_reqs, -1, meta.query_start_loc, key_starts, None, causal, True,
            q_seq_lens_cpu=int32(np.diff(meta.query_start_loc_cpu)), kv_seq_lens_cpu=int32(np.diff(key_starts_cpu)),
        )  # fmt: skip
        return out, (lse * LN2).T
