"""FLASHINFER: MLA prefill by FlashInfer's ragged wrapper, CUTLASS on datacentre Blackwell and the FA3 templates on Hopper.

A plan is made for each part of a batch (the new tokens, or a chunk of the context), and reused by the following layers. The
log-sum-exp of all its kernels is base 2, [T, H].
"""

from typing import Any

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.torch import records
from attn.torch.alignment import aligned
from attn.torch.backends._flashinfer import plan, wrapper_for
from attn.torch.backends._vendor import LN2, arch_of, int32


class FlashInferPrefillBackend(MLAPrefillBackend):
    name = "FLASHINFER"
    capabilities = records.FLASHINFER(
        head_sizes=(192,), features=frozenset({Feature.MLA, Feature.LSE}), archs=(("cuda", ("sm_90", "sm_10*")),)
    )
    v_head_dims = (128,)

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, meta = call.q, call.meta
        # layers of other widths may share the batch
        # what a plan is made for: without a chunk the call is of the new tokens, which are causal
        key = (self.get_name(), self.num_heads, self.scale, q.dtype, call.chunk_idx)
        if key not in meta.plans:
            meta.plans[key] = self._planned(call)
        arrays = (aligned(x.contiguous()) for x in (q, call.k, call.v))
        out, lse = meta.plans[key].run(*arrays, return_lse=True)
        return out, (lse * LN2).T

    def _planned(self, call: PrefillCall) -> Any:
        import flashinfer

        q, meta = call.q, call.meta
        # named, because `auto` chooses between FA2 and FA3 alone
        kernels = "cutlass" if arch_of(q.device).startswith("sm_10") else "auto"

        def make(workspace: torch.Tensor) -> Any:
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernels)

        wrapper = wrapper_for(meta, q.device, ("mla prefill", kernels), make)
        plan(
            wrapper,
            q.device,
            # plans are made on the host
            int32(meta.query_start_loc_cpu),
            int32(call.key_start_loc_cpu),
            self.num_heads,
            self.num_heads,
            self.qk_head_dim,
            head_dim_vo=self.v_head_dim,
            causal=call.causal,
            sm_scale=self.scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return wrapper
