"""The oracle against loops over Python floats: every feature, one (head, row, key) at a time.

The loops below share nothing with `attn.reference`; each feature brings its own rule, written from the
specification as a function of one head, position and key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn import reference

INF = math.inf


@dataclass
class Rule:
    """Arguments for `attention`, and the same thing as scalar functions of (h, i, p, j)."""

    kwargs: dict[str, Any]
    allowed: Callable[[int, int, int, int], bool] = lambda h, i, p, j: True
    bias: Callable[[int, int, int, int], float] = lambda h, i, p, j: 0.0
    cap: float = 0.0
    scale: float | None = None
    sinks: list[float] | None = None
    positions: list[int] | None = None
    keys_at: list[int] = field(default_factory=list)


def naive(query, key, value, rule):
    """Three loops, `math` and nothing else."""
    n, num_heads, head_size = query.shape
    m, num_kv_heads, value_size = value.shape
    scale = 1 / math.sqrt(head_size) if rule.scale is None else rule.scale
    out = [[[0.0] * value_size for _ in range(num_heads)] for _ in range(n)]
    lse = [[-INF] * n for _ in range(num_heads)]
    for h in range(num_heads):
        kv_head = h // (num_heads // num_kv_heads)
        for i in range(n):
            p = rule.positions[i] if rule.positions else i + m - n
            scores = {}
            for j in range(m):
                at = rule.keys_at[j] if rule.keys_at else j
                if rule.allowed(h, i, p, at):
                    s = scale * math.fsum(float(a) * float(b) for a, b in zip(query[i, h], key[j, kv_head], strict=True))
                    s = rule.cap * math.tanh(s / rule.cap) if rule.cap else s
                    scores[j] = s + rule.bias(h, i, p, at)
            if not scores:
                continue
            top = max(scores.values())
            weights = {j: math.exp(s - top) for j, s in scores.items()}
            total = math.fsum(weights.values())
            lse[h][i] = top + math.log(total)
            if rule.sinks is not None and rule.sinks[h] != -INF:
                total += math.exp(rule.sinks[h] - top)
            for d in range(value_size):
                out[i][h][d] = math.fsum(w * float(value[j, kv_head, d]) for j, w in weights.items()) / total
    shape = (n, num_heads, value_size)
    return np.array(out, dtype=float).reshape(shape), np.array(lse, dtype=float).reshape(num_heads, n)


def close(actual, expected, rtol=1e-12, atol=1e-13):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def slopes_by_hand(num_heads):
    power = 2 ** math.floor(math.log2(num_heads))
    ratio, half = 2 ** (-8 / power), 2 ** (-4 / power)
    return ([ratio ** (k + 1) for k in range(power)] + [half ** (2 * k + 1) for k in range(power)])[:num_heads]


# --- the features: (n, m, num_heads, rng) -> Rule


def plain(n, m, num_heads, rng):
    return Rule({})


def explicit_scale(n, m, num_heads, rng):
    return Rule({"scale": 0.7}, scale=0.7)


def causal(n, m, num_heads, rng):
    return Rule({"causal": True}, lambda h, i, p, j: j <= p)


def window_both(n, m, num_heads, rng):
    return Rule({"window": (2, 1)}, lambda h, i, p, j: p - 2 <= j <= p + 1)


def window_left(n, m, num_heads, rng):
    return Rule({"window": (1, None), "causal": True}, lambda h, i, p, j: p - 1 <= j <= p)


def window_right(n, m, num_heads, rng):
    return Rule({"window": (None, 2)}, lambda h, i, p, j: j <= p + 2)


def soft_cap(n, m, num_heads, rng):
    return Rule({"logits_soft_cap": 0.8, "causal": True}, lambda h, i, p, j: j <= p, cap=0.8)


def alibi_causal(n, m, num_heads, rng):
    slopes = slopes_by_hand(num_heads)
    kwargs = {"alibi_slopes": slopes, "causal": True}
    return Rule(kwargs, lambda h, i, p, j: j <= p, lambda h, i, p, j: slopes[h] * (j - p))


def alibi_both_ways(n, m, num_heads, rng):
    slopes = slopes_by_hand(num_heads)
    return Rule({"alibi_slopes": slopes}, bias=lambda h, i, p, j: -slopes[h] * abs(p - j))


def capped_alibi(n, m, num_heads, rng):
    """The order: the cap comes first, the bias is outside of the tanh."""
    slopes = slopes_by_hand(num_heads)
    kwargs = {"alibi_slopes": slopes, "causal": True, "logits_soft_cap": 0.5}
    return Rule(kwargs, lambda h, i, p, j: j <= p, lambda h, i, p, j: slopes[h] * (j - p), cap=0.5)


def user_bias(n, m, num_heads, rng):
    bias = rng.standard_normal((num_heads, n, m))
    return Rule({"bias": bias, "logits_soft_cap": 1.5}, bias=lambda h, i, p, j: bias[h, i, j], cap=1.5)


def user_mask(n, m, num_heads, rng):
    mask = rng.random((num_heads, n, m)) < 0.5
    return Rule({"mask": mask, "causal": True}, lambda h, i, p, j: mask[h, i, j] and j <= p)


def row_mask(n, m, num_heads, rng):
    mask = rng.random((n, m)) < 0.5
    return Rule({"mask": mask}, lambda h, i, p, j: mask[i, j])


def additive_mask(n, m, num_heads, rng):
    mask = rng.random((n, m)) < 0.5
    return Rule({"bias": np.where(mask, 0.0, -INF)}, lambda h, i, p, j: mask[i, j])


def sinks(n, m, num_heads, rng):
    values = [math.log(m or 1), -INF, 3.0, -1.0, 0.0, 2.0][:num_heads]
    return Rule({"sinks": values, "causal": True}, lambda h, i, p, j: j <= p, sinks=values)


def positions(n, m, num_heads, rng):
    rows, keys = rng.integers(0, 2 * m + 1, n), rng.permutation(2 * m)[:m]
    kwargs = {"query_positions": rows, "key_positions": keys, "causal": True, "window": (3, None)}
    allowed = lambda h, i, p, j: p - 3 <= j <= p  # noqa: E731
    return Rule(kwargs, allowed, positions=list(rows), keys_at=list(keys))


FEATURES = [
    plain,
    explicit_scale,
    causal,
    window_both,
    window_left,
    window_right,
    soft_cap,
    alibi_causal,
    alibi_both_ways,
    capped_alibi,
    user_bias,
    user_mask,
    row_mask,
    additive_mask,
    sinks,
    positions,
]
# n, m, H, K, D, Dv
SHAPES = [
    (5, 9, 4, 2, 8, 8),
    (1, 7, 6, 2, 5, 3),
    (7, 4, 2, 1, 4, 6),
    (3, 3, 3, 3, 2, 2),
    (0, 4, 2, 1, 4, 4),
    (3, 0, 2, 2, 4, 4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.__name__)
def test_attention_is_the_loops(feature, shape):
    n, m, num_heads, num_kv_heads, head_size, value_size = shape
    rng = np.random.default_rng(sum(shape))
    query = rng.standard_normal((n, num_heads, head_size)) * 2
    key, value = (
        rng.standard_normal((m, num_kv_heads, head_size)),
        rng.standard_normal((m, num_kv_heads, value_size)),
    )
    rule = feature(n, m, num_heads, rng)
    close(reference.attention(query, key, value, **rule.kwargs), naive(query, key, value, rule))


def test_rows_in_slices_are_the_rows(monkeypatch):
    """Long contexts go through in slices of rows: here of one row and of three."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((n, h, 4)) for n, h in ((11, 4), (13, 2), (13, 2)))
    mask, bias = rng.random((4, 11, 13)) < 0.8, rng.standard_normal((4, 11, 13))
    kwargs = {"causal": True, "mask": mask, "bias": bias, "alibi_slopes": [1.0, 0.5, 0.25, 0.1]}
    whole = reference.attention(query, key, value, **kwargs)
    for budget in (1, 3 * 2 * 13):
        monkeypatch.setattr("attn.reference._dense._SCORES_AT_ONCE", budget)
        close(reference.attention(query, key, value, **kwargs), whole)


# --- paged


@dataclass
class Batch:
    """A paged batch and, for each request, the plain keys and values that its pages hold."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    keys: list
    values: list

    def run(self, **kwargs):
        lengths = {name: getattr(self, name) for name in ("query_start_loc", "seq_lens", "block_table")}
        return reference.paged_attention(self.query, self.key_cache, self.value_cache, **lengths, **kwargs)

    def rows(self, r):
        return slice(int(self.query_start_loc[r]), int(self.query_start_loc[r + 1]))


def make_batch(lens, *, seed=0, page=4, heads=(4, 2), sizes=(8, 8), padding=0):
    """`lens`: (q_len, seq_len) pairs. Pages lie anywhere; everything that is not a key is NaN or junk."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    starts = np.cumsum([0] + [n for n, _ in lens])
    needs = [-(-m // page) for _, m in lens]
    free = list(rng.permutation(3 * sum(needs) + 2))
    table = rng.integers(-(10**6), 10**6, (len(lens), max(needs, default=0) + 2))
    key_cache = np.full((len(free), page, num_kv_heads, sizes[0]), np.nan)
    value_cache = np.full((len(free), page, num_kv_heads, sizes[1]), np.nan)
    batch = Batch(
        rng.standard_normal((starts[-1] + padding, num_heads, sizes[0])),
        key_cache,
        value_cache,
        starts,
        np.array([m for _, m in lens], dtype=np.int32),
        table,
        [],
        [],
    )
    for r, (_, m) in enumerate(lens):
        table[r, : needs[r]] = [free.pop() for _ in range(needs[r])]
        batch.keys.append(rng.standard_normal((m, num_kv_heads, sizes[0])))
        batch.values.append(rng.standard_normal((m, num_kv_heads, sizes[1])))
        for j in range(m):
            key_cache[table[r, j // page], j % page] = batch.keys[r][j]
            value_cache[table[r, j // page], j % page] = batch.values[r][j]
    return batch


LENS = [(1, 9), (5, 5), (3, 12), (0, 4), (4, 1), (2, 0)]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize(
    "feature", [causal, window_left, soft_cap, alibi_causal, capped_alibi, sinks], ids=lambda f: f.__name__
)
def test_paged_attention_is_the_loops(feature, page):
    batch = make_batch(LENS, page=page, sizes=(6, 3), padding=2)
    out, lse = batch.run(**feature(1, 9, 4, None).kwargs)
    for r in range(len(LENS)):
        rule = feature(1, 9, 4, None)
        expected = naive(batch.query[batch.rows(r)], batch.keys[r], batch.values[r], rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)
    assert np.isnan(out[-2:]).all() and np.isnan(lse[:, -2:]).all()


def test_paged_features_by_request():
    """causal as [R] bools; mask, bias and key_positions as one entry for each request."""
    lens = [(2, 5), (3, 3), (1, 6)]
    batch = make_batch(lens)
    rng = np.random.default_rng(1)
    masks = [rng.random((n, m)) < 0.7 for n, m in lens]
    biases = [rng.standard_normal((4, n, m)) for n, m in lens]
    kwargs = {
        "causal": [True, False, True],
        "mask": [masks[0], None, masks[2]],
        "bias": [None, biases[1], biases[2]],
    }
    out, lse = batch.run(**kwargs)
    for r in range(3):
        rule = Rule(
            {},
            lambda h, i, p, j, r=r: (r == 1 or j <= p) and (r == 1 or masks[r][i, j]),
            lambda h, i, p, j, r=r: 0.0 if r == 0 else biases[r][h, i, j],
        )
        expected = naive(batch.query[batch.rows(r)], batch.keys[r], batch.values[r], rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)


def test_paged_positions_are_global():
    batch = make_batch([(2, 5), (1, 4)])
    rows, keys = [6, 9, 4], [[0, 1, 4, 5, 8], [2, 3, 6, 7]]
    out, lse = batch.run(query_positions=rows, key_positions=keys, window=(5, None))
    for r in range(2):
        own = rows[batch.rows(r)]
        rule = Rule({}, lambda h, i, p, j: p - 5 <= j <= p, positions=own, keys_at=keys[r])
        expected = naive(batch.query[batch.rows(r)], batch.keys[r], batch.values[r], rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)


@pytest.mark.parametrize("scale", [0.25, [0.3, 1.7]], ids=["scalar", "per_head"])
def test_cache_scales_are_the_loops(scale):
    batch = make_batch([(2, 5), (1, 9)])
    v_scale = np.asarray(scale) * 3
    out, lse = batch.run(k_scale=scale, v_scale=v_scale)
    factors = np.broadcast_to(np.asarray(scale), (2,))[None, :, None]
    for r in range(2):
        rule = Rule({}, lambda h, i, p, j: j <= p)
        expected = naive(batch.query[batch.rows(r)], batch.keys[r] * factors, batch.values[r] * factors * 3, rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)


TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_tree_is_the_loops(alibi):
    """q_len of the tree's width, of a part of it, of more (plain causal), a decode, and another tree."""
    trees = [TREE] * 4 + [[(0,), (0, 0), (0, 1), (0, 2), (0, 3), (0, 0, 0)]]
    masks = np.stack([reference.tree_mask_from_choices(tree) for tree in trees])
    lens = [(7, 12), (4, 4), (9, 11), (1, 6), (7, 8)]
    batch = make_batch(lens)
    slopes = slopes_by_hand(4)
    features = {"alibi_slopes": slopes} if alibi else {}
    out, lse = batch.run(tree_mask=masks, **features)
    for r, (n, m) in enumerate(lens):

        def visible(h, i, p, j, n=n, m=m, paths=((), *trees[r])):
            if n > 7 or j < m - n:
                return j <= p
            ancestor = paths[j - (m - n)]
            return paths[i][: len(ancestor)] == ancestor

        rule = Rule({}, visible, (lambda h, i, p, j: slopes[h] * (j - p)) if alibi else Rule({}).bias)
        expected = naive(batch.query[batch.rows(r)], batch.keys[r], batch.values[r], rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)


def test_tree_mask_takes_the_place_of_the_triangle():
    """It may even look ahead; the request's own mask and the window still apply."""
    batch = make_batch([(3, 7)])
    mask = np.random.default_rng(0).random((3, 7)) < 0.7
    actual = batch.run(tree_mask=np.ones((1, 4, 4), dtype=bool), mask=[mask], window=(3, None))
    rule = Rule({}, lambda h, i, p, j: mask[i, j] and j >= p - 3)
    close(actual, naive(batch.query, batch.keys[0], batch.values[0], rule))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=3),
    page=st.sampled_from([1, 2, 3, 8]),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    sizes=st.sampled_from([(1, 1), (3, 2), (4, 5)]),
    window=st.tuples(st.none() | st.integers(0, 5), st.none() | st.integers(0, 3)),
    is_causal=st.booleans(),
    cap=st.sampled_from([0.0, 1.0]),
    with_sinks=st.booleans(),
    alibi=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_is_the_loops(lens, page, heads, sizes, window, is_causal, cap, with_sinks, alibi, seed):
    batch = make_batch(lens, seed=seed, page=page, heads=heads, sizes=sizes, padding=1)
    slopes = slopes_by_hand(heads[0])
    values = [0.5 * h - 0.3 for h in range(heads[0])] if with_sinks else None
    left, right = (INF if side is None else side for side in window)
    rule = Rule(
        {},
        lambda h, i, p, j: p - left <= j <= p + right and (not is_causal or j <= p),
        lambda h, i, p, j: slopes[h] * ((j - p) if is_causal else -abs(p - j)) if alibi else 0.0,
        cap=cap,
        sinks=values,
    )
    out, lse = batch.run(
        causal=is_causal,
        window=window,
        logits_soft_cap=cap,
        sinks=values,
        alibi_slopes=slopes if alibi else None,
    )
    for r in range(len(lens)):
        expected = naive(batch.query[batch.rows(r)], batch.keys[r], batch.values[r], rule)
        close((out[batch.rows(r)], lse[:, batch.rows(r)]), expected)


# --- MLA, sparse and masks


def mla_inputs(n, m, seed=0, heads=3, latent=6, nope=4, rope=2, value=5):
    rng = np.random.default_rng(seed)
    shapes = [
        (n, heads, nope),
        (n, heads, rope),
        (m, latent),
        (m, rope),
        (latent, heads, nope),
        (latent, heads, value),
    ]
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("form", [reference.mla_unabsorbed, reference.mla_absorbed], ids=["unabsorbed", "absorbed"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_mla_is_the_loops(form, is_causal):
    arguments = q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = mla_inputs(3, 7)
    scale = (4 + 2) ** -0.5
    query = np.concatenate([q_nope, q_pe], axis=2)
    key, value = np.zeros((7, 3, 6)), np.zeros((7, 3, 5))
    for j in range(7):
        for h in range(3):
            key[j, h, :4] = [sum(kv_c[j, c] * w_uk[c, h, d] for c in range(6)) for d in range(4)]
            key[j, h, 4:] = k_pe[j]
            value[j, h] = [sum(kv_c[j, c] * w_uv[c, h, d] for c in range(6)) for d in range(5)]
    rule = Rule({}, lambda h, i, p, j: j <= p or not is_causal, scale=scale)
    close(form(*arguments, scale=scale, causal=is_causal), naive(query, key, value, rule))


def test_sparse_mla_is_the_loops():
    rng = np.random.default_rng(0)
    query, kv = rng.standard_normal((3, 2, 8)), rng.standard_normal((6, 8))
    indices = np.array([[5, 0, -1, 2], [-1, -1, -1, 9], [1, 6, 2**31 - 1, 3]])
    rule = Rule({}, lambda h, i, p, j: j in indices[i], scale=0.4)
    expected = naive(query, kv[:, None], kv[:, None, :6], rule)
    close(reference.sparse_mla(query, kv, indices, scale=0.4, kv_lora_rank=6), expected)
    close(reference.sparse_mla(query, kv[:, None], indices, scale=0.4, kv_lora_rank=6), expected)


@pytest.mark.parametrize("homo_head", [True, False])
@pytest.mark.parametrize(("total_heads", "head_offset"), [(4, 0), (8, 4), (2, 0)])
def test_block_sparse_mask_is_the_formula(homo_head, total_heads, head_offset):
    n, m, num_heads, block, local, stride = 7, 23, min(4, total_heads), 3, 2, 5
    mask = reference.block_sparse_mask(
        n,
        m,
        num_heads=num_heads,
        block_size=block,
        local_blocks=local,
        vert_stride=stride,
        homo_head=homo_head,
        head_offset=head_offset,
        total_heads=total_heads,
    )
    assert mask.shape == (num_heads, n, m)
    for h in range(num_heads):
        shift = 0 if homo_head else (h + head_offset) * max(1, int(stride / total_heads))
        for i in range(n):
            for j in range(m):
                p = i + m - n
                qb, kb = p // block, j // block
                wanted = kb <= qb and (qb - kb < local or (kb + shift + 1) % stride == 0) and j <= p
                assert mask[h, i, j] == wanted
    assert not mask[:, :, :n].all() and mask.any(axis=2).all()


def test_block_sparse_ranks_are_slices_of_the_whole():
    kwargs = {"block_size": 2, "local_blocks": 1, "vert_stride": 9}
    whole = reference.block_sparse_mask(5, 40, num_heads=4, **kwargs)
    for rank in range(2):
        part = reference.block_sparse_mask(5, 40, num_heads=2, head_offset=2 * rank, total_heads=4, **kwargs)
        np.testing.assert_array_equal(part, whole[2 * rank : 2 * rank + 2])
    assert (whole[0] != whole[1]).any()


def test_chunked_mask():
    mask = reference.chunked_mask(4, 6, 3)
    picture = ["111...", "...1..", "...11.", "...111"]
    assert ["".join("1" if x else "." for x in row) for row in mask] == picture


def test_tree_from_choices():
    mask = reference.tree_mask_from_choices([(0,), (1,), (0, 0), (1, 0)])
    picture = ["1....", "11...", "1.1..", "11.1.", "1.1.1"]
    assert ["".join("1" if x else "." for x in row) for row in mask] == picture
    np.testing.assert_array_equal(reference.tree_depths([(0,), (1,), (0, 0), (1, 0)]), [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(reference.tree_mask_from_choices([]), [[True]])


def test_alibi_slopes():
    np.testing.assert_array_equal(reference.alibi_slopes(8), [2.0**-k for k in range(1, 9)])
    np.testing.assert_array_equal(reference.alibi_slopes(1), [2.0**-8])
    np.testing.assert_array_equal(reference.alibi_slopes(4), [0.25, 0.0625, 2.0**-6, 2.0**-8])
    np.testing.assert_array_equal(reference.alibi_slopes(6)[4:], [0.5, 0.125])
    for num_heads in (3, 5, 12, 16, 40, 71, 112):
        np.testing.assert_allclose(reference.alibi_slopes(num_heads), slopes_by_hand(num_heads), rtol=1e-14)


def test_sliding_window_to_pair():
    convert = reference.sliding_window_to_pair
    assert convert(4, "decoder") == (3, 0) == convert(np.int64(4), "encoder_decoder")
    assert convert(4, "encoder") == (3, 3) == convert(4, "encoder_only")
    assert convert(None, "decoder") == (None, None)
    assert convert((5, None), "encoder") == (5, None)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_dcp_lens_and_positions(world, interleave):
    lengths = np.array([0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 97])
    for rank in range(world):
        local = reference.dcp_local_lens(lengths, world, rank, interleave)
        for length, count in zip(lengths, local, strict=True):
            owned = [t for t in range(length) if t // interleave % world == rank]
            assert count == len(owned)
            assert list(reference.dcp_key_positions(length, world, rank, interleave)) == owned
