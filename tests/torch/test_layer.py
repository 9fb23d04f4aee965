"""`attn.torch.Attention`: a module that chooses its backend, owns its scales, and computes the oracle's answers."""

from typing import Any

import numpy as np
import pytest
import torch

import attn
from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DeviceError, ShapeError, UnsupportedError
from attn.torch import Attention, MLAAttention
from attn.torch.backends._paged import PagedAttentionBackend, PagedAttentionImpl
from attn.torch.diffusion.layer import DiffusionAttention

H, K, D, P = 4, 2, 32, 16


def test_two_steps_of_a_batch() -> None:
    """A prefill and a decode through the module alone, the second reading what the first wrote."""
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32)
    cache = layer.new_kv_cache(8)
    builder = layer.backend.get_builder_cls()(layer.kv_cache_spec)
    table = [[5, 2], [0, 7]]
    qkv = [torch.randn(2, 21, heads, D) for heads in (H, K, K)]
    for query_lens, seq_lens in (([18, 20], [18, 20]), ([3, 1], [21, 21])):
        rows = [slice(m - n, m) for n, m in zip(query_lens, seq_lens, strict=True)]
        now = [torch.cat([x[r, rows[r]] for r in range(2)]) for x in qkv]
        meta = builder.build(0, CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, P))
        out = layer(*now, cache, meta)
        for r, part in enumerate(out.split(query_lens)):
            q, k, v = (x[r, : seq_lens[r]].numpy() for x in qkv)
            want, _ = reference.attention(q[rows[r]], k, v, causal=True)
            np.testing.assert_allclose(part, want, atol=2e-6)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("flat", [(), ("query",), ("output",), ("query", "output")])
def test_a_call_that_the_batch_knows_is_made_of_its_own_tensors(flat: tuple[str, ...], scale: float) -> None:
    """Also where they are viewed by heads first, or copied with the sign of a scale."""
    batch = CommonAttentionMetadata.from_lens([5, 1], [5, 21], [[3], [7, 4]], P)
    layer = Attention(H, D, scale, num_kv_heads=K, dtype=torch.float32, backend="TORCH_SDPA")
    caches, known = [layer.new_kv_cache(8) for _ in range(2)], layer.build(batch)
    for _ in range(3):
        query, key, value = (torch.randn(6, heads, D) for heads in (H, K, K))
        shapes = [(6, H * D) if name in flat else (6, H, D) for name in ("query", "output")]
        outs = [torch.full(shapes[1], torch.nan) for _ in caches]
        for cache, out, metadata in zip(caches, outs, (known, layer.build(batch)), strict=True):
            assert layer.impl.forward(layer, query.reshape(shapes[0]), key, value, cache, metadata, out) is out
        assert torch.equal(*outs) and torch.equal(*caches)
    assert len(known.kept().calls) == 1


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_rows_of_padding_are_written_nowhere(backend: str) -> None:
    """Also if their slots are not -1: an engine's buffers may hold those of an earlier step."""
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32, backend=backend)
    cache = layer.new_kv_cache(8)
    batch = CommonAttentionMetadata.from_lens([3], [3], [[5]], P)
    batch = batch.replace(slot_mapping=np.append(batch.slot_mapping, 2 * P))
    layer(*(torch.ones(4, heads, D) for heads in (H, K, K)), cache, layer.build(batch))
    keys, values = layer.backend.logical_kv_cache(cache)
    assert keys[5, :3].all() and not keys[2].any() and not values[2].any()


@pytest.mark.parametrize(
    ("hooks", "error", "said"),
    [
        ({}, NotImplementedError, r"has no _attend\(call\)"),
        # JAX backends return their output; here it was dropped, and the caller got an output buffer that was never written.
        ({"_attend": lambda self, call: call.query}, TypeError, r"_attend\(\) returned a Tensor: it must fill call.output"),
    ],
)
def test_a_hook_that_is_missing_or_returns_its_output_is_named(hooks: dict[str, Any], error: type, said: str) -> None:
    record = attn.Capabilities(framework="torch", platforms=("cpu",), dtypes=("float32",))
    backend = type("Mine", (PagedAttentionBackend,), {"name": "MINE", "capabilities": record})
    type("MineImpl", (PagedAttentionImpl,), hooks, backend=backend)  # type: ignore[call-overload]
    with attn.registered_backend("MINE", backend):
        layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32, backend="MINE")
        batch = CommonAttentionMetadata.from_lens([3], [3], [[5]], P)
        with pytest.raises(error, match=f"MineImpl.*{said}"):
            layer(*(torch.ones(3, heads, D) for heads in (H, K, K)), layer.new_kv_cache(8), layer.build(batch))


def test_the_selection_is_logged() -> None:
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.bfloat16, features=("tree_mask",))
    assert layer.selection.name and layer.selection.name in repr(layer)
    assert "tree_mask" in layer.selection.request.features
    assert layer.kv_cache_spec.dtype == "bfloat16"
    assert Attention(H, D).kv_cache_spec.dtype == "float32"
    with pytest.raises(UnsupportedError, match="mla not supported"):
        Attention(H, D, features=("mla",), backend="TORCH_SDPA")


def test_scales_are_buffers_that_no_checkpoint_holds() -> None:
    layer = Attention(H, D, num_kv_heads=K, kv_cache_dtype="fp8", k_scale=0.5, v_scale=torch.tensor([0.5, 2.0]))
    assert layer._k_scale_float == 0.5 and layer._q_scale_float == 1.0 and not hasattr(layer, "_v_scale_float")
    assert "per_head_scales" in layer.selection.request.features
    assert layer.half()._k_scale.dtype == layer._v_scale.dtype == torch.float32
    assert layer.state_dict() == {} and layer.to("meta")._v_scale.device.type == "meta"
    with pytest.raises(ShapeError, match="^k_scale has shape"):
        Attention(H, D, num_kv_heads=K, k_scale=torch.ones(3))


@pytest.mark.parametrize("wrong", [{"num_heads": 3, "num_kv_heads": 2}, {"sliding_window": 0}, {"scale": float("nan")}])
def test_nonsense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        Attention(**{"num_heads": H, "head_size": D, **wrong})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 4.0}, "num_heads=4.0 must be a positive int"),
        ({"scale": "0.5"}, "scale='0.5' must be a number"),
        ({"sinks": "on"}, "sinks='on' must be a number, a list of numbers or an array"),
        ({"k_scale": {}}, "k_scale={} must be a number, a list of numbers or an array"),
        ({"v_scale": None}, "v_scale=None must be a number"),
        ({"alibi_slopes": "on"}, "alibi_slopes='on' must be"),
        ({"features": "lse"}, "features='lse' must be a list of names"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(**{"num_heads": H, "head_size": D, **wrong})


def test_arguments_may_come_from_a_configuration() -> None:
    """NumPy integers, None for the cache's dtype, and scales as a list."""
    sizes = {"num_heads": np.int64(H), "head_size": np.int32(D), "num_kv_heads": np.int64(K), "block_size": np.int64(P)}
    layer = Attention(**sizes, kv_cache_dtype=None, sliding_window=np.int64(4), features=["lse"])
    assert layer.kv_cache_spec.kv_cache_dtype == "auto" and type(layer.kv_cache_spec.block_size) is int
    assert layer.new_kv_cache(2) is not None and layer.impl.kv_cache_dtype == "auto"
    layer = Attention(**sizes, kv_cache_dtype="fp8", k_scale=[0.5, 2.0])
    assert "per_head_scales" in layer.selection.request.features and layer._k_scale.tolist() == [0.5, 2.0]


def _in_any_batch(layer: Any, *widths: tuple[int, ...]) -> None:
    """Decodes, a chunk and prompts: the same bits alone and in batches of any order, from the layer and from its graph."""
    lens, generator = [(1, 40), (20, 33), (1, 5), (1, 64), (18, 18), (3, 50), (1, 17)], torch.Generator().manual_seed(1)
    rows = [[torch.randn(n, *width, generator=generator) for width in widths] for n, _ in lens]
    filled = layer.new_kv_cache(4 * len(lens))
    filled.copy_(torch.randn(filled.shape, generator=generator))

    def run(requests: list[int], call: Any = layer) -> list[list[torch.Tensor]]:
        q_lens, k_lens = zip(*(lens[r] for r in requests), strict=True)
        tables = [[4 * r + i for i in range(-(-lens[r][1] // P))] for r in requests]
        meta = layer.build(CommonAttentionMetadata.from_lens(q_lens, k_lens, tables, P))
        given = [torch.cat(parts) for parts in zip(*(rows[r] for r in requests), strict=True)]
        with torch.no_grad():
            out, lse = call(*given, filled.clone(), meta)
        return [[o, log] for o, log in zip(out.split(q_lens), lse.split(q_lens, 1), strict=True)]

    def same(found: list[list[torch.Tensor]], requests: list[int]) -> bool:
        return all(
            torch.equal(a, b) for part, r in zip(found, requests, strict=True) for a, b in zip(part, alone[r], strict=True)
        )

    alone = [run([r])[0] for r in range(len(lens))]
    for requests in ([0, 1, 2, 3, 4, 5, 6], [6, 3, 0], [4, 1, 5, 2], [2, 6, 0, 3]):
        assert same(run(requests), requests)
    assert same(run([4, 0, 6], torch.compile(lambda *given: layer(*given), backend="eager", fullgraph=True)), [4, 0, 6])


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_a_request_has_the_same_bits_in_any_batch(backend: str) -> None:
    options: dict[str, Any] = {"num_kv_heads": 3, "sinks": [0.3, -0.2, 0.1], "return_lse": True, "backend": backend}
    layer = Attention(3, 20, **options, features=["batch_invariant"])
    assert layer.impl.batch_invariant and not Attention(3, 20, **options).impl.batch_invariant
    _in_any_batch(layer, (3, 20), (3, 20), (3, 20))


def test_a_latent_request_has_the_same_bits_in_any_batch() -> None:
    up = torch.randn(128, 4, 64 + 48) / 12
    layer = MLAAttention(4, 128, 64, 16, 48, up, block_size=P, return_lse=True, features=["batch_invariant"])
    assert layer.selection.name == "TORCH_MLA" and layer.impl.batch_invariant
    _in_any_batch(layer, (4, 80), (128,), (16,))


def test_batch_invariance_is_declared_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="FLEX_ATTENTION +batch_invariant not supported"):
        Attention(H, D, backend="FLEX_ATTENTION", features=["batch_invariant"])
    monkeypatch.setenv("ATTN_BATCH_INVARIANT", "1")
    assert Attention(H, D).impl.batch_invariant
    with pytest.raises(UnsupportedError, match="batch_invariant not supported"):
        Attention(H, D, backend="FLEX_ATTENTION")


def test_it_compiles_around_a_model() -> None:
    """A captured step: the layer may break a graph, never change an answer."""
    layer = Attention(H, D, num_kv_heads=K, backend="TORCH_SDPA").eval()
    batch = CommonAttentionMetadata.from_lens([3], [3], [[0]], P)
    meta = layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch)
    x = torch.randn(3, H, D)

    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return layer(2 * x, x[:, :K], x[:, :K], cache, meta) + 1

    with torch.no_grad():
        want = step(x, layer.new_kv_cache(1))
        torch.testing.assert_close(torch.compile(step, backend="eager")(x, layer.new_kv_cache(1)), want)


def prompt(layer: Attention, dtype: torch.dtype, length: int = 5) -> torch.Tensor:
    """The output of a layer for a prompt, with a cache of its own; the same numbers in each dtype."""
    torch.manual_seed(0)
    qkv = [torch.randn(length, heads, D).bfloat16().to(dtype) for heads in (H, K, K)]
    batch = CommonAttentionMetadata.from_lens([length], [length], [[1]], P)
    out: torch.Tensor = layer(*qkv, layer.new_kv_cache(2), layer.build(batch))
    return out


def test_a_layer_follows_the_dtype_of_its_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Attention(H, D, num_kv_heads=K, sinks=[0.5] * H, sliding_window=3))
    layer = model[1]
    want = prompt(layer, torch.float32)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        assert model.to(dtype)[0].weight.dtype == dtype
        assert layer.selection.request.dtype == layer.kv_cache_spec.dtype == name and name in repr(layer)
        out = prompt(layer, dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=0)
    impl = layer.impl
    assert model.to(torch.float32)[1].impl is impl and model.to("cpu")[1].impl is impl, "nothing changed"


def test_a_dtype_that_no_backend_serves_is_refused_where_it_is_asked_for() -> None:
    layer = Attention(H, D, backend="TORCH_SDPA")
    with pytest.raises(UnsupportedError, match="dtype=float8_e4m3fn"):
        layer.to(torch.float8_e4m3fn)
    assert layer.selection.request.dtype == "float32"


@pytest.mark.parametrize("dense", [False, True])
def test_a_cast_that_the_backend_refuses_leaves_the_layer_as_it_was(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = DiffusionAttention(H, D, backend="TORCH_SDPA") if dense else Attention(H, D, backend="TORCH_SDPA")
    names = ("backend", "selection", "impl")
    before = [getattr(layer, name) for name in names]

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError("not in this dtype")

    monkeypatch.setattr(type(layer.impl), "__init__", refuse)
    with pytest.raises(UnsupportedError, match="not in this dtype"):
        layer.half()
    assert all(getattr(layer, name) is value for name, value in zip(names, before, strict=True))


def test_a_latent_layer_follows_the_dtype_of_its_model() -> None:
    up = torch.nn.Linear(32, 2 * 32, bias=False)
    model = torch.nn.ModuleList([up, MLAAttention(2, 32, 16, 16, 16, up, prefill_backend="TORCH_SDPA")]).to(torch.bfloat16)
    layer = model[1]
    assert isinstance(layer, MLAAttention) and layer.selection.request.dtype == layer.kv_cache_spec.dtype == "bfloat16"
    assert layer.impl.prefill_backend == "TORCH_SDPA"
    batch = CommonAttentionMetadata.from_lens([5], [5], [[1]], 64)
    rows = [torch.randn(5, *shape, dtype=torch.bfloat16) for shape in ((2, 32), (32,), (16,))]
    with torch.no_grad():
        assert layer(*rows, layer.new_kv_cache(2), layer.build(batch)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_that_are_a_parameter_are_the_modules(dtype: torch.dtype) -> None:
    sinks = torch.nn.Parameter(torch.zeros(H, dtype=dtype))
    layer = Attention(H, D, num_kv_heads=K, sinks=sinks)
    assert dict(layer.named_parameters()) == {"sinks": sinks} and list(layer.state_dict()) == ["sinks"]
    before = prompt(layer, torch.float32)
    layer.load_state_dict({"sinks": torch.full((H,), 50.0)})
    assert prompt(layer, torch.float32).abs().max() < 1e-6 < before.abs().max(), "loaded values count"
    layer = layer.to(torch.bfloat16)
    assert layer.sinks is sinks and sinks.dtype == torch.bfloat16
    with torch.no_grad():
        sinks.zero_()
    torch.testing.assert_close(prompt(layer, torch.bfloat16).float(), before, atol=2e-2, rtol=0)


def test_sinks_that_are_numbers_are_a_buffer_of_float32() -> None:
    layer = Attention(H, D, num_kv_heads=K, sinks=[0.25] * H)
    assert dict(layer.named_parameters()) == {} and list(layer.state_dict()) == ["sinks"]
    assert layer.half().sinks is not None and layer.sinks.dtype == layer.impl.sinks.dtype == torch.float32
    other = Attention(H, D, num_kv_heads=K, sinks=[0.0] * H, dtype=torch.float16)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(prompt(other, torch.float16), prompt(layer, torch.float16), rtol=0, atol=0)
    assert layer.to("meta").sinks.is_meta and layer.impl.sinks.tolist() == [0.25] * H, "the values are not lost"


def test_sinks_without_values_are_named_by_a_call_and_may_be_loaded() -> None:
    layer = Attention(H, D, num_kv_heads=K, sinks=torch.nn.Parameter(torch.full((H,), 0.5, device="meta")), dtype=torch.float32)
    with pytest.raises(DeviceError, match="sinks are on meta, query on cpu: load their values before a call"):
        prompt(layer, torch.float32)
    same = Attention(H, D, num_kv_heads=K, sinks=[0.5] * H, dtype=torch.float32)
    layer.to_empty(device="cpu").load_state_dict(same.state_dict())
    assert torch.equal(prompt(layer, torch.float32), prompt(same, torch.float32))


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"])
def test_autocast_does_not_round_inside_a_layer(backend: str) -> None:
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32, backend=backend)
    batch = layer.build(CommonAttentionMetadata.from_lens([5], [5], [[1]], P))
    query, key, value = (torch.randn(5, heads, D) for heads in (H, K, K))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(query, key, value, layer.new_kv_cache(2), batch)
    want, _ = reference.attention(query.numpy(), key.numpy(), value.numpy(), causal=True)
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_autocast_does_not_round_inside_a_latent_layer() -> None:
    torch.manual_seed(0)
    project = torch.nn.Linear(32, H * (16 + 16), bias=False)
    layer = MLAAttention(H, 32, 16, 8, 16, project, block_size=P, dtype=torch.float32)
    layer.process_weights_after_loading(torch.float32)
    batch = layer.build(CommonAttentionMetadata.from_lens([5], [5], [[1]], P))
    rows = torch.randn(5, H, 16 + 8), torch.randn(5, 32), torch.randn(5, 8)
    with torch.no_grad():
        want = layer(*rows, layer.new_kv_cache(2), batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(*rows, layer.new_kv_cache(2), batch), want)


def test_autocast_does_not_round_inside_a_dense_layer() -> None:
    layer = DiffusionAttention(H, D, dtype=torch.float32)
    query, key, value = torch.randn(3, 1, 5, H, D)
    want = layer(query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(query, key, value), want)


def test_a_cache_whose_tokens_share_memory_is_refused() -> None:
    """The new tokens of all blocks would be written over each other."""
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32)
    batch = layer.build(CommonAttentionMetadata.from_lens([5], [5], [[1]], P))
    cache = layer.new_kv_cache(1).expand(-1, 2, -1, -1, -1)
    with pytest.raises(ShapeError, match="kv_cache is expanded"):
        layer(*(torch.ones(5, heads, D) for heads in (H, K, K)), cache, batch)
    latent = MLAAttention(H, 32, 16, 8, 16, torch.nn.Linear(32, H * 32, bias=False), block_size=P, dtype=torch.float32)
    rows = torch.ones(5, H, 24), torch.ones(5, 32), torch.ones(5, 8)
    batch = latent.build(CommonAttentionMetadata.from_lens([5], [5], [[1]], P))
    with torch.no_grad(), pytest.raises(ShapeError, match="kv_cache is expanded"):
        latent(*rows, latent.new_kv_cache(1).expand(2, -1, -1), batch)


def test_scales_and_numbers_of_sinks_come_back_from_meta() -> None:
    """As a model's loader makes it: no checkpoint has them."""
    layer = Attention(H, D, num_kv_heads=K, kv_cache_dtype="fp8", k_scale=0.5, sinks=[0.0, 1.0, 2.0, 3.0])
    layer.to("meta").to("meta").to_empty(device="cpu")
    assert layer._k_scale.item() == 0.5 and layer.sinks is not None and layer.sinks.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert layer.impl.sinks is layer.sinks


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("window", [(2**31 - 1, 0), (2**31 - 1, 2**31 - 1), (2**40, 2**40)])
def test_a_window_beyond_every_key_hides_none(backend: str, window: tuple[int, int]) -> None:
    """Positions beside spans are int32, and a row before the first key has a negative one."""
    causal = window[1] == 0
    cap = {"logits_soft_cap": 30.0}  # no fused kernel of torch
    layers = [
        Attention(4, 16, num_kv_heads=2, backend=backend, sliding_window=x, span_window=True, **cap) for x in (window, None)
    ]
    spans = np.array([(0, 2), (-1, -1), (1, 1)] * 3 + [(2, 3), (-1, -1)], np.int32)
    outputs = []
    for layer in layers:
        batch = CommonAttentionMetadata.from_lens(
            [7, 4], [3, 4], [[1], [2]], 16, causal=causal, spans=spans, strict=False, writes=False
        )
        cache = layer.new_kv_cache(3)
        cache.copy_(torch.linspace(-1, 1, cache.numel()).reshape(cache.shape))
        outputs.append(layer(torch.ones(11, 4, 16), None, None, cache, layer.build(batch)))
    torch.testing.assert_close(*outputs)
