"""TRTLLM_RAGGED: TensorRT-LLM's ragged MLA prefill, through FlashInfer, for datacentre Blackwell.

It rejects requests without keys. To check for them it would wait for the device, so the lengths are passed on the host. The
log-sum-exp is base 2, [T, H]. Interface of flashinfer-ai/flashinfer at fb28d724 (0.7).
"""

import numpy as np
import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.torch import records
from attn.torch.alignment import aligned
from attn.torch.backends._flashinfer import workspace
from attn.torch.backends._vendor import LN2, int32


class TrtllmRaggedPrefillBackend(MLAPrefillBackend):
    name = "TRTLLM_RAGGED"
    capabilities = records.FLASHINFER(
        head_sizes=(192,), features=frozenset({Feature.MLA, Feature.LSE}), archs=(("cuda", ("sm_10*",)),)
    )
    v_head_dims = (128,)

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
        import flashinfer

        q, meta = call.q, call.meta
        out, lse = flashinfer.prefill.trtllm_ragged_attention_deepseek(
            query=aligned(q.contiguous()),
            key=aligned(call.k.contiguous()),
            value=aligned(call.v.contiguous()),
            workspace_buffer=workspace(q.device),
            # made on the device from the sums, so that only the sums are copied to it
            seq_lens=call.key_start_loc.diff(),
            max_q_len=meta.max_query_len,
            max_kv_len=call.max_keys,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            # of a quantised output, which is not asked for
            o_sf_scale=1.0,
            batch_size=meta.num_reqs,
            window_left=-1,
            cum_seq_lens_q=meta.query_start_loc,
            cum_seq_lens_kv=call.key_start_loc,
            enable_pdl=None,
            is_causal=call.causal,
            return_lse=True,
            q_seq_lens_cpu=int32(np.diff(meta.query_start_loc_cpu)),
            kv_seq_lens_cpu=int32(np.diff(call.key_start_loc_cpu)),
        )
        return out, (lse * LN2).T
