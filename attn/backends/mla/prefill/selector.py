"""Select the MLA prefill backend of a layer: requested by name, or the first valid on the platform's list, with reasons.

The decision is the same as for attention backends (`attn.selection.choice`): the backend of ATTN_MLA_PREFILL_BACKEND or of an
explicit argument is used or rejected, never replaced.
"""

from collections.abc import Collection
from typing import Any

from attn.arguments import list_of_names, positive_int
from attn.backends.mla.prefill.abstract import MLAPrefillBackend, MLAPrefillRequest
from attn.backends.mla.prefill.registry import MLAPrefillBackendEnum
from attn.capabilities import Device, Feature
from attn.dtypes import dtype_name
from attn.selection.choice import decide, requested_backend, resolve_device
from attn.selection.platforms import Platform, platform_for
from attn.selection.verdicts import Selection

(ENV_VAR,) = MLAPrefillBackendEnum.variables


def make_mla_prefill_request(
    qk_head_dim: int, v_head_dim: int, dtype: Any, *, num_heads: int | None = None, features: Collection[str] = ()
) -> MLAPrefillRequest:
    """Make a request from any framework's dtype and NumPy integers. Raises ValueError with the argument."""
    return MLAPrefillRequest(
        head_size=positive_int("qk_head_dim", qk_head_dim),
        dtype=dtype_name(dtype),
        # Prefill backends declare `mla`, and a backend that does serves only requests for it (`capabilities.KINDS`).
        features=frozenset({Feature.MLA.value, *list_of_names("features", features)}),
        num_heads=None if num_heads is None else positive_int("num_heads", num_heads),
        # Expanded, every query head has a key and a value of its own.
        num_kv_heads=None if num_heads is None else positive_int("num_heads", num_heads),
        v_head_dim=positive_int("v_head_dim", v_head_dim),
    )


def select_mla_prefill(
    request: MLAPrefillRequest,
    *,
    framework: str,
    backend: MLAPrefillBackendEnum | str | None = None,
    platform: Platform | None = None,
    device: Device | None = None,
    disable: Collection[str] = (),
) -> Selection:
    """Select a prefill backend and return the decision with all its reasons.

    In order of precedence: `backend`, ATTN_MLA_PREFILL_BACKEND, the platform's list; `disable` and ATTN_DISABLE exclude
    backends from the last. `device` may describe a device that is not present. Raises ValueError for an unknown name; for a
    request that no backend serves, returns a `Selection` without a winner (its `require()` raises).
    """
    requested = requested_backend(MLAPrefillBackendEnum, ((backend, "argument"),))
    platform, device = resolve_device(requested, framework, platform, device)
    return decide(MLAPrefillBackendEnum, request, device, platform.mla_prefill_priorities, requested, disable)


def get_mla_prefill_backend(
    qk_head_dim: int,
    v_head_dim: int,
    dtype: Any,
    *,
    framework: str,
    num_heads: int | None = None,
    backend: MLAPrefillBackendEnum | str | None = None,
    on_host: bool = False,
    features: Collection[str] = (),
) -> type[MLAPrefillBackend]:
    """Return the class of the prefill backend for heads of Dn + Dr and Dv; `on_host`: the arrays are on the CPU; `features`:
    names of other required features.

    Raises `UnsupportedError` with every candidate's reasons, ValueError for malformed arguments or an unknown name, and
    `BackendLoadError` if an explicit choice cannot be imported.
    """
    request = make_mla_prefill_request(qk_head_dim, v_head_dim, dtype, num_heads=num_heads, features=features)
    # A process with a GPU may still have a layer's weights on the host: the list is then the CPU's.
    platform = platform_for(framework, "cpu" if on_host else None)
    return select_mla_prefill(request, framework=framework, backend=backend, platform=platform).require()
