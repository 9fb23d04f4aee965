"""The oracle's result of a call: the required contents of the cache, and attention over it.

A quantised cache is checked in two steps: the stored codes, and then attention over *the codes that were stored*, so that the
tolerance of attention need not include the error of quantisation, which is ten times as large.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from attn.capabilities import AttentionType
from attn.dtypes import DTYPES
from attn.reference import attention, block_sparse_mask, mla_unabsorbed, paged_attention
from attn.testing.bits import PACKED, Array, as_bytes, decode, encode, rounded
from attn.testing.draw import Call, Result, scale_array
from attn.visibility import LayerMask, Visibility


@dataclass
class Expected:
    """The oracle's result.

    out: [T, H, D] float64, NaN in padding rows.
    lse: [H, T] float64, NaN in padding rows.
    slack: rule C's bound.
    noise: [H, T], the addition to rule D's tolerance for 16-bit MLA (`_lse_noise`).
    """

    out: Array
    lse: Array
    slack: float | None
    noise: Array | None = None


def specified_cache(call: Call) -> tuple[Array, Array]:
    """Return the required bits of (key_cache, value_cache) after the call: the context, and the new tokens at their slots."""
    # Memorised: rule W, the oracle and several transformations ask for it.
    if "cache" not in call.memo:
        assert call.key_cache is not None and call.value_cache is not None
        caches = [call.key_cache.copy(), call.value_cache.copy()]
        # A layer that shares a cache ignores its own keys (docs/semantics.md §14).
        if call.key is not None and call.value is not None and not call.case.kv_sharing:
            for cache, fresh, scale in zip(caches, (call.key, call.value), call.case.cache_scales, strict=True):
                slots = call.batch.slot_mapping
                # A view: a slot is page * block_size + offset, the index of a token in the flattened pages.
                flat = cache.reshape(-1, *cache.shape[2:])
                flat[slots[slots >= 0]] = encode(fresh[slots >= 0], call.case.element, scale_array(scale))
        call.memo["cache"] = caches
    return tuple(call.memo["cache"])


def wrong_bytes(call: Call, stored: tuple[Array, Array]) -> Iterator[tuple[str, Array, Array, Array]]:
    """Yield (name, stored, specified, wrong) for the key and the value cache after the call; the arrays are [slots, K, D].

    A quantised code may differ by one step where a float32 division could round a tie the other way; a NaN that was written
    may have any bits.
    """
    case, slots = call.case, call.batch.slot_mapping
    live = np.flatnonzero(slots >= 0) if call.key is not None and not case.kv_sharing else np.zeros(0, np.int64)
    for name, written, want, fresh, scale in zip(
        ("key", "value"), stored, specified_cache(call), (call.key, call.value), case.cache_scales, strict=True
    ):
        flat, meant = (x.reshape(-1, *x.shape[2:]) for x in (written, want))
        wrong = as_bytes(flat) != as_bytes(meant)
        # Decoded only where a written row is wrong at all, and not where a row has more bytes than values.
        if case.element in DTYPES and case.element != PACKED and wrong[slots[live]].any():
            wrong[slots[live]] &= ~np.isnan([decode(x[slots[live]], case.element) for x in (flat, meant)]).all(0)
        if case.is_quantized and fresh is not None and wrong.any():
            # Up to 8 units in the last place of float32, which includes a product with the rounded 1 / scale in place of a
            # division; more could hide a wrong scale.
            for nudge in (1 - 2.0**-21, 1 + 2.0**-21):
                near = encode(fresh[live], case.element, scale_array(scale), nudge)
                wrong[slots[live]] &= flat[slots[live]] != near
        yield name, flat, meant, wrong


def expect(call: Call, result: Result | None = None) -> Expected:
    """Return the oracle's result of `call`, over the bytes that `result` stored in a quantised cache (if they are allowed)."""
    if call.case.is_encoder:
        return _remembered(call, lambda: _ragged(call))
    caches = specified_cache(call)
    if call.case.is_quantized and result is not None and result.key_cache is not None and result.value_cache is not None:
        written = (result.key_cache, result.value_cache)
        # The usual case shares the memorised oracle; only a cache with other, allowed codes needs one of its own.
        as_specified = all(np.array_equal(a, b) for a, b in zip(written, caches, strict=True))
        # Over bytes that rule W rejects the oracle would be right about the wrong cache, and hide the cause.
        if not as_specified and not any(wrong.any() for *_, wrong in wrong_bytes(call, written)):
            return _with_slack(call, _paged(call, written))
    return _remembered(call, lambda: _paged(call, caches))


def _remembered(call: Call, oracle: Callable[[], tuple[Array, Array]]) -> Expected:
    if "expected" not in call.memo:
        call.memo["expected"] = _with_slack(call, oracle())
    return call.memo["expected"]


def _layer(call: Call) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "window": call.case.window,
        "logits_soft_cap": call.case.logits_soft_cap,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
    }


def _paged(call: Call, caches: tuple[Array, Array]) -> tuple[Array, Array]:
    """Compute the oracle over the pages in use only, so that a large cache is not decoded for a few pages."""
    batch, case = call.batch, call.case
    if case.mla:
        return _latent(call, caches[0], mla_unabsorbed)
    page = case.block_size
    used = -(-batch.seq_lens // page)
    # [R, columns]. Stale entries become page 0, which is decoded in vain but is a valid index; they may be out of range.
    live = np.arange(batch.block_table.shape[1]) < used[:, None]
    # `compact` numbers the pages that are left, one after another; its shape differs between NumPy 1 and 2, hence the reshape.
    ids, compact = np.unique(np.where(live, batch.block_table, 0), return_inverse=True)
    keys, values = (decode(cache[ids], case.element) for cache in caches)
    masks = None
    if case.sparse:
        lens = zip(np.diff(batch.query_start_loc), batch.seq_lens, strict=True)
        masks = [block_sparse_mask(int(n), int(m), num_heads=case.num_heads, **case.sparse_pattern) for n, m in lens]
    return paged_attention(
        call.query,
        keys,
        values,
        block_table=compact.reshape(batch.block_table.shape),
        # Cross attention reads the cache without causality, whatever the batch says.
        causal=batch.causal if case.attn_type == AttentionType.DECODER else False,
        mask=masks,
        **{name: getattr(batch, name) for name in ("query_start_loc", "seq_lens", "tree_mask", "spans", "prefix")},
        chunk_size=case.chunk_size or None,
        span_window=case.span_window,
        k_scale=scale_array(case.cache_scales[0]),
        v_scale=scale_array(case.cache_scales[1]),
        **_layer(call),
    )


def stored_rows(call: Call, r: int, cache: Array) -> Array:
    """Return the rows [m, K, ...] of request r's tokens in a cache [N, P, K, ...]."""
    page, j = call.case.block_size, np.arange(int(call.batch.seq_lens[r]))
    return np.asarray(cache[call.batch.block_table[r, j // page], j % page])


def _latent(call: Call, cache: Array, attend: Callable[..., tuple[Array, Array]]) -> tuple[Array, Array]:
    """Compute MLA with `attend` (such as `attn.reference.mla_unabsorbed`), request by request."""
    case, batch = call.case, call.batch
    rank, nope, _, _ = case.mla
    up_k, up_v = call.weights[..., :nope], call.weights[..., nope:]
    indices = call.indices if case.topk else None
    out, lse = np.full(call.output_shape, np.nan), np.full(call.query.shape[1::-1], np.nan)
    for r in range(batch.num_reqs):
        rows, stored = call.rows(r), stored_rows(call, r, cache)[:, 0]
        latent = decode(stored, case.element) * scale_array(case.cache_scales[0])
        query, mask = call.query[rows], None
        if indices is not None:
            # [H, n, m]: whether the row's list names the key. A list names no later token, so the mask replaces causality.
            mask = (indices[rows, :, None] == np.arange(len(stored))).any(1)[None].repeat(case.num_heads, 0)
        if len(query):
            out[rows], lse[:, rows] = attend(
                query[..., :nope],
                query[..., nope:],
                latent[:, :rank],
                latent[:, rank:],
                up_k,
                up_v,
                scale=call.scale,
                causal=batch.causal and mask is None,
                mask=mask,
            )
    return out, lse


def _eager_latent(*arrays: Array, scale: float, causal: bool, mask: Array | None, dtype: str) -> tuple[Array, Array]:
    """Compute `mla_absorbed`, whose arrays these are, as a 16-bit program does: each product rounded to the dtype, the softmax
    in float32."""
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = arrays
    n, m = len(q_nope), len(kv_c)
    latent, rope = rounded(kv_c, dtype), rounded(k_pe, dtype)
    absorbed = rounded(np.einsum("nhd,lhd->nhl", q_nope, w_uk), dtype)
    scores = scale * (np.einsum("nhl,ml->hnm", absorbed, latent) + np.einsum("nhr,mr->hnm", q_pe, rope))
    scores = np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, scores, -np.inf) if causal else scores
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    # A row without keys has a maximum of -inf, and -inf - -inf is NaN; with -3e38 its weights are 0.
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -3e38)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    mixed = np.einsum("hnm,ml->nhl", rounded(weights, dtype), latent) / np.where(total == 0, 1, total)[:, :, 0].T[..., None]
    return rounded(np.einsum("nhl,lhv->nhv", rounded(mixed, dtype), w_uv), dtype), (top + np.log(np.maximum(total, 1e-45)))[
        ..., 0
    ]


def _eager(call: Call) -> Array:
    """Compute attention [T, H, D] as a framework without fused kernels does: whole rows, each step rounded to 16 bits."""
    case, to = call.case, partial(rounded, dtype=call.case.dtype)
    out, caches = np.full(call.query.shape, np.nan, np.float32), None if case.is_encoder else specified_cache(call)
    layer = LayerMask(call.batch.all_causal and case.attn_type == AttentionType.DECODER, case.window)
    seen = Visibility(layer._replace(chunk_size=case.chunk_size or None, span_window=case.span_window), call.batch.mask)
    # Each kv head is repeated for its query heads: [H], and its scales as [H, 1, 1].
    head = np.arange(case.num_heads) // (case.num_heads // case.num_kv_heads)
    k_scale, v_scale = (np.broadcast_to(scale_array(x), (case.num_kv_heads,))[head][:, None, None] for x in case.cache_scales)
    for r in range(call.batch.num_reqs):
        rows = call.rows(r)
        query = call.query[rows].swapaxes(0, 1)
        if caches is None:
            assert call.key is not None and call.value is not None
            keys, values = call.key[rows], call.value[rows]
        else:
            keys, values = (decode(stored_rows(call, r, cache), case.element) for cache in caches)
        (n, m), (k, v) = (query.shape[1], len(keys)), (x[:, head].swapaxes(0, 1) for x in (keys, values))
        if not n:
            continue
        allowed: Array = seen.select(r, rows).as_array(n, m)
        if case.sparse:
            allowed = allowed & block_sparse_mask(n, m, num_heads=case.num_heads, **case.sparse_pattern)
        # The scale on the keys, before the product, as in FlashAttention's reference (`reorder_ops`).
        scores = to(query @ to(k * np.float32(call.scale) * k_scale).swapaxes(1, 2))
        if case.logits_soft_cap:
            scores = to(np.float32(case.logits_soft_cap) * np.tanh(scores / np.float32(case.logits_soft_cap)))
        if call.alibi_slopes is not None:
            distance = np.abs(np.arange(m) - np.arange(n)[:, None] - m + n)
            scores = scores - call.alibi_slopes[:, None, None] * distance.astype(np.float32)
        scores = np.where(allowed, scores, np.float32(-np.inf))
        # A row without keys has a maximum of -inf, and -inf - -inf is NaN: with 0 in its place its weights are 0.
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        # Normalised before the product, where a flash kernel divides afterwards. Values that are not finite count as 0: rule C
        # does not judge the rows that see one, and for all others it has no weight.
        shares = to(np.where(total == 0, 0, weights / total))
        mixed = shares @ np.where(np.isfinite(v), v, 0) * v_scale
        if call.sinks is not None:
            mixed = np.where(total == 0, 0, mixed / (1 + np.exp(call.sinks[:, None, None] - top - np.log(total))))
        out[rows] = to(mixed).swapaxes(0, 1)
    return out


def _ragged(call: Call) -> tuple[Array, Array]:
    """Compute encoder attention: every request attends to its own rows, in both directions."""
    assert call.key is not None and call.value is not None
    out = np.full(call.query.shape, np.nan)
    lse = np.full(call.query.shape[1::-1], np.nan)
    for r in range(call.batch.num_reqs):
        rows = call.rows(r)
        out[rows], lse[:, rows] = attention(call.query[rows], call.key[rows], call.value[rows], **_layer(call))
    return out, lse


#: The unit roundoff of a dtype: the largest relative error of rounding to nearest.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_DEVIATIONS = 6.0  #: standard deviations of a normal error: exceeded once in 5e8 rows


def _lse_noise(call: Call, lse: Array) -> Array | None:
    """Return [H, T]: how far 16-bit MLA's lse may be from the oracle's because of rounded intermediate values.

    In absorbed form each element of q' = q_nope W_UK^T is rounded once for all keys; in expanded form, each element of
    every key. To first order, a score's error is scale * sum_l (error of element l) * (its factor), and the lse's error is
    the mean of its scores' errors weighted by the probabilities p. An element's error is that of rounding to nearest:
    independent of the others, with a standard deviation of at most u |x| / sqrt(3) (justified by Higham & Mary, 2019). The
    bound without independence, u * scale * sum |q| |k|, is about 20 times as wide. A row of a quantised cache is code times
    scale, which a backend may round first: the resulting shift of the lse is known, since the codes are, and is added.
    """
    case, batch = call.case, call.batch
    if not case.mla or case.dtype not in ROUNDOFF:
        return None
    rank, nope, _, _ = case.mla
    up_k = call.weights[..., :nope].astype(np.float64)  # [L, H, Dn]
    noise, cache = np.zeros_like(lse), specified_cache(call)[0]
    for r in range(batch.num_reqs):
        rows, stored = call.rows(r), stored_rows(call, r, cache)[:, 0]
        if rows.stop == rows.start or not len(stored):
            continue
        # A NaN would spread to every row by the products. -inf becomes the lowest finite number, whose probability is 0 all the
        # same.
        latent = np.nan_to_num(decode(stored, case.element) * scale_array(case.cache_scales[0])).astype(np.float64)
        kv_c, k_pe, query = latent[:, :rank], latent[:, rank:], np.nan_to_num(call.query[rows].astype(np.float64))
        q_nope, q_pe = query[..., :nope], query[..., nope:]
        # [H, n, L], and the scores [H, n, m].
        absorbed = np.einsum("nhd,lhd->hnl", q_nope, up_k)
        scores = call.scale * (absorbed @ kv_c.T + np.einsum("nhr,mr->hnm", q_pe, k_pe))
        # p is exp(score - lse), of keys that the row sees and whose score is finite.
        known = np.isfinite(lse[:, rows])[..., None] & _visible(call, rows, len(stored)) & np.isfinite(scores)
        p = np.where(known, np.exp(np.minimum(np.where(known, scores - lse[:, rows, None], 0), 0)), 0)
        # Absorbed: element l of q' is off by u |q'_l|, which shifts all of a row's scores together, each by its key's element
        # l; the mean under p of these is (p @ kv_c)_l. Independent errors add in squares.
        by_query = np.einsum("hnl,hnl->hn", absorbed**2, (p @ kv_c) ** 2)
        keys = np.einsum("ml,lhd->mhd", kv_c, up_k)
        # Expanded: every key has rounding errors of its own, so the probabilities enter in squares. Which form a backend used
        # is not known: the larger one counts.
        by_key = np.einsum("hnm,nhd,mhd->hn", p**2, q_nope**2, keys**2, optimize=True)
        with np.errstate(invalid="ignore"):
            # What a latent loses when code times scale is rounded to the dtype; known exactly, so it is no random term.
            lost = np.where(np.abs(latent) < 1e30, rounded(latent, case.dtype) - latent, 0)  # infinities are exact
        shift = (p * (absorbed @ lost[:, :rank].T + np.einsum("nhr,mr->hnm", q_pe, lost[:, rank:]))).sum(-1)
        random = _DEVIATIONS * ROUNDOFF[case.dtype] * np.sqrt(np.maximum(by_query, by_key) / 3)
        noise[:, rows] = abs(call.scale) * (random + np.abs(shift))
    return noise


def _visible(call: Call, rows: slice, m: int) -> Array:
    """Return [n, m]: the keys that each row of a request of an MLA case attends to."""
    n, j = rows.stop - rows.start, np.arange(m)
    if call.case.topk:
        return np.asarray((call.indices[rows, :, None] == j).any(1))
    seen: Array = j <= np.arange(n)[:, None] + m - n
    return seen if call.batch.causal else np.ones_like(seen)


def _with_slack(call: Call, answer: tuple[Array, Array]) -> Expected:
    out, lse = answer
    slack = None
    if call.case.dtype in ("float16", "bfloat16"):
        live = slice(0, call.num_tokens)
        # Inputs may be infinite, and poison overflows.
        with np.errstate(all="ignore"):
            # In the query's dtype: the codes of an fp8 output are judged by rule B (`rules._codes`) and not by this slack.
            if call.case.mla:
                eager = _latent(call, specified_cache(call)[0], partial(_eager_latent, dtype=call.case.dtype))[0][live]
            else:
                eager = _eager(call)[live]
        # FlashAttention's term (its tests' fwd_atol): the error of an addition that rounds, a floor for outputs near 0, where
        # an eager kernel may happen to be exact.
        shifted = rounded(rounded(out[live] + 0.3, call.case.dtype) - np.float32(0.3), call.case.dtype)
        with np.errstate(invalid="ignore"):
            errors = [np.abs(x - out[live]) for x in (eager, shifted)]
        # FlashAttention's factors (`rtol` of its tests).
        factor = 3.0 if call.case.logits_soft_cap else 2.0
        worst = [np.max(e, where=np.isfinite(e), initial=0.0) for e in errors]
        slack = factor * float(worst[0]) + 2.0 * float(worst[1])
        # Not below a unit in the last place: where all values are one number, an eager kernel's sums of rounded weights may all
        # round to it, and another kernel's not. (1e-9: the oracle's own sums.)
        largest = float(np.max(np.abs(out[live]), where=np.isfinite(out[live]), initial=0.0))
        slack = max(slack, math.ldexp(ROUNDOFF[call.case.dtype] * (1 + 1e-9), math.frexp(largest)[1]))
    return Expected(out, lse, slack, _lse_noise(call, lse) if call.case.lse else None)
