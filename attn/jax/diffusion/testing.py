"""The jax driver of the dense suite: runs NumPy calls on jitted jax arrays and returns NumPy arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attn.testing.dense import DenseArrays, attend

Array = npt.NDArray[Any]


def dense(backend: Any, call: DenseArrays) -> Array:
    """Run a diffusion backend on a call of the dense suite. Returns [B, S, H, D] in float64."""
    case = call.case
    impl = backend.get_impl_cls()(case.num_heads, case.head_size, case.scale, case.causal, case.num_kv_heads)

    qkv, joint = (x and [jnp.asarray(y, case.dtype) for y in x] for x in ((call.query, call.key, call.value), call.joint))
    mask = None if call.given_mask is None else jnp.asarray(call.given_mask)
    # jitted as a model's layer is: what must not depend on values then fails to trace
    out = jax.jit(functools.partial(attend, impl, call))(qkv, mask, joint)
    assert str(out.dtype) == case.dtype
    return np.asarray(out, np.float64)
