"""`attn aot` without a compiler: cases in separate processes, their results, and the table (about 15 s)."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import attn
from attn import cli
from attn.capabilities import Feature
from attn.errors import BackendLoadError
from attn.tools.aot import command as aot

TOY = '''
"""A module whose compiler does what a case's name says."""

import os
import sys
import time
from pathlib import Path

from attn.tables import Column
from attn.tools.aot.command import CompileCase

STEPS = ("compile", "estimate")
COLUMNS = (Column("size", key="size"), Column("us", key="us", form=".1f"), Column("floor", key="floor", form=".2f"))
NAMES = ("good", "raises", "aborts", "exits", "sleeps", "hoards", "twice", "blind", "chatty")


def cases(target):
    found = [CompileCase("toy", name, {}, subset=name in ("good", "twice")) for name in NAMES]
    return [*found, CompileCase("toy", "too_wide", {}, refused="width=9 (supports 8)"), CompileCase("other", "good", {})]


def environment(target, step, dump):
    assert Path(dump).is_dir()
    return {"TOY_STEP": step}


def measure(case, target, step, dump):
    assert os.environ["TOY_STEP"] == step and target == "toy"
    name = case.name
    if name == "raises":
        raise ValueError("no such\\n   layout")
    if name == "aborts":
        print("F1121 01:02:03.4 77 x.cc:9] Check failed: too many\\nother words", file=sys.stderr)
        sys.stderr.flush()
        os.abort()
    if name == "exits":
        print("gave up", file=sys.stderr)
        os._exit(7)
    if name == "sleeps":
        time.sleep(60)
    if name == "hoards":
        bytearray(3 << 30)
    if name == "chatty":
        os.write(1, b"{this is no outcome}\\n")
    if step == "estimate":
        if name == "blind":
            raise RuntimeError("the simulator does not follow")
        return {"parts": [{"name": "run", "us": 1.5}], "floor": 0.5, "notes": ["by rule of thumb"]}
    parts = [{"name": "run", "size": 10}, {"name": "merge", "size": 4}]
    return {"parts": parts[: 2 if name == "twice" else 1]}
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Target `toy` whose module is this file; its compiler is `json`, which is always installed."""
    (tmp_path / "toy_module.py").write_text(textwrap.dedent(TOY))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(aot.TARGETS, "toy", aot.Target("toy_module", "json"))
    monkeypatch.setitem(aot.COMPILERS, "json", "json==1")
    yield
    sys.modules.pop("toy_module", None)


def rows(*names, **kwargs):
    wanted = [case for case in aot.cases("toy") if case.kernel == "toy" and case.name in names]
    return {row.case: row for row in aot.compile_cases("toy", wanted, **kwargs)}


def test_every_case_has_its_row_whatever_happens_to_the_others(toy):
    heard = []
    made = rows(
        "good", "raises", "aborts", "exits", "hoards", "twice", "blind", "chatty", "too_wide",
        limits=aot.Limits(seconds=60, memory=2), jobs=2, report=lambda label, outcome: heard.append((label, outcome)),
    )  # fmt: skip
    assert {name: (row.status, row.reason) for name, row in made.items()} == {
        "good": ("compiled", ""),
        "raises": ("failed", "ValueError: no such layout"),
        "aborts": ("failed", "Check failed: too many"),
        "exits": ("failed", "exit code 7: gave up"),
        "hoards": ("failed", "MemoryError:"),
        "twice": ("compiled", ""),
        "blind": ("compiled", ""),
        "chatty": ("compiled", ""),
        "too_wide": ("refused", "width=9 (supports 8)"),
    }
    assert list(made) == ["good", "raises", "aborts", "exits", "hoards", "twice", "blind", "chatty", "too_wide"]
    good, twice, blind = made["good"], made["twice"], made["blind"]
    assert good.parts == [{"name": "run", "size": 10, "us": 1.5}] and good.figures == {"floor": 0.5}
    assert twice.parts == [{"name": "run", "size": 10, "us": 1.5}, {"name": "merge", "size": 4}]
    assert good.notes == ["by rule of thumb"]
    assert blind.parts == [{"name": "run", "size": 10}] and not blind.figures
    assert blind.notes == ["no estimate: RuntimeError: the simulator does not follow"]
    assert len(heard) == 8 + 4 and ("toy/raises", "compile: ValueError: no such layout") in heard


def test_the_estimate_can_be_left_out(toy):
    good = rows("good", compile_only=True)["good"]
    assert good.parts == [{"name": "run", "size": 10}] and not good.figures and not good.notes


def test_a_case_that_does_not_return_is_ended(toy):
    assert rows("sleeps", limits=aot.Limits(seconds=3))["sleeps"].reason == "not done within 3 s"


def test_the_table(toy):
    text = aot.table("toy", list(rows("good", "twice", "blind", "raises", "too_wide").values()))
    assert text.splitlines() == [
        "case               size   us  floor",
        "toy/good             10  1.5   0.50",
        "toy/twice [run]      10  1.5   0.50",
        "toy/twice [merge]     4    -      -",
        "toy/blind            10    -      -",
        "failed: toy/raises: ValueError: no such layout",
        "refused: toy/too_wide: width=9 (supports 8)",
        "by rule of thumb: toy/good and 1 more",
        "no estimate: RuntimeError: the simulator does not follow: toy/blind",
        "toy: 3 compiled, 1 failed, 1 refused",
    ]


# the command


@pytest.fixture
def command(toy, capsys):
    def call(line):
        try:
            code = cli.main(["aot", *line.split()])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_json_and_exit_codes(command, tmp_path):
    path = tmp_path / "out.json"
    code, out, err = command(f"--target toy --subset --json --out {path}")
    data = json.loads(out)
    assert (code, err) == (0, "") and data == json.loads(path.read_text())
    assert (
        data["ok"]
        and data["target"] == "toy"
        and data["compiler"] == "json"
        and [row["case"] for row in data["rows"]] == ["good", "twice"]
    )
    code, out, _ = command("--target toy --case raises")
    assert code == 1 and out.endswith("toy: 0 compiled, 1 failed, 0 refused\n")
    code, out, _ = command("--target toy --case wide")
    assert code == 0 and "refused: toy/too_wide: width=9" in out


def test_list_compiles_nothing(command):
    code, out, _ = command("--target toy --list --kernel other")
    assert (code, out) == (0, "other/good\n")
    code, out, _ = command("--target toy --list --json --case too_wide")
    assert json.loads(out)["cases"][0]["refused"] == "width=9 (supports 8)"


def test_a_list_is_written_too(command, tmp_path):
    path = tmp_path / "list.json"
    code, out, _ = command(f"--target toy --list --kernel other --out {path}")
    assert (code, out) == (0, "other/good\n") and [case["name"] for case in json.loads(path.read_text())["cases"]] == ["good"]


def test_a_file_that_cannot_be_written_is_said_before_hours_of_compiling(command, monkeypatch):
    monkeypatch.setattr(aot, "compile_cases", None)
    code, out, err = command("--target toy --out /nowhere/a.json")
    assert (code, out) == (2, "") and "/nowhere/a.json: No such file or directory" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--target toy --kernel toys", "attn: --kernel toys is unknown; toy has toy, other"),
        ("--target toy --case nothing", "attn: no case of toy matches; list them with attn aot --target toy --list"),
        ("--target toy --jobs 0", "attn: --jobs 0 must be at least 1"),
    ],
)
def test_mistakes_are_reported_in_one_line(command, line, said):
    assert command(line) == (2, "", said + "\n")


def test_a_missing_compiler_is_reported_in_one_line(command, monkeypatch):
    monkeypatch.setitem(aot.TARGETS, "toy", aot.Target("toy_module", "no_such_compiler"))
    monkeypatch.setitem(aot.COMPILERS, "no_such_compiler", "no-such==1")
    code, out, err = command("--target toy")
    assert (code, out) == (2, "") and err.startswith("attn: toy needs no_such_compiler, which is not installed: pip install")
    assert err.count("\n") == 1 and "no-such==1" in err


def test_the_compilers_folder_is_found(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(aot.TARGETS, "toy", aot.Target("toy_module", "apart"))
    monkeypatch.setitem(aot.COMPILERS, "apart", "apart==1")
    with pytest.raises(BackendLoadError, match="toy needs apart"):
        aot.compiler_path("toy")
    (tmp_path / "compilers").mkdir()
    (tmp_path / "compilers" / "apart.py").write_text("")
    assert aot.compiler_path("toy") == str(tmp_path / "compilers")


@pytest.mark.parametrize("distribution", ["apart", "vendors-apart"])
def test_the_compiler_that_is_there_is_the_one_that_is_reported(toy, tmp_path, monkeypatch, distribution):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(aot.TARGETS, "toy", aot.Target("toy_module", "apart"))
    folder = tmp_path / "compilers"
    (folder / "apart").mkdir(parents=True)
    (folder / "apart" / "__init__.py").write_text("")
    assert aot.compiler_here("toy") == "apart"
    made = folder / f"{distribution.replace('-', '_')}-7.5.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 7.5\n")
    (made / "top_level.txt").write_text("apart\n")
    assert aot.compiler_here("toy") == f"{distribution}==7.5"


def test_make_installs_the_compilers_that_are_named():
    makefile = Path(attn.__file__).parents[1] / "Makefile"
    assert all(package in makefile.read_text() for package in aot.COMPILERS.values())


# the grid


AXES = {"batch": ("one", "two", "three"), "heads": ((8, 2), (4, 4)), "dtype": ("a", "b"), "lse": (False, True)}


def test_a_grid_has_every_pair_and_its_subset_every_value():
    cases = aot.grid("k", AXES, refusal=lambda choice: "no" if choice["batch"] == "three" else "")
    pairs = {(a, choice[a], b, choice[b]) for choice in (case.choice for case in cases) for a in AXES for b in AXES}
    assert all((a, x, b, y) in pairs for a in AXES for b in AXES if a != b for x in AXES[a] for y in AXES[b])
    subset = [case.choice for case in cases if case.subset]
    for axis, values in AXES.items():
        assert {choice[axis] for choice in subset} == set(values) - {"three"}
    assert len(subset) < len(cases) and all(case.refused == "no" for case in cases if case.choice["batch"] == "three")
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and "batch=one,dtype=b" in names
    assert [case.choice for case in aot.grid("k", AXES)] == [case.choice for case in aot.grid("k", AXES)]


def test_a_kernel_that_is_compiled_twice_has_two_names():
    parts = [{"name": "attention"}, {"name": "merge"}, {"name": "attention"}]
    assert [part["name"] for part in aot.numbered(parts)] == ["attention 1", "merge", "attention 2"]


def test_a_choice_as_a_request():
    choice = {"heads": (8, 2), "head_size": 96, "dtype": "bfloat16", "kv": "int8", "block_size": 16}
    request = aot.request_of({**choice, "mask": "two-sided", "sinks": True, "lse": False, "batch": "decode"})
    assert request.features == {Feature.NON_CAUSAL, Feature.SLIDING_WINDOW, Feature.TWO_SIDED_WINDOW, Feature.SINKS}
    assert (request.num_heads, request.num_kv_heads, request.kv_cache_dtype) == (8, 2, "int8")


def test_a_lower_limit_of_the_machine_stands() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (8 << 30,) * 2);"
        "from attn.tools.aot.command import _measured; print(_measured('json', 'toy', 'compile', '', '', 12.0, 'toy/good'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert "AttributeError" in done.stdout, done.stderr


def test_unknown_target():
    with pytest.raises(ValueError, match="target='h100' is unknown; known: tpu-v5e"):
        aot.cases("h100")
