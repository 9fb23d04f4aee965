"""The environment variables of the library, read when needed and never at import.

| variable | meaning |
|---|---|
| ATTN_BACKEND | backend to use, by name: used or rejected (if unset, VLLM_ATTENTION_BACKEND is read) |
| ATTN_BACKEND_PER_KIND | comma-separated `kind=BACKEND`: backend for layers of a kind (`full`, `sliding`, `mla`, ...) |
| ATTN_MLA_PREFILL_BACKEND | MLA prefill backend to use, by name: used or rejected |
| ATTN_DIFFUSION_BACKEND | diffusion backend to use, by name: used or rejected |
| ATTN_DISABLE | comma-separated backends, of any of the three registries, that automatic selection excludes |
| ATTN_BATCH_INVARIANT | `1`: every layer requests `batch_invariant` (if unset, VLLM_BATCH_INVARIANT is read) |
| ATTN_FRAMEWORK | `torch` or `jax`: the framework of a request whose dtype is a string |
| ATTN_PLUGINS | comma-separated entry points of group `attn.backends` to load (unset: all; empty: none) |
| ATTN_DEBUG | `device`: torch layers check block ids and slots on the device too, at each call |
| ATTN_RECORD | folder in which layers record calls that fail, for `attn replay` (read when a layer is created) |
| ATTN_RECORD_SAMPLE | share of all calls that ATTN_RECORD records, between 0 and 1 (unset: 0) |
| ATTN_AUTOTUNE | `1`: launches of Triton kernels are measured on this machine and saved (unset or `0`: chosen by rules) |
| ATTN_PREFERENCES | `1`, or a file: selection uses the times that `attn tune` measured (unset or `0`: the platform's list) |
| ATTN_CACHE_DIR | directory of both files (unset: `attn` in the user's cache directory) |

An invalid value is an error where it is read. A variable that begins with ATTN_ and is not in this table is probably
misspelled: the first selection warns about it (`UserWarning`), once, and so does every command.

`read` reads the table that `os.environ` itself uses: a lookup of an unset name through the mapping protocol costs a
microsecond (an exception raised and caught), which is half of a cached selection.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from attn.errors import closest

# Once per variable: `warn_of_unknown` is called by every selection.
_warned: set[str] = set()

#: The variables that selection depends on, in the order of `selecting`.
SELECTING = (
    "ATTN_BACKEND",
    "VLLM_ATTENTION_BACKEND",
    "ATTN_DISABLE",
    "ATTN_FRAMEWORK",
    "ATTN_PLUGINS",
    "ATTN_PREFERENCES",
    "ATTN_BATCH_INVARIANT",
    "VLLM_BATCH_INVARIANT",
    "ATTN_BACKEND_PER_KIND",
    "ATTN_DIFFUSION_BACKEND",
)
VARIABLES = (
    *SELECTING,
    "ATTN_MLA_PREFILL_BACKEND",
    "ATTN_DEBUG",
    "ATTN_RECORD",
    "ATTN_RECORD_SAMPLE",
    "ATTN_AUTOTUNE",
    "ATTN_CACHE_DIR",
    "VLLM_USE_V1",
)
# `os.environ._data` has bytes as keys on POSIX; on Windows its keys are strings in upper case, so the mapping itself is
# read there.
_ENCODED = {name: os.fsencode(name) for name in VARIABLES} if os.name == "posix" else {}


def read(name: str) -> str | None:
    """Return the current value of environment variable `name`, or None if unset."""
    table = getattr(os.environ, "_data", None)
    if table is not None and name in _ENCODED:
        # The table is shared with `os.environ`, so changes by `os.environ[...]`, monkeypatch and other libraries are
        # seen at once.
        raw = table.get(_ENCODED[name])
        return None if raw is None else os.fsdecode(raw)
    return os.environ.get(name)


_SELECTING_ENCODED = tuple(_ENCODED.get(name) for name in SELECTING)


def selecting() -> tuple[object, ...]:
    """Return the raw values of the variables that selection depends on: part of its cache key."""
    table = getattr(os.environ, "_data", None)
    if table is not None and _ENCODED:
        get = table.get
        # Written out, since this runs in every cached selection: 0.25 us, where `map` over the names takes 0.4 and a
        # comprehension 0.5 (CPython 3.11). Raw bytes are as good a key as strings.
        a, b, c, d, e, f, g, h, i, j = _SELECTING_ENCODED
        return get(a), get(b), get(c), get(d), get(e), get(f), get(g), get(h), get(i), get(j)
    return tuple(map(read, SELECTING))


def read_list(name: str) -> tuple[str, ...] | None:
    """Return a comma-separated variable as a tuple, blanks dropped; None if unset."""
    value = read(name)
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def vllm_use_v1() -> bool:
    """Return vLLM's `VLLM_USE_V1` switch: on unless set to 0. This library does not depend on it; callers may pass it on."""
    return read("VLLM_USE_V1") != "0"


def switch(name: str) -> bool:
    """Whether variable `name` is 1; unset, empty and 0 mean off. Raises ValueError for anything else."""
    value = read(name)
    if value is None:
        return False
    # An empty value is how shells and container files write "unset".
    value = (value or "0").strip()
    # "true" or "yes" is an error: taking either for off would ignore the user's wish.
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} must be 0 or 1")
    return value == "1"


def share(name: str) -> float:
    """Return variable `name`, a number between 0 and 1; 0 if unset. Raises ValueError for anything else."""
    value = (read(name) or "0").strip()
    try:
        number = float(value)
    except ValueError:
        # Fails the test below, as NaN does, which no comparison holds for.
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"{name}={value!r} must be a number between 0 and 1")
    return number


def batch_invariant() -> bool:
    """Whether the environment requests `batch_invariant` for every layer. Raises ValueError for values other than 0 and 1."""
    # ATTN_BATCH_INVARIANT=0 is set, so it wins over vLLM's 1.
    return switch("VLLM_BATCH_INVARIANT" if read("ATTN_BATCH_INVARIANT") is None else "ATTN_BATCH_INVARIANT")


def cache_dir() -> Path:
    """Return ATTN_CACHE_DIR, or `attn` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    directory = read("ATTN_CACHE_DIR")
    if directory:
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn"


#: Values that ATTN_DEBUG may list.
DEBUG = ("device",)


def debug(check: str) -> bool:
    """Whether ATTN_DEBUG lists `check`, one of `DEBUG`. Raises ValueError if the variable lists anything else."""
    named = read_list("ATTN_DEBUG")
    if named is None:
        return False
    # Every entry is checked, not only `check`: a misspelled one would leave the checks off that the user relies on.
    for name in named:
        if name not in DEBUG:
            raise ValueError(f"ATTN_DEBUG={name!r} is unknown; known: {', '.join(DEBUG)}")
    return check in named


def unknown() -> dict[str, str]:
    """Return {environment variable that begins with ATTN_ but is unknown: the closest known one, or ""}."""
    # A list, because another thread may set a variable during the iteration.
    return {name: closest(name, VARIABLES) for name in list(os.environ) if name.startswith("ATTN_") and name not in VARIABLES}


def warn_of_unknown(warn: Callable[[str], object] = warnings.warn) -> None:
    """Warn, once per process and variable, about variables that are probably misspelled."""
    for name, meant in unknown().items():
        if name not in _warned:
            _warned.add(name)
            hint = f"did you mean {meant}?" if meant else f"known: {', '.join(VARIABLES)}"
            warn(f"environment variable {name} is not read by attn: {hint}")
