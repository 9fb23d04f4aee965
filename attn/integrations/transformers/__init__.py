"""transformers: `attn` as an attention implementation, dense and in its continuous batching; `register()` comes first.

Until it was called, transformers does not know these names: its error for one, misspelt ones too, lists its own alone.

    from attn.integrations import transformers as attn_transformers
    attn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn")            # the fastest for each call
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn:FLASHINFER")  # one by name, or refused
    with attn_transformers.paged(model):                                                      # continuous batching
        model.generate_batch(...)

A call goes one of four ways, by what it needs alone:

* dense: causal squares, single tokens, bidirectional calls, masks that are no pattern: the diffusion registry's choice.
* packed: whatever else is causal, a window, a cap or sinks: rows without padding, over a paged cache made for the call, by
  the attention registry's choice. A backend asked for by name takes every call this way.
* paged: continuous batching, in transformers' own pages where a layer keeps all of its keys, else packed.
* formula: `attn.attention`, in float32 and differentiable, for what no kernel has: a mask beside a cap, a window or sinks,
  gradients beside them, values wider than keys.

Masks are described, not drawn, while they are a causal, windowed or bidirectional pattern with padding (`mask`); any other
becomes boolean [B, 1, S, T], which is known again as such a pattern where that matters. In a graph (`torch.compile`) masks are
drawn; the dense way is traced, any other is one operator.

Arguments that are known to change what attention means and are not served (`call.UNKNOWN`, dropout, weights asked for) are
refused with the layer's name; whatever else transformers hands on beside a call is not looked at.

transformers 5.4 is the oldest with these attention and mask interfaces. Its continuous batching reads a window's keys right
from 5.16 on; before 5.18 it keeps keys and values in tensors of their own, which no view joins, so that they are gathered.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from attn.errors import BackendLoadError
from attn.integrations.transformers.batching import PAGED, PREFIX, attend_paged, paged_backends, paged_name, refuse_unpaged
from attn.integrations.transformers.call import NAME, Call, refuse_unknown
from attn.integrations.transformers.graph import as_operator
from attn.integrations.transformers.masks import mask
from attn.integrations.transformers.versions import OLDEST, dotted, installed
from attn.integrations.transformers.ways import attend, by_bias
from attn.torch.diffusion.chosen import known

__all__ = ["mask", "paged", "register"]


def register() -> tuple[str, ...]:
    """Add "attn" and "attn:<NAME>" for each paged torch backend to transformers' implementations; again is harmless.

    Returns the names. Raises `BackendLoadError` where transformers is missing or is older than these interfaces.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise BackendLoadError(
            f"transformers' attention interface cannot be imported: {error} (pip install 'transformers>={dotted(OLDEST)}')"
        ) from error
    if installed() < OLDEST:
        raise BackendLoadError(
            f"transformers {dotted(installed())} makes its masks another way (pip install 'transformers>={dotted(OLDEST)}')"
        )
    for backend in (None, *paged_backends()):
        suffix = "" if backend is None else f":{backend}"
        for name in (NAME, PAGED, f"{PREFIX}{PAGED}"):
            AttentionInterface.register(f"{name}{suffix}", _function(backend))
            AttentionMaskInterface.register(f"{name}{suffix}", mask)
    return (NAME, *(f"{NAME}:{backend}" for backend in paged_backends()))


@contextlib.contextmanager
def paged(model: Any, backend: str | None = None) -> Generator[Any, None, None]:
    """`model` with attention that `generate_batch` takes, in the block; the implementation it had comes back after.

    backend: the name of one torch backend; None for the fastest for each call. Raises `ValueError` for an unknown name, and
    `UnsupportedError` for a model or a backend that continuous batching cannot be had with, before anything runs.

    transformers admits to continuous batching what is called eager, sdpa or flash-something, and loads what it is told to by
    the last; so the name is put into the config past that.
    """
    register()
    refuse_unpaged(model, backend)
    before = model.config._attn_implementation
    model.config._attn_implementation = paged_name() if backend is None else f"{paged_name()}:{backend}"
    try:
        yield model
    finally:
        model.config._attn_implementation = before


def _function(backend: str | None) -> Callable[..., Any]:
    """transformers' attention function for one backend."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query: [B, H, S, D]; key: [B, K, T, D]; value: [B, K, T, Dv]. Returns ([B, S, H, Dv], None: no weights)."""
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scale = float(known(query.shape[-1]) ** -0.5 if scaling is None else known(scaling))
        call = Call(module, q, k, v, causal, scale, sliding_window, softcap, s_aux, backend)
        refuse_unknown(call, attention_mask, dropout, kwargs)
        if cache is not None:
            return attend_paged(call, cache, kwargs), None
        if position_bias is not None:
            return by_bias(call, attention_mask, position_bias), None
        if torch.compiler.is_compiling() and not (call.plain and backend is None):
            if call.wants_grad:
                beside = "gradients in a graph, beside a window, a cap, sinks or a backend by name,"
                raise call.refusal(beside, "no backend has them: call under torch.no_grad(), or train without torch.compile")
            return as_operator(call, attention_mask), None
        return attend(call, attention_mask), None

    return attention
