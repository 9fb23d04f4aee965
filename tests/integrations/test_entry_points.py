"""The package's entry points in pyproject.toml lead to functions."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
INTEGRATIONS = PROJECT["entry-points"]["attn.integrations"]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_is_found_and_called(name: str) -> None:
    pytest.importorskip(name)
    assert name in PROJECT["optional-dependencies"]
    found = EntryPoint(name, INTEGRATIONS[name], "attn.integrations").load()
    assert found() == found()  # again is harmless
    assert "attn" in found()
