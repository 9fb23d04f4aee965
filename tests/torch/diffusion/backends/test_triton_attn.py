"""Prompts that repeat, on a Hopper GPU: its kernel reads keys where they are, in any layout; others take the general way."""

import pytest
import torch

from attn.diffusion.backends.abstract import DiffusionAttentionMetadata
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


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(300, 77), (130, 130), (64, 517), (17, 4000), (5, 300)])
@pytest.mark.parametrize("scale", [None, -0.3])
def test_rows_over_other_keys_are_the_formula(rows: int, keys: int, scale: float | None, causal: bool) -> None:
    """Their number of keys is no page's multiple; the second call finds the first one's plan, the third its launch."""
    torch.manual_seed(0)
    impl = TritonAttentionImpl(8, 128, scale, causal, 2)
    for _ in range(3):
        query, key, value = (
            torch.randn(2, n, h, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((rows, 8), (keys, 2), (keys, 2))
        )
        want = attention(query.float(), key.float(), value.float(), causal=causal, scale=scale, layout="BSHD")
        torch.testing.assert_close(impl.forward(query, key, value).float(), want, rtol=2e-2, atol=2e-2)
        out, lse = impl.forward_lse(query, key, value)
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
        scores = torch.einsum("bshd,bmhd->bhsm", query.float(), key.float().repeat_interleave(4, 2)) * (scale or 128**-0.5)
        if causal:
            scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1), -torch.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(("rows", "keys"), [(300, 77), (130, 130), (64, 517), (17, 4000), (1, 300)])
@pytest.mark.parametrize("masked", [True, False])
def test_padding_reaches_nothing(rows: int, keys: int, head_size: int, masked: bool) -> None:
    """Its memory is NaN. The second call with lengths makes its launch, the third repeats it."""
    torch.manual_seed(0)
    impl, lens = TritonAttentionImpl(8, head_size, None, False, 2), [keys, keys - 40, 1, 0]
    for _ in range(4):
        query, key, value = (
            torch.randn(4, n, h, head_size, device="cuda", dtype=torch.bfloat16) for n, h in ((rows, 8), (keys, 2), (keys, 2))
        )
        present = torch.arange(keys, device="cuda") < torch.tensor(lens, device="cuda")[:, None]
        if masked:
            present = present.flip(1)
        key[~present] = value[~present] = torch.nan
        meta = DiffusionAttentionMetadata(**({"attn_mask": present} if masked else {"kv_lens": lens}))
        out = impl.forward(query, key, value, meta)
        for b, n in enumerate(lens):
            q, k, v = query[b : b + 1].float(), key[b : b + 1, present[b]].float(), value[b : b + 1, present[b]].float()
            want = attention(q, k, v, causal=False, layout="BSHD") if n else torch.zeros_like(q)
            torch.testing.assert_close(out[b : b + 1].float(), want, rtol=2e-2, atol=2e-2)
