"""TRITON_MLA and its prefill: what only calls of a certain kind show; the suite itself runs in `test_interpreted`.

Without a GPU the kernels run interpreted on the CPU. About 10 s on one core with triton, none without.
"""

import importlib.util

import numpy as np
import pytest
import torch
from torch import library

from attn.backends.abstract import KVCacheSpec
from attn.backends.metadata import CommonAttentionMetadata
from attn.backends.mla.prefill.abstract import MLAContextChunk, MLAPrefillMetadata
from attn.capabilities import Device, Request
from attn.reports.report import explain
from attn.testing import check_conformance
from attn.testing.subject import subject_of
from attn.testing.suite import cases_of
from attn.torch import MLAAttention
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
    from attn.kernels import mla_launch

    monkeypatch.setattr(mla_launch, "converts_e4m3", lambda arch: False)
    cases = {case.kv_cache_dtype: case for case in cases_of(subject_of(backend), "smoke") if case.dtype != "bfloat16"}
    for cache in ("fp8", "fp8_ds_mla"):
        check_conformance(backend, cases[cache].replace(query_lens=(1, 6, 3), seq_lens=(33, 9, 20)))


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize("fixed_split", [0, 48])
def test_decoding_fifty_tokens_is_planned_for_every_tile_not_for_every_token(fixed_split):
    """Every fourth of them is launched."""
    from attn.torch.kernels import mla_decode

    cache, query = torch.zeros(4, 16, 40, device=DEVICE), torch.zeros(1, 4, 40, device=DEVICE)
    out, table = torch.zeros(1, 4, 32, device=DEVICE), torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    start = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    before = mla_decode._plan.cache_info().misses
    for keys in range(9, 59, 4):
        lens = torch.tensor([keys], dtype=torch.int32, device=DEVICE)
        mla_decode.mla_decode(out, None, query, cache, start, lens, table, 1, keys, 0.2, fixed_split=fixed_split)
    assert mla_decode._plan.cache_info().misses - before <= 4


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
    from attn.kernels.memory import SHARED_MEMORY
    from attn.kernels.mla_launch import mla_launch, mla_prefill_launch

    for rows in (1, 16, 17, 64, 128, 512):
        for stored, packed in ((2, False), (1, False), (1, True)):
            rule = mla_launch(arch, rows, 512, 64, 2, stored, False, packed)
            assert 16 <= rule.block_m <= 64 and rule.block_m * 512 * 4 <= 128 * 1024
            queries = rule.block_m * 576 * 2
            assert queries + rule.block_n * 576 * stored <= SHARED_MEMORY.get(arch, 1 << 20), (arch, rows, rule)
    assert mla_prefill_launch(arch, 192, 128, 2).block_m >= 32


def test_rules_of_absorbing_are_explained(monkeypatch):
    monkeypatch.setattr(TritonMLABackend, "off_paths", classmethod(lambda cls, device=None: ()))
    few, short = TritonMLABackend.rules(Device("torch", "cuda", "H200", "sm_90"))
    assert few == "requests of up to 16 new tokens are absorbed, longer ones are expanded" and "<= 640 c" in short
    assert TritonMLABackend.rules(Device("torch", "cuda", "A100", "sm_80")) == (few,)
    assert TritonMLASparseBackend.rules(Device("torch", "cuda", "H200", "sm_90")) == ()
    assert few in explain(576, torch.bfloat16, use_mla=True, backend="TRITON_MLA", device="A100", assume=["triton"]).notes


@needs_triton
def test_short_prompts_are_absorbed_where_the_hopper_kernel_decodes(monkeypatch):
    from attn.kernels import hopper
    from attn.torch.backends.mla import triton_mla
    from attn.torch.kernels import direct

    def rows(device="cuda", **changes):
        spec = KVCacheSpec(**{"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16", **changes})
        return triton_mla.TritonMLAMetadataBuilder(spec, device=device).short_rows()

    monkeypatch.setattr(hopper, "why_off", lambda kernel: "")
    monkeypatch.setattr(direct, "arch", lambda: "sm_90")
    assert rows() == rows(kv_cache_dtype="bfloat16") == triton_mla.SHORT_ROWS
    assert rows("cpu") == rows(kv_cache_dtype="fp8") == rows(kv_cache_dtype="fp8_ds_mla") == rows(head_size=320) == 0
    monkeypatch.setattr(direct, "arch", lambda: "sm_100")
    assert rows() == 0


@needs_triton
def test_the_hopper_kernel_is_for_plain_latents_on_hopper(monkeypatch):
    from attn.kernels import hopper, mla_launch

    monkeypatch.setattr(hopper, "why_off", lambda kernel: "")
    assert mla_launch.prefers_hopper("sm_90", packed=False) and not mla_launch.prefers_hopper("sm_90", packed=True)
    assert not any(mla_launch.prefers_hopper(arch, packed=False) for arch in ("sm_80", "sm_100", "gfx942", "interpreter"))
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "no")
    assert not mla_launch.prefers_hopper("sm_90", packed=False)


@needs_triton
def test_splits_fill_the_device_and_cover_every_key():
    from attn.kernels.mla_launch import mla_split_size

    assert mla_split_size(128, 4096, 64, 132) == 4096  # one wave as it is
    assert mla_split_size(32, 32768, 64, 132) == 8192
    for units, keys in ((1, 1), (3, 5000), (700, 70), (16, 32768)):
        split = mla_split_size(units, keys, 64, 132)
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


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize("kind", ["auto", "bfloat16", "fp8", "fp8_e5m2", "fp8_ds_mla"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["decodes first", "prompt first"])
@pytest.mark.parametrize("new", ["written", "padded", "cached"])
def test_a_layer_whose_cache_a_kernel_writes(kind, order, new, monkeypatch):
    """The same bytes and outputs as with torch operators: queries absorbed in place, gathered, padded, and without new rows."""
    lens = [[(1, 40), (3, 3), (20, 33)][i] for i in order]
    tables = [[0, 5, 2], [1], [4, 3, 6]]
    batch = CommonAttentionMetadata.from_lens(*map(list, zip(*lens, strict=True)), [tables[i] for i in order], 16)
    rank, rope = (512, 64) if kind == "fp8_ds_mla" else (48, 16)
    g = torch.Generator().manual_seed(0)
    up = torch.randn(rank, 3, 8 + 16, generator=g).to(DEVICE) / rank**0.5
    tokens = 24 + 4 * (new == "padded")
    query, kv_c = (torch.randn(tokens, *s, generator=g).to(DEVICE) for s in ((3, 8 + rope), (rank,)))
    k_pe = torch.randn(tokens, 1, rope + 3, generator=g).to(DEVICE)[..., :rope]
    outs = []
    for by_kernel in (False, True):
        layer = MLAAttention(
            3, rank, 8, rope, 16, up, kv_cache_dtype=kind, dtype=torch.float32, block_size=16, backend="TORCH_MLA",
            k_scale=0.3 if kind.startswith("fp8_e") else 1.0, return_lse=True,
        )  # fmt: skip
        monkeypatch.setattr(layer.impl, "_writes_by_kernel", lambda kv_cache, by_kernel=by_kernel: by_kernel)
        cache = layer.new_kv_cache(8, DEVICE)
        given = (None, None) if new == "cached" else (kv_c, k_pe)
        out, lse = layer(query, *given, cache, layer.build(batch, device=DEVICE))
        stored = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.itemsize])
        outs.append((out[:24], lse[:, :24], stored))
    for ours, want in zip(*outs, strict=True):
        assert torch.equal(ours, want)


@pytest.mark.triton_kernels
@quiet
@pytest.mark.parametrize(
    "placed", [torch.tensor(0.3), torch.tensor(0.3, device=DEVICE), torch.tensor([0.3]).double()[0].to(DEVICE)]
)
def test_a_scale_of_latents(placed):
    """A scale on the host is a number to the kernels; one on the device is read there."""
    layer = MLAAttention(
        2, 48, 8, 16, 16, torch.ones(48, 2, 24, device=DEVICE) / 48, kv_cache_dtype="fp8", dtype=torch.float32, block_size=16,
        backend="TRITON_MLA",
    )  # fmt: skip
    layer._k_scale = placed
    cache, rows = layer.new_kv_cache(2, DEVICE), torch.linspace(-100, 100, 64)
    slots, given = torch.zeros(1, dtype=torch.int64, device=DEVICE), rows[None].to(DEVICE)
    layer.impl.do_kv_cache_update(layer, given[:, :48], given[:, 48:], cache, slots)
    want = (rows / torch.tensor(0.3)).to(torch.float8_e4m3fn)
    assert torch.equal(cache[0, 0].cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.triton_kernels
@quiet
def test_registered_as_operators():
    """Schemas state which arguments are written; fakes have the results' shapes."""
    from attn.torch.kernels import latent_write, mla_decode, mla_prefill  # noqa: F401  (registers the operators)

    checks = ("test_schema", "test_faketensor")
    g = torch.Generator().manual_seed(0)
    kv_c, k_pe, cache = (torch.randn(*s, generator=g).to(DEVICE) for s in ((3, 48), (3, 16), (4, 16, 64)))
    query, absorbed, out = (torch.randn(3, 2, width, generator=g).to(DEVICE) for width in (24, 64, 48))
    slots, starts = torch.tensor([5, -1, 40], device=DEVICE), torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    lens, table = starts[1:] * 4, torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
    lse = torch.empty(2, 3, device=DEVICE)
    write = (kv_c, k_pe, cache, slots, torch.ones((), device=DEVICE), 1.0, query, absorbed)
    library.opcheck(torch.ops.attn.triton_write_latents.default, write, test_utils=checks)
    decode = (out, lse, absorbed, cache, starts, lens, table, 2, 12, 0.2)
    library.opcheck(torch.ops.attn.triton_mla_decode.default, decode, test_utils=checks)
    heads = torch.randn(3, 2, 40, generator=g).to(DEVICE)
    prefill = (torch.empty_like(query), lse, heads, heads, query, starts, starts, 0.2, True)
    library.opcheck(torch.ops.attn.triton_mla_prefill.default, prefill, test_utils=checks)
