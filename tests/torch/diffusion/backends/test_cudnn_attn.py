"""Calls that repeat, on a GPU: cuDNN's operator itself is the formula, for grouped heads and prompts too."""

import pytest
import torch

from attn.functional import attention
from attn.torch.diffusion.backends.cudnn_attn import CuDNNAttentionImpl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's operator needs a GPU")


@torch.no_grad()
@pytest.mark.parametrize(("rows", "keys", "causal"), [(1, 513, False), (130, 130, True), (130, 130, False), (33, 513, False)])
@pytest.mark.parametrize(("head_size", "kv_heads", "scale"), [(64, 2, None), (128, 8, -0.3), (256, 1, None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_call_is_the_formula(
    dtype: torch.dtype, head_size: int, kv_heads: int, scale: float | None, rows: int, keys: int, causal: bool
) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 8, rows, head_size, dtype=dtype, device="cuda")
    key, value = (torch.randn(3, kv_heads, keys + 7, head_size, dtype=dtype, device="cuda")[:, :, :keys] for _ in range(2))
    impl = CuDNNAttentionImpl(8, head_size, scale, causal, kv_heads)
    launch = impl.launcher(*(x.transpose(1, 2) for x in (query, key, value)))
    assert launch != impl._attend_heads_first
    want = attention(*(x.transpose(1, 2).float() for x in (query, key, value)), causal=causal, scale=scale, layout="BSHD")
    torch.testing.assert_close(launch(query, key, value).float(), want, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_later_rows_of_a_prompt_take_a_mask() -> None:
    query, key = torch.randn(1, 8, 5, 64, device="cuda").half(), torch.randn(1, 8, 9, 64, device="cuda").half()
    impl = CuDNNAttentionImpl(8, 64, None, True, 8)
    assert impl.launcher(*(x.transpose(1, 2) for x in (query, key, key))) == impl._attend_heads_first
