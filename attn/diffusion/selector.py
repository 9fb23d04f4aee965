"""Select the diffusion backend of a layer: per role, per category, by default, or the first valid on the platform's list.

A model has layers of different roles: a free name ("audio_to_video"), or one of the categories self, cross and joint.
`DiffusionAttentionConfig` requests backends for each; `Selection.source` says what made the choice: `argument`,
`per_role[...]`, `per_category[...]`, `default`, ATTN_DIFFUSION_BACKEND, or `priority`. The rest is the same in all registries
(`attn.selection.choice`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn.arguments import check_flag, list_of_names, positive_int
from attn.capabilities import Device, check_known
from attn.diffusion.backends.abstract import ROLES, DiffusionAttentionBackend, DiffusionRequest
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.dtypes import dtype_name, framework_of_dtype
from attn.selection.choice import decide, requested_backend, resolve_device
from attn.selection.platforms import Platform
from attn.selection.verdicts import Selection

(ENV_VAR,) = DiffusionAttentionBackendEnum.variables
Name = DiffusionAttentionBackendEnum | str


@dataclass(frozen=True)
class DiffusionAttentionConfig:
    """Backends by role, by category (self, cross, joint) and for everything else; None leaves the choice open."""

    per_role: Mapping[str, Name] = field(default_factory=dict)
    per_category: Mapping[str, Name] = field(default_factory=dict)
    default: Name | None = None

    def __post_init__(self) -> None:
        for category in self.per_category:
            check_known("category", category, ROLES)

    def resolve(self, role: str, category: str) -> tuple[Name | None, str]:
        """Return (requested backend, source), or (None, "")."""
        # The narrowest setting first: a role names a layer, a category several roles.
        if role in self.per_role:
            return self.per_role[role], f"per_role[{role!r}]"
        if category in self.per_category:
            return self.per_category[category], f"per_category[{category!r}]"
        # Without a default nothing was configured, and the environment is read next (`requested_backend`).
        return self.default, "default" if self.default is not None else ""


def make_diffusion_request(
    head_size: int,
    dtype: Any,
    *,
    features: Collection[str] = (),
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    error_budget: float = 0.0,
    causal: bool = False,
    key_mask: bool = False,
    rows: int | None = None,
    keys: int | None = None,
) -> DiffusionRequest:
    """Make a request from any framework's dtype and NumPy integers. Raises ValueError with the argument."""
    # True would be a budget of 1, an error as large as the output itself.
    if not isinstance(error_budget, int | float) or isinstance(error_budget, bool) or not 0 <= error_budget < 1:
        raise ValueError(f"error_budget={error_budget!r} must be a number of at least 0 and below 1 (0: exact backends only)")
    return DiffusionRequest(
        head_size=positive_int("head_size", head_size),
        dtype=dtype_name(dtype),
        features=frozenset(list_of_names("features", features)),
        num_heads=None if num_heads is None else positive_int("num_heads", num_heads),
        num_kv_heads=None if num_kv_heads is None else positive_int("num_kv_heads", num_kv_heads),
        error_budget=float(error_budget),
        causal=check_flag("causal", causal),
        key_mask=check_flag("key_mask", key_mask),
        rows=None if rows is None else positive_int("rows", rows),
        keys=None if keys is None else positive_int("keys", keys),
    )


def select_diffusion(
    request: DiffusionRequest,
    *,
    role: str = "self",
    category: str | None = None,
    config: DiffusionAttentionConfig | None = None,
    backend: Name | None = None,
    framework: str | None = None,
    platform: Platform | None = None,
    device: Device | None = None,
    disable: Collection[str] = (),
) -> Selection:
    """Select a diffusion backend and return the decision with all its reasons.

    role: a name for what the layer does; category: self, cross or joint (default: the role if it is one of them, else
    self). `device` may describe a device that is not present. Raises ValueError for an unknown name or category; for a
    request that no backend serves, returns a `Selection` without a winner (its `require()` raises).
    """
    category = check_known("category", category if category is not None else role if role in ROLES else "self", ROLES)
    configured = (config or DiffusionAttentionConfig()).resolve(role, category)
    requested = requested_backend(DiffusionAttentionBackendEnum, ((backend, "argument"), configured))
    platform, device = resolve_device(requested, framework, platform, device)
    order = platform.diffusion_priorities
    return decide(DiffusionAttentionBackendEnum, request, device, order, requested, disable, role=role)


def get_diffusion_attn_backend(
    head_size: int,
    dtype: Any,
    *,
    role: str = "self",
    category: str | None = None,
    config: DiffusionAttentionConfig | None = None,
    backend: Name | None = None,
    **layer: Any,
) -> type[DiffusionAttentionBackend]:
    """Return the class of the backend for a layer: `make_diffusion_request(head_size, dtype, **layer)`. Raises
    `UnsupportedError` with every candidate's reasons, ValueError for malformed arguments, `BackendLoadError` if an explicit
    choice cannot be imported."""
    request = make_diffusion_request(head_size, dtype, **layer)
    framework = framework_of_dtype(dtype)
    selection = select_diffusion(request, role=role, category=category, config=config, backend=backend, framework=framework)
    return selection.require()
