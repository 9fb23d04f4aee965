"""`attn.jax.MLAAttention`: one layer of multi-head latent attention as an `nnx.Module`."""

from typing import Any

import jax

from attn.jax.layer import ChosenModule
from attn.layers import ChosenMLAAttention


class MLAAttention(ChosenMLAAttention, ChosenModule):
    __doc__ = ChosenMLAAttention.__doc__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a leaf of this module's state, not hidden in the implementation, where jit would take it for a constant
        self.kv_b_proj, self.impl.kv_b_proj = self.impl.kv_b_proj, None

    def __call__(
        self,
        q: jax.Array,
        kv_c_normed: jax.Array | None,
        k_pe: jax.Array | None,
        kv_cache: jax.Array,
        attn_metadata: Any,
        indices: Any = None,
    ) -> tuple[Any, jax.Array]:
        """(output [T, H, Dv], kv_cache): a pure function of its arguments and of `kv_b_proj`; see `MLAImpl.apply`.

        q: [T, H, Dn + Dr], kv_c_normed: [T, L], k_pe: [T, Dr], projected, normed and rotated by the model; the new rows are
        written to `kv_cache`. Jit it with the cache donated, and the write happens in place. A sparse backend also takes
        `indices=` [T, topk].
        """
        w_uk, w_uv = self.impl.weights(self.kv_b_proj)
        return self.impl.apply(  # type: ignore[no-any-return]
            q, kv_c_normed, k_pe, kv_cache, attn_metadata, w_uk=w_uk, w_uv=w_uv, k_scale=self._k_scale, indices=indices
        )

    forward = __call__
