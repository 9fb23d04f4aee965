"""Other machines: their names and generations, the assumptions about them, and hints (about 2 s)."""

import json
from types import SimpleNamespace

import pytest

import attn
from attn import imports
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device, arch_matches
from attn.imports import assumed, assuming, installed
from attn.reports import machines, report
from attn.reports.machines import PACKAGES, check_arch, device_named, modules_of
from attn.reports.report import REGISTRIES
from attn.tools.aot import command as aot

pytest.importorskip("torch")

# names


#: Choices of a machine without a GPU, whatever this one has.
pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.mark.parametrize(
    ("name", "framework", "device"),
    [
        ("H100", None, Device("torch", "cuda", "NVIDIA H100", "sm_90")),
        ("nvidia h100", "torch", Device("torch", "cuda", "NVIDIA H100", "sm_90")),
        ("H100", "jax", Device("jax", "gpu", "NVIDIA H100", "sm_90")),
        ("rtx-4090", None, Device("torch", "cuda", "NVIDIA RTX 4090", "sm_89")),
        ("mi300x", None, Device("torch", "rocm", "AMD MI300X", "gfx942")),
        ("TPU v6e", None, Device("jax", "tpu", "TPU v6e", "v6e")),
        ("Trillium", None, Device("jax", "tpu", "TPU Trillium", "v6e")),
        ("sm_120", None, Device("torch", "cuda", "NVIDIA sm_120", "sm_120")),
        ("gfx950", None, Device("torch", "rocm", "AMD gfx950", "gfx950")),
        ("aarch64", None, Device("torch", "cpu", "aarch64", "aarch64")),
        # as their drivers print them
        ("NVIDIA H100 80GB HBM3", None, Device("torch", "cuda", "NVIDIA H100", "sm_90")),
        ("NVIDIA H100 PCIe", None, Device("torch", "cuda", "NVIDIA H100", "sm_90")),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, Device("torch", "cuda", "NVIDIA H100", "sm_90")),
        ("NVIDIA GH200 480GB", "jax", Device("jax", "gpu", "NVIDIA GH200", "sm_90")),
        ("NVIDIA A100-SXM4-80GB", None, Device("torch", "cuda", "NVIDIA A100", "sm_80")),
        ("NVIDIA A100-PCIE-40GB", None, Device("torch", "cuda", "NVIDIA A100", "sm_80")),
        ("NVIDIA GeForce RTX 4090", None, Device("torch", "cuda", "NVIDIA RTX 4090", "sm_89")),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, Device("torch", "cuda", "NVIDIA RTX 4090", "sm_89")),
        ("NVIDIA RTX 6000 Ada Generation", None, Device("torch", "cuda", "NVIDIA RTX 6000 Ada", "sm_89")),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None, Device("torch", "cuda", "NVIDIA RTX PRO 6000", "sm_120")),
        ("Tesla T4", None, Device("torch", "cuda", "NVIDIA T4", "sm_75")),
        ("Tesla V100-SXM2-16GB", None, Device("torch", "cuda", "NVIDIA V100", "sm_70")),
        ("AMD Instinct MI300X", None, Device("torch", "rocm", "AMD MI300X", "gfx942")),
        ("AMD Radeon RX 7900 XTX", None, Device("torch", "rocm", "AMD RX 7900 XTX", "gfx1100")),
        ("Intel(R) Data Center GPU Max 1550", None, Device("torch", "xpu", "Intel Data Center GPU Max 1550", "")),
        ("Intel(R) Arc(TM) B580 Graphics", None, Device("torch", "xpu", "Intel Arc B580", "")),
        ("TPU v5 lite", None, Device("jax", "tpu", "TPU v5e", "v5e")),
        ("TPU v5", None, Device("jax", "tpu", "TPU v5p", "v5p")),
        ("TPU v6 lite", None, Device("jax", "tpu", "TPU v6e", "v6e")),
        ("TPU7x", None, Device("jax", "tpu", "TPU v7x", "v7x")),
    ],
)
def test_a_device_by_the_name_that_people_use(name, framework, device):
    assert device_named(name, framework) == device


@pytest.mark.parametrize(
    ("name", "framework", "words"),
    [
        ("H1000", None, "Unknown device: 'H1000'. Did you mean H100? Valid options are: V100"),
        ("", None, "Unknown device: ''. Valid options are"),
        ("NVIDIA", None, "Unknown device: 'NVIDIA'"),
        ("NVIDIA H100 and more", None, "Unknown device: 'NVIDIA H100 and more'"),
        ("v6e", "torch", "device 'v6e' is not supported by torch"),
    ],
)
def test_a_name_of_no_device(name, framework, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        device_named(name, framework)


def test_a_device_is_itself_by_its_product_and_by_its_drivers_name(monkeypatch):
    here = Device("torch", "cuda", "NVIDIA H100 80GB HBM3", "sm_90")
    platform = SimpleNamespace(device=lambda: here)
    monkeypatch.setattr(report, "platform_for", lambda *_: platform)
    for name, elsewhere in (("H100", False), ("NVIDIA H100 80GB HBM3", False), ("H200", True), ("A100", True)):
        with report.assumed_machine(name, "torch", None) as (_, other, taken):
            assert other == elsewhere and taken == ["triton"] * elsewhere
    model = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1}
    times = [attn.explain_model(model, device=device).ceilings for device in (here, "H100")]
    assert times[0] == times[1] == machines.CEILINGS["NVIDIA H100"]
    assert machines.product_of("x86_64 CPU") == "x86_64 CPU"


def test_jaxs_names_of_tpus_are_known():
    from attn.jax.platforms import TPU_KINDS

    assert {kind: device_named(kind).arch for kind in TPU_KINDS} == TPU_KINDS


def test_generations_are_those_that_records_targets_and_platforms_speak_of():
    from attn.jax.platforms import TPU_KINDS

    known = {
        platform: [a for p, archs in machines._PRODUCTS.items() if platform in p[:2] for a in archs]
        for platform in ("cuda", "rocm", "tpu", "gpu", "cpu")
    }
    assert set(TPU_KINDS.values()) == set(known["tpu"])
    for target in aot.TARGETS:
        assert target.removeprefix("tpu-") in known["cuda"] + known["rocm"] + known["tpu"], target
    for registry in REGISTRIES.values():
        for member in registry:
            for platform, rules in getattr(getattr(member.candidate().backend, "capabilities", None), "archs", ()):
                for rule in rules:
                    assert any(arch_matches(arch, rule) for arch in known[platform]), (member, rule)


def test_an_arch_is_checked():
    assert check_arch("cuda", "sm_90") == "sm_90" and check_arch("gpu", "gfx942") == "gfx942"
    for platform, arch in (("cuda", "sm_999"), ("cuda", "gfx942"), ("tpu", "v9")):
        with pytest.raises(ValueError, match=f"Unknown arch of {platform}: '{arch}'"):
            check_arch(platform, arch)
    with pytest.raises(ValueError, match="arch='sm_90': the devices of xpu have no architectures here"):
        check_arch("xpu", "sm_90")


# packages


def test_every_package_that_a_backend_looks_for_has_a_name_to_assume_it_by():
    from attn.torch.backends._flash_providers import PROVIDERS

    wanted = {provider.module for provider in PROVIDERS} - {"torch.nn.attention.varlen"}
    for registry in REGISTRIES.values():
        for member in registry:
            packages = getattr(getattr(member.candidate().backend, "capabilities", None), "packages", ())
            wanted |= {module for package in packages for module in package.split("|")}
    with assuming([module for modules in PACKAGES.values() for module in modules]):
        assert [module for module in sorted(wanted) if not installed(module)] == []


@pytest.mark.parametrize(
    ("name", "modules"),
    [("flashinfer", ["flashinfer"]), ("flash_attn", ["flash_attn.flash_attn_interface"]), ("FLASH-MLA", ["flash_mla"])],
)
def test_packages_by_any_of_their_names(name, modules):
    assert modules_of([name]) == modules


def test_a_package_that_no_backend_uses_is_an_error():
    with pytest.raises(ValueError, match=r"Unknown package: 'flashinfre'. Did you mean flashinfer-python\? Valid options"):
        modules_of(["triton", "flashinfre"])
    with pytest.raises(ValueError, match="Unknown package: 'flash'"):  # the beginning of five of them
        modules_of(["flash"])


def test_an_assumption_ends_with_its_block():
    assert installed("json") and not installed("no_such_vendor")
    with assuming(["no_such_vendor"]):
        assert installed("no_such_vendor.part") and assumed("no_such_vendor") and not installed("json")
        assert installed("torch") and not assumed("torch")  # the framework's own code answers
        with assuming(["another"], beside=True):
            assert installed("another") and installed("no_such_vendor") and not installed("json")
    with assuming(["no_such_vendor"], beside=True):
        assert installed("json") and not assumed("json") and not installed("no_such_vendors")
    assert installed("json") and not installed("no_such_vendor") and imports._assumption.get() is None


# explanations

ASK = (128, "bfloat16")


@pytest.fixture(params=[True, False], ids=["triton here", "no triton here"])
def triton_here(request, monkeypatch):
    """What is installed on this host must not matter."""
    monkeypatch.setattr(imports, "_known", {"triton"} if request.param else set())


def test_an_h100_is_answered_for_as_one_with_what_torch_brings(triton_here):
    for device in ("H100", Device("torch", "cuda", "NVIDIA H100", "sm_90")):
        found = attn.explain(*ASK, device=device)
        assert found.name == "TRITON_ATTN" and str(found.device) == "NVIDIA H100 (torch)"
        assert found.notes[0].startswith("assumed to be installed: torch, triton, which the framework's wheel installs")


def test_packages_that_are_named_count_and_others_do_not(triton_here):
    found = attn.explain(*ASK, device="A100", assume=["flashinfer", "flash-attn"], block_size=256)
    assert found.name == "FLASH_ATTN" and found.trace[1].name == "FLASHINFER" and found.trace[1].ok
    assert found.notes == ("assumed to be installed: torch, triton, flashinfer, flash-attn",)
    xformers = next(verdict for verdict in found.trace if verdict.name == "XFORMERS")
    assert xformers.reasons == ("xformers is not installed (pip install xformers)",)


def test_notes_state_what_would_change_the_result(triton_here):
    found = attn.explain(*ASK, device="A100")
    assert found.name == "TRITON_ATTN"
    rules = AttentionBackendEnum.TRITON_ATTN.rules(found.device)
    assert found.notes[1:] == (
        *rules,
        "with block_size=256, or with vllm installed: FLASH_ATTN",
        "with flashinfer-python installed: FLASHINFER",
    )
    assert attn.explain(*ASK, device="A100", block_size=256).name == "FLASH_ATTN"
    assert attn.explain(*ASK, device="A100", assume=["vllm"]).name == "FLASH_ATTN"
    assert attn.explain(*ASK, device="A100", assume=["flashinfer-python"]).name == "FLASHINFER"
    without = attn.explain(*ASK, device="A100", disable=["FLASHINFER"]).notes
    assert not any("FLASHINFER" in note for note in without[1:]), "a backend that was ruled out is no hint"
    assert attn.explain(*ASK, device="A100", backend="TRITON_ATTN").notes[1:] == rules


@pytest.mark.parametrize(("device", "platform"), [(None, "cuda"), ("MI300X", "rocm")])
def test_a_head_size_that_no_accelerators_kernel_takes(device, platform):
    [hint] = [note for note in attn.explain(7, "float32", framework="torch", device=device).notes if "head_size" in note]
    assert hint.startswith(f"no kernel for {platform} supports head_size=7 (") and "TRITON_ATTN" in hint
    assert not any("head_size" in note for note in attn.explain(64, "float32", framework="torch", device=device).notes)


def test_notes_are_in_every_form_of_the_answer():
    found = attn.explain(*ASK, device="A100")
    assert all(note in str(found) and note in json.loads(json.dumps(found.to_dict()))["notes"] for note in found.notes)
    assert "block_size=256" in found._repr_html_()


def test_an_assumption_about_the_machine_that_is_here():
    found = attn.explain(64, "float32", framework="torch", assume=["intel-extension-for-pytorch"])
    assert found.notes[0] == "assumed in addition to what is installed: intel-extension-for-pytorch"
    assert next(verdict for verdict in found.trace if verdict.name == "IPEX").ok


def test_without_a_device_what_is_installed_here_counts():
    assert attn.explain(64, "float32", framework="torch").notes == ()


# faster paths that are off


@pytest.fixture
def slow(monkeypatch):
    from attn.torch.backends.cpu_attn import CPUAttentionBackend

    monkeypatch.setattr(CPUAttentionBackend, "off_paths", classmethod(lambda cls, device=None: ("no fast path: too cold",)))


def test_a_faster_path_that_is_off_is_shown(slow, capsys):
    from attn import cli
    from attn.reports import report

    assert attn.explain(64, "float32", framework="torch").notes == ("no fast path: too cold",)
    assert report.environment()["faster paths that are off"] == {"attention CPU_ATTN": "no fast path: too cold"}
    assert cli.main(["env"]) == 0 and "  attention CPU_ATTN: no fast path: too cold" in capsys.readouterr().out
    words = "bench q1s16 --framework torch --heads 2/1 --head-size 16 --backend CPU_ATTN"
    assert cli.main(words.split()) == 0 and "CPU_ATTN: no fast path: too cold\n" in capsys.readouterr().out


def test_a_path_that_is_off_on_another_device_is_not_reported(slow):
    """What a machine has installed decides it, and that is only assumed."""
    assert attn.explain(64, "float32", device=Device("torch", "cpu", "another CPU", "aarch64")).notes[1:] == ()


def test_a_broken_backends_word_does_not_bring_the_report_down(monkeypatch):
    from attn.reports import report
    from attn.torch.backends.cpu_attn import CPUAttentionBackend

    def broken(device=None):
        raise RuntimeError("driver on fire")

    monkeypatch.setattr(CPUAttentionBackend, "off_paths", broken)
    told = report.environment()["faster paths that are off"]
    assert told == {"attention CPU_ATTN": "broken: RuntimeError: driver on fire"}


def test_paths_that_are_off_have_reasons():
    for registry in REGISTRIES.values():
        for member in registry:
            assert all(isinstance(sentence, str) and len(sentence) > 20 for sentence in member.off_paths()), member


def test_cpu_is_the_one_of_this_machine(monkeypatch):
    monkeypatch.setattr("attn.reports.machines.machine", lambda: "aarch64")
    assert device_named("CPU") == device_named("aarch64")
