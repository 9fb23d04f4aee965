"""TOKENSPEED_MLA: the tokenspeed-mla package's CuTe prefill for datacentre Blackwell.

Keys and values must be contiguous: the kernel takes strides from shapes, and a strided view (values that lie beside their
keys, as the template's do) gives silent garbage. The log-sum-exp is natural, [T, H]; a request without keys gets 0 and
-inf. Interface of tokenspeed-mla 2.0.4; its output is bfloat16 whatever goes in, so that dtype alone is taken.
"""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillMetadata
from attn.capabilities import Capabilities, Feature


class TokenspeedMLAPrefillBackend(MLAPrefillBackend):
    name = "TOKENSPEED_MLA"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16",),
        head_sizes=(192,),
        features=frozenset({Feature.MLA, Feature.LSE}),
        packages=("tokenspeed_mla",),
        install="tokenspeed-mla",
        archs=(("cuda", ("sm_100", "sm_103", "sm_107")),),
    )
    v_head_dims = (128,)

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        state = self._attend(q, k, v, meta, meta.query_start_loc, meta.max_query_len, True)
        return state if return_lse else state[0]

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: MLAPrefillMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = meta.chunks[chunk_idx]
        return self._attend(q, k, v, meta, chunk.key_start_loc, chunk.max_keys, False)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: MLAPrefillMetadata,
        key_starts: torch.Tensor,
        max_keys: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from tokenspeed_mla import tokenspeed_mla_prefill

        out, lse = tokenspeed_mla_prefill(
            q.contiguous(), k.contiguous(), v.contiguous(), key_starts.diff(), key_starts, max_keys, meta.num_reqs,
            self.scale, is_causal=causal, return_lse=True, cum_seq_lens_q=meta.query_start_loc,
            max_seq_len_q=meta.max_query_len,
        )  # fmt: skip
        return out, lse.T
