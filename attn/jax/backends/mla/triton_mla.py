"""TRITON_MLA_JAX: TRITON_MLA's kernels under jax, compiled by Triton without torch and launched by XLA.

A tile of latents is read from its page once, for scores and values, where XLA_MLA gathers pages and stores a chunk's scores.
The cache is XLA_MLA's, and is written in place where it is donated. One program serves every batch of a bucket: the table
that divides its keys evenly between programs is computed on the device, from the lengths.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attn.capabilities import LATENT_CACHE_DTYPES, Device, Feature, MultipleOf, Request
from attn.jax import kv_cache as caches
from attn.jax import records
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl
from attn.jax.kernels.gpu.launch import why_not
from attn.kernels.memory import latent_reason


class TritonMLABackend(MLACommonBackend):
    name = "TRITON_MLA_JAX"
    capabilities = records.TRITON(
        head_sizes=(MultipleOf(16, 32, 576),),
        kv_cache_dtypes=LATENT_CACHE_DTYPES,
        features=frozenset({Feature.MLA, Feature.NON_CAUSAL, Feature.DCP, Feature.NAN_SAFE}),
        refusals=records.NOT_INVARIANT,
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        # without a device any GPU is asked about: reasons that depend on one are left out
        on_gpu = device is not None and device.platform == "gpu"
        reasons = (latent_reason(device.arch if device else "", request), why_not()) if on_gpu else ()
        return super().why_not(request, device) + [reason for reason in reasons if reason]


class TritonMLAImpl(MLACommonImpl, backend=TritonMLABackend):
    def _write_new(self, call: DecodeCall) -> jax.Array:
        from attn.jax.kernels.gpu.mla_attention import write_latents

        # the kernel encodes rows itself, so `rows` (which XLA then leaves out as unused) is not passed
        assert call.new is not None
        return write_latents(*call.new, call.kv_cache, self._slots(call.meta), _scale(call))

    def _write_and_decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array, jax.Array]:
        from attn.jax.kernels.gpu.mla_attention import DecodeParams, Latents, New, mla_decode

        meta, new = call.meta, None if call.new is None else New(*call.new, self._slots(call.meta))
        rules = DecodeParams(self.qk_rope_head_dim, self.scale, meta.causal, meta.max_query_len, meta.max_seq_len)
        starts, lens, table = meta.requests
        latents = Latents(call.kv_cache, lens, table, _scale(call))
        return mla_decode(call.q_nope, call.q, starts, latents, rules, new)


def _scale(call: DecodeCall) -> Any:
    """The scale of a quantised cache as an array, so that its value does not enter the program; None for any other cache."""
    coded = caches.is_quantised(call.kv_cache.dtype) and call.kv_cache.dtype != jnp.uint8
    return jnp.asarray(call.k_scale, jnp.float32) if coded else None
