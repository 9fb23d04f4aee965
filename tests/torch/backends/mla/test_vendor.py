"""Vendors' MLA decode backends on stand-ins: the suite, and what each refuses."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import attn
from attn import CommonAttentionMetadata, UnsupportedError
from attn.backends.abstract import KVCacheSpec
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device, Feature, Request
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends import _paged
from attn.torch.backends.mla import _mla, _vendor, flashattn_mla, flashinfer_mla, flashmla
from tests.levels import some

H200, B200 = Device("torch", "cuda", "NVIDIA H200", "sm_90"), Device("torch", "cuda", "NVIDIA B200", "sm_100")
MI300 = Device("torch", "rocm", "AMD Instinct MI300X", "gfx942")
PLAIN = Request(head_size=576, dtype="bfloat16", block_size=64, features=frozenset({Feature.MLA}), num_heads=16)
ROOTS = {
    "FLASHMLA": "flash_mla_pkg", "FLASHINFER_MLA": "flashinfer_pkg", "FLASH_ATTN_MLA": "fa3", "CUTLASS_MLA": "vllm_pkg",
    "ROCM_AITER_MLA": "aiter_pkg", "FLASHMLA_SPARSE": "flash_mla_pkg",
}  # fmt: skip
#: vLLM's copies of the same kernels
COPIES = {"FLASHMLA": "vllm_flashmla", "FLASHMLA_SPARSE": "vllm_flashmla", "FLASH_ATTN_MLA": "vllm_fa"}
SPARSE = frozenset({Feature.SPARSE_MLA})


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    _vendor.flash_mla.cache_clear()
    flashattn_mla._chosen.cache_clear()


@pytest.mark.parametrize(("name", "root"), [*ROOTS.items(), *COPIES.items()])
def test_the_suite_on_a_stand_in(name: str, root: str, standins: Callable[..., None]) -> None:
    standins(root)
    backend: Any = AttentionBackendEnum[name].get_class()
    cases = cases_of(subject_of(backend), "smoke")
    assert sum(not case.check.startswith("refusal") for case in cases) > 20
    for case in some(cases, 6, f"{name} {root}"):
        check_conformance(backend, case)


@pytest.mark.parametrize("root", ["flash_mla_pkg", "vllm_flashmla"])
def test_packed_rows_on_a_stand_in(root: str, standins: Callable[..., None]) -> None:
    standins(root)
    backend: Any = AttentionBackendEnum["FLASHMLA_SPARSE"].get_class()
    cases = [case for case in cases_of(subject_of(backend), "quick") if case.kv_cache_dtype == "fp8_ds_mla"]
    assert cases
    for case in some(cases, 3, f"packed {root}"):
        check_conformance(backend, case)


def test_the_suite_on_flashinfers_blackwell_kernel(standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    standins("flashinfer_pkg")
    monkeypatch.setattr(flashinfer_mla, "arch_of", lambda device: "sm_100")
    backend = flashinfer_mla.FlashInferMLABackend
    monkeypatch.setattr(backend, "block_sizes", (32, 64))
    cases = [case for case in cases_of(subject_of(backend), "smoke") if "fp8" not in case.kv_cache_dtype]
    for case in some(cases, 8, "FlashInfer's Blackwell kernel"):
        check_conformance(backend, case)


@pytest.mark.parametrize(
    ("name", "device", "change", "words"),
    [
        ("FLASHMLA", H200, {"block_size": 16}, "block_size=16 (supports 64)"),
        ("FLASHMLA", B200, {}, "arch=sm_100 (supports sm_90)"),
        ("FLASHINFER_MLA", B200, {"block_size": 128}, "block_size=128 on sm_100 (supports 32, 64)"),
        ("FLASHINFER_MLA", B200, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 on sm_100 (supports sm_90)"),
        ("CUTLASS_MLA", B200, {"num_heads": 256, "block_size": 128}, "num_heads=256 (supports up to 128)"),
        ("ROCM_AITER_MLA", MI300, {"num_heads": 256}, "num_heads=256 (supports up to 128)"),
        ("FLASHMLA_SPARSE", H200, {"kv_cache_dtype": "fp8_ds_mla", "block_size": 16}, "block_size=16 of an fp8_ds_mla cache"),
        ("FLASH_ATTN_MLA", B200, {}, "FlashAttention 4 is not installed"),
        ("FLASH_ATTN_MLA", H200, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 (supports auto)"),
    ],
)
def test_what_is_refused(name: str, device: Device, change: dict[str, Any], words: str, standins: Callable[..., None]) -> None:
    standins(ROOTS[name])
    request = Request(**{**vars(PLAIN), **change})
    assert words in "; ".join(AttentionBackendEnum[name].get_class().why_not(request, device))  # type: ignore[attr-defined]


def test_a_graph_schedules_the_lengths_of_its_replays(standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's schedule is of the lengths of its first call; one that a capture makes has no value before a replay."""
    standins("flash_mla_pkg")
    taken, kernel = list[Any](), _vendor.flash_mla().flash_mla_with_kvcache

    def attend(q: Any, cache: Any, table: Any, lens: Any, size: int, schedule: Any, **rules: Any) -> Any:
        taken.append(schedule)
        return kernel(q, cache, table, lens, size, schedule, **rules)

    monkeypatch.setattr(_vendor.flash_mla(), "flash_mla_with_kvcache", attend)
    impl = flashmla.FlashMLAImpl.__new__(flashmla.FlashMLAImpl)
    impl.num_heads, impl.kv_lora_rank, impl.scale = 4, 512, 0.1
    cache, q = torch.randn(2, 64, 576, dtype=torch.bfloat16), torch.randn(1, 1, 4, 576, dtype=torch.bfloat16)
    call: Any = SimpleNamespace(meta=SimpleNamespace(plans={}), kv_cache=cache)
    for captured in (True, False, True, False):
        monkeypatch.setattr(flashmla, "is_captured", lambda x, captured=captured: captured)
        impl._decode_uniform(call, q, torch.tensor([70]).int(), torch.tensor([[0, 1]]).int())
    assert taken[1] is taken[3] and len(set(map(id, taken))) == 3


@pytest.mark.parametrize("name", ["FLASHINFER_MLA", "ROCM_AITER_MLA"])
def test_no_graph_attends_the_lengths_of_its_capture(
    name: str, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both plan on the host: after an eager call, the plan of its lengths would serve every replay."""
    standins(ROOTS[name])
    backend: Any = AttentionBackendEnum[name].get_class()
    impl: Any = object.__new__(backend.get_impl_cls())
    impl.num_heads, impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = 16, 512, 64, 0.1
    spec = KVCacheSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    meta = backend.get_builder_cls()(spec).build(0, CommonAttentionMetadata.from_lens([1], [70], [[0, 1]], 64)).decode
    q, cache = (torch.randn(*shape, 576, dtype=torch.bfloat16) for shape in ((1, 16), (2, 64)))
    call = _mla.DecodeCall(SimpleNamespace(), q, cache, meta)  # type: ignore[arg-type]
    want, _ = impl._decode(call)
    monkeypatch.setattr(_paged, "is_captured", lambda x: True)
    with pytest.raises(UnsupportedError, match=f"{name}: lengths are read on the host"):
        impl._decode(call)
    token = _paged.of_one_batch.set(True)
    assert torch.equal(impl._decode(call)[0], want)
    _paged.of_one_batch.reset(token)


def test_a_package_of_its_own_goes_before_the_copy_within_vllm(standins: Callable[..., None]) -> None:
    standins("flash_mla_pkg", "fa3", "vllm_flashmla", "vllm_fa")
    assert _vendor.flash_mla().__name__ == "flash_mla"
    assert flashattn_mla._chosen("sm_90").name == "FlashAttention 3"


def test_without_either_package_both_are_named() -> None:
    told = str(attn.explain(576, "bfloat16", block_size=64, use_mla=True, num_heads=16, device=H200, backend="FLASHMLA"))
    assert "flash_mla or vllm._flashmla_C is not installed (pip install vllm)" in told
    told = "; ".join(flashattn_mla.FlashAttnMLABackend.why_not(PLAIN, H200))
    assert told == (
        "FlashAttention 3 is not installed (pip install flash-attn-3) or "
        "vLLM's FlashAttention 3 is not installed (pip install vllm)"
    )


@pytest.mark.parametrize(("name", "features"), [("FLASHMLA", PLAIN.features), ("FLASHMLA_SPARSE", SPARSE)])
def test_a_broken_or_old_copy_is_a_reason_and_no_crash(
    name: str, features: frozenset[str], standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    backend: Any = AttentionBackendEnum[name].get_class()
    request = replace(PLAIN, features=features)
    old = ModuleType("flash_mla")
    old.get_mla_metadata = old.flash_mla_with_kvcache = lambda q, k_cache, block_table: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", old)
    told = "; ".join(backend.why_not(request, H200))
    assert "flash_mla.flash_mla_with_kvcache has no indices" in told and "flash_mla has no flash_mla_sparse_fwd" in told
    monkeypatch.delitem(sys.modules, "flash_mla")
    _vendor.flash_mla.cache_clear()
    (tmp_path / "flash_mla.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "flash_mla cannot be imported: ImportError: undefined symbol" in "; ".join(backend.why_not(request, H200))


def test_an_old_build_of_flash_attention_3_is_a_reason_and_no_crash(
    standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    standins("vllm_fa")
    interface = "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func"
    monkeypatch.setattr(interface, lambda q, k, v, seqused_k, block_table, fa_version: None)
    told = "; ".join(flashattn_mla.FlashAttnMLABackend.why_not(PLAIN, H200))
    assert told == "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func has no q_v"
