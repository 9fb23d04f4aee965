"""The cache write in Triton stores the bytes that the torch write does, on a GPU or interpreted. About 3 s on one core."""

import pytest
import torch

from attn.torch import kv_cache as caches

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]

SPECIAL = [
    0.0, -0.0, 1e-9, -3e-3, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 0.0625, 448.0, 464.0, 1e5, -1e30, 6e4, float("inf"), -float("inf"),
]  # fmt: skip


@pytest.mark.parametrize(
    "element", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("per_head", [False, True])
def test_same_bytes(element: torch.dtype, per_head: bool) -> None:
    from attn.torch.kernels.kv_write import write_kv

    torch.manual_seed(0)
    shape = (7, 3, 40)
    key = torch.randn(shape) * torch.logspace(-6, 4, 40)
    key[0, 0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    value = torch.randn(shape)
    slots = torch.tensor([5, -1, 40, 17, 0, -1])  # a row more than slots: padding
    scale = torch.tensor([0.25, 1.0, 3.0]) if per_head else torch.tensor(0.5)
    start = torch.randint(0, 100, (2, 4, 16, 3, 40)).to(element)
    ours, want = start.clone().to(DEVICE), start.clone()
    write_kv(key.to(DEVICE), value.to(DEVICE), ours[0], ours[1], slots.to(DEVICE), scale.to(DEVICE), scale.to(DEVICE))
    caches.write(key, value, want[0], want[1], slots, scale, scale)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element.itemsize]
    assert torch.equal(ours.cpu().view(whole), want.view(whole))


def test_heads_that_are_far_apart() -> None:
    """More than 2**31 elements from the first: of the 2 GiB, a CPU backs with memory only what is written."""
    from attn.torch.kernels.kv_write import write_kv

    far, page = 2**30, (2, 16, 3, 32)
    memory = torch.empty(2 * far + 2 * 16 * 32, dtype=torch.int8, device=DEVICE)
    keys, values = memory.as_strided(page, (16 * 32, 32, far, 1)), torch.zeros(page, dtype=torch.int8, device=DEVICE)
    key, one = 10 * torch.randn(1, 3, 32, device=DEVICE), torch.ones((), device=DEVICE)
    write_kv(key, key, keys, values, torch.tensor([5], device=DEVICE), one, one)
    assert torch.equal(keys[0, 5], values[0, 5]) and bool(values[0, 5].any())


@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_same_bytes_with_scales_of_their_own(kind: str, dtype: torch.dtype) -> None:
    """Codes and scales: tokens of zeros, of tiny and of huge numbers, and one that is not all finite."""
    from attn.torch.kernels.kv_write import write_kv_per_token

    torch.manual_seed(0)
    key, value = torch.randn(7, 3, 40), torch.randn(7, 3, 40) * torch.logspace(-4, 4, 7)[:, None, None]
    key[0], value[1, 1], key[2, 0, 5], value[2, 1, 0] = 0, 0, torch.nan, torch.inf
    key, value = key.to(dtype), value.to(dtype)
    slots = torch.tensor([5, -1, 40, 17, 0, 63])
    ours, want = (torch.full((2, 4, 16, 3, 44), 7, dtype=torch.uint8).view(caches.element_type(kind, dtype)) for _ in range(2))
    there = ours.to(DEVICE)
    write_kv_per_token(key.to(DEVICE), value.to(DEVICE), *caches.split(there, 40), slots.to(DEVICE))
    ours = there.cpu()
    caches.write(key, value, *(split := caches.split(want, 40))[:2], slots, *split[2:])
    names = ("key", "value", "key_scale", "value_scale")
    for name, one, other in zip(names, caches.split(ours, 40), split, strict=True):
        live = torch.ones(4, 16, 3, dtype=torch.bool)
        if "scale" not in name:  # codes of what is not finite say nothing: its scale is NaN
            live &= caches.split(want, 40)[2 if name == "key" else 3].isfinite()
        torch.testing.assert_close(one.float()[live], other.float()[live], rtol=0, atol=0, equal_nan=True)
    _, _, key_scales, value_scales = split
    assert bool((key_scales[0, 5] == 0).all()) and bool(key_scales[2, 8, 0].isnan()) and bool(value_scales[2, 8, 1].isnan())


def test_slices_of_a_projection_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch.kernels import kv_write

    given = list[torch.Tensor]()
    signature_of = kv_write.signature_of
    monkeypatch.setattr(
        kv_write, "signature_of", lambda arrays, strides: given.extend(arrays[:2]) or signature_of(arrays, strides)
    )
    key, value = torch.randn(5, 2, 3, 16, device=DEVICE).unbind(1)
    cache, slots = torch.zeros(2, 4, 16, 3, 16, device=DEVICE), torch.tensor([3, 20, -1, 40, 7], device=DEVICE)
    kv_write.write_kv(key, value, cache[0], cache[1], slots, None, None)
    assert [x.data_ptr() for x in given] == [key.data_ptr(), value.data_ptr()]
    live = slots >= 0
    assert torch.equal(cache.flatten(1, 2)[:, slots[live]], torch.stack((key, value))[:, live])


@pytest.mark.parametrize("element", [torch.float32, torch.float8_e4m3fn])
def test_heads_before_tokens(element: torch.dtype) -> None:
    """The layout of vendors' caches (HND), which the same kernel writes."""
    from attn.torch.kernels.kv_write import write_kv

    key, value = torch.randn(2, 5, 3, 16)
    slots, scale = torch.tensor([3, 20, -1, 40, 7]), torch.tensor(0.5)
    ours, want = (torch.zeros(2, 4, 3, 16, 16).to(element) for _ in range(2))
    there = ours.to(DEVICE)
    write_kv(
        key.to(DEVICE), value.to(DEVICE), *there.transpose(2, 3).unbind(), slots.to(DEVICE), scale.to(DEVICE), scale.to(DEVICE)
    )
    caches.write(key, value, *want.transpose(2, 3).unbind(), slots, scale, scale)
    assert torch.equal(there.cpu().float(), want.float()) and bool(want.float().any())


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_nan(element: torch.dtype) -> None:
    """NaN stays one in fp8 and is 0 in int8, which has none."""
    from attn.torch.kernels.kv_write import write_kv

    key = torch.full((1, 1, 16), torch.nan, device=DEVICE)
    cache = torch.ones(2, 1, 16, 1, 16, device=DEVICE).to(element)
    one = torch.ones((), device=DEVICE)
    write_kv(key, key, cache[0], cache[1], torch.zeros(1, dtype=torch.int64, device=DEVICE), one, one)
    stored = cache[:, 0, 0].float()
    assert bool((stored == 0).all() if element == torch.int8 else stored.isnan().all())
