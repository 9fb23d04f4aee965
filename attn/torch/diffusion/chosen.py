"""The dense backend for a call that comes without a layer: chosen and built once for calls that agree in what matters."""

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

#: Implementations by what they were made of: a graph can hold the text and look it up, where it cannot hold a choice.
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
    """The implementation for calls that agree in all of this and meet the same environment and registries; the choice is
    logged once.

    mask: a mask beyond one of keys comes along; grad: gradients are wanted; key_mask: one of keys does; rows, keys: 0 where
    they are not known. A graph keeps the choice that was made while it was traced: for these heads, this head size and this
    scale, which become constants of the graph where they were symbols, and for any rows and keys but 1.
    Raises `UnsupportedError` with all reasons.
    """
    if torch.compiler.is_compiling():
        rows, keys = (1 if size == 1 else 0 for size in (rows, keys))
        num_heads, num_kv_heads, head_size = (known(size) for size in (num_heads, num_kv_heads, head_size))
        scale = None if scale is None else known(scale)
    made_of = _made_of(
        backend, error_budget, device_type, num_heads, num_kv_heads, head_size, dtype, scale, causal, mask, grad, key_mask,
        rows, keys,
    )  # fmt: skip
    return _impls[made_of]


def known(number: Any) -> Any:
    """A number of a call as a constant of the graph that is traced (another one is traced again); outside of one, as it is."""
    return guard_scalar(number) if torch.compiler.is_compiling() else number


@torch.compiler.assume_constant_result
def _made_of(*call: Any) -> str:
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
    """Where `_impls` has it."""
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
    arguments = (num_heads, head_size, scale, causal, num_kv_heads)
    text = f"{chosen.__module__}:{chosen.__qualname__}{arguments}"
    _impls[text] = chosen.get_impl_cls()(*arguments)
    return text
