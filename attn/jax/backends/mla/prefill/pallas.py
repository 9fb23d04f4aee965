"""PALLAS prefill for MLA: expanded heads by this package's flash attention kernel for TPUs, with one segment per request.

Packed requests are one long sequence whose rows see only their own segment. New tokens are in the order of their positions, so
a causal mask over the whole sequence is also causal within each request.
"""

import jax
import jax.numpy as jnp

from attn.backends.abstract import MultipleOf
from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.jax import records
from attn.jax.backends import _calls
from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams, flash_attention
from attn.visibility import LayerMask

#: Segment ids of padding rows and padding keys. They differ, so padding rows see no key.
_NO_ROW, _NO_KEY = -1, -2


class PallasPrefillBackend(MLAPrefillBackend):
    name = "PALLAS"
    interpreted_on = ("cpu",)
    capabilities = records.PALLAS(head_sizes=(MultipleOf(1, 1, 256),), features=frozenset({Feature.MLA, Feature.NAN_SAFE}))

    def _attend(self, call: PrefillCall) -> tuple[jax.Array, jax.Array]:
        q, k, v = (x[None] for x in (call.q, call.k, call.v))
        rows = _segments(call.meta.query_start_loc, call.q.shape[0], _NO_ROW)
        keys = _segments(call.key_start_loc, call.k.shape[0], _NO_KEY)
        params, extras = FlashParams(LayerMask(call.causal), self.scale), Extras(rows, keys)
        out, lse = _calls.in_32_bits(flash_attention)(q, k, v, params, extras, return_lse=True)
        return out[0], lse[0]


def _segments(starts: jax.Array, rows: int, padding: int) -> jax.Array:
    """Return [1, rows] int32: the request of each row by `starts` [R + 1], or `padding` for rows of no request."""
    # the number of requests that end before a row; requests without rows are counted too, and passed over
    segment = jnp.sum(jnp.arange(rows)[:, None] >= starts[1:], axis=1, dtype=jnp.int32)
    return jnp.where(segment < starts.shape[0] - 1, segment, padding)[None]
