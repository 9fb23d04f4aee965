"""Registry for MLA prefill backends.

The four vendors' backends of vLLM's registry, built-in ones that need no vendor package, and a slot for a custom one; any
number more may be registered by name.
"""

from collections.abc import Callable

from attn import backend_enum
from attn.backend_enum import BackendEnum, BackendEnumMeta

_MLAPrefillBackendEnumMeta = BackendEnumMeta


class MLAPrefillBackendEnum(
    BackendEnum,
    label="MLA prefill backend",
    unset=(
        "MLA prefill backend {name} must be registered before use. "
        "Use register_mla_prefill_backend(MLAPrefillBackendEnum.{name}, 'your.module.YourClass')"
    ),
    variables=("ATTN_MLA_PREFILL_BACKEND",),
    methods=("get_name", "run_prefill_new_tokens", "run_prefill_context_chunk"),
):
    """Enumeration of all supported MLA prefill backends."""

    FLASH_ATTN = "attn.torch.backends.mla.prefill.flash_attn.FlashAttnPrefillBackend"
    FLASHINFER = "attn.torch.backends.mla.prefill.flashinfer.FlashInferPrefillBackend"
    TRTLLM_RAGGED = "attn.torch.backends.mla.prefill.trtllm_ragged.TrtllmRaggedPrefillBackend"
    TOKENSPEED_MLA = "attn.torch.backends.mla.prefill.tokenspeed_mla.TokenspeedMLAPrefillBackend"
    TRITON = "attn.torch.backends.mla.prefill.triton.TritonPrefillBackend"
    TORCH_SDPA = "attn.torch.backends.mla.prefill.sdpa.TorchSDPAPrefillBackend"
    TRITON_JAX = "attn.jax.backends.mla.prefill.triton.TritonPrefillBackend"
    XLA = "attn.jax.backends.mla.prefill.xla.XLAPrefillBackend"
    PALLAS = "attn.jax.backends.mla.prefill.pallas.PallasPrefillBackend"
    # Placeholder for third-party/custom backends - must be registered before use
    # None and not "": an Enum makes members of equal values aliases of one member.
    CUSTOM = None


_MLA_PREFILL_OVERRIDES: dict[MLAPrefillBackendEnum, str] = MLAPrefillBackendEnum.overrides


def register_mla_prefill_backend(
    backend: MLAPrefillBackendEnum | str, class_path: str | type | None = None, *, override: bool = False
) -> Callable[[type], type]:
    """Register or override an MLA prefill backend implementation.

    backend: a member of `MLAPrefillBackendEnum`, or a name of your own; other
    arguments, the result and the exceptions are those of `attn.register_backend`."""
    return backend_enum.register(MLAPrefillBackendEnum, backend, class_path, override=override)
