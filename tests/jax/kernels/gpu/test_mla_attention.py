"""The launches of MLA under jax are those of torch, and compile for GPUs that are not present. 60 s on one core."""

from pathlib import Path

import pytest

from tests.compilers import needs_plugin, needs_triton, output

#: Both frameworks launch the same batch; what each kernel would be launched with is compared.
SAME = """
import importlib
import jax, jax.numpy as jnp, numpy as np, torch, triton
from attn.kernels import hopper
from attn.kernels.memory import SHARED_MEMORY
from attn.tools.aot import triton as aot
from attn.kernels import fill, latent_write, plan
from attn.torch.kernels import direct, latent_write as torch_write, mla_decode as of_torch
ours = importlib.import_module("attn.jax.kernels.gpu.mla_attention")

triton.runtime.driver.set_active(aot._placeholder("sm_90", SHARED_MEMORY["sm_90"]))
hopper.is_on = lambda kernel: on_hopper
direct.multiprocessors.__globals__["_multiprocessors"] = lambda device: 8
ours.target = lambda: ("sm_90", 8)
for name in ("mla_decode", "write_latents"):
    setattr(ours, name, getattr(ours, name).__wrapped__)
found = {"torch": [], "jax": []}

def by_torch(self, programs, arrays, *numbers, columns=1):
    given = dict(zip(self._kernel.arg_names, [*arrays, *numbers])) | self._constants
    found["torch"].append((self._kernel.__name__, (programs, columns), given))

def by_jax(kernel, arch, grid, arguments, writes, **types):
    name, given = kernel.__name__, dict(arguments)
    if name == "prepare":  # torch's caller writes rows of no request, and each of the others is a launch
        if given["kv_c"] is not None:
            of_rows = {x: given[x] for x in latent_write.write.arg_names if x in given} | {"query": None, "absorbed": None}
            apart = dict(tokens=given["new"], copied=0, q_t=0, q_h=0, a_t=0, a_h=0, NOPE=0, H=0, BLOCK_H=1)
            found["jax"].append(("write", (given["new"], 1), of_rows | apart))
        if given["table"] is not None:
            of_stream_k = {x: given[x] for x in plan.stream_k.arg_names} | {"BLOCK_R": given["BLOCK_Q"]}
            found["jax"].append(("stream_k", (given["groups"], 1), of_stream_k))
        rest = -(-given["tokens"] // fill.ROWS)
        assert grid == ((given["groups"] if given["table"] is not None else 0) + given["new"] + rest,)
        columns = given["output"].shape[1] * given["output"].shape[2]
        assert (given["H"], given["COLUMNS"], given["ROWS"]) == (given["output"].shape[1], columns, fill.ROWS)
    else:
        found["jax"].append((name, (*grid, 1)[:2], given))
    return tuple(arguments[name] for name in writes)

direct.Prepared.__call__ = by_torch
ours.launch = by_jax
BITS = {"uint8": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, **BITS}

def plain(value):
    if isinstance(value, (torch.Tensor, jax.Array, np.ndarray)):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    return value

#: How the launches differ: queries' rotary parts are in an array of their own, launches do not overlap, memory that no kernel
#: reads is another.
DIFFER = {"launch_pdl", "PDL", "query", "rope", "q_t", "q_h", "ROPE_T", "ROPE_H", "ROPE_AT", "partial", "partial_lse",
          "items", "cache", "copied"}

def compare():
    assert len(found["torch"]) == len(found["jax"]) > 0, [[x[0] for x in y] for y in found.values()]
    for (name, programs, theirs), (mine, grid, given) in zip(*found.values()):
        assert (name, programs) == (mine, grid), (name, programs, mine, grid)
        options = {"num_warps", "enable_fp_fusion"} if name in ("stream_k", "write") else set()
        for key in sorted({*theirs, *given} - DIFFER - options):
            if key == "desc":
                assert given[key][1:] == (tuple(theirs[key].shape), tuple(theirs[key].strides), tuple(theirs[key].block_shape))
                continue
            a, b = plain(theirs[key]), plain(given[key])
            if isinstance(a, float):
                assert abs(a - b) <= 1e-12 * abs(a), (name, key, a, b)
            else:
                assert a == b, (name, key, a, b)
        if theirs.get("PLANNED") and name == "attend":
            assert plain(theirs["items"]) == plain(given["items"]) and plain(theirs["partial"]) == plain(given["partial"])
    names = [name for name, *_ in found["jax"]]
    for launched in found.values():
        launched.clear()
    return names

def both(lens, tokens, dtype="bfloat16", stored=None, heads=16, rank=512, rope=64, page=64, lse=True, causal=True, nope=128):
    R, T, stored = len(lens), sum(tokens), stored or dtype
    starts, lengths = np.cumsum([0, *tokens]).astype(np.int32), np.asarray(lens, np.int32)
    table = np.zeros((R, -(-max(lens) // page)), np.int32)
    packed, coded = stored == "uint8", stored.startswith("float8")
    width = 656 if packed else rank + rope
    t = torch.from_numpy
    limits = None if causal else t(np.repeat(lengths, tokens))
    of_torch.mla_decode(
        torch.zeros(T, heads, rank, dtype=DTYPE[dtype]), torch.zeros(heads, T) if lse else None,
        torch.zeros(T, heads, rank + rope, dtype=DTYPE[dtype]), torch.zeros(9, page, width, dtype=DTYPE[stored]), t(starts),
        t(lengths), t(table), max(tokens), max(lens), 0.3, packed=packed, k_scale=torch.ones(()) if coded else None,
        limits=limits, uneven=True)
    latents = ours.Latents(jnp.zeros((9, page, width), stored), lengths, table, jnp.ones(()) if coded else None)
    query = jnp.zeros((T, heads, nope + rope), dtype)
    rules = ours.DecodeParams(rope, 0.3, causal, max(tokens), max(lens))
    out, log, _ = ours.mla_decode(jnp.zeros((T, heads, rank), dtype), query, starts, latents, rules, return_lse=lse)
    assert (log is None) == (not lse) and out.shape == (T, heads, rank)
    for name, _, given in found["jax"]:
        if name == "attend":
            shape = heads * (nope + rope), nope + rope, nope
            assert (given["ROPE_T"], given["ROPE_H"], given["ROPE_AT"]) == shape and given["rope"] is query
            assert (given["q_t"], given["q_h"], given["DR"] if "DR" in given else rope) == (heads * rank, rank, rope)
            assert given["cache"] is latents.cache
    return compare()

for on_hopper in (False, True):
    split = ["stream_k", "attend", "merge"]
    assert both([900, 70], [1, 1]) == split
    assert both([30, 7], [1, 1]) == ["attend"]
    assert both([900, 70], [4, 3], heads=128, lse=False) == split
    assert both([900, 70], [4, 3], causal=False, page=16) == split
    assert both([900, 70], [1, 1], "float16", heads=40) == split
    assert both([900, 70], [1, 1], page=8) == split
    others = ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("bfloat16", "uint8"), ("float32", "float32")
    for dtype, stored in others:
        assert both([900, 70], [2, 1], dtype, stored) == split

# writes
for given, stored, scaled in (("bfloat16", "bfloat16", False), ("float32", "bfloat16", False), ("bfloat16", "uint8", False),
                              ("bfloat16", "float8_e4m3fn", True), ("float16", "float8_e5m2", True)):
    kv_c, k_pe = torch.zeros(3, 512, dtype=DTYPE[given]), torch.zeros(3, 64, dtype=DTYPE[given])
    width = 656 if stored == "uint8" else 576
    cache, slots = torch.zeros(9, 16, width, dtype=DTYPE[stored]), torch.zeros(3, dtype=torch.int32)
    torch_write.write_latents(kv_c, k_pe, cache, slots, torch.ones(()) if scaled else None)
    like = tuple(jnp.zeros(x.shape, given) for x in (kv_c, k_pe))
    cached, scale = jnp.zeros(cache.shape, stored), jnp.ones(()) if scaled else None
    ours.write_latents(*like, cached, jnp.zeros(3, jnp.int32), scale)
    assert found["jax"][0][2]["cache"] is cached
    assert compare() == ["write"]
    # beside a decode
    torch_write.write_latents(kv_c, k_pe, cache, slots, torch.ones(()) if scaled else None)
    starts, lens, table = np.arange(4, dtype=np.int32), np.full(3, 9, np.int32), np.zeros((3, 1), np.int32)
    latents, rules = ours.Latents(cached, lens, table, scale), ours.DecodeParams(64, 0.3, True, 1, 16)
    absorbed, query = jnp.zeros((3, 16, 512), given), jnp.zeros((3, 16, 192), given)
    ours.mla_decode(absorbed, query, starts, latents, rules, ours.New(*like, jnp.zeros(3, jnp.int32)))
    assert found["jax"].pop()[0] == "attend" and found["jax"][0][2]["cache"] is cached
    assert compare() == ["write"]
print("equal")
"""

#: Compiled by XLA for an H100 that is not here: a scan over layers of one cache, by the Hopper kernel.
COMPILED = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from attn.jax.kernels.gpu.launch import why_not
from attn.jax.kernels.gpu.mla_attention import Latents, New, DecodeParams, mla_decode
from attn.jax.platforms import compiling_for
from attn.kernels import hopper
from tests.compilers import H100

device = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]
R, H, P, N = 4, 128, 64, 1024
here = SingleDeviceSharding(device)
S = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=here)

def step(absorbed, query, kv_c, k_pe, cache, starts, lens, table, slots):
    def one(carry, _):
        absorbed, cache = carry
        new, rules = New(kv_c, k_pe, slots), DecodeParams(64, 0.1, True, 1, 4096)
        absorbed, _, cache = mla_decode(absorbed, query, starts, Latents(cache, lens, table, scale), rules, new)
        return (absorbed, cache), None
    return jax.lax.scan(one, (absorbed, cache), None, length=3)[0]

for stored, width in (("bfloat16", 576), ("float8_e4m3fn", 576), ("uint8", 656)):
    scale = jnp.ones(()) if stored == "float8_e4m3fn" else None
    bf = jnp.bfloat16
    shapes = (S((R, H, 512), bf), S((R, H, 192), bf), S((R, 512), bf), S((R, 64), bf), S((N, P, width), stored), S((R + 1,)),
              S((R,)), S((R, 64)), S((R,)))
    with compiling_for("sm_90"):
        made = jax.jit(step, donate_argnums=4).trace(*shapes).lower().compile()
    text = made.as_text()
    # the write with the plan and rows of no request, stream-K and its merge
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 3, text
    nbytes, memory = N * P * width * jnp.dtype(stored).itemsize, made.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes, "the cache is changed in place, in a scan too"
    assert memory.temp_size_in_bytes < 40e6, "states of 132 programs, and no copy of the cache"
assert hopper.why_off("hopper_mla") == ""
print("compiled", why_not())
"""

pytestmark = needs_triton


def test_both_frameworks_launch_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert output(SAME, tmp_path) == "equal\n"


def test_xla_compiles_a_step_for_an_absent_gpu(tmp_path: Path) -> None:
    needs_plugin()
    assert output(COMPILED, tmp_path).startswith("compiled")
