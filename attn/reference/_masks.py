"""Masks, windows and ALiBi slopes.

Every mask is bool with True = attend, over rows i at absolute positions p = i + (m - n) and keys j, for
`attention(mask=...)`, where it is ANDed with the other rules.
"""

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from attn.reference._check import F64, I64, Bool, bools, check_shape, ints, require, whole

Window = tuple[int | None, int | None]
_BACKWARD = ("decoder", "encoder_decoder")
_BOTH_WAYS = ("encoder", "encoder_only")


def alibi_slopes(num_heads: int) -> F64:
    """Return the ALiBi slope of every head: float64 [num_heads] (docs/semantics.md §8).

    p = 2^floor(log2 H); the first p are r, r^2, ... r^p with r = 2^(-8/p); the rest are s, s^3, s^5, ...
    with s = 2^(-4/p). Under tensor parallelism slice this by the *global* head.
    """
    count = whole("num_heads", num_heads, least=1)
    # 2^floor(log2 H), without a logarithm that could round.
    power = 1 << (count.bit_length() - 1)
    exponents = [-8.0 * (i + 1) / power for i in range(power)]
    # Odd powers of 2^(-4/p) lie between the powers of 2^(-8/p) above, as in the code of the ALiBi paper (arXiv 2108.12409).
    exponents += [-4.0 * (2 * i + 1) / power for i in range(count - power)]
    return np.exp2(np.array(exponents))


def check_window(window: Sequence[SupportsIndex | None]) -> Window:
    """Return `(left, right)`, both inclusive, None = unbounded."""
    require(
        isinstance(window, Sequence) and not isinstance(window, str) and len(window) == 2,
        f"window={window!r} (a pair (left, right); None on a side = unbounded)",
    )
    left, right = (None if side is None else whole("a side of window", side) for side in window)
    return left, right


def sliding_window_to_pair(
    sliding_window: SupportsIndex | Sequence[SupportsIndex | None] | None, attn_type: str = "decoder"
) -> Window:
    """Convert a model's `sliding_window` to the inclusive pair (left, right) (docs/semantics.md §4).

    W keys: (W-1, 0) for decoder and encoder_decoder, (W-1, W-1) for encoder and encoder_only;
    None: (None, None); a pair is validated and returned.

    >>> sliding_window_to_pair(4), sliding_window_to_pair(4, "encoder_only"), sliding_window_to_pair((8, None))
    ((3, 0), (3, 3), (8, None))
    """
    require(attn_type in _BACKWARD + _BOTH_WAYS, f"attn_type={attn_type!r} ({', '.join(_BACKWARD + _BOTH_WAYS)})")
    if sliding_window is None:
        return None, None
    if isinstance(sliding_window, Sequence):
        return check_window(sliding_window)
    reach = whole("sliding_window", sliding_window, least=1) - 1
    # W keys include the row's own, so the distance is W - 1. A right bound of 0 is causality; cross attention is listed
    # with decoders as vLLM does.
    return reach, (0 if attn_type in _BACKWARD else reach)


def row_positions(n: int, m: int) -> I64:
    """Return the absolute positions of n query rows that end at key m - 1: [n]."""
    return np.arange(n, dtype=np.int64) + (m - n)


def chunked_mask(n: int, m: int, chunk: int) -> Bool:
    """Return Llama 4's local mask: causal within chunks of `chunk` positions, bool [n, m] (docs/semantics.md §4)."""
    size = whole("chunk", chunk, least=1)
    p, j = row_positions(whole("n", n), whole("m", m))[:, None], np.arange(m)[None, :]
    # A row before the first key has a negative position, whose chunk has no key: floor division keeps it apart.
    return (j <= p) & (j // size == p // size)


def block_sparse_mask(
    n: int,
    m: int,
    *,
    num_heads: int,
    block_size: int,
    local_blocks: int,
    vert_stride: int,
    homo_head: bool = False,
    head_offset: int = 0,
    total_heads: int | None = None,
) -> Bool:
    """Return local blocks plus every `vert_stride`-th column of blocks: bool [num_heads, n, m] (docs/semantics.md §13).

    With query block qb = p // block_size and key block kb = j // block_size, a key is visible when
    j <= p and (qb - kb < local_blocks or (kb + off_h + 1) % vert_stride == 0). off_h is 0 for `homo_head`,
    else h * max(1, vert_stride // total_heads) with h = head_offset + local head. `head_offset` is the
    first global head of this rank, `total_heads` the count over all ranks (default num_heads).
    """
    heads, offset = whole("num_heads", num_heads, least=1), whole("head_offset", head_offset)
    total = heads if total_heads is None else whole("total_heads", total_heads, least=1)
    require(offset + heads <= total, f"head_offset={offset} + num_heads={heads} is more than total_heads={total}")
    size, stride = whole("block_size", block_size, least=1), whole("vert_stride", vert_stride, least=1)
    local = whole("local_blocks", local_blocks)
    p, j = row_positions(whole("n", n), whole("m", m))[:, None], np.arange(m)[None, :]
    query_block, key_block = p // size, j // size
    head = np.arange(offset, offset + heads)[:, None, None]
    # Heads are numbered over all ranks, so that a rank's slice of heads sees the same columns as in the whole layer.
    shift = 0 * head if homo_head else head * max(1, stride // total)
    vertical = (key_block + shift + 1) % stride == 0
    return (j <= p) & ((query_block - key_block < local) | vertical)


def visible_mask(
    n: int,
    m: int,
    *,
    causal: bool = True,
    window: Sequence[SupportsIndex | None] = (None, None),
    tree: npt.ArrayLike | None = None,
    spans: npt.ArrayLike | None = None,
    prefix: SupportsIndex = 0,
    chunk_size: int | None = None,
    span_window: bool = False,
) -> Bool:
    """Return which keys the rows of one request see, bool [n, m] (docs/semantics.md §18).

    tree: [n, n] or None, replaces causality among the new tokens. spans: [n, 2], first and last key of each row's span,
    inclusive; (-1, -1) for none. prefix: keys that every row sees. chunk_size: None, or the positions of a chunk.
    span_window: whether the window's bounds (a right bound of 0 excepted, which is causality) cut a span too.
    """
    left, right = check_window(window)
    p, j = row_positions(n, m)[:, None], np.arange(m)[None, :]
    seen = np.ones((n, m), np.bool_)
    if tree is not None:
        require(m >= n, f"{m} keys are fewer than the {n} tokens of a tree")
        nodes = np.asarray(tree)
        check_shape("tree", nodes, (n, n))
        # Context before the new tokens stays visible to every node.
        seen[:, m - n :] &= bools("tree", nodes, (n, n))
    elif causal:
        seen &= j <= p
    if left is not None:
        seen &= j >= p - left
    if right is not None:
        seen &= j <= p + right
    if spans is not None:
        of_rows = ints("spans", spans, 2)
        check_shape("spans", of_rows, (n, 2))
        in_span = (j >= of_rows[:, :1]) & (j <= of_rows[:, 1:])
        if span_window and left is not None:
            in_span &= j >= p - left
        # A right bound of 0 is causality, which spans lift (docs/semantics.md §18).
        if span_window and right:
            in_span &= j <= p + right
        seen |= in_span
    # After the window, which does not cut a prefix; the chunk below does.
    seen |= j < whole("prefix", prefix)
    if chunk_size is not None:
        seen &= j >= p // whole("chunk_size", chunk_size, least=1) * chunk_size
    return seen


def tree_mask_from_choices(choices: Sequence[Sequence[int]]) -> Bool:
    """Return the ancestor-or-self mask of a draft tree: bool [W, W], W = len(choices) + 1 (docs/semantics.md §11).

    choices: one path of child indices per node except the root, sorted by (length, lexicographic), each
    with its parent present. Node 0 is the root; node i + 1 is choices[i]. Row = query node, column = key.
    """
    paths = _checked_paths(choices)
    node_of = {path: node for node, path in enumerate(paths)}
    mask = np.zeros((len(paths), len(paths)), dtype=np.bool_)
    for node, path in enumerate(paths):
        # Every beginning of a path is an ancestor, the empty one the root, the whole path the node itself.
        mask[node, [node_of[path[:depth]] for depth in range(len(path) + 1)]] = True
    return mask


def tree_depths(choices: Sequence[Sequence[int]]) -> I64:
    """Return the depth of every node (root 0): int64 [W]. RoPE uses it; windows, ALiBi and masks use the KV slot."""
    return np.array([len(path) for path in _checked_paths(choices)], dtype=np.int64)


def _checked_paths(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return all nodes' paths, root first."""
    paths = [tuple(whole("a step of choices", step) for step in path) for path in choices]
    # Node numbers are the order of the draft tokens, so an unsorted list is rejected, not sorted.
    require(paths == sorted(paths, key=lambda path: (len(path), path)), "choices are not sorted by (length, path)")
    nodes = {(), *paths}
    require(len(nodes) == len(paths) + 1, "choices contain a path twice, or the empty path (the root is implicit)")
    for path in paths:
        require(path[:-1] in nodes, f"choices contain {path} without its parent {path[:-1]}")
    return [(), *paths]
