"""`attn.torch.scaled_dot_product_attention` gives torch's results with every backend."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attn.torch
from attn.diffusion.backends.registry import register_diffusion_backend
from attn.errors import ShapeError, UnsupportedError
from attn.torch.diffusion.backends.sdpa import SDPABackend, SDPAImpl

SHAPES = [(8, 8, 16), (5, 9, 16), (9, 5, 16), (8, 8, 24), (8, 8, 8), (1, 7, 16)]


def tensors(rows, keys, width, heads=4, kv_heads=2, grad=False):
    torch.manual_seed(0)
    shapes = ((2, heads, rows, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, width))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "keys"])
@pytest.mark.parametrize(("rows", "keys", "width"), SHAPES)
def test_values_and_gradients_are_torchs(rows, keys, width, kind):
    options = {"enable_gqa": True}
    if kind == "causal":
        options["is_causal"] = True
    if kind == "bool":
        options["attn_mask"] = torch.rand(2, 1, rows, keys) > 0.3
        options["attn_mask"][..., 0] = True
    if kind == "float":
        options["attn_mask"] = torch.randn(2, 4, rows, keys)
    if kind == "keys":
        options["attn_mask"] = (torch.arange(keys) < 4)[None]
    results = []
    for function in (F.scaled_dot_product_attention, attn.torch.scaled_dot_product_attention):
        q, k, v = tensors(rows, keys, width, grad=True)
        out = function(q, k, v, **options)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float"])
def test_a_negative_scale_is_that_of_the_negated_query(kind, dtype):
    """torch's own kernel for a CPU multiplies the -inf of a causal mask by the scale: NaN."""
    q, k, v = (x.to(dtype) for x in tensors(40, 40, 16))
    options = {"plain": {}, "causal": {"is_causal": True}, "bool": {"attn_mask": torch.ones(40, 40).tril() > 0}}
    options["float"] = {"attn_mask": torch.randn(40, 40).to(dtype)}
    want = F.scaled_dot_product_attention(-q, k, v, scale=0.3, enable_gqa=True, **options[kind])
    got = attn.torch.scaled_dot_product_attention(q, k, v, scale=-0.3, enable_gqa=True, **options[kind])
    torch.testing.assert_close(got, want)


def test_more_and_fewer_leading_dimensions():
    q, k, v = (torch.randn(3, 2, 4, 6, 16) for _ in range(3))
    for some in ((q, k, v), (q[0, 0], k[0, 0], v[0, 0])):
        want = F.scaled_dot_product_attention(*some, is_causal=True)
        torch.testing.assert_close(attn.torch.scaled_dot_product_attention(*some, is_causal=True), want)


def test_a_choice_is_obeyed_or_refused():
    q, k, v = tensors(8, 8, 16, kv_heads=4)
    want = F.scaled_dot_product_attention(q, k, v)
    with attn.torch.sdpa_backend("TORCH_SDPA"):
        torch.testing.assert_close(attn.torch.scaled_dot_product_attention(q, k, v), want)
    with attn.torch.sdpa_backend("CUDNN_ATTN"), pytest.raises(UnsupportedError, match="platform=cpu"):
        attn.torch.scaled_dot_product_attention(q, k, v)
    with attn.torch.sdpa_backend("TORCH_SDPA"), pytest.raises(UnsupportedError, match="additive masks are not supported"):
        attn.torch.scaled_dot_product_attention(q, k, v, torch.zeros(8, 8))
    with pytest.raises(ValueError, match="NOBODY"), attn.torch.sdpa_backend("NOBODY"):
        pass
    torch.testing.assert_close(attn.torch.scaled_dot_product_attention(q, k, v), want)


def test_the_environment_is_asked_at_each_call(monkeypatch):
    q, k, v = tensors(8, 8, 16)
    attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    monkeypatch.setenv("ATTN_DIFFUSION_BACKEND", "CUDNN_ATTN")
    with pytest.raises(UnsupportedError, match="ATTN_DIFFUSION_BACKEND"):
        attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_mistakes_are_sentences():
    q, k, v = tensors(8, 8, 16)
    with pytest.raises(ShapeError, match="key has 2 heads, query 4"):
        attn.torch.scaled_dot_product_attention(q, k, v)
    with pytest.raises(UnsupportedError, match=r"dropout_p=0\.5"):
        attn.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ShapeError, match=r"\[8, 16\]"):
        attn.torch.scaled_dot_product_attention(q[0, 0], k, v)
    with pytest.raises(ValueError, match="pass only one of them"):
        attn.torch.scaled_dot_product_attention(q, q, q, torch.ones(8, 8, dtype=torch.bool), is_causal=True)


def test_a_backend_registered_between_two_calls_is_chosen():
    asked = []

    class Impl(SDPAImpl):
        def forward(self, *args, **kwargs):
            asked.append("NEWER")
            return super().forward(*args, **kwargs)

    class Newer(SDPABackend):
        capabilities = replace(SDPABackend.capabilities, priority=1)
        get_name = staticmethod(lambda: "NEWER")
        get_impl_cls = staticmethod(lambda: Impl)

    q, k, v = tensors(8, 8, 16)
    before = attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    register_diffusion_backend("NEWER", Newer)
    torch.testing.assert_close(attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True), before)
    assert asked == ["NEWER"]
