"""Which kernels are measured for a case, and what their errors mean."""

from collections.abc import Callable

from attn.tables import WIDTH, header
from attn.tools.bench import BenchCase, BenchRow, Refusal, plan
from attn.tools.bench.rows import COLUMNS

RowsOf = Callable[..., dict[str, BenchRow | Refusal]]


def test_a_backend_that_breaks_its_word_is_wrong_and_a_peer_or_a_late_one_is_not(rows_of: RowsOf) -> None:
    rows = rows_of(CPU_ATTN=1.0, TORCH_SDPA=RuntimeError("no kernel"), sdpa=RuntimeError("no image"))
    assert not rows["TORCH_SDPA"].right and "FAILED: RuntimeError: no kernel" in rows["TORCH_SDPA"].text()
    assert rows["sdpa"].right and rows["CPU_ATTN"].right
    late = rows_of(CPU_ATTN=1.0, TORCH_SDPA=TimeoutError("not ready after 3 s"))["TORCH_SDPA"]
    assert late.right and "not timed: not ready after 3 s" in late.text()
    assert not rows_of(CPU_ATTN=1.0, error=float("nan"))["CPU_ATTN"].right


def test_the_selected_backend_runs_too(rows_of: RowsOf) -> None:
    assert list(rows_of("FLASH_ATTN", CPU_ATTN=1.0)) == ["CPU_ATTN", "FLASH_ATTN:one"]
    assert list(rows_of("TORCH_SDPA", CPU_ATTN=1.0, TORCH_SDPA=2.0)) == ["CPU_ATTN", "TORCH_SDPA"]


def test_other_kernels_are_measured_beside_a_named_backend() -> None:
    case = BenchCase("q4", "4/2", 32, dtype="float32")
    entries = plan(case, "torch", ("sdpa", "flex"), ["sdpa"], named=["TORCH_SDPA"])
    assert [(entry.backend, entry.must, entry.peer) for entry in entries] == [
        ("TORCH_SDPA", True, False),
        ("sdpa", False, True),
    ]
    every = plan(case, "torch", ("sdpa", "flex"), ["all"], ["flex"], named=["TORCH_SDPA"])
    names = [entry.backend for entry in every]
    assert names[0] == "TORCH_SDPA" and names.count("TORCH_SDPA") == 1 and "sdpa" in names and "flex" not in names
    assert [entry.backend for entry in every if entry.chosen] == ["CPU_ATTN"], "the choice is marked where it is measured"


def test_a_row_has_every_column_if_wide_and_else_fits(rows_of: RowsOf) -> None:
    reason = "needs a device of another kind " * 6
    rows = rows_of(CPU_ATTN=12345.6789, TORCH_SDPA=TimeoutError(reason), error=1.0)
    narrow, refused = rows["CPU_ATTN"].text(), rows["TORCH_SDPA"].text()
    assert narrow.endswith("1.0e+00 WRONG eager") and "kernel ms" not in header(COLUMNS)
    assert max(map(len, [header(COLUMNS), narrow, *refused.splitlines()])) <= WIDTH
    assert " ".join(refused.split()) == f"TORCH_SDPA not timed: {reason.strip()}", "wrapped, not cut"
    assert header(COLUMNS, wide=True).split("  ")[-1].strip() == "error remarks" and "kernel ms" in header(COLUMNS, wide=True)
    assert len(rows["CPU_ATTN"].text(wide=True)) > len(narrow) and "\n" not in rows["TORCH_SDPA"].text(wide=True)
