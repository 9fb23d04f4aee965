"""A paged flash-attention kernel in NumPy: tiles, online softmax, split keys merged at the end, 16-bit weights.

It computes as real kernels do, slowly, and has two uses: it shows that a correct kernel passes the rules, and tests break it in
one place at a time (`tests.testing.mutants`). Each step is a method of a few lines, so that a mutant is one override.
"""

from dataclasses import dataclass

import numpy as np

from attn.capabilities import AttentionType
from attn.reference import block_sparse_mask
from attn.testing.bits import FP8, Array, decode, encode, rounded
from attn.testing.draw import Call, Result, scale_array


@dataclass
class Piece:
    """A running softmax over some keys: acc [H, n, D] unnormalised, top and total [H, n]."""

    acc: Array
    top: Array
    total: Array


class SimulatedKernel:
    """A runner: `SimulatedKernel()(call)` returns the `Result` of a `Call`."""

    # Small against the suite's lengths, so that every case has several tiles and rows that end within one.
    tile = 16
    splits = 2
    # A mutant replaces it by a large finite number, as some kernels do.
    sentinel = -np.inf

    def __call__(self, call: Call) -> Result:
        case, start = call.case, call.batch.query_start_loc
        self.call, self.case = call, case
        caches: tuple[Array | None, Array | None] = (None, None) if case.is_encoder else self.write(call)
        # Rows that no request owns stay NaN, as `Result.padding` requires by default.
        output = np.full(call.query.shape, np.nan, np.float32)
        lse = np.full(call.query.shape[1::-1], np.nan, np.float32)
        # Poison overflows, and mutants divide by zero: both are judged by the result.
        with np.errstate(all="ignore"):
            for r in range(call.batch.num_reqs):
                rows = slice(int(start[r]), int(start[r + 1]))
                if rows.stop > rows.start:
                    output[rows], lse[:, rows] = self.sequence(r, call.query[rows], *self.keys_and_values(r, rows, *caches))
        stored = case.dtype if case.output_scale is None else FP8
        return Result(self.store(output), lse if case.lse else None, caches[0], caches[1], stored)

    # the cache

    def write(self, call: Call) -> tuple[Array, Array]:
        assert call.key_cache is not None and call.value_cache is not None
        caches = (call.key_cache.copy(), call.value_cache.copy())
        if call.key is not None and call.value is not None and self.writes():
            slots = self.slots(call.batch.slot_mapping)
            for cache, fresh, scale in zip(caches, (call.key, call.value), (self.k_scale(), self.v_scale()), strict=True):
                flat = cache.reshape(-1, *cache.shape[2:])
                live = np.flatnonzero(self.is_written(slots))
                flat[slots[live]] = self.encode(fresh[live], scale)
        return caches

    def writes(self) -> bool:
        return not self.case.kv_sharing

    def slots(self, slot_mapping: Array) -> Array:
        return slot_mapping

    def is_written(self, slots: Array) -> Array:
        return slots >= 0

    def encode(self, values: Array, scale: Array) -> Array:
        return encode(values, self.case.element, scale)

    def decode(self, stored: Array) -> Array:
        return decode(stored, self.case.element)

    def k_scale(self) -> Array:
        return scale_array(self.case.cache_scales[0])

    def v_scale(self) -> Array:
        return scale_array(self.case.cache_scales[1])

    def keys_and_values(self, r: int, rows: slice, key_cache: Array | None, value_cache: Array | None) -> tuple[Array, Array]:
        """Return request r's keys and values [m, K, D], without scales."""
        if key_cache is None or value_cache is None:
            assert self.call.key is not None and self.call.value is not None
            return self.call.key[rows], self.call.value[rows]
        j = np.arange(self.length(r))
        pages, offset = self.page(r, j // self.case.block_size), j % self.case.block_size
        return self.decode(key_cache[pages, offset]), self.decode(value_cache[pages, offset])

    def length(self, r: int) -> int:
        return int(self.call.batch.seq_lens[r])

    def page(self, r: int, index: Array) -> Array:
        return self.call.batch.block_table[r, index]

    # one sequence

    def sequence(self, r: int, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        """Return (out [n, H, D], lse [H, n]) of one request."""
        n, m = len(query), len(key)
        p = self.positions(n, m)
        q = query.transpose(1, 0, 2)  # [H, n, D]
        # A split may be empty, if there are fewer keys than splits: its state is (0, -inf).
        bounds = [round(i * m / self.splits) for i in range(self.splits + 1)]
        pieces = [self.attend(r, q, key, value, p, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        out, lse = self.merge([self.close(piece) for piece in pieces])
        if self.call.sinks is not None:
            out, lse = self.sink(out, lse, self.call.sinks[:, None])
        return out.transpose(1, 0, 2), lse

    def positions(self, n: int, m: int) -> Array:
        return np.arange(n) + m - n

    def attend(self, r: int, q: Array, key: Array, value: Array, p: Array, begin: int, end: int) -> Piece:
        """Attend to keys begin..end, tile by tile."""
        heads, n, size = q.shape
        piece = Piece(
            np.zeros((heads, n, size), np.float32), np.full((heads, n), -np.inf, np.float32), np.zeros((heads, n), np.float32)
        )
        key_head, value_head = self.kv_head(), self.value_head()
        for a in range(begin, end, self.tile):
            b = min(a + self.tile, end)
            j = np.arange(a, b)
            # [H, t, D]: each kv head is repeated for its query heads.
            k, v = key[a:b, key_head].transpose(1, 0, 2), value[a:b, value_head].transpose(1, 0, 2)
            allowed = np.broadcast_to(self.allowed(r, p[:, None], j[None, :], len(key)), (heads, n, b - a))
            scores = self.masked(self.scores(q, k, p, j), allowed)
            self.accumulate(piece, scores, allowed, v)
        return piece

    def kv_head(self) -> Array:
        return np.arange(self.case.num_heads) // (self.case.num_heads // self.case.num_kv_heads)

    def value_head(self) -> Array:
        return self.kv_head()

    def per_query_head(self, scale: Array) -> Array:
        """Return a kv scale as [H, 1, 1]."""
        return np.broadcast_to(scale, (self.case.num_kv_heads,))[self.kv_head()][:, None, None]

    # scores

    def scores(self, q: Array, k: Array, p: Array, j: Array) -> Array:
        """Return scores [H, n, t] in float32: scaled, capped, biased."""
        # `k_scale` folds into the softmax scale, so that codes are multiplied as they are (docs/semantics.md §10); cap, then
        # bias (§2).
        s = self.capped(self.dots(q, k) * (np.float32(self.scale()) * self.per_query_head(self.k_scale())))
        return s if self.call.alibi_slopes is None else s + self.slopes()[:, None, None] * self.distance(p[:, None], j[None, :])

    def dots(self, q: Array, k: Array) -> Array:
        return q @ k.swapaxes(1, 2)

    def scale(self) -> float:
        return self.call.scale

    def capped(self, s: Array) -> Array:
        cap = self.case.logits_soft_cap
        return self.cap(s, np.float32(cap)) if cap else s

    def cap(self, s: Array, cap: np.float32) -> Array:
        return cap * np.tanh(s / cap)

    def slopes(self) -> Array:
        assert self.call.alibi_slopes is not None
        return self.call.alibi_slopes

    def distance(self, p: Array, j: Array) -> Array:
        return (-np.abs(j - p)).astype(np.float32)

    # masks

    def allowed(self, r: int, p: Array, j: Array, m: int) -> Array:
        """Return the mask [n, t] (or [H, n, t]) of request r."""
        visible = self.rule(r, p, j, m)
        if self.call.batch.spans is not None:
            rows = self.call.rows(r)
            visible = visible | self.in_span(self.call.batch.spans[rows], p, j)
        if self.call.batch.prefix is not None:
            visible = visible | self.in_prefix(int(self.call.batch.prefix[r]), j)
        return visible & self.in_chunk(p, j) if self.case.chunk_size else visible

    def rule(self, r: int, p: Array, j: Array, m: int) -> Array:
        """Return the keys that causality or the tree, the window and the block-sparse pattern allow."""
        visible = self.in_window(p, j)
        if self.case.sparse:
            visible = (
                visible & block_sparse_mask(len(p), m, num_heads=self.case.num_heads, **self.case.sparse_pattern)[..., j[0]]
            )
        tree = self.tree(r)
        # A request with more rows than the tree has nodes is a prompt beside drafts: it is causal.
        if tree is not None and len(p) <= tree.shape[1]:
            return visible & self.in_tree(tree, p, j, m)
        return visible & self.is_past(p, j) if self.is_causal(r) else visible

    def in_span(self, spans: Array, p: Array, j: Array) -> Array:
        inside = (j >= spans[:, :1]) & (j <= spans[:, 1:])
        left, right = self.window()
        if self.case.span_window and left is not None:
            inside &= j >= p - left
        return inside & (j <= p + right) if self.case.span_window and right else inside

    def in_prefix(self, prefix: int, j: Array) -> Array:
        return j < prefix

    def in_chunk(self, p: Array, j: Array) -> Array:
        return j >= p // self.case.chunk_size * self.case.chunk_size

    def is_causal(self, r: int) -> bool:
        causal = self.call.batch.causal
        return bool(causal[r] if isinstance(causal, np.ndarray) else causal) and self.case.attn_type == AttentionType.DECODER

    def is_past(self, p: Array, j: Array) -> Array:
        return j <= p

    def window(self) -> tuple[int | None, int | None]:
        return self.case.window

    def in_window(self, p: Array, j: Array) -> Array:
        left, right = self.window()
        inside = np.ones(np.broadcast_shapes(p.shape, j.shape), np.bool_)
        if left is not None:
            inside &= j >= p - left
        return inside if right is None else inside & (j <= p + right)

    def tree(self, r: int) -> Array | None:
        return None if self.call.batch.tree_mask is None else self.call.batch.tree_mask[r]

    def in_tree(self, tree: Array, p: Array, j: Array, m: int) -> Array:
        n = len(p)
        new = j - (m - n)
        inside = (new >= 0) & (new < n)
        # New tokens by the tree, the context always. A key after the last row is not in the request.
        return np.where(inside, tree[np.arange(n)[:, None], np.clip(new, 0, n - 1)], new < 0)

    def masked(self, scores: Array, allowed: Array) -> Array:
        return np.where(allowed, scores, np.float32(self.sentinel))

    # softmax

    def accumulate(self, piece: Piece, scores: Array, allowed: Array, v: Array) -> None:
        """Add a tile to the online softmax: rescale the accumulated values and add the tile's."""
        top = np.maximum(piece.top, scores.max(-1, initial=-np.inf))
        # A row that has seen no key yet has a maximum of -inf, and exp(-inf - -inf) is NaN: with 0 in its place all is 0.
        guard = self.guard(top)
        shrink = np.exp(piece.top - guard)
        weights = np.exp(scores - guard[..., None])
        # The total sums unrounded weights, the product below takes rounded ones, as tensor cores do: only the output has their
        # error.
        piece.total = piece.total * shrink + weights.sum(-1)
        piece.acc = self.keep(piece.acc * shrink[..., None] + self.weigh(rounded(weights, self.case.dtype), allowed, v))
        piece.top = top

    def guard(self, top: Array) -> Array:
        return np.where(np.isneginf(top), np.float32(0), top)

    def keep(self, acc: Array) -> Array:
        return acc

    def weigh(self, weights: Array, allowed: Array, v: Array) -> Array:
        """Multiply weights [H, n, t] by v [H, t, D]; masked values are excluded instead of multiplied by 0."""
        # Per tile, as a kernel would: the fast product without the non-finite values, then these for the rows that may see
        # them.
        nonfinite = ~np.isfinite(v)
        product = weights @ np.where(nonfinite, 0, v)
        for h, t in np.argwhere((nonfinite.any(-1)) & allowed.any(1)):
            # [n]; weights of the other rows are 0, and 0 * NaN is NaN.
            rows = allowed[h, :, t]
            product[h, rows] += weights[h, rows, t, None] * np.where(nonfinite[h, t], v[h, t], 0)
        return product

    def close(self, piece: Piece) -> tuple[Array, Array]:
        """Return (out [H, n, D], lse [H, n]) of the accumulated keys."""
        empty = piece.total == 0
        out = np.where(empty[..., None], 0, piece.acc / piece.total[..., None]) * self.per_query_head(self.v_scale())
        return out, np.where(empty, -np.inf, piece.top + np.log(piece.total))

    def merge(self, states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        lse = np.stack([state[1] for state in states])
        top = self.guard(lse.max(0))
        weights = np.exp(lse - top)
        total = weights.sum(0)
        summed = sum(w[..., None] * state[0] for w, state in zip(weights, states, strict=True))
        return np.where(total[..., None] == 0, 0, summed / total[..., None]), top + np.log(total)

    def sink(self, out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
        return np.where(np.isneginf(lse)[..., None], 0, out / (1 + np.exp(sinks - lse))[..., None]), lse

    def store(self, output: Array) -> Array:
        if self.case.output_scale is None:
            return rounded(output, self.case.dtype)
        return decode(self.output_codes(output, self.case.output_scale), FP8)

    def output_codes(self, output: Array, scale: float) -> Array:
        return encode(output, FP8, scale)
