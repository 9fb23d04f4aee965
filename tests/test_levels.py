"""Which tests run at which level: samples by the date, marks, and the files that test what changed."""

from pathlib import Path

import pytest

from tests import levels

CASES = [pytest.param(i, id=f"case {i}", marks=[pytest.mark.xfail] if i == 3 else []) for i in range(20)]


def kept(params: list[object]) -> set[int]:
    return {param.values[0] for param in params if levels.FULL not in param.marks}  # type: ignore[attr-defined]


def test_a_sample_marks_the_rest_and_keeps_ids_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    params = levels.sampled(CASES, 4, "a", lambda param: param.values[0] == 3)
    assert [param.id for param in params] == [param.id for param in CASES]
    assert len(kept(params)) == 5 and 3 in kept(params) and pytest.mark.xfail in params[3].marks
    assert kept(levels.sampled(CASES, 4, "a")) == kept(levels.sampled(CASES, 4, "a"))
    assert kept(levels.sampled(CASES, 99, "a")) == set(range(20))
    month = set()
    for day in range(1, 32):
        monkeypatch.setenv(levels.SEED, f"2026-01-{day:02}")
        month |= kept(levels.sampled(CASES, 4, "a"))
    assert month == set(range(20))


def test_cases_of_one_test_are_a_sample_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.LEVEL, "sample")
    assert len(levels.some(range(20), 4, "a")) == 4 and levels.some(range(20), 0, "a", lambda i: i == 7) == [7]
    monkeypatch.setenv(levels.LEVEL, "full")
    assert levels.some(range(20), 4, "a") == list(range(20))


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("tests/test_selector.py", "tests/test_selector.py"),
        ("tests/test_selector.py", "attn/selector.py"),
        ("tests/torch/backends/test_ragged.py", "attn/torch/backends/_ragged.py"),
        ("tests/integrations/test_transformers.py", "attn/integrations/transformers/packing.py"),
        ("tests/jax/kernels/tpu/test_ragged_paged_attention.py", "attn/jax/kernels/tpu/_plan.py"),
        ("tests/test_levels.py", "tests/levels.py"),
    ],
)
def test_a_file_tests_itself_its_module_and_what_it_imports(file: str, changed: str) -> None:
    assert levels.tests_what(levels.ROOT / file, {changed})


def test_a_file_does_not_test_the_rest() -> None:
    file = levels.ROOT / "tests/test_selector.py"
    assert not levels.tests_what(file, {"README.md", "attn/jax/kernels/xla.py", "tests/test_cli.py"})


def test_changed_files_are_those_since_the_shared_commit() -> None:
    if not (levels.ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert levels.changed_files("HEAD") >= set()
    with pytest.raises(pytest.UsageError, match="--changed no-such-branch: git merge-base"):
        levels.changed_files("no-such-branch")


def test_recorded_seconds_are_of_files_that_exist() -> None:
    assert [file for file in levels.seconds() if not (levels.TESTS / file).is_file()] == []


def test_seconds_are_updated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(levels, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(levels, "seconds", lambda: {"test_levels.py": 3.0, "test_gone.py": 9.0})
    levels.write_seconds({"tests/test_levels.py": 0.2, "tests/test_cli.py": 12.34})
    assert (tmp_path / "seconds.json").read_text() == '{\n "test_cli.py": 12.3\n}\n'
