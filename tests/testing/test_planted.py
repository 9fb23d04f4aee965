"""Defects planted in the library's sources; that each is noticed takes a process for each, under `--full` only."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.testing import planted
from tests.testing.planted import DEFECTS, ROOT, TESTS, Defect, Outcome


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_one_change_that_compiles(defect: Defect) -> None:
    text = (ROOT / "attn" / defect.file).read_text(encoding="utf-8")
    changed = defect.planted(text)
    assert changed != text
    compile(changed, defect.file, "exec")
    assert 1 <= len(defect.tests) <= 4
    assert [file for file in defect.tests if not (TESTS / file).is_file()] == []
    assert defect.why[0].isupper() and defect.why[-1] == "." and len(defect.why) > 20


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(defect.name for defect in DEFECTS).items() if count > 1] == []


def test_text_that_changed_is_named() -> None:
    with pytest.raises(ValueError, match="none: attn/selector.py has 0 times"):
        Defect("none", "selector.py", "not there", "", (), "").planted("x = 1\n")


def test_a_defect_is_planted_in_the_copy_alone(tmp_path: Path) -> None:
    defect = DEFECTS[0]
    before = (ROOT / "attn" / defect.file).read_text(encoding="utf-8")
    planted.copy_tree(tmp_path)
    planted.plant(defect, tmp_path)
    assert (ROOT / "attn" / defect.file).read_text(encoding="utf-8") == before
    assert (tmp_path / "attn" / defect.file).read_text(encoding="utf-8") == defect.planted(before)
    assert (tmp_path / "tests/conftest.py").is_file() and (tmp_path / "pyproject.toml").is_file()


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is noticed is printed first; the status says whether something survived."""
    names = [defect.name for defect in DEFECTS[:3]]
    alive = {names[0]}
    monkeypatch.setattr(
        planted, "hunt", lambda d, *_: Outcome(d.name, *(() if d.name in alive else ("test_x.py", "test_y")), seconds=1.0)
    )
    lines: list[str] = []
    assert planted.main([*names, "--json", str(tmp_path / "found.json")], lines.append) == 1
    assert [line.split()[0] for line in lines] == [*names[1:], names[0], "2"]
    assert "SURVIVES" in lines[2] and "test_x.py test_y" in lines[0]
    assert [found["killer"] for found in json.loads((tmp_path / "found.json").read_text())] == ["", "test_x.py", "test_x.py"]
    alive.clear()
    assert planted.main(names, lines.append) == 0
    with pytest.raises(SystemExit):
        planted.main(["no_such_defect"])


@pytest.mark.full
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_noticed(defect: Defect) -> None:
    """By the tests that `make test` runs."""
    assert planted.hunt(defect).killer, f"{defect.name} survives {', '.join(defect.tests)}: {defect.why}"
