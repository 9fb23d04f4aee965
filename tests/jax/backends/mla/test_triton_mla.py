"""The TRITON_MLA_JAX backend: GPUs that it serves, its limits in words, and steps lowered for an absent one (40 s)."""

from pathlib import Path

import pytest

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device, Request
from attn.jax.backends.mla import triton_mla as module
from attn.jax.platforms import GpuPlatform
from attn.selection.verdicts import choose
from tests.compilers import needs_triton, output

GPU = Device("jax", "gpu", "NVIDIA H200", "sm_90")
MLA = frozenset({"mla"})
SERVED = Request(576, "bfloat16", block_size=64, features=MLA | {"dcp", "non_causal"})


def test_it_comes_first_on_gpus_that_it_fits_and_xla_mla_serves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda: "")
    assert GpuPlatform().priorities(SERVED, GPU) == ("TRITON_MLA_JAX", "XLA_MLA", "PALLAS_MLA")
    assert module.TritonMLABackend.why_not(SERVED, GPU) == []
    assert AttentionBackendEnum["TRITON_MLA"].under("jax") is AttentionBackendEnum.TRITON_MLA_JAX
    monkeypatch.setattr(module, "why_not", lambda: "jaxlib=0.10.2 (too old)")
    candidates = [AttentionBackendEnum[name].candidate() for name in GpuPlatform.latent]
    selection = choose(candidates, Request(576, "bfloat16", block_size=64, features=MLA), GPU)
    assert selection.name == "XLA_MLA" and "jaxlib=0.10.2 (too old)" in selection.trace[0].reasons


@pytest.mark.parametrize(
    ("request_", "device", "words"),
    [
        (Request(584, "bfloat16", features=MLA), GPU, "head_size=584 (supports multiples of 16 from 32 up to 576)"),
        (Request(576, "bfloat16", "int8", features=MLA), GPU, "kv_cache_dtype=int8"),
        (Request(576, "bfloat16", features=MLA | {"sinks"}), GPU, "sinks"),
        (SERVED, Device("jax", "gpu", "a GPU", "sm_75"), "arch=sm_75 (supports sm_80+)"),
        (SERVED, Device("jax", "cpu", "a CPU", "x86_64"), "platform=cpu (supports gpu)"),
        (
            Request(576, "float32", features=MLA),
            Device("jax", "gpu", "a GPU", "sm_120"),
            "a float32 cache of head_size=576 on sm_120: its latents exceed the shared memory",
        ),
    ],
)
def test_reasons(request_: Request, device: Device, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda: "")
    why = module.TritonMLABackend.why_not(request_, device)
    assert len(why) == 1 and words in why[0]


#: Steps of layers, lowered for an H100: every kind of call, a scan over the layers of one cache, and shards of heads.
LOWERED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec as Spec
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.jax.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl
from attn.jax.platforms import compiling_for

H, L, DR, DN, DV, P, N = 4, 128, 32, 64, 48, 16, 40
CALL = "custom_call @triton_kernel_call_ffi"

def lowered(step, *given, donate=()):
    with compiling_for("sm_90"):
        text = jax.jit(step, donate_argnums=donate).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub('opaque = "[^"]*"', "", text)

def case(tokens, lens, dtype="bfloat16", cache_dtype="auto", layers=1, causal=True, rank=L, rope=DR):
    of_layer = (H, rank + rope, (DN + rope) ** -0.5, 1, None, None, cache_dtype, None, "decoder", None, None)
    impl = TritonMLAImpl(*of_layer, rank, DN, rope, DN + rope, DV, jnp.zeros((rank, H, DN + DV), dtype))
    impl.need_to_return_lse_for_decode = True
    pages = iter(range(N))
    tables = [[next(pages) for _ in range(-(-n // P))] for n in lens]
    common = CommonAttentionMetadata.from_lens(tokens, lens, tables, P, causal=causal)
    spec = KVCacheSpec(P, 1, rank + rope, dtype, cache_dtype, num_blocks=N, num_layers=layers)
    meta = TritonMLABackend.get_builder_cls()(spec).build(0, common)
    shape = TritonMLABackend.get_kv_cache_shape(layers * N, P, 1, rank + rope, cache_dtype)
    element = {"auto": dtype, "fp8": "float8_e4m3fn", "fp8_ds_mla": "uint8"}[cache_dtype]
    T = meta.slot_mapping.shape[0]
    arrays = jnp.zeros((T, H, DN + rope), dtype), jnp.zeros((T, rank), dtype), jnp.zeros((T, rope), dtype)
    weights = {"w_uk": jnp.zeros((rank, H, DN), dtype), "w_uv": jnp.zeros((rank, H, DV), dtype)}
    return impl, meta, arrays, jnp.zeros(shape, element), weights

def calls(*args, **kwargs):
    impl, meta, given, cache, weights = case(*args, **kwargs)
    return lowered(lambda *x: impl.apply(*x, meta, **weights, k_scale=0.5), *given, cache, donate=(3,)).count(CALL)

assert calls([1, 1], [20, 9]) == 2  # the write with rows of no request, and decodes whose keys are too few to cut
assert calls([1, 1], [20, 300]) == 3  # the write with the plan, stream-K, and its merge
assert calls([4, 1], [20, 300], causal=False) == calls([4, 1], [20, 300], dtype="float32") == 3
assert calls([1, 1], [20, 300], cache_dtype="fp8") == 3
assert calls([1, 1], [20, 300], cache_dtype="fp8_ds_mla", rank=512, rope=64) == 3

impl, meta, given, cache, weights = case([1, 1], [20, 300], layers=3)
def scanned(q, kv_c, k_pe, cache):
    def one(cache, layer):
        out, cache = impl.apply(q, kv_c, k_pe, cache, meta.of_layer(layer), **weights)
        return cache, out
    return jax.lax.scan(one, cache, jnp.arange(3))
text = lowered(scanned, *given, cache, donate=(3,))
assert text.count(CALL) == 3 and "tf.aliasing_output = 0" in text

# half of the heads on each of two GPUs, which both have the whole cache
mesh = AbstractMesh((2,), ("x",), abstract_device=AbstractDevice("sm_90", 132, "gpu"))
impl, meta, given, cache, weights = case([1, 1], [20, 300])
heads, whole = Spec(None, "x"), Spec()
step = jax.shard_map(
    lambda q, kv_c, k_pe, cache, w_uk, w_uv: impl.apply(q, kv_c, k_pe, cache, meta, w_uk=w_uk, w_uv=w_uv), mesh=mesh,
    in_specs=(heads, whole, whole, whole, heads, heads), out_specs=(heads, whole), check_vma=False)
text = lowered(step, *given, cache, *weights.values())
assert text.count(CALL) == 3 and "tensor<2x2x128xbf16>" in text
print("lowered")
"""


@needs_triton
def test_steps_lower_for_an_absent_gpu(tmp_path: Path) -> None:
    assert output(LOWERED, tmp_path) == "lowered\n"
