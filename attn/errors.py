"""The exceptions of the library: one hierarchy under `AttnError`, a `ValueError`.

A message states what was passed, what is allowed and, if possible, what to do. `UnsupportedError` carries the reasons as
data, so that callers need not parse text.
"""

import difflib
from collections.abc import Collection, Sequence


class AttnError(ValueError):
    """Base of every exception that this library raises deliberately."""


class ShapeError(AttnError):
    """An array has the wrong rank or extent."""


class DTypeError(AttnError):
    """An array's dtype, or a dtype given by name, is not supported."""


class DeviceError(AttnError):
    """Arrays are on different devices, or on one that is not supported."""


class MetadataError(AttnError):
    """A batch's metadata is inconsistent.

    Attributes: `field`: the entry; `index`: the position in it, or None; `value`: the value found; `bound`: what is
    allowed.
    """

    def __init__(self, field: str, index: int | tuple[int, ...] | None, value: object, bound: str) -> None:
        self.field, self.index, self.value, self.bound = field, index, value, bound
        where = ", ".join(map(str, index)) if isinstance(index, tuple) else index
        element = field if index is None else f"{field}[{where}]"
        super().__init__(f"{element} = {value}: must be {bound}")

    # BaseException pickles its class with `args`, here the one message; the constructor needs all four. Errors are pickled
    # where a worker process raises them.
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.field, self.index, self.value, self.bound)


class UnsupportedError(AttnError):
    """A backend, or every backend, rejects a request. `reasons` lists why, one sentence each."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        self.args = (message,)  # instead of calling the base's constructor, which `torch.compile` cannot trace

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.reasons)


class BackendLoadError(AttnError, ImportError):
    """A backend's class path cannot be imported; the cause is chained."""


def closest(name: str, known: Collection[str]) -> str:
    """Return the name in `known` closest to `name`, ignoring case, or "", for "Did you mean ...?" messages."""
    upper = {word.upper(): word for word in known}
    # A beginning of a name ("flash", "FLASH_AT") is a closer match than similar letters elsewhere; with one or two
    # letters it would match by chance.
    begun = [word for word in upper if len(name) > 2 and word.startswith(name.upper())]
    matches = begun or difflib.get_close_matches(name.upper(), upper, 1)
    return upper[matches[0]] if matches else ""
