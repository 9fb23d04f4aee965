"""The TRITON_ATTN family: what it declares, and what only calls of a certain kind show; `test_interpreted` runs the suite.

Without a GPU the kernels run interpreted on the CPU. About 15 s on one core with triton, none without.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import library

from attn import selector
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import Device, Request
from attn.dtypes import QuantKey, kFp8StaticTensorSym
from attn.errors import DTypeError, ShapeError, UnsupportedError
from attn.functional import attention
from attn.kernels.launch import UNBOUNDED
from attn.torch import Attention
from attn.torch import kv_cache as caches
from attn.torch.backends._triton import _BatchPlan
from attn.torch.backends.blocksparse_attn import BlocksparseFlashAttentionBackend
from attn.torch.backends.rocm_attn import RocmAttentionBackend
from attn.torch.backends.tree_attn import TreeAttentionBackend
from attn.torch.backends.triton_attn import TritonAttentionBackend
from attn.torch.kernels.runs import Runs
from tests.levels import sampled

ON_GPU = torch.cuda.is_available()
H200, A100 = Device("torch", "cuda", "H200", "sm_90"), Device("torch", "cuda", "A100", "sm_80")
MI300 = Device("torch", "rocm", "MI300X", "gfx942")

#: Where keys lie and how many rows attend them: every pair on a GPU, each of both where kernels are interpreted.
PLACES = [("heads first", 1), ("heads first", 40), ("tokens first", 3), ("odd", 1), ("slice", 1)]
if ON_GPU:
    PLACES = list(itertools.product(("heads first", "tokens first", "slice", "odd"), (1, 3, 40)))
NO_CACHE: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 7, "sinks": [0.5, -1.0, 2.0, 0.0]},
    {"sliding_window": 50, "logits_soft_cap": 1.5, "scale": -0.4},
    {"features": ["non_causal"]},
    {"features": ["batch_invariant"]},
)
WHERE = [pytest.param(*place, options, id=f"{place}-{options}") for place in PLACES for options in NO_CACHE]
if not ON_GPU:
    WHERE = sampled(WHERE, 6, "keys in no cache")

# the interpreter computes with NumPy, which speaks of the infinities that kernels handle on purpose, and with its old ways
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


def test_the_plan_of_a_batch() -> None:
    """What the lengths say about launches: (processors of prompts, a bound of the keys that their rows see, whether decodes are
    whole, whether both are one, whether some request has one token)."""
    pytest.importorskip("triton")

    def plan(batch: list[tuple[int, int]], heads: int, kv_heads: int, size: int = 128, itemsize: int = 2, **more: Any) -> Any:
        q_lens, seq_lens = np.array(batch).T
        arch, cls = more.pop("arch", "sm_90"), more.pop("cls", TritonAttentionBackend).get_impl_cls()
        impl = cls(heads, size, 0.1, kv_heads, **more)
        return tuple(impl._planned(q_lens, seq_lens, int(q_lens.max()), itemsize, arch, 132))[:5]

    small = [(57, 57), (1, 22), (1, 1338)]
    assert plan(small, 16, 16) == plan(small, 16, 16, itemsize=1) == (0, None, False, True, True)
    assert plan(small, 16, 16, arch="sm_80") == (0, None, False, True, True)
    assert plan(small[:2], 16, 16) == (0, None, True, True, True)  # too few keys to be cut: one launch in all
    assert plan(small, 16, 16, sliding_window=100) == (0, None, True, True, True)
    apart = {"arch": "gfx942"}, {"size": 256}, {"itemsize": 4}, {"cls": BlocksparseFlashAttentionBackend}
    assert [plan(small, 16, 16, **options)[3] for options in apart] == [False] * len(apart)
    # speculation, decodes alone, and prompts that fill the device
    assert [plan(b, 32, 8)[3] for b in ([(4, 900)] * 3, [(1, 900)], [(60, 60)] * 200, [(300, 300)])] == [False] * 4
    # this launch has no prompts, so no multiprocessors are reserved
    assert plan([(4, 900)] * 3 + [(1, 900)], 32, 8) == (0, None, False, False, True)
    assert plan([(512, 8192)] + [(1, 4096)] * 63, 32, 8) == (70, UNBOUNDED, True, False, True)
    assert plan([(2048, 2048)] * 2 + [(1, 1024)] * 32, 32, 8) == (132, 2000, True, False, True)
    assert plan([(2039, 2039), (691, 691)], 28, 4) == (132, 1000, True, False, False)
    # decodes that end soon are whole beside prompts too; the bytes of e4m3 were not timed
    short = [(1, 200 + 4 * i) for i in range(97)] + [(1000, 1000)]
    assert [plan(short, 28, 4, itemsize=itemsize)[2] for itemsize in (2, 1)] == [True, False]
    assert [plan([(n, n)] * 4, 32, 8, size)[1] for n, size in ((800, 128), (2048, 64), (8192, 64))] == [1000, 2000, UNBOUNDED]
    assert [plan([(300, 300), (4096, 4096)], 32, 8, sliding_window=left)[1] for left in (256, None)] == [250, 2000]


def test_rows_over_their_own_keys_are_planned_by_their_lengths() -> None:
    """An encoder's tiles follow the keys that its rows see on average, unless a request's bits must not depend on others."""
    pytest.importorskip("triton")
    builder = TritonAttentionBackend.get_builder_cls()(
        KVCacheSpec(4096, 1, 32, "float32"), ["layer"], None, torch.device("cpu")
    )

    def below(lens: list[int], captured: bool = False, invariant: bool = False, **more: Any) -> int | None:
        impl = TritonAttentionBackend.get_impl_cls()(4, 64, 0.1, 4, attn_type="encoder_only", **more)
        impl.batch_invariant = invariant
        batch = CommonAttentionMetadata.from_lens(lens, lens, np.arange(len(lens), dtype=np.int32)[:, None], 4096, causal=False)
        return impl._keys_below(builder.build_for_cudagraph_capture(batch) if captured else builder.build(0, batch))

    assert [below(lens) for lens in ([200] * 20, [100, 100, 700], [3000], [1, 2])] == [250, 1000, UNBOUNDED, 190]
    assert below([3000], sliding_window=300) == 1000
    assert below([200], captured=True) is below([200], invariant=True) is None


@pytest.mark.triton_kernels
@quiet
def test_a_request_has_the_same_bits_alone_and_among_others() -> None:
    """Alone, its keys are split further."""
    rng = np.random.default_rng(1)
    heads, kv_heads, size, page = 2, 1, 32, 16
    device = torch.device("cuda" if ON_GPU else "cpu")
    cache = torch.from_numpy(rng.standard_normal((2, 24, page, kv_heads, size), np.float32)).to(device)
    query = torch.from_numpy(rng.standard_normal((4, heads, size), np.float32)).to(device)
    impl = TritonAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads)
    impl.batch_invariant = True
    table = rng.permutation(24).astype(np.int32)
    tables = [table[:12], table[12:18], table[18:20], table[20:24]]
    lens = [190, 90, 20, 64]
    spec = KVCacheSpec(page, kv_heads, size, "float32")
    build = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build

    def run(rows: list[int]) -> torch.Tensor:
        batch = CommonAttentionMetadata.from_lens([1] * len(rows), [lens[r] for r in rows], [tables[r] for r in rows], page)
        return impl.forward(_layer(), query[rows], None, None, cache, build(0, batch))

    together = run([0, 1, 2, 3])
    for r in range(4):
        assert torch.equal(run([r])[0], together[r])


def test_a_graph_for_other_lengths_is_not_planned_by_the_hosts() -> None:
    builder = TritonAttentionBackend.get_builder_cls()(KVCacheSpec(16, 1, 32, "float32"), ["layer"], None, torch.device("cpu"))
    batch = CommonAttentionMetadata.from_lens([1], [16], [np.zeros(1, np.int32)], 16)
    assert builder.build(0, batch).seq_lens_cpu is not None
    captured = builder.build_for_cudagraph_capture(batch)
    assert captured.seq_lens_cpu is None and captured.query_start_loc_cpu is None


def test_which_batches_are_written_by_the_decodes_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose requests are all in the decodes' launch, if the host knows that pages which are written are of one request
    each, on NVIDIA's GPUs, until a field is assigned."""
    pytest.importorskip("triton")
    from attn.torch.kernels import direct

    monkeypatch.setattr(direct, "multiprocessors", lambda device: 132)
    impl = TritonAttentionBackend.get_impl_cls()(4, 32, 0.2, 2)

    def writes(
        rows: list[list[int]],
        arch: str = "sm_90",
        lens: tuple[int, int] = (1, 1),
        by: Any = impl,
        size: int = 2,
        **changes: Any,
    ) -> bool:
        monkeypatch.setattr(direct, "arch", lambda: arch)
        spec = KVCacheSpec(16, 2, 32, "bfloat16")
        build = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, torch.device("cpu")).build
        metadata = build(0, CommonAttentionMetadata.from_lens(list(lens), [20, 33], rows, 16))
        vars(metadata).update(changes)
        cache: Any = SimpleNamespace(is_cuda=True, element_size=lambda: size, device=None)
        return bool(by._plan(metadata, cache).writes)

    apart, shared = [[4, 1], [4, 0, 2]], [[4, 0], [4, 0, 2]]
    assert writes(apart) and writes(apart, "sm_80")
    assert not writes(shared) and not writes(apart, "gfx942")
    # Up to 16 tokens a request are speculation; more are a prompt, and short ones are in the decodes' launch.
    assert writes(apart, lens=(4, 1)) and not writes(apart, lens=(5, 1)) and not writes([[4, 1], [1, 0, 2]], lens=(2, 1))
    alone = [[9, 1], [4, 0, 2]]
    assert writes(alone, lens=(16, 16)) and writes(alone, lens=(20, 1)) and not writes(alone, lens=(9, 1), size=4)
    assert not writes(apart, slot_mapping=torch.tensor([0, 16]))  # assigned since the batch was built
    assert writes(apart, by=TritonAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, kv_cache_dtype="fp8"))
    for options in ({"kv_cache_dtype": "fp8_per_token_head"}, {"kv_sharing_target_layer_name": "other"}):
        assert not writes(apart, by=TritonAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, **options))


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "sinks": [0.5, -1.0, 2.0, 0.0]}], ids=str)
@pytest.mark.parametrize("lens", [(1, 1, 1), (3, 8, 1), (3, 9, 1)])  # 9 tokens of float32 are a prompt
def test_a_layer_whose_decodes_write_the_cache(options: dict[str, Any], lens: tuple[int, ...]) -> None:
    found, device = [], torch.device("cuda" if ON_GPU else "cpu")
    spec = KVCacheSpec(16, 2, 32, "float32", num_blocks=10)
    batch = CommonAttentionMetadata.from_lens(lens, [20, 100, 49], [[4, 1], [4, 0, 2, 6, 7, 3, 5], [4, 0, 2, 9]], 16)
    torch.manual_seed(0)
    arrays = [torch.randn(sum(lens), n, 32, device=device) for n in (4, 2, 2)]
    stored = torch.randn(2, 10, 16, 2, 32, device=device)
    for writes in (False, True):
        impl = TritonAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, **options)
        impl._plan = lambda *_, writes=writes: _BatchPlan(writes=writes)
        metadata = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build(0, batch)
        for _ in range(2):
            out = impl.forward(_layer(), *arrays, cache := stored.clone(), metadata)
            found.append((out, cache))
    assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, found[0], strict=True))
    assert not torch.equal(found[0][1], stored)


def _small(kv_cache_dtype: str = "auto", **changes: Any) -> tuple[Any, Any, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(impl, metadata, cache, (query, key, value)) of a chunk and a decode."""
    heads, kv_heads, size, page = 4, 2, 32, 16
    device = torch.device("cuda" if ON_GPU else "cpu")
    spec = KVCacheSpec(page, kv_heads, size, "float32", kv_cache_dtype, num_blocks=8)
    batch = CommonAttentionMetadata.from_lens([5, 1], [21, 18], [[3, 1], [0, 6]], page)
    metadata = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build(0, batch)
    impl = TritonAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads, kv_cache_dtype=kv_cache_dtype, **changes)
    torch.manual_seed(0)
    arrays = tuple(torch.randn(6, n, size, device=device) for n in (heads, kv_heads, kv_heads))
    return impl, metadata, caches.allocate(TritonAttentionBackend, spec, 8, device), arrays


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_per_token_head"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", *(["inductor"] if ON_GPU else [])])
def test_compiles_as_one_graph(kv_cache_dtype: str, backend: str) -> None:
    """fullgraph=True: no break, traced with fake tensors, and what the cache and the output hold is what eager gives."""
    impl, metadata, cache, (query, key, value) = _small(kv_cache_dtype, logits_soft_cap=20.0)
    impl.need_to_return_lse_for_decode = True
    layer = _layer()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor) -> Any:
        return impl.forward(layer, q * 1.0, k, v, kv, metadata)

    want = step(query, key, value, kept := cache.clone())
    torch.compiler.reset()
    got = torch.compile(step, fullgraph=True, backend=backend)(query, key, value, cache)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(cache.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.skipif(not ON_GPU, reason="graphs are captured on a GPU")
@pytest.mark.triton_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8", "int8_per_token_head"])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (3, 2, 3), (1, 200, 1)])
@pytest.mark.parametrize("invariant", [False, True])
def test_replays_are_eager_calls(kv_cache_dtype: str, query_lens: tuple[int, ...], invariant: bool) -> None:
    """A captured step serves every batch within its bounds with an eager call's bits: the cache, the output, the lse. With
    `batch_invariant`, they are also the bits of an eager call of each request alone."""
    heads, kv_heads, size, page, columns = 8, 2, 64, 16, 150
    device = torch.device("cuda")
    spec = KVCacheSpec(page, kv_heads, size, "bfloat16", kv_cache_dtype, num_blocks=3 * columns)
    tables = np.random.default_rng(0).permutation(3 * columns).astype(np.int32).reshape(3, columns)
    build = TritonAttentionBackend.get_builder_cls()(spec, ["layer"], None, device).build
    lens = [[2400, 900, 2000], [300, 201, 250], [5, 2399, 4]]

    def batch(seq_lens: list[int]) -> Any:
        return build(0, CommonAttentionMetadata.from_lens(list(query_lens), seq_lens, list(tables), page))

    metadata = batch([max(a, b, c) for a, b, c in zip(*lens, strict=True)])
    impl = TritonAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads, kv_cache_dtype=kv_cache_dtype)
    impl.need_to_return_lse_for_decode, impl.batch_invariant = True, invariant
    cache = caches.allocate(TritonAttentionBackend, spec, 3 * columns, device)
    cache.zero_()
    arrays = [torch.zeros(sum(query_lens), n, size, device=device, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]

    def step() -> Any:
        return impl.forward(_layer(), *arrays, cache, metadata)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for i, seq_lens in enumerate(lens):
        torch.manual_seed(i)
        for array in arrays:
            array.normal_()
        other = batch(seq_lens)
        for name in ("seq_lens", "block_table", "slot_mapping"):
            getattr(metadata, name).copy_(getattr(other, name))
        before = cache.clone()
        graph.replay()
        got, kept = [x.clone() for x in held], cache.clone()
        cache.copy_(before)
        for one, want in zip(got, step(), strict=True):
            assert bool(one.isfinite().all()) and torch.equal(one, want)
        assert torch.equal(cache.view(torch.uint8), kept.view(torch.uint8))
        begin = 0
        for n, m, table in zip(query_lens, seq_lens, tables, strict=True) if invariant else ():
            rows, begin = slice(begin, begin + n), begin + n
            alone = build(0, CommonAttentionMetadata.from_lens([n], [m], [table], page))
            out, lse = impl.forward(_layer(), *(x[rows].clone() for x in arrays), cache, alone)
            assert torch.equal(out, got[0][rows]) and torch.equal(lse, got[1][:, rows])


@pytest.mark.triton_kernels
@quiet
def test_registered_as_operators() -> None:
    """Schemas say what is written, and fakes what comes back."""
    from attn.torch.kernels import kv_write, paged_attention  # noqa: F401  (registers the operators)

    impl, metadata, cache, (query, key, value) = _small("int8_per_token_head")
    keys, values, scales = impl._caches(cache)
    checks = ("test_schema", "test_faketensor")
    library.opcheck(
        torch.ops.attn.triton_write_kv_per_token.default,
        (key, value, keys, values, *scales, metadata.slot_mapping),
        test_utils=checks,
    )
    one = torch.ones((), device=query.device)
    plain = torch.zeros(2, 8, 16, 2, 32, device=query.device)
    library.opcheck(
        torch.ops.attn.triton_write_kv.default, (key, value, *plain, metadata.slot_mapping, one, one), test_utils=checks
    )
    batch = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, 5, 21, 0.2)
    lse = torch.empty(4, 6, device=query.device)
    library.opcheck(
        torch.ops.attn.triton_paged_attention.default, (torch.empty_like(query), lse, query, *plain, *batch), test_utils=checks
    )


@pytest.mark.triton_kernels
@quiet
def test_output_in_fp8() -> None:
    """Allocated or given, of fp8 for an output_scale and refused otherwise; a fusion pass may ask beforehand."""
    impl, metadata, cache, (query, key, value) = _small()
    out = impl.forward(_layer(), query, key, value, cache, metadata)
    codes = impl.forward(_layer(), query, None, None, cache, metadata, None, torch.tensor(0.02))
    assert codes.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(codes.float() * 0.02, out, atol=2e-3, rtol=2**-4)
    with pytest.raises(DTypeError, match="output has dtype torch.float32, must be torch.float8_e4m3fn for an output_scale"):
        impl.forward(_layer(), query, None, None, cache, metadata, torch.empty_like(query), torch.tensor(0.02))
    with pytest.raises(ShapeError, match=r"output_scale has shape \[2\]: must have one element"):
        impl.forward(_layer(), query, None, None, cache, metadata, None, torch.ones(2))
    with pytest.raises(UnsupportedError, match="output_block_scale not supported"):
        impl.forward(_layer(), query, None, None, cache, metadata, None, torch.ones(()), torch.ones(()))
    assert impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert not impl.fused_output_quant_supported(QuantKey("int8"))


@pytest.mark.triton_kernels
@quiet
def test_a_cache_with_its_own_scales_takes_no_others() -> None:
    impl, metadata, cache, (query, key, value) = _small("int8_per_token_head")
    layer = SimpleNamespace(**{**vars(_layer()), "_k_scale_float": 0.5})
    with pytest.raises(UnsupportedError, match="int8_per_token_head keeps its own scales: k_scale and v_scale must be 1"):
        impl.forward(layer, query, key, value, cache, metadata)
    with pytest.raises(ShapeError, match=r"must be \[2, N, P, K, 36\]"):
        impl.forward(_layer(), query, key, value, cache[..., :32].contiguous(), metadata)


def _layer() -> Any:
    one = torch.tensor(1.0)
    return SimpleNamespace(_k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0)


@pytest.mark.parametrize("device", [H200, A100])
def test_fp8_caches_need_no_instruction_for_them(device: Device) -> None:
    for cache in ("fp8", "fp8_e5m2", "fp8_per_token_head"):
        assert TritonAttentionBackend.why_not(Request(128, "bfloat16", cache, 16), device) == []


def test_which_architectures_convert_e4m3() -> None:
    pytest.importorskip("triton")
    from attn.kernels.launch import converts_e4m3

    assert all(map(converts_e4m3, ("sm_89", "sm_90", "sm_120", "gfx950", "gfx1200", "interpreter")))
    assert not any(map(converts_e4m3, ("sm_80", "sm_86", "gfx90a", "gfx942", "gfx1100")))


def test_limits_are_reported() -> None:
    for request, word in (
        (Request(24, "bfloat16"), "head_size=24"),
        (Request(264, "bfloat16"), "head_size=264"),
        (Request(128, "bfloat16", block_size=24), "block_size=24 (supports multiples of 16)"),
        (Request(128, "float64"), "dtype=float64"),
        (Request(128, "bfloat16", num_heads=512, num_kv_heads=1), "num_heads=512 for num_kv_heads=1"),
    ):
        assert any(word in why for why in TritonAttentionBackend.why_not(request, H200)), word


def test_queries_that_no_program_can_hold_are_refused() -> None:
    """Float32 rows of 256 take 3 KiB each as three tf32 parts; an Ada GPU gives a program 99 KiB, Hopper 227."""
    ada = Device("torch", "cuda", "NVIDIA L4", "sm_89")
    request = Request(256, "float32", num_heads=64, num_kv_heads=1)
    expected = "num_heads=64 for num_kv_heads=1 (supports up to 32 per kv head at head_size=256 in float32 on sm_89)"
    assert TritonAttentionBackend.why_not(request, ada) == [expected]
    assert TritonAttentionBackend.why_not(request, H200) == []
    assert TritonAttentionBackend.why_not(Request(256, "bfloat16", num_heads=64, num_kv_heads=1), ada) == []


def test_the_family_keeps_to_its_platforms() -> None:
    request = Request(128, "bfloat16", block_size=16)
    assert "platform=cuda" in RocmAttentionBackend.why_not(request, H200)[0]
    assert RocmAttentionBackend.why_not(request, MI300) == []
    assert TreeAttentionBackend.why_not(request, H200) == []
    assert "serves block_sparse only" in BlocksparseFlashAttentionBackend.why_not(request, H200)[0]


def test_block_sparse_arguments() -> None:
    with pytest.raises(ValueError, match="vert_stride=0 must be an int of at least 1"):
        BlocksparseFlashAttentionBackend.get_impl_cls()(4, 64, 0.125, blocksparse_params={"vert_stride": 0})
    with pytest.raises(UnsupportedError, match="sliding_window not supported"):
        BlocksparseFlashAttentionBackend.get_impl_cls()(4, 64, 0.125, sliding_window=8)


def test_selector_branch_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the block-sparse branch refuses by platform, not by a missing module; interpreted, it serves."""
    if ON_GPU:
        pytest.skip("this machine serves it")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="BLOCKSPARSE"):
        selector.get_attn_backend(64, torch.float16, None, 16, is_blocksparse=True)


@pytest.mark.triton_kernels
@quiet
@torch.no_grad()
def test_no_requests_over_keys_in_no_cache() -> None:
    device = "cuda" if ON_GPU else "cpu"
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN").to(device)
    query, key = torch.ones(0, 2, 4, 32, device=device), torch.ones(0, 5, 2, 32, device=device)
    assert layer.impl.attend_keys(query, key, key, True).shape == query.shape


@pytest.mark.triton_kernels
@quiet
@torch.no_grad()
@pytest.mark.parametrize(("place", "rows", "options"), WHERE)
def test_keys_in_no_cache_are_attended_where_they_are(place: str, rows: int, options: dict[str, Any]) -> None:
    """In a cache with unused slots, of NaN, as transformers' static one; in one run of them per request if `rows` is 1."""
    device, causal = "cuda" if ON_GPU else "cpu", "non_causal" not in options.get("features", ())
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN", **options).to(device)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, rows, 32, generator=generator).to(device).transpose(1, 2)
    key, value = (_placed(place, torch.randn(3, 40, 2, 32, generator=generator).to(device)) for _ in range(2))
    runs = [(0, 40), (7, 33), (12, 1)] if rows == 1 else [(0, 40)] * 3
    valid = Runs(*torch.tensor(runs, dtype=torch.int32, device=device).T.contiguous()) if rows == 1 else None
    got = layer.impl.attend_keys(query, key, value, causal, **({} if valid is None else {"valid": valid}))
    for b, (first, number) in enumerate(runs):
        own = (query[b : b + 1], *(x[b : b + 1, first : first + number] for x in (key, value)))
        want = attention(
            *own,
            causal=causal,
            scale=options.get("scale"),
            window=options.get("sliding_window"),
            logits_soft_cap=options.get("logits_soft_cap"),
            sinks=options.get("sinks"),
            layout="BSHD",
        )
        torch.testing.assert_close(got[b : b + 1], want, rtol=2e-5, atol=2e-5)


def _placed(place: str, given: torch.Tensor) -> torch.Tensor:
    """Keys [B, m, K, D] as a view of an array of another order, with NaN around them."""
    batch, m, heads, size = given.shape
    if place == "odd":  # no whole number of keys between requests
        whole = given.new_full((batch, m * heads * size + 8), torch.nan)
        found = whole[:, : m * heads * size].view(batch, m, heads, size)
    elif place == "tokens first":
        found = torch.empty_like(given)
    else:
        whole = given.new_full((batch, heads, m + 9, size), torch.nan)
        found = (whole[:, :, 9:] if place == "slice" else whole[:, :, :m]).transpose(1, 2)
    found.copy_(given)
    return found


@pytest.mark.triton_kernels
@quiet
@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7, "logits_soft_cap": 2.0}, {"features": ["non_causal"]}], ids=str)
def test_rows_between_padding_are_requests_of_their_own(options: dict[str, Any]) -> None:
    device, runs = "cuda" if ON_GPU else "cpu", [(0, 40), (7, 33), (12, 9), (3, 0)]
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN", **options).to(device)
    query, key, value = (torch.randn(4, 40, heads, 32, device=device) for heads in (4, 2, 2))
    causal = "features" not in options
    for b, (first, number) in enumerate(runs):
        key[b, :first] = value[b, first + number :] = torch.nan
    got = layer.impl.attend_keys(query, key, value, causal, valid=Runs(*torch.tensor(runs, dtype=torch.int32, device=device).T))
    window, cap = options.get("sliding_window"), options.get("logits_soft_cap")
    for b, (first, number) in enumerate(runs):
        own = slice(first, first + number)
        arrays = (x[b : b + 1, own] for x in (query, key, value))
        want = torch.zeros_like(query[b])
        want[own] = attention(*arrays, causal=causal, window=window, logits_soft_cap=cap, layout="BSHD")[0]
        torch.testing.assert_close(got[b], want, rtol=2e-5, atol=2e-5)


@pytest.mark.triton_kernels
@quiet
@torch.no_grad()
def test_rows_over_keys_in_no_cache_are_batch_invariant_where_a_layer_requests_it() -> None:
    """How their keys are split depends on the number of requests otherwise."""
    device, generator = "cuda" if ON_GPU else "cpu", torch.Generator().manual_seed(0)
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN", features=["batch_invariant"]).to(
        device
    )
    query, key, value = (
        torch.randn(3, n, heads, 32, generator=generator).to(device) for n, heads in ((1, 4), (70, 2), (70, 2))
    )
    together = layer.impl.attend_keys(query, key, value, True)
    for b in range(3):
        assert torch.equal(layer.impl.attend_keys(*(x[b : b + 1] for x in (query, key, value)), True)[0], together[b])


@pytest.mark.triton_kernels
@quiet
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_arrays_whose_last_dimension_is_not_dense(rows: int) -> None:
    device = "cuda" if ON_GPU else "cpu"
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN").to(device)
    given = [torch.randn(2, 32, n, heads, device=device).permute(0, 2, 3, 1) for n, heads in ((rows, 4), (40, 2), (40, 2))]
    want = layer.impl.attend_keys(*(x.contiguous() for x in given), True)
    torch.testing.assert_close(layer.impl.attend_keys(*given, True), want, rtol=0, atol=0)


@pytest.mark.triton_kernels
@quiet
def test_keys_in_no_cache_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn.torch.kernels import paged_attention as kernels

    read: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "paged_attention", lambda output, lse, query, key, value, **options: read.extend((key, value)))
    layer = Attention(4, 32, num_kv_heads=2, dtype=torch.float32, backend="TRITON_ATTN").to("cuda" if ON_GPU else "cpu")
    key, value = (torch.zeros(3, 2, 64, 32, device="cuda" if ON_GPU else "cpu") for _ in range(2))
    layer.impl.attend_keys(key.new_zeros(3, 2, 4, 32), *(x.transpose(1, 2)[:, :40] for x in (key, value)), True)
    assert [x.data_ptr() for x in read] == [key.data_ptr(), value.data_ptr()]
