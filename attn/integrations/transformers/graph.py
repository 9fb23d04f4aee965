"""A call that a graph cannot trace, as one operator."""

import functools
from typing import Any

import torch

from attn.errors import UnsupportedError
from attn.integrations.transformers.call import Call, in_graph, widened
from attn.integrations.transformers.reading import as_bool
from attn.integrations.transformers.ways import attend
from attn.selector import selection_state
from attn.torch.diffusion.chosen import known
from attn.torch.graphs import uncaptured
from attn.torch.layer import Attention


def as_row(call: Call, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Compute a single row under a materialised mask, which includes causality and the window, by an operator that CUDA graphs
    may capture; return None if the backend of such layers has none."""
    heads, kv_heads, size = (known(x) for x in (call.query.shape[2], call.key.shape[2], call.query.shape[3]))
    if attention_mask is None or attention_mask.ndim != 4 or call.query.shape[1] != 1 or attention_mask.shape[1] != 1:
        return None
    if call.backend is not None or call.wants_grad or call.value.shape[-1] > size:
        return None
    facts = heads, kv_heads, size, call.query.dtype, call.scale, call.window, call.soft_cap, call.sinks is not None
    if not _has_row_operator(call.query.device.type, *facts):
        return None
    from attn.torch.kernels.dense_decode import row

    mask = as_bool(call, attention_mask)[:, 0, 0, : call.key.shape[1]].expand(len(call.query), -1)
    sinks = None if call.sinks is None else call.sinks.float()
    query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, widened(call)))
    return row(query, key, value, call.scale, call.soft_cap or 0.0, sinks, mask)[..., : call.value.shape[-1]]


@torch.compiler.assume_constant_result
def _has_row_operator(device: str, *facts: Any) -> bool:
    return device != "cpu" and _chosen_has_row_operator(selection_state(), *facts)


@functools.lru_cache(1024)
def _chosen_has_row_operator(
    state: Any, heads: int, kv_heads: int, size: int, dtype: torch.dtype, scale: float, window: int | None, cap: float | None,
    sinks: bool,
) -> bool:  # fmt: skip
    """Ask the backend that is chosen for such layers. state: of the environment and the registries."""
    try:
        layer = Attention(
            heads,
            size,
            num_kv_heads=kv_heads,
            dtype=dtype,
            scale=scale,
            sliding_window=window,
            logits_soft_cap=cap,
            sinks=[0.0] * heads if sinks else None,
        )
    except UnsupportedError:
        return False
    return bool(layer.impl.has_row_operator)  # type: ignore[attr-defined]


def as_operator(call: Call, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Run a call that a graph cannot trace as one operator; its mask is materialised, and recognised when it runs."""
    return _operator(  # type: ignore[no-any-return]
        query=call.query,
        key=call.key,
        value=call.value,
        attention_mask=attention_mask,
        sinks=call.sinks,
        causal=call.causal,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        backend=call.backend,
        asked_by=call.asked_by,
        layer_name=call.layer_name,
    )


@uncaptured("attn::transformers", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str | None,
    asked_by: str,
    layer_name: str,
) -> torch.Tensor:
    call = Call(
        module=in_graph(layer_name),
        query=query,
        key=key,
        value=value,
        causal=causal,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        backend=backend,
        asked_by=asked_by,
    )
    return attend(call, attention_mask).contiguous()


@_operator.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return query.new_empty(*query.shape[:3], value.shape[3])
