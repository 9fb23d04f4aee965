"""The dense backend for calls without a layer: chosen and built once per set of call properties."""

import functools
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from attn import envs
from attn.backend_enum import generation
from attn.capabilities import Feature
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import ENV_VAR, make_diffusion_request, select_diffusion
from attn.platforms import platform_for

#: Implementations by their description: a graph can contain the string and look it up, but not a selection.
_impls: dict[str, Any] = {}


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
    """Return the implementation for a call with these properties in the current environment and registries.

    The choice is logged once.

    mask: whether the call has a mask other than one of keys; grad: whether gradients are needed; key_mask: whether it has a
    mask of keys; rows, keys: 0 if unknown. A graph keeps the choice made while it was traced. Numbers of heads, head size
    and scale become constants of the graph if they were symbols; rows and keys may have any value except 1. Raises
    `UnsupportedError` with all reasons.
    """
    if torch.compiler.is_compiling():
        rows, keys = (1 if size == 1 else 0 for size in (rows, keys))
        num_heads, num_kv_heads, head_size = (known(size) for size in (num_heads, num_kv_heads, head_size))
        scale = None if scale is None else known(scale)
    description = _description(
        backend,
        error_budget,
        device_type,
        num_heads,
        num_kv_heads,
        head_size,
        dtype,
        scale,
        causal,
        mask,
        grad,
        key_mask,
        rows,
        keys,
    )
    return _impls[description]


def known(number: Any) -> Any:
    """Make a number of a call a constant of the graph being traced (another value retraces); outside a graph, return it."""
    return guard_scalar(number) if torch.compiler.is_compiling() else number


@torch.compiler.assume_constant_result
def _description(*call: Any) -> str:
    return _chosen(generation(), envs.read(ENV_VAR), envs.read("ATTN_DISABLE"), *call)


@functools.lru_cache(256)
def _chosen(
    registries: int,
    environment: str | None,
    disabled: str | None,
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
) -> str:
    """Choose and build an implementation; return its key in `_impls`."""
    features = [*([Feature.MASK] if mask else []), *([Feature.BACKWARD] if grad else [])]
    budget = error_budget
    if backend is not None:  # requested by name, which accepts its error
        budget = max(budget, getattr(DiffusionAttentionBackendEnum[backend].get_class(), "error", 0.0))
    request = make_diffusion_request(
        head_size,
        dtype,
        features=features,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        error_budget=budget,
        causal=causal,
        key_mask=key_mask,
        rows=rows or None,
        keys=keys or None,
    )
    platform = platform_for("torch", "cpu" if device_type == "cpu" else None)
    chosen = select_diffusion(request, backend=backend, framework="torch", platform=platform).require()
    arguments = (num_heads, head_size, scale, causal, num_kv_heads)
    text = f"{chosen.__module__}:{chosen.__qualname__}{arguments}"
    _impls[text] = chosen.get_impl_cls()(*arguments)
    return text
