"""diffusers: tiny random Flux- and Wan-shaped transformers give the same latents through `attn` as through its own backend."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.integrations import diffusers as integration

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (pip install diffusers)")


@pytest.fixture(autouse=True)
def native_again() -> Iterator[None]:
    """diffusers keeps the active backend for the whole process."""
    from diffusers.models import attention_dispatch as dispatch

    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def _flux() -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(7, 3),
    }
    return model, inputs


def _wan() -> tuple[Any, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 9, 16),
    }
    return model, inputs


def _latents(model: Any, inputs: dict[str, Any], backend: str) -> torch.Tensor:
    model.set_attention_backend(backend)
    with torch.no_grad():
        out: torch.Tensor = model(**inputs, return_dict=False)[0]
    return out


def test_layers_outside_the_dispatcher_are_named() -> None:
    """diffusers leaves them as they are, without a word."""
    from diffusers import SD3Transformer2DModel

    integration.register()
    model = SD3Transformer2DModel(
        sample_size=4, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    model.set_attention_backend("native")
    words = r'SD3Transformer2DModel: "attn:TORCH_SDPA" has no effect on 1 of 1 attention layers \(JointAttnProcessor2_0\)'
    with pytest.warns(UserWarning, match=words):
        model.set_attention_backend("attn:TORCH_SDPA")
    integration.register()
    with pytest.warns(UserWarning) as seen:
        model.set_attention_backend("attn")
    assert len(seen) == 1


@pytest.mark.parametrize("make", [_flux, _wan], ids=["flux", "wan"])
@pytest.mark.parametrize("name", ["attn", "attn:TORCH_SDPA"])
def test_latents_are_those_of_the_native_backend(make: Any, name: str) -> None:
    assert name in integration.register()
    model, inputs = make()
    want = _latents(model, inputs, "native")
    torch.testing.assert_close(_latents(model, inputs, name), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
@pytest.mark.parametrize("shapes", [(8, 9, 10), (8, 8, 9), (9, 8, 7)])
def test_keys_and_values_of_other_lengths_are_rejected(shapes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Causal calls drop the keys that no row sees: after the check, which would not see them."""
    tensors = [torch.randn(1, rows, 2, 16) for rows in shapes]
    with pytest.raises(ShapeError, match=r"must be \[B, S, H, D\]"):
        integration._function(None, 0.0)(*tensors, **options)
    with pytest.raises(ShapeError, match=r"must be \[B, S, H, D\]"):
        integration._function(None, 0.0)(*(x[0] for x in tensors), **options)


@pytest.mark.parametrize("backend", [None, "TORCH_SDPA"])
def test_autocast_is_followed(backend: str | None) -> None:
    """Norms of queries and keys can keep them in float32, beside values in bfloat16."""
    query, value = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    run = integration._function(backend, 0.0)
    want = run(*(x.bfloat16() for x in (query, query, value)))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(query, query, value.bfloat16()), want)


def test_the_negative_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny random model can hide what its attention does: with another scale the latents must differ."""
    integration.register()
    model, inputs = _flux()
    want = _latents(model, inputs, "native")
    real = integration.impl_for
    monkeypatch.setattr(integration, "impl_for", lambda properties: real(properties._replace(scale=3.0)))
    assert (_latents(model, inputs, "attn") - want).abs().max() > 1e-3


def test_a_name_that_cannot_serve_is_refused_with_its_reasons() -> None:
    integration.register()
    model, inputs = _flux()
    with pytest.raises(UnsupportedError, match="sageattention is not installed"):
        _latents(model, inputs, "attn:SAGE_ATTN")


def test_masks_in_diffusers_way() -> None:
    integration.register()
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (torch.randn(2, 5, 2, 16) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    full = mask[:, None, None].expand(2, 1, 5, 5)
    added = torch.zeros(full.shape).masked_fill(~full, -torch.inf)
    want = dispatch_attention_fn(q, k, v, attn_mask=full, backend="native")
    for given in (mask, full, added):
        torch.testing.assert_close(dispatch_attention_fn(q, k, v, attn_mask=given, backend="attn"), want)
    for given in (mask.long(), mask.to(torch.uint8), full.int(), full[0, 0], full[0]):
        want = dispatch_attention_fn(q, k, v, attn_mask=given.bool(), backend="native")
        torch.testing.assert_close(dispatch_attention_fn(q, k, v, attn_mask=given, backend="attn"), want)
    with pytest.raises(UnsupportedError, match="biases are not supported"):
        dispatch_attention_fn(q, k, v, attn_mask=torch.randn(2, 1, 5, 5), backend="attn")
    with pytest.raises(UnsupportedError, match="dropout_p=0.1"):
        dispatch_attention_fn(q, k, v, dropout_p=0.1, backend="attn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_discarded_key_has_no_weight_beside_one_that_is_kept(dtype: torch.dtype) -> None:
    """-10000, as LTX-Video masks its prompt; the second entry keeps no key at all, and -inf hides one of them."""
    integration.register()
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (torch.randn(3, 5, 2, 16).to(dtype) for _ in range(3))
    added = (1 - torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).to(dtype)) * -10000.0
    added[1, 4] = -torch.inf
    given = added[:, None, None].expand(3, 1, 5, 5)
    exact = given.double().masked_fill(given[..., :3].amax((1, 2, 3), True) < 0, 0).masked_fill(given.isinf(), -torch.inf)
    want = dispatch_attention_fn(q.double(), k.double(), v.double(), attn_mask=exact, backend="native")
    got = dispatch_attention_fn(q, k, v, attn_mask=given, backend="attn")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5, 5)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_of_other_integers_is_refused(shape: tuple[int, ...], compiled: bool) -> None:
    """An additive mask in an integer dtype: each value but 0 hides a key, where 1 of a mask of 0 and 1 shows it."""
    integration.register()
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (torch.randn(2, 5, 2, 16) for _ in range(3))
    added = torch.zeros(shape, dtype=torch.long)
    added[..., 3:] = -10000
    call: Any = dispatch_attention_fn
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedError if not compiled else RuntimeError, match="0 .hidden. and 1 .attend. only"):
        call(q, k, v, attn_mask=added, backend="attn")
    with pytest.raises(DTypeError, match="complex64"):
        dispatch_attention_fn(q, k, v, attn_mask=added.to(torch.complex64), backend="attn")


@pytest.mark.parametrize(("rows", "keys"), [(4, 9), (9, 4), (5, 5), (1, 6)])
@pytest.mark.parametrize("name", ["attn", "attn:TORCH_SDPA"])
def test_causality_counts_from_the_first_row_as_in_the_native_backend(rows: int, keys: int, name: str) -> None:
    integration.register()
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = torch.randn(2, rows, 4, 16), torch.randn(2, keys, 2, 16), torch.randn(2, keys, 2, 16)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    want = dispatch_attention_fn(q, k, v, **options, backend="native")
    got = dispatch_attention_fn(q, k, v, **options, backend=name)
    torch.testing.assert_close(got, want)
    again, lse = dispatch_attention_fn(q, k, v, **options, attention_kwargs={"return_lse": True}, backend=name)
    scores = torch.einsum("bihd,bjhd->bihj", q, k.repeat_interleave(2, 2)) / 4
    scores = scores.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril()[:, None], -torch.inf)
    torch.testing.assert_close(again, want)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    with pytest.raises(UnsupportedError, match="is_causal=True and attn_mask: pass only one"):
        dispatch_attention_fn(q, k, v, **options, attn_mask=torch.ones(2, keys).bool(), backend=name)


def test_gradients_reach_the_model() -> None:
    integration.register()
    model, inputs = _wan()
    model.set_attention_backend("attn")
    model(**inputs, return_dict=False)[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_dispatched_call_in_a_graph() -> None:
    integration.register()
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (torch.randn(2, 5, 2, 16) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch.Tensor:
        return dispatch_attention_fn(q * 1, k, v, attn_mask=mask[:, None, None].expand(2, 1, 5, 5), backend=name)

    torch.compiler.reset()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, "attn")
    torch.testing.assert_close(got, run(q, k, v, "native"))
