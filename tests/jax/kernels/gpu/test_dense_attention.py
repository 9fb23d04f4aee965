"""Dense attention on GPUs that are not present: which launches a call has, mapped and differentiated. 30 s on one core.

Its values: tests/torch/interpreted/test_under_jax.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attn.jax.kernels.gpu.dense_attention import differentiable
from tests.compilers import needs_plugin, needs_triton, output

COMMON = """
import re
import jax, jax.numpy as jnp
from attn.jax import dot_product
from attn.jax.kernels.gpu import hopper_prefill
from attn.jax.platforms import compiling_for

CALL = "triton_kernel_call_ffi"
dot_product._chosen = lambda call, backend, *features: "xla" if features else "TRITON_ATTN_JAX"

def causal(query, key, value):
    return dot_product.dot_product_attention(query, key, value, is_causal=True)

def shapes(query, keys, dtype=jnp.bfloat16, **more):
    return [jax.ShapeDtypeStruct(shape, dtype, **more) for shape in (query, keys, keys)]
"""

LOWERED = (
    COMMON
    + """
def lowered(arch, function, *arguments):
    with compiling_for(arch):
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in re.sub('opaque = "[^"]*"', "", text).splitlines() if CALL in line]

def prefill(function, *arguments, rows):
    (line,) = lowered("sm_90", function, *arguments)
    assert f"tensor<{rows}x32x128xbf16>" in line, line

query, keys = (2, 512, 32, 128), (2, 512, 8, 128)
prefill(causal, *shapes(query, keys), rows=1024)

def kinds(function, *more, keys=keys):
    made, constants = [], hopper_prefill.constants
    hopper_prefill.constants = lambda *a: made.append(constants(*a)) or made[-1]
    lowered("sm_90", function, *shapes(query, keys), *more)
    hopper_prefill.constants = constants
    return [(x["EQUAL"], x["ENDS"]) for x in made]

# No list is read where each request has all keys, and no value is overwritten where no window hides the first ones either.
plain = lambda *a: dot_product.dot_product_attention(*a)
assert kinds(plain) == [(True, True)]
assert kinds(plain, keys=(2, 999, 8, 128)) == [(True, True)]
assert kinds(lambda *a: dot_product.dot_product_attention(*a, is_causal=True, local_window_size=100)) == [(True, False)]
lens = jax.ShapeDtypeStruct((2,), jnp.int32)
assert kinds(lambda q, k, v, n: dot_product.dot_product_attention(q, k, v, key_value_seq_lengths=n), lens) == [(False, False)]
prefill(jax.vmap(causal), *shapes((3, *query), (3, *keys)), rows=3072)
prefill(jax.vmap(causal, (0, None, None)), *shapes((3, *query), keys)[:1], *shapes(query, keys)[1:], rows=3072)
prefill(lambda *a: dot_product.dot_product_attention(*a), *shapes(query, (2, 999, 8, 128)), rows=1024)
# elsewhere: rows of no request, then attention
assert len(lowered("sm_80", causal, *shapes(query, keys))) == 2
assert len(lowered("sm_90", causal, *shapes(query, keys, jnp.float32))) == 2
# a row has the keys of a decode, in splits that are merged
assert len(lowered("sm_90", lambda *a: dot_product.dot_product_attention(*a), *shapes((2, 1, 32, 128), (2, 9999, 8, 128)))) == 3
loss = lambda *a: causal(*a).astype(jnp.float32).sum()
assert lowered("sm_90", jax.grad(loss, argnums=(0, 1, 2)), *shapes(query, keys)) == []
assert lowered("sm_90", causal, *shapes((2, 0, 32, 128), (2, 0, 8, 128))) == []
assert lowered("sm_90", jax.vmap(causal), *shapes((3, 2, 0, 32, 128), (3, 2, 0, 8, 128))) == []
print("lowered")
"""
)

COMPILED = (
    COMMON
    + """
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tests.compilers import H100

here = SingleDeviceSharding(topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0])
for size in (64, 72, 128, 256):
    given = shapes((2, 512, 32, size), (2, 512, 8, size), sharding=here)
    with compiling_for("sm_90"):
        made = jax.jit(causal).trace(*given).lower().compile()
    assert made.as_text().count(f'custom_call_target="{CALL}"') == 1
    assert made.memory_analysis().temp_size_in_bytes < 1 << 18, "no copies"
print("compiled")
"""
)


@needs_triton
def test_launches_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert output(LOWERED, tmp_path) == "lowered\n"


@needs_triton
def test_xla_compiles_prompts_for_an_absent_gpu(tmp_path: Path) -> None:
    needs_plugin()
    assert output(COMPILED, tmp_path) == "compiled\n"


def test_values_and_gradients_are_the_others_where_a_call_is_differentiated() -> None:
    made = differentiable(lambda q, k, v, more: q + k + v, lambda q, k, v, more: 2 * q * more + k + v)
    q, more = jnp.ones(3), jnp.asarray([1, 2, 3])
    assert made(q, q, q, more).tolist() == [3, 3, 3]
    value, (dq, dk) = jax.value_and_grad(lambda q, k: made(q, k, q, more).sum(), argnums=(0, 1))(q, q)
    assert value == 18 and dq.tolist() == [3, 5, 7] and dk.tolist() == [1, 1, 1]


@pytest.mark.parametrize("axes", [(0, None, 0, None), (None, 0, None, 0)])
def test_mapped_calls_are_differentiated_too(axes: tuple[int | None, ...]) -> None:
    made = differentiable(lambda q, k, v, more: q + k + v, lambda q, k, v, more: 2 * q * more + k + v)
    given = [jnp.ones((2, 3)) if axis == 0 else jnp.ones(3) for axis in axes[:3]] + [jnp.full((2, 3) if axes[3] == 0 else 3, 5)]
    grads = jax.grad(lambda *a: jax.vmap(made, axes)(*a, given[3]).sum(), argnums=(0, 1, 2))(*given[:3])
    assert [float(g.sum()) for g in grads] == [60.0, 6.0, 6.0]
