"""Vendors' MLA decode backends on stand-ins: the suite, and what each refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device, Feature, Request
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends.mla import flashinfer_mla

H200, B200 = Device("torch", "cuda", "NVIDIA H200", "sm_90"), Device("torch", "cuda", "NVIDIA B200", "sm_100")
MI300 = Device("torch", "rocm", "AMD Instinct MI300X", "gfx942")
PLAIN = Request(head_size=576, dtype="bfloat16", block_size=64, features=frozenset({Feature.MLA}), num_heads=16)
ROOTS = {
    "FLASHMLA": "flash_mla_pkg", "FLASHINFER_MLA": "flashinfer_pkg", "FLASH_ATTN_MLA": "fa3", "CUTLASS_MLA": "vllm_pkg",
    "ROCM_AITER_MLA": "aiter_pkg", "FLASHMLA_SPARSE": "flash_mla_pkg",
}  # fmt: skip


def _suite(name: str) -> None:
    backend: Any = AttentionBackendEnum[name].get_class()
    cases = cases_of(subject_of(backend), "smoke")
    assert sum(not case.check.startswith("refusal") for case in cases) > 20
    for case in cases:
        check_conformance(backend, case)


@pytest.mark.parametrize("name", ROOTS)
def test_the_suite_on_a_stand_in(name: str, standins: Callable[..., None]) -> None:
    standins(ROOTS[name])
    _suite(name)


def test_the_suite_on_flashinfers_blackwell_kernel(standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    standins("flashinfer_pkg")
    monkeypatch.setattr(flashinfer_mla, "arch_of", lambda device: "sm_100")
    backend = flashinfer_mla.FlashInferMLABackend
    monkeypatch.setattr(flashinfer_mla.FlashInferMLAImpl, "get_supported_kernel_block_size", staticmethod(lambda: [32, 64]))
    for case in cases_of(subject_of(backend), "smoke"):
        if "fp8" not in case.kv_cache_dtype:
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
