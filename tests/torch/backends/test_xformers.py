"""XFORMERS on a stand-in: the suite by both routes, which batch takes which, and what is refused with its reason."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.capabilities import AttentionType, Device, Feature, Request
from attn.errors import UnsupportedError
from attn.testing import check_conformance
from attn.testing.conformance import runner_for
from attn.testing.draw import draw
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends import xformers as adapter
from attn.torch.backends.xformers import Rule, XFormersAttentionBackend, XFormersMetadata
from tests.levels import some
from tests.testing import covering

H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")
T4 = Device("torch", "cuda", "Tesla T4", "sm_75")
PLAIN = Request(head_size=128, dtype="float16", block_size=16)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    adapter._installed_lacks.cache_clear()


@pytest.fixture
def here(standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, and a Triton that split-K compiles with."""
    standins("xformers_pkg")
    monkeypatch.setattr(adapter, "_has_block_pointers", lambda: True)


def _cases(keep: Callable[[Any], bool]) -> list[Any]:
    return [case for case in cases_of(subject_of(XFormersAttentionBackend), "quick") if keep(case)]


def test_the_suite_on_a_stand_in(here: None) -> None:
    cases = _cases(lambda case: True)
    assert sum(not case.check.startswith("refusal") for case in cases) > 60
    for case in some(cases, 20, "XFORMERS", partial(covering.is_kept, "TRITON_ATTN")):
        check_conformance(XFormersAttentionBackend, case)


def test_the_suite_on_pages_that_split_k_reads(here: None) -> None:
    """The cases of the page size that the grid and the fixtures have most, on pages of 64."""
    cases = _cases(lambda case: case.block_size == 16 and not case.is_encoder and case.check == "oracle")
    cases = [case.replace(block_size=64, num_blocks=None) for case in cases if not case.sliding_window]
    assert sum(1 in case.query_lens for case in cases) > 20
    for case in cases:
        check_conformance(XFormersAttentionBackend, case)


def _built(block_size: int, queries: tuple[int, ...], lens: tuple[int, ...]) -> XFormersMetadata:
    pages = -(-max(lens) // block_size)
    table = [list(range(r * pages, (r + 1) * pages)) for r in range(len(lens))]
    batch = CommonAttentionMetadata.from_lens(queries, lens, table, block_size, strict=False)
    built = XFormersAttentionBackend.get_builder_cls()(KVCacheSpec(block_size, 2, 64, "float16")).build(0, batch)
    assert isinstance(built, XFormersMetadata)
    return built


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (Rule(True, None, True, False), ["PagedBlockDiagonalCausalWithOffsetPadded", "BlockDiagonalCausalFromBottomRight"]),
        (Rule(True, None, False, False), ["BlockDiagonalCausalFromBottomRight"]),
        (Rule(True, 4, True, False), ["BlockDiagonalCausalLocalAttentionFromBottomRight"]),
        (Rule(False, None, True, False), ["BlockDiagonal"]),
    ],
)
def test_masks_and_keys_of_each_rule(here: None, rule: Rule, kinds: list[str]) -> None:
    meta = _built(64, (1, 3, 1, 0), (70, 5, 1, 9))
    parts = meta.planned(rule)
    assert [type(part.mask).__name__.removesuffix("Mask").removesuffix("Keys") for part in parts] == kinds and meta.planned(
        rule
    ) is parts
    assert sum(sum(part.counts) for part in parts) == 5
    if rule.left == 4:  # a decode's window is the last five keys, wherever its pages are
        assert parts[0].mask.k_seqinfo.lengths() == [5, 5, 1] and parts[0].mask.window == (4, 0)
        assert parts[0].slots is not None
        assert parts[0].slots.tolist() == [65, 66, 67, 68, 69, 128, 129, 130, 131, 132, 256]


@pytest.mark.parametrize("names", [("seq_lens", "seq_lens_cpu"), ("seq_lens_cpu",)])  # alone: of a tensor written in place
def test_lengths_that_are_assigned_to_a_batch_are_planned_anew(here: None, names: tuple[str, ...]) -> None:
    meta, other, rule = _built(64, (1,), (70,)), _built(64, (1,), (5,)), Rule(True, 4, True, False)
    assert meta.planned(rule)[0].slots.tolist() == [65, 66, 67, 68, 69]  # type: ignore[union-attr]
    for name in names:
        setattr(meta, name, getattr(other, name))
    assert meta.planned(rule)[0].slots.tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]


def test_rows_without_a_key_are_never_asked_for(here: None) -> None:
    """xformers refuses more queries than keys; the leading rows are 0 by definition."""
    (part,) = _built(16, (5, 1, 2), (3, 0, 2)).planned(Rule(True, None, False, False))
    assert isinstance(part.rows, torch.Tensor)
    assert part.rows.tolist() == [2, 3, 4, 6, 7] and part.counts == [3, 2]


@pytest.mark.parametrize(
    ("head_size", "block_size", "arch", "reads"),
    [
        (128, 64, "sm_90", True),
        (128, 128, "", True),
        (128, 16, "sm_90", False),
        (128, 96, "sm_90", False),
        (96, 64, "sm_90", False),
        (128, 64, "sm_75", False),
    ],
)
def test_pages_that_split_k_would_get_wrong_are_gathered(
    here: None, head_size: int, block_size: int, arch: str, reads: bool
) -> None:
    assert adapter._reads_pages(head_size, block_size, arch) is reads


def test_a_triton_without_block_pointers_leaves_the_gathered_route(monkeypatch: pytest.MonkeyPatch) -> None:
    for language, has in ((SimpleNamespace(make_block_ptr=1), True), (SimpleNamespace(), False)):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(language=language))
        monkeypatch.setitem(sys.modules, "triton.language", language)
        adapter._has_block_pointers.cache_clear()
        assert adapter._has_block_pointers() is has and adapter._reads_pages(64, 64, "") is has
    adapter._has_block_pointers.cache_clear()


def _why(request: Request, device: Device = H200) -> str:
    return "; ".join(XFormersAttentionBackend.why_not(request, device))


def test_what_it_does_not_serve_is_a_reason(here: None) -> None:
    assert _why(PLAIN) == _why(PLAIN, T4) == ""
    assert "dtype=bfloat16 on sm_75 (supports sm_80+)" in _why(replace(PLAIN, dtype="bfloat16"), T4)
    window = frozenset({Feature.SLIDING_WINDOW})
    for asked in (
        replace(PLAIN, features=window | {Feature.NON_CAUSAL}),
        replace(PLAIN, features=window, attn_type=AttentionType.ENCODER),
    ):
        assert "sliding_window without causality not supported" in _why(asked)
    told = _why(replace(PLAIN, features=frozenset({Feature.ALIBI, Feature.SOFT_CAP, Feature.TWO_SIDED_WINDOW})))
    assert told == "alibi not supported; soft_cap not supported; two_sided_window not supported"


def test_a_window_without_causality_is_refused_when_it_is_asked_for_in_a_call(here: None) -> None:
    case = _cases(lambda case: case.name == "window of 16")[0].replace(causal=False)
    with pytest.raises(UnsupportedError, match="sliding_window without causality not supported"):
        runner_for(XFormersAttentionBackend)(draw(case))


def test_a_version_without_a_mask_is_a_reason_and_no_crash(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import xformers.ops.fmha as fmha

    monkeypatch.delattr(fmha.attn_bias, "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask")
    monkeypatch.setattr(fmha.attn_bias.BlockDiagonalMask, "from_seqlens", lambda q_seqlen, kv_seqlen=None: None)
    monkeypatch.setattr(adapter, "version_of", lambda name: "0.0.20")
    told = _why(PLAIN)
    assert "xformers 0.0.20 has no attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask" in told
    assert "xformers 0.0.20.attn_bias.BlockDiagonalMask.from_seqlens has no device" in told


def test_an_extension_that_did_not_load_is_a_reason_on_a_gpu(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for another CUDA: xformers then refuses all its operators, in the midst of a call."""
    error = OSError("libcudart.so.12: cannot open shared object file")
    monkeypatch.setitem(sys.modules, "xformers._cpp_lib", SimpleNamespace(_cpp_library_load_exception=error))
    assert _why(PLAIN) == "xformers did not load its extension: libcudart.so.12: cannot open shared object file"
    assert XFormersAttentionBackend.why_not(PLAIN) == []


def test_nothing_is_imported_where_something_else_speaks_against_it(here: None) -> None:
    assert _why(replace(PLAIN, dtype="float32")) == "dtype=float32 (supports bfloat16, float16)"
    assert "xformers" not in sys.modules
