"""Attention of a ragged batch over a paged KV cache, and the write that fills it.

A request's keys are gathered through its block table into a dense array and passed to `attention`:
nothing else of the cache, and nothing of the table past the last used column, is read.
Rows past query_start_loc[-1] are padding and are returned as NaN, which marks undefined values for comparisons.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from attn.reference._check import (
    F64,
    I64,
    Bool,
    bools,
    check_ndim,
    check_numeric,
    check_shape,
    floats,
    heads_per_group,
    ints,
    require,
)
from attn.reference._dense import attention
from attn.reference._masks import visible_mask

PerRequest = Sequence[npt.ArrayLike | None] | npt.NDArray[np.generic] | None


def paged_attention(
    query: npt.ArrayLike,
    key_cache: npt.ArrayLike,
    value_cache: npt.ArrayLike,
    *,
    query_start_loc: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    block_table: npt.ArrayLike,
    scale: float | None = None,
    causal: bool | npt.ArrayLike = True,
    window: Sequence[SupportsIndex | None] = (None, None),
    logits_soft_cap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    mask: PerRequest = None,
    bias: PerRequest = None,
    query_positions: npt.ArrayLike | None = None,
    key_positions: PerRequest = None,
    tree_mask: npt.ArrayLike | None = None,
    spans: npt.ArrayLike | None = None,
    prefix: npt.ArrayLike | None = None,
    chunk_size: int | None = None,
    span_window: bool = False,
    k_scale: npt.ArrayLike = 1.0,
    v_scale: npt.ArrayLike = 1.0,
) -> tuple[F64, F64]:
    """Compute `attention` for R requests whose keys are in pages (docs/semantics.md §1, §10, §11, §18).

    query: [T, H, D]; key_cache: [N, P, K, D]; value_cache: [N, P, K, Dv]. Request r owns rows
    query_start_loc[r]:query_start_loc[r + 1] and has seq_lens[r] keys *including* those of its rows, which
    are already in the cache; key j is in page block_table[r, j // P] at offset j % P.
    query_start_loc: [R + 1]; seq_lens: [R]; block_table: [R, B].

    causal: a bool, or [R] bools. mask, bias, key_positions: R entries, each None or as in `attention` for
    that request ([H, q_len, seq_len], [seq_len]); query_positions: [T].
    tree_mask: bool [R, W, W]. A request with q_len <= W uses the top-left [q_len, q_len] of its own tree
    in place of the causal triangle among its new tokens; its earlier context stays visible. A longer one is
    plain causal. Windows and ALiBi use the KV slot.
    spans [T, 2], prefix [R], chunk_size and span_window: as in `visible_mask`.
    k_scale, v_scale: scalar or [K], multiplied into the cached keys and values.

    Returns (out [T, H, Dv], lse [H, T]) in float64; padding rows are NaN in both.
    """
    q = floats("query", query, 3)
    keys, values = np.asarray(key_cache), np.asarray(value_cache)
    num_heads, num_kv_heads = _check_caches(q, keys, values)
    starts, lengths, table = check_batch(q, query_start_loc, seq_lens, block_table)
    count = len(lengths)
    k_factor = _head_scale("k_scale", k_scale, num_kv_heads)
    v_factor = _head_scale("v_scale", v_scale, num_kv_heads)
    positions = None if query_positions is None else ints("query_positions", query_positions, 1)
    if positions is not None:
        check_shape("query_positions", positions, (len(q),))
    require(
        spans is None or (positions is None and key_positions is None),
        "spans count positions in the cache: pass no positions with them",
    )
    seen = _Seen.of(count, len(q), causal, window, tree_mask, spans, prefix)._replace(
        chunk_size=chunk_size, span_window=span_window
    )

    out, lse = np.full((len(q), num_heads, values.shape[3]), np.nan), np.full((num_heads, len(q)), np.nan)
    # Requests without new tokens have no rows; their pages and lengths are not looked at.
    for r in np.flatnonzero(np.diff(starts)).tolist():
        rows, m = slice(starts[r], starts[r + 1]), int(lengths[r])
        pages = _used_pages(r, m, table, keys.shape)
        out[rows], lse[:, rows] = attention(
            q[rows],
            _gather("key_cache", keys, pages, m, k_factor),
            _gather("value_cache", values, pages, m, v_factor),
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            bias=_entry("bias", bias, r, count),
            query_positions=None if positions is None else positions[rows],
            key_positions=_entry("key_positions", key_positions, r, count),
            **seen.of_request(r, rows, m, _entry("mask", mask, r, count), num_heads),
        )
    return out, lse


class _Seen(NamedTuple):
    """The rules of visibility of a batch, without explicit masks."""

    is_causal: Bool
    window: Sequence[SupportsIndex | None]
    tree: Bool | None
    spans: I64 | None
    prefix: I64
    chunk_size: int | None = None
    span_window: bool = False

    @classmethod
    def of(
        cls,
        count: int,
        tokens: int,
        causal: bool | npt.ArrayLike,
        window: Sequence[SupportsIndex | None],
        tree_mask: npt.ArrayLike | None,
        spans: npt.ArrayLike | None,
        prefix: npt.ArrayLike | None,
    ) -> "_Seen":
        """Check the arguments of `paged_attention`, for `count` requests."""
        # One bool is broadcast to [R].
        is_causal = bools("causal", causal, (count,))
        reach = None if spans is None else ints("spans", spans, 2)
        prefixes = np.zeros(count, np.int64) if prefix is None else ints("prefix", prefix, 1)
        if reach is not None:
            check_shape("spans", reach, (tokens, 2))
        check_shape("prefix", prefixes, (count,))
        return cls(is_causal, window, _check_tree(tree_mask, is_causal), reach, prefixes)

    def of_request(self, r: int, rows: slice, m: int, mask: npt.ArrayLike | None, num_heads: int) -> dict[str, Any]:
        """Return the arguments of `attention` that say what request r's rows see of its m keys."""
        n, causal = int(rows.stop - rows.start), bool(self.is_causal[r])
        # A longer request is causal, and its tree's entries are not read.
        tree = self.tree[r, :n, :n] if self.tree is not None and n <= self.tree.shape[1] else None
        # One explicit mask where keys are added or removed: `attention` only ANDs its rules, and a span adds keys.
        if self.spans is not None or self.prefix[r] or self.chunk_size is not None:
            seen = visible_mask(
                n,
                m,
                causal=causal,
                window=self.window,
                tree=tree,
                spans=None if self.spans is None else self.spans[rows],
                prefix=int(self.prefix[r]),
                chunk_size=self.chunk_size,
                span_window=self.span_window,
            )
            shape = (num_heads, n, m)
            return {"mask": np.broadcast_to(seen, shape) & (np.True_ if mask is None else bools("mask", mask, shape))}
        if tree is not None:
            return {"window": self.window, "mask": _tree_visible(r, tree, m, mask, num_heads)}
        return {"causal": causal, "window": self.window, "mask": mask}


def write_kv(
    key: npt.ArrayLike, value: npt.ArrayLike, key_cache: npt.ArrayLike, value_cache: npt.ArrayLike, slot_mapping: npt.ArrayLike
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Store token t's key and value at slot_mapping[t] = block * P + offset; -1 stores nothing.

    key: [T, K, D]; value: [T, K, Dv]; key_cache: [N, P, K, D]; value_cache: [N, P, K, Dv]; slot_mapping: [T].
    Returns new caches of the old dtypes (a cast rounds to nearest even); every other byte is unchanged.
    If two tokens have the same slot, the later wins. An integer cache holds codes: its key and value must have
    the cache's dtype.
    """
    slots = ints("slot_mapping", slot_mapping, 1)
    written: list[npt.NDArray[np.generic]] = []
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        # `np.array` copies: the caller's cache stays as it is, to be compared with.
        tokens, pages = np.asarray(new), np.array(cache)
        check_ndim(f"{name}_cache", pages, 4)
        check_shape(name, tokens, (len(slots), *pages.shape[2:]))
        require(
            # A cast of values to a cache of codes would store their integer parts.
            pages.dtype.kind not in "iu" or tokens.dtype == pages.dtype,
            f"{name} has dtype={tokens.dtype} for a cache of {pages.dtype} codes (the same dtype)",
        )
        last = pages.shape[0] * pages.shape[1] - 1
        wrong = (slots < -1) | (slots > last)
        require(not wrong.any(), f"slot_mapping contains {slots[wrong][:3].tolist()} (-1..{last})")
        flat = pages.reshape(-1, *pages.shape[2:])
        with np.errstate(all="ignore"):
            # NumPy assigns repeated indices in order, so the later token wins.
            flat[slots[slots >= 0]] = tokens[slots >= 0]
        written.append(flat.reshape(pages.shape))
    return written[0], written[1]


def _check_caches(query: F64, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]) -> tuple[int, int]:
    """Return (H, K) after checking the caches against the query and each other."""
    for name, cache in (("key_cache", keys), ("value_cache", values)):
        check_ndim(name, cache, 4)
        check_numeric(name, cache)
    num_blocks, page, num_kv_heads, _ = keys.shape
    require(page >= 1, f"block_size={page} (>= 1)")
    check_shape("key_cache", keys, (num_blocks, page, num_kv_heads, query.shape[2]))
    # Values may have a size of their own; blocks, page size and heads are the keys'.
    check_shape("value_cache", values, (num_blocks, page, num_kv_heads, values.shape[3]))
    heads_per_group(query.shape[1], num_kv_heads)
    return query.shape[1], num_kv_heads


def check_batch(
    query: F64, query_start_loc: npt.ArrayLike, seq_lens: npt.ArrayLike, block_table: npt.ArrayLike
) -> tuple[I64, I64, I64]:
    """Return query_start_loc, seq_lens and block_table as consistent int64 arrays."""
    starts, lengths = ints("query_start_loc", query_start_loc, 1), ints("seq_lens", seq_lens, 1)
    table = ints("block_table", block_table, 2)
    check_shape("query_start_loc", starts, (len(lengths) + 1,))
    require(len(table) == len(lengths), f"block_table has {len(table)} rows (expected {len(lengths)}, as seq_lens)")
    require(
        starts[0] == 0 and bool((np.diff(starts) >= 0).all()) and starts[-1] <= len(query),
        f"query_start_loc={starts.tolist()} (from 0, never falling, at most T={len(query)})",
    )
    require(bool((lengths >= 0).all()), f"seq_lens={lengths.tolist()} (>= 0)")
    return starts, lengths, table


def _check_tree(tree_mask: npt.ArrayLike | None, is_causal: Bool) -> Bool | None:
    if tree_mask is None:
        return None
    tree = np.asarray(tree_mask)
    check_ndim("tree_mask", tree, 3)
    require(bool(is_causal.all()), "tree_mask replaces the causal triangle, so it needs causal=True")
    return bools("tree_mask", tree, (len(is_causal), tree.shape[1], tree.shape[1]))


def _head_scale(name: str, scale: npt.ArrayLike, num_kv_heads: int) -> F64:
    """Reshape a scalar or [K] scale to multiply [m, K, D]."""
    array = floats(name, scale)
    require(array.ndim == 0 or array.shape == (num_kv_heads,), f"{name} has shape={array.shape} (scalar or ({num_kv_heads},))")
    # [1, 1] or [K, 1], which broadcasts over [m, K, D].
    return array.reshape(-1, 1)


def _used_pages(r: int, length: int, table: I64, cache_shape: tuple[int, ...]) -> I64:
    """Return the physical pages of request r, which must exist."""
    used = -(-length // cache_shape[1])
    require(used <= table.shape[1], f"seq_lens[{r}]={length} needs {used} blocks, block_table has {table.shape[1]} columns")
    pages = table[r, :used]
    wrong = (pages < 0) | (pages >= cache_shape[0])
    require(not wrong.any(), f"block_table[{r}] contains {pages[wrong][:3].tolist()} (0..{cache_shape[0] - 1})")
    return pages


def _gather(name: str, cache: npt.NDArray[np.generic], pages: I64, length: int, factor: F64) -> F64:
    """Return the first `length` tokens of these pages times the scale: [length, K, D]."""
    # [pages, P, K, D] -> [pages * P, K, D]; the last page's tail, which holds no token of the request, is cut off
    # before any product.
    tokens = floats(name, cache[pages]).reshape(-1, *cache.shape[2:])[:length]
    with np.errstate(all="ignore"):
        return tokens * factor


def _entry(name: str, values: PerRequest, r: int, count: int) -> npt.ArrayLike | None:
    if values is None:
        return None
    require(len(values) == count, f"{name} has {len(values)} entries (expected {count}, one per request)")
    return values[r]


def _tree_visible(r: int, tree: Bool, length: int, mask: npt.ArrayLike | None, num_heads: int) -> Bool:
    """Return the mask of all context and the tree among the n new tokens, ANDed with the request's: [H, n, m]."""
    n = len(tree)
    require(length >= n, f"seq_lens[{r}]={length} is less than its {n} tree tokens")
    visible = np.concatenate([np.ones((n, length - n), dtype=np.bool_), tree], axis=1)
    shape = (num_heads, n, length)
    return visible & (np.True_ if mask is None else bools("mask", mask, shape))
