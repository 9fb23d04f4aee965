"""The write of latents in Triton stores the bytes that the torch write does, on a GPU or interpreted. About 5 s on one core."""

import pytest
import torch

from attn.torch import kv_cache as caches
from attn.torch.backends.mla import _rows
from attn.torch.interpreter import correct_bfloat16, interpreting

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]

SPECIAL = [
    0.0, -0.0, 1e-9, -3e-3, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 0.0625, 448.0, 464.0, 1e5, -1e30, 6e4, float("inf"), -float("inf"),
]  # fmt: skip
SLOTS = [5, -1, 40, 17, 0, -1, 63]


@pytest.fixture(autouse=True, scope="module")
def bfloat16_as_on_a_device() -> None:
    if interpreting():
        correct_bfloat16()


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.cpu().contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.itemsize])


def filled(element: torch.dtype, width: int, page: int = 16, gap: int = 0) -> torch.Tensor:
    """A cache [4, page, width] that holds numbers, with `gap` unused elements after each row."""
    whole = torch.randint(0, 100, (4, page, width + gap), generator=torch.Generator().manual_seed(1)).to(element)
    return whole[..., :width]


def rows(dtype: torch.dtype, rank: int, rope: int, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor, with more rows than slots."""
    torch.manual_seed(0)
    given = torch.randn(tokens, rank + rope + 3) * torch.logspace(-6, 4, rank + rope + 3)
    given[0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    given = given.to(dtype)
    return given[:, :rank], given[:, rank : rank + rope]


@pytest.mark.parametrize("element", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope", "page", "gap"), [(48, 16, 16, 0), (512, 64, 16, 8), (32, 0, 24, 0)])
def test_same_bytes(element: torch.dtype, dtype: torch.dtype, rank: int, rope: int, page: int, gap: int) -> None:
    from attn.torch.kernels.latent_write import write_latents

    kv_c, k_pe = rows(dtype, rank, rope)
    slots = torch.tensor(SLOTS)
    want = filled(element, rank + rope, page, gap).clone()
    encoded = _rows.encode(kv_c, k_pe, "auto", element, torch.tensor(0.7))
    caches.put([(encoded, want)], slots)
    for scale, factor in ((torch.tensor(0.7, device=DEVICE), 1.0), (None, float(torch.tensor(0.7)))):
        ours = filled(element, rank + rope, page, gap).to(DEVICE)
        write_latents(kv_c.to(DEVICE), k_pe.to(DEVICE), ours, slots.to(DEVICE), scale, factor)
        assert torch.equal(bits(ours), bits(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gap", [0, 48])
def test_same_packed_rows(dtype: torch.dtype, gap: int) -> None:
    """Tiles of zeros, of subnormal and of huge numbers; an infinite one, whose scale is infinite."""
    from attn.torch.kernels.latent_write import write_latents

    kv_c, k_pe = (x.clone() for x in rows(dtype, 512, 64))
    kv_c[2] = torch.randn(512) * torch.logspace(-4, 4, 512)
    kv_c[3, 128:256], kv_c[3, 256:384] = 0, 1e-40
    kv_c[4, :128] *= 1e-36 if dtype != torch.float16 else 1e-6
    slots = torch.tensor(SLOTS)
    ours, want = (filled(torch.uint8, 656, gap=gap).clone() for _ in "ow")
    caches.put([(_rows.pack(kv_c, k_pe), want)], slots)
    ours = ours.to(DEVICE)
    write_latents(kv_c.to(DEVICE), k_pe.to(DEVICE), ours, slots.to(DEVICE))
    if not torch.equal(bits(ours), bits(want)):  # where both have NaN, any NaN is right
        got, expected = (_rows.unpack(x.cpu().reshape(-1, 656)) for x in (ours, want))
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        finite = ~expected.isnan().any(1)
        assert torch.equal(bits(ours).reshape(-1, 656)[finite], bits(want).reshape(-1, 656)[finite])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "packed", "bfloat16"])
def test_nan(kind: str) -> None:
    from attn.torch.kernels.latent_write import write_latents

    element = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "packed": torch.uint8, "bfloat16": torch.bfloat16}[kind]
    kv_c, k_pe = torch.ones(1, 512, device=DEVICE), torch.ones(1, 64, device=DEVICE)
    kv_c[0, 130], k_pe[0, 3] = torch.nan, torch.nan
    cache = filled(element, 656 if kind == "packed" else 576).to(DEVICE)
    write_latents(kv_c, k_pe, cache, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    stored = cache.cpu()[0, :1]
    found = (_rows.unpack(stored) if kind == "packed" else stored.float())[0].isnan()
    want = torch.zeros(576, dtype=torch.bool)
    want[130], want[515] = True, True
    if kind == "packed":
        want[128:256] = True
    assert torch.equal(found, want)


@pytest.mark.parametrize("heads", [1, 3, 40])
@pytest.mark.parametrize("copied", [5, 9, 12])
def test_rotary_part_of_queries(heads: int, copied: int) -> None:
    """Queries may be fewer or more than the new rows; those of tokens that store nothing are copied too."""
    from attn.torch.kernels.latent_write import write_latents

    kv_c, k_pe = rows(torch.float16, 48, 16)
    query = torch.randn(copied, heads + 1, 24 + 16, dtype=torch.float16)[:, :heads]
    absorbed = torch.zeros(copied, heads, 64, dtype=torch.float16)
    want, copies = filled(torch.float16, 64).clone(), absorbed.clone()
    caches.put([(torch.cat([kv_c, k_pe], 1), want)], torch.tensor(SLOTS))
    copies[..., 48:] = query[..., 24:]
    ours, there = filled(torch.float16, 64).to(DEVICE), absorbed.to(DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    write_latents(kv_c.to(DEVICE), k_pe.to(DEVICE), ours, slots, None, 1.0, query.to(DEVICE), there)
    assert torch.equal(bits(ours), bits(want)) and torch.equal(there.cpu(), copies)


def test_heads_that_are_far_apart() -> None:
    """More than 2**31 elements from the first: of the 4 GiB, a CPU backs with memory only what is written."""
    from attn.torch.kernels.latent_write import write_latents

    far, tokens, heads = 2**30, 5, 3
    memory = torch.empty(2 * far + 3 * tokens * 64, dtype=torch.float16, device=DEVICE)
    query, absorbed = (memory[at:].as_strided((tokens, heads, 64), (64, far, 1)) for at in (0, tokens * 64))
    query.copy_(torch.randn(tokens, heads, 64))
    kv_c, k_pe = (x.to(DEVICE) for x in rows(torch.float16, 48, 16))
    cache, nowhere = filled(torch.float16, 64).to(DEVICE), torch.full((tokens,), -1, device=DEVICE)
    write_latents(kv_c, k_pe, cache, nowhere, None, 1.0, query, absorbed)
    assert torch.equal(absorbed[..., 48:], query[..., 48:])


def test_no_tokens() -> None:
    from attn.torch.kernels.latent_write import write_latents

    cache = filled(torch.float32, 64).to(DEVICE)
    before = cache.clone()
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    write_latents(torch.ones(3, 48, device=DEVICE), torch.ones(3, 16, device=DEVICE), cache, none)
    assert torch.equal(cache, before)
