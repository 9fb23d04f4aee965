"""XLA prefill for MLA: expanded heads in `jax.numpy`, ragged, on any device that XLA supports."""

import jax

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.jax import records
from attn.jax.kernels import xla, xla_mla


class XLAPrefillBackend(MLAPrefillBackend):
    name = "XLA"
    capabilities = records.XLA(features=frozenset({Feature.MLA, Feature.NAN_SAFE}))

    def _attend(self, call: PrefillCall) -> tuple[jax.Array, jax.Array]:
        # packed keys are pages of one token, so that the loop over pages serves them
        requests = xla.Requests.of_packed_keys(call.meta.query_start_loc, call.key_start_loc, call.max_keys)
        rules = {"scale": self.scale, "max_query_len": call.meta.max_query_len, "causal": call.causal}
        return xla_mla.expanded_attention(call.q, call.k, call.v, requests, **rules)
