"""README.md tells the truth: its examples run, its tables are what the code says, its links lead somewhere."""

import contextlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attn import cli, envs, report

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


def test_the_jax_layer():
    run_example(1)


def test_the_notebook_functions():
    said = run_example(2)
    assert "features={sinks}" in said and "on NVIDIA H100 (torch)" in said


def test_a_backend_of_your_own():
    mine = {"__name__": "__main__"}
    said = run_example(3, mine)
    assert "no backend for head_size=64" in said and "alibi not supported" in said
    assert "all passed" in said and "FAILED" not in said
    run_example(4, mine)
    (cases,) = (mark.args[1] for mark in mine["test_conformance"].pytestmark)
    mine["test_conformance"](next(case for case in cases if "mixed batch" in case.name))


def test_every_example_is_run_here():
    assert len(EXAMPLES) == 5


def test_the_tables_of_backends_are_current():
    assert report.replace_readme_table(README) == README, "run `python -m attn readme --write`"


def test_the_table_of_variables_is_that_of_the_module():
    rows = [line for line in (envs.__doc__ or "").splitlines() if line.startswith("| ATTN")]
    assert rows and all(row in README for row in rows)


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
