"""Shipped text is plain English: words of this package's earlier style do not return."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATTERN = re.compile(
    r"\bwings?\b|\bnobody\b|\bsomebody\b|\bwhoever\b|\bwhom\b"
    r"|\bis told\b|\btells of\b|\bhas it that\b|\bthe company\b|\bis no time\b",
    re.IGNORECASE,
)


def shipped() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "attn", "docs", "README.md", "CONTRIBUTING.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if name.endswith((".py", ".md")) and (ROOT / name).exists()]


def test_plain_english() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in shipped()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if PATTERN.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["a wing", "Nobody serves it", "it is told of a bound", "the company of a request"])
def test_the_pattern_finds(text: str) -> None:
    assert PATTERN.search(text)
