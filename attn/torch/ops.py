"""The operations of torch behind framework-neutral code: `attn.arrays.ops_of("torch")`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn.dtypes import PER_TOKEN_HEAD, dtype_name
from attn.torch import kv_cache as caches
from attn.torch.arrays import bits_of, raw
from attn.torch.autocast import lossy

Array = npt.NDArray[Any]
Part = tuple[torch.Tensor, ...]

_SCORES_AT_ONCE = 1 << 25  # elements: 128 MiB of float32 scores


def cast_by(fn: Callable[[torch.Tensor], torch.Tensor], dtype: str, device: Any = "cpu") -> str:
    """Return the dtype of activations after a conversion of their module: `fn` is the argument of `nn.Module._apply`."""
    # on the module's device, since the function may move too
    return dtype_name(fn(torch.empty(0, dtype=getattr(torch, dtype), device=device)).dtype)


def _exactly(formula: Callable[..., Any], xp: Any, rules: Any, q: torch.Tensor, *arguments: Any) -> Any:
    if lossy(q):
        with torch.autocast(q.device.type, enabled=False):
            return formula(xp, rules, q, *arguments)
    return formula(xp, rules, q, *arguments)


class Ops:
    """Operations, a namespace without instances, under the names that `attn.jax.ops.Ops` has too."""

    where, stack, concat, einsum = torch.where, torch.stack, torch.cat, torch.einsum
    exp, log, tanh, sigmoid = torch.exp, torch.log, torch.tanh, torch.sigmoid
    isfinite, isinf, isnan = torch.isfinite, torch.isinf, torch.isnan
    any, amax = torch.any, torch.amax
    # `movedim` and not its alias `moveaxis`, for which `torch.func.vmap` has no rule
    broadcast_to, moveaxis, zeros_like = torch.broadcast_to, torch.movedim, torch.zeros_like

    @staticmethod
    def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return the formula, run eagerly and without autocast."""
        return functools.partial(_exactly, formula)

    @staticmethod
    def asarray(x: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x, device=like.device)

    @staticmethod
    def arange(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(start, stop, device=like.device)

    @staticmethod
    def ones(like: torch.Tensor) -> torch.Tensor:
        """True, of the first two dimensions of `like`."""
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)

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
        # Detached: the maximum cancels in the softmax, so its gradient is 0. `amax` refuses an empty axis.
        return x.detach().amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)

    @staticmethod
    def add_if(condition: torch.Tensor, x: torch.Tensor, more: Callable[[], torch.Tensor]) -> torch.Tensor:
        """x + more() if the (0-d) condition holds, else x; `more()` is 0 where it does not.

        A condition without a value (in a graph, under `torch.func.vmap`, on the meta device) counts as one that holds.
        """
        try:
            holds = torch.compiler.is_compiling() or bool(condition)
        # torch has no predicate for all of these tensors, which refuse to be read.
        except RuntimeError:
            holds = True
        return x + more() if holds else x

    @staticmethod
    def rows_at_once(n: int, row: int) -> int:
        """The number of rows, of n with `row` scores each, that are computed at a time: in a graph, whose sizes may be symbols,
        all."""
        if torch.compiler.is_compiling():
            return n
        return max(1, min(n, _SCORES_AT_ONCE // max(1, row)))

    @staticmethod
    def needs_gradients(*arrays: torch.Tensor) -> bool:
        """Whether a call with these arguments must be differentiable."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)

    @staticmethod
    def valueless(query: Any, *others: Any) -> str:
        """Return the context in which a call with these arguments has no values, or ""."""
        capturing = isinstance(query, torch.Tensor) and query.is_cuda and torch.cuda.is_current_stream_capturing()
        return "during the capture of a CUDA graph" if capturing else ""

    @staticmethod
    def bits(array: Any) -> tuple[Array, str]:
        """Return an array as `attn.testing.bits` stores its dtype, and the dtype's name."""
        tensor = torch.as_tensor(array)
        return bits_of(tensor), str(tensor.dtype).removeprefix("torch.")

    # a layer and its cache

    @staticmethod
    def attend_once(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: Any, batch: Any, num_blocks: int
    ) -> Any:
        """Run a batch over a new cache that holds key, value [S, K, D] at `slots` [S]. Returns out [T, H, D], or with lse."""
        layer, device = layer.to(query.device), query.device
        cache = layer.new_kv_cache(num_blocks, device)
        # The write first, of keys at any slots: `forward` would write the batch's own tokens only.
        layer.impl.do_kv_cache_update(layer, key, value, cache, torch.as_tensor(slots, device=device))
        return layer.impl.forward(layer, query, None, None, cache, layer.build(batch, device=device))

    @staticmethod
    def pages(layer: Any, kv_cache: torch.Tensor, ids: Array) -> list[Array]:
        """Return the stored keys and values [n, P, K, D] of blocks `ids` [n]."""
        index, impl = torch.from_numpy(ids).to(kv_cache.device), layer.impl
        parts = parts_of(layer.backend, kv_cache, impl.kv_cache_dtype, impl.head_size)
        return [stored_bits(tuple(raw(x)[index].view(x.dtype) for x in part)) for part in parts]

    @staticmethod
    def keys(layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys [n * P, K, D] of blocks [n] as the layer reads them; of an MLA layer its rows [n * P, L + Dr]."""
        from attn.torch.backends.mla import _rows

        impl, index = layer.impl, blocks.to(kv_cache.device, torch.int64)
        part = parts_of(layer.backend, kv_cache, impl.kv_cache_dtype, impl.head_size)[0]
        # as integers: not every release of torch indexes fp8
        stored, *scales = (raw(x)[index].view(x.dtype).flatten(0, 1) for x in part)
        if getattr(impl, "kv_lora_rank", None) is not None:
            return _rows.decode(stored[:, 0], impl.kv_cache_dtype, layer._k_scale)
        if not caches.is_quantised(stored.dtype):
            return stored
        return stored.float() * (scales[0] if scales else caches.per_head(layer._k_scale, stored.device))

    @staticmethod
    def up_projection(layer: Any) -> torch.Tensor:
        """Return an MLA layer's weights [L, H, Dn + Dv]."""
        return layer.impl.up_projection()


def parts_of(backend: Any, kv_cache: torch.Tensor, kv_cache_dtype: str, head_size: int) -> tuple[Part, Part]:
    """Return views of a cache's keys and values [N, P, K, D], each followed by its scales if each token and head has one."""
    if kv_cache_dtype in PER_TOKEN_HEAD:
        keys, values, key_scales, value_scales = caches.split(kv_cache, head_size)
        return (keys, key_scales[..., None]), (values, value_scales[..., None])
    keys, values = backend.logical_kv_cache(kv_cache)
    return (keys,), (values,)


def stored_bits(part: Part) -> Array:
    """Return rows as the suite stores them: a dtype's bits, or codes and the bytes of their scale."""
    if len(part) == 1:
        return bits_of(part[0])
    return np.concatenate([bits_of(tensor).view(np.uint8) for tensor in part], -1)
