"""User mistakes with a layer, in both frameworks: each is rejected with the library's own error (about 4 s)."""

from pathlib import Path

import pytest

from attn.errors import MetadataError
from attn.testing import candidate_of, run_case, subject_here, wrong
from attn.testing.subject import base_case
from attn.testing.wrong import is_own_error, wrongs_for


@pytest.mark.parametrize("name", ["TORCH_SDPA", "TORCH_MLA", "TORCH_MLA_SPARSE", "XLA_ATTN", "XLA_MLA", "XLA_MLA_SPARSE"])
def test_every_mistake_is_refused(name: str) -> None:
    subject, _ = subject_here(candidate_of(name))
    assert subject is not None
    case = base_case(subject, "mistakes", (1, 4, 2), (20, 4, 2), through="layer", num_heads=4)
    if case.mla:
        case = case.replace(mla=(32, 24, 16, 40), head_size=48, topk=8 if "SPARSE" in name else 0)
    mistakes = wrongs_for(case, subject.capabilities.framework)
    assert len(mistakes) > 45
    backend = candidate_of(name).backend
    found = [violation.what for mistake in mistakes for violation in run_case(backend, case.replace(check=f"wrong={mistake}"))]
    assert not found, "\n".join(found)


def test_only_errors_that_this_package_raises_answer_a_mistake() -> None:
    from attn.arguments import check_scale
    from attn.backends.block_table import slots_of

    def refused(act: object, *arguments: object) -> bool:
        with pytest.raises(Exception) as raised:
            act(*arguments)  # type: ignore[operator]
        return is_own_error(raised.value)

    assert refused(check_scale, "auto", 64)
    assert is_own_error(MetadataError("seq_lens", 0, 1, "2"))
    assert not refused(slots_of, None, None, [1], 2)
    assert not refused(int, "x")


def test_errors_are_told_apart_by_the_package_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the package is installed, and whatever else is beside it."""
    own, driver, other = (
        tmp_path / "testing" / folder for folder in ("attn/layer.py", "attn/torch/testing.py", "attn_other/layer.py")
    )
    for file in (own, driver, other):
        file.parent.mkdir(parents=True)
        file.write_text("def act():\n    raise ValueError('no')\n")
    monkeypatch.setattr(wrong, "_ROOT", own.parent)

    def is_own(file: Path) -> bool:
        names: dict[str, object] = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        with pytest.raises(ValueError) as raised:
            names["act"]()  # type: ignore[operator]
        return is_own_error(raised.value)

    assert [is_own(file) for file in (own, driver, other)] == [True, False, False]
