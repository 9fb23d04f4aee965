"""Attention of MLA's expanded heads under jax: launched as torch launches it, and compiled for a GPU that is not here. 40 s."""

import sys
from pathlib import Path

import pytest

from attn.jax.kernels.gpu.launch import why_not
from tests.compilers import PLACES, needs_triton, output

#: Both frameworks launch the same batch; what each kernel would be launched with is compared.
SAME = """
import importlib
import jax, jax.numpy as jnp, numpy as np, torch, triton
from attn.kernels import hopper
from attn.kernels.memory import SHARED_MEMORY
from attn.tools.aot import triton as aot
from attn.torch.kernels import direct, mla_prefill as of_torch
ours = importlib.import_module("attn.jax.kernels.gpu.mla_prefill")
prompts = importlib.import_module("attn.jax.kernels.gpu.hopper_prefill")

triton.runtime.driver.set_active(aot._placeholder("sm_90", SHARED_MEMORY["sm_90"]))
hopper.is_on = lambda kernel: on_hopper
direct.multiprocessors.__globals__["_multiprocessors"] = lambda device: 8
ours.target = lambda: ("sm_90", 8)
ours.mla_prefill = ours.mla_prefill.__wrapped__
found = {"torch": [], "jax": []}

def by_torch(self, programs, arrays, *numbers, columns=1):
    given = dict(zip(self._kernel.arg_names, [*arrays, *numbers])) | self._constants
    found["torch"].append((self._kernel.__name__, (programs, columns), given))

def by_jax(kernel, arch, grid, arguments, writes, **types):
    if kernel.__name__ != "fill":  # torch's rows are all of requests
        found["jax"].append((kernel.__name__, (*grid, 1)[:2], dict(arguments)))
    return tuple(arguments[name] for name in writes)

direct.Prepared.__call__ = by_torch
ours.launch = prompts.launch = by_jax
DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

def plain(value):
    if isinstance(value, (torch.Tensor, jax.Array, np.ndarray)):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    return value

def both(tokens, keys, sizes=(192, 128), dtype="bfloat16", causal=True, heads=4):
    starts, key_starts = (np.cumsum([0, *counts]).astype(np.int32) for counts in (tokens, keys))
    shapes = (sum(tokens), heads, sizes[0]), (sum(keys), heads, sizes[0]), (sum(keys), heads, sizes[1])
    query, key, value = (torch.zeros(shape, dtype=DTYPE[dtype]) for shape in shapes)
    out, lse = torch.zeros(sum(tokens), heads, sizes[1], dtype=DTYPE[dtype]), torch.zeros(heads, sum(tokens))
    of_torch.mla_prefill(out, lse, query, key, value, torch.from_numpy(starts), torch.from_numpy(key_starts), 0.3, causal)
    ours.mla_prefill(*(jnp.zeros(shape, dtype) for shape in shapes), starts, key_starts, scale=0.3, causal=causal)
    (name, programs, theirs), = found["torch"]
    (mine, grid, given), = found["jax"]
    assert (name, programs) == (mine, grid), (name, programs, mine, grid)
    for launched in found.values():
        launched.clear()
    for x in sorted({*theirs, *given} - {"launch_pdl", "counters"}):
        if x.endswith("_desc"):
            of = (tuple(theirs[x].shape), tuple(theirs[x].strides), tuple(theirs[x].block_shape))
            assert given[x][1:] == of, (x, given[x][1:], of)
            continue
        a, b = plain(theirs[x]), plain(given[x])
        assert abs(a - b) <= 1e-12 * abs(a) if isinstance(a, float) else a == b, (name, x, a, b)
    return name

for on_hopper in (False, True):
    of_16_bits = "prefill" if on_hopper else "attend"
    assert both([20, 1, 7], [20, 1, 7]) == of_16_bits
    assert both([20, 1, 7], [90, 0, 33], causal=False) == of_16_bits
    assert both([200, 7], [200, 7], (96, 64), "float16") == of_16_bits
    assert both([20, 7], [20, 7], dtype="float32") == "attend"
    assert both([20, 7], [20, 7], (40, 24), "float32") == "attend"
print("equal")
"""

#: Compiled by XLA for an H100 that is not here.
COMPILED = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from attn.jax.kernels.gpu.mla_prefill import mla_prefill
from attn.jax.platforms import compiling_for
from attn.kernels import hopper
from tests.compilers import H100

here = SingleDeviceSharding(topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0])
S = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
for dtype in ("bfloat16", "float32"):
    shapes = S((512, 16, 192), dtype), S((900, 16, 192), dtype), S((900, 16, 128), dtype), S((5,)), S((5,))
    for causal in (True, False):
        with compiling_for("sm_90"):
            step = jax.jit(lambda *x: mla_prefill(*x, scale=0.1, causal=causal))
            text = step.trace(*shapes).lower().compile().as_text()
        assert text.count('custom_call_target="triton_kernel_call_ffi"') == 2, text  # rows of no request, attention
assert hopper.why_off("hopper_prefill") == ""
print("compiled")
"""

pytestmark = needs_triton


def test_both_frameworks_launch_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert output(SAME, tmp_path) == "equal\n"


def test_xla_compiles_it_for_an_absent_gpu(tmp_path: Path) -> None:
    plugin = "jax_plugins/xla_cuda13"
    if why_not() or not any((Path(place) / plugin).is_dir() for place in [*map(str, PLACES), *sys.path]):
        pytest.skip(f"needs jaxlib's plugin for NVIDIA GPUs (make test-newest) {why_not()}")
    assert output(COMPILED, tmp_path) == "compiled\n"
