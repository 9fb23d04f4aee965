"""Every environment variable of the library, read when asked and never at import.

| variable | meaning |
|---|---|
| ATTN_BACKEND | backend to use by name, obeyed or refused (VLLM_ATTENTION_BACKEND is honoured when it is unset) |
| ATTN_MLA_PREFILL_BACKEND | MLA prefill backend to use by name, obeyed or refused |
| ATTN_DIFFUSION_BACKEND | diffusion backend to use by name, obeyed or refused |
| ATTN_DISABLE | comma-separated backends, of any of the three registries, that automatic selection must not pick |
| ATTN_FRAMEWORK | `torch` or `jax`: which wing serves a request whose dtype is a bare string |
| ATTN_PLUGINS | comma-separated entry points of group `attn.backends` that may load (unset: all; empty: none) |
| ATTN_DEBUG | `device`: block ids and slots that are on the device are checked too, at each call of the torch wing |
| ATTN_AUTOTUNE | `1`: Triton kernels' launches are measured here and kept (unset or `0`: taken from rules) |
| ATTN_PREFERENCES | `1`, or a file: selection follows what `attn tune` measured here (unset or `0`: the platform's list) |
| ATTN_CACHE_DIR | where both are kept (unset: `attn` in the user's cache directory) |

A value that means nothing is an error where it is read. A variable that begins with ATTN_ and is none of these is probably
misspelt: the first selection warns of it, once.

`read` looks into the table that `os.environ` itself keeps: a lookup of an unset name through the mapping protocol
costs a microsecond (an exception raised and caught), which is half of a warm selection.
"""

import os
from pathlib import Path

from attn.errors import closest
from attn.logger import init_logger

logger = init_logger(__name__)

VARIABLES = (
    "ATTN_BACKEND",
    "VLLM_ATTENTION_BACKEND",
    "ATTN_MLA_PREFILL_BACKEND",
    "ATTN_DIFFUSION_BACKEND",
    "ATTN_DISABLE",
    "ATTN_FRAMEWORK",
    "ATTN_PLUGINS",
    "ATTN_DEBUG",
    "ATTN_AUTOTUNE",
    "ATTN_PREFERENCES",
    "ATTN_CACHE_DIR",
    "VLLM_USE_V1",
)
_ENCODED = {name: os.fsencode(name) for name in VARIABLES} if os.name == "posix" else {}


def read(name: str) -> str | None:
    """The value of environment variable `name` now, or None when unset."""
    table = getattr(os.environ, "_data", None)
    if table is not None and name in _ENCODED:
        raw = table.get(_ENCODED[name])
        return None if raw is None else os.fsdecode(raw)
    return os.environ.get(name)


#: The variables that selection depends on, in the order of `selecting`.
SELECTING = (
    "ATTN_BACKEND", "VLLM_ATTENTION_BACKEND", "ATTN_DISABLE", "ATTN_FRAMEWORK", "ATTN_PLUGINS", "ATTN_PREFERENCES",
)  # fmt: skip
_SELECTING_ENCODED = tuple(_ENCODED.get(name) for name in SELECTING)


def selecting() -> tuple[object, ...]:
    """A snapshot of the variables that selection depends on, raw: part of its cache key."""
    table = getattr(os.environ, "_data", None)
    if table is not None and _ENCODED:
        get = table.get
        a, b, c, d, e, f = _SELECTING_ENCODED
        return get(a), get(b), get(c), get(d), get(e), get(f)
    return tuple(map(read, SELECTING))


def read_list(name: str) -> tuple[str, ...] | None:
    """A comma-separated variable as a tuple, blanks dropped; None when unset."""
    value = read(name)
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def vllm_use_v1() -> bool:
    """vLLM's `VLLM_USE_V1` switch: on unless set to 0. Nothing here depends on it; callers may pass it on."""
    return read("VLLM_USE_V1") != "0"


def switch(name: str) -> bool:
    """Whether variable `name` is 1; unset, empty and 0 are off. Raises ValueError for anything else."""
    value = (read(name) or "0").strip()
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} must be 0 or 1")
    return value == "1"


def cache_dir() -> Path:
    """ATTN_CACHE_DIR, or `attn` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    own = read("ATTN_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn"


#: What ATTN_DEBUG may name.
DEBUG = ("device",)


def debug(what: str) -> bool:
    """Whether ATTN_DEBUG names `what`, one of `DEBUG`. Raises ValueError where the variable names anything else."""
    named = read_list("ATTN_DEBUG") or ()
    for name in named:
        if name not in DEBUG:
            raise ValueError(f"ATTN_DEBUG={name!r} is unknown; known: {', '.join(DEBUG)}")
    return what in named


def unknown() -> dict[str, str]:
    """{variable of the environment that begins with ATTN_ and that nothing here reads: the one that was probably meant}."""
    return {name: closest(name, VARIABLES) for name in list(os.environ) if name.startswith("ATTN_") and name not in VARIABLES}


def warn_of_unknown() -> None:
    """Log a warning, once a process for each, about variables that are probably misspelt."""
    for name, meant in unknown().items():
        hint = f"did you mean {meant}?" if meant else f"known: {', '.join(VARIABLES)}"
        logger.warning_once("environment variable %s is not read by attn: %s", name, hint)
