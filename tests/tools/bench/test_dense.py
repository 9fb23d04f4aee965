"""`attn bench --registry diffusion`: what is timed, what is compared, and what makes it fail. No times are asserted."""

import json

import pytest

from attn.cli import main
from attn.tools.bench import LIMITS, Timing, dense
from attn.tools.bench.dense import SUITE, DenseReport, DenseRow, Shape, parse, rows


def test_shapes():
    assert parse("2x4608x24x128") is SUITE[0] and parse("1x8x2x64") == Shape(1, 8, 2, 64)
    assert SUITE[0].flops == 4 * 2 * 24 * 4608**2 * 128
    for text in ("2x4608x24", "0x1x1x1", "2q4k", ""):
        with pytest.raises(ValueError, match=r"is not <batch>x<rows>x<heads>x<head size>, such as 2x4608x24x128"):
            parse(text)


def timed(name: str, ms: float, error: float = 0.002, **changes: bool) -> DenseRow:
    return DenseRow(SUITE[0], name, timing=Timing(ms, ms, ms, error=error), allowed=0.008, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([timed("NEAR", 0.96), timed("ROUGH", 0.5, exact=False)], []),
        ([timed("FAST", 0.9)], ["2x4608x24x128: FAST takes 0.9000 ms, the choice CHOICE 1.0000"]),
        ([timed("BAD", 2.0, error=0.1)], ["2x4608x24x128 BAD is wrong"]),
        ([timed("NAN", 2.0, error=float("nan"))], ["2x4608x24x128 NAN is wrong"]),
        ([DenseRow(SUITE[0], "BROKEN", raised="RuntimeError: no")], ["FAILED: RuntimeError: no"]),
        ([DenseRow(SUITE[0], "AWAY", refused="flashinfer is not installed")], []),
        ([timed("FAST", 0.1, error=1.0)], ["FAST is wrong"]),
    ],
)
def test_what_makes_a_report_fail(others, words):
    found = DenseReport({}, [timed("CHOICE", 1.0, chosen=True), *others]).problems()
    assert len(found) == len(words) and all(word in problem for word, problem in zip(words, found, strict=True))


class Watch:
    """A framework's side that answers at once; an error in place of a number is raised."""

    def __init__(self, error: float | Exception = 0.001) -> None:
        self.error = error

    def about(self):
        return {"device": "none"}

    def measure(self, shape, dtype, backends):
        return [self.error if isinstance(self.error, Exception) else Timing(1.0, 1.0, 1.0, error=self.error) for _ in backends]


def test_every_backend_is_timed_or_has_a_reason():
    pytest.importorskip("torch")
    found = list(rows(Shape(1, 77, 2, 64), "bfloat16", (), "torch", Watch()))
    assert [(row.backend, row.chosen) for row in found if not row.refused] == [("TORCH_SDPA", True)]
    found = list(rows(Shape(1, 77, 2, 64), "bfloat16", ("SAGE_ATTN",), "torch", Watch()))
    assert [row.backend for row in found] == ["TORCH_SDPA", "SAGE_ATTN"]  # the choice is always there
    assert "keys=77 without causality" in found[1].refused and "sageattention is not installed" in str(found[1])


def test_a_backend_is_allowed_its_dtypes_limit_and_fails_by_what_it_raises():
    pytest.importorskip("torch")
    [row] = rows(Shape(1, 77, 2, 64), "float16", (), "torch", Watch(error=0.9 * LIMITS["float16"]))
    assert row.right and row.allowed == LIMITS["float16"]
    [row] = rows(Shape(1, 77, 2, 64), "float16", (), "torch", Watch(error=1.1 * LIMITS["float16"]))
    assert not row.right
    [row] = rows(Shape(1, 77, 2, 64), "float16", (), "torch", Watch(RuntimeError("no kernel")))
    assert not row.right and row.to_dict()["raised"] == "RuntimeError: no kernel" and "FAILED: RuntimeError" in str(row)


def test_a_file_of_rows_is_judged(tmp_path, capsys):
    """The fastest exact backend is what the choice is held to; an approximate one is named beside it."""
    report = DenseReport({}, [timed("CHOICE", 1.0, chosen=True), timed("ROUGH", 0.5, exact=False)])
    report.rows.append(DenseRow(SUITE[0], "AWAY", refused="platform=cpu (supports cuda)"))
    report.write(str(tmp_path / "rows.json"))
    assert main(["bench", "--judge", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().out
    assert "2x4608x24x128" in said and "AWAY" not in said
    assert "CHOICE is the fastest backend; ROUGH, which cannot be selected, is 2.00 x as fast" in said
    report.rows.append(timed("FAST", 0.8))
    report.write(str(tmp_path / "rows.json"))
    assert main(["bench", "--judge", str(tmp_path / "rows.json")]) == 1
    assert "CHOICE LOSES to FAST, which is 1.25 x as fast" in capsys.readouterr().out


def test_the_command(tmp_path, capsys, monkeypatch, small_gemm):
    pytest.importorskip("torch")
    out = tmp_path / "rows.json"
    code = main(["bench", "--registry", "diffusion", "1x40x2x64", "--json", str(out), "--framework", "torch"])
    told = json.loads(out.read_text())
    row = next(row for row in told["rows"] if row["chosen"])
    assert code == 0 and told["problems"] == [] and row["backend"] == "TORCH_SDPA" and 0 < row["error"] < row["allowed"]
    said = capsys.readouterr().out
    assert "\n*TORCH_SDPA " in said and max(map(len, said.splitlines()[1:])) <= 100
    monkeypatch.setattr(dense, "resolve_obj_by_qualname", lambda path: lambda: Watch(error=1.0))
    assert main(["bench", "--registry", "diffusion", "1x40x2x64", "--framework", "torch"]) == 1
    assert "problem: 1x40x2x64 TORCH_SDPA is wrong" in capsys.readouterr().out
