"""TRITON_ATTN_JAX: TRITON_ATTN's kernels on dense batches under jax, compiled by Triton without torch and launched by XLA.

On Hopper rows of 16-bit elements are computed by the Hopper prefill. Gradients are those of `jax.nn.dot_product_attention`, by
cuDNN where it serves the layer, else by XLA's formula: a call that is differentiated is computed by it alone. Kernels are
compiled for known shapes, so a program that is exported for any batch is computed by it too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attn.capabilities import Device, Feature, MultipleOf, Request
from attn.diffusion.backends.abstract import DiffusionAttentionBackend, DiffusionRequest
from attn.diffusion.backends.dense import DenseCall
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.jax import records
from attn.jax.diffusion.backends._dense import DenseImpl
from attn.jax.kernels.gpu.dense_attention import dense_attention, differentiable
from attn.jax.kernels.gpu.launch import reasons, target
from attn.kernels.paged_launch import LayerParams


class TritonAttentionBackend(DiffusionAttentionBackend):
    name = "TRITON_ATTN_JAX"
    capabilities = records.TRITON(head_sizes=(MultipleOf(8, 32, 256),), features=frozenset({Feature.BACKWARD}))

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) + reasons(request, device)


class TritonAttentionImpl(DenseImpl, backend=TritonAttentionBackend):
    can_return_lse = True

    def _attend(self, call: DenseCall) -> jax.Array:
        return self._computed(call, lambda other, call: (other._attend(call), None))[0]

    def _attend_lse(self, call: DenseCall) -> tuple[jax.Array, jax.Array]:
        out, lse = self._computed(call, lambda other, call: other._attend_lse(call), return_lse=True)
        return out, lse

    def _computed(self, call: DenseCall, compute: Callable[[DenseImpl, DenseCall], Any], return_lse: bool = False) -> Any:
        """Return (output, log-sum-exp [B, H, S] or None). compute: their function of another implementation."""
        # to the kernels causality is a right bound of 0
        layer = LayerParams(self.scale, right=0 if self.causal else None)

        def kernel(query: jax.Array, key: jax.Array, value: jax.Array, present: jax.Array | None) -> Any:
            lens = None
            if present is not None:
                lens = present.sum(1, dtype=jnp.int32)
                if call.lens is None:
                    # The kernels take numbers of keys, not masks: present keys move to the front, in their order, which without
                    # causality or position changes no result.
                    order = jnp.argsort(~present, axis=1, stable=True)[..., None, None]
                    key, value = (jnp.take_along_axis(x, order, 1) for x in (key, value))
            out, lse = dense_attention(query, key, value, lens, layer, return_lse)
            return out, None if lse is None else jnp.swapaxes(lse, 1, 2)

        def fallback(query: jax.Array, key: jax.Array, value: jax.Array, present: jax.Array | None) -> Any:
            return compute(self._fallback(query), call._replace(query=query, key=key, value=value, present=present))

        arrays = call.query, call.key, call.value, call.present
        # symbolic extents of an export are no ints
        known = all(isinstance(n, int) for x in arrays[:3] for n in x.shape)
        return differentiable(kernel, fallback)(*arrays) if known else fallback(*arrays)

    def _fallback(self, query: jax.Array) -> DenseImpl:
        """Return the implementation whose gradients are used."""
        request = DiffusionRequest(self.head_size, query.dtype.name, features=frozenset({Feature.BACKWARD}))
        # that of the program, which may be compiled for a GPU that is not here
        device = Device("jax", "gpu", arch=target()[0])
        backends: list[Any] = [DiffusionAttentionBackendEnum[name].get_class() for name in ("CUDNN", "XLA_ATTN")]
        backend = next(backend for backend in backends if not backend.why_not(request, device))
        return backend.get_impl_cls()(self.num_heads, self.head_size, self.scale, self.causal, self.num_kv_heads)
