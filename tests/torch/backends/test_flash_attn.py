"""FLASH_ATTN on stand-ins of its providers: the suite on each, the choice among them, and a version too old."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attn import reference
from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.paged import PagedCall
from attn.capabilities import MASK_FEATURES, Device, Feature, Request
from attn.errors import UnsupportedError
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends import _flash_providers as providers
from attn.torch.backends import _vendor
from attn.torch.backends._flash_providers import VarlenCall
from attn.torch.backends._vendor import halves
from attn.torch.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata
from attn.visibility import BatchMask, LayerMask, Visibility
from tests.levels import some
from tests.testing import covering

H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")
A100 = Device("torch", "cuda", "NVIDIA A100", "sm_80")
PLAIN = Request(head_size=128, dtype="bfloat16", block_size=16)
FOLDERS = {
    "FlashAttention 4": "fa4",
    "FlashAttention 3": "fa3",
    "FlashAttention 2": "fa2",
    "vLLM's FlashAttention 3": "vllm_fa",
    "vLLM's FlashAttention 2": "vllm_fa",
}
STANDINS = Path(__file__).parents[2] / "standins"
NAMES = [p.name for p in providers.PROVIDERS]


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    providers._lacking.cache_clear()
    providers.chosen.cache_clear()


def _varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch 2.13's `torch.nn.attention.varlen.varlen_attn`, which has no kernel on a CPU. What its kernel wants beyond the
    signature is FlashAttention 2's: sums of the keys' lengths in any case, pages of a multiple of 256."""
    import vendor

    vendor.check("query", query, (int(cu_seq_q[-1]), None, None), *vendor.HALVES)
    assert enable_gqa and return_aux.lse and (block_table is None) == (seqused_k is None) and cu_seq_k is not None
    assert block_table is None or key.shape[1] % 256 == 0
    lens = cu_seq_k.diff() if seqused_k is None else seqused_k
    assert int(cu_seq_q.diff().max()) <= max_q and int(lens.max()) <= max_k
    rules = {"scale": scale, "window": vendor.window(window_size, False, -1)}
    return vendor.varlen(query, key, value, cu_seq_q, lens, block_table, **rules)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, standins: Callable[..., None]) -> Callable[[str], None]:
    """`only(name)`: that provider's stand-in is there, and no other provider."""

    def install(name: str) -> None:
        standins(*([FOLDERS[name]] if name in FOLDERS else []))
        monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if p.name == name])
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_attn)

    return install


@pytest.mark.parametrize("name", NAMES)
def test_the_suite_on_a_stand_in(name: str, only: Callable[[str], None]) -> None:
    only(name)
    cases = cases_of(subject_of(FlashAttentionBackend), "quick")
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in some(cases, 20, name, partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(FlashAttentionBackend, case)


def _why(request: Request, device: Device = H200) -> str:
    return "; ".join(FlashAttentionBackend.why_not(request, device))


@pytest.mark.parametrize(
    ("roots", "request_", "device", "chosen"),
    [
        (("fa2", "fa3", "fa4"), PLAIN, H200, "FlashAttention 3"),
        (("fa2", "vllm_fa", "fa4"), PLAIN, H200, "vLLM's FlashAttention 3"),
        (("fa2", "fa4"), PLAIN, H200, "FlashAttention 4"),
        (("fa2", "fa3"), PLAIN, H200, "FlashAttention 3"),
        (("fa3",), replace(PLAIN, head_size=256), H200, "FlashAttention 3"),
        (("fa4",), replace(PLAIN, head_size=256), H200, "FlashAttention 4"),
        (("fa2", "fa3"), replace(PLAIN, block_size=256), A100, "FlashAttention 2"),
        (("fa2",), replace(PLAIN, block_size=256, features=frozenset({Feature.ALIBI})), H200, "FlashAttention 2"),
        (("fa2", "fa3", "vllm_fa"), PLAIN, H200, "FlashAttention 3"),
        (("fa2", "vllm_fa"), PLAIN, H200, "vLLM's FlashAttention 3"),
        (("fa2", "vllm_fa"), PLAIN, A100, "vLLM's FlashAttention 2"),
        (("fa2", "vllm_fa"), replace(PLAIN, block_size=256), A100, "FlashAttention 2"),
        (("vllm_fa",), replace(PLAIN, features=frozenset({Feature.ALIBI})), H200, "vLLM's FlashAttention 2"),
        ((), replace(PLAIN, block_size=256), A100, "PyTorch's varlen_attn"),
    ],
)
def test_the_best_provider_that_serves_is_taken(
    roots: tuple[str, ...], request_: Request, device: Device, chosen: str, standins: Callable[..., None]
) -> None:
    standins(*roots)
    assert _why(request_, device) == ""
    assert providers.chosen(request_, device.arch).name == chosen


def test_a_refusal_names_every_provider_with_its_reasons(standins: Callable[..., None]) -> None:
    standins("fa2", "fa3")
    told = _why(replace(PLAIN, features=frozenset({Feature.ALIBI, Feature.SOFT_CAP})))
    for words in ("FlashAttention 3: alibi not supported", "FlashAttention 2: block_size=16 (supports multiples of 256)"):
        assert words in told
    assert "PyTorch's varlen_attn: alibi not supported, soft_cap not supported" in told


@pytest.mark.parametrize("feature", sorted(MASK_FEATURES))
def test_masks_are_flash_attention_4s(feature: Feature, standins: Callable[..., None]) -> None:
    asked = replace(PLAIN, features=frozenset({feature}))
    standins("fa2", "fa3")
    assert f"FlashAttention 3: {feature} not supported; FlashAttention 2: {feature} not supported" in _why(asked)
    standins("fa4")
    assert _why(asked) == ""
    assert providers.chosen(asked, "sm_90").name == "FlashAttention 4"
    assert providers.chosen(PLAIN, "sm_90").name == "FlashAttention 3"
    assert "FlashAttention 4 computes every tile" in "; ".join(FlashAttentionBackend.rules(H200))
    assert FlashAttentionBackend.rules(A100) == ()


def test_a_release_without_masks_serves_everything_else(monkeypatch: pytest.MonkeyPatch, only: Callable[[str], None]) -> None:
    only("FlashAttention 4")
    from flash_attn.cute import interface

    def old(q: Any, page_table: Any, seqused_k: Any, window_size: Any, softcap: Any, return_lse: Any) -> None: ...

    monkeypatch.setattr(interface, "flash_attn_varlen_func", old)
    monkeypatch.delattr(interface, "utils")
    assert _why(PLAIN) == ""
    told = _why(replace(PLAIN, features=frozenset({Feature.SPANS})))
    assert "flash_attn_varlen_func has no mask_mod" in told and "has no utils.scalar_to_ssa" in told


SPANS, FLAGS = torch.tensor([[-1, -1], [0, 6]]).int(), torch.tensor([True])


@pytest.mark.parametrize(
    ("layer", "batch", "chosen", "masked"),
    [
        ({}, BatchMask(), "FlashAttention 3", False),
        ({"sliding_window": (3, None)}, BatchMask(), "FlashAttention 3", False),
        ({"chunk_size": 7}, BatchMask(), "FlashAttention 4", False),  # no request is longer
        ({"chunk_size": 6}, BatchMask(), "FlashAttention 4", True),
        ({}, BatchMask(spans=SPANS), "FlashAttention 4", True),
        ({}, BatchMask(prefix=torch.tensor([1]).int()), "FlashAttention 4", True),
        ({}, BatchMask(is_causal=FLAGS), "FlashAttention 4", True),
        ({}, BatchMask(tree=torch.ones(1, 2, 2).bool()), "FlashAttention 4", True),
    ],
)
def test_only_batches_that_need_it_have_a_mask(
    layer: dict[str, Any], batch: BatchMask, chosen: str, masked: bool, standins: Callable[..., None]
) -> None:
    standins("fa3", "fa4")
    calls = list[tuple[str, VarlenCall]]()

    class Told(FlashAttentionImpl, backend=FlashAttentionBackend):
        def _provider(self, request: Request, arch: str) -> providers.Provider:
            provider = super()._provider(request, arch)

            def bind(module: Any, call: VarlenCall) -> Any:
                calls.append((provider.name, call))
                return lambda query, key, value: (query, torch.zeros(4, 2))

            return replace(provider, bind=bind)

    impl = Told(4, 64, 0.125, 2, **layer)
    rows, starts = torch.zeros(2, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 2]).int()
    lens, table = torch.tensor([7]).int(), torch.zeros(1, 1).int()
    meta = FlashAttentionMetadata(starts, lens, table, starts[:0], 1, 2, 2, 7, key_starts=starts)
    for mask in (BatchMask(), batch, batch, BatchMask()):  # a provider that was chosen for one batch is not that of another
        impl._compute(PagedCall(rows, meta, Visibility(impl.mask, mask), output=rows), rows, rows, is_paged=True)
    assert [(name, call.mask is not None) for name, call in calls[1:3]] == [(chosen, masked)] * 2
    if not layer:
        assert [(name, call.mask) for name, call in calls[::3]] == [("FlashAttention 3", None)] * 2


LAYERS = (
    LayerMask(),
    LayerMask(causal=False),
    LayerMask(chunk_size=3),
    LayerMask(window=(2, None)),
    LayerMask(False, (2, 1)),
    LayerMask(False, (2, 1), 4, True),
    LayerMask(True, (1, 0), None, False),
)


def _requests(layer: LayerMask) -> Iterator[tuple[tuple[str, ...], Any, tuple[int, int, int, int], Any]]:
    """Names of arrays, these, (request, first row, rows, keys) and what these rows see by the oracle, of small batches."""
    starts, lens, rng = [0, 4, 9, 16], [9, 5, 12], np.random.default_rng(0)
    first = rng.integers(0, 3, 16)
    spans = np.stack([first, first + rng.integers(0, 3, 16)], 1)
    spans[::3] = -1
    tree = np.tril(rng.random((3, 7, 7)) < 0.5) | np.eye(7, dtype=bool)
    arrays = {"tree": tree, "spans": spans.astype(np.int32), "prefix": np.array([0, 3, 2], np.int32)}
    arrays["is_causal"] = np.array([layer.causal, False, layer.causal])
    for names in ((), ("spans",), ("prefix",), ("is_causal",), ("tree",), ("spans", "prefix", "is_causal"), ("tree", "spans")):
        given = [torch.from_numpy(arrays[name]) for name in names] or None
        for r, keys in enumerate(lens):
            count = starts[r + 1] - starts[r]
            there = {"causal": layer.causal, "window": layer.window, "chunk_size": layer.chunk_size}
            if "spans" in names:
                there["spans"] = arrays["spans"][starts[r] : starts[r + 1]]
            if "tree" in names and layer.causal:
                there["tree"] = tree[r, :count, :count]
            if "is_causal" in names:
                there["causal"] = bool(arrays["is_causal"][r])
            prefix = int(arrays["prefix"][r]) if "prefix" in names else 0
            want = reference.visible_mask(count, keys, prefix=prefix, span_window=bool(layer.span_window), **there)
            yield names, given, (r, starts[r], count, keys), want


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_mask_of_flash_attention_4_is_the_oracles(layer: LayerMask, standins: Callable[..., None]) -> None:
    """Also for rows past a request's last, which the kernel computes and must not read past the batch's last."""
    standins("fa4")
    from flash_attn.cute import interface

    for names, given, request, want in _requests(layer):
        mask_mod = providers._mask_mod(interface.utils.scalar_to_ssa, layer, names)
        assert (interface.seen_by(mask_mod, *request, 2, given).numpy() == want).all(), (names, request)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_mask_compiled_by_the_cute_dsl_is_the_oracles(layer: LayerMask) -> None:
    """The compiler of FlashAttention 4 compiles the mask for the host, which runs it."""
    cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")
    from cutlass.cute.runtime import from_dlpack

    def to_vector(number: Any, dtype: Any) -> Any:
        vector = cute.make_rmem_tensor(1, dtype)
        vector[0] = number
        return vector.load()

    for names, given, (request, start, rows, keys), want in _requests(layer):
        mask_mod = providers._mask_mod(to_vector, layer, names)

        @cute.jit
        def run(begin: cutlass.Int32, count: cutlass.Int32, length: cutlass.Int32, seen: Any, *arrays: Any) -> None:
            lens = SimpleNamespace(offset_q=begin, seqlen_q=count, seqlen_k=length)
            for row in range(count):
                for key in range(length):
                    at = [to_vector(cutlass.Int32(x), cutlass.Int32) for x in (request, 0, row, key)]  # noqa: B023
                    seen[row, key] = cutlass.Int32(cutlass.Boolean(mask_mod(*at, lens, arrays)[0]))  # noqa: B023

        seen = torch.full((rows, keys), -1, dtype=torch.int32)
        run(*map(cutlass.Int32, (start, rows, keys)), *map(from_dlpack, (seen, *(given or ()))))
        assert (seen.numpy() == want).all(), (names, request)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (5, 0), (None, 2)])
def test_the_arguments_of_flash_attention_4(window: Any) -> None:
    """Golden: what a mask changes, and that without one nothing but causality and the window is passed."""
    told: dict[str, Any] = {}

    class Module:
        class utils:
            scalar_to_ssa = staticmethod(lambda number, dtype: (number,))

        @staticmethod
        def flash_attn_varlen_func(*args: Any, **rules: Any) -> Any:
            told.clear()
            told.update(rules)
            return torch.zeros(1), torch.zeros(1)

    rows, cache = torch.zeros(2, 4, 64), torch.zeros(3, 256, 2, 64)
    starts, lens = torch.tensor([0, 2]).int(), torch.tensor([7]).int()
    call = VarlenCall(rows, cache, cache, starts, starts, 2, 7, 0.125, window, lens, torch.zeros(1, 1).int())
    (fa4,) = (p for p in providers.PROVIDERS if p.name == "FlashAttention 4")
    fa4.attend(Module, call)
    plain = window == (None, 0)
    assert told.pop("causal") == plain and told.pop("window_size") == ((None, None) if plain else window)
    common = told.copy()
    assert set(common) == {
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "softmax_scale", "softcap",
        "return_lse",
    }  # fmt: skip
    masks = []
    for layer, batch in ((LayerMask(), SPANS), (LayerMask(), SPANS.clone()), (LayerMask(chunk_size=3), None)):
        fa4.attend(Module, call._replace(mask=Visibility(layer, BatchMask(spans=batch))))
        mask_mod, arrays = told.pop("mask_mod"), told.pop("aux_tensors")
        assert told == common and (arrays is None if batch is None else len(arrays) == 1 and arrays[0] is batch)
        masks.append(mask_mod)
    assert masks[0] is masks[1] is not masks[2]  # a program each
    assert masks[0].__cute_hash__ != masks[2].__cute_hash__ and "chunk_size=3" in masks[2].__cute_hash__


def test_sizes_may_depend_on_the_architecture(standins: Callable[..., None]) -> None:
    standins("fa4")
    b200 = Device("torch", "cuda", "NVIDIA B200", "sm_100")
    assert _why(PLAIN, b200) == ""
    assert "FlashAttention 4: head_size=256 on sm_100 (supports multiples of 8 from 32 up to 128)" in _why(
        replace(PLAIN, head_size=256), b200
    )


def test_sizes_may_depend_on_pages(standins: Callable[..., None]) -> None:
    standins("fa3", "fa4")
    odd = replace(PLAIN, head_size=72)
    assert providers.chosen(odd, "sm_90").name == "FlashAttention 3"
    assert (
        providers.chosen(replace(odd, block_size=None, features=frozenset({Feature.SPANS})), "sm_90").name == "FlashAttention 4"
    )
    told = _why(replace(odd, features=frozenset({Feature.SPANS})))
    assert "FlashAttention 4: head_size=72 over pages (supports multiples of 16)" in told


def test_what_flash_attention_4_gets_wrong_over_pages_is_refused(standins: Callable[..., None]) -> None:
    """Each of these ran wrong on an H200, or ended in an illegal access."""
    standins("fa4")
    spans = frozenset({Feature.SPANS})
    for size, features, wrong in ((160, frozenset(), True), (96, spans, True), (80, spans, True), (96, frozenset(), False),
                                  (112, spans, False), (64, spans, False), (192, spans, False)):  # fmt: skip
        request = replace(PLAIN, head_size=size, features=features)
        assert ("on sm_90)" in _why(request)) is wrong, size
        assert _why(replace(request, block_size=None)) == ""


@pytest.mark.parametrize(
    ("size", "window", "passed"),
    [(96, (None, None), (7, 7)), (96, (None, 0), (None, None)), (96, (5, 3), (5, 3)), (128, (None, None), (None, None))],
)
def test_flash_attention_4_has_a_window_that_hides_no_key_where_its_tiles_are_wrong(
    size: int, window: Any, passed: Any
) -> None:
    told: dict[str, Any] = {}
    module = SimpleNamespace(flash_attn_varlen_func=lambda *_, **rules: told.update(rules) or (None, None))
    rows, cache = torch.zeros(2, 4, size), torch.zeros(3, 256, 2, size)
    starts, lens = torch.tensor([0, 2]).int(), torch.tensor([7]).int()
    (fa4,) = (p for p in providers.PROVIDERS if p.name == "FlashAttention 4")
    fa4.attend(module, VarlenCall(rows, cache, cache, starts, starts, 2, 7, 0.125, window, lens, torch.zeros(1, 1).int()))
    assert told["window_size"] == passed


def test_without_a_provider_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.Provider, "present", lambda self: False)
    assert "pip install 'flash-attn-3'" in _why(PLAIN)


def test_a_version_without_an_argument_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, only: Callable[[str], None]
) -> None:
    only("PyTorch's varlen_attn")

    def old(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: Any = None
    ) -> Any:
        raise AssertionError("never called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
    told = _why(replace(PLAIN, block_size=256))
    assert "torch.nn.attention.varlen.varlen_attn has no block_table" in told and "has no window_size" in told


def test_a_call_that_no_provider_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.Provider, "present", lambda self: False)
    with pytest.raises(UnsupportedError, match="none of its providers is installed"):
        providers.chosen(PLAIN, "sm_90")


def test_a_provider_is_found_without_being_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {p.name for p in providers.present()}
    assert "FlashAttention 2" in found and "FlashAttention 4" not in found


@pytest.mark.parametrize("broken", ["", "raise ImportError('libcudart.so.99: cannot open shared object file')"])
def test_an_extension_of_vllm_that_is_not_there_or_broken_leaves_the_other_one(
    broken: str, tmp_path: Any, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    folder = STANDINS / "vllm_fa/vllm/vllm_flash_attn"
    for name in ("flash_attn_interface.py", "_vllm_fa2_C.py"):
        (package / name).write_text((folder / name).read_text())
    if broken:
        (package / "_vllm_fa3_C.py").write_text(broken)
    standins()
    monkeypatch.syspath_prepend(str(tmp_path))
    three, two = (p for p in providers.PROVIDERS if p.install == "vllm")
    assert three.present() == bool(broken) and two.present()
    assert "vllm" not in sys.modules  # found, not imported
    assert providers.chosen(PLAIN, "sm_90").name == "vLLM's FlashAttention 2"
    if broken:
        told = _why(replace(PLAIN, features=frozenset({Feature.ALIBI, Feature.TREE_MASK})))
        assert "tree_mask not supported" in told
        assert "ImportError: libcudart.so.99" in "; ".join(three.reasons(PLAIN, H200))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["FlashAttention 2", "vLLM's FlashAttention 2", "vLLM's FlashAttention 3"])
@pytest.mark.parametrize(
    ("lens", "window", "sides"),
    [
        ([1, 1, 1], (None, 0), (-1, -1)),  # a decode: no bound, so that heads are packed and keys are split
        ([1, 1, 1], (7, 0), (7, -1)),
        ([1, 0, 1], (None, 0), (-1, 0)),  # a request without a row: that path would not do
        ([1, 2, 1], (None, 0), (-1, 0)),
        ([1, 1, 1], (None, None), (-1, -1)),
    ],
)
def test_the_window_passed_to_flash_attention_2(
    name: str, lens: list[int], window: tuple[int | None, int | None], sides: tuple[int, int]
) -> None:
    """Golden arguments of one paged batch, those that decide which kernel of the package runs."""
    told: dict[str, Any] = {}

    class Module:
        @staticmethod
        def flash_attn_varlen_func(*args: Any, **rules: Any) -> Any:
            told.update(rules, args=args)
            return torch.zeros(1), torch.zeros(1)

    starts = torch.tensor([0, *lens]).cumsum(0).int()
    rows, cache = torch.zeros(sum(lens), 4, 64), torch.zeros(3, 256, 2, 64)
    seqs, table = torch.tensor([5, 6, 7]).int(), torch.zeros(3, 1).int()
    call = providers.VarlenCall(
        query=rows,
        key=cache,
        value=cache,
        starts=starts,
        key_starts=starts,
        max_query_len=max(lens),
        max_seq_len=7,
        scale=0.125,
        window=window,
        lens=seqs,
        block_table=table,
    )
    next(p for p in providers.PROVIDERS if p.name == name).attend(Module, call)
    assert told["window_size"] == sides and told["causal"] == (window[1] == 0) and told["softcap"] == 0.0
    assert told["block_table"] is table and told["softmax_scale"] == 0.125
    if name.startswith("vLLM"):
        assert told["seqused_k"] is seqs and "cu_seqlens_k" not in told and told["return_softmax_lse"] is True
        assert told["fa_version"] == int(name[-1]) and told["args"][3:] == (max(lens), starts, 7)


@torch.no_grad()
def test_layers_of_a_shape_derive_the_arguments_of_a_batch_once(
    only: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slopes, caches, queries and outputs are each layer's and each call's own."""
    only("FlashAttention 2")
    bind, derived = FlashAttentionImpl._bind, list[Any]()
    monkeypatch.setattr(FlashAttentionImpl, "_bind", lambda self, *of: derived.append(self) or bind(self, *of))
    torch.manual_seed(0)
    spec = KVCacheSpec(block_size=256, num_kv_heads=2, head_size=64, dtype="bfloat16")
    builder = FlashAttentionBackend.get_builder_cls()(spec)
    batch = CommonAttentionMetadata.from_lens([1, 3], [300, 9], [[0, 1], [2]], 256)
    one = torch.ones(())
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    impls = [FlashAttentionImpl(4, 64, 0.125, 2, alibi_slopes=slopes) for slopes in ([0.5] * 4, [0.1] * 4)]
    caches = [torch.randn(2, 3, 256, 2, 64, dtype=torch.bfloat16) for _ in impls]

    def call(which: int, query: torch.Tensor, meta: Any) -> torch.Tensor:
        return impls[which].forward(layer, query, None, None, caches[which], meta)  # type: ignore[no-any-return]

    calls = [(which, torch.randn(4, 4, 64, dtype=torch.bfloat16)) for which in (0, 1, 0, 1)]
    shared = builder.build(0, batch)
    got = [call(*given, shared) for given in calls]
    assert len(derived) == 1
    for given, result in zip(calls, got, strict=True):
        assert torch.equal(result, call(*given, builder.build(0, batch)))
    shared.seq_lens = torch.tensor([200, 9]).int()
    shared.key_starts = torch.tensor([0, 200, 209]).int()
    derived.clear()
    other = call(*calls[0], shared)
    assert not torch.equal(other, got[0]) and len(derived) == 1
    shared.key_starts = shared.key_starts.clone()
    assert torch.equal(call(*calls[0], shared), other) and len(derived) == 2


@torch.no_grad()
def test_a_graph_of_flash_attention_2_reads_the_lengths_of_its_replays(
    only: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel takes sums of lengths alone, so a graph has to make them from the lengths that its owner overwrites."""
    only("FlashAttention 2")
    spec = KVCacheSpec(block_size=256, num_kv_heads=2, head_size=64, dtype="bfloat16")
    builder = FlashAttentionBackend.get_builder_cls()(spec)
    meta, other = (
        builder.build(0, CommonAttentionMetadata.from_lens([1, 1], x, [[0, 1], [2, 2]], 256)) for x in ([300, 9], [7, 259])
    )
    layer, impl = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(())), FlashAttentionImpl(4, 64, 0.125, 2)
    cache, query = torch.randn(2, 3, 256, 2, 64, dtype=torch.bfloat16), torch.randn(2, 4, 64, dtype=torch.bfloat16)

    def call(meta: Any) -> torch.Tensor:
        return impl.forward(layer, query, None, None, cache, meta)  # type: ignore[no-any-return]

    call(meta)  # before the capture, as engines do
    meta.seq_lens.copy_(other.seq_lens)
    monkeypatch.setattr(providers, "is_captured", lambda x: True)  # a replay runs what the capture ran
    assert torch.equal(call(meta), call(other))


@torch.no_grad()
def test_a_layer_that_has_computed_a_call_copies_and_pickles(only: Callable[[str], None]) -> None:
    """A module of a provider does neither."""
    only("FlashAttention 2")
    spec = KVCacheSpec(block_size=256, num_kv_heads=2, head_size=64, dtype="bfloat16")
    meta = FlashAttentionBackend.get_builder_cls()(spec).build(
        0, CommonAttentionMetadata.from_lens([1, 3], [300, 9], [[0, 1], [2]], 256)
    )
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    impl, cache = FlashAttentionImpl(4, 64, 0.125, 2), torch.randn(2, 3, 256, 2, 64, dtype=torch.bfloat16)
    query = torch.randn(4, 4, 64, dtype=torch.bfloat16)
    want = impl.forward(layer, query, None, None, cache, meta)
    for other in (copy.deepcopy(impl), pickle.loads(pickle.dumps(impl))):
        assert torch.equal(other.forward(layer, query, None, None, cache, meta), want)


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 2])
def test_the_output_is_the_kernels_own_unless_the_caller_has_one(padding: int, only: Callable[[str], None]) -> None:
    """Or rows of padding follow those of the batch."""
    only("FlashAttention 3")
    torch.manual_seed(0)
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    batch = CommonAttentionMetadata.from_lens([1, 3], [30, 9], [[0, 1], [2]], 16)
    meta = FlashAttentionBackend.get_builder_cls()(spec).build(0, batch)
    impl, made = FlashAttentionImpl(4, 64, 0.125, 2), list[torch.Tensor]()
    cache, query = torch.randn(2, 3, 16, 2, 64, dtype=torch.bfloat16), torch.randn(4 + padding, 4, 64, dtype=torch.bfloat16)
    provider = impl._provider

    def told(request: Request, arch: str) -> Any:
        chosen = provider(request, arch)

        def bind(module: Any, call: VarlenCall) -> Any:
            def attend(*given: Any) -> Any:
                out, log = bound(*given)
                made.append(out)
                return out, log

            bound = chosen.bind(module, call)
            return attend

        return replace(chosen, bind=bind)

    impl._provider = told  # type: ignore[method-assign]
    output = torch.full_like(query, 7)
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    for _ in range(3):
        got = impl.forward(layer, query, None, None, cache, meta)
        assert (got is made[-1]) == (not padding) and got.shape == query.shape
        assert impl.forward(layer, query, None, None, cache, meta, output) is output
        assert torch.equal(got[:4], output[:4]) and bool((output[4:] == 7).all())


def test_halves_of_a_cache_are_kept_as_long_as_it_is() -> None:
    cache = torch.arange(2 * 4 * 16 * 8.0).reshape(2, 4, 1, 16, 8).transpose(2, 3)
    key, value = halves(cache)
    assert key.stride() == value.stride() == (128, 8, 8, 1)  # of a dense tensor where there is one head
    assert torch.equal(key, cache[0]) and torch.equal(value, cache[1])
    assert halves(cache)[0] is key and not halves(torch.zeros_like(cache))[0].any()
    # its memory may be exchanged in place, and written to
    cache.fill_(2)
    assert (halves(cache)[1] == 2).all()
    cache.data = torch.full((2, 3, 16, 2, 8), 5.0)
    assert halves(cache)[1].shape == (3, 16, 2, 8) and (halves(cache)[1] == 5).all()
    known = len(_vendor._halves)
    del cache
    assert len(_vendor._halves) == known - 1
