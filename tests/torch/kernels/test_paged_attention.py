"""Paged attention called as a kernel, where magnitudes leave what the product's dtype holds. 10 s on one core, interpreted."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from attn.torch.interpreter import correct_bfloat16
from attn.torch.kernels.codes import number_in
from attn.torch.kernels.paged_attention import paged_attention

pytestmark = [pytest.mark.triton_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE, PAGE, KEYS = 4, 32, 16, 80


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float = SIZE**-0.5,
    cap: float = 0.0,
    slopes: float = 0.0,
) -> None:
    """`query` [T, H, D], the last of one request's KEYS positions, against float64; keys and values [KEYS, 1, D] as stored."""
    if DEVICE == "cpu":
        correct_bfloat16()
    tokens = len(query)
    bias = torch.full((HEADS,), slopes, device=DEVICE) if slopes else None
    output, lse = torch.full_like(query, torch.nan), torch.full((HEADS, tokens), torch.nan, device=DEVICE)
    paged_attention(
        output, lse, query, key.unflatten(0, (-1, PAGE)), value.unflatten(0, (-1, PAGE)),
        torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE), torch.tensor([KEYS], dtype=torch.int32, device=DEVICE),
        torch.arange(KEYS // PAGE, dtype=torch.int32, device=DEVICE)[None], tokens, KEYS, scale, right=0, soft_cap=cap,
        slopes=bias,
    )  # fmt: skip
    scores = torch.einsum("thd,sd->hts", query.double(), key[:, 0].double()) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(KEYS - tokens, KEYS, device=DEVICE)[:, None] - torch.arange(KEYS, device=DEVICE)
    scores = (scores - slopes * behind).masked_fill(behind < 0, -torch.inf)
    want = torch.einsum("hts,sd->thd", scores.softmax(-1), value[:, 0].double())
    wrong = (output.double() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
    assert float(wrong.max()) < (2**-7 if query.dtype == torch.bfloat16 else 2**-10)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


def _stored(dtype: torch.dtype, seed: int) -> torch.Tensor:
    noise = torch.randn(KEYS, 1, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (noise * 30 if dtype == torch.int8 else noise).to(dtype).to(DEVICE)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("tokens", "cap", "slopes"), [(1, 0.0, 0.0), (20, 0.0, 0.0), (20, 30.0, 0.0), (1, 0.0, 0.1)])
def test_queries_of_every_magnitude(stored: torch.dtype, tokens: int, cap: float, slopes: float) -> None:
    """bfloat16 holds numbers that float16, in which codes of bytes are multiplied, does not: heads of one tile have either."""
    noise = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([1.0, 1e12, 3e30, 1e-12])[:, None]
    key, value = _stored(stored, 2), _stored(stored, 3)
    _check((noise * sizes).bfloat16().to(DEVICE), key, value, SIZE**-0.5 * (0.03 if stored == torch.int8 else 1), cap, slopes)


@triton.jit
def _convert(codes, numbers):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(numbers + at, number_in(tl.load(codes + at), numbers.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_e4m3_code_taken_as_a_byte_is_its_number(dtype: torch.dtype) -> None:
    """What architectures run that have no instruction for it (`launch.converts_e4m3`)."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = torch.zeros(256, dtype=dtype, device=DEVICE)
    _convert[(1,)](codes, numbers)
    torch.testing.assert_close(numbers, codes.view(torch.float8_e4m3fn).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cache_taken_as_bytes(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch.kernels import paged_attention as kernel

    monkeypatch.setattr(kernel, "converts_e4m3", lambda arch: False)
    query = torch.randn(tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    _check(query, _stored(torch.float8_e4m3fn, 2), _stored(torch.float8_e4m3fn, 3), SIZE**-0.5, 0.0)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float16)])
@pytest.mark.parametrize("cap", [0.0, 50.0])
def test_weights_below_float16(dtype: torch.dtype, stored: torch.dtype, cap: float) -> None:
    """A first key that is worth 2**25 of the others, and whose value is zero, leaves the result to them."""
    key, value = torch.zeros(KEYS, 1, SIZE), (_stored(torch.float32, 4).cpu() + 4) * 50
    key[0], value[0] = 4.0, 0.0
    query = torch.full((1, HEADS, SIZE), 4.0)
    score = cap * math.atanh(17.5 / cap) if cap else 17.5
    _check(query.to(DEVICE, dtype), key.to(DEVICE, stored), value.to(DEVICE, stored), score / (16 * SIZE), cap)
