"""Calls that a model repeats in every layer and for every token: decided and checked once, then launched.

A plan serves the calls of one layer that have the same facts: sizes except those that grow with every token, dtypes, devices,
options, and the environment. Calls that need more than a launch (a mask that hides keys other than by causality, a window and,
where a backend attends runs of keys, padding; gradients, autocast, weights, packed rows) have none, and
`ways.attend` computes them.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attn.capabilities import AttentionType
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum as Dense
from attn.errors import UnsupportedError
from attn.integrations.transformers.call import UNKNOWN, Call, requested, widened
from attn.integrations.transformers.packing import layer_of
from attn.integrations.transformers.segments import BOUNDARIES
from attn.integrations.transformers.ways import Way, chosen_for, classify
from attn.selector import selection_state
from attn.torch.autocast import enabled as autocast_enabled
from attn.torch.diffusion.chosen import sizes_that_decide
from attn.torch.kernels.runs import Runs

#: (query [B, H, S, D], key [B, K, T, D], value [B, K, T, Dv], sinks [H] or None, valid keys or None for all) -> [B, S, H, Dv].
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", Runs | None], torch.Tensor]

#: Arguments that take another way unless they are None or False.
_OTHERS = frozenset({*UNKNOWN, *BOUNDARIES, "output_attentions", "indices"})
_plans: "weakref.WeakKeyDictionary[Any, dict[Any, Launch | None]]" = weakref.WeakKeyDictionary()
_MOST = 64  #: plans of a layer to keep


class Keys(NamedTuple):
    """Which keys a call reads, and what is left of its causality and window over them."""

    start: int
    end: int
    causal: bool
    window: int | None


def needed(rows: int, keys: int, causal: bool, window: int | None) -> Keys:
    """Return what a call over `keys` valid keys needs: a single row sees its last `window` keys, and no later ones."""
    if window is not None and window >= keys:
        window = None
    if rows > 1:
        return Keys(0, keys, causal, window)
    return Keys(0 if window is None else keys - window, keys, False, None)


def repeated(
    backend: str | None,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None,
    is_causal: bool | None,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Compute a call by its plan, which is made at the first; arguments as transformers passes them.

    Returns [B, S, H, Dv], or None for a call without a plan.
    """
    if any(value is not None and value is not False for name, value in kwargs.items() if name in _OTHERS):
        return None
    batch, heads, rows, size = query.shape
    key_batch, kv_heads, keys, key_size = key.shape
    value_batch, value_heads, values, value_size = value.shape
    if (batch, batch, kv_heads, keys, size) != (key_batch, value_batch, value_heads, values, key_size):
        return None
    device = query.device
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        return None
    if device != key.device or device != value.device or autocast_enabled(device.type):
        return None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    kind = causal, window is not None
    end = keys
    valid = None
    if attention_mask is not None:
        padding = getattr(attention_mask, "attn_padding", None)
        if padding is None or not padding.plain:
            return None
        end, window = attention_mask.shape[1], padding.window
        if not padding.whole:
            valid = padding.runs(attention_mask) if rows in (1, end) and not padding.all_rows else None
            if valid is None or (rows == 1 and window is not None and not padding.to_end):
                return None  # a window counts from the row's own key
    elif causal and rows > 1 and rows != keys:
        return None  # the positions of rows are not known
    if window is not None and window < end and not causal:
        return None  # refused, for a single row too
    if valid is None:
        start, end, causal, window = needed(rows, end, causal, window)
    else:
        start, causal = 0, causal and (rows > 1 or window is not None)
    if not rows or start == end:
        return None
    facts = (
        backend, heads, kv_heads, size, value_size, query.dtype, key.dtype, value.dtype, device, scaling, causal, window,
        soft_cap, sinks is None, kind, valid is None, *sizes_that_decide(rows, end - start), selection_state(),
    )  # fmt: skip
    plans = _plans.get(module)
    if plans is None:
        plans = _plans[module] = {}
    if start or end != keys:
        key, value = key[:, :, start:end], value[:, :, start:end]
    if facts in plans:
        launch = plans[facts]
    else:
        if len(plans) >= _MOST:
            plans.clear()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scale = float(size**-0.5 if scaling is None else scaling)
        name, asked_by = requested(backend, *kind)
        call = Call(
            module=module,
            query=q,
            key=k,
            value=v,
            causal=causal,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            backend=name,
            asked_by=asked_by,
        )
        launch = plans[facts] = _planned(call, valid is not None)
    return None if launch is None else launch(query, key, value, sinks, valid)


def _planned(call: Call, padded: bool) -> Launch | None:
    """Choose how to compute calls like this one; None if no launch can be repeated.

    padded: whether each request has a run of the keys only.
    """
    rows, keys, width = call.query.shape[1], call.key.shape[1], call.value.shape[-1]
    pads = call.query.shape[-1] - width
    way = classify(call, square=rows == keys, masked=padded)
    if way is Way.FORMULA or (way is Way.DENSE and padded and rows > 1):
        return None
    dense = None if padded else _dense(call, way, rows == keys)
    if dense is not None:
        if not pads:
            return lambda query, key, value, sinks, valid: dense(query, key, value)
        return lambda query, key, value, sinks, valid: dense(query, key, F.pad(value, (0, pads)))[..., :width]
    try:
        layer = layer_of(call, AttentionType.DECODER if call.causal or rows != keys else AttentionType.ENCODER_ONLY)
    except UnsupportedError:
        if way is Way.DENSE:
            return None
        raise
    impl: Any = layer.impl
    causal = call.causal
    if not (impl.attends_valid_keys if padded else impl.attends_keys):
        return None
    held = _Held(impl)
    row = impl.row_launcher(call.query.device, call.query.dtype) if rows == 1 else None

    def launch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, valid: Runs | None
    ) -> torch.Tensor:
        if sinks is not None:
            held.set(sinks)
        if pads:
            value = F.pad(value, (0, pads))
        if row is not None:
            out: torch.Tensor = row(query, key, value, valid)
        else:
            arrays = (x.transpose(1, 2) for x in (query, key, value))
            out = impl.attend_keys(*arrays, causal) if valid is None else impl.attend_keys(*arrays, causal, valid=valid)
        return out[..., :width] if pads else out

    return launch


def _dense(call: Call, way: Way, square: bool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the launch of a plain call by a dense backend: the fastest, or the one that has the name of the requested one."""
    if way is Way.DENSE:
        launch: Any = chosen_for(call, None).launcher(call.query, call.key, widened(call))
        return launch  # type: ignore[no-any-return]
    if not call.plain or call.wants_grad or (call.causal and not square) or call.backend not in Dense.names():
        return None
    try:
        launch = chosen_for(call, None, call.backend).launcher(call.query, call.key, widened(call))
    except UnsupportedError:
        return None
    return launch  # type: ignore[no-any-return]


class _Held:
    """The sinks of an implementation, converted again only when the module's have changed."""

    def __init__(self, impl: Any) -> None:
        self.impl, self.seen = impl, (None, -1)

    def set(self, sinks: torch.Tensor) -> None:
        """Pass on the module's sinks."""
        version = -1 if sinks.is_inference() else sinks._version
        if version < 0 or self.seen[0] is not sinks or self.seen[1] != version:
            self.impl.sinks, self.seen = sinks.detach().float(), (sinks, version)  # type: ignore[assignment]
