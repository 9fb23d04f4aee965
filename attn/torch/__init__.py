"""The torch framework: backends for CUDA, ROCm, XPU and CPU. Importing it imports torch, never jax."""

from attn.imports import lazy

_FACE = {
    "Attention": "attn.torch.layer",
    "DiffusionAttention": "attn.torch.diffusion.layer",
    "MLAAttention": "attn.torch.layer",
    "merge_attn_states": "attn.torch.merge",
    "scaled_dot_product_attention": "attn.torch.dot_product",
    "sdpa_backend": "attn.torch.dot_product",
}
__all__ = list(_FACE)
__getattr__, __dir__ = lazy(__name__, _FACE)
