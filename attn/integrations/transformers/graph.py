"""A call that a graph cannot trace, as one operator."""

import torch

from attn.integrations.transformers.call import Call, in_graph
from attn.integrations.transformers.ways import attend
from attn.torch.graphs import uncaptured


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
