"""`attn.torch.scaled_dot_product_attention` gives torch's results with every backend."""

import collections
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attn.torch
from attn.diffusion.backends.registry import register_diffusion_backend
from attn.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from attn.tools.fuzz import entries as fuzz_entries
from attn.tools.fuzz import on_torch
from attn.torch import dot_product
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


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.4, -0.4, 1])
@pytest.mark.parametrize(("rows", "keys", "width"), [(5, 5, 16), (3, 7, 16), (7, 3, 16), (5, 5, 24), (1, 9, 16)])
def test_a_call_like_earlier_ones_is_chosen_for_once(rows, keys, width, scale, causal, monkeypatch):
    asked, choose, made, make = list[int](), dot_product.impl_for, list[int](), SDPAImpl.launcher
    monkeypatch.setattr(dot_product, "impl_for", lambda call: asked.append(1) or choose(call))
    monkeypatch.setattr(SDPAImpl, "launcher", lambda *args: made.append(1) or make(*args))
    for n in range(4):
        q, k, v = (
            torch.randn(2, 3, m, d) for m, d in ((rows, 16), (keys, 16), (keys, width))
        )  # three heads: no other test has
        negated = scale is not None and scale < 0  # torch's own result is NaN under causality
        want = F.scaled_dot_product_attention(-q if negated else q, k, v, is_causal=causal, scale=scale and abs(scale))
        torch.testing.assert_close(attn.torch.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale), want)
        assert n or not made  # not for a call that may come once
    # arrays that are changed before the launch, and integers as a scale, take the long way each time
    plain = width == 16 and not (causal and rows != keys) and type(scale) is not int and not (scale and scale < 0)
    assert len(asked) <= 2 if plain else len(asked) == 4  # once where another case made the launch


@torch.no_grad()
def test_devices_without_autocast_have_calls_that_repeat():
    q = torch.empty(1, 2, 3, 16, device="meta")
    assert [attn.torch.scaled_dot_product_attention(q, q, q).device.type for _ in range(3)] == ["meta"] * 3


def test_mistakes_are_sentences():
    q, k, v = tensors(8, 8, 16)
    with pytest.raises(ShapeError, match="key has 2 heads, query 4"):
        attn.torch.scaled_dot_product_attention(q, k, v)
    with pytest.raises(TypeError, match="key is a list: must be a torch.Tensor"):
        attn.torch.scaled_dot_product_attention(q, k.tolist(), v)
    with pytest.raises(TypeError, match="query is a ndarray: must be a torch.Tensor"):
        attn.torch.scaled_dot_product_attention(q.numpy(), k, v)
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


BASE = (2, 4, 8, 16)
_WIDTHS = ((2, 4, 8, 16), (2, 4, 8, 8), (2, 4, 8, 24))
_LEADS = ((2, 3, 4, 8, 16), (3, 2, 4, 8, 16), (3, 2, 4, 8, 16))
_ROWS = ((2, 4, 8, 16), (2, 4, 9, 16), (2, 4, 10, 16))
#: Calls with wrong shapes that gave a result, or an error of torch's own about an `expand`.
WRONG = {
    "queries and keys of other widths": (*_WIDTHS, None, {}),
    "leading dimensions of one product": (*_LEADS, None, {}),
    "causal, more values than keys": (*_ROWS, None, {"is_causal": True}),
    "more values than keys, float mask": (*_ROWS, (8, 9), {"bool": False}),
    "a mask of a larger batch": (*[BASE] * 3, (3, 4, 8, 8), {}),
    "a mask of more dimensions": (*[BASE] * 3, (1, 2, 4, 8, 8), {}),
    "a float mask of a larger batch": (*[BASE] * 3, (3, 4, 8, 8), {"bool": False}),
    "a mask of the values' batch": ((1, 4, 8, 16), (1, 4, 8, 16), BASE, (2, 1, 8, 8), {}),
    "a float mask of the values' heads": ((2, 1, 8, 16), (2, 1, 8, 16), BASE, (4, 8, 8), {"bool": False}),
    "a mask of one dimension": (*[BASE] * 3, (8,), {}),
}


def call_of(query, key, value, attn_mask, options):
    """The arguments of a call with these shapes."""
    options = dict(options)
    number = torch.ones if options.pop("bool", True) else torch.zeros
    mask = None if attn_mask is None else number(attn_mask, dtype=torch.bool if number is torch.ones else None)
    return [torch.randn(shape) for shape in (query, key, value)], {"attn_mask": mask, **options}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_are_checked_before_they_are_changed(name):
    tensors, options = call_of(*WRONG[name])
    with pytest.raises(ShapeError, match=r"must be|must have|must broadcast"):
        attn.torch.scaled_dot_product_attention(*tensors, **options)


def test_what_torch_refuses_is_refused():
    """Random shapes near those of a call. What torch accepts gives torch's result or an error of this library."""
    subject = fuzz_entries.subject_of("TORCH_ENTRY")
    ends = collections.Counter(subject.check(case) for case in fuzz_entries.program(subject, 0, 0, 400))
    assert ends["refused"] > 50 and ends["served"] > 50


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda q, k, v, **options: q * 1.0, "a result where the framework refuses|another result"),
        (lambda q, k, v, **options: F.scaled_dot_product_attention(q, k[..., :1, :], v[..., :1, :]), "another result"),
    ],
)
def test_an_entry_that_takes_what_torch_refuses_is_noticed(entry, message, monkeypatch):
    monkeypatch.setattr(on_torch, "scaled_dot_product_attention", entry)
    case = fuzz_entries.CallCase("", (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16))
    with pytest.raises(AssertionError, match=message):
        on_torch.call_entry(case)
    if "refuses" in message:
        with pytest.raises(AssertionError, match="a result where the framework refuses"):
            on_torch.call_entry(case.replace(key=(2, 4, 8, 24)))


def refusing(*arguments, **options):
    raise ShapeError("no")


def test_an_entry_declines_only_what_its_documentation_does_not_name(monkeypatch):
    monkeypatch.setattr(on_torch, "scaled_dot_product_attention", refusing)
    case = fuzz_entries.CallCase("", (2, 4, 8, 16), (4, 8, 16), (4, 8, 16))
    assert on_torch.call_entry(case) == "declined"  # of unequal rank
    with pytest.raises(AssertionError, match="refused but documented: no"):
        on_torch.call_entry(case.replace(query=(1, 8, 16)))


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
)
@pytest.mark.parametrize(
    ("query", "key", "width"),
    [
        ((2, 4, 0, 16), (2, 4, 8, 16), 16),
        ((2, 4, 8, 16), (2, 4, 0, 16), 16),
        ((4, 8, 16), (4, 0, 16), 8),
        ((2, 0, 8, 16), (2, 0, 8, 16), 16),
        ((0, 4, 8, 16), (0, 4, 8, 16), 16),
        ((2, 4, 8, 0), (2, 4, 8, 0), 16),
        ((2, 4, 8, 16), (2, 4, 8, 16), 0),
        ((1, 4, 8, 16), (2, 4, 0, 16), 16),
        ((1, 4, 8, 0), (2, 4, 8, 0), 16),
        ((1, 4, 0, 16), (2, 4, 8, 16), 16),
    ],
)
def test_an_empty_dimension_gives_torchs_result_and_gradients(query, key, width, options):
    if "attn_mask" in options:
        mask = torch.ones(query[-2], key[-2], dtype=torch.bool)
        options = {"attn_mask": mask if options["attn_mask"] == "bool" else mask.float()}
    results = []
    own = F.scaled_dot_product_attention
    if query[-3] == 0 and torch.__version__ < "2.13":  # torch's own ends the process

        def own(q, k, v, **options):
            return q @ k.mT @ v

    for function in (own, attn.torch.scaled_dot_product_attention):
        torch.manual_seed(0)
        some = [torch.randn(shape, requires_grad=True) for shape in (query, key, (*key[:-1], width))]
        out = function(*some, **options)
        out.sum().backward()
        results.append((out, *(x.grad for x in some)))
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_no_query_heads_over_grouped_heads():
    """torch's own ends the process in versions before 2.13."""
    q, k, v = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (0, 4, 4))
    out = attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    out.sum().backward()
    assert out.shape == q.grad.shape == (2, 0, 8, 16) and not k.grad.any() and not v.grad.any()


def test_a_forced_backend_serves_no_rows_and_no_keys():
    q, k, v = tensors(8, 8, 16, kv_heads=4)
    with attn.torch.sdpa_backend("TORCH_SDPA"):
        assert attn.torch.scaled_dot_product_attention(q[..., :0, :], k, v).shape == (2, 4, 0, 16)
        none = attn.torch.scaled_dot_product_attention(q, k[..., :0, :], v[..., :0, :])
        with pytest.raises(ValueError, match="head_size=0 must be a positive int"):
            attn.torch.scaled_dot_product_attention(q[..., :0], k[..., :0], v[..., :0])
    assert none.shape == q.shape and not none.any()


def test_dtypes_and_devices_are_checked_with_and_without_a_mask():
    q, k, v = tensors(8, 8, 16, kv_heads=4)
    for mask in (None, torch.zeros(8, 8)):
        with pytest.raises(DTypeError, match=r"bfloat16.*must be one float dtype"):
            attn.torch.scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        with pytest.raises(DTypeError, match="must be one float dtype"):
            attn.torch.scaled_dot_product_attention(q.int(), k.int(), v.int(), mask)
        with pytest.raises(DeviceError, match="meta"):
            attn.torch.scaled_dot_product_attention(q, k.to("meta"), v, mask)
    with pytest.raises(DTypeError, match=r"attn_mask.*int32.*must be bool"):
        attn.torch.scaled_dot_product_attention(q, k, v, torch.ones(8, 8, dtype=torch.int32))
    with pytest.raises(DTypeError, match=r"attn_mask.*bfloat16"):
        attn.torch.scaled_dot_product_attention(q, k, v, torch.ones(8, 8, dtype=torch.bfloat16))
    with pytest.raises(DeviceError, match="attn_mask"):
        attn.torch.scaled_dot_product_attention(q, k, v, torch.ones(8, 8, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)])
def test_autocast_is_followed(mask, dtypes):
    q, k, v = tensors(8, 8, 16, kv_heads=4)
    q, k, v = q.to(dtypes[0]), k.to(dtypes[0]), v.to(dtypes[1])
    options = {} if mask is None else {"attn_mask": torch.ones(8, 8).tril() > 0}
    if mask == "float":
        options = {"attn_mask": options["attn_mask"].float()}
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v, **options)
        got = attn.torch.scaled_dot_product_attention(q, k, v, **options)
        compiled = torch.compile(attn.torch.scaled_dot_product_attention, backend="eager", fullgraph=True)(q, k, v, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(compiled, want)
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(4, 4, 5, 9), (1, 1, 5, 9), (5, 9)])
def test_a_mask_of_minus_infinity_hides_its_keys(shape: tuple[int, ...]) -> None:
    """A row without keys is 0, as under a mask of bools, and as in `attn.jax` (docs/semantics.md §1)."""
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 4, 5, 16), torch.randn(4, 4, 9, 16), torch.randn(4, 4, 9, 16)
    seen = torch.rand(shape) > 0.3
    seen[..., 3, :] = False
    number = torch.randn(shape)
    got = attn.torch.scaled_dot_product_attention(query, key, value, torch.where(seen, number, -torch.inf))
    scores = query @ key.transpose(2, 3) / 4 + number
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num()
    torch.testing.assert_close(got, weights @ value, rtol=1e-5, atol=1e-5)
    assert not got[:, :, 3].any()
