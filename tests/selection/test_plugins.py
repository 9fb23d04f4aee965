"""Backends from entry points: each loaded separately; a broken one is reported and affects no other."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from importlib import metadata

import pytest

from attn import selector
from attn.backends.registry import AttentionBackendEnum, register_backend
from attn.errors import UnsupportedError
from attn.selection import plugins

WANTED = selector.make_request(64, "float32", None, 16)


class Point:
    """An entry point that loads to whatever a test says; `load` of an exception raises it."""

    def __init__(self, name, what, value=None):
        self.name, self.what, self.value, self.loads = name, what, value or f"{name.lower()}:Backend", 0

    def load(self):
        self.loads += 1
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what() if getattr(self.what, "on_load", False) else self.what


@pytest.fixture
def entry_points(monkeypatch):
    """`entry_points(*points)` makes these all that are installed, in that order."""

    def install(*points):
        def listed(*, group):
            assert group == "attn.backends"
            return list(points)

        monkeypatch.setattr(metadata, "entry_points", listed)
        plugins.forget()

    return install


def problems():
    return {name: report.problem for name, report in plugins.load().items()}


def on_load(function):
    function.on_load = True
    return function


def test_a_class_and_a_function_that_returns_one(entry_points, make_backend):
    first, second = make_backend("FIRST"), make_backend("SECOND")
    entry_points(Point("FIRST", first), Point("SECOND", lambda: second))
    assert problems() == {"FIRST": "", "SECOND": ""}
    assert AttentionBackendEnum["FIRST"].get_class() is first
    assert AttentionBackendEnum["SECOND"].get_class() is second


def test_a_function_may_register_by_itself(entry_points, make_backend):
    def register():
        register_backend("OF_ITS_OWN", make_backend())

    entry_points(Point("HELPER", register))
    assert problems() == {"HELPER": ""}
    assert "OF_ITS_OWN" in AttentionBackendEnum and "HELPER" not in AttentionBackendEnum


BAD = {
    "ImportError": (ImportError("no vendor"), "ImportError: no vendor"),
    "AttributeError": (AttributeError("module 'x' has no attribute 'Backend'"), "AttributeError: module 'x'"),
    "SystemExit": (SystemExit("bye"), "SystemExit: bye"),
    "BaseException": (type("Odd", (BaseException,), {})("odd"), "Odd: odd"),
    "module": (sys, "expected a backend class, got <module 'sys'"),
    "number": (3, "expected a backend class, got 3"),
    "class of another kind": (dict, "dict lacks what every attention backend has: get_name(), get_impl_cls()"),
    "function that returns None": (lambda: None, "returned None and registered nothing"),
    "function that returns a number": (lambda: 3, "expected a backend class, got 3"),
    "function that raises": (lambda: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_plugin_is_named_and_harms_no_other(kind, entry_points, make_backend, platform, caplog):
    what, words = BAD[kind]
    entry_points(Point("A_GOOD", make_backend("A_GOOD")), Point("BAD", what), Point("C_GOOD", make_backend("C_GOOD")))
    assert [name for name, problem in problems().items() if problem] == ["BAD"]
    assert words in plugins.load()["BAD"].problem and "BAD" not in AttentionBackendEnum
    assert selector.select(WANTED).name == "A_GOOD"
    assert [r.levelname for r in caplog.records if "BAD" in r.getMessage()] == ["WARNING"]
    plugins.forget()
    plugins.load()
    assert len([r for r in caplog.records if "is not loaded" in r.getMessage()]) == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_is_no_plugins_business(interrupt, entry_points, make_backend):
    entry_points(Point("A", make_backend("A")), Point("B", interrupt()), Point("C", make_backend("C")))
    with pytest.raises(interrupt):
        plugins.load()
    entry_points(Point("A", make_backend("A")), Point("C", make_backend("C")))
    assert problems() == {"A": "", "C": ""}


def test_names_that_are_taken_are_refused(entry_points, make_backend):
    mine = make_backend("MINE")
    register_backend("MINE", mine)
    entry_points(
        Point("FLASH_ATTN", make_backend("FLASH_ATTN")),
        Point("MINE", make_backend("MINE")),
        Point("TWICE", make_backend("TWICE"), "b_package:Backend"),
        Point("TWICE", make_backend("TWICE"), "a_package:Backend"),
        Point("has-dash", make_backend()),
    )
    found = problems()
    assert found["FLASH_ATTN"] == "FLASH_ATTN is the name of a built-in backend"
    assert found["MINE"] == "MINE is already registered" and AttentionBackendEnum["MINE"].get_class() is mine
    assert found["TWICE"] == "" and found["TWICE (b_package:Backend)"] == "duplicate name: a_package:Backend already has it"
    assert "must be letters, digits and underscores" in found["has-dash"]
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()


def test_order_is_by_name_whatever_the_order_of_installation(entry_points, make_backend, platform):
    names = ["ZED", "ALPHA", "MID"]
    entry_points(*(Point(name, make_backend(name), f"package_{i}:Backend") for i, name in enumerate(names)))
    assert list(plugins.load()) == sorted(names)
    assert [v.name for v in selector.select(WANTED).trace] == sorted(names)


@pytest.mark.parametrize(
    ("allowed", "loaded"),
    [(None, {"A", "B"}), ("", set()), (" ", set()), ("A", {"A"}), (" A , B ", {"A", "B"}), ("NOBODY", set())],
)
def test_the_allow_list(allowed, loaded, entry_points, make_backend, monkeypatch, caplog):
    if allowed is not None:
        monkeypatch.setenv("ATTN_PLUGINS", allowed)
    points = [Point("A", make_backend("A")), Point("B", make_backend("B"))]
    entry_points(*points)
    found = problems()
    assert {name for name, problem in found.items() if not problem} == loaded
    assert {point.name for point in points if point.loads} == loaded
    assert {found[name] for name in set("AB") - loaded} <= {"not in ATTN_PLUGINS"}
    missing = set((allowed or "").replace(" ", "").split(",")) - {"A", "B", ""}
    said = [f"ATTN_PLUGINS lists {name}, which no installed package provides: installed: A, B" for name in missing]
    assert [record.getMessage() for record in caplog.records] == said


def test_a_changed_allow_list_holds_at_the_next_selection(entry_points, make_backend, monkeypatch, platform):
    entry_points(Point("A", make_backend("A")), Point("B", make_backend("B")))
    pick = lambda: selector.get_attn_backend(64, "float32", None, 16, False).get_name()  # noqa: E731
    assert pick() == "A"
    monkeypatch.setenv("ATTN_PLUGINS", "B")
    assert pick() == "B" and "A" not in AttentionBackendEnum
    monkeypatch.setenv("ATTN_PLUGINS", "")
    with pytest.raises(UnsupportedError):
        pick()
    monkeypatch.delenv("ATTN_PLUGINS")
    assert pick() == "A"


def test_a_changed_allow_list_holds_for_functions_that_register_too(entry_points, make_backend, monkeypatch):
    """What a function registered is withdrawn with its entry point, and registered again when this is allowed again."""
    entry_points(Point("HELPER", lambda: register_backend("OF_ITS_OWN", make_backend()) and None))
    assert problems() == {"HELPER": ""} and "OF_ITS_OWN" in AttentionBackendEnum
    monkeypatch.setenv("ATTN_PLUGINS", "")
    assert problems() == {"HELPER": "not in ATTN_PLUGINS"} and "OF_ITS_OWN" not in AttentionBackendEnum
    monkeypatch.delenv("ATTN_PLUGINS")
    assert problems() == {"HELPER": ""} and "OF_ITS_OWN" in AttentionBackendEnum


def test_plugins_load_once(entry_points, make_backend):
    point = Point("ONCE", make_backend("ONCE"))
    entry_points(point)
    for _ in range(3):
        plugins.load()
        selector.backend_name_to_enum("NOPE")
    assert point.loads == 1


def test_a_slow_plugin_is_named(entry_points, make_backend, monkeypatch, caplog):
    monkeypatch.setattr(plugins, "SLOW_SECONDS", 0.01)
    backend = make_backend("SLOW")
    entry_points(Point("SLOW", on_load(lambda: (time.sleep(0.02), backend)[1])), Point("FAST", make_backend("FAST")))
    assert plugins.load()["SLOW"].seconds >= 0.02 and problems() == {"SLOW": "", "FAST": ""}
    assert ["SLOW" in r.getMessage() for r in caplog.records if "to load" in r.getMessage()] == [True]


def test_a_plugin_that_selects_while_it_loads(entry_points, make_backend, platform):
    """It sees what is loaded so far, and loads nothing a second time."""
    seen = []

    @on_load
    def load():
        seen.append(selector.get_attn_backend(64, "float32", None, 16, False).get_name())
        return make_backend("B")

    points = [Point("A", make_backend("A")), Point("B", load), Point("C", make_backend("C", priority=1))]
    entry_points(*points)
    assert selector.get_attn_backend(64, "float32", None, 16, False).get_name() == "C"
    assert seen == ["A"] and [point.loads for point in points] == [1, 1, 1]


def test_a_thread_that_comes_while_plugins_load_waits_for_them(entry_points, make_backend, platform):
    """An answer given halfway would miss the backends that are still to come."""
    loading, go_on, answers = threading.Event(), threading.Event(), []

    @on_load
    def load():
        loading.set()
        go_on.wait(10)
        return make_backend("LATE")

    entry_points(Point("LATE", load))
    pick = lambda: answers.append(selector.select(WANTED, backend="LATE").name)  # noqa: E731
    threads = [threading.Thread(target=pick) for _ in range(2)]
    threads[0].start()
    assert loading.wait(10)
    threads[1].start()
    time.sleep(0.05)
    assert answers == []
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert answers == ["LATE", "LATE"]


def test_selecting_in_two_threads_while_a_plugin_selects_does_not_lock_up(entry_points, make_backend, platform):
    """`select` takes the plugins' lock first, a cold `get_attn_backend` another: no deadlock."""
    loading = threading.Event()

    @on_load
    def load():
        loading.set()
        time.sleep(0.1)
        selector.get_attn_backend(64, "float32", None, 16, False)
        return make_backend("B")

    entry_points(Point("A", make_backend("A")), Point("B", load))
    first = threading.Thread(target=selector.select, args=(WANTED,), daemon=True)
    second = threading.Thread(target=selector.get_attn_backend, args=(64, "float32", None, 16, False), daemon=True)
    first.start()
    assert loading.wait(10)
    second.start()
    for thread in (first, second):
        thread.join(10)
        assert not thread.is_alive()


PACKAGE = {
    "good_attn.py": """
        import attn  # a plugin imports the library that loads it
        from attn.backends.placeholder_attn import PlaceholderAttentionBackend

        class Backend(PlaceholderAttentionBackend):
            name = "GOOD"

        def nothing():
            pass
    """,
    "bad_attn.py": "raise SystemExit('no driver')",
    "attn_extras-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: attn-extras\nVersion: 1.0\n",
    "attn_extras-1.0.dist-info/entry_points.txt": """
        [attn.backends]
        GOOD = good_attn:Backend
        ALSO_GOOD = good_attn:Backend
        BAD = bad_attn:Backend
        NONE = good_attn:nothing
        NO_MODULE = nowhere_attn:Backend
        NO_CLASS = good_attn:Missing
        CPU_ATTN = good_attn:Backend
    """,
}
CHILD = """
    import attn, sys
    assert "good_attn" not in sys.modules, "plugins load at the first selection, not at import"
    from attn import selector
    from attn.selection import plugins
    from attn.backends.registry import AttentionBackendEnum
    found = {name: report.problem.partition(":")[0] for name, report in plugins.load().items()}
    print(sorted(found.items()))
    print(selector.backend_name_to_enum("GOOD").get_class().get_name(), "torch" in sys.modules, "jax" in sys.modules)
"""


def test_an_installed_distribution(tmp_path):
    """The real thing: a dist-info directory on the path of a fresh process."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert dict(eval(first)) == {
        "GOOD": "",
        "ALSO_GOOD": "",
        "BAD": "SystemExit",
        "NONE": "its function returned None and registered nothing",
        "NO_MODULE": "ModuleNotFoundError",
        "NO_CLASS": "AttributeError",
        "CPU_ATTN": "CPU_ATTN is the name of a built-in backend",
    }
    assert second == "GOOD False False"
