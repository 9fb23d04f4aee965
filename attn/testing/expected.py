"""The oracle's answer to a call: the cache as it must be afterwards, and the attention over it.

A quantised cache is judged in two steps. Which codes may be stored is one; the other is attention over *the codes that were
stored*, so that the reader's tolerance need not cover what quantising itself costs, which is ten times as much.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn.reference import attention, paged_attention
from attn.testing.bits import Array, as_bytes, decode, encode, rounded
from attn.testing.draw import Call, Result, scale_array
from attn.testing.simulated import EagerKernel


@dataclass
class Expected:
    """The oracle's answer: out [T, H, D], lse [H, T] in float64, NaN in padding rows; `slack` is rule C's bound."""

    out: Array
    lse: Array
    slack: float | None


def specified_cache(call: Call) -> tuple[Array, Array]:
    """(key_cache, value_cache) bits as they must be after the call: the context, and the new tokens at their slots."""
    if "cache" not in call.memo:
        assert call.key_cache is not None and call.value_cache is not None
        caches = [call.key_cache.copy(), call.value_cache.copy()]
        if call.key is not None and call.value is not None and not call.case.kv_sharing:
            for cache, fresh, scale in zip(caches, (call.key, call.value), (call.case.k_scale, call.case.v_scale), strict=True):
                slots = call.batch.slot_mapping
                flat = cache.reshape(-1, *cache.shape[2:])
                flat[slots[slots >= 0]] = encode(fresh[slots >= 0], call.case.element, scale_array(scale))
        call.memo["cache"] = caches
    return tuple(call.memo["cache"])


def wrong_bytes(call: Call, stored: tuple[Array, Array]) -> Iterator[tuple[str, Array, Array, Array]]:
    """(which, stored, specified, wrong), each [slots, K, D], for the key and the value cache as they are after the call.

    Of a quantised code, one step is allowed where a division in float32 could fall on a tie's other side.
    """
    case, slots = call.case, call.batch.slot_mapping
    live = np.flatnonzero(slots >= 0) if call.key is not None and not case.kv_sharing else np.zeros(0, np.int64)
    for which, own, want, fresh, scale in zip(
        ("key", "value"), stored, specified_cache(call), (call.key, call.value), (case.k_scale, case.v_scale), strict=True
    ):
        flat, meant = (x.reshape(-1, *x.shape[2:]) for x in (own, want))
        wrong = as_bytes(flat) != as_bytes(meant)
        if case.is_quantized and fresh is not None and wrong.any():
            for nudge in (1 - 2.0**-21, 1 + 2.0**-21):
                near = encode(fresh[live] * np.float32(nudge), case.element, scale_array(scale))
                wrong[slots[live]] &= flat[slots[live]] != near
        yield which, flat, meant, wrong


def expect(call: Call, result: Result | None = None) -> Expected:
    """The oracle's answer to `call`, over the bytes that `result` left in a quantised cache (when they are allowed)."""
    if call.case.is_encoder:
        return _remembered(call, lambda: _ragged(call))
    caches = specified_cache(call)
    if call.case.is_quantized and result is not None and result.key_cache is not None and result.value_cache is not None:
        own = (result.key_cache, result.value_cache)
        as_specified = all(np.array_equal(a, b) for a, b in zip(own, caches, strict=True))
        if not as_specified and not any(wrong.any() for *_, wrong in wrong_bytes(call, own)):
            return _with_slack(call, _paged(call, own))
    return _remembered(call, lambda: _paged(call, caches))


def _remembered(call: Call, oracle: Callable[[], tuple[Array, Array]]) -> Expected:
    if "expected" not in call.memo:
        call.memo["expected"] = _with_slack(call, oracle())
    expected: Expected = call.memo["expected"]
    return expected


def _layer(call: Call) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "window": call.case.window,
        "logits_soft_cap": call.case.logits_soft_cap,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
    }


def _paged(call: Call, caches: tuple[Array, Array]) -> tuple[Array, Array]:
    """The oracle over the pages in use alone: a large cache is not decoded for the sake of a few pages."""
    batch, case = call.batch, call.case
    page = case.block_size
    used = -(-batch.seq_lens // page)
    live = np.arange(batch.block_table.shape[1]) < used[:, None]
    ids, compact = np.unique(np.where(live, batch.block_table, 0), return_inverse=True)
    keys, values = (decode(cache[ids], case.element) for cache in caches)
    return paged_attention(
        call.query,
        keys,
        values,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=compact.reshape(batch.block_table.shape),
        causal=batch.causal,
        tree_mask=batch.tree_mask,
        k_scale=scale_array(case.k_scale),
        v_scale=scale_array(case.v_scale),
        **_layer(call),
    )


def _ragged(call: Call) -> tuple[Array, Array]:
    """Encoders: every request attends its own rows, in both directions."""
    assert call.key is not None and call.value is not None
    out = np.full(call.query.shape, np.nan)
    lse = np.full(call.query.shape[1::-1], np.nan)
    for r in range(call.batch.num_reqs):
        rows = call.rows(r)
        out[rows], lse[:, rows] = attention(
            call.query[rows], call.key[rows], call.value[rows], causal=call.batch.causal, **_layer(call)
        )
    return out, lse


def _with_slack(call: Call, answer: tuple[Array, Array]) -> Expected:
    out, lse = answer
    slack = None
    if call.case.dtype in ("float16", "bfloat16"):
        live = slice(0, call.num_tokens)
        eager = EagerKernel()(call).output[live]
        shifted = rounded(rounded(out[live] + 0.3, call.case.dtype) - np.float32(0.3), call.case.dtype)
        with np.errstate(invalid="ignore"):
            errors = [np.abs(x - out[live]) for x in (eager, shifted)]
        factor = 3.0 if call.case.logits_soft_cap else 2.0
        worst = [np.max(e, where=np.isfinite(e), initial=0.0) for e in errors]
        slack = factor * float(worst[0]) + 2.0 * float(worst[1])
    return Expected(out, lse, slack)
