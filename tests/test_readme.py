"""README.md: its examples run, its tables agree with the code, its links exist."""

import contextlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import attn
from attn import cli
from attn.reports import report

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(?:python -m )?attn (\w+)", "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)), re.M)


def run_example(number: int, namespace: dict[str, Any] | None = None) -> str:
    """What an example prints, run as a script of its own (or in another's namespace)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), namespace or {"__name__": "__main__"})
    return out.getvalue()


def test_the_torch_layer():
    assert "-> " in run_example(0)


def test_the_notebook_functions():
    said = run_example(1)
    assert "features={sinks}" in said and "on NVIDIA H100 (torch)" in said


def test_every_example_is_run_here():
    assert len(EXAMPLES) == 2


def test_the_tables_of_backends_are_current():
    page = (ROOT / "docs" / "reference" / "backends.md").read_text(encoding="utf-8")
    assert report.replace_tables(page) == page, "run `python -m attn tables --write`"


def test_commands_exist():
    assert COMMANDS and set(COMMANDS) <= set(cli.COMMANDS)


def test_extras_exist():
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    named = {extra for group in re.findall(r"'\.\[([a-z,]+)\]'", README) for extra in group.split(",")}
    assert named and named <= set(project["optional-dependencies"])
    assert set(cli.EXTRAS.values()) <= set(project["optional-dependencies"])


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_targets_exist(target):
    assert f"make {target} " in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def test_a_wheel_has_every_module_and_every_file_that_the_package_reads():
    """What setuptools takes: packages, which have an __init__.py, and the files that pyproject.toml lists."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["package-data"]["attn"]
    data = {path for pattern in listed for path in (ROOT / "attn").glob(pattern)}
    files = [path for path in (ROOT / "attn").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    left_out = [path for path in files if path.suffix != ".py" and path not in data]
    left_out += [path for path in files if path.suffix == ".py" and not (path.parent / "__init__.py").exists()]
    assert [str(path.relative_to(ROOT)) for path in left_out] == []


def test_the_version_is_written_in_two_places():
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == attn.__version__
