"""TRITON_MLA and its prefill: what only calls of a certain kind show; the suite itself runs in `test_interpreted`.

Without a GPU the kernels run interpreted on the CPU. About 10 s on one core with triton, none without.
"""

import importlib.util

import numpy as np
import pytest
import torch

from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.capabilities import Device, Request
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch.backends.mla.prefill.sdpa import TorchSDPAPrefillBackend
from attn.torch.backends.mla.prefill.triton import TritonPrefillBackend
from attn.torch.backends.mla.triton_mla import TritonMLABackend
from attn.torch.backends.mla.triton_mla_sparse import TritonMLASparseBackend

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
def test_e4m3_is_read_on_architectures_that_do_not_convert_it(cache):
    asked = Request(576, "bfloat16", cache, 64, features=frozenset({"mla"}))
    for arch in ("sm_80", "sm_90"):
        assert not [why for why in TritonMLABackend.why_not(asked, Device("torch", "cuda", "", arch)) if "triton" not in why]
    sparse = TritonMLASparseBackend.why_not(asked, Device("torch", "cuda", "H200", "sm_90"))
    assert "serves sparse_mla only" in sparse


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize("backend", [TritonMLABackend, TritonMLASparseBackend])
def test_codes_taken_as_bytes_conform(backend, monkeypatch):
    """What A100 and RDNA3 run: e4m3 codes, packed or not, made numbers by their bits."""
    from attn.torch.kernels import mla_decode

    monkeypatch.setattr(mla_decode, "converts_e4m3", lambda arch: False)
    cases = {case.kv_cache_dtype: case for case in cases_of(subject_of(backend), "smoke") if case.dtype != "bfloat16"}
    for cache in ("fp8", "fp8_ds_mla"):
        check_conformance(backend, cases[cache])


@pytest.mark.parametrize("backend", [TritonMLABackend, TritonMLASparseBackend])
def test_a_float32_cache_needs_an_architecture_whose_shared_memory_holds_it(backend):
    def reasons(arch, head_size=576, kv_cache_dtype="auto"):
        asked = Request(head_size, "float32", kv_cache_dtype, 64)
        return [why for why in backend.why_not(asked, Device("torch", "cuda", "", arch)) if "float32 cache" in why]

    assert reasons("sm_120") == ["a float32 cache of head_size=576 on sm_120: its latents exceed the shared memory"]
    assert all(reasons(arch) for arch in ("sm_86", "sm_89"))
    assert not any(reasons(arch) for arch in ("sm_80", "sm_90", "sm_100"))
    assert not reasons("sm_120", 320) and not reasons("sm_120", 576, "fp8_e5m2")


@needs_triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx950", "interpreter"])
def test_launches_fit_and_keep_the_state_in_registers(arch):
    from attn.torch.kernels.memory import SHARED_MEMORY
    from attn.torch.kernels.mla_launch import mla_launch, mla_prefill_launch

    for rows in (1, 16, 17, 64, 128, 512):
        for stored, packed in ((2, False), (1, False), (1, True)):
            rule = mla_launch(arch, rows, 512, 64, 2, stored, False, packed)
            assert 16 <= rule.block_m <= 64 and rule.block_m * 512 * 4 <= 128 * 1024
            queries = rule.block_m * 576 * 2
            assert queries + rule.block_n * 576 * stored <= SHARED_MEMORY.get(arch, 1 << 20), (arch, rows, rule)
    assert mla_prefill_launch(arch, 192, 128, 2).block_m >= 32


@needs_triton
def test_the_kernel_by_hand_is_for_plain_latents_on_hopper(monkeypatch):
    from attn.torch.kernels import hopper, mla_launch

    monkeypatch.setattr(hopper, "why_off", lambda kernel: "")
    assert mla_launch.by_hand("sm_90", packed=False) and not mla_launch.by_hand("sm_90", packed=True)
    assert not any(mla_launch.by_hand(arch, packed=False) for arch in ("sm_80", "sm_100", "gfx942", "interpreter"))
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "no")
    assert not mla_launch.by_hand("sm_90", packed=False)


@needs_triton
def test_splits_fill_the_device_and_cover_every_key():
    from attn.torch.kernels.mla_launch import mla_split

    assert mla_split(128, 4096, 64, 132) == 4096  # one wave as it is
    assert mla_split(32, 32768, 64, 132) == 8192
    for units, keys in ((1, 1), (3, 5000), (700, 70), (16, 32768)):
        split = mla_split(units, keys, 64, 132)
        assert split % 64 == 0 and -(-keys // split) <= 64


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize(("heads", "size", "width"), [(3, 192, 128), (2, 40, 40), (2, 64, 16)])
@pytest.mark.parametrize("wild", [False, True])
def test_prefill_agrees_with_the_portable_member(heads, size, width, wild):
    g = torch.Generator().manual_seed(0)
    starts, keys = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in ([17, 40, 33], [5, 0, 70]))
    chunk = MLAContextChunk(torch.from_numpy(keys).to(DEVICE), keys, 75, 70)
    meta = MLAPrefillMetadata(torch.from_numpy(starts).to(DEVICE), starts, 3, 40, (chunk,))
    query = torch.randn(90, heads, size, generator=g).to(DEVICE)
    for rows, run in ((90, "run_prefill_new_tokens"), (75, "run_prefill_context_chunk")):
        key = torch.randn(rows, heads, size, generator=g).to(DEVICE)
        value = torch.randn(rows, heads, size + width, generator=g).to(DEVICE)[..., size:]
        if wild:  # a latent that is not finite makes both so
            key[20], value[20] = torch.nan, torch.nan
        arguments = (query, key, value, meta, True) if rows == 90 else (0, query, key, value, meta)
        members = (member(heads, size, width, 0.1) for member in (TritonPrefillBackend, TorchSDPAPrefillBackend))
        ours, theirs = (getattr(member, run)(*arguments) for member in members)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
