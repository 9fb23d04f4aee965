"""The jax framework: Pallas on TPU and GPU, XLA everywhere. Importing it imports jax, never torch."""

import importlib
from typing import Any

_FACE = {
    "Attention": "attn.jax.layer",
    "CompilationWarning": "attn.jax.serving",
    "DiffusionAttention": "attn.jax.diffusion.layer",
    "MLAAttention": "attn.jax.layer",
    "ServingStep": "attn.jax.serving",
    "attention_fn": "attn.jax.dot_product",
    "dot_product_attention": "attn.jax.dot_product",
    "merge_attn_states": "attn.jax.merge",
}
__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    raise AttributeError(f"module 'attn.jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
