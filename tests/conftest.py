"""Fixtures of all tests: the library's module state as in a new process, minimal backends, and stand-ins for vendors'
packages."""

import contextlib
import ctypes
import datetime
import gc
import importlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn import distributed, envs, imports, logger, selector
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Capabilities, Device, Request
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.selection import choice, plugins
from attn.selection.platforms import Platform
from tests import levels

TESTS = Path(__file__).parent
STANDINS = TESTS / "standins"
#: Compiled programs and the frameworks' modules are millions of objects that stay. Python looks through them for garbage less
#: often than it would, and not again through those that stayed until a module's end.
RARELY = (20_000, 20, 20)
REGISTRIES = (AttentionBackendEnum, MLAPrefillBackendEnum, DiffusionAttentionBackendEnum)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back everything that a test may have changed in the library, and hide the caller's environment from it."""
    for name in (*envs.VARIABLES, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    tables = [table for registry in REGISTRIES for table in (registry.overrides, registry.customs, registry.objects)]
    before = [dict(table) for table in tables]
    loaded, registered = plugins._loaded, list(plugins._registered)
    yield
    for table, content in zip(tables, before, strict=True):
        if table != content:
            table.clear()
            table.update(content)
    plugins._loaded, plugins._registered[:] = loaded, registered
    selector.global_force_attn_backend(None)
    selector.backend_per_kind(None)
    selector._cache.clear()
    distributed.set_dcp_group(None)
    imports._known.clear()
    logger._seen.clear()
    envs._warned.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case, also those marked `full`")
    parser.addoption("--changed", metavar="BASE", help="run fast files only, and those that test what changed since BASE")
    parser.addoption("--write-seconds", action="store_true", help="write how long each file took to tests/seconds.json")
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="print the N files that took longest")


def pytest_configure(config: pytest.Config) -> None:
    """Set the level and the seed of this run's samples, before worker processes start."""
    os.environ.setdefault(levels.SEED, datetime.date.today().isoformat())
    os.environ[levels.LEVEL] = "full" if config.getoption("full") else "sample"
    gc.set_threshold(*RARELY)


def pytest_report_header(config: pytest.Config) -> str:
    level = "every case" if config.getoption("full") else "a sample of the expensive cases (--full: all)"
    return f"{level}; {levels.SEED}={levels.seed()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """State in a failure which day's sample the case belongs to."""
    report = yield
    if report.failed:
        report.sections.append(("sample", f"{levels.SEED}={levels.seed()} repeats this run's choice of cases"))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the files that took longest, by the wall-clock time of their tests."""
    count, write = config.getoption("slowest_files"), config.getoption("write_seconds")
    if not count and not write:
        return
    seconds, tests = Counter[str](), Counter[str]()
    for report in (
        report for reports in terminalreporter.stats.values() for report in reports if isinstance(report, pytest.TestReport)
    ):
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        tests[file] += report.when == "call"
    if write:
        levels.write_seconds(seconds)
    terminalreporter.section(f"slowest {count} of {len(seconds)} files, {sum(seconds.values()):.0f} s in all")
    for file, total in seconds.most_common(count):
        terminalreporter.write_line(f"{total:7.1f} s {tests[file]:5} tests  {file}")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under --changed, leave out slow files that test nothing that changed."""
    if not (base := config.getoption("changed")) or not collection_path.name.startswith("test_"):
        return None
    if levels.seconds().get(collection_path.relative_to(TESTS).as_posix(), 0.0) < levels.FAST:
        return None
    return None if levels.tests_what(collection_path, levels.changed_files(base)) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --full runs, and start the files that take longest first: files are dealt to processes whole, and
    the short ones at the end even it out."""
    if not config.getoption("full") and (left_out := [item for item in items if item.get_closest_marker("full")]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    seconds = levels.seconds()
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(TESTS).as_posix(), 0.0))


@pytest.fixture(scope="module")
def jax_compiles_fast() -> Iterator[None]:
    """In `make test` XLA optimises little for a CPU, as the programs of most tests run once. Under `--full` it compiles
    as it does for users."""
    if os.environ[levels.LEVEL] == "full" or not imports.installed("jax"):
        yield
        return
    import jax

    from attn.jax.testing import compiling_fast

    with compiling_fast() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        yield


_PLENTY = 2 << 30  #: bytes by which a process may grow before it forgets
_kept = [0]  #: bytes that it held when it last forgot


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At a module's end, and wherever it is much, forget the programs that were compiled: kept for the process, the thousands
    that a conformance suite compiles are 10 GB."""
    yield
    if nextitem is None or (nextitem.path == item.path and _resident() < _kept[0] + _PLENTY):
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed between what is not
    _kept[0] = _resident()


def _resident() -> int:
    """Return the bytes of memory that this process uses; 0 if unknown."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


class FakeImpl(AttentionImpl[AttentionMetadata]):
    """Attention that returns its query."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **kwargs: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return query


@pytest.fixture
def make_backend() -> Callable[..., type[AttentionBackend]]:
    """`make_backend(name, **capabilities)`: a CPU backend class under torch with the given capabilities."""

    def make(name: str = "FAKE", **changes: Any) -> type[AttentionBackend]:
        record = {"framework": "torch", "platforms": ("cpu",), "dtypes": ("float32", "float16", "bfloat16"), **changes}

        class Fake(AttentionBackend):
            impl_cls, metadata_cls, builder_cls = FakeImpl, AttentionMetadata, None
            capabilities = Capabilities(**record)
            get_kv_cache_shape = staticmethod(lambda *shape: shape)

        Fake.name, Fake.__name__ = name, f"Fake_{name}"
        return Fake

    return make


class FakePlatform(Platform):
    """A CPU whose priority list is whatever a test sets."""

    def __init__(self, framework: str, names: tuple[str, ...] = ()) -> None:
        self.framework, self.name, self.names, self.asked = framework, "cpu", names, 0

    def device(self) -> Device:
        return Device(self.framework, "cpu", "test CPU", "x86_64")

    def priorities(self, request: Request, device: Device) -> tuple[str, ...]:
        self.asked += 1
        return self.names


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> FakePlatform:
    """The torch framework's platform, replaced; its `names` are the priority list. jax's is empty."""
    fakes = {"torch": FakePlatform("torch"), "jax": FakePlatform("jax")}
    for module in (choice, selector):
        monkeypatch.setattr(module, "default_framework", lambda: "torch")
        monkeypatch.setattr(module, "platform_for", lambda framework, name=None: fakes[framework])
    return fakes["torch"]


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's selection finds a GPU on this machine. There is none: tensors are on the host."""
    from tests.testing import gpu_here

    gpu_here.patch(monkeypatch.setattr)
    yield
    gpu_here.forget()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's selection finds the CPU alone, and so does what looks for a GPU to measure on, whatever this machine has."""
    if not imports.installed("torch"):
        yield
        return
    import torch

    from tests.testing import gpu_here

    gpu_here.forget()
    monkeypatch.setattr("attn.torch.platforms._present_platform", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    gpu_here.forget()


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`standins("fa3", ...)`: these folders of stand-ins can be imported, as if the vendor were installed.

    A stand-in requires what the vendor's kernel requires on a GPU, so rows are aligned on a CPU too. It computes on the
    host, also of a machine with a GPU.
    """
    before = set(sys.modules)

    def install(*roots: str) -> None:
        monkeypatch.setattr("attn.torch.alignment.VECTOR_DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr("attn.torch.diffusion.testing._device", lambda backend: "cpu")
        for root in (".", *roots):
            monkeypatch.syspath_prepend(str((STANDINS / root).resolve()))
        importlib.invalidate_caches()
        imports._known.clear()

    yield install
    for name in set(sys.modules) - before:
        if str(STANDINS) in str(getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")):
            del sys.modules[name]
