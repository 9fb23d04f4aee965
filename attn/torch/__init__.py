"""The torch framework: backends for CUDA, ROCm, XPU and CPU. Importing it imports torch, never jax."""

import importlib
from typing import Any

_FACE = {
    "Attention": "attn.torch.layer",
    "DiffusionAttention": "attn.torch.diffusion.layer",
    "MLAAttention": "attn.torch.layer",
    "merge_attn_states": "attn.torch.merge",
    "scaled_dot_product_attention": "attn.torch.dot_product",
    "sdpa_backend": "attn.torch.dot_product",
}
__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    raise AttributeError(f"module 'attn.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
