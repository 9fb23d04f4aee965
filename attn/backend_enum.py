"""The common implementation of the three registries: names, default class paths, overrides, and custom backends.

Each enum's members are constants (vLLM's and vllm-omni's names); a class path stays a string until its class is needed. In
addition, any number of *custom* backends may be registered under other names: each is an instance of the enum that
`Enum[name]` finds, though it is not in `__members__`. Every change advances `generation`, which invalidates cached
choices.
"""

import contextlib
import enum
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

from attn.capabilities import FRAMEWORKS, Candidate, Device
from attn.errors import BackendLoadError, closest
from attn.imports import check_qualname, first_installed, installed, pip_install, resolve_obj_by_qualname
from attn.logger import fork_safe_lock

_lock = fork_safe_lock()
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
#: Between the names of two backends that serve a layer together, one its decodes, one its prompts: `TRITON_ATTN+FLASH_ATTN`.
PAIR = "+"


class _Generation:
    """Counts changes to any registry; part of every cache key. Safe for concurrent threads: no number repeats."""

    # `next` of a count is one operation under the interpreter's lock, `value += 1` is three: two threads could advance
    # to the same number, and a choice cached under it would outlive a registration.
    numbers = itertools.count(1)
    value = 0


def _changing(name: str) -> Callable[..., Any]:
    """Wrap dict's method `name` to advance the generation afterwards."""
    original = getattr(dict, name)

    @functools.wraps(original)
    def method(self: dict[Any, str], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        # Afterwards, and also after a failed change: a generation too many costs one look-up, while one advanced before
        # the change could be cached with the old table, and would then hide the new one.
        finally:
            _Generation.value = next(_Generation.numbers)

    return method


# Callers may write to the table itself, as to vLLM's, without `register`: so the dict notices changes, not the
# functions of this module.
class _Overrides(dict[Any, str]):
    """Member -> class path: a dict of which every change advances the generation."""


for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(_Overrides, _name, _changing(_name))


def generation() -> int:
    """Return a number that changes whenever any registration does."""
    return _Generation.value


def load_candidate(name: str, path: str, backend: Any = None) -> Candidate:
    """Load the backend at `path` (or take `backend`) as a `Candidate`; if that fails, `problem` says why."""
    if backend is None:
        # Asked before the import, so that a missing framework or module is a reason of one line and not the last of a
        # chain of import errors.
        if problem := _not_here(path):
            return Candidate(name, path, problem=problem)
        try:
            backend = resolve_obj_by_qualname(path)
        except BackendLoadError as error:
            return Candidate(name, path, problem=str(error), error=error)
    if not isinstance(backend, type):
        return Candidate(name, path, problem=f"{path} is not a class but {backend!r}")
    # A class written for vLLM's interface has no record, and so no packages that could be missing.
    packages = getattr(getattr(backend, "capabilities", None), "packages", ())
    return Candidate(name, path, backend, missing=tuple(p for p in packages if first_installed(p) is None))


def _not_here(path: str) -> str:
    """Return why a built-in module is missing: its framework is not installed, or it is not built yet."""
    parts = path.split(".")
    # Other packages' modules are not searched for: `find_spec` of a submodule imports its parents, which may take
    # seconds or raise anything. `resolve_obj_by_qualname` reports what their import raises.
    if parts[0] != "attn":
        return ""
    if parts[1] in FRAMEWORKS and not installed(parts[1]):
        return f"{parts[1]} is not installed ({pip_install(parts[1])})"
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    try:
        present = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        present = False
    return "" if present else f"not built yet: {module}"


def unknown_name(label: str, name: object, known: Collection[str]) -> str:
    """Return the error message for an unknown name: the closest of `known`, ignoring case, then all of them."""
    meant = closest(str(name), known)
    hint = f" Did you mean {meant}?" if meant else ""
    return f"Unknown {label}: '{name}'.{hint} Valid options are: {', '.join(dict.fromkeys(known))}"


class BackendEnumMeta(enum.EnumMeta):
    """Metaclass whose `Enum[name]` also finds custom backends, ignores case, and lists the valid names in its error."""

    label: str
    unset: str
    methods: tuple[str, ...]
    variables: tuple[str, ...]
    pairs: str
    overrides: dict[Any, str]
    customs: dict[str, Any]
    joined: dict[str, Any]
    objects: dict[Any, type]

    def __getitem__(cls, name: str) -> Any:
        member = cls._find(name)
        if member is None:
            raise ValueError(unknown_name(cls.label, name, cls.names())) from None  # as of vLLM's registries
        return member

    def __contains__(cls, item: object) -> bool:
        """Test membership of members and names (an Enum of Python 3.11 raises TypeError for a string)."""
        return cls._find(item) is not None if isinstance(item, str) else isinstance(item, cls)

    def _find(cls, name: str) -> Any:
        """Return the member or registered custom backend of this name, or of this name in another case; or None."""
        if cls.pairs and PAIR in str(name):
            return cls._find_pair(*name.split(PAIR, 1))
        names = cls.names()
        known = name if name in names else next((known for known in names if known.upper() == str(name).upper()), None)
        # Members first: the mapping has real members only, and a custom name can never equal one (`_member`).
        return None if known is None else cls.__members__.get(known) or cls.customs[known]

    def _find_pair(cls, decodes: str, prompts: str) -> Any:
        """Return the pair of two backends, which is in no list of names; None if either is unknown, or both are one."""
        # A third name ("A+B+C") is still within `prompts`: it is left out, and the pair is then rejected as one of
        # fewer than two.
        parts = tuple(cls._find(name.strip()) for name in (decodes, prompts) if PAIR not in name)
        if None in parts or len(set(parts)) < 2:
            return None
        name = PAIR.join(part.name for part in parts)
        if name not in cls.joined:
            pair: Any = object.__new__(cls)  # type: ignore[arg-type]
            # The value is a path as every member's is: the module of pairs makes the class when the attribute is read.
            pair._name_, pair._value_ = name, f"{cls.pairs}.{name.replace(PAIR, '__')}"
            # `setdefault` keeps the first of two threads' objects, so that a pair is one object and compares by
            # identity as members do.
            cls.joined.setdefault(name, pair)
        return cls.joined[name]

    def names(cls) -> list[str]:
        """Return member names in order, then registered custom ones."""
        customs = list(cls.customs.items())  # copied atomically: another thread may be registering
        return [*cls.__members__, *(name for name, member in customs if member in cls.overrides)]

    def complaint(cls, backend: type) -> str:
        """Return the methods of this registry that a class lacks, or "". Such a class may be registered but never serves."""
        missing = [words for method in cls.methods if (words := _missing(backend, method))]
        return f"{backend.__name__} lacks what every {cls.label} has: {', '.join(missing)}" if missing else ""


class BackendEnum(enum.Enum, metaclass=BackendEnumMeta):
    """Base of the three registries.

    Class keywords: `label` ("attention backend", for messages), `unset` (message for a path read before registration, with
    `{name}`), `methods` (those that every backend of the registry must have), `variables` (environment variables that
    name a backend; the first that is set applies), `pairs` (the module that has the class of a pair; none: no pairs).
    """

    def __init_subclass__(cls, *, label: str, unset: str, **kwargs: Any) -> None:
        # `object.__init_subclass__` rejects every keyword, so these are taken out before `super()`.
        facts: dict[str, Any] = {"variables": (), "methods": (), "pairs": ""}
        facts |= {name: kwargs.pop(name) for name in list(kwargs) if name in facts} | {"label": label, "unset": unset}
        super().__init_subclass__(**kwargs)
        # set through type, since Enum makes members of plain assignments in the body
        tables = {"overrides": _Overrides(), "customs": {}, "objects": {}, "joined": {}}
        for name, value in {**facts, **tables}.items():
            type.__setattr__(cls, name, value)

    def get_path(self, include_classname: bool = True) -> str:
        """Get the class path for this backend (respects overrides).

        Raises ValueError if there is none: an unregistered custom slot.
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
        # A class of a notebook or a function cannot be imported by its path, so the object that was registered goes first.
        return resolve_obj_by_qualname(path) if registered_class is None else registered_class

    def is_overridden(self) -> bool:
        """Whether this backend has a registered override."""
        return self in self._table("overrides")

    def clear_override(self) -> None:
        """Clear any override for this backend, reverting to the default."""
        self._table("overrides").pop(self, None)

    @property
    def parts(self) -> tuple[Self, ...]:
        """Both backends of a pair, the one of decodes first; of any other only itself."""
        return tuple(type(self)[name] for name in self.name.split(PAIR))

    def under(self, framework: str) -> Self:
        """Return the backend with this one's kernels for a framework: `NAME_JAX` under jax, if there is one, else this one."""
        member = type(self).__members__.get(f"{self.name}_{framework.upper()}")
        # An overridden name means the user's class, whatever the framework.
        return self if member is None or self.is_overridden() else member  # type: ignore[return-value]

    def candidate(self) -> Candidate:
        """Load this backend if possible; a failure becomes the candidate's `problem`, not an exception."""
        try:
            path = self.get_path()
        except ValueError as error:
            return Candidate(self.name, problem=str(error))
        loaded = load_candidate(self.name, path, self._object(path))
        problem = loaded.problem if loaded.backend is None else type(self).complaint(loaded.backend)
        return loaded if problem == loaded.problem else Candidate(self.name, path, problem=problem)

    def off_paths(self, device: Device | None = None) -> tuple[str, ...]:
        """Return a sentence for each faster path of this backend that is off on `device` (None: the current one)."""
        off_paths = getattr(self.candidate().backend, "off_paths", None)
        return () if off_paths is None else tuple(off_paths(device))

    def rules(self, device: Device | None = None) -> tuple[str, ...]:
        """Return a sentence for each rule by which this backend computes parts of a batch differently on `device`."""
        rules = getattr(self.candidate().backend, "rules", None)
        return () if rules is None else tuple(rules(device))

    def _object(self, path: str) -> type | None:
        """Return the class that was registered as an object, unless a path has replaced it since."""
        cls = self._table("objects").get(self)
        return cls if cls is not None and path_of(cls) == path else None

    def _table(self, name: str) -> dict[Any, Any]:
        return getattr(type(self), name)

    # By name, since Enum's pickling looks the value up among members: it fails for custom backends and pairs, and for a
    # value that a later version changed. A copy is the object itself, because members compare by identity.
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
    """Return `method` if a class lacks it, the attribute it returns (`attn.backends.facts`) if that is not set, else ""."""
    attribute = getattr(backend, method, None)
    if not callable(attribute):
        return f"{method}()"
    # A method of the base class that returns an attribute is only as good as the attribute: `get_name` exists on every
    # class, `name` may not.
    datum = getattr(attribute, "datum", None)
    return "" if datum is None or hasattr(backend, datum) else f"{datum} (or {method}())"


def _by_name(registry: type[BackendEnum], name: str) -> Any:
    """Unpickle a member by name, so that old pickles stay valid when a path changes or is overridden."""
    return registry[name]


def ranked(registry: Any, names: Sequence[str]) -> list[Any]:
    """Return a platform's list as members, plus custom backends with capabilities before (priority > 0) or after it."""
    listed = [registry[name] for name in names]
    customs = []
    for member in list(registry.overrides):
        is_custom = member.name == "CUSTOM" or member.name in registry.customs
        if is_custom and member not in listed:
            candidate = member.candidate()
            capabilities = getattr(candidate.backend, "capabilities", None)
            # A class without a record states no limits, so it would win every automatic choice: it is used by name
            # only. One that cannot be loaded is listed, so that its reason is seen.
            if capabilities is not None or candidate.problem:
                customs.append((getattr(capabilities, "priority", 0), member))
    # By name within a priority: the order of registration depends on which import came first.
    customs.sort(key=lambda entry: (-entry[0], entry[1].name))
    return [m for p, m in customs if p > 0] + listed + [m for p, m in customs if p <= 0]


def off_paths(registry: Any, names: Sequence[str]) -> list[str]:
    """Return a line per faster path that is off on this machine, for the backends in `names` (other names are ignored)."""
    named = [name for name in dict.fromkeys(names) if name in registry]
    return [f"{name}: {sentence}" for name in named for sentence in registry[name].off_paths()]


def path_of(cls: type) -> str:
    """Return the class path of `cls`."""
    nested = "." in cls.__qualname__
    return f"{cls.__module__}{':' if nested else '.'}{cls.__qualname__}"


def _member(registry: type[BackendEnum], backend: Any, override: bool) -> Any:
    """Return the member, or the custom instance (created if necessary), for `backend`."""
    if isinstance(backend, registry):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a {registry.__name__} member or a name, not {backend!r}")
    if not _NAME.fullmatch(backend):
        raise ValueError(f"backend name {backend!r} must be letters, digits and underscores, beginning with a letter")
    if backend in registry.__members__:
        if not override:
            raise ValueError(
                f"{backend} is a built-in {registry.label}: pass {registry.__name__}.{backend}, or override=True, to replace it"
            )
        return registry[backend]
    customs = registry.customs
    if backend not in customs:
        custom = object.__new__(registry)
        # `object.__new__` bypasses Enum, whose members are closed once the class exists; the empty value makes
        # `get_path` raise until a path is registered.
        custom._name_, custom._value_ = backend, ""
        customs[backend] = custom
    return customs[backend]


def register(
    registry: type[BackendEnum], backend: Any, class_path: str | type | None = None, *, override: bool = False
) -> Callable[[type], type]:
    """Register or override a backend: by class path, by class, or (with neither) as a decorator.

    `backend` is a member or a name; a name that no member has creates a custom backend. A member's name is rejected unless
    `override`. Returns the decorator, or the identity if a path or a class was passed. Raises ValueError for a malformed
    name or path, TypeError for a backend of another registry or for a non-class.
    """

    def register_class(cls: type) -> type:
        if not isinstance(cls, type):
            raise TypeError(f"register {registry.__name__}: expected a class, got {cls!r}")
        with _lock():
            member = _member(registry, backend, override)
            # The object is stored before the path: a reader that sees the new path must find the object, since the path
            # may not be importable.
            registry.objects[member] = cls  # a class defined in a function or a notebook cannot be imported by name
            registry.overrides[member] = path_of(cls)
        return cls

    if isinstance(class_path, type):
        register_class(class_path)
    elif class_path is not None:
        check_qualname(class_path)
        with _lock():
            member = _member(registry, backend, override)
            registry.overrides[member] = class_path
            # A class that was registered as an object may have this path too, and a reloaded module another class under it.
            registry.objects.pop(member, None)
    else:
        if not isinstance(backend, registry | str):
            raise TypeError(f"backend must be a {registry.__name__} member or a name, not {backend!r}")
        return register_class
    return lambda x: x


@contextlib.contextmanager
def registered(registry: type[BackendEnum], backend: Any, target: str | type, *, override: bool = True) -> Iterator[Any]:
    """Register for the duration of a `with` block; the previous registration is restored, also after an exception."""
    with _lock():
        member = _member(registry, backend, override)
        tables: tuple[dict[Any, Any], ...] = (registry.objects, registry.overrides)
        # Read and written under one lock: another thread's registration comes either before, and is restored, or after.
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
