"""Ulysses and ring attention over a mesh of host devices, equal to one device (about 15 s, in a process of its own)."""

import os
import subprocess
import sys
from pathlib import Path

from attn.jax.diffusion.parallel import SequenceParallelAttention

ROOT = Path(__file__).parents[3]

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from attn.diffusion.backends.abstract import DiffusionAttentionMetadata as Meta
from attn.jax import DiffusionAttention
from attn.jax.diffusion.parallel import SequenceParallelAttention

W, ROWS, H, K, D = 4, 4, 8, 4, 16
rng = np.random.default_rng(0)
def normal(*shape): return jnp.asarray(rng.standard_normal(shape, np.float32))
q, k, v = normal(2, W * ROWS, H, D), normal(2, W * ROWS, K, D), normal(2, W * ROWS, K, D)
jq, jk, jv = normal(2, 3, H, D), normal(2, 3, K, D), normal(2, 3, K, D)
mask = np.array(rng.random((2, W * ROWS)) < 0.7)
mask[1, :ROWS] = False
k = jnp.where(mask[..., None, None], k, jnp.nan)
mask = jnp.asarray(mask)
mesh = Mesh(np.array(jax.devices()[:W]), ("sp",))
one = DiffusionAttention(H, D, num_kv_heads=K)
for strategy in ("ulysses", "ring"):
    layer = SequenceParallelAttention(H, D, num_kv_heads=K, axis_name="sp", axis_size=W, strategy=strategy)
    for joint in ("", "rear"):
        def meta(mask, text): return Meta(attn_mask=mask, **(dict(joint_query=text[0], joint_key=text[1], joint_value=text[2],
                                                             joint_strategy=joint) if joint else {}))
        def run(q, k, v, mask, text):
            out = layer(q, k, v, meta(mask, text))
            return (out[:, :ROWS], out[:, ROWS:]) if joint else (out, out[:, :0])
        row = P(None, "sp")
        specs = dict(in_specs=(row, row, row, row, P()), out_specs=(row, P()))
        sharded = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))
        image, text = sharded(q, k, v, mask, (jq, jk, jv))
        want = one(q, k, v, meta(mask, (jq, jk, jv)))
        got = jnp.concatenate([image, text], 1)
        error = float(jnp.abs(got - want).max())
        assert got.shape == want.shape and error < 3e-6, (strategy, joint, error)
        print(strategy, joint or "alone", error)
"""


def test_every_strategy_equals_one_device() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\n") == 4


def test_a_ring_asks_for_the_log_sum_exp() -> None:
    def layer(strategy: str) -> SequenceParallelAttention:
        return SequenceParallelAttention(4, 16, axis_name="sp", axis_size=4, strategy=strategy, features=["backward"])

    assert layer("ring").local.selection.request.features == {"backward", "lse"}
    assert layer("ulysses").local.selection.request.features == {"backward"}
    assert layer("ring").local.impl.can_return_lse
