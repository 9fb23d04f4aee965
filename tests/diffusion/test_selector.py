"""The diffusion backend selected for a layer, the source of the choice, and the reasons against the others."""

import pytest

from attn.capabilities import Device
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from attn.diffusion.selector import (
    DiffusionAttentionConfig,
    get_diffusion_attn_backend,
    make_diffusion_request,
    select_diffusion,
)
from attn.errors import UnsupportedError
from attn.kernels import hopper
from attn.selection.platforms import platform_for

torch = pytest.importorskip("torch")
H200 = Device("torch", "cuda", "NVIDIA H200", "sm_90")
FLUX = make_diffusion_request(128, "bfloat16", num_heads=24)


def _chosen(**how: object) -> tuple[str | None, str]:
    found = select_diffusion(FLUX, device=H200, **how)  # type: ignore[arg-type]
    return found.name, found.source


def test_without_a_preference_the_platforms_list_is_used(monkeypatch):
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "no Triton")  # whether or not it is installed here
    assert _chosen() == ("CUDNN_ATTN", "priority")
    cpu = select_diffusion(FLUX, device=Device("torch", "cpu", "a CPU"))
    assert (cpu.name, cpu.source) == ("TORCH_SDPA", "priority")


@pytest.mark.parametrize(("off", "first"), [("", "TRITON_ATTN"), ("triton 3.5 has no names", "FLASHINFER_ATTN")])
def test_this_packages_kernel_is_first_on_hopper_where_it_runs(off, first, monkeypatch):
    """The general kernel, which runs instead, is slower than cuDNN's (H200: 441 and 563 TFLOP/s)."""
    monkeypatch.setattr(hopper, "why_off", lambda kernel: off)
    platform = platform_for("torch", "cuda")
    for rows in (None, 200, 4608, 32760):
        names = platform.diffusion_priorities(make_diffusion_request(128, "bfloat16", rows=rows), H200)
        assert names[0] == first and (names.index("TRITON_ATTN") < names.index("CUDNN_ATTN")) == (not off)
        assert names.index("TRITON_ATTN") < names.index("TORCH_SDPA")


@pytest.mark.parametrize(("arch", "first"), [("sm_80", "TORCH_SDPA"), ("sm_90", "TRITON_ATTN"), ("sm_100", "TORCH_SDPA")])
def test_single_rows_are_not_cudnns(arch, first):
    """It builds a plan for each new number of keys, which a decoded token has."""
    platform = platform_for("torch", "cuda")
    device = Device("torch", "cuda", arch=arch)
    orders = [platform.diffusion_priorities(make_diffusion_request(64, "bfloat16", rows=rows), device) for rows in (1, 2)]
    assert orders[0][0] == first != orders[1][0]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ({"role": "audio_to_video"}, "per_role['audio_to_video']"),
        ({"role": "text", "category": "cross"}, "per_category['cross']"),
        ({"role": "cross"}, "per_category['cross']"),
        ({"role": "anything"}, "default"),
    ],
)
def test_role_then_category_then_default(how, source):
    wanted = {"per_role": {"audio_to_video": "TORCH_SDPA"}, "per_category": {"cross": "TORCH_SDPA"}, "default": "TORCH_SDPA"}
    assert _chosen(config=DiffusionAttentionConfig(**wanted), **how) == ("TORCH_SDPA", source)


def test_the_argument_outranks_the_configuration_and_that_the_environment(monkeypatch):
    monkeypatch.setenv("ATTN_DIFFUSION_BACKEND", "CUDNN_ATTN")
    config = DiffusionAttentionConfig(default="TORCH_SDPA")
    assert _chosen() == ("CUDNN_ATTN", "ATTN_DIFFUSION_BACKEND")
    assert _chosen(config=config) == ("TORCH_SDPA", "default")
    assert _chosen(config=config, backend="CUDNN_ATTN") == ("CUDNN_ATTN", "argument")


def test_a_name_is_obeyed_or_refused_never_replaced():
    with pytest.raises(UnsupportedError, match="sageattention is not installed"):
        select_diffusion(FLUX, device=H200, backend="SAGE_ATTN").require()
    with pytest.raises(ValueError, match="Unknown diffusion attention backend: 'SAGE'"):
        select_diffusion(FLUX, device=H200, backend="SAGE")
    with pytest.raises(ValueError, match="ATTN_DIFFUSION_BACKEND|Unknown diffusion attention backend"):
        select_diffusion(FLUX, device=H200, config=DiffusionAttentionConfig(default="NOBODY"))


def test_an_approximate_backend_needs_a_budget():
    exact = str(select_diffusion(FLUX, device=H200))
    assert "relative error 0.05" in exact and "error_budget=0 allows less" in exact
    loose = make_diffusion_request(128, "bfloat16", num_heads=24, error_budget=0.05)
    assert "allows less" not in str(select_diffusion(loose, device=H200, backend="SAGE_ATTN"))
    found = select_diffusion(
        make_diffusion_request(128, "bfloat16", error_budget=0.02), device=H200, backend="TRITON_INT8_ATTN"
    )
    assert found.name is None and any("error_budget=0.02 allows less" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"key_mask": True}, "a mask of keys is not supported"),
        ({"keys": 77}, "keys=77 without causality (supports multiples of 64)"),
        ({"keys": 1, "causal": True}, "keys=1 (supports 2 and more)"),
        ({"rows": 64, "keys": 128, "causal": True}, "causal with rows=64 and keys=128 (supports equally many)"),
    ],
)
def test_limits_of_calls_are_reasons_where_the_call_is_known(more, words):
    def asked(**known: object) -> tuple[str, ...]:
        request = make_diffusion_request(128, "bfloat16", error_budget=0.1, **known)  # type: ignore[arg-type]
        return select_diffusion(request, device=H200, backend="SAGE_ATTN").reasons

    assert words in " ".join(asked(**more))
    assert words not in " ".join(asked())


def test_tables_show_the_limits_and_the_error():
    from attn.reports.report import backends

    table = backends("diffusion")
    assert table["SAGE_ATTN"].limits == (
        "error 0.05",
        "2 keys and more",
        "keys in multiples of 64 without causality",
        "no masks of keys",
        "causal with as many rows as keys",
    )
    assert table["TORCH_SDPA"].limits == () and "lse" in table["TORCH_SDPA"].features
    assert "error 0.035" in table["TRITON_INT8_ATTN"].serves


def test_a_layer_that_excludes_keys_must_declare_it():
    from attn.torch import DiffusionAttention

    assert DiffusionAttention(4, 64, key_mask=True).selection.request.key_mask
    with pytest.raises(UnsupportedError, match="causal layer over padded keys"):
        DiffusionAttention(4, 64, causal=True, key_mask=True)


@pytest.mark.parametrize("budget", [-0.1, 1, True, "some"])
def test_a_budget_is_a_fraction(budget):
    with pytest.raises(ValueError, match="error_budget=.* must be a number of at least 0 and below 1"):
        make_diffusion_request(128, "bfloat16", error_budget=budget)


def test_names_can_be_kept_out(monkeypatch):
    assert select_diffusion(FLUX, device=H200, disable=["CUDNN_ATTN"]).name != "CUDNN_ATTN"
    monkeypatch.setenv("ATTN_DISABLE", "CUDNN_ATTN,CPU_ATTN")  # the second is of another registry
    told = str(select_diffusion(FLUX, device=H200))
    assert "disabled by ATTN_DISABLE" in told


def test_an_unknown_category_is_reported():
    with pytest.raises(ValueError, match="category='both' is unknown; known: self, cross, joint"):
        select_diffusion(FLUX, device=H200, category="both")
    with pytest.raises(ValueError, match="category='both' is unknown"):
        DiffusionAttentionConfig(per_category={"both": "TORCH_SDPA"})


def test_a_backend_of_ones_own_comes_first_by_its_priority():
    from attn.capabilities import Capabilities
    from attn.torch.diffusion.backends.sdpa import SDPABackend

    class Mine(SDPABackend):
        capabilities = Capabilities("torch", ("cpu", "cuda"), ("bfloat16",), priority=1)

    register_diffusion_backend("MINE", Mine)
    assert _chosen() == ("MINE", "priority")
    register_diffusion_backend(DiffusionAttentionBackendEnum.TORCH_SDPA, Mine)
    assert get_diffusion_attn_backend(128, torch.bfloat16, backend="TORCH_SDPA") is Mine
