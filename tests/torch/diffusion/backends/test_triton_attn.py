"""Prompts that repeat, on a Hopper GPU: its kernel reads keys where they are, in any layout; others take the general way."""

import pytest
import torch

from attn.functional import attention
from attn.torch.diffusion.backends.triton_attn import TritonAttentionImpl

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [2, 130, 517])
@pytest.mark.parametrize("order", ["heads first", "tokens first", "last dimension apart"])
@pytest.mark.parametrize(("head_size", "kv_heads", "scale"), [(64, 2, None), (128, 8, -0.3), (256, 1, None), (80, 2, None)])
def test_a_prompt_is_the_formula(
    head_size: int, kv_heads: int, scale: float | None, order: str, rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn.torch.kernels import hopper_prefill

    outputs, prompts = list[torch.Tensor | None](), hopper_prefill.EqualPrompts.__call__
    monkeypatch.setattr(hopper_prefill.EqualPrompts, "__call__", lambda *args: outputs.append(prompts(*args)) or outputs[-1])
    torch.manual_seed(0)

    def array(heads: int) -> torch.Tensor:
        if order == "heads first":
            return torch.randn(3, heads, rows, head_size, device="cuda", dtype=torch.bfloat16)
        if order == "tokens first":
            return torch.randn(3, rows, heads, head_size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return torch.randn(3, heads, head_size, rows, device="cuda", dtype=torch.bfloat16).transpose(2, 3)

    query, key, value = array(8), array(kv_heads), array(kv_heads)
    impl = TritonAttentionImpl(8, head_size, scale, causal, kv_heads)
    launch = impl.launcher(*(x.transpose(1, 2) for x in (query, key, value)))
    want = attention(*(x.transpose(1, 2).float() for x in (query, key, value)), causal=causal, scale=scale, layout="BSHD")
    for _ in range(2):  # a second call is not examined again
        torch.testing.assert_close(launch(query, key, value).float(), want, rtol=2e-2, atol=2e-2)
    short = [x[:, :, :-1].clone() for x in (query, key, value)]
    if causal:  # other lengths are
        torch.testing.assert_close(launch(*short).float(), want[:, : rows - 1], rtol=2e-2, atol=2e-2)
    assert (outputs[0] is not None) == (order != "last dimension apart")
    prepared, made = launch.bound(query, key, value), len(outputs)  # type: ignore[attr-defined]
    for _ in range(2):
        others = [x.clone() for x in (query, key, value)]
        torch.testing.assert_close(prepared(*others).float(), want, rtol=2e-2, atol=2e-2)
    assert (len(outputs) == made) == (order == "tokens first"), "where nothing is copied, no call is examined"
