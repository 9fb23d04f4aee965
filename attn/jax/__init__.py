"""The jax framework: Pallas on TPU and GPU, XLA everywhere. Importing it imports jax, never torch."""

from attn.imports import lazy

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
__getattr__, __dir__ = lazy(__name__, _FACE)
