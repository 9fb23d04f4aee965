"""The torch side of `attn.functional`: array operations for its formula, and running one batch over a temporary cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn.capabilities import Feature

_SCORES_AT_ONCE = 1 << 25  # elements: 128 MiB of float32 scores


class Ops:
    """Array operations under the names that `attn.functional` uses."""

    where = staticmethod(torch.where)
    einsum = staticmethod(torch.einsum)
    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    tanh = staticmethod(torch.tanh)
    sigmoid = staticmethod(torch.sigmoid)
    isfinite = staticmethod(torch.isfinite)
    broadcast_to = staticmethod(torch.broadcast_to)
    moveaxis = staticmethod(torch.moveaxis)
    concat = staticmethod(torch.cat)
    any = staticmethod(torch.any)

    @staticmethod
    def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return the formula unchanged: torch runs operations eagerly."""
        return formula

    @staticmethod
    def asarray(x: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x, device=like.device)

    @staticmethod
    def arange(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(start, stop, device=like.device)

    @staticmethod
    def cast(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.to(like.dtype)

    @staticmethod
    def wide(x: torch.Tensor) -> torch.Tensor:
        """`x` in the dtype of the computation: float64 stays, others become float32."""
        return x if x.dtype == torch.float64 else x.float()

    @staticmethod
    def fixed_max(x: torch.Tensor) -> torch.Tensor:
        """The maximum over the last axis, without a gradient; -inf over an empty axis."""
        return x.detach().amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)

    @staticmethod
    def add_if(condition: torch.Tensor, x: torch.Tensor, more: Callable[[], torch.Tensor]) -> torch.Tensor:
        """x + more() if the (0-d) condition holds, else x."""
        return x + more() if condition else x

    @staticmethod
    def rows_at_once(n: int, row: int) -> int:
        """How many of n rows, of `row` scores each, are computed at a time."""
        return max(1, min(n, _SCORES_AT_ONCE // max(1, row)))


def through_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Any,
    batch: Any,
    num_blocks: int,
    arguments: dict[str, Any],
    features: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run one batch through `Attention(**arguments)`. Returns (out [T, H, D], lse [H, T] or None).

    query: [T, H, D]; key, value: [S, K, D], every key of every request, first written at `slots` [S] of a new cache.
    """
    from attn.torch.layer import Attention

    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        features = (*features, Feature.BACKWARD)  # rejected unless declared: gradients are never dropped silently
    layer = Attention(**arguments, dtype=query.dtype, features=tuple(features)).to(query.device)
    cache = layer.new_kv_cache(num_blocks, query.device)
    layer.impl.do_kv_cache_update(layer, key, value, cache, torch.as_tensor(slots, device=query.device))
    result: Any = layer.impl.forward(layer, query, None, None, cache, layer.build(batch, device=query.device))
    return result if arguments["return_lse"] else (result, None)
