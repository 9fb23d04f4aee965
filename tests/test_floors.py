"""Which module may import which, the cost of imports, and the pitfalls of packages named torch and jax.

The first half reads the tree with `ast`; the second half asks fresh processes.
"""

import ast
import functools
import importlib
import os
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import attn
from attn.backends.registry import BLOCKSPARSE_PATHS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "attn"
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "triton"}
TREES = ("attn.torch", "attn.jax")
#: Device code and its rules, which Triton compiles without either of them.
DEVICE = "attn.kernels"
#: What nothing else imports, except the command line.
ON_TOP = ("attn.tools", "attn.integrations")
DOORS = ("attn.cli", "attn.__main__", "attn.testing.__main__")

#: Modules of the core by floor; a module imports from its own floor or below. A package stands for what is in it.
FLOORS = [
    ("attn.errors",),
    (
        "attn.dtypes", "attn.envs", "attn.imports", "attn.logger", "attn.distributed", "attn.cache_file", "attn.fields",
        "attn.reference",
    ),
    (
        "attn.capabilities", "attn.backend_enum", "attn.arrays", "attn.arguments", "attn.merge", "attn.progress", "attn.tables",
        "attn.visibility",
    ),
    ("attn.selection",),
    ("attn.backends", "attn.diffusion", "attn.pictures", "attn.serving"),
    ("attn.selector", "attn.recording", "attn.layer", "attn.reports", "attn.testing"),
    ("attn.functional", "attn.weights", "attn.calibration"),
    DOORS,
]  # fmt: skip
#: The ground floor needs the standard library alone (the oracle: NumPy too).
GROUND = FLOORS[0] + FLOORS[1]


class Import(NamedTuple):
    """`module` imports `target` at `line`; `typing_only` under `if TYPE_CHECKING`."""

    module: str
    target: str
    line: int
    typing_only: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in _imports_of(name, ast.parse(path.read_text())))


def _imports_of(name: str, node: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(name, alias.name, child.lineno, typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name}:{child.lineno}: a relative import"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield Import(name, full if full in modules() else str(child.module), child.lineno, typing_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports_of(name, ast.Module(child.body, []), True)
            yield from _imports_of(name, ast.Module(child.orelse, []), typing_only)
        else:
            yield from _imports_of(name, child, typing_only)


def within(name: str, packages: tuple[str, ...] | str) -> bool:
    packages = (packages,) if isinstance(packages, str) else packages
    return any(name == package or name.startswith(package + ".") for package in packages)


def root_of(name: str) -> str:
    return name.partition(".")[0]


def offending(rule) -> list[str]:
    return [f"{i.module}:{i.line} imports {i.target}" for i in imports() if rule(i)]


def in_core(name: str) -> bool:
    return within(name, "attn") and not within(name, (*TREES, *ON_TOP, DEVICE))


def floor_of(name: str) -> int | None:
    if within(name, DOORS):
        return FLOORS.index(DOORS)
    return next((level for level, names in enumerate(FLOORS) if within(name, names)), None)


def test_the_walk_sees_imports_at_any_depth():
    source = """
        import a
        def f():
            from b.c import d
        if TYPE_CHECKING:
            import e
        else:
            import g
        class K:
            def m(self):
                try:
                    import h.i
                except ImportError: ...
    """
    found = list(_imports_of("m", ast.parse(textwrap.dedent(source))))
    assert {(i.target, i.typing_only) for i in found} == {
        ("a", False),
        ("b.c", False),
        ("e", True),
        ("g", False),
        ("h.i", False),
    }
    assert len(imports()) > 100 and len(modules()) > 40


# --- F1 to F4 ------------------------------------------------------------------------------------------------------


def test_f1_the_core_imports_no_framework_at_any_depth():
    assert offending(lambda i: in_core(i.module) and root_of(i.target) in FRAMEWORKS and not i.typing_only) == []


def test_f1_the_core_reaches_the_trees_by_dotted_name_only():
    assert offending(lambda i: in_core(i.module) and within(i.target, (*TREES, DEVICE)) and not i.typing_only) == []


def test_f1_device_code_imports_triton_and_no_other_framework():
    allowed = {"attn", "numpy", "triton"} | sys.stdlib_module_names
    assert offending(lambda i: within(i.module, DEVICE) and root_of(i.target) not in allowed) == []


@pytest.mark.parametrize(("tree", "other"), [TREES, TREES[::-1]])
def test_f2_the_trees_never_import_each_other_nor_each_others_framework(tree, other):
    foreign = {"attn.torch": {"torch", "triton"}, "attn.jax": {"jax", "jaxlib", "flax"}}[other]
    assert offending(lambda i: within(i.module, tree) and (within(i.target, other) or root_of(i.target) in foreign)) == []


KERNELS = (DEVICE, "attn.torch.kernels", "attn.jax.kernels")


@pytest.mark.parametrize("kernels", KERNELS)
def test_f3_kernels_import_nothing_of_attn_but_kernels(kernels):
    """And the formula of what rows see."""
    allowed = (kernels, DEVICE, "attn.visibility")
    assert (
        offending(lambda i: within(i.module, kernels) and root_of(i.target) == "attn" and not within(i.target, allowed)) == []
    )


BACKENDS = tuple(f"{tree}.{place}" for tree in TREES for place in ("backends", "diffusion.backends"))


def test_f3_backends_never_import_one_another():
    """What two of them share lives in a `_file`."""

    def between_backends(i: Import) -> bool:
        shared = i.target.rpartition(".")[2].startswith("_")
        package = i.target in modules() and modules()[i.target].name == "__init__.py"
        return within(i.module, BACKENDS) and within(i.target, BACKENDS) and not shared and not package

    assert offending(between_backends) == []


COMPUTING = (*KERNELS, *BACKENDS, "attn.backends", "attn.diffusion.backends")


def test_f4_what_computes_never_asks_for_the_platform():
    """A class that runs on one platform is chosen, not switched."""
    platforms = ("attn.selection.platforms", *(f"{tree}.platforms" for tree in TREES))
    chooses = ".selector"  # a family's own selector is no kernel's host
    assert (
        offending(lambda i: within(i.module, COMPUTING) and within(i.target, platforms) and not i.module.endswith(chooses))
        == []
    )


#: Where a call begins, and the hooks that may choose: what they choose is kept, so that a call reaches them once at most (on
#: each platform that a dense layer is called on).
FORWARDS = {"forward", "forward_lse", "apply", "__call__", "do_kv_cache_update"}
CHOOSES_ONCE = {"process_weights_after_loading", "follow"}


class Calls(NamedTuple):
    """What a function calls: others of its class or module, by name, and selectors."""

    own: set[str]
    selectors: set[str]


def calls_of(source: str) -> dict[str, Calls]:
    """Every function of a module (methods of one name are one function, as in a class and its subclass)."""
    tree, found = ast.parse(source), dict[str, Calls]()
    chosen_by = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (str(node.module).endswith("selector") and alias.name.startswith(("get_", "select"))) or alias.name == "selector"
    }
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = found.setdefault(function.name, Calls(set(), set()))
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in chosen_by:
                calls.selectors.add(node.id)
            elif isinstance(node, ast.Name):
                calls.own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
                calls.own.add(node.attr)
    return found


def selectors_in_forwards(functions: dict[str, Calls]) -> set[str]:
    """Functions that call a selector, of those that a forward reaches without `CHOOSES_ONCE`."""
    reached, waiting = set[str](), FORWARDS & set(functions)
    while waiting:
        reached |= waiting
        waiting = {name for caller in waiting for name in functions[caller].own & set(functions)} - reached - CHOOSES_ONCE
    return {name for name in reached if functions[name].selectors}


def test_f4_no_forward_calls_a_selector():
    """A choice is made once, and kept: not in every call, or in every trace of one."""
    planted = """
        from attn.backends.mla.prefill.selector import get_mla_prefill_backend as choose

        class K:
            def apply(self): return self._first()
            def _first(self): return self._absorb() + self._second()
            def _second(self): return (lambda: choose("jax"))()
            def _absorb(self): return self.process_weights_after_loading()
            def process_weights_after_loading(self): return self._kept()
            def _kept(self): return choose("jax")
    """
    assert selectors_in_forwards(calls_of(textwrap.dedent(planted))) == {"_second"}
    layers = (
        "attn.layer",
        "attn.diffusion.layer",
        *(f"{tree}.{name}" for tree in TREES for name in ("layer", "diffusion.layer")),
    )
    functions = dict[str, Calls]()
    for name, path in modules().items():
        if within(name, (*COMPUTING, *layers)) and not name.endswith(".selector"):
            for function, calls in calls_of(path.read_text()).items():
                held = functions.setdefault(function, Calls(set(), set()))
                held.own.update(calls.own)
                held.selectors.update(calls.selectors)
    assert any(calls.selectors for calls in functions.values())
    assert selectors_in_forwards(functions) == set()


def test_f4_priority_lists_are_in_the_frameworks_packages():
    for name in ("attn.selection.platforms", "attn.selector", "attn.selection.verdicts"):
        text = modules()[name].read_text()
        assert not [word for word in ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "PALLAS") if f'"{word}"' in text], name


def test_core_modules_import_their_own_floor_or_below():
    unplaced = [name for name in modules() if in_core(name) and name != "attn" and floor_of(name) is None]
    assert unplaced == [], "give each new module of the core a floor"

    def upward(i: Import) -> bool:
        own, other = floor_of(i.module), floor_of(i.target)
        return in_core(i.module) and own is not None and other is not None and other > own

    assert offending(upward) == []


def test_the_documented_rooms_are_the_floors():
    """docs/design.md lists each part once, in an order in which a row imports from itself and the rows above."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("## What happens when")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    named = [f"attn.{name}" for row in rows for name in row]
    parts = {".".join(name.split(".")[:2]) for name in modules()} - {"attn", "attn.__main__"}
    assert len(named) == len(set(named)) and set(named) == parts
    place = {f"attn.{name}": nth for nth, row in enumerate(rows) for name in row}

    def below(i: Import) -> bool:
        own, other = (place.get(".".join(name.split(".")[:2])) for name in (i.module, i.target))
        return None not in (own, other) and other > own and i.module not in DOORS and not i.typing_only

    assert offending(below) == []


def test_the_trees_import_nothing_from_above():
    above = FLOORS[-2] + FLOORS[-1]
    assert offending(lambda i: within(i.module, TREES) and within(i.target, above) and not i.typing_only) == []


def test_an_optimised_backend_never_imports_the_reference():
    assert offending(lambda i: within(i.module, (*KERNELS, *BACKENDS)) and within(i.target, "attn.reference")) == []


#: The conformance suite and its drivers.
TEST_TOOLS = ("attn.testing", *(f"{tree}.{name}" for tree in TREES for name in ("testing", "diffusion.testing")))
TOOLS = ("attn.tools", *TEST_TOOLS)


def test_the_library_never_imports_its_tools():
    """Nor by dotted names, but for the command line's."""
    assert offending(lambda i: within(i.target, TOOLS) and not within(i.module, TOOLS + DOORS) and not i.typing_only) == []
    assert offending(lambda i: within(i.target, "attn.tools") and within(i.module, TEST_TOOLS) and not i.typing_only) == []
    named = []
    for name, path in modules().items():
        if within(name, TOOLS + DOORS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and within(node.value, TOOLS):
                named.append(f"{name}:{node.lineno} names {node.value}")
    assert named == []


def test_nothing_imports_what_stands_on_top():
    allowed = ON_TOP + DOORS
    assert offending(lambda i: within(i.target, ON_TOP) and not within(i.module, allowed)) == []
    assert offending(lambda i: within(i.module, "attn.integrations") and within(i.target, "attn.tools.demo")) == []


def test_the_ground_floor_needs_the_standard_library_alone():
    def third_party(i: Import) -> bool:
        known = sys.stdlib_module_names | {"attn"} | ({"numpy"} if within(i.module, "attn.reference") else set())
        return within(i.module, GROUND) and root_of(i.target) not in known and not i.typing_only

    assert offending(third_party) == []


def test_every_dotted_name_of_ours_in_the_code_leads_somewhere():
    """Modules are connected by strings such as `"attn.torch.arrays.from_foreign"`, which no other test checks."""
    names = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("attn."):
                names.add(node.value)
    planned = set(BLOCKSPARSE_PATHS.values()) | {m.value for registry in registries() for m in registry}
    unknown = []
    for name in sorted(names - planned):
        module = name
        while module and module not in modules():
            module = module.rpartition(".")[0]
        rest = name[len(module) + 1 :] if module != name else ""
        if module == "attn" and rest or rest and rest.partition(".")[0] not in modules()[module].read_text():
            unknown.append(name)
    assert unknown == []


def registries():
    from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from attn.backends.registry import AttentionBackendEnum
    from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum

    return AttentionBackendEnum, MLAPrefillBackendEnum, DiffusionAttentionBackendEnum


# --- the traps -----------------------------------------------------------------------------------------------------


def test_the_face_imports_nothing_and_binds_no_child():
    """`import torch` in a package with a child `torch` works until someone imports the child. A tree's face may import
    `attn.imports`, which loads its names."""
    for package in ("attn", *TREES):
        own = [i for i in imports() if i.module == package and not i.typing_only]
        targets = {i.target for i in own if root_of(i.target) in FRAMEWORKS | {"attn", "numpy"}}
        assert targets <= (set() if package == "attn" else {"attn.imports"}), package
        names = {alias.asname or root_of(alias.name) for alias in bound(modules()[package])}
        assert names & children(package) == set()


def bound(path: Path) -> Iterator[ast.alias]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from node.names


def children(package: str) -> set[str]:
    return {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == package}


@pytest.mark.parametrize("package", ["attn", *TREES])
def test_a_name_of_the_face_is_no_child(package):
    """It would be the function at first and the module ever after, once anybody had imported the module."""
    face = set(__import__(package, fromlist=["_FACE"])._FACE)
    assert face & children(package) == set()


@pytest.mark.parametrize("package", ["attn.torch", "attn.jax", "attn.serving"])
def test_completion_lists_the_public_names(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("name", attn._FACE)
def test_every_name_of_the_face_is_there(name):
    assert getattr(attn, name) is not None and name in dir(attn) and name in attn.__all__


def test_an_unknown_name_of_the_face_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'attn' has no attribute 'nope'"):
        _ = attn.nope


def test_a_long_call_names_its_arguments():
    """A call of nine arguments and more has them by name. Exceptions: what runs on a device, where a state is passed on as it
    is, from a program to its parts; and the programs for TPUs, whose sources are part of their evidence."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.is_relative_to(PACKAGE / "jax" / "kernels" / "tpu"):
            calls = _long_calls(ast.parse(path.read_text(encoding="utf-8")))
            found += [f"{path.relative_to(PACKAGE).as_posix()} calls {name}" for name in calls]
    assert not found


def _long_calls(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and any("jit" in ast.unparse(made) for made in child.decorator_list):
            continue
        if isinstance(child, ast.Call) and len(child.args) >= 9:
            yield ast.unparse(child.func)
        yield from _long_calls(child)


def test_no_file_is_called_like_a_stdlib_module():
    top = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert (top - {"__init__", "__main__"}) & set(sys.stdlib_module_names) == set()


def test_every_package_has_an_init_and_tests_have_none():
    """mypy needs the one; the other would make `tests.torch` shadow torch."""
    without = {path.parent for path in PACKAGE.rglob("*.py")} - {path.parent for path in PACKAGE.rglob("__init__.py")}
    assert without == set()
    tests = ROOT / "tests"
    standins = tests / "standins"  # each folder of it is a root on the import path, as site-packages is
    assert [path for path in tests.rglob("__init__.py") if standins not in path.parents] == []


def test_the_distribution_declares_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


# --- fresh processes -----------------------------------------------------------------------------------------------


def fresh(code: str, *options: str) -> str:
    """What a new interpreter prints that runs `code` from the repository's root."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ATTN_", "VLLM_"))} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CORE = sorted(n for n in modules() if in_core(n) and not within(n, ("attn.reference", "attn.testing", *DOORS)))
LAZY = """
    import os, sys, threading

    class Watched(dict):
        read = []
        def get(self, key, *default):
            self.read.append(key)
            return super().get(key, *default)
        def __getitem__(self, key):
            self.read.append(key)
            return super().__getitem__(key)

    os.environ._data = Watched(os.environ._data)
    opened, asked = [], []
    def audit(event, args):
        if event == "open" and not str(args[0]).endswith((".py", ".pyc")) and ".pyc." not in str(args[0]):
            opened.append(args[0])
        if event.startswith(("socket.", "subprocess.", "os.system", "os.fork")):
            asked.append(event)
    sys.addaudithook(audit)
    before = set(sys.modules)
    for name in {names!r}:
        __import__(name)
    loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
    third = loaded - set(sys.stdlib_module_names) - {{"attn"}}
    assert not third, f"imports {{third}}"
    ours = [key for key in Watched.read if b"ATTN" in key or b"VLLM" in key or b"CUDA" in key]
    assert not ours, f"reads {{ours}}"
    assert not opened and not asked, f"opens {{opened}}, does {{asked}}"
    assert threading.active_count() == 1
    if "logging" in sys.modules:
        assert not sys.modules["logging"].getLogger().handlers
    print(len(set(sys.modules) - before))
"""


def test_import_attn_loads_no_third_party_reads_no_variable_opens_no_file_starts_no_thread():
    assert int(fresh(LAZY.format(names=["attn"]))) < 80


def test_neither_do_all_modules_of_the_core_together():
    """NumPy included: it is needed by the oracle and by functions that make arrays, not by importing."""
    fresh(LAZY.format(names=CORE))


@pytest.mark.parametrize(("tree", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_tree_leaves_the_others_framework_unimported(tree, other):
    """Every module of the tree that this machine can import at all, and a selection on top."""
    pytest.importorskip(tree)
    names = [name for name in modules() if within(name, f"attn.{tree}")]
    code = f"""
        import importlib, sys, warnings
        warnings.simplefilter("ignore")
        refused = []
        for name in {names!r}:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert (error.name or "").partition(".")[0] not in ("attn", {tree!r}), error
                refused.append(name)
        from attn.selector import make_request, select
        select(make_request(64, "float32", None, 16), framework={tree!r})
        assert {tree!r} in sys.modules and {other!r} not in sys.modules
        print(len(refused))
    """
    assert int(fresh(code)) < len(names)


def test_import_attn_is_cheap():
    """Processor time over a bare interpreter, so that a busy machine does not count; usually a fifth of the bound."""
    code = "import time; t = time.process_time(); import attn; print(time.process_time() - t)"
    assert statistics.median(float(fresh(code)) for _ in range(5)) < 0.050


def test_warnings_are_errors_for_the_core_too():
    fresh(f"import importlib\nfor name in {CORE!r}: importlib.import_module(name)", "-W", "error", "-bb")
