"""Selection shared by the three registries: requested name -> member -> candidates -> decision -> log.

`attn.selector`, `attn.diffusion.selector` and `attn.backends.mla.prefill.selector` differ in their requests and in where a
backend can be requested by name. The rest is in this module, so that it is the same in all three:

- a backend requested by name is used or rejected, never replaced (TRITON_ATTN under jax is TRITON_ATTN_JAX, its kernels there);
- ATTN_DISABLE lists names of any registry: each registry excludes its own from automatic choice and ignores those of the
  others; a name that no registry has is an error;
- the argument `disable` applies to one call: a name that its registry does not have is an error;
- times measured on this machine (`attn.selection.preferences`) reorder an automatic choice only.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from attn import envs
from attn.arguments import list_of_names
from attn.backend_enum import BackendEnum, ranked, registries, unknown_name
from attn.capabilities import FRAMEWORKS, Candidate, Device, Request
from attn.logger import init_logger
from attn.selection import plugins, preferences
from attn.selection.platforms import Platform, default_framework, platform_for
from attn.selection.verdicts import Selection, choose

logger = init_logger(__name__)

#: Sources that an error about a name does not cite, because the user did not write them.
_UNCITED = ("", "argument", "context")


class RequestedBackend(NamedTuple):
    """The backend requested by name and the source of the request, or (None, "priority")."""

    member: Any
    source: str


def requested_backend(registry: type[BackendEnum], wishes: Iterable[tuple[Any, str]] = ()) -> RequestedBackend:
    """Return the first of `wishes`, (member, name or None, source) pairs, that names a backend, else the environment's.

    Raises the exceptions of `member_of`.
    """
    # Before any name is resolved: the backend may be a plugin's.
    plugins.load()
    for backend, source in wishes:
        if backend is not None:
            return RequestedBackend(member_of(registry, backend, source), source)
    if (by_environment := requested_by_environment(registry)) is not None:
        variable, name = by_environment
        return RequestedBackend(member_of(registry, name, variable), variable)
    return RequestedBackend(None, "priority")


def requested_by_environment(registry: type[BackendEnum]) -> tuple[str, str] | None:
    """Return (variable, backend name) requested by the environment, or None. A blank value counts as unset."""
    # Blank counts as unset, as container files write `ATTN_BACKEND=`; the first variable that is set decides, so
    # ATTN_BACKEND wins over vLLM's.
    settings = ((variable, (envs.read(variable) or "").strip()) for variable in registry.variables)
    return next((pair for pair in settings if pair[1]), None)


def member_of(registry: type[BackendEnum], backend: Any, source: str = "") -> Any:
    """Return `backend`, a member or a name, as a member (including custom backends and plugins).

    Raises ValueError, citing `source`, for a name that the registry does not have, and TypeError for anything that is
    neither a member nor a name.
    """
    if isinstance(backend, registry):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a {registry.__name__} member or a name, not {backend!r}")
    if backend not in registry:
        plugins.load()  # it may be a plugin's
    try:
        return registry[backend]
    except ValueError as error:
        raise ValueError(str(error) if source in _UNCITED else f"{source}={backend}: {error}") from None


def disabled(registry: type[BackendEnum], disable: Collection[str] = ()) -> dict[str, str]:
    """Return {backend excluded from automatic choice: what disabled it}. Raises ValueError for an unknown name."""
    # By the member's own name, since a name may be given in any case.
    out = {member_of(registry, name).name: "the caller" for name in list_of_names("disable", disable)}
    for name in envs.read_list("ATTN_DISABLE") or ():
        if name in registry:
            out[registry[name].name] = "ATTN_DISABLE"
        # The variable is one for three registries: a name of another one is none of this registry's business, but a
        # name of none is a misspelling, which would leave a backend on that the user turned off.
        elif not any(name in other for other in registries().values()):
            every = [known for other in registries().values() for known in other.names()]
            raise ValueError(f"ATTN_DISABLE={name}: {unknown_name('backend', name, every)}")
    return out


def framework_of_backend(member: Any) -> str | None:
    """Return the framework of a backend if its path or its capabilities determine it, else None."""
    if member is None:
        return None
    candidate = member.candidate()
    capabilities = getattr(candidate.backend, "capabilities", None)
    if capabilities is not None:
        return str(capabilities.framework)
    # A built-in whose framework is not installed has no record, but its path says where it belongs.
    parts = candidate.path.split(".")
    return parts[1] if parts[0] == "attn" and parts[1] in FRAMEWORKS else None


def resolve_device(
    requested: RequestedBackend, framework: str | None, platform: Platform | None, device: Device | None
) -> tuple[Platform, Device]:
    """Return the platform and device of a layer: those that the caller passes, else the current ones of the requested backend's
    framework, else those of the default framework. A requested backend that serves the host alone is judged there.

    Raises TypeError for a `device` that is not a `Device`.
    """
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device={device!r} must be an attn.Device, such as Device('torch', 'cuda')")
    if platform is None:
        # The caller's framework, then the device's, then the requested backend's: `backend="PALLAS"` asks for jax even
        # in a process that has imported torch only.
        named = framework or (device.framework if device else None) or framework_of_backend(requested.member)
        platform = platform_for(named or default_framework(), device.platform if device else None)
        if device is None and requested.member is not None and (host := platform.host()) is not None:
            record = getattr(requested.member.candidate().backend, "capabilities", None)
            # An array may be anywhere on a machine with an accelerator, and this backend says where.
            if record is not None and record.device_reasons(platform.device()) and not record.device_reasons(host.device()):
                platform = host
    return platform, device or platform.device()


def decide(
    registry: type[BackendEnum],
    request: Request,
    device: Device,
    order: Callable[[Request, Device], Sequence[str]],
    requested: RequestedBackend,
    disable: Collection[str] = (),
    *,
    role: str = "",
    measured_on: Platform | None = None,
) -> Selection:
    """Make the decision with all its reasons, and log it.

    order: the platform's priority list for this registry, called unless a backend was requested by name. role: the layer's
    role in the log message. measured_on: the platform whose measured times may reorder the list; None: they are not used.
    """
    envs.warn_of_unknown()
    out = disabled(registry, disable)  # a misspelled name is always an error
    if requested.member is not None:
        # The platform's order is not computed: a list of one, judged as every candidate is.
        member = requested.member.under(device.framework)
        return _logged(choose([member.candidate()], request, device, requested.source), registry, role)
    names = dict.fromkeys(order(request, device))
    if measured_on is not None:
        # Pairs are on no list: only a measurement makes them candidates, after the list's own.
        names |= dict.fromkeys(name for name in preferences.pairs_for(request, measured_on) if name in registry)
    candidates = []
    for member in ranked(registry, list(names)):
        # A pair is off if either of its members is. A disabled backend stays in the trace with its reason, and is not
        # imported.
        source = next((out[name] for name in (member.name, *(part.name for part in member.parts)) if name in out), None)
        candidates.append(member.candidate() if source is None else Candidate(member.name, problem=f"disabled by {source}"))
    selection = choose(candidates, request, device, requested.source)
    if measured_on is not None:
        selection = preferences.preferred(selection, candidates, measured_on)
    return _logged(selection, registry, role)


def _logged(selection: Selection, registry: type[BackendEnum], role: str) -> Selection:
    if selection.winner is not None:
        label = f"{registry.label} for {role}" if role else registry.label
        # Once per backend and device, as vLLM logs it; every decision with its reasons at level debug.
        logger.info_once("Using %s %s on %s.", selection.name, label, str(selection.device))
    logger.debug("%s", selection)
    return selection
