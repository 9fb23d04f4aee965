"""Attention weights on demand, by the formula: for inspection, since kernels never materialise them.

    out, weights = layer(query, key, value, cache, metadata, return_weights=True)  # weights[r]: [H, n, m]

Weights are float32 and exclude the sink's share, so that a row of a layer with sinks adds up to less than 1. They are computed
beside the call, from the keys that the cache holds (rounded, if it is quantised), without gradients. A call may have
`MAX_ELEMENTS` of them: they take memory and time in proportion to rows times keys, which a warning says once.
"""

from typing import Any

from attn import arrays, recording
from attn.errors import UnsupportedError
from attn.functional import Extras, Rules, softmax
from attn.imports import resolve_obj_by_qualname
from attn.logger import init_logger

logger = init_logger(__name__)

MAX_ELEMENTS = 1 << 26  #: 256 MiB of float32


def dense(query: Any, key: Any, rules: Rules, extras: Extras) -> Any:
    """Return the weights [B, H, n, m] of query [B, n, H, D] over key [B, m, K, D], arrays of torch or jax, in float32.

    extras: slopes, sinks [H]; mask broadcastable to [B, H, n, m]. A row without keys is 0. Raises `UnsupportedError` for more
    than `MAX_ELEMENTS`.
    """
    xp = resolve_obj_by_qualname(f"attn.{arrays.framework_of(query)}.functional.Ops")
    check_elements(query.shape[0] * query.shape[2] * query.shape[1] * key.shape[1])
    return xp.compiled(_dense)(xp, rules, query, key, extras)


def _dense(xp: Any, rules: Rules, query: Any, key: Any, extras: Extras) -> Any:
    (batch, n, heads, size), (m, kv_heads) = query.shape, key.shape[1:3]
    grouped, mask = (kv_heads, heads // kv_heads), extras.mask
    slopes, sinks = (x if x is None else xp.wide(x).reshape(grouped) for x in (extras.slopes, extras.sinks))
    if mask is not None:
        mask = xp.broadcast_to(mask, (batch, heads, n, m)).reshape(batch, *grouped, n, m)
    rows, position = xp.wide(query.reshape(batch, n, *grouped, size)), xp.arange(0, n, query) + (m - n)
    found, share, empty, *_ = softmax(xp, rules, rows, xp.wide(key), position, Extras(slopes, sinks, mask))
    return (found * xp.where(empty, 0.0, share)[..., None]).reshape(batch, heads, n, m)


def check_elements(count: int) -> None:
    """Raise `UnsupportedError` for more weights than `MAX_ELEMENTS`; warn once about their cost."""
    if count > MAX_ELEMENTS:
        raise UnsupportedError(f"{count} attention weights: must be at most {MAX_ELEMENTS}; pass fewer rows or requests")
    logger.warning_once("attention weights are computed by the formula, in memory and time of rows times keys")


def of_call(layer: Any, arguments: recording.Arguments) -> list[Any]:
    """Return each request's weights [H, n, m] in a call of a layer, whose cache already holds the new keys.

    Raises `UnsupportedError` in a graph and under a transformation of JAX, where lengths have no values, and for more than
    `MAX_ELEMENTS`.
    """
    if why := recording.valueless(layer, arguments):
        raise UnsupportedError(f"return_weights=True {why} not supported: call the layer outside of it")
    from attn.testing import recorded

    call = recorded.call_of(recording.snapshot(layer, arguments))
    case, batch, heads = call.case, call.batch, call.case.num_heads
    check_elements(sum(heads * n * m for n, m in zip(case.query_lens, case.seq_lens, strict=True)))

    def put(array: Any) -> Any:
        return None if array is None else arrays.to_framework(array, layer.framework, like=arguments.query)

    rules, found = Rules(False, call.scale, (None, None), case.logits_soft_cap), []  # the mask says what rows see
    for r in range(batch.num_reqs):
        extras = Extras(*map(put, (call.alibi_slopes, call.sinks, recorded.mask_of(call, r))))
        found.append(dense(put(call.query[None, call.rows(r)]), put(recorded.keys_of(call, r)[None]), rules, extras)[0])
    return found
