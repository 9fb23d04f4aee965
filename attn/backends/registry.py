"""Attention backend registry.

The names are those of vLLM's registry; PALLAS_MLA, XLA_ATTN, TRITON_ATTN_JAX, TRITON_MLA_JAX and the portable and sparse MLA
backends are added. One difference: in vLLM's enum `TORCH_SDPA = ""` and `CUSTOM = ""` are one member (an alias), so that
registering a custom backend replaces SDPA; in this one every member is distinct, and TORCH_SDPA is a working backend. A member
whose module does not exist yet keeps its future path and reports "not built yet".
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from attn import backend_enum
from attn.backend_enum import BackendEnum, BackendEnumMeta, load_candidate
from attn.capabilities import Candidate
from attn.logger import init_logger

logger = init_logger(__name__)

# vLLM's name of the metaclass, which callers may import.
_AttentionBackendEnumMeta = BackendEnumMeta


class AttentionBackendEnum(
    BackendEnum,
    label="attention backend",
    unset=("Backend {name} must be registered before use. Use register_backend(Backend.{name}, 'your.module.YourClass')"),
    variables=("ATTN_BACKEND", "VLLM_ATTENTION_BACKEND"),
    methods=("get_name", "get_impl_cls"),
    pairs="attn.torch.backends.pair",
):
    """Enumeration of all supported attention backends.

    The enum value is the default class path, but this can be overridden
    at runtime using register_backend().

    To get the actual backend class (respecting overrides), use:
        backend.get_class()
    """

    FLASH_ATTN = "attn.torch.backends.flash_attn.FlashAttentionBackend"
    TRITON_ATTN = "attn.torch.backends.triton_attn.TritonAttentionBackend"
    XFORMERS = "attn.torch.backends.xformers.XFormersAttentionBackend"
    ROCM_ATTN = "attn.torch.backends.rocm_attn.RocmAttentionBackend"
    ROCM_AITER_MLA = "attn.torch.backends.mla.rocm_aiter_mla.AiterMLABackend"
    ROCM_AITER_FA = "attn.torch.backends.rocm_aiter_fa.AiterFlashAttentionBackend"
    TORCH_SDPA = "attn.torch.backends.sdpa.TorchSDPABackend"
    FLASHINFER = "attn.torch.backends.flashinfer.FlashInferBackend"
    FLASHINFER_MLA = "attn.torch.backends.mla.flashinfer_mla.FlashInferMLABackend"
    TRITON_MLA = "attn.torch.backends.mla.triton_mla.TritonMLABackend"
    CUTLASS_MLA = "attn.torch.backends.mla.cutlass_mla.CutlassMLABackend"
    FLASHMLA = "attn.torch.backends.mla.flashmla.FlashMLABackend"
    FLASHMLA_SPARSE = "attn.torch.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    FLASH_ATTN_MLA = "attn.torch.backends.mla.flashattn_mla.FlashAttnMLABackend"
    PALLAS = "attn.jax.backends.pallas.PallasAttentionBackend"
    IPEX = "attn.torch.backends.ipex.IpexAttentionBackend"
    NO_ATTENTION = "attn.backends.no_attention.NoAttentionBackend"
    FLEX_ATTENTION = "attn.torch.backends.flex_attention.FlexAttentionBackend"
    TREE_ATTN = "attn.torch.backends.tree_attn.TreeAttentionBackend"
    ROCM_AITER_UNIFIED_ATTN = "attn.torch.backends.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
    CPU_ATTN = "attn.torch.backends.cpu_attn.CPUAttentionBackend"
    PALLAS_MLA = "attn.jax.backends.mla.pallas_mla.PallasMLABackend"
    PALLAS_MLA_SPARSE = "attn.jax.backends.mla.pallas_mla_sparse.PallasMLASparseBackend"
    TORCH_MLA = "attn.torch.backends.mla.torch_mla.TorchMLABackend"
    TORCH_MLA_SPARSE = "attn.torch.backends.mla.torch_mla_sparse.TorchMLASparseBackend"
    TRITON_MLA_SPARSE = "attn.torch.backends.mla.triton_mla_sparse.TritonMLASparseBackend"
    XLA_MLA = "attn.jax.backends.mla.xla_mla.XLAMLABackend"
    XLA_MLA_SPARSE = "attn.jax.backends.mla.xla_mla_sparse.XLAMLASparseBackend"
    TRITON_MLA_JAX = "attn.jax.backends.mla.triton_mla.TritonMLABackend"
    TRITON_ATTN_JAX = "attn.jax.backends.triton_attn.TritonAttentionBackend"
    XLA_ATTN = "attn.jax.backends.xla_attn.XLAAttentionBackend"
    # Placeholder for third-party/custom backends - must be registered before use
    CUSTOM = ""


#: Member -> class path, as registered; the table that the enum uses.
_OVERRIDES: dict[AttentionBackendEnum, str] = AttentionBackendEnum.overrides

#: The backend of the selector's block-sparse branch; as in vLLM, it is not a member of the enum.
BLOCKSPARSE_PATHS = {
    "torch": "attn.torch.backends.blocksparse_attn.BlocksparseFlashAttentionBackend",
    "jax": "attn.jax.backends.blocksparse_attn.BlocksparseFlashAttentionBackend",
}
BLOCKSPARSE = "BLOCKSPARSE"


# No name to register under: the branch takes its class from the table above, as vLLM's does by a fixed import.
def blocksparse_candidate(framework: str = "torch") -> Candidate:
    """Return the backend of the selector's block-sparse branch, loaded if possible."""
    return load_candidate(BLOCKSPARSE, BLOCKSPARSE_PATHS[framework])


def register_backend(
    backend: AttentionBackendEnum | str, class_path: str | type | None = None, *, override: bool = False
) -> Callable[[type], type]:
    """Register or override a backend implementation.

    Args:
        backend: The AttentionBackendEnum member to register, or any other name for a custom backend (any number is
            allowed). A member's name as a string is rejected unless `override`.
        class_path: Optional class path, or the class itself. If not provided and used as decorator, will be
            auto-generated from the class.

    Returns:
        Decorator function if class_path is None, otherwise a no-op

    Raises:
        ValueError: a malformed name or path; TypeError: neither a member nor a name, or not a class.

    Examples:
        @register_backend(AttentionBackendEnum.FLASH_ATTN)
        class MyCustomFlashAttn: ...

        register_backend("MY_BACKEND", "my.module.MyBackend")
    """
    return backend_enum.register(AttentionBackendEnum, backend, class_path, override=override)


@contextlib.contextmanager
def registered_backend(backend: AttentionBackendEnum | str, target: str | type) -> Iterator[AttentionBackendEnum]:
    """Register a backend for the duration of a `with` block; the previous registration is restored."""
    with backend_enum.registered(AttentionBackendEnum, backend, target) as member:
        yield member


_RENAMED = (
    "_Backend has been renamed to AttentionBackendEnum. "
    "Please update your code to use AttentionBackendEnum instead. "
    "_Backend will be removed in a future release."
)


def _warn_renamed() -> None:
    logger.warning_once(_RENAMED)
    warnings.warn(_RENAMED, DeprecationWarning, stacklevel=3)


#: Attributes that Python and its tools read from any class; reading them does not count as a use of the deprecated name.
_ABOUT_THE_CLASS = {"__class__", "__mro__", "__name__", "__doc__", "__module__", "__qualname__", "__abstractmethods__"}


class _BackendMeta(type):
    """Metaclass to provide deprecation warnings when accessing _Backend."""

    def __getattribute__(cls, name: str) -> Any:
        if name not in _ABOUT_THE_CLASS:
            _warn_renamed()
            # As vLLM's deprecated name: every attribute warns and is the enum's, except those that Python and its tools
            # read of any class.
            return getattr(AttentionBackendEnum, name)
        return super().__getattribute__(name)

    def __getitem__(cls, name: str) -> AttentionBackendEnum:
        _warn_renamed()
        return AttentionBackendEnum[name]

    def __call__(cls, value: object) -> AttentionBackendEnum:
        _warn_renamed()
        return AttentionBackendEnum(value)

    def __iter__(cls) -> Iterator[AttentionBackendEnum]:
        _warn_renamed()
        return iter(AttentionBackendEnum)

    def __len__(cls) -> int:
        return len(AttentionBackendEnum)

    def __contains__(cls, item: object) -> bool:
        return item in AttentionBackendEnum

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, AttentionBackendEnum)


class _Backend(metaclass=_BackendMeta):
    """Deprecated: Use AttentionBackendEnum instead.

    This class is provided for backwards compatibility with plugins
    and will be removed in a future release.
    """
