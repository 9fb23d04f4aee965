"""Metamorphic properties of the oracle: how its result changes with its arguments.

Numbered as in the testing plan; `exact` compares bits, `close` to float64 rounding. None of them looks at
a formula, so they hold for a backend as they stand, and they fail for a wrong oracle.
"""

import math

import numpy as np
import pytest

from attn import reference

N, M, H, K, D, DV = 5, 13, 4, 2, 8, 6
SLOPES = [0.5, 0.25, 0.125, 0.0625]
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, 0)},
    "cap_alibi_sinks": {
        "causal": True,
        "logits_soft_cap": 2.0,
        "alibi_slopes": SLOPES,
        "sinks": [1.0, 0.0, -1.0, 2.0],
    },
}
PAGED = {name: kwargs for name, kwargs in FEATURES.items() if name != "plain"}


def exact(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def close(actual, expected, rtol=1e-11, atol=1e-12):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def dense(n=N, m=M, seed=0, num_heads=H, num_kv_heads=K):
    rng = np.random.default_rng(seed)
    shapes = (n, num_heads, D), (m, num_kv_heads, D), (m, num_kv_heads, DV)
    return [rng.standard_normal(shape) for shape in shapes]


class Pages:
    """A paged batch: plain queries, keys and values by request, laid out in pages on demand."""

    def __init__(self, lens=((1, 9), (4, 4), (3, 14)), seed=0):
        rng = np.random.default_rng(seed)
        self.queries = [rng.standard_normal((n, H, D)) for n, _ in lens]
        self.keys = [rng.standard_normal((m, K, D)) for _, m in lens]
        self.values = [rng.standard_normal((m, K, DV)) for _, m in lens]

    def layout(self, *, page=4, order=None, seed=1, fill=0.0, tail=-1):
        """`order` of the requests; `fill` for every slot that holds no key; `tail` for unused columns."""
        order = range(len(self.queries)) if order is None else order
        needs = [-(-len(self.keys[r]) // page) for r in order]
        free = list(np.random.default_rng(seed).permutation(3 * sum(needs) + 1))
        table = np.full((len(needs), max(needs, default=0) + 2), tail)
        caches = [np.full((len(free), page, K, size), fill) for size in (D, DV)]
        for row, r in enumerate(order):
            table[row, : needs[row]] = [free.pop() for _ in range(needs[row])]
            for j in range(len(self.keys[r])):
                caches[0][table[row, j // page], j % page] = self.keys[r][j]
                caches[1][table[row, j // page], j % page] = self.values[r][j]
        queries = [self.queries[r] for r in order]
        return {
            "query": np.concatenate([np.zeros((0, H, D)), *queries]),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "query_start_loc": np.cumsum([0] + [len(q) for q in queries]),
            "seq_lens": [len(self.keys[r]) for r in order],
            "block_table": table,
        }

    def run(self, order=None, features=None, **kwargs):
        return reference.paged_attention(**self.layout(order=order, **kwargs), **(features or {}))

    def add(self, n, m, seed=7):
        more = Pages([(n, m)], seed)
        for name in ("queries", "keys", "values"):
            getattr(self, name).extend(getattr(more, name))
        return self


def take(state, rows):
    return state[0][rows], state[1][:, rows]


features = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
paged_features = pytest.mark.parametrize("features", PAGED.values(), ids=PAGED)


# --- pages and batches


@paged_features
def test_p01_pages_may_lie_anywhere(features):
    exact(Pages().run(seed=5, features=features), Pages().run(seed=1, features=features))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38], ids=str)
@paged_features
def test_p02_unused_slots_are_not_read(features, poison):
    exact(Pages().run(fill=poison, features=features), Pages().run(features=features))


@pytest.mark.parametrize("tail", [-1, 10**9, -(2**31)])
def test_p03_unused_table_columns_are_not_read(tail):
    exact(Pages().run(tail=tail), Pages().run(tail=0))


def test_p04_shared_pages_are_private_copies():
    pages = Pages([(2, 10), (3, 11)])
    pages.keys[1][:8], pages.values[1][:8] = pages.keys[0][:8], pages.values[0][:8]
    private = pages.layout()
    shared = {**private, "block_table": private["block_table"].copy()}
    shared["block_table"][1, :2] = shared["block_table"][0, :2]
    assert (shared["block_table"] != private["block_table"]).any()
    exact(reference.paged_attention(**shared), reference.paged_attention(**private))


@paged_features
def test_p05_requests_do_not_see_each_other(features):
    whole, rows = Pages().run(features=features), [slice(0, 1), slice(1, 5), slice(5, 8)]
    permuted = Pages().run(order=[2, 0, 1], features=features)
    exact(take(permuted, slice(0, 3)), take(whole, rows[2]))
    exact(take(permuted, slice(3, 4)), take(whole, rows[0]))
    for r in range(3):
        exact(Pages().run(order=[r], features=features), take(whole, rows[r]))


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 7), (6, 9)])
def test_p06_a_neighbour_changes_nothing(n, m):
    exact(take(Pages().add(n, m).run(), slice(0, 8)), Pages().run())


@pytest.mark.parametrize("page", [1, 2, 3, 16, 64])
@paged_features
def test_p07_page_size_does_not_matter(features, page):
    close(Pages().run(page=page, features=features), Pages().run(features=features))


def test_p08_masked_keys_may_be_added():
    query, key, value = dense()
    rows, keys = np.arange(N) + M - N, np.arange(M)
    expected = reference.attention(query, key, value, causal=True, window=(4, None))
    _, more_keys, more_values = dense(m=2 * M, seed=3)
    for at in (np.arange(M) + M, -np.arange(M) - 1):
        actual = reference.attention(
            query,
            np.concatenate([key, more_keys[:M]]),
            np.concatenate([value, more_values[:M]]),
            causal=True,
            window=(4, None),
            query_positions=rows,
            key_positions=np.concatenate([keys, at]),
        )
        close(actual, expected)


# --- partial results


def partials(cuts, **kwargs):
    query, key, value = dense()
    rows = np.arange(N) + M - N
    states = [
        reference.attention(query, key[a:b], value[a:b], query_positions=rows, key_positions=np.arange(a, b), **kwargs)
        for a, b in zip([0, *cuts], [*cuts, M], strict=True)
    ]
    return [out for out, _ in states], [lse for _, lse in states]


@pytest.mark.parametrize("cuts", [[6], [0], [M], [1, 2, 11], [5, 5, 5, 12], list(range(1, M))], ids=str)
@features
def test_p09_split_and_merge_is_the_whole(features, cuts):
    rest = {name: value for name, value in features.items() if name != "sinks"}
    merged = reference.merge_states(*partials(cuts, **rest))
    if "sinks" in features:
        merged = reference.apply_sinks(*merged, features["sinks"])
    close(merged, reference.attention(*dense(), **features))


def test_p10_merge_is_a_commutative_monoid():
    outs, lses = partials([3, 8], causal=True, window=(6, 0))
    merged = reference.merge_states(outs, lses)
    close(reference.merge_states(outs[::-1], lses[::-1]), merged)
    left, left_lse = reference.merge_states(outs[:2], lses[:2])
    close(reference.merge_states([left, outs[2]], [left_lse, lses[2]]), merged)
    right, right_lse = reference.merge_states(outs[1:], lses[1:])
    close(reference.merge_states([outs[0], right], [lses[0], right_lse]), merged)
    exact(reference.merge_states([merged[0]], [merged[1]]), merged)


@pytest.mark.parametrize("mark", [-np.inf, np.inf, np.nan], ids=str)
@pytest.mark.parametrize("junk", [0.0, 7.0, np.nan, np.inf], ids=str)
def test_p10_an_empty_part_is_the_identity(mark, junk):
    out, lse = reference.attention(*dense())
    nothing, empty = np.full(out.shape, junk), np.full(lse.shape, mark)
    exact(reference.merge_states([out, nothing], [lse, empty]), (out, lse))
    exact(reference.merge_states([nothing, out], [empty, lse]), (out, lse))
    both = reference.merge_states([nothing, nothing], [empty, empty])
    exact(both, (np.zeros(out.shape), np.full(lse.shape, -np.inf)))


def test_p10_a_live_nan_survives_where_asked():
    out, lse = reference.attention(*dense())
    broken, nan = np.full(out.shape, np.nan), np.full(lse.shape, np.nan)
    merged = reference.merge_states([out, broken], [lse, nan], nan_is_empty=False)
    assert all(np.isnan(result).all() for result in merged)


@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("features", PAGED.values(), ids=PAGED)
def test_p11_chunked_prefill_is_the_whole(features, chunk):
    query, key, value = dense(n=M)
    whole = reference.attention(query, key, value, **features)
    for start in range(0, M, chunk):
        stop = min(start + chunk, M)
        part = reference.attention(query[start:stop], key[:stop], value[:stop], **features)
        close(part, take(whole, slice(start, stop)))


@paged_features
def test_p12_decode_is_the_last_row_of_prefill(features):
    query, key, value = dense(n=M)
    whole = reference.attention(query, key, value, **features)
    close(reference.attention(query[-1:], key, value, **features), take(whole, slice(M - 1, M)))


# --- masks, cap, bias


def test_p13_windows():
    query, key, value = dense(n=M)
    full = reference.attention(query, key, value)
    exact(reference.attention(query, key, value, window=(M, M)), full)
    causal = reference.attention(query, key, value, causal=True)
    exact(reference.attention(query, key, value, window=(None, 0)), causal)
    exact(reference.attention(query, key, value, window=(M - 1, 0)), causal)
    own, _ = reference.attention(query, key, value, window=(0, 0))
    exact([own], [value.repeat(H // K, axis=1)])
    one_short, _ = reference.attention(query, key, value, causal=True, window=(M - 2, None))
    assert (one_short[-1] != causal[0][-1]).all()
    exact([one_short[:-1]], [causal[0][:-1]])


def test_p14_soft_cap_limits():
    query, key, value = dense()
    plain = reference.attention(query, key, value, causal=True)
    exact(reference.attention(query, key, value, causal=True, logits_soft_cap=0), plain)
    close(reference.attention(query, key, value, causal=True, logits_soft_cap=1e8), plain, rtol=1e-9)
    out, lse = reference.attention(query, key, value, causal=True, logits_soft_cap=1e-13)
    seen = np.arange(M - N + 1, M + 1)
    means = [value[:count].mean(axis=0).repeat(H // K, axis=0) for count in seen]
    close((out, lse), (np.stack(means), np.broadcast_to(np.log(seen), (H, N))), rtol=1e-10)


def test_p15_alibi():
    query, key, value = dense()
    plain = reference.attention(query, key, value, causal=True)
    close(reference.attention(query, key, value, causal=True, alibi_slopes=[0.0] * H), plain)
    shift = np.arange(N)[None, :, None] * np.array(SLOPES)[:, None, None]
    out, lse = reference.attention(query, key, value, causal=True, alibi_slopes=SLOPES)
    shifted = reference.attention(query, key, value, causal=True, alibi_slopes=SLOPES, bias=shift)
    close(shifted, (out, lse + shift[..., 0]))


# --- what softmax is


@features
def test_p16_value_scale_comes_out(features):
    query, key, value = dense()
    out, lse = reference.attention(query, key, value, **features)
    exact(reference.attention(query, key, value * 2.0**-37, **features), (out * 2.0**-37, lse))
    other = dense(seed=5)[2]
    summed = reference.attention(query, key, 3 * value - 2 * other, **features)
    close(summed, (3 * out - 2 * reference.attention(query, key, other, **features)[0], lse))


def test_p17_out_is_an_average():
    query, key, value = dense()
    constant = np.broadcast_to(value[:1], value.shape)
    out, _ = reference.attention(query, key, constant)
    close([out], [np.broadcast_to(value[0].repeat(H // K, axis=0), out.shape)])
    out, _ = reference.attention(query, key, value)
    low, high = (np.repeat(bound, H // K, axis=0) for bound in (value.min(axis=0), value.max(axis=0)))
    assert (out >= low - 1e-12).all() and (out <= high + 1e-12).all()


def test_p18_shifting_all_keys_shifts_lse():
    query, key, value = dense()
    out, lse = reference.attention(query, key, value, scale=0.3)
    shift = np.random.default_rng(1).standard_normal(D)
    close(reference.attention(query, key + shift, value, scale=0.3), (out, lse + 0.3 * (query @ shift).T))


@features
def test_p19_scale_moves_between_query_and_key(features):
    query, key, value = dense()
    plain = reference.attention(query, key, value, **features)
    exact(reference.attention(query * 2.0**20, key * 2.0**-20, value, **features), plain)
    close(reference.attention(query * D**-0.5, key, value, scale=1.0, **features), plain)
    assert not np.array_equal(reference.attention(query, key, value, scale=1.0, **features)[0], plain[0])


@features
def test_p20_rotations(features):
    query, key, value = dense()
    rng = np.random.default_rng(2)
    turn, _ = np.linalg.qr(rng.standard_normal((D, D)))
    out, lse = reference.attention(query, key, value, **features)
    close(reference.attention(query @ turn, key @ turn, value, **features), (out, lse))
    mix = rng.standard_normal((DV, DV))
    close(reference.attention(query, key, value @ mix, **features), (out @ mix, lse))


def test_p21_padding_the_head_needs_the_logical_scale():
    query, key, value = dense()
    wide_query, wide_key = (np.pad(x, ((0, 0), (0, 0), (0, 8))) for x in (query, key))
    plain = reference.attention(query, key, value)
    close(reference.attention(wide_query, wide_key, value, scale=D**-0.5), plain)
    assert not np.allclose(reference.attention(wide_query, wide_key, value)[1], plain[1])


# --- heads


def test_p22_heads_may_be_permuted():
    query, key, value = dense(num_heads=6, num_kv_heads=3)
    out, lse = reference.attention(query, key, value)
    groups, members = [2, 0, 1], [4, 5, 0, 1, 2, 3]
    close(
        reference.attention(query[:, members], key[:, groups], value[:, groups]),
        (out[:, members], lse[members]),
    )
    inside = [1, 0, 2, 3, 5, 4]
    close(reference.attention(query[:, inside], key, value), (out[:, inside], lse[inside]))


@features
def test_p23_grouped_is_repeated(features):
    query, key, value = dense()
    repeated = reference.attention(query, key.repeat(H // K, axis=1), value.repeat(H // K, axis=1), **features)
    close(reference.attention(query, key, value, **features), repeated)


@pytest.mark.parametrize("ranks", [2, 4])
def test_p24_tensor_parallel_shards_are_the_whole(ranks):
    query, key, value = dense(num_heads=8, num_kv_heads=4)
    slopes, sinks = reference.alibi_slopes(8), np.linspace(-1, 2, 8)
    out, lse = reference.attention(query, key, value, causal=True, alibi_slopes=slopes, sinks=sinks)
    shards = []
    for rank in range(ranks):
        q, k = (
            slice(rank * 8 // ranks, (rank + 1) * 8 // ranks),
            slice(rank * 4 // ranks, (rank + 1) * 4 // ranks),
        )
        shards.append(
            reference.attention(query[:, q], key[:, k], value[:, k], causal=True, alibi_slopes=slopes[q], sinks=sinks[q])
        )
    close((np.concatenate([s[0] for s in shards], axis=1), np.concatenate([s[1] for s in shards])), (out, lse))


# --- keys


def test_p25_keys_are_a_set():
    query, key, value = dense()
    out, lse = reference.attention(query, key, value)
    order = np.random.default_rng(4).permutation(M)
    close(reference.attention(query, key[order], value[order]), (out, lse))
    doubled = reference.attention(query, np.tile(key, (2, 1, 1)), np.tile(value, (2, 1, 1)))
    close(doubled, (out, lse + math.log(2)))


@features
def test_p26_rows_without_keys(features):
    query, key, value = dense()
    mask = np.ones((H, N, M), dtype=bool)
    mask[1, 2] = mask[3] = False
    out, lse = reference.attention(query, key, value, mask=mask, **features)
    hidden = ~mask.any(axis=2)
    exact(
        (out.transpose(1, 0, 2)[hidden], lse[hidden]),
        (np.zeros((hidden.sum(), DV)), [-np.inf] * hidden.sum()),
    )
    plain = reference.attention(query, key, value, **features)
    exact(
        (out.transpose(1, 0, 2)[~hidden], lse[~hidden]),
        (plain[0].transpose(1, 0, 2)[~hidden], plain[1][~hidden]),
    )
    empty = reference.attention(query, key[:0], value[:0], **features)
    exact(empty, (np.zeros((N, H, DV)), np.full((H, N), -np.inf)))


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e4, 524288.0, 1e150])
def test_p27_a_single_visible_key_wins(size):
    query, key, value = dense()
    mask = np.zeros((N, M), dtype=bool)
    mask[np.arange(N), [3, 0, 12, 7, 3]] = True
    out, lse = reference.attention(query * size, key, value, mask=mask)
    exact([out], [value[[3, 0, 12, 7, 3]].repeat(H // K, axis=1)])
    assert np.isfinite(lse).all()


def test_p28_sinks():
    query, key, value = dense()
    out, lse = reference.attention(query, key, value, causal=True)
    exact(reference.attention(query, key, value, causal=True, sinks=[-np.inf] * H), (out, lse))
    sinks = np.array([math.log(M), 0.0, -3.0, 5.0])
    share = 1 / (1 + np.exp(sinks[:, None] - lse))
    sunk = reference.attention(query, key, value, causal=True, sinks=sinks)
    close(sunk, (out * share.T[..., None], lse))
    exact(reference.apply_sinks(out, lse, sinks), sunk)
    exact(reference.attention(query, key, value, sinks=[np.inf] * H)[:1], [np.zeros(out.shape)])
    # One more key with the sink for its score and nothing for its value.
    bias = np.zeros((H, N, M + 1))
    bias[:, :, M] = sinks[:, None]
    wide_key, wide_value = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (key, value))
    visible = np.concatenate([np.tri(N, M, M - N, dtype=bool), np.ones((N, 1), dtype=bool)], axis=1)
    extra, extra_lse = reference.attention(query, wide_key, wide_value, mask=visible, bias=bias)
    close((extra, extra_lse), (sunk[0], np.logaddexp(lse, sinks[:, None])))


@pytest.mark.parametrize("lse", [-np.inf, np.inf])
@pytest.mark.parametrize("sink", [-np.inf, 0.0, np.inf])
def test_p28_a_sink_leaves_an_empty_row_empty(lse, sink):
    exact(reference.apply_sinks(np.full((1, 1, 2), np.nan), [[lse]], [sink]), (np.zeros((1, 1, 2)), [[lse]]))


# --- trees, cascade, parallel contexts

CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)]


@pytest.mark.parametrize("features", PAGED.values(), ids=PAGED)
def test_p29_a_chain_is_causal(features):
    chain = reference.tree_mask_from_choices([(0,) * k for k in range(1, 4)])
    pages = Pages([(4, 9), (4, 4), (2, 5), (6, 8)])
    close(pages.run(features={**features, "tree_mask": np.stack([chain] * 4)}), pages.run(features=features))


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf, 3e38], ids=str)
def test_p29_a_path_is_its_sequence_alone(poison):
    """Every root path equals a causal run of just that path: siblings may hold anything."""
    context, mask = 6, reference.tree_mask_from_choices(CHOICES)
    width = len(mask)
    clean = Pages([(width, context + width)])
    whole = clean.run(features={"tree_mask": mask[None]})
    for node in range(width):
        path = np.flatnonzero(mask[node])
        keep = np.concatenate([np.arange(context), context + path])
        alone = reference.attention(clean.queries[0][path], clean.keys[0][keep], clean.values[0][keep], causal=True)
        close(take(alone, slice(-1, None)), take(whole, slice(node, node + 1)))
        poisoned = Pages([(width, context + width)])
        others = np.setdiff1d(np.arange(context + width), keep)
        poisoned.keys[0][others] = poisoned.values[0][others] = poison
        exact(take(poisoned.run(features={"tree_mask": mask[None]}), [node]), take(whole, [node]))


@pytest.mark.parametrize("prefix", [0, 4, 8])
@pytest.mark.parametrize(
    "features",
    [{}, {"logits_soft_cap": 2.0, "sinks": [2.5, 0.0, -1.0, 3.0], "k_scale": [0.5, 1.5], "v_scale": 3.0}],
    ids=["plain", "all"],
)
def test_p30_cascade_is_plain(features, prefix):
    pages = Pages([(2, 11), (0, 3), (3, 14), (1, 9)])
    layout = pages.layout(fill=np.nan)
    for r in (2, 3):
        layout["block_table"][r, : prefix // 4] = layout["block_table"][0, : prefix // 4]
    layout["query"] = np.concatenate([layout["query"], np.zeros((2, H, D))])
    plain = reference.paged_attention(**layout, **features)
    cascade = reference.cascade_attention(**layout, common_prefix_len=prefix, **features)
    close(cascade, plain)
    assert np.isnan(cascade[0][6:]).all() and np.isfinite(cascade[0][:6]).all()


def test_p30_cascade_keeps_a_live_nan():
    layout = Pages([(2, 11)]).layout()
    layout["value_cache"][layout["block_table"][0, 0], 1, 0, 3] = np.nan
    layout["key_cache"][layout["block_table"][0, 0], 2, 1] = np.nan
    plain = reference.paged_attention(**layout)
    assert np.isnan(plain[0]).any() and np.isfinite(plain[0]).any()
    close(reference.cascade_attention(**layout, common_prefix_len=4), plain)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 16])
@features
def test_p31_dcp_shards_are_the_whole(features, world, interleave):
    query, key, value = dense()
    rest = {name: value for name, value in features.items() if name != "sinks"}
    states = []
    for rank in range(world):
        own = reference.dcp_key_positions(M, world, rank, interleave)
        states.append(
            reference.attention(query, key[own], value[own], query_positions=np.arange(N) + M - N, key_positions=own, **rest)
        )
    merged = reference.merge_states(*zip(*states, strict=True))
    if "sinks" in features:
        merged = reference.apply_sinks(*merged, features["sinks"])
    close(merged, reference.attention(query, key, value, **features))


@pytest.mark.parametrize("world", [2, 3])
@paged_features
def test_p31_zigzag_pcp_is_the_whole(features, world):
    size = 2
    total = 2 * world * size
    query, key, value = dense(n=total, m=total)
    whole = reference.attention(query, key, value, **features)
    for rank in range(world):
        chunks = rank, 2 * world - 1 - rank
        rows = np.concatenate([np.arange(c * size, (c + 1) * size) for c in chunks])
        part = reference.attention(query[rows], key, value, query_positions=rows, **features)
        close(part, take(whole, rows))


# --- MLA


def mla_inputs(n=3, m=9):
    rng = np.random.default_rng(0)
    shapes = (n, H, 6), (n, H, 4), (m, 10), (m, 4), (10, H, 6), (10, H, 5)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("features", [{}, {"causal": False}, {"sinks": [0.0, 1.0, 2.0, 3.0], "logits_soft_cap": 3.0}], ids=str)
def test_p32_absorbed_is_unabsorbed(features):
    arguments = mla_inputs()
    absorbed = reference.mla_absorbed(*arguments, scale=10**-0.5, **features)
    assert absorbed[0].shape == (3, H, 5)
    close(absorbed, reference.mla_unabsorbed(*arguments, scale=10**-0.5, **features))


def test_p32_chunked_context_merges_with_the_new_tokens():
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = mla_inputs()
    whole = reference.mla_unabsorbed(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, scale=0.3)
    states = [
        reference.mla_unabsorbed(q_nope, q_pe, kv_c[part], k_pe[part], w_uk, w_uv, scale=0.3, causal=causal)
        for part, causal in ((slice(0, 4), False), (slice(4, 6), False), (slice(6, 9), True))
    ]
    close(reference.merge_states(*zip(*states, strict=True)), whole)


@pytest.mark.parametrize("form", [reference.mla_unabsorbed, reference.mla_absorbed], ids=["unabsorbed", "absorbed"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38], ids=str)
def test_p32_masked_latents_are_not_read(form, poison):
    arguments = mla_inputs()
    mask = np.ones((3, 9), dtype=bool)
    mask[:, [0, 5]] = False
    clean = form(*arguments, scale=0.3, mask=mask)
    arguments[2][[0, 5]] = arguments[3][[0, 5]] = poison
    exact(form(*arguments, scale=0.3, mask=mask), clean)


def test_p33_top_k():
    rng = np.random.default_rng(0)
    query, kv = rng.standard_normal((3, H, 12)), rng.standard_normal((9, 12))
    sparse = {"scale": 0.3, "kv_lora_rank": 8}
    everything = np.stack([rng.permutation(9) for _ in range(3)])
    all_keys = reference.sparse_mla(query, kv, everything, **sparse)
    exact(all_keys, reference.attention(query, kv[:, None], kv[:, None, :8], scale=0.3))
    some = reference.sparse_mla(query, kv, everything[:, :4], **sparse)
    exact(reference.sparse_mla(query, kv, everything[:, [3, 1, 0, 2]], **sparse), some)
    padded = np.insert(everything[:, :4], [0, 2, 4, 4], [-1, 9, -1, -1], axis=1)
    exact(reference.sparse_mla(query, kv, padded, **sparse), some)
    poisoned = kv.copy()
    unseen = np.setdiff1d(np.arange(9), everything[0, :4])
    poisoned[unseen] = np.nan
    exact(take(reference.sparse_mla(query, poisoned, everything[:, :4], **sparse), [0]), take(some, [0]))


# --- scales, chunks, time


def test_p34_cache_scales_fold():
    pages = Pages()
    plain = pages.run(features={"scale": 0.5})
    exact(pages.run(features={"scale": 0.5, "k_scale": 4.0}), pages.run(features={"scale": 2.0}))
    exact(pages.run(features={"scale": 0.5, "v_scale": 0.25}), (plain[0] * 0.25, plain[1]))
    close(pages.run(features={"scale": 0.5, "k_scale": 0.37}), pages.run(features={"scale": 0.5 * 0.37}))
    close(
        pages.run(features={"scale": 0.5, "v_scale": [0.3, 0.7]}),
        (plain[0] * np.repeat([0.3, 0.7], 2)[:, None], plain[1]),
    )
    exact(pages.run(features={"k_scale": [2.0, 2.0]}), pages.run(features={"k_scale": 2.0}))


@pytest.mark.parametrize("chunk", [1, 3, 4, 13, 20])
@pytest.mark.parametrize("n", [1, 5, M])
def test_p35_chunked_attention_is_virtual_batches(chunk, n):
    query, key, value = dense(n=n)
    out, lse = reference.attention(query, key, value, mask=reference.chunked_mask(n, M, chunk))
    for start in range(0, M, chunk):
        stop = min(start + chunk, M)
        rows = slice(max(start, M - n) - (M - n), max(stop - (M - n), 0))
        alone = reference.attention(query[rows], key[start:stop], value[start:stop], causal=True)
        close(take((out, lse), rows), alone)


@paged_features
def test_p36_the_future_does_not_reach_back(features):
    query, key, value = dense(n=M)
    before = reference.attention(query, key, value, **features)
    for poison in (5.0, np.nan):
        key[8:], value[8:] = poison, -poison
        after = reference.attention(query, key, value, **features)
        exact(take(after, slice(0, 8)), take(before, slice(0, 8)))
    assert np.isnan(after[0][8:]).all()


# --- the cache


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_p38_a_write_touches_its_slots_only(dtype):
    rng = np.random.default_rng(0)
    caches = [rng.standard_normal((5, 4, K, size)).astype(dtype) for size in (D, DV)]
    caches[0][1, 2] = np.nan
    before = [cache.copy() for cache in caches]
    tokens = [rng.standard_normal((4, K, size)) for size in (D, DV)]
    tokens[0][1] = tokens[1][1] = np.nan
    slots = [7, -1, 0, 18]
    written = reference.write_kv(*tokens, *caches, slots)
    for new, old, cache, token in zip(written, before, caches, tokens, strict=True):
        assert new.dtype == dtype and not np.shares_memory(new, cache)
        assert cache.tobytes() == old.tobytes()
        flat, was = new.reshape(20, K, -1), old.reshape(20, K, -1)
        rest = np.setdiff1d(np.arange(20), slots)
        assert flat[rest].tobytes() == was[rest].tobytes()
        np.testing.assert_array_equal(flat[[7, 0, 18]], token[[0, 2, 3]].astype(dtype))


def test_p38_what_is_written_is_what_is_attended():
    """Fill an empty cache through the slot mapping of a block table, then read it back through the table."""
    pages = Pages()
    layout = pages.layout(fill=np.nan)
    key, value = np.concatenate(pages.keys), np.concatenate(pages.values)
    slots = [int(layout["block_table"][r, j // 4]) * 4 + j % 4 for r in range(3) for j in range(len(pages.keys[r]))]
    empty = [np.full_like(layout[name], np.nan) for name in ("key_cache", "value_cache")]
    written = reference.write_kv(key, value, *empty, slots)
    exact(written, (layout["key_cache"], layout["value_cache"]))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_p38_codes_are_written_as_codes(dtype):
    key, value = (x[:4] for x in dense()[1:])
    codes = [reference.quantize(x, dtype, 0.05) for x in (key, value)]
    caches = [np.zeros((3, 2, *x.shape[1:]), dtype=x.dtype) for x in codes]
    written = reference.write_kv(*codes, *caches, [5, 1, 0, 3])
    for new, code in zip(written, codes, strict=True):
        np.testing.assert_array_equal(new.reshape(6, *code.shape[1:])[[5, 1, 0, 3]], code)


@paged_features
def test_p39_a_mixed_batch_is_its_parts(features):
    pages = Pages([(1, 9), (4, 4), (1, 3), (3, 14)])
    mixed = pages.run(features=features)
    exact(take(mixed, [0, 5]), pages.run(order=[0, 2], features=features))
    exact(take(mixed, [1, 2, 3, 4, 6, 7, 8]), pages.run(order=[1, 3], features=features))
