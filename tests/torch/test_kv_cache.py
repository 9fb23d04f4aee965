"""The cache under torch: what is stored, where, and what is not written."""

from typing import Any

import numpy as np
import pytest
import torch

from attn import reference
from attn.backends.abstract import AttentionBackend, KVCacheSpec
from attn.errors import DTypeError, ShapeError
from attn.torch import kv_cache
from attn.torch.backends.cpu_attn import CPUAttentionBackend
from attn.torch.backends.sdpa import TorchSDPABackend

K, D, P, N = 2, 16, 8, 10


@pytest.mark.parametrize("code", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_the_oracles(code: str, dtype: torch.dtype) -> None:
    """Round to nearest even, saturated: bit for bit, over halfway cases, overflow, subnormals and infinities."""
    rng = np.random.default_rng(0)
    halves = np.arange(-300, 300) / 2
    wide = rng.standard_normal(4000) * np.exp2(rng.integers(-20, 18, 4000))
    numbers = np.concatenate([halves, wide, [np.inf, -np.inf, 0.0, -0.0, 448, 464, 480, 61440]]).astype(np.float32)
    x = torch.from_numpy(np.resize(numbers, (len(numbers) // (K * D) + 1, K, D))).to(dtype)
    scale = np.array([1.0, 0.25], np.float32)  # powers of two: the oracle divides in float64
    got = kv_cache.encode(x, kv_cache.element_type(code, dtype), torch.from_numpy(scale))
    want = reference.quantize(x.double().numpy(), code, scale)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), want.view(np.uint8))


def test_nan_stays_nan_where_it_can() -> None:
    x = torch.full((1, 1, 1), torch.nan)
    for element in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
        assert kv_cache.encode(x, element, 0.5).float().isnan()
    assert kv_cache.encode(x, torch.int8, 0.5) == 0


def test_a_plain_cache_ignores_scales() -> None:
    assert (kv_cache.encode(torch.ones(1, K, D), torch.bfloat16, 4.0) == 1).all()


def test_element_types() -> None:
    assert kv_cache.element_type("auto", torch.bfloat16) == torch.bfloat16
    assert kv_cache.element_type(None, "float64") == torch.float64
    assert kv_cache.element_type("fp8", torch.float32) == torch.float8_e4m3fn
    with pytest.raises(DTypeError, match="kv_cache_dtype 'int3' is unknown"):
        kv_cache.element_type("int3", torch.float32)


class _Interleaved(TorchSDPABackend):
    """Physically [N, 2, P, K, D]."""

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (1, 0, 2, 3, 4)


@pytest.mark.parametrize("backend", [TorchSDPABackend, CPUAttentionBackend, _Interleaved])
@pytest.mark.parametrize("name", ["auto", "fp8_e5m2", "int8"])
def test_allocate(backend: Any, name: str) -> None:
    spec = KVCacheSpec(P, K, D, "bfloat16", name)
    cache = kv_cache.allocate(backend, spec, N)
    assert tuple(cache.shape) == backend.get_kv_cache_shape(N, P, K, D, name)
    assert cache.dtype == kv_cache.element_type(name, "bfloat16") and not cache.float().any()
    order = backend.get_kv_cache_stride_order()
    assert cache.permute(order).is_contiguous()
    for part in backend.logical_kv_cache(cache):
        assert tuple(part.shape) == (N, P, K, D)
    assert kv_cache.allocate(backend, spec, 0).numel() == 0
    with pytest.raises(ValueError, match="num_blocks=-1 must be at least 0"):
        kv_cache.allocate(backend, spec, -1)


def test_a_backend_without_a_stride_order_has_its_shapes() -> None:
    class Plain(TorchSDPABackend):
        get_kv_cache_stride_order = staticmethod(AttentionBackend.get_kv_cache_stride_order)

    cache = kv_cache.allocate(Plain, KVCacheSpec(16, 2, 8, "float32"), 3)
    assert cache.shape == Plain.get_kv_cache_shape(3, 16, 2, 8) and cache.is_contiguous()


@pytest.mark.parametrize("backend", [TorchSDPABackend, CPUAttentionBackend, _Interleaved])
@pytest.mark.parametrize("name", ["auto", "float16", "fp8", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("slots", [[3, -1, 79, 40], [-1, -1, -1, -1], [79, 0, 1, -1], [-1, 0, 8, 7]])
def test_slots(backend: Any, name: str, slots: list[int]) -> None:
    """-1 writes nowhere, and every other byte is as it was, NaN included."""
    generator = torch.Generator().manual_seed(0)
    spec = KVCacheSpec(P, K, D, "float32", name)
    cache = kv_cache.allocate(backend, spec, N)
    cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
    if cache.dtype.is_floating_point:
        cache.view(torch.uint8 if cache.itemsize == 1 else cache.dtype)[..., 0] = 0x7F
    before = [part.clone() for part in backend.logical_kv_cache(cache)]
    key, value = torch.randn(2, 4, K, D, generator=generator)
    k_scale, v_scale = torch.tensor([0.5, 0.25]), torch.tensor(0.125)
    kv_cache.write(key, value, *backend.logical_kv_cache(cache), torch.tensor(slots), k_scale, v_scale)
    for part, old, new, scale in zip(backend.logical_kv_cache(cache), before, (key, value), (k_scale, v_scale), strict=True):
        want = old.view(torch.uint8).reshape(N * P, K, -1).clone()
        for token, slot in enumerate(slots):
            if slot >= 0:
                want[slot] = kv_cache.encode(new[token : token + 1], cache.dtype, scale).view(torch.uint8)[0]
        assert torch.equal(part.contiguous().view(torch.uint8).reshape(N * P, K, -1), want)


def test_strided_and_padded_rows() -> None:
    """Keys and values as slices of one projection, with rows beyond the slots (and slots beyond the rows)."""
    qkv = torch.randn(6, 4 * K, D)
    key, value = qkv[:, :K], qkv[:, K : 2 * K]
    for slots in ([5, 3, 9], [5, 3, 9, 1, 2, 0, 70, 71]):
        key_cache, value_cache = torch.zeros(2, N, P, K, D)
        kv_cache.write(key, value, key_cache, value_cache, torch.tensor(slots, dtype=torch.int32))
        for cache, rows in ((key_cache, key), (value_cache, value)):
            assert torch.equal(cache.view(-1, K, D)[slots[:6]], rows[: len(slots)])
            assert int((cache != 0).any(-1).any(-1).sum()) == min(6, len(slots))


def test_no_tokens_and_no_gradient() -> None:
    cache = torch.zeros(2, N, P, K, D)
    kv_cache.write(torch.ones(0, K, D), torch.ones(0, K, D), cache[0], cache[1], torch.zeros(0, dtype=torch.int64))
    assert not cache.any()
    key = torch.ones(1, K, D, requires_grad=True)
    kv_cache.write(key, key, cache[0], cache[1], torch.tensor([4]))
    assert not cache.requires_grad and cache.sum() == 2 * K * D


@pytest.mark.parametrize("backend", [TorchSDPABackend, CPUAttentionBackend, _Interleaved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_gather(backend: Any, dtype: torch.dtype) -> None:
    cache = kv_cache.allocate(backend, KVCacheSpec(P, K, D, "float32"), N).to(dtype)
    cache.copy_(torch.randn(cache.shape).to(dtype))
    key_cache, _ = backend.logical_kv_cache(cache)
    blocks = torch.tensor([7, 0, 7], dtype=torch.int32)
    want = torch.cat([key_cache.float()[i] for i in blocks.tolist()]).transpose(0, 1)
    assert torch.equal(kv_cache.gather(key_cache, blocks).float(), want)
    assert kv_cache.gather(key_cache, blocks[:0]).shape == (K, 0, D)


def test_check_scale() -> None:
    assert kv_cache.check_scale("s", 0.5, K).shape == () and kv_cache.check_scale("s", [1, 2], K).tolist() == [1, 2]
    given = torch.ones(K, requires_grad=True)
    scale = kv_cache.check_scale("s", given, K)
    assert scale.dtype == torch.float32 and not scale.requires_grad and scale.data_ptr() != given.data_ptr()
    with torch.device("meta"):
        assert float(kv_cache.check_scale("s", 2.0, K)) == 2
    with pytest.raises(ShapeError, match=r"s has shape \[3\]: must be a scalar or \[2\], one per kv head"):
        kv_cache.check_scale("s", [1, 2, 3], K)
    for wrong in (0.0, -1.0, np.inf, np.nan, [1.0, 0.0]):
        with pytest.raises(ValueError, match="must be finite and above 0"):
            kv_cache.check_scale("s", wrong, K)


@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_scale_for_each_token_and_head(kind: str) -> None:
    """Written beside the codes, read back within half a step; a token of zeros is zeros; blocks keep what is not written."""
    spec = KVCacheSpec(16, 3, 40, "bfloat16", kind)
    cache = kv_cache.allocate(TorchSDPABackend, spec, 4)
    assert cache.shape == (2, 4, 16, 3, 44) and cache.itemsize == 1
    keys, values, key_scales, value_scales = kv_cache.split(cache, 40)
    assert keys.shape == values.shape == (4, 16, 3, 40) and key_scales.shape == value_scales.shape == (4, 16, 3)
    assert keys.stride(1) == 120 and key_scales.dtype == torch.float32
    torch.manual_seed(0)
    x = torch.randn(3, 3, 40) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    x[1, 2] = 0
    kv_cache.write(x, 2 * x, keys, values, torch.tensor([17, -1, 60]), key_scales, value_scales)
    for t, slot in ((0, (1, 1)), (2, (3, 12))):
        for stored, scales, want in ((keys, key_scales, x), (values, value_scales, 2 * x)):
            got = stored[slot].float() * scales[slot][:, None]
            step = scales[slot] if stored.dtype == torch.int8 else 32 * scales[slot]
            assert bool(((got - want[t]).abs() <= 0.5001 * step[:, None]).all())
            assert torch.equal(scales[slot], want[t].abs().amax(-1) / (127 if stored.dtype == torch.int8 else 448))
    assert not key_scales[0].any() and not keys[2].float().any()
    kv_cache.write(x[1:2], x[1:2], keys, values, torch.tensor([0]), key_scales, value_scales)
    assert key_scales[0, 0, 2] == 0 and not keys[0, 0, 2].float().any()
    with pytest.raises(ShapeError, match=r"must be \[2, N, P, K, 36\], one byte per element"):
        kv_cache.split(cache, 32)


def test_a_cache_with_scales_for_each_token_and_head_needs_contiguous_blocks() -> None:
    spec = KVCacheSpec(16, 3, 40, "bfloat16", "int8_per_token_head")
    cache = kv_cache.allocate(TorchSDPABackend, spec, 4)
    by_blocks = cache.transpose(0, 1).contiguous().transpose(0, 1)  # keys and values of a block next to each other
    assert kv_cache.split(by_blocks, 40)[0].shape == (4, 16, 3, 40)
    by_heads = cache.transpose(2, 3).contiguous().transpose(2, 3)
    with_gaps = torch.zeros(2, 4, 16, 3, 48, dtype=torch.int8)[..., :44]
    shifted = torch.zeros(cache.numel() + 1, dtype=torch.int8)[1:].view(cache.shape)
    for bad in (by_heads, with_gaps, shifted):
        with pytest.raises(ShapeError, match="each block .* must be contiguous and begin at a multiple of 4"):
            kv_cache.split(bad, 40)


@pytest.mark.parametrize("element", [torch.int8, torch.float8_e4m3fn])
def test_a_tokens_own_scale_is_a_rounded_quotient(element: torch.dtype) -> None:
    """Bit for bit NumPy's division.

    A CPU cannot show the difference: only on a GPU does torch multiply by the reciprocal of a Python number.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = np.random.default_rng(0).lognormal(0, 4, (1 << 16, 1)).astype(np.float32)
    got = kv_cache.own_scale(torch.from_numpy(largest)[..., None].to(device), element).cpu().numpy()
    np.testing.assert_array_equal(got, largest / np.float32(127 if element == torch.int8 else 448))


def test_a_cache_with_scales_of_its_own_is_split_in_a_graph() -> None:
    cache = torch.zeros(2, 4, 16, 2, 36, dtype=torch.int8)
    parts = torch.compile(lambda kv: [part * 1 for part in kv_cache.split(kv, 32)], fullgraph=True, backend="eager")(cache)
    assert [tuple(part.shape) for part in parts] == [(4, 16, 2, 32)] * 2 + [(4, 16, 2)] * 2
