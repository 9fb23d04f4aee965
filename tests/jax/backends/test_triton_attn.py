"""The TRITON_ATTN_JAX backend: GPUs that it serves, its limits in words, and steps lowered for an absent one (40 s)."""

from pathlib import Path

import pytest

from attn.capabilities import Device, Request
from attn.jax.backends import triton_attn as module
from attn.jax.kernels.gpu import launch
from attn.jax.platforms import GpuPlatform, compiling_for
from attn.selection.verdicts import choose
from tests.compilers import needs_triton, output

GPU = Device("jax", "gpu", "NVIDIA H200", "sm_90")
SERVED = Request(128, "bfloat16", block_size=16, features=frozenset({"sinks", "alibi", "lse", "spans", "batch_invariant"}))


def test_it_comes_first_on_gpus_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "why_not", lambda: "")
    assert GpuPlatform().priorities(SERVED, GPU)[:2] == ("TRITON_ATTN_JAX", "XLA_ATTN")
    assert module.TritonAttentionBackend.why_not(SERVED, GPU) == []


@pytest.mark.parametrize(
    ("request_", "device", "words"),
    [
        (Request(128, "bfloat16", block_size=8), GPU, "block_size=8 (supports multiples of 16)"),
        (Request(36, "bfloat16", block_size=16), GPU, "head_size=36 (supports multiples of 8 from 32 up to 256, 512)"),
        (
            Request(128, "bfloat16", block_size=16, num_heads=512, num_kv_heads=1),
            GPU,
            "num_heads=512 for num_kv_heads=1 (supports up to 256 per kv head at head_size=128 in bfloat16 on sm_90)",
        ),
        (Request(128, "bfloat16", "int8_per_token_head", 16), GPU, "kv_cache_dtype=int8_per_token_head"),
        (SERVED, Device("jax", "gpu", "a GPU", "sm_75"), "arch=sm_75 (supports sm_80+)"),
        (SERVED, Device("jax", "cpu", "a CPU", "x86_64"), "platform=cpu (supports gpu)"),
        (SERVED, GPU, "jaxlib=0.10.2 (its launch of compiled kernels is known from 0.11.1 up to, not including, 0.13)"),
    ],
)
def test_reasons(request_: Request, device: Device, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_version = launch.why_not
    monkeypatch.setattr(launch, "why_not", lambda: of_version("0.10.2") if "jaxlib" in words else "")
    why = module.TritonAttentionBackend.why_not(request_, device)
    assert len(why) == 1 and words in why[0]


def test_without_it_xla_attn_serves_and_the_trace_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(launch, "why_not", lambda: "jaxlib=0.10.2 (too old)")
    candidates = [AttentionBackendEnum[name].candidate() for name in GpuPlatform.dense]
    selection = choose(candidates, Request(128, "bfloat16", block_size=16), GPU)
    assert selection.name == "XLA_ATTN"
    assert "jaxlib=0.10.2 (too old)" in selection.trace[0].reasons


def test_an_unknown_gpu_is_refused() -> None:
    words = "arch='sm_1' is not a known TPU generation or GPU; known: .*v4, sm_80, "
    with pytest.raises(ValueError, match=words), compiling_for("sm_1"):
        pass


#: Steps of layers, lowered for an H100: every kind of call, a scan over the layers of one cache, and shards of heads.
LOWERED = """
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec as Spec
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.jax.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from attn.jax.platforms import compiling_for

H, K, D, P, N = 4, 2, 64, 16, 12
CALL = "custom_call @triton_kernel_call_ffi"

def lowered(step, *given, donate=()):
    with compiling_for("sm_90"):
        text = jax.jit(step, donate_argnums=donate).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub('opaque = "[^"]*"', "", text)

def case(tokens, lens, dtype="bfloat16", cache_dtype="auto", batch_invariant=False, lse=False, layers=1, causal=True, **rules):
    impl = TritonAttentionImpl(H, D, D**-0.5, K, kv_cache_dtype=cache_dtype, **rules)
    impl.batch_invariant, impl.need_to_return_lse_for_decode = batch_invariant, lse
    pages = iter(range(N))
    tables = [[next(pages) for _ in range(-(-n // P))] for n in lens]
    common = CommonAttentionMetadata.from_lens(tokens, lens, tables, P, causal=causal)
    spec = KVCacheSpec(P, K, D, dtype, cache_dtype, num_blocks=N, num_layers=layers, attn_type=impl.attn_type)
    meta = TritonAttentionBackend.get_builder_cls()(spec).build(0, common)
    shape = TritonAttentionBackend.get_kv_cache_shape(layers * N, P, K, D, cache_dtype)
    element = {"auto": dtype, "fp8": "float8_e4m3fn", "int8": "int8"}[cache_dtype]
    T = meta.slot_mapping.shape[0]
    return impl, meta, [jnp.zeros((T, n, D), dtype) for n in (H, K, K)], jnp.zeros(shape, element)

def calls(*args, **kwargs):
    impl, meta, given, cache = case(*args, **kwargs)
    scales = {"k_scale": 0.5, "v_scale": np.ones(K, np.float32)}
    return lowered(lambda *x: impl.apply(*x, meta, **scales), *given, cache, donate=(3,)).count(CALL)

assert calls([1, 1], [20, 9]) == 3  # the write, rows of no request, decodes that stay whole
assert calls([1, 1], [20, 160], lse=True) == 4  # parts, and their merge
assert calls([5, 1], [20, 9], sinks=np.zeros(H), logits_soft_cap=5.0) == 3
assert calls([30, 1], [30, 9], sliding_window=8, alibi_slopes=[0.1] * H) == 4
assert calls([1, 1], [20, 9], cache_dtype="fp8") == calls([1, 1], [20, 9], cache_dtype="int8") == 3
assert calls([1, 1], [20, 160], dtype="float32", batch_invariant=True) == 4
assert calls([20, 3], [20, 3], attn_type="encoder_only") == 2

impl, meta, given, cache = case([1, 1], [20, 9], layers=3)
def scanned(q, k, v, cache):
    def one(carry, layer):
        out, cache = impl.apply(carry[0], k, v, carry[1], meta.of_layer(layer))
        return (out, cache), None
    return jax.lax.scan(one, (q, cache), jnp.arange(3))[0]
text = lowered(scanned, *given, cache, donate=(3,))
assert text.count(CALL) == 3 and "tf.aliasing_output = 1" in text

# half of the heads on each of two GPUs
mesh = AbstractMesh((2,), ("x",), abstract_device=AbstractDevice("sm_90", 132, "gpu"))
impl, meta, given, cache = case([1, 1], [20, 9])
half = TritonAttentionImpl(H // 2, D, D**-0.5, K // 2)
heads, cached = Spec(None, "x"), Spec(None, None, None, "x")
specs = dict(in_specs=(heads, heads, heads, cached), out_specs=(heads, cached))
step = jax.shard_map(lambda *x: half.apply(*x, meta), mesh=mesh, **specs, check_vma=False)
text = lowered(step, *given, cache)
assert text.count(CALL) == 3 and "tensor<2x12x16x1x64xbf16>" in text
# an exported step: the custom call is private to jaxlib, so its caller says that the same jaxlib will run it
impl, meta, given, cache = case([1, 1], [20, 9])
allowed = [export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
step = jax.jit(lambda *x: impl.apply(*x, meta))
with compiling_for("sm_90"):
    try:
        export.export(step, platforms=("cuda",))(*given, cache)
        raise SystemExit("exported without a word")
    except ValueError as error:
        assert "triton_kernel_call_ffi" in str(error)
    made = export.export(step, platforms=("cuda",), disabled_checks=allowed)(*given, cache)
again = export.deserialize(made.serialize())
assert again.platforms == ("cuda",) and [x.shape for x in again.out_avals] == [(2, H, D), cache.shape]
print("lowered")
"""


@needs_triton
def test_steps_lower_for_an_absent_gpu(tmp_path: Path) -> None:
    assert output(LOWERED, tmp_path) == "lowered\n"
