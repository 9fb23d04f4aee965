"""TOKENSPEED_MLA: the tokenspeed-mla package's CuTe prefill for datacentre Blackwell.

Keys and values must be contiguous: the kernel computes strides from shapes, and its result for a strided view (such as the
values that the base class passes) is silently wrong. The log-sum-exp is natural, [T, H]; a request without keys gets 0 and
-inf. Interface of tokenspeed-mla 2.0.4. Its output is always bfloat16, so only bfloat16 is supported.
"""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.torch import records
from attn.torch.alignment import aligned


class TokenspeedMLAPrefillBackend(MLAPrefillBackend):
    name = "TOKENSPEED_MLA"
    capabilities = records.CUDA(
        dtypes=("bfloat16",),
        head_sizes=(192,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=("tokenspeed_mla",),
        install="tokenspeed-mla",
        archs=(("cuda", ("sm_100", "sm_103", "sm_107")),),
    )
    v_head_dims = (128,)

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
        from tokenspeed_mla import tokenspeed_mla_prefill

        out, lse = tokenspeed_mla_prefill(
            query=aligned(call.q.contiguous()),
            key=aligned(call.k.contiguous()),
            value=aligned(call.v.contiguous()),
            # lengths of the keys; those of the queries follow from `cum_seq_lens_q`
            seq_lens=call.key_start_loc.diff(),
            cum_seq_lens=call.key_start_loc,
            max_seq_len=call.max_keys,
            batch_size=call.meta.num_reqs,
            softmax_scale=self.scale,
            is_causal=call.causal,
            return_lse=True,
            cum_seq_lens_q=call.meta.query_start_loc,
            max_seq_len_q=call.meta.max_query_len,
        )
        return out, lse.T
