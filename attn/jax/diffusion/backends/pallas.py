"""PALLAS: the dense TPU flash kernel for image and video models; scores never leave VMEM. Interpreted on a CPU, for tests.

Key masks that are prefixes are passed as lengths, other masks as segments: rows of segment 1 see keys of segment 1.
"""

import jax
import jax.numpy as jnp

from attn.capabilities import Capabilities, Device, Feature, MultipleOf, Request
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.jax.diffusion.backends._dense import DenseImpl
from attn.visibility import LayerMask


class PallasAttentionBackend(DiffusionAttentionBackend):
    name = "PALLAS"
    interpreted_on = ("cpu",)
    capabilities = Capabilities(
        framework="jax",
        platforms=("tpu", "cpu"),
        dtypes=("bfloat16", "float32"),
        head_sizes=(MultipleOf(8, 32, 256),),
        features=frozenset({Feature.BACKWARD}),
    )

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        # A gradient is traced where it is taken, so a call cannot leave the mode for its kernel alone.
        why = ["JAX's 64-bit mode (jax_enable_x64)"] if jax.config.jax_enable_x64 else []  # type: ignore[attr-defined]
        return super().why_not(request, device) + why


class PallasAttentionImpl(DenseImpl, backend=PallasAttentionBackend):
    can_return_lse = True

    def _attend(self, call: DenseCall) -> jax.Array:
        return self._attend_lse(call)[0]

    def _attend_lse(self, call: DenseCall) -> tuple[jax.Array, jax.Array]:
        from attn.jax.kernels.tpu.flash_attention import Extras, FlashParams, flash_attention

        # Lengths are cheaper than segments: blocks past them are not computed. A causal layer has neither (`why_not_call`), so
        # the kernel's alignment by length moves no row.
        lens = None if call.lens is None else jnp.asarray(call.lens, jnp.int32)
        segments = None if call.lens is not None or call.present is None else call.present.astype(jnp.int32)
        # present keys are in segment 1 with all rows, the others in segment 0, which no row sees
        rows = None if segments is None else jnp.ones(call.query.shape[:2], jnp.int32)
        rules, extras = FlashParams(LayerMask(self.causal), self.scale), Extras(rows, segments, kv_lens=lens)
        return flash_attention(call.query, call.key, call.value, rules, extras, return_lse=True)
