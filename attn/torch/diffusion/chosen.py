"""The dense backend for calls without a layer: chosen and built once per set of call properties."""

import functools
import math
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from attn import envs
from attn.backend_enum import generation
from attn.capabilities import Feature
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum
from attn.diffusion.selector import ENV_VAR, make_diffusion_request, select_diffusion
from attn.selection.platforms import platform_for
from attn.torch.platforms import rows_that_decide

#: Implementations by their description: a graph can contain the string and look it up, but not a selection.
_impls: dict[str, Any] = {}
_choices: dict[tuple[Any, ...], str] = {}  # keys of `_impls`
_MOST = 256  #: choices to keep
_WHY_NOT_CALL = DiffusionAttentionBackend.why_not_call.__func__  # type: ignore[attr-defined]


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
    key = (generation(), envs.read(ENV_VAR), envs.read("ATTN_DISABLE"), *call[:-2], *sizes_that_decide(*call[-2:]))
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= _MOST:
            _choices.clear()
        found = _choices[key] = _choose(*call)
    return found


def sizes_that_decide(rows: int, keys: int) -> tuple[int, ...]:
    """Return what a choice depends on of a call's rows and keys: sizes grow with every token, their limits do not."""
    most, multiple = _limits(generation())
    if not multiple:
        return (rows, keys)
    return (rows_that_decide(rows), min(keys, most), math.gcd(keys, multiple), rows == keys or not rows or not keys)


@functools.lru_cache(1)
def _limits(registries: int) -> tuple[int, int]:
    """Return the largest `min_keys` and the least common `key_multiple` of the registered backends; (0, 0) if one judges calls
    by a `why_not_call` of its own."""
    members = [DiffusionAttentionBackendEnum[name] for name in DiffusionAttentionBackendEnum.names()]
    found = [member.candidate().backend for member in members if not str(member.value or "").startswith("attn.jax.")]
    backends: list[Any] = [backend for backend in found if hasattr(backend, "why_not_call")]
    if any(backend.why_not_call.__func__ is not _WHY_NOT_CALL for backend in backends):
        return 0, 0
    return max(x.min_keys for x in backends), math.lcm(*(x.key_multiple for x in backends))


def _choose(
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
