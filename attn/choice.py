"""One funnel for the three registries: what was asked for -> its member -> the candidates -> the decision -> the log.

`attn.selector`, `attn.diffusion.selector` and `attn.backends.mla.prefill.selector` differ in their requests and in who may
ask for a backend by name. Everything after that is here, so that it means the same in all three:

- a backend asked for by name is obeyed or refused, never replaced;
- ATTN_DISABLE holds names of any registry: each keeps those that it has out of its automatic choice and skips the others'
  names; a name that no registry has is an error;
- the argument `disable` belongs to one call: a name that its registry does not have is an error;
- times measured here (`attn.preferences`) reorder an automatic choice only.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from attn import envs, plugins, preferences
from attn.backend_enum import BackendEnum, ranked, registries, unknown_name
from attn.backends.arguments import list_of_names
from attn.capabilities import WINGS, Candidate, Device, Request
from attn.logger import init_logger
from attn.platforms import Platform, default_framework, platform_for
from attn.verdicts import Selection, choose

logger = init_logger(__name__)

#: Sources that are no words of the user's, so that an error about a name does not cite them.
_UNCITED = ("", "argument", "context")


class Asked(NamedTuple):
    """The backend asked for by name and who asked, or (None, "priority")."""

    member: Any
    source: str


def asked_for(registry: type[BackendEnum], wishes: Iterable[tuple[Any, str]] = ()) -> Asked:
    """The first of `wishes`, pairs of (member, name or None, source), that names a backend, else the registry's variables.

    Raises as `member_of`.
    """
    plugins.load()
    for backend, source in wishes:
        if backend is not None:
            return Asked(member_of(registry, backend, source), source)
    if (found := asked_by_environment(registry)) is not None:
        variable, name = found
        return Asked(member_of(registry, name, variable), variable)
    return Asked(None, "priority")


def asked_by_environment(registry: type[BackendEnum]) -> tuple[str, str] | None:
    """(variable, backend name) that the environment asks for, or None. A value of nothing but spaces counts as unset."""
    found = ((variable, (envs.read(variable) or "").strip()) for variable in registry.variables)
    return next((pair for pair in found if pair[1]), None)


def member_of(registry: type[BackendEnum], backend: Any, source: str = "") -> Any:
    """`backend`, a member or a name, as a member (custom backends and plugins included).

    Raises ValueError for a name that the registry does not have, citing the `source` of the name, and TypeError for what is
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
    """{name of a backend that automatic choice must not pick: who said so}. Raises ValueError for an unknown name."""
    out = {member_of(registry, name).name: "the caller" for name in list_of_names("disable", disable)}
    for name in envs.read_list("ATTN_DISABLE") or ():
        if name in registry:
            out[name] = "ATTN_DISABLE"
        elif not any(name in other for other in registries().values()):
            every = [known for other in registries().values() for known in other.names()]
            raise ValueError(f"ATTN_DISABLE={name}: {unknown_name('backend', name, every)}")
    return out


def wing_of_backend(member: Any) -> str | None:
    """The framework that a backend asked for by name belongs to, when its path or its capabilities tell."""
    if member is None:
        return None
    candidate = member.candidate()
    capabilities = getattr(candidate.backend, "capabilities", None)
    if capabilities is not None:
        return str(capabilities.framework)
    parts = candidate.path.split(".")
    return parts[1] if parts[0] == "attn" and parts[1] in WINGS else None


def place_of(asked: Asked, framework: str | None, platform: Platform | None, device: Device | None) -> tuple[Platform, Device]:
    """Where a layer is to run: what the caller says, else where the backend asked for by name belongs, else the default.

    Raises TypeError for a `device` that is no `Device`.
    """
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device={device!r} must be an attn.Device, such as Device('torch', 'cuda')")
    if platform is None:
        named = framework or (device.framework if device else None) or wing_of_backend(asked.member)
        platform = platform_for(named or default_framework(), device.platform if device else None)
    return platform, device or platform.device()


def decide(
    registry: type[BackendEnum],
    request: Request,
    device: Device,
    order: Callable[[Request, Device], Sequence[str]],
    asked: Asked,
    disable: Collection[str] = (),
    *,
    role: str = "",
    measured_on: Platform | None = None,
) -> Selection:
    """The decision with all its reasons, logged.

    order: the platform's priority list for this registry, called unless a backend was asked for by name. role: what the log
    says of the layer. measured_on: the platform whose measured times may reorder the list; None: they do not enter.
    """
    envs.warn_of_unknown()
    out = disabled(registry, disable)  # a misspelt name is an error whoever chooses
    if asked.member is not None:
        return _logged(choose([asked.member.candidate()], request, device, asked.source), registry, role)
    candidates = [
        Candidate(m.name, problem=f"disabled by {out[m.name]}") if m.name in out else m.candidate()
        for m in ranked(registry, order(request, device))
    ]
    selection = choose(candidates, request, device, asked.source)
    if measured_on is not None:
        selection = preferences.preferred(selection, candidates, measured_on)
    return _logged(selection, registry, role)


def _logged(selection: Selection, registry: type[BackendEnum], role: str) -> Selection:
    if selection.winner is not None:
        what = f"{registry.kind} for {role}" if role else registry.kind
        logger.info_once("Using %s %s on %s.", selection.name, what, str(selection.device))
    logger.debug("%s", selection)
    return selection
