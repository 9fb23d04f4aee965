"""Select the attention backend for a request: one requested by name, or the first valid on the platform's list.

Names and signatures are vLLM's. In addition: a force is a context variable (it does not leak into other threads or tasks,
nor outlive its `with` block), and so is a backend per kind of layer; every change of force, environment or registration takes
effect at the next call; and a backend requested by name is used or rejected with its reasons, never replaced.
"""

import contextlib
import contextvars
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from attn import envs
from attn.arguments import list_of_names, positive_int
from attn.backend_enum import generation, unknown_name
from attn.backends.abstract import AttentionBackend
from attn.backends.registry import AttentionBackendEnum, blocksparse_candidate
from attn.capabilities import LAYER_KINDS, AttentionType, Device, Feature, Request, layer_kind
from attn.dtypes import dtype_name, framework_of_dtype
from attn.imports import resolve_obj_by_qualname
from attn.logger import fork_safe_lock, init_logger
from attn.selection import choice, plugins, preferences
from attn.selection.platforms import Platform, default_framework, platform_for
from attn.selection.verdicts import Selection, choose

STR_BACKEND_ENV_VAR = "ATTN_BACKEND"
PER_KIND_ENV_VAR = "ATTN_BACKEND_PER_KIND"

logger = init_logger(__name__)

_PerKind = tuple[tuple[str, AttentionBackendEnum], ...]

_forced = contextvars.ContextVar[AttentionBackendEnum | None]("forced_attn_backend", default=None)
# A tuple of pairs, because it is part of the cache's key, which has to be hashable.
_per_kind = contextvars.ContextVar[_PerKind]("attn_backend_per_kind", default=())


class _Key(NamedTuple):
    """Everything that a choice depends on: its arguments, and state that may change between calls."""

    head_size: object
    head_size_type: type
    dtype: Any
    kv_cache_dtype: str | None
    block_size: object
    block_size_type: type
    is_attention_free: bool
    is_blocksparse: bool
    use_mla: bool
    loaded: tuple[bool, bool] | None
    forced: AttentionBackendEnum | None
    per_kind: _PerKind
    generation: int  #: of the registries
    environment: tuple[object, ...]
    default_device: object  #: JAX's, whose platform is selected for
    measured: object  #: state of the file that `attn.selection.preferences` reads, if ATTN_PREFERENCES is set

    def now(self) -> "_Key":
        """Return the key of the same arguments and the current state."""
        environment = envs.selecting()
        measured = environment[_PREFERENCES] and _measuring(self.dtype)
        return self._replace(
            generation=generation(), environment=environment, default_device=_default_device(), measured=measured
        )


# Its raw value decides whether the file of times is looked at: unset costs nothing.
_PREFERENCES = envs.SELECTING.index("ATTN_PREFERENCES")
_cache: dict[_Key, type[AttentionBackend]] = {}
_CACHE_LIMIT = 4096  # more than any model needs; bounds memory when a caller sweeps shapes
_cold = fork_safe_lock()


def __getattr__(name: str) -> Any:
    if name == "forced_attn_backend":  # vLLM's module attribute, read-only: force through the functions below
        return _forced.get()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def backend_name_to_enum(backend_name: str) -> AttentionBackendEnum | None:
    """
    Convert a string backend name to an AttentionBackendEnum value.

    Returns:
    * AttentionBackendEnum: enum value if backend_name is a valid in-tree type, or a custom backend registered by name
    * None: otherwise it's an invalid in-tree type or an out-of-tree platform is
            loaded.
    """
    assert backend_name is not None
    try:
        return choice.member_of(AttentionBackendEnum, backend_name)
    except ValueError:
        return None


def get_env_variable_attn_backend() -> AttentionBackendEnum | None:
    """
    Get the backend override specified by the attention backend environment variable (ATTN_BACKEND, else
    VLLM_ATTENTION_BACKEND), if one is specified.

    Returns:

    * AttentionBackendEnum value if an override is specified
    * None otherwise, also for an unknown name (selection rejects it)
    """
    requested = choice.requested_by_environment(AttentionBackendEnum)
    return None if requested is None else backend_name_to_enum(requested[1])


def get_global_forced_attn_backend() -> AttentionBackendEnum | None:
    """
    Get the currently-forced choice of attention backend,
    or None if auto-selection is currently enabled.
    """
    return _forced.get()


def global_force_attn_backend(attn_backend: AttentionBackendEnum | str | None) -> None:
    """
    Force all attention operations to use a specified backend.

    Passing `None` for the argument re-enables automatic
    backend selection. The force holds in the current context (this thread, this asyncio task and what it starts).

    Arguments:

    * attn_backend: backend selection (None to revert to auto)

    Raises ValueError for an unknown name, TypeError for anything that is neither a member nor a name.
    """
    _forced.set(None if attn_backend is None else choice.member_of(AttentionBackendEnum, attn_backend))


@contextlib.contextmanager
def global_force_attn_backend_context_manager(attn_backend: AttentionBackendEnum | str) -> Generator[None, None, None]:
    """
    Globally force an attention backend override within a
    context manager, reverting the global attention backend
    override to its prior state upon exiting the context
    manager.

    Arguments:

    * attn_backend: attention backend to force

    Returns:

    * Generator
    """
    original_value = get_global_forced_attn_backend()
    global_force_attn_backend(attn_backend)
    try:
        yield
    finally:
        global_force_attn_backend(original_value)


def backend_per_kind(backends: Mapping[str, AttentionBackendEnum | str] | None) -> None:
    """
    Use a backend for all layers of a kind. A later call replaces the whole mapping.

    Holds in the current context, as a force does. An explicit `backend=` and a force win; a kind that is not in the mapping
    follows ATTN_BACKEND_PER_KIND, then ATTN_BACKEND, then the platform's list.

    Arguments:

    * backends: backend by kind of layer, one of `attn.capabilities.LAYER_KINDS`, mapped to a member or a name (None or
                empty to revert to auto)

    Raises ValueError for an unknown kind or backend, TypeError for a backend that is neither a member nor a name.
    """
    _per_kind.set(_checked_per_kind((backends or {}).items(), "backend_per_kind"))


@contextlib.contextmanager
def backend_per_kind_context_manager(backends: Mapping[str, AttentionBackendEnum | str]) -> Generator[None, None, None]:
    """
    Use a backend for all layers of a kind within a context manager (`backend_per_kind`), reverting to the prior mapping
    upon exiting it.
    """
    original = _per_kind.get()
    backend_per_kind(backends)
    try:
        yield
    finally:
        _per_kind.set(original)


def selection_state() -> tuple[object, ...]:
    """Return what selection depends on besides a request: the registries, the environment, and the context's backends."""
    return generation(), envs.selecting(), _per_kind.get(), _forced.get()


def requested_for_kind(layer_kind: str) -> choice.RequestedBackend:
    """Return the backend requested for a kind of layer: by `backend_per_kind`, else by ATTN_BACKEND_PER_KIND, else None.

    Raises ValueError for a malformed variable, and for an unknown kind or backend in it.
    """
    for source, backends in (("backend_per_kind", _per_kind.get), (PER_KIND_ENV_VAR, _per_kind_in_environment)):
        # The environment is parsed only if the context has no backend for the kind, so a malformed variable is an error
        # only where it counts.
        if (member := dict(backends()).get(layer_kind)) is not None:
            return choice.RequestedBackend(member, f"{source}[{layer_kind!r}]")
    return choice.RequestedBackend(None, "priority")


def _per_kind_in_environment() -> _PerKind:
    pairs = list[tuple[str, str]]()
    for part in envs.read_list(PER_KIND_ENV_VAR) or ():
        kind, equals, name = (word.strip() for word in part.partition("="))
        # A kind named twice has no answer that is not a guess.
        if not (kind and equals and name) or kind in dict(pairs):
            raise ValueError(f"{PER_KIND_ENV_VAR}={part!r}: must be kind=BACKEND, comma-separated, each kind once")
        pairs.append((kind, name))
    return _checked_per_kind(pairs, PER_KIND_ENV_VAR)


def _checked_per_kind(backends: Iterable[tuple[str, AttentionBackendEnum | str]], source: str) -> _PerKind:
    pairs = []
    for kind, backend in backends:
        if kind not in LAYER_KINDS:
            raise ValueError(f"{source}: {unknown_name('kind of layer', kind, LAYER_KINDS)}")
        pairs.append((kind, choice.member_of(AttentionBackendEnum, backend, f"{source}[{kind!r}]")))
    return tuple(pairs)


def get_attn_backend(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool = False,
    is_blocksparse: bool = False,
    use_mla: bool = False,
    **wants: Any,
) -> type[AttentionBackend]:
    """Selects which attention backend to use and lazily imports it.

    Args:
        head_size: size of a query/key head.
        dtype: the model's dtype: a torch dtype, a jax or NumPy one, or its name. Its kind decides the framework.
        kv_cache_dtype: None or "auto" for the model's own, or one of `attn.dtypes.KV_CACHE_DTYPES`.
        block_size: tokens per block of the paged cache.
        is_attention_free: the model has no attention layers; selects the placeholder backend.
        is_blocksparse: selects the block-sparse backend.
        use_mla: the layer is multi-head latent attention.
        wants: further keywords of `make_request` (`features`, `attn_type`, `num_heads`, `num_kv_heads`).

    Returns:
        The backend class.

    Raises:
        UnsupportedError (a ValueError) with every candidate's reasons; ValueError for malformed arguments or an unknown
        name in ATTN_BACKEND; BackendLoadError when an explicit choice cannot be imported.
    """
    # Not cached: vLLM's signature has none of them, and `features` may be any container.
    if wants:
        request = make_request(head_size, dtype, kv_cache_dtype, block_size, use_mla=use_mla, **wants)
        return _backend_for(request, dtype, is_attention_free, is_blocksparse)
    return _cached_get_attn_backend(
        head_size, dtype, kv_cache_dtype, block_size, is_attention_free, is_blocksparse, True, use_mla
    )


def _cached_get_attn_backend(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool,
    is_blocksparse: bool = False,
    use_v1: bool = False,
    use_mla: bool = False,
) -> type[AttentionBackend]:
    """Cached implementation of `get_attn_backend`, keyed by everything it depends on. `use_v1` is accepted and unused."""
    # Types are in the key because True == 1 == 1.0; the loaded frameworks matter only for a dtype given as a string.
    # A string has no framework of its own; which one it gets depends on what the process has imported so far
    # (`default_framework`).
    loaded = ("torch" in sys.modules, "jax" in sys.modules) if type(dtype) is str else None
    # Read once: the flag of ATTN_PREFERENCES and the rest of the key must be of the same moment.
    environment = envs.selecting()
    # A plain tuple in `_Key`'s order: it equals the NamedTuple, whose constructor takes as long as the look-up.
    plain = (
        head_size, type(head_size), dtype, kv_cache_dtype, block_size, type(block_size), is_attention_free, is_blocksparse,
        use_mla, loaded, _forced.get(), _per_kind.get(), generation(), environment, _default_device(),
        environment[_PREFERENCES] and _measuring(dtype),
    )  # fmt: skip
    try:
        return _cache[plain]  # type: ignore[index]
    except (KeyError, TypeError):  # TypeError: an unhashable argument; make_request reports it
        pass
    # Outside the try, since a TypeError or KeyError of its own must reach the caller.
    request = make_request(head_size, dtype, kv_cache_dtype, block_size, use_mla=use_mla)
    plugins.load()  # outside the lock, since a plugin may call the selector while loading
    with _cold():
        # Plugins may have registered backends, and other threads may have changed the environment, since the key was made.
        key = _Key(*plain).now()
        # Another thread may have made the choice while this one waited for the lock.
        if key in _cache:
            return _cache[key]
        backend = _backend_for(request, dtype, is_attention_free, is_blocksparse)
        if key == key.now():  # unchanged since the start
            # All at once: keeping an order of use would cost each look-up, and a caller that comes here sweeps shapes
            # that it does not use again.
            if len(_cache) >= _CACHE_LIMIT:
                _cache.clear()
            _cache[key] = backend
        return backend


def _default_device() -> object:
    """Return `jax.default_device`, which may differ between calls, in a process that has imported jax."""
    config = getattr(sys.modules.get("jax"), "config", None)
    return getattr(config, "jax_default_device", None)


def _measuring(dtype: Any) -> object:
    """State of the file that `attn.selection.preferences` reads, if ATTN_PREFERENCES is set: a few microseconds per call."""
    if not preferences.is_enabled():  # set to 0: the framework need not be found
        return False
    platform = platform_for(_framework(dtype))
    # `deterministic` is a setting of the framework that may change between calls, and turns measured times off.
    return platform.deterministic(), preferences.state(platform.device())


def forget() -> None:
    """Clear the cache of choices."""
    _cache.clear()


_cached_get_attn_backend.cache_clear = forget  # type: ignore[attr-defined]  # vLLM's is a functools cache


def _backend_for(request: Request, dtype: Any, is_attention_free: bool, is_blocksparse: bool) -> type[AttentionBackend]:
    """Select as vLLM does, in three branches: block-sparse, attention-free, and everything else."""
    if is_blocksparse:
        logger.info_once("Using BlocksparseFlashAttention backend.")
        framework = _framework(dtype)
        # A block-sparse backend serves only requests for it (`capabilities.KINDS`), and is judged alone: the caller
        # asked for this family.
        sparse = replace(request, features=request.features | {Feature.BLOCK_SPARSE})
        candidate = blocksparse_candidate(framework)
        return choose([candidate], sparse, platform_for(framework).device(), "is_blocksparse").require()
    if is_attention_free:
        return resolve_obj_by_qualname("attn.backends.placeholder_attn.PlaceholderAttentionBackend")
    return select(request, framework=_framework(dtype, request)).require()


def make_request(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None = None,
    block_size: int | None = None,
    *,
    use_mla: bool = False,
    attn_type: str = AttentionType.DECODER,
    features: Collection[str] = (),
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> Request:
    """Make a `Request` from any framework's dtype, NumPy integers, and None for defaults.

    `features` is a list (or set) of names, not one string; ATTN_BATCH_INVARIANT=1 adds `batch_invariant`. Raises ValueError
    with the argument, its value and the allowed values.
    """
    # The class keeps strings only (`Request.__post_init__`), so a member of `Feature` and its name make equal requests.
    required = {*list_of_names("features", features), *({Feature.MLA} if use_mla else ())}
    if envs.batch_invariant():
        required.add(Feature.BATCH_INVARIANT)
    return Request(
        head_size=positive_int("head_size", head_size),
        dtype=dtype_name(dtype),
        kv_cache_dtype="auto" if kv_cache_dtype is None else kv_cache_dtype,
        block_size=None if block_size is None else positive_int("block_size", block_size),
        attn_type=attn_type,
        features=frozenset(required),
        num_heads=None if num_heads is None else positive_int("num_heads", num_heads),
        num_kv_heads=None if num_kv_heads is None else positive_int("num_kv_heads", num_kv_heads),
    )


def select(
    request: Request,
    *,
    framework: str | None = None,
    backend: AttentionBackendEnum | str | None = None,
    platform: Platform | None = None,
    device: Device | None = None,
    disable: Collection[str] = (),
    measured: bool = True,
) -> Selection:
    """Select a backend and return the decision with all its reasons.

    In order of precedence: the force of this context, `backend`, the backend of the layer's kind (`backend_per_kind`, then
    ATTN_BACKEND_PER_KIND), ATTN_BACKEND (or VLLM_ATTENTION_BACKEND), the platform's priority list. `disable` (a list of
    names) and ATTN_DISABLE exclude backends from automatic choice. `device` may describe a device that is not present ("what
    would serve on an MI300?"). Raises ValueError for an unknown name; for a request that
    no backend serves, returns a `Selection` without a winner (its `require()` raises).

    With ATTN_PREFERENCES set, times measured on this machine (`attn tune`) may put a valid backend before the list's first,
    unless `measured` is False (`attn.selection.preferences`).
    """
    named = _requested(backend, request)
    platform, device = choice.resolve_device(named, framework, platform, device)
    return choice.decide(
        AttentionBackendEnum, request, device, platform.priorities, named, disable, measured_on=platform if measured else None
    )


def _requested(backend: AttentionBackendEnum | str | None, request: Request | None) -> choice.RequestedBackend:
    """Return the backend requested by name: by the force of this context, by `backend`, for the layer's kind, or by the
    environment."""

    def wishes() -> Iterator[tuple[Any, str]]:
        # A generator: the kind's backend is looked up, and its variable parsed, only if neither a force nor an argument
        # decides.
        yield _forced.get(), "context"
        yield backend, "argument"
        if request is not None:
            yield requested_for_kind(layer_kind(request.attn_type, request.features))

    return choice.requested_backend(AttentionBackendEnum, wishes())


def _framework(dtype: Any, request: Request | None = None) -> str:
    """Return the framework for a dtype: its own, else that of a backend requested by name, else the default."""
    return framework_of_dtype(dtype) or choice.framework_of_backend(_requested(None, request).member) or default_framework()
