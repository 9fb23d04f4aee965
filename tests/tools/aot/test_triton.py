"""The Triton kernels under ptxas and LLVM, without a GPU: a case of each kernel and vendor a day, under `--full` every value of
every axis and target.

Triton comes from PYTHONPATH or from the environment's folder `compilers` (`make compilers`); without it these are skipped.
"""

import functools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from attn.errors import BackendLoadError
from attn.tools.aot import command as aot
from attn.tools.aot import triton as torch_aot
from tests.levels import seed


@functools.cache
def triton() -> str:
    try:
        return aot.compiler_path("sm_90")
    except BackendLoadError as error:
        pytest.skip(str(error))


def kernels(target):
    return {name for name, kernel in torch_aot.KERNELS.items() if target in (kernel.only_on or (target,))}


#: The architectures that `make test` compiles for: Hopper, which has kernels of its own; a kernel of both NVIDIA's is compiled
#: for one of the two, drawn daily.
NVIDIA, AMD = ("sm_90", "sm_100"), "gfx942"


def smallest(target, kernel):
    """A kernel's three smallest cases, which compile fastest: few elements a program, and few rules."""

    def size(case):
        choice = case.choice
        width = choice.get("head_size", 0) + choice.get("num_heads", 0) + sum(choice.get("sizes", ()))
        slow = sum(value is True for value in choice.values()) + 3 * (choice.get("dtype") == "float32")
        return width * (1 + slow / 3) * (1 + (choice.get("batch") == "mixed")), case.name

    cases = sorted((case for case in aot.cases(target) if case.kernel == kernel and not case.refused), key=size)
    return cases[:3]


def drawn(target, kernel):
    return random.Random(f"{seed()} {target} {kernel}").choice(smallest(target, kernel))


def of_today(target):
    """The kernels that `make test` compiles for a target today."""

    def chosen(kernel):
        return random.Random(f"{seed()} {kernel}").choice([name for name in NVIDIA if kernel in kernels(name)])

    return [kernel for kernel in sorted(kernels(target)) if target == AMD or chosen(kernel) == target]


@pytest.mark.parametrize("target", [*NVIDIA, AMD])
def test_a_case_of_each_kernel_compiles(target):
    check(target, [drawn(target, kernel) for kernel in of_today(target)])


def test_every_kernel_is_compiled_daily():
    assert {kernel for target in NVIDIA for kernel in of_today(target)} == torch_aot.KERNELS.keys()
    assert set(of_today(AMD)) == kernels(AMD)


@pytest.mark.full
@pytest.mark.parametrize("target", [name for name in aot.TARGETS if not name.startswith("tpu-")])
def test_the_subset_of_the_grid_compiles(target):
    cases = [case for case in aot.cases(target) if case.subset]
    assert {case.kernel for case in cases} == kernels(target)
    check(target, cases)


def check(target, cases):
    triton()
    rows = aot.compile_cases(target, cases)
    assert [f"{row.label}: {row.reason}" for row in rows if row.status not in ("compiled", "refused")] == []
    for part in (part for row in rows for part in row.parts):
        assert 0 < part["registers"] <= (255 if target.startswith("sm_") else 512)
        assert part["shared"] <= part["limit"] and part["spills"] >= 0


TOO_MUCH = """
from attn.tools.aot.triton import *
from attn.tools.aot import triton as aot

def measure(*args):
    from attn.kernels import memory

    memory.SHARED_MEMORY["sm_90"] = 4096
    return aot.measure(*args)
"""


def test_shared_memory_beyond_the_architectures_is_a_failure(tmp_path, monkeypatch):
    triton()
    (tmp_path / "small_wing.py").write_text(TOO_MUCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(aot.TARGETS, "sm_90", aot.Target("small_wing", "triton"))
    (row,) = aot.compile_cases("sm_90", smallest("sm_90", "paged_attention")[:1])
    sys.modules.pop("small_wing")
    assert row.status == "failed" and "shared memory" in row.reason and "4096" in row.reason


def test_what_an_architecture_does_not_get_is_refused_with_the_reason():
    refused = {case.choice["kv"]: case.refused for case in aot.cases("sm_120") if case.kernel == "mla_decode" and case.refused}
    assert set(refused) == {"auto"} and "float32 cache" in refused["auto"]
    wide = {"sm_80": {(512, "float32")}, "sm_90": {(512, "float32")}, "gfx942": set()}
    for target, sizes in wide.items():
        assert {(case.choice["head_size"], case.choice["dtype"]) for case in aot.cases(target) if case.refused} == sizes
    assert {case.choice["head_size"] for case in aot.cases("gfx1100") if case.refused and case.kernel != "mla_decode"} == {512}


def test_figures_of_amds_assembly(tmp_path):
    assembly = Path(tmp_path / "x.amdgcn")
    assembly.write_text(".vgpr_count:     172\n  .agpr_count:   32\n .vgpr_spill_count: 5\n.private_segment_fixed_size: 24\n")
    assert {k: v for k, v in torch_aot._amd(str(assembly)).items() if k != "code_kib"} == {
        "registers": 172,
        "spills": 5,
        "stack": 24,
    }


@pytest.mark.full
def test_a_tree_over_wide_heads_is_translated_for_gfx950(tmp_path):
    """Triton 3.6 cannot translate tiles of 32 keys in two stages there ("failed to translate module to LLVM IR")."""
    triton()
    plain = {name: values[0] for name, values in torch_aot.PAGED.items()}
    wide = {**plain, "batch": "mixed", "head_size": 256, "mask": "tree", "dtype": "bfloat16"}
    script = f"""
from attn.tools.aot.command import CompileCase
from attn.tools.aot import triton as aot
assert aot.measure(CompileCase("paged_attention", "wide tree", {wide!r}), "gfx950", "compile", {str(tmp_path)!r})
"""
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), str(aot.compiler_path("gfx950") or ""), os.environ.get("PYTHONPATH", "")]
    )
    env = {**os.environ, **torch_aot.environment("gfx950", "compile", str(tmp_path)), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
