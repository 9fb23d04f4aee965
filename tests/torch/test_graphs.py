"""Layers and drop-ins in graphs: `torch.compile(fullgraph=True)` and `torch.export` give eager's results with every backend.

Graphs are run by "aot_eager", which traces, functionalises and checks as any compiler's front does, without one.
"""

import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend

import attn.torch
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.registry import AttentionBackendEnum
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.torch import graphs, platforms
from attn.torch.backends._paged import PagedAttentionImpl
from attn.torch.backends.mla._mla import MLACommonImpl
from attn.torch.diffusion.backends._dense import DenseImpl, bottom_right

H, K, D, P = 4, 2, 32, 16
BATCHES = [([5, 1], [5, 21]), ([3, 2], [30, 17]), ([1, 1], [7, 3]), ([6, 4], [6, 9])]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are selected for the CPU, where these tests' tensors are, beside a GPU too."""
    monkeypatch.setattr(platforms, "_present_platform", lambda: "cpu")
    platforms.platform.cache_clear()
    yield
    platforms.platform.cache_clear()


def counted() -> Any:
    return CompileCounterWithBackend("aot_eager")


def batch_of(q_lens: list[int], k_lens: list[int], layer: Any) -> Any:
    tables = [[3, 1], [7, 4]]
    size = layer.kv_cache_spec.block_size
    batch = CommonAttentionMetadata.from_lens(
        q_lens, k_lens, [row[: -(-n // size)] for row, n in zip(tables, k_lens, strict=True)], size
    )
    return layer.backend.get_builder_cls()(layer.kv_cache_spec).build(0, batch)


def arrays(rows: int, *widths: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, *width) for width in widths or ((H, D), (K, D), (K, D))]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {
        "sliding_window": 8,
        "logits_soft_cap": 5.0,
        "sinks": [0.5, -1.0, 2.0, 0.0],
        "kv_cache_dtype": "int8",
        "k_scale": 0.03,
        "v_scale": 0.03,
    },
    "slopes": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "options"),
    [("CPU_ATTN", "plain"), ("CPU_ATTN", "all at once"), ("TORCH_SDPA", "slopes")],
)
def test_a_paged_layer_is_part_of_one_graph(backend: str, options: str) -> None:
    """Output and cache, batch after batch; lengths, rows and metadata that change do not compile it again and again."""
    layer = attn.torch.Attention(H, D, num_kv_heads=K, backend=backend, **OPTIONS[options])
    caches = [layer.new_kv_cache(16) for _ in range(2)]
    counter = counted()

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any) -> Any:
        return layer(q * 2, k, v, cache, batch) + 1

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for q_lens, k_lens in BATCHES[: 4 if backend == "CPU_ATTN" else 1]:
        batch, given = batch_of(q_lens, k_lens, layer), arrays(sum(q_lens))
        torch.testing.assert_close(compiled(*given, caches[0], batch), step(*given, caches[1], batch), rtol=0, atol=0)
        assert torch.equal(caches[0], caches[1])
    assert counter.frame_count <= 3


@torch.no_grad()
def test_layers_that_differ_in_sinks_alone() -> None:
    """Their operator's implementation is one, rebuilt from equal text."""
    for sinks in ([0.5, -1.0, 2.0, 0.0], None):
        layer = attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN", sinks=sinks)
        batch, given, cache = batch_of([5, 1], [5, 21], layer), arrays(6), layer.new_kv_cache(16)
        assert torch.equal(graphs.call(layer, *given, cache.clone(), batch, (H, D)), layer(*given, cache, batch))


@torch.no_grad()
def test_a_lse_comes_along_and_a_profiling_run_is_zeros() -> None:
    layer = attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN", features=["lse"])
    layer.impl.need_to_return_lse_for_decode = True
    batch, given, cache = batch_of([5, 1], [5, 21], layer), arrays(6), layer.new_kv_cache(16)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given, cache.clone(), batch)
    for mine, theirs in zip(got, layer(*given, cache, batch), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.compile(layer, fullgraph=True, backend="aot_eager")(*given, cache, None).any()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@torch.no_grad()
def test_a_compiled_function_may_make_its_batch() -> None:
    """With breaks of the graph, as plans are made on the host."""
    layer, given = attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN"), arrays(6)
    cache = layer.new_kv_cache(16)

    def step(q: Any, k: Any, v: Any) -> Any:
        batch = CommonAttentionMetadata.from_lens([5, 1], [5, 21], [[3], [7, 4]], P)
        return layer(q, k, v, cache, layer.build(batch))

    assert torch.equal(torch.compile(step, backend="aot_eager")(*given), step(*given))


@torch.no_grad()
def test_an_encoder_layer() -> None:
    layer = attn.torch.Attention(H, D, num_kv_heads=K, attn_type="encoder_only", backend="TORCH_SDPA")
    batch, given = batch_of([5, 9], [5, 9], layer), arrays(14)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given, None, batch)
    assert torch.equal(got, layer(*given, None, batch))


def test_gradients_in_a_graph_are_refused() -> None:
    layer = attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN")
    query, key, value = arrays(6)
    # torch 2.11 cites the line that raised instead of its message
    with pytest.raises(Exception, match=r"(CPU_ATTN|impl\.backend\.get_name\(\)\}): gradients in a graph not supported"):
        torch.compile(layer, fullgraph=True, backend="eager")(
            query.requires_grad_(), key, value, layer.new_kv_cache(16), batch_of([5, 1], [5, 21], layer)
        )


def mla(backend: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return attn.torch.MLAAttention(4, 32, 24, 16, 40, torch.randn(32, 4, 64) / 6, backend=backend, block_size=16, **more)


@torch.no_grad()
def test_an_mla_layer_and_its_copy() -> None:
    """Weights belong to a layer: a copy of it, with other weights, is not mistaken for it."""
    layer = mla("TORCH_MLA")
    other = copy.deepcopy(layer)
    other.impl.kv_b_proj = other.impl.kv_b_proj * 2
    assert other.graph_key != layer.graph_key
    batch, given = batch_of([5, 1], [5, 21], layer), arrays(6, (4, 40), (32,), (16,))
    for one in (layer, other):
        cache = one.new_kv_cache(16)
        got = torch.compile(one, fullgraph=True, backend="aot_eager")(*given, cache.clone(), batch)
        assert torch.equal(got, one(*given, cache, batch))
    assert not torch.equal(layer(*given, cache, batch), other(*given, cache, batch))


@torch.no_grad()
def test_sparse_mla_sees_the_keys_that_its_graph_chose() -> None:
    indexer = SimpleNamespace(topk_indices=torch.zeros(6, 3, dtype=torch.int32))
    layer = mla("TORCH_MLA_SPARSE", indexer=indexer)
    batch, given = batch_of([5, 1], [5, 21], layer), arrays(6, (4, 40), (32,), (16,))
    chosen = torch.tensor([[0, -1, -1], [1, 0, -1], [2, 0, 1], [0, 3, 1], [4, 0, 2], [20, 5, 6]], dtype=torch.int32)

    def step(*call: Any) -> Any:
        indexer.topk_indices.copy_(chosen * 1)  # by the graph: functionalised, it reaches the indexer when all is done
        return layer(*call)

    cache = layer.new_kv_cache(16)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*given, cache.clone(), batch)
    assert torch.equal(got, step(*given, cache, batch))


class Model(torch.nn.Module):
    """Two layers with something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN", sinks=sinks, sliding_window=9)
            for sinks in ([0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0])
        )

    def forward(self, query: Any, key: Any, value: Any, caches: Any, batch: Any) -> Any:
        for layer, cache in zip(self.layers, caches, strict=True):
            query = query + layer(query, key, value, cache, batch)
        return query


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_serves_other_batches(strict: bool) -> None:
    """Of the extents that it was made for: rows of padding have slot -1. Batches are inputs; bounds follow from shapes."""
    model = Model()
    caches = [[layer.new_kv_cache(16) for layer in model.layers] for _ in range(2)]
    first = batch_of([5, 1], [5, 21], model.layers[0])
    program = torch.export.export(model, (*arrays(6), caches[0], first), strict=strict).module()
    for lens in (([2, 3], [19, 30]), ([5, 1], [6, 20])):
        q_lens, k_lens = lens
        batch = batch_of(q_lens, k_lens, model.layers[0])
        batch.slot_mapping = F.pad(batch.slot_mapping, (0, 6 - sum(q_lens)), value=-1)
        given = arrays(6)
        want = model(*given, caches[1], batch)
        got = program(*given, caches[0], batch)
        assert torch.equal(got[: sum(q_lens)], want[: sum(q_lens)])
        assert all(map(torch.equal, *caches))


@torch.no_grad()
def test_an_exported_program_runs_in_another_process(tmp_path: Any) -> None:
    model = Model()
    caches = [layer.new_kv_cache(16) for layer in model.layers]
    given, batch = arrays(6), batch_of([5, 1], [5, 21], model.layers[0])
    torch.export.save(torch.export.export(model, (*given, caches, batch), strict=False), tmp_path / "model.pt2")
    torch.save((given, model(*given, [c.clone() for c in caches], batch)), tmp_path / "io.pt")
    script = """
        import sys, torch, attn.torch.graphs
        from attn import CommonAttentionMetadata
        from attn.torch.metadata import PagedAttentionMetadataBuilder
        from attn.backends.abstract import KVCacheSpec
        program = torch.export.load(sys.argv[1] + "/model.pt2").module()
        given, want = torch.load(sys.argv[1] + "/io.pt")
        batch = CommonAttentionMetadata.from_lens([5, 1], [5, 21], [[3], [7, 4]], 16)
        batch = PagedAttentionMetadataBuilder(KVCacheSpec(16, 2, 32, "float32")).build(0, batch)
        with torch.no_grad():
            got = program(*given, [torch.zeros(2, 16, 2, 16, 32) for _ in range(2)], batch)
        assert torch.equal(got, want)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=300)


@torch.no_grad()
def test_an_mla_program_names_its_deleted_layer() -> None:
    layer = mla("TORCH_MLA")
    given, cache, batch = arrays(6, (4, 40), (32,), (16,)), layer.new_kv_cache(16), batch_of([5, 1], [5, 21], layer)
    program = torch.export.export(layer, (*given, cache, batch), strict=False).module()
    assert torch.equal(program(*given, cache.clone(), batch), layer(*given, cache, batch))
    del graphs._layers[layer.graph_key]  # as it is in another process
    with pytest.raises(ValueError, match=r"MLAAttention-\d+: the layer of this graph was deleted"):
        program(*given, cache, batch)


@torch.no_grad()
def test_operators_keep_torchs_rules() -> None:
    layer = attn.torch.Attention(H, D, num_kv_heads=K, backend="CPU_ATTN")
    query, key, value = arrays(6)
    batch, one = batch_of([5, 1], [5, 21], layer), torch.ones(())
    weights, numbers = [None, None, None, one, one], [batch.handle, 6, 5, 21, True, H, D, False]
    call = (query, key, value, layer.new_kv_cache(16), batch.tensors(), weights, numbers, layer.graph_key)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    library.opcheck(graphs._layer, call, test_utils=checks)
    q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
    text = '{"impl": "attn.torch.diffusion.backends.sdpa:SDPAImpl", "arguments": {"num_heads": 4, "head_size": 16}}'
    library.opcheck(graphs._dense, (q, k, v, None, None, None, text), test_utils=checks)
    for name in ("layer", "dense"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.attn, name).default.tags


def test_no_backend_is_out_of_a_graphs_reach() -> None:
    """Every torch implementation is one operator, by its template, or declares that it is traced."""
    templates = (PagedAttentionImpl, MLACommonImpl, DenseImpl)
    seen = 0
    for registry in (AttentionBackendEnum, DiffusionAttentionBackendEnum):
        for member in registry:
            if str(member.value or "").startswith("attn.torch."):
                impl = member.get_class().get_impl_cls()
                assert isinstance(impl.traceable, bool) and (impl.traceable or issubclass(impl, templates)), member
                seen += 1
    assert seen > 25


class Untraceable(DenseImpl):
    """What a vendor's library does: asks the host about a value."""

    backend = DiffusionAttentionBackendEnum.TORCH_SDPA.get_class()

    def _attend(self, call: Any) -> Any:
        query, key, value = call.query, call.key, call.value
        assert query.sum().item() == query.sum().item()
        mask = bottom_right(query.shape[1], key.shape[1], query.device) if self.causal else None
        if call.present is not None:
            mask = call.present[:, None, None]
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), mask).transpose(1, 2)


def test_a_dense_implementation_that_cannot_be_traced() -> None:
    from attn.diffusion.backends.abstract import DiffusionAttentionMetadata

    torch.manual_seed(0)
    impl = Untraceable(4, 16)
    q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)

    def step(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return impl.forward(q, k, v) + impl.forward(q, k, v, DiffusionAttentionMetadata(attn_mask=mask))

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, mask)
    assert torch.equal(got, step(q, k, v, mask))


def test_the_drop_in_in_a_graph() -> None:
    """Values, gradients, lengths that change; `sdpa_backend` is obeyed inside, around, and by a graph that is there already."""
    counter = counted()

    def run(q: Any, k: Any, v: Any) -> Any:
        return attn.torch.scaled_dot_product_attention(q * 1, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for length in (8, 17):
        results = []
        for function in (compiled, lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)):
            torch.manual_seed(0)
            given = [torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2)]
            out = function(*given)
            out.square().sum().backward()
            results.append((out, *(x.grad for x in given)))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
    given = [x.detach() for x in given]
    with attn.torch.sdpa_backend("CUDNN_ATTN"), pytest.raises(Exception, match=r"CUDNN_ATTN +platform=cpu"):
        compiled(*given)

    def inside(*x: Any) -> Any:
        with attn.torch.sdpa_backend("TORCH_SDPA"):
            return run(*x)

    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(*given), inside(*given))
    length = {2: torch.export.Dim("length")}
    wrapped = torch.nn.Module()
    wrapped.forward = run
    program = torch.export.export(wrapped, tuple(given), dynamic_shapes=((length, length, length),)[0]).module()
    longer = [torch.randn(2, heads, 23, 16) for heads in (4, 2, 2)]
    torch.testing.assert_close(program(*longer), run(*longer))


def test_the_drop_in_in_a_graph_of_symbols() -> None:
    """dynamic=True: heads, head size and scale become constants, of which another value is traced again; lengths do not."""
    counter = CompileCounterWithBackend("eager")

    def run(q: Any, k: Any, v: Any, scale: float | None) -> Any:
        return attn.torch.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for batch, heads, length, size, scale in (
        (5, 4, 9, 32, None),
        (7, 4, 17, 32, None),
        (7, 6, 9, 16, 0.3),
        (7, 6, 9, 16, 0.2),
    ):
        q, k, v = (torch.randn(batch, h, length, size) for h in (heads, 2, 2))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        torch.testing.assert_close(compiled(q, k, v, scale), want)
        frames.append(counter.frame_count)
    assert frames == [1, 1, 2, 3]
