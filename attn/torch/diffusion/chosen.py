"""The dense backend for a call that comes without a layer: chosen and built once for calls that agree in what matters."""

import functools
from typing import Any

import torch

from attn.capabilities import Feature
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import make_diffusion_request, select_diffusion
from attn.platforms import platform_for


@functools.lru_cache(256)
def chosen_impl(
    backend: str | None,
    error_budget: float,
    device_type: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    scale: float | None,
    causal: bool,
    mask: bool,
    grad: bool,
    key_mask: bool,
    rows: int,
    keys: int,
) -> Any:
    """The implementation for calls that agree in all of this; the choice is logged once.

    mask: a mask beyond one of keys comes along; grad: gradients are wanted; key_mask: one of keys does.
    Raises `UnsupportedError` with all reasons.
    """
    features = [*([Feature.MASK] if mask else []), *([Feature.BACKWARD] if grad else [])]
    budget = error_budget
    if backend is not None:  # asked for by name: its error is known
        budget = max(budget, getattr(DiffusionAttentionBackendEnum[backend].get_class(), "error", 0.0))
    request = make_diffusion_request(
        head_size, dtype, features=features, num_heads=num_heads, num_kv_heads=num_kv_heads, error_budget=budget,
        causal=causal, key_mask=key_mask, rows=rows or None, keys=keys or None,
    )  # fmt: skip
    platform = platform_for("torch", "cpu" if device_type == "cpu" else None)
    chosen = select_diffusion(request, backend=backend, framework="torch", platform=platform).require()
    return chosen.get_impl_cls()(num_heads, head_size, scale, causal, num_kv_heads)
