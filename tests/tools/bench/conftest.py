"""Rows of a scripted stopwatch."""

from collections.abc import Callable
from typing import Any

import pytest

from attn.errors import UnsupportedError
from attn.tools.bench import BenchCase, BenchRow, Refusal, Timing, measured, plan


class Scripted:
    """A stopwatch that was told what it will read: milliseconds, or what is raised."""

    def __init__(self, **script: Any) -> None:
        self.script = script

    def about(self, dtype: str = "bfloat16") -> dict[str, Any]:
        return {}

    def ceilings(self, dtype: str) -> tuple[float, float]:
        return 1.0, 1.0

    def peers(self) -> list[str]:
        return ["sdpa", "FLASH_ATTN:one"]

    def measure(self, case: BenchCase, name: str, limit: float = 0.0) -> Timing:
        outcome = self.script.get(name, UnsupportedError("not asked"))
        if isinstance(outcome, Exception):
            raise outcome
        return Timing(outcome, 0.99 * outcome, 1.01 * outcome, outcome, 1.0, 1.0, self.script.get("error", 1e-7))


@pytest.fixture
def rows_of() -> Callable[..., dict[str, BenchRow | Refusal]]:
    """`rows_of(asked, NAME=ms or error, ...)`: rows of one case by backend, as if they had been measured."""
    pytest.importorskip("torch")

    def rows(asked: str = "all", **script: Any) -> dict[str, BenchRow | Refusal]:
        bench = Scripted(**script)
        entries = plan(BenchCase("q4", "4/2", 32, dtype="float32"), "torch", bench.peers(), asked.split(","))
        return {row.backend: row for row in measured(entries, {"torch": bench})}

    return rows


@pytest.fixture
def small_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a CPU is measured with small matrices: in bfloat16 a large product takes seconds on some."""
    monkeypatch.setattr(pytest.importorskip("attn.tools.bench.on_torch"), "_CPU_GEMM", 64)
