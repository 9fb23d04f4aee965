"""MLA prefill adapters on stand-ins: new tokens, chunks of context with empty requests, strided values, and selection."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attn import reference
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.mla.prefill.selector import make_mla_prefill_request, select_mla_prefill
from attn.capabilities import Device
from attn.testing.prefill import check_prefill, prefill_cases
from attn.torch.backends import _flash_providers as providers
from tests.levels import some

B200, H200 = Device("torch", "cuda", "NVIDIA B200", "sm_100"), Device("torch", "cuda", "NVIDIA H200", "sm_90")
H, D, DV, SCALE = 4, 192, 128, 192**-0.5
QUERIES, KEYS = [5, 1, 7], [9, 0, 4]
ADAPTERS = [
    ("FLASH_ATTN", "fa3"), ("FLASH_ATTN", "fa2"), ("FLASH_ATTN", "vllm_fa"), ("FLASHINFER", "flashinfer_pkg"),
    ("TRTLLM_RAGGED", "flashinfer_pkg"), ("TOKENSPEED_MLA", "tokenspeed_pkg"),
]  # fmt: skip


def _starts(lens: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


@pytest.fixture
def batch() -> tuple[MLAPrefillMetadata, dict[str, torch.Tensor]]:
    """Three requests, the second without context; values lie beside the keys' first columns, as the template's do."""
    generator = torch.Generator().manual_seed(3)

    def expanded(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.randn(tokens, H, 128 + DV, generator=generator).bfloat16()
        rope = torch.randn(tokens, 1, 64, generator=generator).bfloat16().expand(-1, H, -1)
        return torch.cat([both[..., :128], rope], -1), both[..., 128:]

    starts, keys = _starts(QUERIES), _starts(KEYS)
    chunk = MLAContextChunk(torch.from_numpy(keys), keys, int(keys[-1]), max(KEYS))
    meta = MLAPrefillMetadata(torch.from_numpy(starts), starts, len(QUERIES), max(QUERIES), (chunk,))
    k, v = expanded(sum(QUERIES))
    ck, cv = expanded(sum(KEYS))
    q = torch.randn(sum(QUERIES), H, D, generator=generator).bfloat16()
    assert not v.is_contiguous()
    return meta, {"q": q, "k": k, "v": v, "ck": ck, "cv": cv}


def _oracle(q: Any, k: Any, v: Any, queries: list[int], keys: list[int], causal: bool) -> tuple[Any, Any]:
    outs, logs, at, key = [], [], 0, 0
    for n, m in zip(queries, keys, strict=True):
        part = (x.double().numpy() for x in (q[at : at + n], k[key : key + m], v[key : key + m]))
        out, lse = reference.attention(*part, scale=SCALE, causal=causal)
        outs.append(out)
        logs.append(lse)
        at, key = at + n, key + m
    return np.concatenate(outs), np.concatenate(logs, 1)


@pytest.mark.parametrize(("name", "root"), ADAPTERS)
def test_a_prefill_adapter(
    name: str, root: str, batch: Any, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    standins(root)
    monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if not p.install.startswith("torch")])
    providers.chosen.cache_clear()
    meta, t = batch
    backend = MLAPrefillBackendEnum[name].get_class()(H, D, DV, SCALE)
    for _ in range(2):  # a plan is used again by the layer that follows
        out, lse = backend.run_prefill_new_tokens(t["q"], t["k"], t["v"], meta, True)
        want, log = _oracle(t["q"], t["k"], t["v"], QUERIES, QUERIES, True)
        np.testing.assert_allclose(out.double().numpy(), want, atol=0.02)
        np.testing.assert_allclose(lse.numpy(), log, atol=1e-4)
        assert lse.dtype == torch.float32 and out.shape == (sum(QUERIES), H, DV)
        out, lse = backend.run_prefill_context_chunk(0, t["q"], t["ck"], t["cv"], meta)
        want, log = _oracle(t["q"], t["ck"], t["cv"], QUERIES, KEYS, False)
        np.testing.assert_array_equal(np.isneginf(lse.numpy()), np.isneginf(log))
        seen = ~np.isneginf(log)
        np.testing.assert_allclose(lse.numpy()[seen], log[seen], atol=1e-4)
        np.testing.assert_allclose(out.double().numpy()[seen[0]], want[seen[0]], atol=0.02)
    alone = backend.run_prefill_new_tokens(t["q"], t["k"], t["v"], meta, False)
    assert isinstance(alone, torch.Tensor)


@pytest.mark.parametrize(("name", "root"), ADAPTERS)
def test_the_suite_on_a_stand_in(name: str, root: str, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    standins(root)
    monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if not p.install.startswith("torch")])
    providers.chosen.cache_clear()
    backend = MLAPrefillBackendEnum[name].get_class()
    cases = prefill_cases(backend)
    assert any(case.layout == "fused" for case in cases)
    for case in some(cases, 5, f"{name} {root}", lambda case: case.name == "requests without tokens"):
        check_prefill(backend, case)


def test_the_list_of_blackwell_and_its_reasons(standins: Callable[..., None]) -> None:
    standins("flashinfer_pkg")
    request = make_mla_prefill_request(D, DV, torch.bfloat16, num_heads=16)
    chosen = select_mla_prefill(request, framework="torch", device=B200)
    assert chosen.name == "TRTLLM_RAGGED"
    told = str(select_mla_prefill(request, framework="torch", backend="TRTLLM_RAGGED", device=H200))
    assert "arch=sm_90 (supports sm_10*)" in told
    narrow = make_mla_prefill_request(96, 48, torch.bfloat16, num_heads=16)
    told = str(select_mla_prefill(narrow, framework="torch", device=B200))
    assert "head_size=96 (supports 192)" in told and "v_head_dim=48 (supports 128)" in told
