"""Attention weights on demand, by the formula: for inspection, since kernels never materialise them.

    out, weights = layer(query, key, value, cache, metadata, return_weights=True)  # weights[r]: [H, n, m]

Weights are float32 and exclude the sink's share, so that a row of a layer with sinks adds up to less than 1. They are computed
beside the call, from the keys that the cache holds (rounded, if it is quantised), without gradients. A call may have at
most `MAX_ELEMENTS` of them; the cost, in memory and time, grows with rows times keys (warned once).
"""

from typing import Any

from attn import arrays, recording
from attn.capabilities import ENCODER_TYPES
from attn.errors import UnsupportedError
from attn.functional import DenseParams, OptionalArrays, by_group, softmax
from attn.logger import init_logger
from attn.visibility import Visibility

logger = init_logger(__name__)

# A call of a long prompt by mistake would exhaust memory: 32 heads of 32k rows and keys are 128 GiB.
MAX_ELEMENTS = 1 << 26  #: 256 MiB of float32


def dense(query: Any, key: Any, rules: DenseParams, extras: OptionalArrays) -> Any:
    """Return the weights [B, H, n, m] of query [B, n, H, D] over key [B, m, K, D], arrays of torch or jax, in float32.

    extras: slopes, sinks [H]; mask broadcastable to [B, H, n, m]. A row without keys is 0. Raises `UnsupportedError` for more
    than `MAX_ELEMENTS`.
    """
    xp = arrays.ops_of(arrays.framework_of(query))
    check_elements(query.shape[0] * query.shape[2] * query.shape[1] * key.shape[1])
    return xp.compiled(_dense)(xp, rules, query, key, extras)


def _dense(xp: Any, rules: DenseParams, query: Any, key: Any, extras: OptionalArrays) -> Any:
    (batch, n, heads, _), m = query.shape, key.shape[1]
    rows, extras = by_group(xp, query, key, extras)
    weights, factor, empty, *_ = softmax(xp, rules, rows, xp.wide(key), xp.arange(0, n, query) + (m - n), extras)
    return (weights * xp.where(empty, 0.0, factor)[..., None]).reshape(batch, heads, n, m)


def check_elements(count: int) -> None:
    """Raise `UnsupportedError` for more weights than `MAX_ELEMENTS`; warn once about their cost."""
    if count > MAX_ELEMENTS:
        raise UnsupportedError(f"{count} attention weights: must be at most {MAX_ELEMENTS}; pass fewer rows or requests")
    logger.warning_once("attention weights are computed by the formula, in memory and time of rows times keys")


def of_call(layer: Any, arguments: recording.Arguments) -> list[Any]:
    """Return each request's weights [H, n, m] in a call of a layer, whose cache already holds the new keys.

    Raises `UnsupportedError` in a graph and under a transformation of JAX, where lengths have no values, for a batch of decode
    context parallelism or of another library, and for more than `MAX_ELEMENTS`.
    """
    if why := recording.valueless(layer, arguments):
        raise UnsupportedError(f"return_weights=True {why} not supported: call the layer outside of it")
    recording.check_readable(layer, arguments.attn_metadata, "attention weights")
    impl, xp = layer.impl, arrays.ops_of(layer.framework)
    starts, lens = recording.bounds(layer, arguments.attn_metadata)
    q_lens, total = starts[1:] - starts[:-1], int(starts[-1])
    # Before the first weight is computed; in int64, since 65,536 rows over as many keys overflow int32.
    check_elements(impl.num_heads * int((q_lens.astype(int) * lens).sum()))
    # An MLA layer's query has Dn + Dr columns, its cached row L + Dr.
    query = recording.rows_of(arguments.query, total, (impl.num_heads, getattr(impl, "qk_head_dim", impl.head_size)))
    weights = []
    for r, (n, m) in enumerate(zip(q_lens.tolist(), lens.tolist(), strict=True)):
        rows = slice(int(starts[r]), int(starts[r]) + n)
        if impl.attn_type in ENCODER_TYPES:
            key = recording.rows_of(arguments.key, total, (impl.num_kv_heads, impl.head_size))[rows]
        else:
            # Only the request's own pages: entries past them may be any number.
            blocks = arguments.attn_metadata.block_table[r, : -(-m // layer.kv_cache_spec.block_size)]
            key = _keys(xp, layer, arguments.kv_cache, blocks)[:m]
        rules, mask = _seen(layer, arguments, r, rows, m)
        extras = (getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None), mask)
        extras = OptionalArrays(*(x if x is None else xp.asarray(x, like=query) for x in extras))
        weights.append(dense(query[None, rows], key[None], rules, extras)[0])
    return weights


def _keys(xp: Any, layer: Any, kv_cache: Any, blocks: Any) -> Any:
    """Return the keys [n * P, K, D] of blocks [n] as the layer reads them; of an MLA layer expanded, [n * P, H, Dn + Dr]."""
    impl, rows = layer.impl, xp.keys(layer, kv_cache, blocks)
    rank = getattr(impl, "kv_lora_rank", None)
    if rank is None:
        return rows
    latent, rotary = rows[:, :rank], rows[:, None, rank : rank + impl.qk_rope_head_dim]
    # W_UK, the first Dn columns of each head: k = [c W_UK | k_pe], the unabsorbed form (docs/semantics.md §9), whose
    # query is the layer's argument.
    nope = xp.cast(xp.up_projection(layer)[..., : impl.qk_nope_head_dim], like=rows)
    rotary = xp.broadcast_to(rotary, (len(rows), impl.num_heads, impl.qk_rope_head_dim))
    return xp.concat([xp.einsum("ml,lhd->mhd", latent, nope), rotary], -1)


def _seen(layer: Any, arguments: recording.Arguments, r: int, rows: slice, m: int) -> tuple[DenseParams, Any]:
    """Return the visibility of request r's rows: as rules, or as a mask [n, m] where rules cannot express it."""
    import numpy as np

    impl, meta, bits = layer.impl, arguments.attn_metadata, arrays.ops_of(layer.framework).bits
    n, scale, cap = rows.stop - rows.start, impl.signed_scale, getattr(impl, "logits_soft_cap", None)
    if (chosen := recording.indices_of(layer, arguments)) is not None:
        seen, keys = np.zeros((n, m + 1), bool), bits(chosen[rows])[0]
        # Column m collects the entries that name no key (-1, or past the request), and is cut off.
        np.put_along_axis(seen, np.where((keys < 0) | (keys >= m), m, keys), True, 1)  # noqa: FBT003
        return DenseParams(False, scale, (None, None), cap), seen[:, :m]
    layer, batch = impl.visible(meta)
    # On the host: `as_array` indexes with NumPy, and one request's mask is small beside its weights.
    mask = Visibility(layer, batch.map(lambda array: bits(array)[0])).select(r, rows)
    if mask.batch.is_plain and mask.layer.chunk_size is None:
        return DenseParams(mask.layer.causal, scale, mask.layer.window, cap), None
    return DenseParams(False, scale, (None, None), cap), mask.as_array(n, m)
