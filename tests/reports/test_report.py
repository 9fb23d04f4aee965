"""The tables and the explanations: complete, derived, and not broken by one bad backend."""

import json
import types

import pytest

import attn
from attn.backends.registry import AttentionBackendEnum, register_backend, registered_backend
from attn.capabilities import Capabilities, Device
from attn.reports import report
from attn.selection import plugins
from attn.selection.verdicts import Selection


def test_every_member_of_the_three_registries_has_a_row():
    table = report.backends()
    listed = {(row.registry, row.name) for row in table}
    for name, registry in report.REGISTRIES.items():
        assert {(name, member.name) for member in registry} <= listed
    assert ("attention", "BLOCKSPARSE") in listed  # the selector's branch, no member
    assert len(table) == len(table.rows)


#: Choices of a machine without a GPU, whatever this one has.
pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.mark.parametrize("registry", report.REGISTRIES)
def test_one_registry(registry):
    assert {row.registry for row in report.backends(registry)} == {registry}


def test_unknown_registry():
    with pytest.raises(ValueError, match="registry='video' is unknown; known: attention, mla_prefill, diffusion"):
        report.backends("video")


def test_the_universal_backends_run_here():
    for name, framework in (("TORCH_SDPA", "torch"), ("XLA_ATTN", "jax")):
        row = report.backends("attention")[name]
        assert (row.verdict, row.framework, row.origin) == ("available", framework, "built-in")
        assert "sinks" in row.features and "lse" in row.features and row.block_sizes
        assert row.serves.startswith("float32") and "head_size any" in row.serves


def test_unimplemented_features_are_reported_as_such():
    path = "attn.torch.backends.of_next_year.Backend"
    with registered_backend(AttentionBackendEnum.IPEX, path):
        row = report.backends("attention")["IPEX"]
    assert (row.verdict, row.built, row.origin) == ("not built yet", False, "overridden")
    assert row.reasons == ("not built yet: attn.torch.backends.of_next_year",)


def test_a_verdict_has_every_reason():
    row = report.BackendRow("attention", "NONE", "", "custom", "torch", ("no GPU", "no package"), None, (), (), "")
    assert row.verdict == "no GPU; no package"


def test_verdicts_carry_the_install_hint_and_the_platform(make_backend):
    register_backend("FAR", make_backend("FAR", platforms=("xpu",), packages=("no_such_vendor",), install="no-such"))
    row = report.backends("attention")["FAR"]
    assert row.reasons == (
        "no_such_vendor is not installed (pip install no-such)",
        "platform=cpu (supports xpu)",
    )
    assert (row.origin, row.framework) == ("custom", "torch")


def test_a_backend_is_judged_on_its_own_frameworks_device(make_backend):
    register_backend("JAXY", make_backend("JAXY", framework="jax", platforms=("cpu", "tpu")))
    assert report.backends("attention")["JAXY"].verdict == "available"


def broken_backends():
    def explode(*_):
        raise RuntimeError("driver on fire")

    record = Capabilities(framework="torch", platforms=("cpu",), dtypes=("float32",))
    yield "NO_SUCH_MODULE", "no_such_module.Backend", "cannot be imported: ModuleNotFoundError"
    yield "NO_CLASS", "json.dumps", "is not a class but"
    yield "NO_BACKEND", type("Thing", (), {}), "Thing lacks what every attention backend has: get_name(), get_impl_cls()"
    methods = {"get_name": staticmethod(str), "get_impl_cls": staticmethod(explode)}
    yield "BAD_RECORD", type("BadRecord", (), {**methods, "capabilities": "everything"}), "broken: AttributeError"
    mars = types.SimpleNamespace(framework="mars", features=())
    yield "OTHER_FRAMEWORK", type("Mars", (), {**methods, "capabilities": mars}), "broken"
    yield (
        "EXPLODING",
        type("Exploding", (), {**methods, "served_features": explode, "capabilities": record}),
        "broken: RuntimeError: driver on fire",
    )


def test_one_broken_backend_breaks_no_other_row():
    before = {row.name: row.verdict for row in report.backends("attention")}
    cases = list(broken_backends())
    for name, target, _ in cases:
        register_backend(name, target)
    table = report.backends("attention")
    for name, _, words in cases:
        assert words in table[name].verdict, name
    assert {name: table[name].verdict for name in before} == before
    for text in (str(table), table._repr_html_(), json.dumps(table.to_dict())):
        assert all(name in text for name, _, _ in cases)


def test_a_framework_without_a_device_is_a_reason(monkeypatch):
    def platform_for(framework):
        raise RuntimeError("no driver") if framework == "torch" else ValueError("")

    monkeypatch.setattr(report, "platform_for", platform_for)
    table = report.backends("attention")
    assert table["TORCH_SDPA"].reasons == ("no driver",) and table["XLA_ATTN"].reasons == ("ValueError",)
    assert table.devices == {"torch": "no driver", "jax": "ValueError"}


@pytest.fixture
def entry_points(monkeypatch):
    """Stands for installed packages: {entry-point name: what it loads to, or the exception it raises}."""

    def install(points):
        class Point:
            def __init__(self, name, target):
                self.name, self.target, self.value = name, target, f"some_package:{name.lower()}"

            def load(self):
                if isinstance(self.target, BaseException):
                    raise self.target
                return self.target

        found = [Point(*point) for point in points.items()]
        monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: found)
        plugins.forget()

    return install


def test_plugins_are_rows_the_failed_ones_too(entry_points, make_backend):
    entry_points({"GOOD": make_backend("GOOD"), "BAD": SystemExit("bye"), "FLASH_ATTN": make_backend()})
    rows = [row for row in report.backends() if row.origin == "plugin"]
    assert {(row.name, row.verdict) for row in rows} == {
        ("GOOD", "available"),
        ("BAD", "plugin not loaded: SystemExit: bye"),
        ("FLASH_ATTN", "plugin not loaded: FLASH_ATTN is the name of a built-in backend"),
    }
    assert report.environment()["plugins"]["BAD"] == "SystemExit: bye"


def test_the_table_as_text_html_and_data():
    table = report.backends("attention")
    line = next(line for line in str(table).splitlines() if line.startswith("  TORCH_SDPA"))
    assert line.split() == ["TORCH_SDPA", "torch", "available"]
    whole, narrow = " ".join(str(report.backends()).split()), str(report.backends()).splitlines()
    assert all(len(line) <= 100 or " " not in line.strip() for line in narrow), "an address is in one line"
    assert all(row.verdict in whole for row in report.backends())
    line = next(line for line in table.text(wide=True).splitlines() if line.startswith("  TORCH_SDPA"))
    assert table["TORCH_SDPA"].serves in line and table["TORCH_SDPA"].evidence in line
    assert "<b>TORCH_SDPA</b>" in table._repr_html_()
    data = json.loads(json.dumps(table.to_dict()))
    sdpa = next(row for row in data["backends"] if row["backend"] == "TORCH_SDPA")
    assert sdpa["available"] and sdpa["capabilities"]["head_sizes"] == ["any"] and "torch" in data["devices"]
    with pytest.raises(KeyError):
        table["NOPE"]


# explain


def test_explain_is_the_selection():
    selection = attn.explain(96, "float32", features=["sinks"], framework="torch")
    assert isinstance(selection, Selection) and selection.winner and selection.source == "priority"
    assert str(selection).startswith(f"{selection.name} for head_size=96 dtype=float32 block_size=16 features={{sinks}}")
    assert selection.to_dict()["request"]["features"] == ["sinks"]


def test_explain_follows_the_dtypes_framework():
    import jax.numpy as jnp
    import torch

    assert attn.explain(64, torch.float32).device.framework == "torch"
    assert attn.explain(64, jnp.float32).device.framework == "jax"
    assert attn.explain(64, jnp.dtype("bfloat16")).request.dtype == "bfloat16"


def test_explain_a_machine_that_is_not_here():
    h100 = Device("torch", "cuda", "NVIDIA H100", "sm_90")
    selection = attn.explain(128, "bfloat16", device=h100)
    assert "on NVIDIA H100 (torch)" in str(selection) and selection.trace[0].name == "TRITON_ATTN"


def test_explain_shows_the_source_of_the_request(monkeypatch):
    assert attn.explain(64, "float32", backend="TORCH_SDPA").source == "argument"
    monkeypatch.setenv("ATTN_BACKEND", "TORCH_SDPA")
    selection = attn.explain(64, "float32")
    assert selection.source == "ATTN_BACKEND" and "requested by ATTN_BACKEND" in str(selection)
    with attn.global_force_attn_backend_context_manager("XLA_ATTN"):
        assert attn.explain(64, "float32").source == "context"


def test_explain_disable_and_mla():
    selection = attn.explain(64, "float32", framework="torch", disable=["TORCH_SDPA"])
    sdpa = next(v for v in selection.trace if v.name == "TORCH_SDPA")
    assert sdpa.reasons == ("disabled by the caller",)
    assert "mla" in attn.explain(576, "bfloat16", use_mla=True, framework="torch").request.features


# the tables


def test_backend_tables_is_the_same_whatever_is_registered(make_backend):
    before = report.backend_tables()
    register_backend("MINE", make_backend("MINE"))
    register_backend(AttentionBackendEnum.FLASH_ATTN, make_backend("FLASH_ATTN"))
    assert report.backend_tables() == before
    rows = [line for line in before.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(registry) for registry in report.REGISTRIES.values()) + 1  # and BLOCKSPARSE
    assert len({line.count("|") for line in before.splitlines() if line.startswith("|")}) == 1


def test_marks():
    begin, end = report.MARKS
    text = report.replace_tables(f"before\n{begin}\nold\n{end}\nafter\n")
    assert text.startswith(f"before\n{begin}\n\n**Attention backends**") and text.endswith(f"{end}\nafter\n")
    assert "old" not in text and report.replace_tables(text) == text
    for bad in ("nothing", begin, f"{end} {begin}"):
        with pytest.raises(ValueError, match="the page must contain <!-- backends:begin -->"):
            report.replace_tables(bad)


def test_environment(monkeypatch):
    monkeypatch.setenv("ATTN_DISABLE", "FLASH_ATTN")
    found = report.environment()
    assert found["attn"] == attn.__version__ and found["variables"] == {"ATTN_DISABLE": "FLASH_ATTN"}
    assert {"torch", "jax"} <= found["versions"].keys() and {"torch", "jax"} == found["devices"].keys()
    json.dumps(found)


def test_a_gpu_without_bfloat16_products_is_told_which_kernel_serves_float16() -> None:
    """TORCH_SDPA is what is left on a T4, and the dtype is why."""
    for assumed, hint in (
        ([], "with dtype=float16 and xformers installed: XFORMERS"),
        (["xformers"], "with dtype=float16: XFORMERS"),
    ):
        selection = attn.explain(128, "bfloat16", device="T4", assume=["triton", *assumed])
        assert selection.name == "TORCH_SDPA" and hint in selection.notes
        assert any("dtype=bfloat16 on sm_75 (supports sm_80+)" in reason for reason in selection.reasons)
    assert not any("dtype=" in note for note in attn.explain(128, "bfloat16", device="A100").notes)
