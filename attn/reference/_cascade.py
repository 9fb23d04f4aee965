"""Cascade attention: a prefix shared by all requests is attended once for the batch and merged with the rest.

The function is the same as `paged_attention`; it exists because backends make mistakes in the merge of the
two passes. Every check is a condition without which the two-pass form is a different function.
"""

import functools
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, check_ndim, floats, require, whole
from attn.reference._paged import check_batch, paged_attention
from attn.reference._states import apply_sinks, merge_states


def cascade_attention(
    query: npt.ArrayLike,
    key_cache: npt.ArrayLike,
    value_cache: npt.ArrayLike,
    *,
    query_start_loc: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    block_table: npt.ArrayLike,
    common_prefix_len: int,
    scale: float | None = None,
    window: Sequence[SupportsIndex | None] = (None, None),
    logits_soft_cap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    k_scale: npt.ArrayLike = 1.0,
    v_scale: npt.ArrayLike = 1.0,
) -> tuple[F64, F64]:
    """Compute `paged_attention` in two passes, if all requests begin with the same pages (docs/semantics.md §12).

    The first common_prefix_len keys, a multiple of P, are attended by all rows at once without a causal
    rule; the rest per request, causally; the two are merged by lse, and sinks are applied last. Shapes and
    result are as in `paged_attention`, up to rounding. Windows and ALiBi would need global positions in both
    passes, so they raise ValueError; so does a prefix that is not shared, or that includes new tokens.
    """
    require(tuple(window) == (None, None), f"window={window!r} (cascade attention supports none)")
    require(alibi_slopes is None, "alibi_slopes given (cascade attention supports none)")
    q = floats("query", query, 3)
    # Requests without new tokens (`active` below) attend nothing, so their pages need not begin with the prefix.
    starts, lengths, table = check_batch(q, query_start_loc, seq_lens, block_table)
    keys = np.asarray(key_cache)
    check_ndim("key_cache", keys, 4)
    prefix, page = whole("common_prefix_len", common_prefix_len), keys.shape[1]
    require(prefix % page == 0, f"common_prefix_len={prefix} is not a multiple of block_size={page}")
    shared, active = prefix // page, np.diff(starts) > 0
    # A prefix that reached into the new tokens would show rows keys after their own, since the prefix is attended
    # without causality.
    context = (lengths - np.diff(starts))[active]
    require(
        bool((context >= prefix).all()),
        f"common_prefix_len={prefix} is more than the shortest context ({context.min(initial=prefix)} keys)",
    )
    tables = table[active, :shared]
    require(bool((tables == tables[:1]).all()), f"the first {shared} columns of block_table differ between requests")
    total = int(starts[-1])
    scores: dict[str, Any] = {"scale": scale, "logits_soft_cap": logits_soft_cap, "k_scale": k_scale, "v_scale": v_scale}
    # Sinks are not among the arguments: in both passes, they would count twice.
    attend = functools.partial(paged_attention, q, key_cache, value_cache, **scores)
    # One request of all rows, over the first table's pages, which are everyone's; no request if there is no row.
    prefix_state = attend(
        query_start_loc=[0, total] if total else [0], seq_lens=[prefix] if total else [], block_table=tables[:1], causal=False
    )
    # Without the prefix, row i of n is at position i + (m - prefix - n) of the rest: causality stays aligned to the last key.
    # An inactive request may be shorter than the prefix.
    suffix_state = attend(
        query_start_loc=starts, seq_lens=np.maximum(lengths - prefix, 0), block_table=table[:, shared:], causal=True
    )
    outs, lses = zip(prefix_state, suffix_state, strict=True)
    # A NaN lse is a visible NaN key or a padding row, not an empty part.
    merged = merge_states(outs, lses, nan_is_empty=False)
    return merged if sinks is None else apply_sinks(*merged, sinks)
