"""Environment variables: what is read, when, and the warning for an unknown name."""

import os
import re
import warnings
from pathlib import Path

import pytest

from attn import envs


@pytest.mark.parametrize("name", envs.VARIABLES)
def test_a_variable_is_read_when_asked(name, monkeypatch):
    assert envs.read(name) is None
    for value in ("one", "", "ümlaut"):
        monkeypatch.setenv(name, value)
        assert envs.read(name) == value
    monkeypatch.delenv(name)
    assert envs.read(name) is None


def test_a_variable_without_a_place_in_the_table_is_read_too(monkeypatch):
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert envs.read("SOMETHING_ELSE") == "1"


@pytest.mark.parametrize("name", envs.SELECTING)
def test_the_selections_snapshot_sees_every_variable_that_it_depends_on(name, monkeypatch):
    before = envs.selecting()
    monkeypatch.setenv(name, "")
    empty = envs.selecting()
    monkeypatch.setenv(name, "X")
    assert len({before, empty, envs.selecting()}) == 3
    monkeypatch.delenv(name)
    assert envs.selecting() == before


def test_an_environment_that_is_a_plain_mapping_is_read_through_its_protocol(monkeypatch):
    """Some tools replace `os.environ`; it then has no table of bytes."""
    monkeypatch.setattr(os, "environ", {"ATTN_BACKEND": "X"})
    assert envs.read("ATTN_BACKEND") == "X" and envs.read("ATTN_DISABLE") is None
    assert "X" in envs.selecting() and envs.unknown() == {}


@pytest.mark.parametrize(
    ("value", "parts"), [(None, None), ("", ()), (" , ", ()), ("A", ("A",)), (" A,B ,,C", ("A", "B", "C"))]
)
def test_lists(value, parts, monkeypatch):
    if value is not None:
        monkeypatch.setenv("ATTN_DISABLE", value)
    assert envs.read_list("ATTN_DISABLE") == parts


def test_no_variable_is_documented_that_nothing_reads():
    package = Path(envs.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "envs.py"]
    sources.append(Path(envs.__file__).read_text().partition("def read(")[2])
    assert [name for name in envs.VARIABLES if not any(name in source for source in sources)] == []


@pytest.mark.parametrize(
    ("own", "vllm", "wanted"),
    [(None, None, False), ("1", None, True), ("0", "1", False), (None, "1", True), ("", "1", False), (None, "0", False)],
)
def test_batch_invariance_is_requested_by_either_name(own, vllm, wanted, monkeypatch):
    for name, value in (("ATTN_BATCH_INVARIANT", own), ("VLLM_BATCH_INVARIANT", vllm)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert envs.batch_invariant() is wanted
    monkeypatch.setenv("ATTN_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="ATTN_BATCH_INVARIANT='yes' must be 0 or 1"):
        envs.batch_invariant()


def test_debug_names(monkeypatch):
    assert not envs.debug("device")
    monkeypatch.setenv("ATTN_DEBUG", " device, ")
    assert envs.debug("device") and not envs.debug("dev")
    for wrong in ("banana", "device,banana"):
        monkeypatch.setenv("ATTN_DEBUG", wrong)
        with pytest.raises(ValueError, match="ATTN_DEBUG='banana' is unknown; known: device"):
            envs.debug("device")


def test_a_misspelt_variable_is_warned_of_once_at_the_first_selection(monkeypatch):
    from attn import selector

    monkeypatch.setenv("ATTN_BAKEND", "CPU_ATTN")
    monkeypatch.setenv("ATTN_QQ", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert envs.unknown() == {"ATTN_BAKEND": "ATTN_BACKEND", "ATTN_QQ": ""} and not caught
        for _ in range(2):
            selector.get_attn_backend(64, "float32", None, 16)
            selector.select(selector.make_request(64, "float32"), framework="torch")
    said = [str(warning.message) for warning in caught]
    assert said[0] == "environment variable ATTN_BAKEND is not read by attn: did you mean ATTN_BACKEND?"
    assert said[1].startswith("environment variable ATTN_QQ is not read by attn: known: ATTN_BACKEND, ") and len(said) == 2


def test_no_variable_of_ours_is_unknown(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.setenv(name, "")
    assert envs.unknown() == {}


def test_every_variable_is_documented():
    documented = set(re.findall(r"(?:ATTN|VLLM)_[A-Z_0-9]+", envs.__doc__)) | {"VLLM_USE_V1"}
    assert documented == set(envs.VARIABLES)
