"""Fixtures of all tests: the library's module state as in a new process, minimal backends, and stand-ins for vendors'
packages."""

import contextlib
import ctypes
import gc
import importlib
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn import choice, distributed, envs, imports, logger, plugins, selector
from attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.backends.registry import AttentionBackendEnum
from attn.capabilities import Capabilities, Device, Request
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.platforms import Platform

TESTS = Path(__file__).parent
STANDINS = TESTS / "standins"
REGISTRIES = (AttentionBackendEnum, MLAPrefillBackendEnum, DiffusionAttentionBackendEnum)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back everything that a test may have changed in the library, and hide the caller's environment from it."""
    for name in envs.VARIABLES:
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
    imports._found.clear()
    logger.forget_notices()


#: Files of a minute and more, the longest first: files are dealt to processes whole, and the short ones at the end even it out.
LONGEST = (
    "jax/test_conformance.py", "jax/test_aot.py", "torch/test_interpreted.py", "torch/test_aot.py",
    "jax/kernels/tpu/test_flash_attention.py", "test_conformance.py", "jax/kernels/tpu/test_ragged_paged_attention.py",
    "integrations/transformers/test_ways.py", "bench/test_command.py", "torch/backends/test_flex_attention.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start what takes longest first."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "LONGEST names files that are not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))


_PLENTY = 2 << 30  #: bytes by which a process may grow before it forgets
_kept = [0]  #: bytes that it held when it last forgot


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At a module's end, and wherever it is much, forget the programs that were compiled: kept for the process, the thousands
    that a conformance suite compiles are 10 GB."""
    if nextitem is None or (nextitem.path == item.path and _resident() < _kept[0] + _PLENTY):
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
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
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`standins("fa3", ...)`: these folders of stand-ins can be imported, as if the vendor were installed.

    A stand-in requires what the vendor's kernel requires on a GPU, so rows are aligned on a CPU too.
    """
    before = set(sys.modules)

    def install(*roots: str) -> None:
        monkeypatch.setattr("attn.torch.alignment.VECTOR_DEVICES", ("cuda", "cpu"))
        for root in (".", *roots):
            monkeypatch.syspath_prepend(str((STANDINS / root).resolve()))
        importlib.invalidate_caches()
        imports._found.clear()

    yield install
    for name in set(sys.modules) - before:
        if str(STANDINS) in str(getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")):
            del sys.modules[name]
