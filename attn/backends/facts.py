"""What a backend class declares as class data, and how its implementation is named to it.

An interface's method (`get_name`) returns a datum of the class (`name`), so that an author writes the datum. A class that
overrides the method instead, as one written for vLLM's interface does, needs no datum.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def returns(datum: str) -> Callable[[F], F]:
    """Marks an interface's method as the one that returns the class's `datum`: a complete class has it, or overrides this."""

    def mark(method: F) -> F:
        method.datum = datum  # type: ignore[attr-defined]
        return method

    return mark


class Implementation:
    """Base of the implementations. `class MyImpl(Template, backend=MyBackend)` sets `MyImpl.backend` and `MyBackend.impl_cls`;
    a class that gives no backend (a template, a variant of an implementation) changes neither."""

    backend: ClassVar[Any]

    def __init_subclass__(cls, backend: Any = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if backend is not None:
            cls.backend, backend.impl_cls = backend, cls
