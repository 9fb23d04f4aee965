"""Notes on performance: tables agree with the results, each page states how it was measured, and citations of pages exist."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.notes import tables

ROOT = Path(__file__).parents[3]
PAGES = [page for page in sorted(tables.NOTES.glob("*.md")) if page.name != "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_results_tables_and_the_command_that_makes_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "write it: python -m benchmarks.notes.tables --write"
    assert tables.BLOCK.search(text) and all(f"| {word}" in text for word in ("device", "version", "date", "command"))
    assert page.name in (tables.NOTES / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_changed_figure_is_seen() -> None:
    text = next(page.read_text(encoding="utf-8") for page in PAGES if page.name == "triton.md")
    assert tables.rewritten(text.replace("0.258 (", "0.257 (")) == text != text.replace("0.258 (", "0.257 (")


def test_the_readme_has_the_results_tables() -> None:
    text = tables.README.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "write it: python -m benchmarks.notes.tables --write"


def test_every_table_is_on_one_page() -> None:
    used = [found[2] for page in [tables.README, *PAGES] for found in tables.BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(used) == sorted(tables.TABLES)


def test_what_cites_the_notes_finds_them() -> None:
    files = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no git checkout")
    cited = {}
    for name in files.stdout.split():
        if (ROOT / name).is_file():
            for page in re.findall(r"benchmarks/(?:notes/)?[\w-]+\.md", (ROOT / name).read_text(encoding="utf-8")):
                cited[page] = name
    of_the_site = {f"benchmarks/{page.name}" for page in PAGES} | {"benchmarks/index.md"}
    lost = {page: name for page, name in cited.items() if page not in of_the_site and not (ROOT / page).exists()}
    assert len(cited) > 1 and lost == {}
