"""The one registry behind three enums: names, default class paths, overrides, and backends that others bring.

Each enum's members are constants (vLLM's and vllm-omni's names); a class path is a string until a class is asked for. Besides
members, any number of *custom* backends may be registered under names of their own: each is an instance of the enum
that `Enum[name]` finds, though it is not in `__members__`. Every change moves `generation`, so that no cached choice
outlives it.
"""

import contextlib
import enum
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

from attn.capabilities import WINGS, Candidate, Device
from attn.errors import BackendLoadError, closest
from attn.imports import check_qualname, first_installed, installed, pip_install, resolve_obj_by_qualname
from attn.logger import fork_safe_lock

_lock = fork_safe_lock()
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class _Generation:
    """Counts changes to any registry; part of every cache key. Threads may change at once: no number comes twice."""

    numbers = itertools.count(1)
    value = 0


def _changing(name: str) -> Callable[..., Any]:
    """dict's method `name`, moving the generation afterwards."""
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: dict[Any, str], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            _Generation.value = next(_Generation.numbers)

    return method


class _Overrides(dict[Any, str]):
    """Member -> class path. A plain dict, but each change moves the generation, whoever makes it."""


for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(_Overrides, _name, _changing(_name))


def generation() -> int:
    """A number that changes whenever any registration does."""
    return _Generation.value


def load_candidate(name: str, path: str, backend: Any = None) -> Candidate:
    """The backend at `path` (or `backend` itself) as a `Candidate`: what cannot be loaded has its `problem` told."""
    if backend is None:
        if problem := _not_here(path):
            return Candidate(name, path, problem=problem)
        try:
            backend = resolve_obj_by_qualname(path)
        except BackendLoadError as error:
            return Candidate(name, path, problem=str(error), error=error)
    if not isinstance(backend, type):
        return Candidate(name, path, problem=f"{path} is not a class but {backend!r}")
    packages = getattr(getattr(backend, "capabilities", None), "packages", ())
    return Candidate(name, path, backend, missing=tuple(p for p in packages if first_installed(p) is None))


def _not_here(path: str) -> str:
    """Why the module of a path of ours cannot be there: its framework is missing, or nobody has built it yet."""
    parts = path.split(".")
    if parts[0] != "attn":
        return ""
    if parts[1] in WINGS and not installed(parts[1]):
        return f"{parts[1]} is not installed ({pip_install(parts[1])})"
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return "" if found else f"not built yet: {module}"


def unknown_name(kind: str, name: object, known: Collection[str]) -> str:
    """The message for a name that none of `known` is: the closest of them first, whatever its case, then all."""
    meant = closest(str(name), known)
    hint = f" Did you mean {meant}?" if meant else ""
    return f"Unknown {kind}: '{name}'.{hint} Valid options are: {', '.join(dict.fromkeys(known))}"


class BackendEnumMeta(enum.EnumMeta):
    """`Enum[name]` that finds custom backends too, and whose error lists what there is."""

    kind: str
    unset: str
    methods: tuple[str, ...]
    variables: tuple[str, ...]
    overrides: dict[Any, str]
    customs: dict[str, Any]
    objects: dict[Any, type]

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            custom = cls.customs.get(name)
            if custom in cls.overrides:
                return custom
            raise ValueError(unknown_name(cls.kind, name, cls.names())) from None

    def __contains__(cls, item: object) -> bool:
        """Membership for members and names alike (an Enum of Python 3.11 raises TypeError for a string)."""
        if isinstance(item, str):
            return item in cls.names()
        return isinstance(item, cls)

    def names(cls) -> list[str]:
        """Member names in order, then custom ones that are registered."""
        customs = list(cls.customs.items())  # copied at once: another thread may be registering
        return [*cls.__members__, *(name for name, member in customs if member in cls.overrides)]

    def complaint(cls, backend: type) -> str:
        """What a class lacks of a backend of this registry, in words, or nothing. It may be registered and never serves."""
        missing = [words for method in cls.methods if (words := _missing(backend, method))]
        return f"{backend.__name__} lacks what every {cls.kind} has: {', '.join(missing)}" if missing else ""


class BackendEnum(enum.Enum, metaclass=BackendEnumMeta):
    """Base of the three registries; a subclass says what it is called in messages.

    Class keywords: `kind` ("attention backend"), `unset` (message of a path asked for before registration, with
    `{name}`), `methods` (those that every backend of the registry must have), `variables` (environment variables that
    request a backend by name; the first that is set counts).
    """

    def __init_subclass__(
        cls, *, kind: str, unset: str, variables: tuple[str, ...] = (), methods: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        # set through type, since Enum would take plain assignments in the body for members
        tables = {"overrides": _Overrides(), "customs": {}, "objects": {}}
        for name, value in {"kind": kind, "unset": unset, "methods": methods, "variables": variables, **tables}.items():
            type.__setattr__(cls, name, value)

    def get_path(self, include_classname: bool = True) -> str:
        """Get the class path for this backend (respects overrides).

        Raises ValueError if there is none: a custom slot that nobody has registered.
        """
        path = self._table("overrides").get(self, self.value)
        if not path:
            raise ValueError(type(self).unset.format(name=self.name))
        if not include_classname:
            path = path.partition(":")[0] if ":" in path else path.rsplit(".", 1)[0]
        return str(path)

    def get_class(self) -> type:
        """Get the backend class (respects overrides).

        Raises ImportError (a `BackendLoadError`) if the class cannot be imported, ValueError if unregistered.
        """
        path = self.get_path()
        registered_class = self._object(path)
        return resolve_obj_by_qualname(path) if registered_class is None else registered_class

    def is_overridden(self) -> bool:
        """Whether this backend has a registered override."""
        return self in self._table("overrides")

    def clear_override(self) -> None:
        """Clear any override for this backend, reverting to the default."""
        self._table("overrides").pop(self, None)

    def candidate(self) -> Candidate:
        """This backend loaded as far as it goes; whatever is wrong with it becomes a sentence, never an exception."""
        try:
            path = self.get_path()
        except ValueError as error:
            return Candidate(self.name, problem=str(error))
        found = load_candidate(self.name, path, self._object(path))
        problem = found.problem if found.backend is None else type(self).complaint(found.backend)
        return found if problem == found.problem else Candidate(self.name, path, problem=problem)

    def off_paths(self, device: Device | None = None) -> tuple[str, ...]:
        """A sentence for each faster path of this backend that is off on `device` (None: the one here), and why."""
        told = getattr(self.candidate().backend, "off_paths", None)
        return () if told is None else tuple(told(device))

    def _object(self, path: str) -> type | None:
        """The class that was registered as an object, unless a path has been put over it since."""
        cls = self._table("objects").get(self)
        return cls if cls is not None and path_of(cls) == path else None

    def _table(self, name: str) -> dict[Any, Any]:
        return getattr(type(self), name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _by_name, (type(self), self.name)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@functools.cache
def registries() -> dict[str, type[BackendEnum]]:
    """The three registries by the names that `attn backends --registry` takes."""
    return {
        "attention": resolve_obj_by_qualname("attn.backends.registry.AttentionBackendEnum"),
        "mla_prefill": resolve_obj_by_qualname("attn.backends.mla.prefill.registry.MLAPrefillBackendEnum"),
        "diffusion": resolve_obj_by_qualname("attn.diffusion.backends.registry.DiffusionAttentionBackendEnum"),
    }


def _missing(backend: type, method: str) -> str:
    """`method` where a class has none, and the datum that it returns (`attn.backends.facts`) where that was never set."""
    found = getattr(backend, method, None)
    if not callable(found):
        return f"{method}()"
    datum = getattr(found, "datum", None)
    return "" if datum is None or hasattr(backend, datum) else f"{datum} (or {method}())"


def _by_name(registry: type[BackendEnum], name: str) -> Any:
    """Unpickling: members travel by name, so that a renamed path or an override changes no old pickle."""
    return registry[name]


def ranked(registry: Any, names: Sequence[str]) -> list[Any]:
    """A platform's list as members, with custom backends that declare capabilities before it (priority > 0) or after it."""
    listed = [registry[name] for name in names]
    customs = []
    for member in list(registry.overrides):
        own = member.name == "CUSTOM" or member.name in registry.customs
        if own and member not in listed:
            candidate = member.candidate()
            capabilities = getattr(candidate.backend, "capabilities", None)
            if capabilities is not None or candidate.problem:
                customs.append((getattr(capabilities, "priority", 0), member))
    customs.sort(key=lambda entry: (-entry[0], entry[1].name))
    return [m for p, m in customs if p > 0] + listed + [m for p, m in customs if p <= 0]


def off_paths(registry: Any, names: Sequence[str]) -> list[str]:
    """A line for each faster path that is off here, of the backends among `names` (others may be peers' of a benchmark)."""
    named = [name for name in dict.fromkeys(names) if name in registry]
    return [f"{name}: {sentence}" for name in named for sentence in registry[name].off_paths()]


def path_of(cls: type) -> str:
    """The class path under which `cls` itself can be found again."""
    nested = "." in cls.__qualname__
    return f"{cls.__module__}{':' if nested else '.'}{cls.__qualname__}"


def _member(registry: type[BackendEnum], backend: Any, override: bool) -> Any:
    """The member (or custom instance, made now if need be) that `backend` stands for."""
    if isinstance(backend, registry):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a {registry.__name__} member or a name, not {backend!r}")
    if not _NAME.fullmatch(backend):
        raise ValueError(f"backend name {backend!r} must be letters, digits and underscores, beginning with a letter")
    if backend in registry.__members__:
        if not override:
            raise ValueError(
                f"{backend} is a built-in {registry.kind}: pass {registry.__name__}.{backend} itself, "
                "or override=True, to replace it"
            )
        return registry[backend]
    customs = registry.customs
    if backend not in customs:
        custom = object.__new__(registry)
        custom._name_, custom._value_ = backend, ""
        customs[backend] = custom
    return customs[backend]


def register(
    registry: type[BackendEnum], backend: Any, class_path: str | type | None = None, *, override: bool = False
) -> Callable[[type], type]:
    """Register or override a backend: by class path, by class, or (with neither) as a decorator.

    `backend` is a member or a name; a name that no member has makes a custom backend. A name that a member has is
    refused unless `override`. Returns the decorator, or the identity when a path or a class was given. Raises
    ValueError for a malformed name or path, TypeError for a backend of another registry or a non-class.
    """

    def register_class(cls: type) -> type:
        if not isinstance(cls, type):
            raise TypeError(f"register {registry.__name__}: expected a class, got {cls!r}")
        with _lock():
            member = _member(registry, backend, override)
            registry.objects[member] = cls  # kept, since a class made in a function or a notebook has no way back by name
            registry.overrides[member] = path_of(cls)
        return cls

    if isinstance(class_path, type):
        register_class(class_path)
    elif class_path is not None:
        check_qualname(class_path)
        with _lock():
            registry.overrides[_member(registry, backend, override)] = class_path
    else:
        if not isinstance(backend, registry | str):
            raise TypeError(f"backend must be a {registry.__name__} member or a name, not {backend!r}")
        return register_class
    return lambda x: x


@contextlib.contextmanager
def registered(registry: type[BackendEnum], backend: Any, target: str | type, *, override: bool = True) -> Iterator[Any]:
    """A registration for the length of a `with` block; what was registered before comes back, also after an error."""
    with _lock():
        member = _member(registry, backend, override)
        tables: tuple[dict[Any, Any], ...] = (registry.objects, registry.overrides)
        before = [(table, table.get(member)) for table in tables]
        register(registry, member, target)
    try:
        yield member
    finally:
        with _lock():
            for table, value in before:
                if value is None:
                    table.pop(member, None)
                else:
                    table[member] = value
