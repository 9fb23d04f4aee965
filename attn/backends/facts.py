"""Declarations of a backend of any family, and the link between a backend and its implementation.

A method of the interface (`get_name`) returns a class attribute (`name`), so the author of a backend sets only the attribute. A
class that overrides the method instead, as one written for vLLM's interface does, does not need the attribute.
"""

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from attn.capabilities import Capabilities, Device, with_lse

F = TypeVar("F", bound=Callable[..., Any])


def returns(datum: str) -> Callable[[F], F]:
    """Mark a method as returning the class attribute `datum`: a complete class sets the attribute or overrides the method."""

    def mark(method: F) -> F:
        method.datum = datum  # type: ignore[attr-defined]
        return method

    return mark


class Backend(ABC):
    """Base of the backends of every family: what they declare, and the methods that return it."""

    #: The backend's name in the registry, messages and tables.
    name: ClassVar[str]

    #: The limits of this backend; None (a class written for vLLM's interface only): no limits are known.
    capabilities: ClassVar[Capabilities | None] = None

    #: Platforms on which an interpreter executes this backend's kernels: evidence from them is not evidence of the device.
    interpreted_on: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @returns("name")
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def off_paths(cls, device: Device | None = None) -> tuple[str, ...]:
        """Return a sentence for each faster path of this backend that is off on `device` (None: the current one), with the
        reason, such as a kernel that the installed compiler cannot build. Shown by `attn explain`, `attn env`, `attn bench`."""
        return ()

    @classmethod
    def rules(cls, device: Device | None = None) -> tuple[str, ...]:
        """Return a sentence for each rule by which this backend computes parts of a batch differently on `device` (None: the
        current one). Shown by `attn explain`."""
        return ()


class LayerBackend(Backend):
    """Base of the backends that a layer is built with: an implementation, and the metadata of its batches."""

    impl_cls: ClassVar[type[Any]]
    metadata_cls: ClassVar[type[Any]]
    lse_flag: ClassVar[str]  #: the implementation's attribute that says whether it returns the log-sum-exp

    @classmethod
    @returns("impl_cls")
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl_cls

    @classmethod
    @returns("metadata_cls")
    def get_metadata_cls(cls) -> type[Any]:
        return cls.metadata_cls

    @classmethod
    def served_features(cls) -> frozenset[str]:
        """Return the record's features, with `lse` if the implementation returns it."""
        declared = frozenset[str]() if cls.capabilities is None else cls.capabilities.features
        return with_lse(declared, getattr(cls.get_impl_cls(), cls.lse_flag))


class Implementation:
    """Base of the implementations. `class MyImpl(Template, backend=MyBackend)` sets `MyImpl.backend` and `MyBackend.impl_cls`.

    A class without `backend` (an abstract base, a variant of an implementation) changes neither.
    """

    backend: ClassVar[Any]

    def __init_subclass__(cls, backend: Any = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if backend is not None:
            # Both directions at once: neither class can name the other in its own body, because one of them is defined first.
            cls.backend, backend.impl_cls = backend, cls
