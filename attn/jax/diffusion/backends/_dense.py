"""Base class of the diffusion backends for jax.

Everything but shapes may be traced, so a layer works under jit, grad and shard_map; unsupported calls raise while tracing. Key
masks stay masks, because a shape cannot depend on the number of present keys.
"""

from attn.diffusion.backends.dense import DenseAttentionImpl
from attn.jax.ops import Ops


class DenseImpl(DenseAttentionImpl):
    framework, ops = "jax", Ops
