"""JSON files of measurements, each for one device and the versions of the software that ran on it (its owner).

A file with another owner, or an invalid one, is ignored, with the reason logged once, and replaced by the next write.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attn import envs
from attn.logger import init_logger

logger = init_logger(__name__)
T = TypeVar("T")


def path(prefix: str, device: str) -> Path:
    """Return the path, in the cache directory, of the file `<prefix>-<device>.json` of measurements."""
    # Devices' names have spaces, slashes and parentheses ("NVIDIA H100 80GB HBM3", "TPU v5 lite"); the pattern
    # replaces everything but letters and digits by dashes. Two devices may get one path; `read` then compares the owner.
    return envs.cache_dir() / f"{prefix}-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def read(file: Path, owner: Mapping[str, Any], parse: Callable[[Any], T]) -> list[T] | str:
    """Return the entries of a file, each as returned by `parse`, or the reason why the file is ignored.

    owner: the properties that the file must have been written with. `parse` raises ValueError, LookupError, TypeError or
    AttributeError for an invalid entry.
    """
    try:
        # Everything that may be wrong with a file of another version, or one that was edited or cut off, is caught
        # below: a cache may not stop a program.
        content = json.loads(file.read_text(encoding="utf-8"))
        differs = [
            f"{key} {content.get(key)!r}, expected {value!r}" for key, value in owner.items() if content.get(key) != value
        ]
        # The owner is compared before an entry is parsed: entries of another version may have another form.
        if not differs:
            return [parse(entry) for entry in content["entries"]]
        reason = f"it belongs to another machine ({'; '.join(differs)})"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"it is invalid ({type(error).__name__}: {error})"
    logger.warning_once("%s is ignored: %s", file, reason)
    return f"{file} is ignored: {reason}"


def write(file: Path, owner: Mapping[str, Any], entries: Sequence[Any]) -> None:
    """Replace a file atomically, so that another process reads either the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps processes apart; `replace` is atomic because the temporary file is in the same folder, and so
    # on the same file system.
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**owner, "entries": entries}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
