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


@pytest.mark.parametrize(("name", "root"), [("FLASH_ATTN", "fa3"), ("FLASH_ATTN", "fa2"), ("FLASHINFER", "flashinfer_pkg")])
def test_vendors_attend_a_context_in_the_layers_turns(
    name: str, root: str, standins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rows of a turn's requests, merged to what a portable backend computes; layers share a vendor's plans."""
    from attn.backends.metadata import CommonAttentionMetadata
    from attn.torch import MLAAttention
    from attn.torch.backends.mla import _mla
    from attn.torch.backends.mla.prefill import flashinfer

    standins(root)
    monkeypatch.setattr(providers, "PROVIDERS", [p for p in providers.PROVIDERS if not p.install.startswith("torch")])
    providers.chosen.cache_clear()
    monkeypatch.setattr(_mla, "_WORKSPACE", 64 * H * (D + DV) * 2)
    queries, context = [20, 1, 17, 30, 18], [100, 9, 30, 0, 20]
    lens = [n + m for n, m in zip(queries, context, strict=True)]
    tables = [list(range(10 * r, 10 * r + 10)) for r in range(5)]
    batch = CommonAttentionMetadata.from_lens(queries, lens, tables, 16)
    g = torch.Generator().manual_seed(0)
    up = (torch.randn(96, H, 128 + DV, generator=g) / 96**0.5).bfloat16()
    layer = MLAAttention(H, 96, 128, 64, DV, up, dtype=torch.bfloat16, block_size=16, backend="TORCH_MLA", return_lse=True)
    given = [torch.randn(sum(queries), *shape, generator=g).bfloat16() for shape in ((H, D), (96,), (64,))]
    cache = torch.randn(50, 16, 160, generator=g).bfloat16()
    want, log = layer(*given, cache.clone(), layer.build(batch))
    vendor = MLAPrefillBackendEnum[name].get_class()
    rows, plans, attend, plan = [], [], vendor._attend, flashinfer.plan
    monkeypatch.setattr(vendor, "_attend", lambda self, call: rows.append(len(call.q)) or attend(self, call))
    monkeypatch.setattr(flashinfer, "plan", lambda *args, **rules: plans.append(1) or plan(*args, **rules))
    layer.impl._prefill = vendor(H, D, DV, layer.impl.scale)
    metadata = layer.build(batch)
    for _ in range(2):  # layers
        out, lse = layer(*given, cache.clone(), metadata)
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, log, rtol=1e-3, atol=2e-3)
    # new tokens; contexts of 64 + 36, 30 and 20 tokens in turns of 64
    assert rows == 2 * [20 + 17 + 30 + 18, 20, 20, 17 + 18]
    assert len(plans) == (4 if name == "FLASHINFER" else 0)
