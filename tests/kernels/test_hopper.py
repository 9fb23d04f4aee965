"""Which Triton the Hopper kernels can be used with: Gluon's names by release, reasons, compilation. Nothing runs here.

Other releases than the tested one lie in `.venv/compilers-<version>` (`make compilers-all`). The newest of them compiles with
the gate (40 s), all of them under TRITONS=all (`make test-compilers`); without any, what needs no Triton takes a second.
"""

import ast
import importlib
import importlib.machinery
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Device
from attn.errors import BackendLoadError
from attn.kernels import hopper
from attn.tools.aot import command as aot
from attn.torch.backends.blocksparse_attn import BlocksparseFlashAttentionBackend
from attn.torch.diffusion.backends.triton_attn import TritonAttentionBackend as Dense

VERSIONS = ("3.7.1", "3.8.0", "3.9.0")
FOLDERS = {version: Path(sys.prefix) / f"compilers-{version}" for version in VERSIONS}
NEWEST = max((v for v in VERSIONS if (FOLDERS[v] / "triton").is_dir()), default="")
H200, A100 = Device("torch", "cuda", "H200", "sm_90"), Device("torch", "cuda", "A100", "sm_80")
MI300 = Device("torch", "rocm", "MI300X", "gfx942")


# --- names, under a Gluon made of nothing ---------------------------------------------------------------------------


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs): ...
def older_warp_specialize(default_args, default_partition, worker_args, worker_partitions): ...
def bar(mbarrier, phase, count): ...
def load(smem, pointer, mask, increment_count): ...
def mma(use_acc, is_async, num_outstanding, deps): ...
def described(shape, strides, block_shape, layout, rank): ...


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a Triton of given names in the place of the installed one."""

    def install(version: str, **language: Any) -> ModuleType:
        names = ["", ".experimental", ".experimental.gluon", ".experimental.gluon.language", ".experimental.gluon.nvidia"]
        names += [".experimental.gluon.nvidia.hopper", *(f"{names[3]}{x}" for x in (".nvidia", ".nvidia.hopper"))]
        modules = {f"triton{name}": ModuleType(f"triton{name}") for name in names}
        for name, module in modules.items():
            module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(modules[parent], last, module)
        source = Path(hopper.__file__).with_name("gluon.py").read_text()
        known = source.partition('NAMES = """')[2].partition('"""')[0].split()
        gl, there = modules["triton" + names[3]], modules["triton" + names[-1]]
        vars(modules["triton"])["__version__"] = version
        vars(gl).update(
            dict.fromkeys(known), NVMMASharedLayout=described, warp_specialize=warp_specialize, barrier="barrier",
            shared_memory_descriptor=type("Memory", (), {"reinterpret": "reinterpret"}),
        )  # fmt: skip
        vars(gl).update(language)
        part = {x: ModuleType(x) for x in ("async_copy", "mbarrier", "tma")}
        vars(part["async_copy"]).update(async_load=load, async_copy_global_to_shared="raises", mbarrier_arrive=load)
        vars(part["mbarrier"]).update(dict.fromkeys(("arrive", "expect", "init", "wait", "MBarrierLayout"), bar))
        vars(part["tma"]).update(async_load="box", async_copy_global_to_shared="raises")
        vars(there).update(part, fence_async_shared=None, warpgroup_mma=mma, warpgroup_mma_wait=mma)
        vars(modules["triton" + names[5]])["TensorDescriptor"] = described
        return part["tma"]

    monkeypatch.delitem(sys.modules, "attn.kernels.gluon", raising=False)
    monkeypatch.delattr("attn.kernels.gluon", raising=False)
    hopper._lacking.cache_clear()
    yield install
    hopper._lacking.cache_clear()
    sys.modules.pop("attn.kernels.gluon", None)


def test_the_newest_of_two_names_is_taken(gluon):
    """A removed name stays for a release as a function that only raises."""
    gluon("3.9.0")
    assert hopper.why_off("hopper_prefill") == ""
    layer = importlib.import_module("attn.kernels.gluon")
    assert (layer.load_box, layer.copy_rows, layer.barrier, layer.reinterpret) == ("box", load, "barrier", "reinterpret")


def test_what_a_release_lacks_is_the_reason(gluon):
    gluon("3.5.1", warp_specialize=older_warp_specialize)
    assert hopper.why_off("hopper_mla") == (
        "triton 3.5.1 has no gluon.language.warp_specialize(functions_and_args, worker_num_warps, worker_num_regs) "
        "(needs triton 3.6 to 3.9)"
    )


@pytest.mark.parametrize("name", ["async_load", "language"])
def test_a_release_with_other_names_is_off_and_nothing_raises(gluon, monkeypatch, name):
    tma = gluon("3.10.0")
    if name == "language":
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language", None)
        monkeypatch.delattr("triton.experimental.gluon.language")
    else:
        del tma.async_load, tma.async_copy_global_to_shared
    why = hopper.why_off("hopper_prefill")
    assert why.startswith("Gluon of triton 3.10.0 is incompatible: ") and why.endswith("(needs triton 3.6 to 3.9)")


def test_names_are_those_that_the_kernels_use():
    folder = Path(hopper.__file__).parent
    files = [*folder.glob("hopper_*.py"), *(folder.parent / "torch" / "kernels").glob("hopper_*.py")]
    used = {name for file in files for name in re.findall(r"\bgl\.(\w+)", file.read_text())}
    listed = (folder / "gluon.py").read_text().partition('NAMES = """')[2].partition('"""')[0]
    assert used == set(listed.split())


def test_every_launch_asks_for_fused_products_and_sums():
    """Triton 3.9 warns at one that does not say, and 3.10 leaves them off."""
    calls = [
        (file.name, call, ast.unparse(call.func))
        for file in (Path(hopper.__file__).parents[1] / "torch" / "kernels").glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
    ]
    own = [
        (name, call) for name, call, _ in calls if isinstance(call.func, ast.Subscript) and ast.unparse(call).startswith("_")
    ]
    direct = [(name, call) for name, call, function in calls if function == "Prepared"]
    spread = [(name, {ast.unparse(k.value) for k in call.keywords if k.arg is None}) for name, call in (*own, *direct)]
    assert len(own) >= 2 and len(direct) >= 11
    # options made in attn.kernels
    sources = Path(hopper.__file__).parent
    makers = ("launch", "paged_launch", "kv_write", "latent_write", "hopper_prefill_launch", "hopper_mla", "mla_launch", "plan")
    assert all("**FUSED" in (sources / f"{name}.py").read_text() for name in makers)
    made = {
        "rules.prefill",
        "rules.decode(block_r, crowded)",
        "rules.merge(split_kv)",
        "FUSED",
        "rule.options()",
        "launch.options()",
    }
    of_rules = ("constants(", "plan.constants(", "dict(constants)")
    made |= {word for _, words in spread for word in words if word.startswith(of_rules)}
    assert [name for name, words in spread if not words & made] == []


# --- what is said ---------------------------------------------------------------------------------------------------


def test_backends_say_what_is_off_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(hopper, "has_triton", lambda: True)
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "triton 3.5.1 has no x")
    said = {name: AttentionBackendEnum[name].get_class().off_paths for name in ("TRITON_ATTN", "TRITON_MLA")}
    prefill = "Hopper prefill kernel off: triton 3.5.1 has no x; the general kernels are used instead"
    assert said["TRITON_ATTN"](H200) == Dense.off_paths(H200) == (prefill,)
    assert said["TRITON_MLA"](H200) == (prefill.replace("prefill", "MLA decode"),)
    assert BlocksparseFlashAttentionBackend.off_paths(H200) == () == said["TRITON_ATTN"](A100) == said["TRITON_ATTN"](MI300)
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "")
    assert said["TRITON_ATTN"](H200) == () == said["TRITON_MLA"](H200)


def test_explain_says_which_prompts_the_general_kernel_takes_on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "has_triton", lambda: True)
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "")
    rules = AttentionBackendEnum.TRITON_ATTN.get_class().rules
    rule, packed = rules(H200)
    assert packed.startswith("prompts that do not fill the device are split, in one launch with decodes")
    assert rule.startswith("prompts of 16-bit caches take the Hopper prefill kernel, except for ALiBi, a draft tree, ")
    assert "a prefix under a window" in rule and "span" not in rule and "chunk" not in rule
    assert rules(MI300) == rules(None) == BlocksparseFlashAttentionBackend.rules(H200) == ()
    assert rules(A100) == (packed,)
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "triton 3.5.1 has no x")
    assert rules(H200) == (packed,)  # no prompt takes it: `off_paths` says why


def test_a_reason_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(hopper, "why_off", lambda kernel: "triton 3.5.1 has no x")
    hopper._warn.cache_clear()
    assert not hopper.is_on("hopper_mla") and not hopper.is_on("hopper_mla")
    assert caplog.messages == ["hopper_mla is off, general kernels are used instead: triton 3.5.1 has no x"]


# --- compilation ----------------------------------------------------------------------------------------------------

CASES = (("hopper_prefill", "mask=causal"), ("hopper_mla", "num_heads=64"), ("hopper_mla", "indices"))
REGISTERS = 128, 168, 168  #: the first one is of programs of one consumer
PROGRAMS = {"hopper_prefill": "prefill", "hopper_mla": "attend"}


def cases(*wanted: tuple[str, str]) -> list[aot.CompileCase]:
    grid = [case for case in aot.cases("sm_90") if case.subset]
    return [next(case for case in grid if case.kernel == kernel and part in case.name) for kernel, part in wanted]


@pytest.mark.parametrize("version", VERSIONS)
def test_it_compiles_with_other_releases_of_triton(version, monkeypatch):
    """Registers are those that the kernels ask for; shared memory is what they allocate, so no release takes another's."""
    folder = FOLDERS[version]
    if not (folder / "triton").is_dir():
        pytest.skip(f"triton {version} is not in {folder}: make compilers-all")
    if version != NEWEST and os.environ.get("TRITONS") != "all":
        pytest.skip(f"triton {version} is compiled with under TRITONS=all (make test-compilers)")
    monkeypatch.setattr(aot, "compiler_path", lambda target: str(folder))
    rows = aot.compile_cases("sm_90", cases(*CASES))
    assert [f"{row.label}: {row.reason}" for row in rows if row.status != "compiled"] == []
    by_case = {row.case: row for row in rows}
    for case, registers in zip(cases(*CASES), REGISTERS, strict=True):
        row = by_case[case.name]
        part = next(part for part in row.parts if part["name"] == PROGRAMS[row.kernel])
        assert part["registers"] == registers and part["shared"] <= part["limit"]
        assert part["stack"] < (640 if row.kernel == "hopper_prefill" else 256)


BROKEN = """
from attn.tools.aot.triton import *
from attn.tools.aot import triton as aot

class Broken:
    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            raise self.error
        return launch

class General:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: launched.append(self)

launched = []

def measure(case, target, *rest):
    from triton.errors import TritonError
    from attn.torch.kernels import hopper_mla, hopper_prefill, mla_decode, paged_attention

    launched.clear()
    # these compile for seconds
    paged_attention.attention = paged_attention.merge = mla_decode.attend = mla_decode.merge = General()
    hopper_prefill._prefill = Broken(TritonError("no such operation"))
    hopper_mla._attend = Broken(RuntimeError("PassManager::run failed" if "indices" in case.name else "CUDA: out of memory"))
    try:
        return aot.measure(case, target, *rest)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; general kernels: {'launched' if launched else 'none'}") from error
"""


def test_a_kernel_that_does_not_compile_is_off_from_then_on(tmp_path, monkeypatch):
    """The call goes on with the general kernels, and `attn aot` does not take those for the kernel that it was to compile. An
    error that is not the compiler's is raised."""
    try:
        aot.compiler_path("sm_90")
    except BackendLoadError as error:
        pytest.skip(str(error))
    (tmp_path / "broken_wing.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setitem(aot.TARGETS, "sm_90", aot.Target("broken_wing", "triton"))
    wanted = cases(*CASES)
    rows = {row.case: row for row in aot.compile_cases("sm_90", wanted)}
    sys.modules.pop("broken_wing")
    reasons = [rows[case.name].reason for case in wanted]
    assert re.search(
        r"hopper_prefill is off: triton 3\S+ cannot compile it \(TritonError: no such operation\); general kernels: launched",
        reasons[0],
    )
    assert reasons[1] == "RuntimeError: CUDA: out of memory; general kernels: none"
    assert re.search(
        r"hopper_mla is off: triton 3\S+ cannot compile it \(RuntimeError: PassManager::run failed\); general", reasons[2]
    )
