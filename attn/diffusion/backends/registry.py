"""Diffusion attention backend registry.

An enum of diffusion attention backends, with the same base as the other two registries. vllm-omni's examples use CUSTOM and
ASCEND_ATTN, so both are members; this library's kernels and JAX's backends are added.
"""

from collections.abc import Callable

from attn import backend_enum
from attn.backend_enum import BackendEnum
from attn.logger import init_logger

logger = init_logger(__name__)


class DiffusionAttentionBackendEnum(
    BackendEnum,
    label="diffusion attention backend",
    unset=(
        "Diffusion attention backend {name} must be registered before use. "
        "Use register_diffusion_backend(DiffusionAttentionBackendEnum.{name}, 'your.module.YourClass')"
    ),
    variables=("ATTN_DIFFUSION_BACKEND",),
    methods=("get_name", "get_impl_cls"),
):
    """Enumeration of all supported diffusion attention backends.

    The enum value is the default class path, but this can be overridden at runtime using register_diffusion_backend().
    To get the actual backend class (respecting overrides), use: backend.get_class()
    """

    FLASH_ATTN = "attn.torch.diffusion.backends.flash_attn.FlashAttentionBackend"
    TORCH_SDPA = "attn.torch.diffusion.backends.sdpa.SDPABackend"
    SAGE_ATTN = "attn.torch.diffusion.backends.sage_attn.SageAttentionBackend"
    SAGE_ATTN_3 = "attn.torch.diffusion.backends.sage_attn3.SageAttention3Backend"
    CUDNN_ATTN = "attn.torch.diffusion.backends.cudnn_attn.CuDNNAttentionBackend"
    FLASHINFER_ATTN = "attn.torch.diffusion.backends.flashinfer_attn.FlashInferAttentionBackend"
    ASCEND_ATTN = "attn.torch.diffusion.backends.ascend_attn.AscendAttentionBackend"
    # This library's, and JAX's
    TRITON_ATTN = "attn.torch.diffusion.backends.triton_attn.TritonAttentionBackend"
    TRITON_INT8_ATTN = "attn.torch.diffusion.backends.triton_int8_attn.TritonInt8AttentionBackend"
    PALLAS = "attn.jax.diffusion.backends.pallas.PallasAttentionBackend"
    TRITON_ATTN_JAX = "attn.jax.diffusion.backends.triton_attn.TritonAttentionBackend"
    CUDNN = "attn.jax.diffusion.backends.cudnn.CuDNNAttentionBackend"
    XLA_ATTN = "attn.jax.diffusion.backends.xla_attn.XLAAttentionBackend"
    # Placeholder for third-party/custom backends - must be registered before use
    # None and not "": an Enum makes members of equal values aliases of one member.
    CUSTOM = None


def register_diffusion_backend(
    backend: DiffusionAttentionBackendEnum | str, class_path: str | type | None = None, *, override: bool = False
) -> Callable[[type], type]:
    """Register or override a diffusion backend implementation.

    backend: a member of `DiffusionAttentionBackendEnum`, or a name of your own;
    other arguments, the result and the exceptions are those of `attn.register_backend`."""
    return backend_enum.register(DiffusionAttentionBackendEnum, backend, class_path, override=override)
