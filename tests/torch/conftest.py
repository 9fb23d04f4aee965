"""Stand-ins on the import path, and nothing of what they bring left behind."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn import imports

STANDINS = Path(__file__).parents[1] / "standins"


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`standins("fa3", ...)`: these folders of stand-ins can be imported, as if the vendor were installed."""
    before = set(sys.modules)

    def install(*roots: str) -> None:
        for root in (".", *roots):
            monkeypatch.syspath_prepend(str((STANDINS / root).resolve()))
        importlib.invalidate_caches()
        imports._found.clear()

    yield install
    for name in set(sys.modules) - before:
        if str(STANDINS) in str(getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")):
            del sys.modules[name]
