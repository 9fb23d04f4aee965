"""The ground floor: environment variables, dotted names, what is installed, notices, and locks after a fork."""

import importlib
import logging
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from attn import envs, imports, logger
from attn.errors import BackendLoadError
from attn.imports import check_qualname, installed, resolve_obj_by_qualname, version_of
from attn.logger import init_logger

ROOT = Path(__file__).resolve().parent.parent

# --- environment -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["ATTN_BACKEND", "VLLM_ATTENTION_BACKEND", "ATTN_DISABLE", "ATTN_FRAMEWORK", "ATTN_PLUGINS"])
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


def test_debug_names(monkeypatch):
    assert not envs.debug("device")
    monkeypatch.setenv("ATTN_DEBUG", " device, ")
    assert envs.debug("device") and not envs.debug("dev")
    for wrong in ("banana", "device,banana"):
        monkeypatch.setenv("ATTN_DEBUG", wrong)
        with pytest.raises(ValueError, match="ATTN_DEBUG='banana' is unknown; known: device"):
            envs.debug("device")


def test_a_misspelt_variable_is_warned_of_once_at_the_first_selection(monkeypatch, caplog):
    from attn import selector

    monkeypatch.setenv("ATTN_BAKEND", "CPU_ATTN")
    monkeypatch.setenv("ATTN_QQ", "1")
    with caplog.at_level(logging.WARNING, logger="attn"):
        assert envs.unknown() == {"ATTN_BAKEND": "ATTN_BACKEND", "ATTN_QQ": ""} and not caplog.records
        for _ in range(2):
            selector.get_attn_backend(64, "float32", None, 16)
            selector.select(selector.make_request(64, "float32"), framework="torch")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "environment variable ATTN_BAKEND is not read by attn: did you mean ATTN_BACKEND?"
    assert said[1].startswith("environment variable ATTN_QQ is not read by attn: known: ATTN_BACKEND, ") and len(said) == 2


def test_no_variable_of_ours_is_unknown(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.setenv(name, "")
    assert envs.unknown() == {}


def test_every_variable_is_documented():
    documented = set(re.findall(r"(?:ATTN|VLLM)_[A-Z_0-9]+", envs.__doc__)) | {"VLLM_USE_V1"}
    assert documented == set(envs.VARIABLES)


# --- dotted names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["os.path.join", "collections:OrderedDict.fromkeys", "attn.errors.AttnError", "json.JSONDecoder"]
)
def test_names_resolve(path):
    assert check_qualname(path) == path and callable(resolve_obj_by_qualname(path))


def test_a_missing_attribute_names_the_module():
    with pytest.raises(BackendLoadError, match="json.Missing cannot be imported: AttributeError: module 'json' has no"):
        resolve_obj_by_qualname("json.Missing")


@pytest.mark.parametrize("path", ["json", "", None, 3, "a.b c", "json.", "a.<locals>.b", "a.b\n"])
def test_what_cannot_be_a_path_says_what_one_looks_like(path):
    with pytest.raises(ValueError, match=r"is not of the form 'package.module.Class' or 'package.module:Class'"):
        resolve_obj_by_qualname(path)


def test_checking_a_very_long_path_is_quick():
    with pytest.raises(ValueError):
        check_qualname("a." * 5_000 + "<")


# --- what is installed -------------------------------------------------------------------------------------------


def test_installed_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "vendor_never_imported.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert installed("vendor_never_imported") and "vendor_never_imported" not in sys.modules
    assert installed("json") and not installed("no_such_vendor")


def test_what_is_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not installed("vendor_of_tomorrow")
    (tmp_path / "vendor_of_tomorrow.py").touch()
    importlib.invalidate_caches()
    assert installed("vendor_of_tomorrow")


def test_a_module_that_is_barred_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "barred_vendor", None)
    assert not installed("barred_vendor")


def test_a_module_without_a_spec_counts_by_being_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "stub_vendor", type(sys)("stub_vendor"))
    assert installed("stub_vendor")


@pytest.mark.parametrize("name", ["", ".", "no_such_vendor.part"])
def test_odd_names_are_not_installed(name):
    assert installed(name) is False


def test_what_is_said_to_install_is_what_the_extras_install():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: tuple(project[extra]) for extra in imports.EXTRAS} == imports.EXTRAS
    assert imports.pip_install("jax", "plots") == "pip install 'jax>=0.10.1' 'flax>=0.12.8' matplotlib"


def test_no_text_tells_a_reader_to_install_this_package_from_pypi():
    """It is not there: `pip install 'attn[torch]'` ends in an error, or in another project's package."""
    texts = [*ROOT.glob("attn/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("notebooks/*.ipynb")]
    found = [str(path) for path in texts if re.search(r"install [^\n`]*\battn\[", path.read_text(encoding="utf-8"))]
    assert [path for path in found if not path.endswith("attn/imports.py")] == [] and len(texts) > 250


def test_versions():
    assert version_of("pytest") == pytest.__version__ and version_of("no-such-distribution") is None


# --- notices -----------------------------------------------------------------------------------------------------


def test_a_notice_is_said_once_for_its_words_and_names_its_line(caplog):
    logger = init_logger("attn.something")
    with caplog.at_level(logging.INFO, logger="attn"):
        for number in (1, 1, 2, 1):
            logger.warning_once("number %d", number)
            logger.info_once("number %d", number)
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said == [("WARNING", "number 1"), ("INFO", "number 1"), ("WARNING", "number 2"), ("INFO", "number 2")]
    assert {(r.funcName, r.filename) for r in caplog.records} == {
        ("test_a_notice_is_said_once_for_its_words_and_names_its_line", os.path.basename(__file__))
    }


def test_the_library_has_no_handler_but_the_null_one():
    init_logger("attn.a"), init_logger("attn.b")
    assert [type(handler) for handler in logging.getLogger("attn").handlers] == [logging.NullHandler]
    assert logging.getLogger("attn").level == logging.NOTSET


# --- locks and forks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_block_that_forks_while_it_holds_the_lock_still_leaves_it():
    lock = logger.fork_safe_lock()
    before = lock()
    with lock():
        child = os.fork()
        if child == 0:
            os._exit(0 if lock() is not before and lock().acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock() is before


def test_resolving_is_not_remembered():
    assert not hasattr(imports.resolve_obj_by_qualname, "cache_info")
