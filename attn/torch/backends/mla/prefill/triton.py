"""TRITON: MLA prefill by this package's own ragged kernel, on NVIDIA and AMD GPUs, for heads of any size up to 256."""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature, MultipleOf
from attn.torch import records


class TritonPrefillBackend(MLAPrefillBackend):
    name = "TRITON"
    capabilities = records.TRITON(
        head_sizes=(MultipleOf(8, 24, 256),), features=frozenset({Feature.MLA, Feature.LSE, Feature.NAN_SAFE})
    )
    v_head_dims = (MultipleOf(8, 16, 256),)

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        from attn.torch.kernels.mla_prefill import mla_prefill

        q, meta = call.q, call.meta
        out = q.new_empty(*q.shape[:2], call.v.shape[2])
        # Without a context nothing is merged, and the kernel stores no log-sum-exp.
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if call.return_lse else None
        starts = {"query_start_loc": meta.query_start_loc, "key_start_loc": call.key_start_loc}
        mla_prefill(out, lse, q, call.k, call.v, **starts, scale=self.scale, causal=call.causal)
        return out, lse
