"""TRITON_JAX prefill for MLA: TRITON's ragged kernels under jax, on NVIDIA GPUs, for heads of any size up to 256."""

import jax

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Device, Feature, MultipleOf, Request
from attn.jax import records
from attn.jax.kernels.gpu.launch import why_not


class TritonPrefillBackend(MLAPrefillBackend):
    name = "TRITON_JAX"
    capabilities = records.TRITON(head_sizes=(MultipleOf(8, 24, 256),), features=frozenset({Feature.MLA, Feature.NAN_SAFE}))
    v_head_dims = (MultipleOf(8, 16, 256),)

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        reason = why_not() if device is not None and device.platform == "gpu" else ""
        return super().why_not(request, device) + ([reason] if reason else [])

    def _attend(self, call: PrefillCall) -> tuple[jax.Array, jax.Array]:
        # imported where it is called: it needs Triton
        from attn.jax.kernels.gpu.mla_prefill import mla_prefill

        arrays = call.q, call.k, call.v, call.meta.query_start_loc, call.key_start_loc
        return mla_prefill(*arrays, scale=self.scale, causal=call.causal)
