"""A choice by name, ATTN_DISABLE and an unknown name have the same meaning in all three registries (under 2 s)."""

import pytest

from attn import envs, selector
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from attn.backends.mla.prefill.selector import make_mla_prefill_request, select_mla_prefill
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.capabilities import Device
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from attn.diffusion.selector import make_diffusion_request, select_diffusion

pytest.importorskip("torch")
CPU = Device("torch", "cpu", "a CPU", "x86_64")


def attention(device=CPU, **how):
    return selector.select(selector.make_request(64, "float32", None, 16), device=device, **how)


def mla_prefill(device=CPU, **how):
    return select_mla_prefill(make_mla_prefill_request(192, 128, "float32"), framework="torch", device=device, **how)


def diffusion(device=CPU, **how):
    return select_diffusion(make_diffusion_request(64, "float32"), device=device, **how)


#: Registry -> (how a choice is made, its variable, a name that it alone has, how a backend of one's own gets in).
REGISTRIES = {
    AttentionBackendEnum: (attention, "ATTN_BACKEND", "CPU_ATTN", register_backend),
    MLAPrefillBackendEnum: (mla_prefill, "ATTN_MLA_PREFILL_BACKEND", "TRTLLM_RAGGED", register_mla_prefill_backend),
    DiffusionAttentionBackendEnum: (diffusion, "ATTN_DIFFUSION_BACKEND", "SAGE_ATTN", register_diffusion_backend),
}
each = pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.__name__)


@each
@pytest.mark.parametrize("own", REGISTRIES, ids=lambda registry: registry.__name__)
def test_a_disabled_name_of_any_registry_is_taken_by_all_three(registry, own, monkeypatch):
    select, _, _, _ = REGISTRIES[registry]
    name = REGISTRIES[own][2]
    assert [other for other in REGISTRIES if name in other] == [own]
    monkeypatch.setenv("ATTN_DISABLE", name)
    said = {verdict.name: verdict.reasons for verdict in select().trace}
    assert select().winner and (said.get(name, ("disabled by ATTN_DISABLE",)) == ("disabled by ATTN_DISABLE",))


def test_a_name_asks_for_the_same_kernels_under_another_framework():
    gpu, gpu_of_torch = Device("jax", "gpu", "a GPU", "sm_90"), Device("torch", "cuda", "a GPU", "sm_90")
    asked = attention(gpu, backend="TRITON_ATTN")
    assert [verdict.name for verdict in asked.trace] == ["TRITON_ATTN_JAX"] and asked.source == "argument"
    assert [verdict.name for verdict in attention(gpu_of_torch, backend="TRITON_ATTN").trace] == ["TRITON_ATTN"]
    assert [verdict.name for verdict in attention(gpu, backend="FLASH_ATTN").trace] == ["FLASH_ATTN"]


def test_a_backend_of_ones_own_keeps_its_name_under_every_framework():
    class Mine: ...

    member = AttentionBackendEnum.TRITON_ATTN
    assert member.under("jax") is AttentionBackendEnum.TRITON_ATTN_JAX and member.under("torch") is member
    register_backend(member, Mine)
    assert member.under("jax") is member


@each
def test_a_disabled_backend_is_kept_out_of_automatic_choice_only(registry, monkeypatch):
    select, variable, _, _ = REGISTRIES[registry]
    first = select().name
    assert first is not None
    monkeypatch.setenv("ATTN_DISABLE", first)
    without = select()
    assert without.name != first and f"{first}: disabled by ATTN_DISABLE" in without.reasons
    assert select(backend=first).name == first
    monkeypatch.setenv(variable, first)
    assert (select().name, select().source) == (first, variable)


@each
def test_a_disabled_name_that_no_registry_has_is_an_error(registry, monkeypatch):
    monkeypatch.setenv("ATTN_DISABLE", "CPU_ATTN,SAGE_ATN")
    with pytest.raises(ValueError) as caught:
        REGISTRIES[registry][0]()
    said = str(caught.value)
    begin = "ATTN_DISABLE=SAGE_ATN: Unknown backend: 'SAGE_ATN'. Did you mean SAGE_ATTN? Valid options are: FLASH_ATTN, "
    assert said.startswith(begin)
    for name in ("TORCH_MLA", "TRTLLM_RAGGED", "SAGE_ATTN"):
        assert f" {name}," in said
    assert said.count(" TORCH_SDPA,") == 1


@each
def test_a_backend_of_ones_own_can_be_disabled_everywhere(registry, monkeypatch):
    for own, (_, _, _, register) in REGISTRIES.items():
        register(f"MINE_{own.__name__}", "package.module.Mine")
        monkeypatch.setenv("ATTN_DISABLE", f"MINE_{own.__name__}")
        assert REGISTRIES[registry][0]().winner


@each
def test_the_argument_disable_is_about_one_registry(registry):
    select, _, _, _ = REGISTRIES[registry]
    first = select().name
    assert f"{first}: disabled by the caller" in select(disable=[first]).reasons
    for wrong in ("NOPE", *(name for own, (_, _, name, _) in REGISTRIES.items() if own is not registry)):
        with pytest.raises(ValueError, match=f"Unknown {registry.label}: '{wrong}'"):
            select(disable=[wrong])


@each
@pytest.mark.parametrize("way", ["argument", "environment", "item"])
def test_an_unknown_name_is_an_error_with_a_suggestion_and_the_options(registry, way, monkeypatch):
    select, variable, name, _ = REGISTRIES[registry]
    wrong, cited = f"{name.lower()}x", ""
    if way == "environment":
        monkeypatch.setenv(variable, wrong)
        cited = f"{variable}={wrong}: "
    with pytest.raises(ValueError) as caught:
        registry[wrong] if way == "item" else select(backend=wrong if way == "argument" else None)
    options = ", ".join(registry.names())
    assert str(caught.value) == f"{cited}Unknown {registry.label}: '{wrong}'. Did you mean {name}? Valid options are: {options}"


@each
def test_a_variable_of_nothing_but_spaces_is_unset(registry, monkeypatch):
    select, variable, _, _ = REGISTRIES[registry]
    monkeypatch.setenv(variable, "  ")
    assert select().source == "priority"


@each
def test_what_is_no_device_is_an_error(registry):
    with pytest.raises(TypeError, match=r"device='cuda' must be an attn.Device, such as Device\('torch', 'cuda'\)"):
        REGISTRIES[registry][0](device="cuda")


def test_a_diffusion_backend_asked_for_by_name_decides_the_framework():
    """As the attention registry does; a request whose dtype is a string was held against torch and refused."""
    found = select_diffusion(make_diffusion_request(64, "float32"), backend="XLA_ATTN")
    assert found.device.framework == "jax" and found.name == "XLA_ATTN"


def test_vllms_variable_counts_where_ours_is_unset(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", " TORCH_SDPA")
    monkeypatch.setenv("ATTN_BACKEND", " ")
    assert attention().source == "VLLM_ATTENTION_BACKEND"
    monkeypatch.setenv("ATTN_BACKEND", " CPU_ATTN ")
    assert (attention().source, attention().name) == ("ATTN_BACKEND", "CPU_ATTN")


def test_the_caches_key_names_what_a_choice_depends_on(monkeypatch):
    """A warm call looks a plain tuple up: it has to be the named key."""
    monkeypatch.setenv("ATTN_DISABLE", "FLASH_ATTN")
    selector.get_attn_backend(64, "float32", "auto", 16)
    [key] = selector._cache
    assert (key.head_size, key.head_size_type, key.dtype, key.kv_cache_dtype) == (64, int, "float32", "auto")
    assert (key.block_size, key.block_size_type) == (16, int)
    assert (key.is_attention_free, key.is_blocksparse, key.use_mla) == (False, False, False)
    assert key.loaded is not None and key.forced is None and key == key.now()
    assert key.environment == envs.selecting() and b"FLASH_ATTN" in key.environment and not key.measured
    with selector.global_force_attn_backend_context_manager("CPU_ATTN"):
        selector.get_attn_backend(64, "float32", "auto", 16)
    assert {k.forced for k in selector._cache} == {None, AttentionBackendEnum.CPU_ATTN}
