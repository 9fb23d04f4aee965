"""Citations in code and documents exist: numbered sections of the semantics, documents and files."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Pages that `make docs` generates.
GENERATED = {f"docs/reference/{page}.md" for page in ("commands", "evidence", "variables")}
GENERATED |= {f"docs/benchmarks/{page}.md" for page in ("index", "triton")} | {"docs/reference/api/attn.md"}
SECTION = re.compile(r"§(\d+)")
DOCUMENT = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.md)\b")
FILE = re.compile(r"(?<![\w./-])((?:attn|tests|benchmarks|docs|examples|notebooks)/[\w/-]+\.(?:py|json|jsonl|md|ipynb))\b")
#: References to documents that are not in this repository.
DANGLING = re.compile(r"\bSEMANTICS\b|\b[Tt]he seeds\b|\bseeds'(?! )|\(level [A-D]\d\)|\bHOUSE\b")


@functools.cache
def texts() -> dict[str, str]:
    """Every text file of the repository by its path, without this one and without measured results."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.toml", "Makefile"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    here = Path(__file__).relative_to(ROOT).as_posix()
    kept = [name for name in names if name != here and not name.startswith("benchmarks/results/") and (ROOT / name).exists()]
    return {name: (ROOT / name).read_text() for name in kept}


def test_sections_of_the_semantics() -> None:
    sections = {int(n) for n in re.findall(r"^## §(\d+) ", texts()["docs/semantics.md"], re.MULTILINE)}
    assert sections == set(range(1, len(sections) + 1)), "sections are numbered in order"
    cited = {(name, int(n)) for name, text in texts().items() for n in SECTION.findall(text)}
    assert len(cited) > 20
    assert {(name, n) for name, n in cited if n not in sections} == set()


@pytest.mark.parametrize("pattern", [DOCUMENT, FILE], ids=["documents", "files"])
def test_files(pattern: re.Pattern[str]) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = {"/" + name for name in GENERATED.union(name for name in listed if (ROOT / name).exists())}
    cited = {(name, path) for name, text in texts().items() for path in pattern.findall(text)}
    assert len(cited) > 20
    assert {(name, path) for name, path in cited if not any(end.endswith(f"/{path}") for end in ends)} == set()


#: What is in the repository and not in the wheel: its folders, its documents, and commands that need a checkout.
NOT_SHIPPED = re.compile(
    r"(?<![\w./-])(?:\.ci|benchmarks|docs|examples|notebooks|tests)/[\w./-]*\w"
    r"|\b(?:CHANGELOG|CONTRIBUTING|README)\.md\b|\bmkdocs\.yml\b|\bMakefile\b|`make [\w-]+`"
)
#: Exceptions: the definition, which all code cites by section, and the page that `attn tables --write` writes into a checkout.
CITED_FROM_THE_WHEEL = {"docs/semantics.md": "", "docs/reference/backends.md": "attn/cli.py"}


def test_what_is_installed_cites_what_is_installed() -> None:
    """A reader of an installed module or its help has no checkout: a name there is of a file in `attn/`, or a URL."""
    shipped = {name: text for name, text in texts().items() if name.startswith("attn/")}
    assert len(shipped) > 100
    cited = {(path, name) for name, text in shipped.items() for path in NOT_SHIPPED.findall(text)}
    assert {(path, name) for path, name in cited if CITED_FROM_THE_WHEEL.get(path) not in ("", name)} == set()


@pytest.mark.parametrize(
    "text",
    [
        "(benchmarks/notes/triton.md)",
        "in benchmarks/notes and",
        "tests/testing/approximate.py.",
        "see CONTRIBUTING.md",
        "`make test`",
    ],
)
def test_what_does_not_ship_is_found(text: str) -> None:
    assert len(NOT_SHIPPED.findall(text)) == 1
    assert not NOT_SHIPPED.search("https://example.org/docs/x.md, attn/tests/x.py and the `make_case` of docs")


def test_no_reference_to_documents_outside_the_repository() -> None:
    found = {(name, match) for name, text in texts().items() for match in DANGLING.findall(text)}
    assert found == set()
