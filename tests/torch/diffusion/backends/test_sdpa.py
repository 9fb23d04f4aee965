"""A single row that repeats, on a GPU: FlashAttention's operator for what it takes, PyTorch's choice for the rest."""

import pytest
import torch

from attn.functional import attention
from attn.torch.diffusion.backends.sdpa import SDPAImpl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention's operator needs a GPU")


@torch.no_grad()
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("head_size", [64, 80, 20, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keys", [1, 9, 513])
def test_a_row_is_the_formula(dtype: torch.dtype, head_size: int, scale: float | None, keys: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 8, 1, head_size, dtype=dtype, device="cuda")
    key, value = (torch.randn(3, 2, keys + 7, head_size, dtype=dtype, device="cuda")[:, :, :keys] for _ in range(2))
    impl = SDPAImpl(8, head_size, scale, False, 2)
    launch = impl.launcher(*(x.transpose(1, 2) for x in (query, key, value)))
    taken = dtype is not torch.float32 and head_size % 8 == 0
    assert (launch == impl._by_flash_attention) == taken
    want = attention(*(x.transpose(1, 2).float() for x in (query, key, value)), scale=scale, layout="BSHD")
    near = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(launch(query, key, value).float(), want, rtol=near, atol=near)
