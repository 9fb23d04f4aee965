"""The typed errors of the library: one tree under `AttnError`, itself a `ValueError`.

A message names what was passed, what is allowed and, where there is one, the way out. `UnsupportedError` carries the
reasons as data, so that a caller can show them without parsing text.
"""

import difflib
from collections.abc import Collection, Sequence


class AttnError(ValueError):
    """Base of every error that this library raises on purpose."""


class ShapeError(AttnError):
    """An array has the wrong rank or extent."""


class DTypeError(AttnError):
    """An array, or a named dtype, is of a kind that the callee does not take."""


class DeviceError(AttnError):
    """Arrays live on different devices, or on one that the callee cannot use."""


class MetadataError(AttnError):
    """A batch description contradicts itself.

    Attributes: `field` (which entry), `index` (where in it, or None), `value` (what is there), `bound` (what is
    allowed).
    """

    def __init__(self, field: str, index: int | tuple[int, ...] | None, value: object, bound: str) -> None:
        self.field, self.index, self.value, self.bound = field, index, value, bound
        where = ", ".join(map(str, index)) if isinstance(index, tuple) else index
        place = field if index is None else f"{field}[{where}]"
        super().__init__(f"{place} = {value}: must be {bound}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.field, self.index, self.value, self.bound)


class UnsupportedError(AttnError):
    """A backend, or every backend, refuses a request. `reasons` lists why, one sentence each."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        self.args = (message,)  # as the base's constructor does, which `torch.compile` cannot follow

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.reasons)


class BackendLoadError(AttnError, ImportError):
    """A backend's class path cannot be turned into a class; the cause is chained."""


def closest(name: str, known: Collection[str]) -> str:
    """The one of `known` that was probably meant by `name`, whatever its case, or nothing: for "Did you mean ...?"."""
    upper = {word.upper(): word for word in known}
    begun = [word for word in upper if len(name) > 2 and word.startswith(name.upper())]
    found = begun or difflib.get_close_matches(name.upper(), upper, 1)
    return upper[found[0]] if found else ""
