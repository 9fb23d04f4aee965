"""`autocast` casts what torch casts, so that queries, keys and values have one dtype at the entries that follow it."""

import pytest
import torch
import torch.nn.functional as F

from attn.torch.autocast import autocast

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_casts_as_torch_does(dtype, to):
    x = torch.randn(2, 4, 8, 16).to(dtype)
    with torch.autocast("cpu", to):
        want = F.scaled_dot_product_attention(x, x, x).dtype
        got, none = autocast(x, None)
    assert got.dtype == want and none is None


def test_it_leaves_everything_else():
    x, bools = torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
    elsewhere = torch.empty(2, 4, device="meta")
    assert autocast(x)[0] is x
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast(x, bools)[1] is bools
        assert autocast(x, elsewhere)[1] is elsewhere
        assert autocast(elsewhere, x) == (elsewhere, x)
        with torch.autocast("cpu", enabled=False):
            assert autocast(x)[0] is x


def test_gradients_have_the_dtype_of_the_argument():
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        autocast(x)[0].float().sum().backward()
    assert x.grad.dtype == torch.float32
