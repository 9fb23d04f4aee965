"""`attn.jax.Attention`: one attention layer as an `nnx.Module`, its backend chosen once, when it is built."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn.layers import ChosenAttention, ChosenLayer


def _kept(name: str) -> Any:
    """A scale as an array, made of the number or numbers that `_keep_scale` kept."""
    return property(lambda layer: np.asarray(getattr(layer, f"{name}_static"), np.float32))


class ChosenModule(ChosenLayer, nnx.Module):
    """Where a module keeps its scales."""

    framework = "jax"
    # Scales are static, like the backend: no leaves of the module's state, so that a checkpoint need not hold them and a
    # module built under `nnx.eval_shape` has them.
    _q_scale, _k_scale, _v_scale, _prob_scale = map(_kept, ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"))

    @staticmethod
    def _default_dtype() -> Any:
        return jnp.dtype(jnp.float32)

    def _keep_scale(self, name: str, scale: Any) -> None:
        if scale.ndim == 0:
            setattr(self, f"{name}_float", float(scale))
        setattr(self, f"{name}_static", tuple(scale.tolist()) if scale.ndim else float(scale))


class Attention(ChosenAttention, ChosenModule):
    __doc__ = ChosenAttention.__doc__

    def __call__(
        self, query: jax.Array, key: jax.Array | None, value: jax.Array | None, kv_cache: jax.Array | None, attn_metadata: Any
    ) -> tuple[Any, Any]:
        """(output, kv_cache): a pure function of its arguments; see `PagedAttentionImpl.apply`.

        query: [T, H, D] (or [T, H * D]); key, value: [T, K, D], written to `kv_cache`. Jit it with the cache donated, and
        the write happens in place: `nnx.jit(step, donate_argnames=("kv_cache",))`.
        """
        return self.impl.apply(query, key, value, kv_cache, attn_metadata, k_scale=self._k_scale, v_scale=self._v_scale)  # type: ignore[no-any-return]

    forward = __call__
