"""The dense backend for calls without a layer: chosen and built once per set of call properties."""

import functools
import math
import re
from typing import Any, NamedTuple

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


class _Impls:
    """Implementations by their description: a graph can contain the string and look it up, but not a selection. They are
    attributes, because a graph that has read a dict while it was traced does not see what is added to it."""


_choices: dict[tuple[Any, ...], str] = {}  # names in `_Impls`
_MOST = 256  #: choices to keep
# The function that judges a call by data (`min_keys`, `key_multiple`), to recognise backends that have their own.
_WHY_NOT_CALL = DiffusionAttentionBackend.why_not_call.__func__  # type: ignore[attr-defined]


class CallProperties(NamedTuple):
    """The key of a backend choice.

    mask: whether the call has a mask other than one of keys; grad: whether gradients are needed; key_mask: whether it has a
    mask of keys; rows, keys: 0 if unknown.
    """

    backend: str | None
    error_budget: float
    device_type: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float | None
    causal: bool
    mask: bool
    grad: bool
    key_mask: bool
    rows: int
    keys: int

    def constant(self) -> "CallProperties":
        """Specialise a graph that is being traced: symbolic numbers of heads, head size, scale and error budget become
        constants of it; rows and keys may have any value except 1."""
        # torch guards on sizes of 0 and 1 in any case; another number as a constant would compile a graph for each length.
        rows, keys = (1 if size == 1 else 0 for size in (self.rows, self.keys))
        num_heads, num_kv_heads, head_size = (known(size) for size in (self.num_heads, self.num_kv_heads, self.head_size))
        return self._replace(
            error_budget=known(self.error_budget),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=None if self.scale is None else known(self.scale),
            rows=rows,
            keys=keys,
        )


def properties_of(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None,
    causal: bool,
    mask: torch.Tensor | None,
    grad: bool,
    backend: str | None = None,
    error_budget: float = 0.0,
) -> CallProperties:
    """Return the properties of a call. query: [B, S, H, D]; key: [B, M, K, D]; mask: [B, M] of keys, or four-dimensional;
    backend: one by name, used or rejected."""
    of_keys = mask is not None and mask.ndim == 2
    (_, rows, num_heads, head_size), (_, keys, num_kv_heads, _) = query.shape, key.shape
    return CallProperties(
        backend,
        error_budget,
        query.device.type,
        num_heads,
        num_kv_heads,
        head_size,
        query.dtype,
        scale,
        causal=causal,
        mask=mask is not None and not of_keys,
        grad=grad,
        key_mask=of_keys,
        rows=rows,
        keys=keys,
    )


def impl_for(call: CallProperties) -> Any:
    """Return the implementation for a call in the current environment and registries. The choice is logged once; a graph keeps
    the choice made while it was traced. Raises `UnsupportedError` with all reasons."""
    return getattr(_Impls, _description(*(call.constant() if torch.compiler.is_compiling() else call)))


def known(number: Any) -> Any:
    """Make a number of a call a constant of the graph being traced (another value retraces); outside a graph, return it."""
    return guard_scalar(number) if torch.compiler.is_compiling() else number


@torch.compiler.assume_constant_result
def _description(*call: Any) -> str:  # the fields one by one: a graph has no constant record
    key = (generation(), envs.read(ENV_VAR), envs.read("ATTN_DISABLE"), *call[:-2], *sizes_that_decide(*call[-2:]))
    description = _choices.get(key)
    if description is None:
        # Implementations stay in `_Impls`: a graph may have the name of one. They hold no memory but their constants.
        if len(_choices) >= _MOST:
            _choices.clear()
        description = _choices[key] = _choose(CallProperties(*call))
    return description


def sizes_that_decide(rows: int, keys: int) -> tuple[int, ...]:
    """Return the properties of rows and keys that a choice depends on: unlike their numbers, these rarely change."""
    most, multiple = _limits(generation())
    if not multiple:
        return (rows, keys)
    # What `why_not_call` compares: too few keys, keys of a multiple, and rows equal to keys for causal backends.
    return (rows_that_decide(rows), min(keys, most), math.gcd(keys, multiple), rows == keys or not rows or not keys)


@functools.lru_cache(1)
def _limits(registries: int) -> tuple[int, int]:
    """Return the largest `min_keys` and the least common `key_multiple` of the registered backends; (0, 0) if one judges calls
    by a `why_not_call` of its own."""
    members = [DiffusionAttentionBackendEnum[name] for name in DiffusionAttentionBackendEnum.names()]
    # those of JAX would import it
    loaded = [member.candidate().backend for member in members if not str(member.value or "").startswith("attn.jax.")]
    backends: list[Any] = [backend for backend in loaded if hasattr(backend, "why_not_call")]
    if any(backend.why_not_call.__func__ is not _WHY_NOT_CALL for backend in backends):
        return 0, 0
    return max(x.min_keys for x in backends), math.lcm(*(x.key_multiple for x in backends))


def _choose(call: CallProperties) -> str:
    """Choose and build an implementation; return its name in `_Impls`."""
    budget = call.error_budget
    if call.backend is not None:  # requested by name, which accepts its error
        budget = max(budget, getattr(DiffusionAttentionBackendEnum[call.backend].get_class(), "error", 0.0))
    request = make_diffusion_request(
        call.head_size,
        call.dtype,
        features=[*([Feature.MASK] if call.mask else []), *([Feature.BACKWARD] if call.grad else [])],
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        error_budget=budget,
        causal=call.causal,
        key_mask=call.key_mask,
        rows=call.rows or None,
        keys=call.keys or None,
    )
    # Tensors on the host are served there, also on a machine with a GPU.
    platform = platform_for("torch", "cpu" if call.device_type == "cpu" else None)
    backend = select_diffusion(request, backend=call.backend, framework="torch", platform=platform).require()
    arguments = (call.num_heads, call.head_size, call.scale, call.causal, call.num_kv_heads)
    # an attribute's name, since graphs read it from a class
    description = re.sub(r"\W", "_", f"{backend.__module__}:{backend.__qualname__}{arguments}")
    setattr(_Impls, description, backend.get_impl_cls()(*arguments))
    return description
