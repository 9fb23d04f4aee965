"""Resolve dotted names to objects, and check what is installed without importing it.

`resolve_obj_by_qualname` is the only bridge from the core to the frameworks: registries hold strings, which it resolves to
classes. A path may be `package.module.Class` or `package.module:Outer.Inner`.
"""

import contextlib
import contextvars
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from attn.errors import BackendLoadError

# Stricter than Python's names (ASCII only in the first letter), so that "<locals>" and file paths are no class paths.
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)"  # a name and its next part, to be repeated
_QUALNAME = re.compile(rf"{_DOTTED}*:{_DOTTED}*|{_DOTTED}+")
_known: set[str] = set()
#: (modules assumed to be installed, whether those installed on this machine count too), or None: check this machine only.
_assumption = contextvars.ContextVar[tuple[frozenset[str], bool] | None]("assumption", default=None)
_FRAMEWORKS = ("torch", "jax")  # never assumed: their platforms and backends run in this process


def check_qualname(path: str) -> str:
    """Return `path` if it is a well-formed path of an object. Raises ValueError with the expected form otherwise."""
    if not isinstance(path, str) or not _QUALNAME.fullmatch(path):
        local = " (a class defined inside a function has no path: pass the class itself)"
        raise ValueError(
            f"class path {path!r} is not of the form 'package.module.Class' or 'package.module:Class'"
            + (local if "<locals>" in str(path) else "")
        )
    return path


def resolve_obj_by_qualname(qualname: str) -> Any:
    """Import the module of `qualname` and return the object.

    Raises `BackendLoadError` (an ImportError and a ValueError), with the cause chained, if the module raises anything but
    KeyboardInterrupt on import, or has no such attribute. Nothing is cached: a later call tries again.
    """
    check_qualname(qualname)
    module_name, _, attribute = qualname.partition(":") if ":" in qualname else qualname.rpartition(".")
    with loading(qualname):
        # Attributes are read within `loading` too: a lazy package may import, and fail, at the attribute.
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    return target


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports `names`, each from its module, at first use."""

    def getattr_(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_, lambda: sorted(names)


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Convert any exception but KeyboardInterrupt raised by an import in the block to a `BackendLoadError` about `name`."""
    try:
        yield
    # GeneratorExit comes when a generator that holds the block open is closed, which is no failure of an import.
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a plugin or a vendor's package may raise anything at import, even SystemExit
        raise BackendLoadError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def installed(module: str) -> bool:
    """Whether a module is installed, without importing it or, for `package.module`, the package.

    Only positive results are cached: a missing module may be installed while a notebook runs.
    """
    assumption = _assumption.get()
    # An assumed machine without others (`beside` false) hides what is installed here: `attn explain --device H100` on a
    # laptop says the same as on any other machine.
    if assumption is not None and module.partition(".")[0] not in _FRAMEWORKS and (assumed(module) or not assumption[1]):
        return assumed(module)
    if module in sys.modules:
        # None in sys.modules is Python's own mark of a module that must not be imported; tests use it to hide a package.
        return sys.modules[module] is not None
    if module in _known:
        return True
    top, *submodules = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    # `find_spec` raises ValueError for a loaded package whose `__spec__` is None.
    except (ImportError, ValueError):
        return False
    present, places = spec is not None, list(spec.submodule_search_locations or []) if spec is not None else []
    for part in submodules:  # by file name: import machinery would import the package first
        paths = [Path(folder) / part for folder in places]
        places = [str(path) for path in paths if path.is_dir()]
        present = bool(places) or any(path.with_name(part + end).is_file() for path in paths for end in all_suffixes())
    if present:
        _known.add(module)
    return present


@contextlib.contextmanager
def assuming(modules: Collection[str], *, beside: bool = False) -> Iterator[None]:
    """Within this context, `installed` reports `modules` and their submodules as present, in supported versions: in addition
    to what is installed on this machine (`beside`), or instead of it. It does not make them importable."""
    outer = _assumption.get()
    # A hint asks "with this package too" within an outer assumption: the outer packages stay, and this machine's count
    # only if they count outside.
    kept = outer[0] if beside and outer is not None else frozenset[str]()
    token = _assumption.set((kept.union(modules), beside and (outer is None or outer[1])))
    try:
        yield
    finally:
        _assumption.reset(token)


def assumed(module: str) -> bool:
    """Whether a module counts as installed by assumption; then its version must not be checked, since it may be absent."""
    assumption = _assumption.get()
    # With the dot, so that "flash_attn" does not stand for "flash_attn_interface", which is FlashAttention 3.
    return assumption is not None and any(module == name or module.startswith(f"{name}.") for name in assumption[0])


def first_installed(modules: str) -> str | None:
    """Return the first of `modules` (`a`, or alternatives `a|b|c`) that is installed, or None."""
    return next((module for module in modules.split("|") if installed(module)), None)


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


#: Extra of this package -> what it installs, as in pyproject.toml (a test compares them). For install commands, since this
#: package is not on PyPI, where `pip install 'attn[torch]'` would look for it.
EXTRAS = {
    "torch": ("torch>=2.8",),
    "jax": ("jax>=0.10.1", "flax>=0.12.8"),
    "demo": ("safetensors>=0.8", "tokenizers>=0.22.1", "rich>=13"),
    "plots": ("matplotlib",),
}


def pip_install(*extras: str) -> str:
    """Return the command that installs the packages of these extras, however this package was installed."""
    requirements = [requirement for extra in extras for requirement in EXTRAS[extra]]
    return f"pip install {' '.join(map(shlex.quote, requirements))}"
