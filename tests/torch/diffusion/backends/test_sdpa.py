"""Single rows: of grouped heads without a copy of the keys; on a GPU, those that repeat by FlashAttention's operator."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
from attn.functional import attention
from attn.torch.diffusion.backends.sdpa import SDPAImpl


@torch.no_grad()
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("mask", ["none", "keys", "full", "by head"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 9), (1, 1), (3, 9)])
def test_torch_repeats_no_keys_for_single_rows(
    rows: int, keys: int, mask: str, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, rows, 8, 16), torch.randn(2, 2, keys, 2, 16)
    shape = {"none": (), "keys": (2, keys), "full": (2, 1, rows, keys), "by head": (1, 8, rows, keys)}[mask]
    given = torch.rand(shape) < 0.6 if shape else None
    full = given[:, None, None] if given is not None and mask == "keys" else given
    grouped, function = [], F.scaled_dot_product_attention

    def called(*arrays: torch.Tensor, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        grouped.append(enable_gqa)
        return function(*arrays, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    for causal in (False, True)[: 1 + (mask == "none")]:
        impl = SDPAImpl(8, 16, scale, causal, 2)
        outs = [impl.forward(query, key, value, DiffusionAttentionMetadata(attn_mask=given))]
        if given is None:
            outs.append(impl.launcher(query, key, value)(*(x.transpose(1, 2) for x in (query, key, value))))
        want = attention(query, key, value, scale=scale, causal=causal, mask=full, layout="BSHD")
        for out in outs:
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert set(grouped) == {rows > 1 or mask == "by head"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention's operator needs a GPU")
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
