"""Which kernels are measured for a case, and what their errors mean."""

from collections.abc import Callable

from attn.bench import Refusal, Row

RowsOf = Callable[..., dict[str, Row | Refusal]]


def test_a_backend_that_breaks_its_word_is_wrong_and_a_peer_or_a_late_one_is_not(rows_of: RowsOf) -> None:
    rows = rows_of(CPU_ATTN=1.0, TORCH_SDPA=RuntimeError("no kernel"), sdpa=RuntimeError("no image"))
    assert not rows["TORCH_SDPA"].right and "FAILED: RuntimeError: no kernel" in str(rows["TORCH_SDPA"])
    assert rows["sdpa"].right and rows["CPU_ATTN"].right
    late = rows_of(CPU_ATTN=1.0, TORCH_SDPA=TimeoutError("not ready after 3 s"))["TORCH_SDPA"]
    assert late.right and "no row: not ready after 3 s" in str(late)
    assert not rows_of(CPU_ATTN=1.0, error=float("nan"))["CPU_ATTN"].right


def test_the_selected_backend_runs_too(rows_of: RowsOf) -> None:
    assert list(rows_of("FLASH_ATTN", CPU_ATTN=1.0)) == ["CPU_ATTN", "FLASH_ATTN:one"]
    assert list(rows_of("TORCH_SDPA", CPU_ATTN=1.0, TORCH_SDPA=2.0)) == ["CPU_ATTN", "TORCH_SDPA"]
