"""The MLA prefill registry's selector: reasons, explicit choices, the environment (under 3 s)."""

import pytest

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillRequest
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from attn.backends.mla.prefill.selector import (
    get_mla_prefill_backend,
    make_mla_prefill_request,
    select_mla_prefill,
)
from attn.capabilities import Capabilities, Device, Feature
from attn.errors import BackendLoadError, UnsupportedError

pytest.importorskip("torch")
H200 = Device("torch", "cuda", "H200", "sm_90")


def request(qk=192, v=128, dtype="bfloat16", **more):
    return make_mla_prefill_request(qk, v, dtype, **more)


def mine(name="MINE", v_head_dims=(64,), priority=0):
    class Mine(MLAPrefillBackend):
        capabilities = Capabilities(
            "torch", ("cpu", "cuda"), dtypes=("bfloat16",), features=frozenset({"mla"}), priority=priority
        )

        def run_prefill_new_tokens(self, q, k, v, meta, return_lse): ...

        def run_prefill_context_chunk(self, chunk_idx, q, k, v, meta): ...

    Mine.name, Mine.v_head_dims = name, v_head_dims
    return Mine


def test_a_request_is_printed_with_its_features():
    asked = request(num_heads=16)
    assert isinstance(asked, MLAPrefillRequest) and asked.features == {"mla"}
    assert str(asked) == "head_size=192 dtype=bfloat16 num_heads=16 num_kv_heads=16 features={mla}"
    assert "v_head_dim=64" in str(request(v=64))
    for wrong in ({"qk": 0}, {"v": -1}, {"qk": 1.5}):
        with pytest.raises(ValueError, match="must be a positive int"):
            request(**wrong)


def test_a_cpu_has_the_portable_member():
    selection = select_mla_prefill(request(), framework="torch", device=Device("torch", "cpu"))
    assert selection.name == "TORCH_SDPA" and selection.source == "priority"
    assert "platform=cpu (supports cuda, rocm)" in next(why for why in selection.reasons if why.startswith("TRITON: "))
    assert get_mla_prefill_backend(192, 128, "float32", framework="torch", on_host=True).get_name() == "TORCH_SDPA"


def test_a_gpu_asks_its_vendors_first():
    selection = select_mla_prefill(request(), framework="torch", device=H200)
    names = [verdict.name for verdict in selection.trace]
    assert names.index("FLASH_ATTN") < names.index("TRITON") < names.index("TORCH_SDPA")
    blackwell = select_mla_prefill(request(), framework="torch", device=Device("torch", "cuda", "B200", "sm_100"))
    assert blackwell.trace[0].name == "TRTLLM_RAGGED"


def test_the_environment_is_obeyed_or_refused(monkeypatch):
    monkeypatch.setenv("ATTN_MLA_PREFILL_BACKEND", " TORCH_SDPA ")
    selection = select_mla_prefill(request(), framework="torch", device=H200)
    assert (selection.name, selection.source) == ("TORCH_SDPA", "ATTN_MLA_PREFILL_BACKEND")
    monkeypatch.setenv("ATTN_MLA_PREFILL_BACKEND", "TRITON")
    refused = select_mla_prefill(request(), framework="torch", device=Device("torch", "cpu"))
    with pytest.raises(UnsupportedError, match="platform=cpu"):
        refused.require()
    monkeypatch.setenv("ATTN_MLA_PREFILL_BACKEND", "NOPE")
    with pytest.raises(ValueError, match="ATTN_MLA_PREFILL_BACKEND=NOPE: Unknown MLA prefill backend"):
        select_mla_prefill(request(), framework="torch", device=H200)


def test_an_explicit_choice_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("ATTN_MLA_PREFILL_BACKEND", "TRITON")
    chosen = select_mla_prefill(
        request(), framework="torch", backend=MLAPrefillBackendEnum.TORCH_SDPA, device=Device("torch", "cpu")
    )
    assert (chosen.name, chosen.source) == ("TORCH_SDPA", "argument")
    with pytest.raises(TypeError, match="member or a name"):
        select_mla_prefill(request(), framework="torch", backend=3, device=H200)


def test_ones_own_is_found_by_its_priority_and_refuses_by_its_data():
    register_mla_prefill_backend("MINE", mine(priority=1))
    cpu = Device("torch", "cpu")
    small = select_mla_prefill(request(v=64), framework="torch", device=cpu)
    assert small.name == "MINE"
    wide = select_mla_prefill(request(), framework="torch", device=cpu)
    assert wide.name == "TORCH_SDPA" and "MINE: v_head_dim=128 (supports 64)" in wide.reasons
    disabled = select_mla_prefill(request(v=64), framework="torch", device=cpu, disable=["MINE"])
    assert disabled.name == "TORCH_SDPA" and "MINE: disabled by the caller" in disabled.reasons


def test_a_class_that_is_not_a_prefill_backend_is_reported():
    register_mla_prefill_backend("HALF", int)
    chosen = select_mla_prefill(request(), framework="torch", backend="HALF", device=H200)
    with pytest.raises(UnsupportedError, match=r"int lacks what every MLA prefill backend has: get_name\(\), run_pre"):
        chosen.require()


def test_a_broken_path_reports_its_cause():
    register_mla_prefill_backend("BROKEN", "no_such_vendor.Backend")
    with pytest.raises(BackendLoadError, match="no_such_vendor"):
        get_mla_prefill_backend(192, 128, "bfloat16", framework="torch", backend="BROKEN")


def test_every_member_that_loads_declares_mla():
    for member in MLAPrefillBackendEnum:
        backend = member.candidate().backend if member.name != "CUSTOM" else None
        if backend is not None:
            assert Feature.MLA in backend.capabilities.features, member
            assert backend.get_name() == member.name
