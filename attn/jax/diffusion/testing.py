"""The jax driver of the dense suite: runs NumPy calls on jitted jax arrays and returns NumPy arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.testing.dense import DenseCall

Array = npt.NDArray[Any]


def dense(backend: Any, call: DenseCall) -> Array:
    """Run a diffusion backend on a call of the dense suite. Returns [B, S, H, D] in float64."""
    case = call.case
    impl = backend.get_impl_cls()(case.num_heads, case.head_size, case.scale, case.causal, case.num_kv_heads)

    @jax.jit
    def run(query: Any, key: Any, value: Any, mask: Any, joint: Any) -> Any:
        meta = DiffusionAttentionMetadata(attn_mask=mask, joint_strategy="rear" if case.rear else "front")
        if case.lens:
            meta.attn_mask, meta.kv_lens = None, case.lens
        if joint is not None:
            extra, meta.joint_key, meta.joint_value = joint
            meta.joint_query = extra if extra.shape[1] else None
        return impl.forward(query, key, value, meta)

    q, k, v = (jnp.asarray(x, case.dtype) for x in (call.query, call.key, call.value))
    given = call.present if call.mask is None else call.mask
    joint = None if call.joint is None else tuple(jnp.asarray(x, case.dtype) for x in call.joint)
    out = run(q, k, v, None if given is None else jnp.asarray(given), joint)
    assert str(out.dtype) == case.dtype
    return np.asarray(out, np.float64)
