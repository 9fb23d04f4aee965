"""Class attributes that a backend declares, and the link between a backend and its implementation.

A method of the interface (`get_name`) returns a class attribute (`name`), so the author of a backend sets only the attribute. A
class that overrides the method instead, as one written for vLLM's interface does, does not need the attribute.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def returns(datum: str) -> Callable[[F], F]:
    """Mark a method as returning the class attribute `datum`: a complete class sets the attribute or overrides the method."""

    def mark(method: F) -> F:
        method.datum = datum  # type: ignore[attr-defined]
        return method

    return mark


class Implementation:
    """Base of the implementations. `class MyImpl(Template, backend=MyBackend)` sets `MyImpl.backend` and `MyBackend.impl_cls`.

    A class without `backend` (an abstract base, a variant of an implementation) changes neither.
    """

    backend: ClassVar[Any]

    def __init_subclass__(cls, backend: Any = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if backend is not None:
            cls.backend, backend.impl_cls = backend, cls
