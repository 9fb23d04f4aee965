"""The launches of paged attention under jax are those of torch, and lower for GPUs that are not present. 30 s on one core."""

from pathlib import Path

import pytest

from tests.compilers import needs_plugin, needs_triton, output

#: Both frameworks launch the same batch; what each kernel would be launched with is compared.
SAME = """
import importlib
import jax, jax.numpy as jnp, numpy as np, torch, triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from attn.kernels import paged_attention as device_code
from attn.kernels.paged_launch import LayerParams
from attn.kernels.memory import SHARED_MEMORY
from attn.tools.aot import triton as aot
from attn.kernels import hopper
from attn.torch.kernels import direct, kv_write
from attn.torch.kernels import paged_attention as of_torch
from attn.visibility import BatchMask
from attn.jax.kernels.gpu import hopper_prefill
ours = importlib.import_module("attn.jax.kernels.gpu.paged_attention")
on_hopper = False

triton.runtime.driver.set_active(aot._placeholder("sm_90", SHARED_MEMORY["sm_90"]))
hopper.is_on = lambda kernel: on_hopper
of_torch.can_use_pdl = lambda arch: False
direct.multiprocessors.__globals__["_multiprocessors"] = lambda device: 8
ours.target = lambda: ("sm_90", 8)
for name in ("paged_attention", "write_kv"):
    setattr(ours, name, getattr(ours, name).__wrapped__)
found = {"torch": [], "jax": []}

def by_torch(self, programs, arrays, *numbers, columns=1):
    names = self._kernel.arg_names
    given = dict(zip(names, [*arrays, *numbers])) | self._constants
    found["torch"].append((self._kernel.__name__, programs, given))

def by_jax(kernel, arch, grid, arguments, writes, **types):
    if kernel.__name__ == "fill":  # torch's outputs have no rows but requests'
        return tuple(arguments[name] for name in writes)
    found["jax"].append((kernel.__name__, grid[0], dict(arguments)))
    return tuple(arguments[name] for name in writes)

direct.Prepared.__call__ = by_torch
ours.launch = hopper_prefill.launch = by_jax

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8,
         "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "bool": torch.bool, "int32": torch.int32}

def plain(value):
    if isinstance(value, (torch.Tensor, jax.Array, np.ndarray)):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, hopper_prefill.Boxed):
        return value[1:]
    if isinstance(value, TensorDescriptor):
        return tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return value

#: How the launches differ: two arrays of a cache are one under jax, and launches do not overlap.
DIFFER = {"key_cache", "value_cache", "values_at", "VALUES_AT", "num_pages", "k_desc", "v_desc", "counters", "launch_pdl"}

def compare():
    assert len(found["torch"]) == len(found["jax"]) > 0, [[x[0] for x in y] for y in found.values()]
    for (name, programs, theirs), (mine, grid, given) in zip(*found.values()):
        assert (name, programs) == (mine, grid), (name, programs, mine, grid)
        assert set(theirs) - DIFFER == set(given) - DIFFER, set(theirs) ^ set(given)
        for key in sorted(set(given) - DIFFER):
            if key == "q_desc" and given["Q_STAGES"] == 1:
                continue  # any other's
            a, b = plain(theirs[key]), plain(given[key])
            if key == "scratch" and None not in (a, b):  # torch keeps one for launches of other batches
                assert a[0] == b[0] and a[1] >= b[1], (name, key, a, b)
            elif isinstance(a, float):
                assert abs(a - b) <= 1e-12 * abs(a), (name, key, a, b)
            else:
                assert a == b, (name, key, a, b)
        if "values_at" in given and given["value_cache"] is None:
            blocks, block = theirs["key_cache"].shape[0], given.get("k_block", given.get("kc_block"))
            assert given["values_at"] == blocks * block
        elif "values_at" in given:
            assert plain(theirs["value_cache"]) == plain(given["value_cache"])
        if "k_desc" in given:
            paged, (shape, *of) = given["PAGED"], plain(theirs["k_desc"])
            of = ((1 + paged) * shape[0], *shape[1:]), *of  # values are behind the keys
            assert plain(given["k_desc"]) == plain(given["v_desc"]) == of, (plain(given["k_desc"]), of)
            pages = shape[0] if paged else 0
            assert (given["VALUES_AT"], given["num_pages"]) == (pages, 2 * pages if paged else theirs["num_pages"])
    names = [name for name, *_ in found["jax"]]
    for launched in found.values():
        launched.clear()
    return names

def both(lens, tokens, dtype="bfloat16", stored=None, heads=(8, 2), size=64, page=16, left=None, right=0, cap=0.0, chunk=None,
         scales=False, sinks=False, slopes=False, lse=True, scale=0.3, ways=(False,), invariant=False, **mask):
    R, T, stored = len(lens), sum(tokens), stored or dtype
    table = np.zeros((R, -(-max(lens) // page)), np.int32)
    mask = {name: np.asarray(value) for name, value in mask.items()}
    starts, lengths = np.cumsum([0, *tokens]).astype(np.int32), np.asarray(lens, np.int32)
    flat = np.zeros(heads[0], np.float32)
    by_head = np.ones(heads[1], np.float32)
    t = lambda x: None if x is None else torch.from_numpy(x)
    query = torch.zeros(T, heads[0], size, dtype=DTYPE[dtype])
    cache = torch.zeros(2, 40, page, heads[1], size, dtype=DTYPE[stored])
    for whole in ways:
        of_torch.paged_attention(
            torch.empty_like(query), torch.empty(heads[0], T) if lse else None, query, cache[0], cache[1], t(starts),
            t(lengths), t(table), max(tokens), max(lens), scale, left=left, right=right, tree_right=right, soft_cap=cap,
            slopes=t(flat) if slopes else None, sinks=t(flat) if sinks else None, chunk_size=chunk,
            k_scale=torch.ones(()) if scales else None, v_scale=t(by_head) if scales else None,
            whole=whole, invariant=invariant, **{name: t(value) for name, value in mask.items()})
    keys = ours.KVInputs(jnp.zeros(cache.shape, stored), lengths, table, k_scale=jnp.ones(()) if scales else None,
                     v_scale=by_head if scales else None)
    layer = LayerParams(scale, cap, left, right, right, chunk, False, invariant, None)
    out, log = ours.paged_attention(
        jnp.zeros(query.shape, dtype), starts, keys, layer, ours.BatchBounds(max(tokens), max(lens)), BatchMask(**mask),
        ours.PerHead(flat if slopes else None, flat if sinks else None), return_lse=lse)
    assert (log is None) == (not lse) and out.shape == query.shape
    return compare()

assert both([900, 70], [1, 1]) == ["attention", "merge"]
assert both([30, 7], [1, 1]) == ["attention"]
assert both([900, 70], [1, 1], lse=False, scale=-0.3) == ["attention", "merge"]
# so many requests may be best left whole: which it is, `fill` decides on the device
assert both([900] * 300, [1] * 300, ways=(True, False)) == ["attention", "attention", "merge"]
assert both([900] * 300, [1] * 300, ways=(True, False), invariant=True) == ["attention", "attention", "merge"]
assert both([900, 70], [4, 3], invariant=True) == ["attention", "merge"]
assert both([900, 70], [20, 3], invariant=True) == ["attention", "attention", "merge"]
assert both([900, 70], [4, 3]) == ["attention", "merge"]
assert both([900, 70], [20, 1]) == ["attention", "attention", "merge"]
for dtype, stored in (("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"), ("bfloat16", "int8"), ("float32", "float32")):
    assert both([900, 70], [20, 1], dtype, stored, scales=stored != dtype, left=100, cap=5.0, sinks=True)
both([900, 70], [1, 1], slopes=True, heads=(4, 4), size=128, page=32)
both([90, 70], [3, 2], tree=np.ones((2, 4, 4), bool))
both([90, 70], [3, 2], spans=np.zeros((5, 2), np.int32), prefix=np.zeros(2, np.int32))
both([90, 70], [3, 20], right=None, is_causal=np.ones(2, bool))
both([9000, 70], [1, 1], chunk=512)

# prompts on Hopper
on_hopper = True
assert both([900, 70], [20, 1]) == ["prefill", "attention", "merge"]
assert both([900, 70], [20, 1], left=100, sinks=True, lse=False, cap=5.0, scale=-0.3) == ["prefill", "attention", "merge"]
assert both([900, 70], [20, 1], invariant=True) == ["prefill", "attention", "merge"]
assert both([900, 70], [900, 70], "float16", size=256) == ["prefill", "attention", "merge"]
assert both([9000, 70], [20, 1], chunk=512) == ["prefill", "attention", "merge"]
assert both([90, 70], [3, 20], right=None, is_causal=np.ones(2, bool)) == ["prefill", "attention"]
reach = {"spans": np.zeros((23, 2), np.int32), "prefix": np.zeros(2, np.int32), "is_causal": np.ones(2, bool)}
assert both([900, 70], [3, 20], right=None, chunk=512, **reach) == ["prefill", "attention", "merge"]
assert both([900, 70], [3, 20], left=100, spans=reach["spans"]) == ["prefill", "attention", "merge"]
assert both([900, 70], [3, 20], left=100, prefix=reach["prefix"]) == ["attention", "attention", "merge"]
assert both([900, 70], [20, 1], "float32") == both([900, 70], [20, 1], page=24) == ["attention", "attention", "merge"]
assert both([900, 70], [20, 1], slopes=True) == ["attention", "attention", "merge"]

# encoders: keys are the call's own
ways = ("bfloat16", None, False), ("float32", None, True), ("bfloat16", 0, True), ("float16", None, True)
for dtype, right, on_hopper in ways:
    starts, query = np.asarray([0, 20, 23], np.int32), torch.zeros(23, 8, 64, dtype=DTYPE[dtype])
    keys = torch.zeros(23, 2, 64, dtype=DTYPE[dtype])
    at = torch.from_numpy(starts)
    of_torch.paged_attention(
        torch.empty_like(query), torch.empty(8, 23), query, keys, keys, at, None, None, 20, 20, 0.3, right=right)
    like, layer = jnp.zeros(keys.shape, dtype), LayerParams(0.3, 0.0, None, right, None, None, False, 0, None)
    keys = ours.KVInputs(keys=like, values=like)
    ours.paged_attention(jnp.zeros(query.shape, dtype), starts, keys, layer, ours.BatchBounds(20, 20))
    assert compare() == ["prefill" if on_hopper and dtype != "float32" else "attention"]

# writes
for given, stored, scaled in (
    ("bfloat16", "bfloat16", False), ("float32", "bfloat16", False), ("bfloat16", "float8_e4m3fn", True),
    ("float16", "int8", True), ("int8", "int8", False),
):
    key, cache = torch.zeros(3, 2, 64, dtype=DTYPE[given]), torch.zeros(2, 40, 16, 2, 64, dtype=DTYPE[stored])
    scales = (torch.ones(()), torch.ones(2)) if scaled else (None, None)
    kv_write.write_kv(key, key, cache[0], cache[1], torch.zeros(3, dtype=torch.int32), *scales)
    scales = (1.0, np.ones(2, np.float32)) if scaled else (None, None)
    like = jnp.zeros(key.shape, given)
    ours.write_kv(like, like, jnp.zeros(cache.shape, stored), jnp.zeros(3, jnp.int32), *scales)
    assert compare() == ["write"]
print("equal")
"""

#: A jitted step, lowered for GPUs that are not here, without torch.
LOWERED = """
import re, sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is barred", name=name)

sys.meta_path.insert(0, NoTorch())
import jax, jax.numpy as jnp
from attn.jax.platforms import compiling_for
from attn.jax.kernels.gpu.paged_attention import BatchBounds, KVInputs, paged_attention, write_kv
from attn.kernels.paged_launch import LayerParams
from tests.compilers import without_barriers

S, R = jax.ShapeDtypeStruct, 4

def step(query, key, value, cache, starts, lens, table, slots):
    cache = write_kv.__wrapped__(key, value, cache, slots)  # in one function, which is read below
    layer = LayerParams(0.1, 0.0, None, 0, 0, None, False, 0, None)
    return *paged_attention.__wrapped__(query, starts, KVInputs(cache, lens, table), layer, BatchBounds(1, 4096)), cache

new = S((R, 2, 64), jnp.bfloat16)
shapes = (S((R, 8, 64), jnp.bfloat16), new, new, S((2, 64, 16, 2, 64), jnp.bfloat16), S((R + 1,), jnp.int32),
          S((R,), jnp.int32), S((R, 256), jnp.int32), S((R,), jnp.int32))
for arch, where in (("sm_80", "cuda"), ("sm_90", "cuda"), ("sm_100", "cuda"), ("gfx942", "rocm")):
    with compiling_for(arch):
        text = jax.jit(step, donate_argnums=3).trace(*shapes).lower(lowering_platforms=(where,)).as_text()
    text = without_barriers(re.sub('opaque = "[^"]*"', "", text))  # the code, any bytes
    assert text.count("custom_call @triton_kernel_call_ffi") == 4  # the write, rows of no request, parts, the merge
    write = re.search(r"(%\\S+) = stablehlo.custom_call @triton_kernel_call_ffi\\(%arg1, %arg2, %arg3, %arg7\\)", text)
    assert write and re.search(r"tf.aliasing_output = 2", text), "the donated cache is the result"
    uses = re.findall(write.group(1) + r"(?![0-9#:])", text)
    assert len(uses) == 3, "made, read by the attention, and returned: nothing takes it apart"
assert "torch" not in sys.modules
print("lowered")
"""

#: Compiled by XLA for an H100 that is not here.
COMPILED = """
import re
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from attn.jax.kernels.gpu.launch import why_not
from attn.jax.kernels.gpu.paged_attention import BatchBounds, KVInputs, paged_attention, write_kv
from attn.jax.platforms import compiling_for
from attn.kernels.paged_launch import LayerParams
from tests.compilers import H100

device = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]
R, layer = 4, LayerParams(0.1, 0.0, None, 0, 0, None, False, 0, None)

def step(query, key, value, cache, starts, lens, table, slots):
    def one(carry, _):
        query, cache = carry
        cache = write_kv(key, value, cache, slots)
        return (paged_attention(query, starts, KVInputs(cache, lens, table), layer, BatchBounds(1, 4096))[0], cache), None
    return jax.lax.scan(one, (query, cache), None, length=3)[0]

here = SingleDeviceSharding(device)
S = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
new, cache = S((R, 2, 64), jnp.bfloat16), S((2, 4096, 16, 2, 64), jnp.bfloat16)
shapes = S((R, 8, 64), jnp.bfloat16), new, new, cache, S((R + 1,)), S((R,)), S((R, 256)), S((R,))
with compiling_for("sm_90"):
    made = jax.jit(step, donate_argnums=3).trace(*shapes).lower().compile()
assert made.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 4
nbytes, memory = 2 * 4096 * 16 * 2 * 64 * 2, made.memory_analysis()
assert memory.alias_size_in_bytes >= nbytes > 8 * memory.temp_size_in_bytes, "the cache is changed in place, in a scan too"

def stacked(query, key, value, caches, starts, lens, table, slots):
    # layers' caches taken apart by the scan
    def one(query, cache):
        cache = write_kv(key, value, cache, slots)
        return paged_attention(query, starts, KVInputs(cache, lens, table), layer, BatchBounds(1, 4096))[0], cache
    return jax.lax.scan(one, query, caches)

def prompts(query, cache, starts, lens, table):
    return paged_attention(query, starts, KVInputs(cache, lens, table), layer, BatchBounds(2048, 2048), return_lse=False)[0]

of_prompts = S((R * 2048, 8, 64), jnp.bfloat16), *shapes[3:7]
with compiling_for("sm_90"):
    made = jax.jit(prompts).trace(*of_prompts).lower().compile()
assert made.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 4, "fill, prompts, parts, merge"

with compiling_for("sm_90"):
    made = jax.jit(stacked).trace(*shapes[:3], S((2, *cache.shape), jnp.bfloat16), *shapes[4:]).lower().compile().as_text()
assert made.count('custom_call_target="triton_kernel_call_ffi"') == 4
assert not re.search("dynamic.slice.fusion", made), "a call fused with slices writes to memory that is not its result's"
print("compiled", why_not())
"""

pytestmark = needs_triton


def test_both_frameworks_launch_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert output(SAME, tmp_path) == "equal\n"


def test_a_step_lowers_for_absent_gpus_without_torch(tmp_path: Path) -> None:
    assert output(LOWERED, tmp_path) == "lowered\n"


def test_xla_compiles_a_step_for_an_absent_gpu(tmp_path: Path) -> None:
    needs_plugin()
    assert output(COMPILED, tmp_path).startswith("compiled")
