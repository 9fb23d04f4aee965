"""TORCH_SDPA and CPU_ATTN: the conformance suite, and what is special about how they work."""

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from attn import attention, reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.errors import DTypeError, MetadataError, ShapeError, UnsupportedError
from attn.testing import Case, check_conformance, conformance_cases, draw
from attn.testing.subject import base_case, subject_of
from attn.torch import Attention
from attn.torch.backends import _paged, _ragged, cpu_attn
from attn.torch.backends.cpu_attn import CPUAttentionBackend
from attn.torch.backends.sdpa import TorchSDPABackend
from attn.torch.testing import TorchRunner, _layer
from attn.visibility import BatchMask

BACKENDS = (TorchSDPABackend, CPUAttentionBackend)
H, K, D, P = 4, 2, 32, 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", conformance_cases(TorchSDPABackend), ids=str)
def test_torch_sdpa_conforms(case: Case) -> None:
    check_conformance(TorchSDPABackend, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 5), (3, 3), (2, 5)])
def test_no_requests_over_keys_in_no_cache(backend: Any, rows: int, keys: int) -> None:
    """torch's kernel for CPUs divides by the number of heads, which are those of all requests, and ends the process."""
    impl = backend.get_impl_cls()(H, D, 0.2, K)
    assert impl.attend_keys(torch.ones(0, rows, H, D), *torch.ones(2, 0, keys, K, D), True).shape == (0, rows, H, D)


@pytest.mark.parametrize("case", conformance_cases(CPUAttentionBackend), ids=str)
def test_cpu_attn_conforms(case: Case) -> None:
    check_conformance(CPUAttentionBackend, case)


@pytest.mark.parametrize("scales", [(0.5, 1.0), ((0.5, 0.25), 1.0), (0.5, (0.5, 2.0))])
def test_scales_that_moved_with_their_layer_have_one_entry_a_kv_head(scales: Any) -> None:
    """The suite's driver keeps scales on the layer's device; there a number stays a tensor, for every head the same."""
    k_scale, v_scale = scales
    case = base_case(subject_of(TorchSDPABackend), "", kv_cache_dtype="int8", k_scale=k_scale, v_scale=v_scale)
    impl = TorchRunner(TorchSDPABackend).build(draw(case))
    moved = impl._scaled(
        impl._rules((None, 0)), _layer(draw(case), torch.device("meta")), torch.empty(0, device="meta").to(torch.int8)
    )
    assert moved.scale == impl.scale
    assert [x.shape for x in (moved.k_scale, moved.v_scale)] == [(case.num_kv_heads, 1)] * 2
    here = impl._scaled(impl._rules((None, 0)), _layer(draw(case), torch.device("cpu")), torch.empty(0, dtype=torch.int8))
    assert (here.k_scale is None) == isinstance(k_scale, float) and isinstance(here.v_scale, float) == isinstance(
        v_scale, float
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the scales of a module that was moved to one")
@pytest.mark.parametrize("stored", ["fp8", "int8"])
def test_a_moved_layer_reads_its_quantised_cache(stored: str) -> None:
    layer = Attention(
        H, D, num_kv_heads=K, dtype=torch.bfloat16, kv_cache_dtype=stored, k_scale=0.05, v_scale=0.03, backend="TORCH_SDPA"
    )
    qkv = [torch.randn(9, heads, D, dtype=torch.bfloat16) for heads in (H, K, K)]
    results = []
    for device in ("cpu", "cuda"):
        layer = layer.to(device)
        builder = layer.backend.get_builder_cls()(layer.kv_cache_spec, device=torch.device(device))
        meta = builder.build(0, CommonAttentionMetadata.from_lens([9], [9], [[1]], P))
        results.append(layer(*(x.to(device) for x in qkv), layer.new_kv_cache(2, device), meta).cpu())
    torch.testing.assert_close(results[1], results[0], atol=2e-2, rtol=2e-2)


class Batch:
    """A layer over a cache of random content, and its answer by the oracle."""

    def __init__(
        self,
        backend: Any,
        query_lens: list[int],
        seq_lens: list[int],
        seed: int = 0,
        causal: bool = True,
        heads: tuple[int, int, int] = (H, K, D),
        **arguments: Any,
    ) -> None:
        self.causal, self.arguments = causal, arguments
        num_heads, num_kv_heads, head_size = heads
        generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        used = [-(-length // P) for length in seq_lens]
        num_blocks = sum(used) + 3
        table = np.split(rng.permutation(num_blocks)[: sum(used)], np.cumsum(used)[:-1])
        self.layer = Attention(num_heads, head_size, num_kv_heads=num_kv_heads, backend=backend.get_name(), **arguments)
        self.layer.impl.need_to_return_lse_for_decode = True
        self.cache = self.layer.new_kv_cache(num_blocks)
        self.cache.copy_(torch.randn(self.cache.shape, generator=generator))
        self.batch = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, P, causal=causal, strict=False)
        self.metadata = backend.get_builder_cls()(self.layer.kv_cache_spec).build(0, self.batch)
        self.query = torch.randn(sum(query_lens), num_heads, head_size, generator=generator)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = self.layer(self.query, None, None, self.cache, self.metadata)
        return result

    def check(self, result: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        out, lse = result or self.run()
        keys, values = self.layer.backend.logical_kv_cache(self.cache)
        want, want_lse = reference.paged_attention(
            self.query.numpy(),
            keys.numpy(),
            values.numpy(),
            query_start_loc=self.batch.query_start_loc,
            seq_lens=self.batch.seq_lens,
            block_table=np.maximum(self.batch.block_table, 0),
            causal=self.causal,
            window=reference.sliding_window_to_pair(self.arguments.get("sliding_window")),
            logits_soft_cap=self.arguments.get("logits_soft_cap"),
            sinks=self.arguments.get("sinks"),
        )
        np.testing.assert_allclose(out, want, atol=3e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)


# slicing: what is done a part at a time is the same as done at once


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rules", [{}, {"sliding_window": 11}, {"logits_soft_cap": 3.0}, {"sinks": [0.5] * H}])
def test_small_slices(backend: Any, rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ragged, "_SCORES_AT_ONCE", 64)
    monkeypatch.setattr("attn.torch.backends.sdpa._MASK_AT_ONCE", 256)
    monkeypatch.setattr(cpu_attn, "_ROWS", 3)
    monkeypatch.setattr(cpu_attn, "_FEW", 2)
    monkeypatch.setattr(cpu_attn, "_HOT", 1)
    batch = Batch(backend, [1, 7, 40, 1, 3, 9], [70, 50, 40, 5, 2, 33], **rules)
    batch.check()
    batch.layer.impl.need_to_return_lse_for_decode = False
    torch.testing.assert_close(batch.run(), Batch.run(Batch(backend, [1, 7, 40, 1, 3, 9], [70, 50, 40, 5, 2, 33], **rules))[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_prompt_and_long_context(backend: Any) -> None:
    Batch(backend, [600, 1, 300], [600, 1200, 900]).check()
    Batch(backend, [600, 1, 300], [600, 1200, 900], sliding_window=100).check()


# caches and outputs of the caller's own making


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_of_any_strides(backend: Any) -> None:
    """Keys and values interleaved by block, heads and offsets swapped, a margin: all seen through the logical view."""
    batch = Batch(backend, [1, 7, 20], [70, 50, 20])
    want = batch.run()
    for order in ((1, 0, 2, 3, 4), (3, 1, 0, 2, 4), (0, 1, 3, 2, 4)):
        other = torch.full([batch.cache.shape[i] for i in order], torch.nan)
        other = other.permute([order.index(i) for i in range(5)])
        other.copy_(batch.cache)
        torch.testing.assert_close(batch.layer(batch.query, None, None, other, batch.metadata), want)
    wide = torch.full((*batch.cache.shape[:4], D + 8), torch.nan)
    wide[..., :D] = batch.cache
    torch.testing.assert_close(batch.layer(batch.query, None, None, wide[..., :D], batch.metadata), want)


@pytest.mark.parametrize("heads", [(H, K, D), (H, 1, D)])
def test_keys_and_values_of_a_head_side_by_side_are_still_read_in_runs(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(CPUAttentionBackend, [1, 7, 20, 1], [70, 50, 20, 33], heads=heads)
    want, order = batch.run(), (1, 2, 0, 3, 4)
    other = torch.empty([batch.cache.shape[i] for i in order]).permute([order.index(i) for i in range(5)])
    other.copy_(batch.cache)
    monkeypatch.setattr(_ragged.caches, "gather", None)
    torch.testing.assert_close(batch.layer(batch.query, None, None, other, batch.metadata), want)


def test_no_graph_attends_the_lengths_of_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are read on the host."""
    batch = Batch(TorchSDPABackend, [1, 7], [70, 50])
    monkeypatch.setattr(_paged, "is_captured", lambda x: True)
    with pytest.raises(UnsupportedError, match="TORCH_SDPA: lengths are read on the host"):
        batch.layer(batch.query, None, None, batch.cache, batch.metadata)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_side_by_side(backend: Any) -> None:
    """[T, H * D] slices of one projection in, [T, H * D] out; padded rows stay as they are."""
    batch = Batch(backend, [1, 7, 20], [70, 50, 20])
    batch.layer.impl.need_to_return_lse_for_decode = False
    qkv = torch.randn(28 + 3, (H + 2 * K) * D)
    query, key, value = qkv.split([H * D, K * D, K * D], dim=-1)
    caches = [batch.cache.clone() for _ in range(2)]
    want = batch.layer.impl.forward(
        batch.layer,
        query[:28].reshape(-1, H, D),
        key[:28].reshape(-1, K, D),
        value[:28].reshape(-1, K, D),
        caches[0],
        batch.metadata,
    )
    output = torch.full((31, H * D), torch.nan)
    got = batch.layer.impl.forward(batch.layer, query, key, value, caches[1], batch.metadata, output)
    assert got is output and torch.equal(caches[0], caches[1])
    assert torch.equal(output[:28].view(-1, H, D), want) and output[28:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only"])
def test_elements_apart(backend: Any, attn_type: str) -> None:
    """Queries, keys and values whose last dimension is not the one that lies side by side."""
    lens = [1, 7, 50]
    batch = Batch(backend, lens, lens, attn_type=attn_type, causal=attn_type == "decoder")
    qkv = [torch.randn(58, heads, D) for heads in (H, K, K)]
    want = batch.layer(*qkv, batch.cache, batch.metadata)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    assert {x.stride(-1) for x in apart} == {H, K}
    torch.testing.assert_close(batch.layer(*apart, batch.cache, batch.metadata), want)


# one implementation, many callers


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(backend: Any) -> None:
    """Eight threads with shapes of their own, of which some share a layer, and a buffer a thread."""
    batches = [
        Batch(backend, [1] * (i + 1) + [5 * i], [30 * i + 9] * (i + 1) + [11 * i], seed=i, heads=(2 * K, K, 16 * (i % 3 + 1)))
        for i in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            for batch, result in zip(batches, pool.map(Batch.run, batches), strict=True):
                batch.check(result)


def test_buffers_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attn, "_KEEP", 1 << 15)

    def sizes() -> list[int]:
        for lengths in ([16], [64], [4000], [64]):
            Batch(CPUAttentionBackend, [1], lengths).check()
        return [buffer.numel() for buffer in cpu_attn._buffers.tensors]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sizes).result() == [64 * K * D * 4] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_and_back(backend: Any) -> None:
    """A buffer born in inference mode could not be written outside of it."""

    def both() -> None:
        batch = Batch(backend, [1, 4], [40, 50])
        with torch.inference_mode():
            inside = batch.run()
        torch.testing.assert_close(batch.run(), tuple(x.clone() for x in inside))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(both).result()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_copy_and_pickle(backend: Any) -> None:
    batch = Batch(backend, [1, 4], [40, 50], sinks=[0.1] * H)
    want = batch.run()
    for layer in (copy.deepcopy(batch.layer), pickle.loads(pickle.dumps(batch.layer))):
        batch.layer = layer
        torch.testing.assert_close(batch.run(), want)


def test_weights_loaded_later_are_seen() -> None:
    sinks = torch.nn.Parameter(torch.zeros(H))
    batch = Batch(TorchSDPABackend, [1], [9])
    layer = Attention(H, D, num_kv_heads=K, backend="TORCH_SDPA", sinks=sinks)
    layer.impl.need_to_return_lse_for_decode = False
    before = layer(batch.query, None, None, batch.cache, batch.metadata)
    assert not before.requires_grad
    sinks.data.copy_(torch.full((H,), 50.0))
    assert layer(batch.query, None, None, batch.cache, batch.metadata).abs().max() < 1e-6 < before.abs().max()


# an infinite score, which fused kernels take for an empty row


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1], [17]), ([1, 1], [50, 9]), ([4], [50]), ([20], [20]), ([70], [90])])
def test_an_infinite_key_makes_nan(backend: Any, dtype: torch.dtype, query_lens: list[int], seq_lens: list[int]) -> None:
    batch = Batch(backend, query_lens, seq_lens, dtype=dtype)
    batch.query = batch.query.abs().to(dtype)
    keys, _ = batch.layer.backend.logical_kv_cache(batch.cache)
    slot = batch.batch.block_table[0][0]
    keys[slot, 3] = torch.inf  # seen by the rows at positions 3 and later
    out, _ = batch.run()
    first = max(0, 3 - (seq_lens[0] - query_lens[0]))
    assert out[first : query_lens[0]].isnan().all()
    assert out[:first].isfinite().all() and out[query_lens[0] :].isfinite().all()


# what is refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals(backend: Any) -> None:
    batch = Batch(backend, [2], [9])
    layer, name = batch.layer, backend.get_name()
    key = torch.zeros(2, K, D)

    def call(
        query: Any = batch.query, key: Any = key, value: Any = key, cache: Any = batch.cache, meta: Any = batch.metadata
    ) -> Any:
        return layer(query, key, value, cache, meta)

    def replaced(**changes: Any) -> Any:
        meta = copy.copy(batch.metadata)
        vars(meta).update(changes)
        return meta

    for arguments, error, message in (
        ({"query": batch.query[:, :3]}, ShapeError, r"query has shape \[2, 3, 32\]: must be \[T, 4, 32\]"),
        ({"query": batch.query[:1]}, ShapeError, "query has 1 rows: must be at least num_actual_tokens=2"),
        ({"query": batch.query.to(torch.int32)}, DTypeError, r"query has dtype int32 \(supports float32"),
        ({"key": key[:1]}, ShapeError, "key has 1 rows"),
        ({"value": None}, ShapeError, "one of key and value is None"),
        ({"value": key.half()}, DTypeError, "value has dtype torch.float16, query torch.float32"),
        (
            {"cache": batch.cache.half()},
            DTypeError,
            "kv_cache has dtype float16: kv_cache_dtype=auto needs float32",
        ),
        ({"cache": batch.cache[0]}, ShapeError, "kv_cache must have 5 dimensions"),
        ({"cache": None}, ShapeError, "kv_cache must have 5 dimensions"),
        ({"cache": batch.cache[..., :8]}, ShapeError, r"kv_cache holds \[K, D\] = \[2, 8\], the layer has \[2, 32\]"),
        ({"query": batch.query.clone().requires_grad_()}, UnsupportedError, "query requires grad: backward not supported"),
        ({"key": key.clone().requires_grad_()}, UnsupportedError, "key requires grad: backward not supported"),
        ({"value": key.clone().requires_grad_()}, UnsupportedError, "value requires grad: backward not supported"),
        (
            {"meta": replaced(causal=False, mask=BatchMask(torch.ones(1, 2, 2, dtype=torch.bool)))},
            MetadataError,
            "tree_mask = a mask",
        ),
        (
            {"meta": replaced(seq_lens_cpu=np.array([1]), mask=BatchMask(torch.ones(1, 2, 2, dtype=torch.bool)))},
            MetadataError,
            r"seq_lens\[0\] = 1: must be at least 2, the tokens of its tree",
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            call(**arguments)
        assert name in str(caught.value) or isinstance(caught.value, MetadataError)
    with pytest.raises(UnsupportedError, match="output_scale not supported"):
        layer.impl.forward(layer, batch.query, key, key, batch.cache, batch.metadata, output_scale=torch.ones(()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_of_another_shape_is_checked_after_others_passed(backend: Any) -> None:
    batch = Batch(backend, [2], [9])
    key = torch.zeros(2, K, D)
    batch.layer(batch.query, key, key, batch.cache, batch.metadata)
    with pytest.raises(ShapeError, match=r"kv_cache holds \[K, D\] = \[2, 8\], the layer has \[2, 32\]"):
        batch.layer(batch.query, key, key, batch.cache[..., :8], batch.metadata)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_profiling_run_gives_zeros(backend: Any) -> None:
    layer = Attention(H, D, num_kv_heads=K, backend=backend.get_name())
    assert torch.equal(layer(torch.ones(3, H, D), None, None, None, None), torch.zeros(3, H, D))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: Any) -> None:
    for query_lens, seq_lens in (([], []), ([0], [0]), ([0, 0], [5, 0])):
        out, lse = Batch(backend, query_lens or [0], seq_lens or [0]).run()
        assert out.shape == (0, H, D) and lse.shape == (H, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_are_fetched_when_there_are_no_mirrors(backend: Any) -> None:
    batch = Batch(backend, [1, 4], [40, 50])
    want = batch.run()
    batch.metadata.query_start_loc_cpu = batch.metadata.seq_lens_cpu = None
    torch.testing.assert_close(batch.run(), want)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 7},
        {"logits_soft_cap": 1.5, "scale": -0.4},
        {"sinks": [0.5, -1.0, 2.0, 0.0]},
        {"sliding_window": 50, "logits_soft_cap": 2.0, "sinks": [0.5, -1.0, 2.0, 0.0]},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"features": ["non_causal"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
def test_attend_keys_is_the_formula(backend: str, options: dict[str, Any], rows: int, invariant: bool) -> None:
    """Keys in a cache with unused slots, as transformers' static one; nothing after them is read."""
    causal = "features" not in options
    features = [*options.get("features", ()), *(["batch_invariant"] if invariant else [])]
    layer = Attention(H, D, num_kv_heads=K, dtype=torch.float32, backend=backend, **{**options, "features": features})
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, H, rows, D, generator=generator).transpose(1, 2)
    key, value = (torch.randn(3, K, 64, D, generator=generator) for _ in range(2))
    key[:, :, 40:] = value[:, :, 40:] = torch.nan
    key, value = (x.transpose(1, 2)[:, :40] for x in (key, value))
    got = layer.impl.attend_keys(query, key, value, causal)
    want = attention(
        query,
        key,
        value,
        causal=causal,
        scale=options.get("scale"),
        window=options.get("sliding_window"),
        logits_soft_cap=options.get("logits_soft_cap"),
        sinks=options.get("sinks"),
        alibi_slopes=options.get("alibi_slopes"),
        layout="BSHD",
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if invariant:
        alone = torch.cat([layer.impl.attend_keys(*(x[b : b + 1] for x in (query, key, value)), causal) for b in range(3)])
        assert torch.equal(got, alone)
