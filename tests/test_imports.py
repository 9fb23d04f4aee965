"""Dotted names, and what is installed."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from attn import imports
from attn.errors import BackendLoadError
from attn.imports import check_qualname, installed, resolve_obj_by_qualname, version_of

ROOT = Path(__file__).resolve().parent.parent

# dotted names


@pytest.mark.parametrize(
    "path", ["os.path.join", "collections:OrderedDict.fromkeys", "attn.errors.AttnError", "json.JSONDecoder"]
)
def test_names_resolve(path):
    assert check_qualname(path) == path and callable(resolve_obj_by_qualname(path))


def test_a_missing_attribute_names_the_module():
    with pytest.raises(BackendLoadError, match="json.Missing cannot be imported: AttributeError: module 'json' has no"):
        resolve_obj_by_qualname("json.Missing")


@pytest.mark.parametrize("path", ["json", "", None, 3, "a.b c", "json.", "a.<locals>.b", "a.b\n"])
def test_an_invalid_path_is_an_error_with_an_example(path):
    with pytest.raises(ValueError, match=r"is not of the form 'package.module.Class' or 'package.module:Class'"):
        resolve_obj_by_qualname(path)


def test_checking_a_very_long_path_is_quick():
    with pytest.raises(ValueError):
        check_qualname("a." * 5_000 + "<")


def test_resolving_is_not_remembered():
    assert not hasattr(imports.resolve_obj_by_qualname, "cache_info")


# what is installed


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


def test_install_hints_agree_with_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: tuple(project[extra]) for extra in imports.EXTRAS} == imports.EXTRAS
    assert imports.pip_install("jax", "plots") == "pip install 'jax>=0.10.1' 'flax>=0.12.8' matplotlib"


def test_no_text_recommends_to_install_this_package_from_pypi():
    """It is not there: `pip install 'attn[torch]'` ends in an error, or in another project's package."""
    texts = [*ROOT.glob("attn/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("notebooks/*.ipynb")]
    found = [str(path) for path in texts if re.search(r"install [^\n`]*\battn\[", path.read_text(encoding="utf-8"))]
    assert [path for path in found if not path.endswith("attn/imports.py")] == [] and len(texts) > 250


def test_versions():
    assert version_of("pytest") == pytest.__version__ and version_of("no-such-distribution") is None
