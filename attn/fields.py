"""JSON files whose fields are read by type, and the error for one that cannot be read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn.errors import AttnError


class CheckpointError(AttnError):
    """A checkpoint, or its configuration, is not supported or cannot be read."""


class Fields:
    """A JSON object whose fields are read by type; `place` is its name in errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def wrong(self, name: str, allowed: str) -> CheckpointError:
        if name not in self.values:
            return CheckpointError(f"{self.source}: {name} is missing: must be {allowed}")
        return CheckpointError(f"{self.source}: {name} = {_shown(self.values[name])}: must be {allowed}")

    def has(self, name: str) -> bool:
        # null counts as absent, since transformers writes unset fields as null
        return self.values.get(name) is not None

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.values.get(name)
        # JSON's true is a Python int; "32" and 32.0 are rejected too, because a wrong size would be found much later,
        # as a shape.
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        # Python's JSON reader accepts NaN and Infinity; both fail the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field: an id, a list of them or null."""
        value = self.values.get(name)
        token_ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in token_ids):
            raise self.wrong(name, "a token id, a list of token ids, or null")
        return token_ids

    def section(self, name: str) -> "Fields":
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.source}: {name}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: contains a {type(value).__name__}: must be a JSON object")
    return value


def _shown(value: object) -> str:
    """Format `value` as in the file, shortened if long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
