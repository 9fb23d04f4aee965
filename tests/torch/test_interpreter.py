"""bfloat16 under Triton's interpreter: conversions to the bit, products to rounding (2 s)."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from attn.torch.interpreter import correct_bfloat16

pytestmark = [
    pytest.mark.triton_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]


@triton.jit
def _convert(source, target, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def _product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    x, y = tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n)
    tl.store(c + m * N + n, tl.dot(x, y.to(x.dtype)))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.int8, torch.bfloat16),
        (torch.bfloat16, torch.int32),
    ],
)
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    correct_bfloat16()
    torch.manual_seed(0)
    values = torch.randn(256) * torch.logspace(-3, 2, 256)
    if source.is_floating_point and target.is_floating_point:
        values[:4] = torch.tensor([torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8])  # and two that lie halfway
    values = values.to(source)
    found = torch.zeros(256, dtype=target)
    _convert[(1,)](values, found, 256)
    assert torch.equal(found, values.to(target))


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float8_e5m2, torch.int8])
def test_products(other: torch.dtype) -> None:
    correct_bfloat16()
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 32).bfloat16(), (4 * torch.randn(32, 16)).to(other), torch.zeros(16, 16)
    _product[(1,)](a, b, c, 16, 16, 32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
