"""attn: find the fastest correct attention backend for this hardware and framework, and explain the choice.

Importing this package imports nothing: each name below is resolved on first use, so `import attn` takes a millisecond and
loads neither NumPy, torch nor jax. Names of subpackages (`torch`, `jax`) are never bound.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_FACE = {
    "AttentionBackendEnum": "attn.backends.registry",
    "MLAPrefillBackendEnum": "attn.backends.mla.prefill.registry",
    "DiffusionAttentionBackendEnum": "attn.diffusion.backends.registry",
    "register_backend": "attn.backends.registry",
    "registered_backend": "attn.backends.registry",
    "register_mla_prefill_backend": "attn.backends.mla.prefill.registry",
    "register_diffusion_backend": "attn.diffusion.backends.registry",
    "get_attn_backend": "attn.selector",
    "global_force_attn_backend": "attn.selector",
    "global_force_attn_backend_context_manager": "attn.selector",
    "backend_per_kind": "attn.selector",
    "backend_per_kind_context_manager": "attn.selector",
    "select": "attn.selector",
    "make_request": "attn.selector",
    "Capabilities": "attn.capabilities",
    "Device": "attn.capabilities",
    "Feature": "attn.capabilities",
    "Request": "attn.capabilities",
    "Selection": "attn.selection.verdicts",
    "AttentionType": "attn.backends.abstract",
    "CommonAttentionMetadata": "attn.backends.metadata",
    "spans_of": "attn.backends.metadata",
    "KVCacheSpec": "attn.backends.abstract",
    "kv_cache_scales": "attn.calibration",
    "attention": "attn.functional",
    "record_next": "attn.recording",
    "explain": "attn.reports.report",
    "explain_model": "attn.reports.model_report",
    "AttnError": "attn.errors",
    "MetadataError": "attn.errors",
    "UnsupportedError": "attn.errors",
    "BackendLoadError": "attn.errors",
}

__all__ = ["__version__", *_FACE]


# Nothing is stored in the module's globals: a name is resolved anew at each use, so a test that replaces the attribute
# in its own module is seen here too, and a failed import is tried again. `import_module` of a loaded module is one
# look-up.
def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    raise AttributeError(f"module 'attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    # `dir` decides what a notebook completes; without the names of _FACE it would list only the imports above.
    return sorted({*globals(), *_FACE})
