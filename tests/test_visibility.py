"""The formulas of visibility against the oracle's, in every framework; bounds against what rows see."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn import reference
from attn.errors import AttnError
from attn.visibility import BatchMask, LayerMask, Visibility


def drawn(rng: np.random.Generator) -> tuple[Visibility, int, int]:
    """A random mask of one request, n rows and m keys."""
    n = int(rng.integers(1, 8))
    context = int(rng.integers(0, 12))
    m, spans, tree, prefix, is_causal = n + context, None, None, None, None
    causal = bool(rng.integers(2))
    window = tuple(None if rng.integers(2) else int(rng.integers(0, 6)) for _ in range(2))
    if rng.integers(2):
        spans = np.full((n, 2), -1, np.int32)
        for row in range(n):
            if rng.integers(2):
                spans[row] = np.sort(rng.integers(0, m, 2))
    if rng.integers(2):
        prefix = rng.integers(0, m + 1, 1).astype(np.int32)
    if causal and rng.integers(2):
        width = max(1, n + int(rng.integers(-2, 3)))  # in a request of more tokens, rows are causal
        tree = np.tril(rng.integers(0, 2, (width, width)).astype(bool))[None]
        tree[0, range(width), range(width)] = True
    elif rng.integers(2):
        is_causal = np.array([bool(rng.integers(2))])
        causal = False
    chunk = int(rng.integers(1, 9)) if rng.integers(2) else None
    layer = LayerMask(causal, window, chunk, bool(rng.integers(2)))
    return Visibility(layer, BatchMask(tree, spans, prefix, is_causal)), n, m


def oracle(mask: Visibility, n: int, m: int) -> np.ndarray:
    (tree, spans, prefix, is_causal), (causal, window, chunk_size, span_window) = mask.batch, mask.layer
    return reference.visible_mask(
        n,
        m,
        causal=causal if is_causal is None else bool(is_causal[0]),
        window=window,
        tree=None if tree is None or n > tree.shape[1] else tree[0, :n, :n],
        spans=spans,
        prefix=0 if prefix is None else int(prefix[0]),
        chunk_size=chunk_size,
        span_window=bool(span_window),
    )


@pytest.mark.parametrize("put", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_rows_see_what_the_oracle_says(put):
    rng = np.random.default_rng(0)
    for _ in range({np.asarray: 300, torch.as_tensor: 100}.get(put, 15)):
        mask, n, m = drawn(rng)
        there = Visibility(mask.layer, mask.batch.map(put))
        rows, keys = put(np.arange(n)[:, None]), put(np.arange(m)[None])
        seen = np.asarray(there.allowed(rows + m - n, keys, 0, rows, m - n, n))
        np.testing.assert_array_equal(seen, oracle(mask, n, m), str(mask))
    np.testing.assert_array_equal(mask.as_array(n, m), oracle(mask, n, m))


def test_bounds_hold_every_key_that_is_seen():
    """Also a pair of adjacent rows of them: kernels ask for the rows of a tile."""
    rng, tight = np.random.default_rng(1), 0
    for _ in range(600):
        mask, n, m = drawn(rng)
        mask = mask.select(0, slice(0, n))
        begin = int(rng.integers(0, n))
        end = int(rng.integers(begin, n)) + 1
        spans, prefix, context = mask.batch.spans, mask.batch.prefix, m - n
        reach = None
        if spans is not None:
            own = spans[begin:end][spans[begin:end, 1] >= 0]
            reach = (int(own[:, 0].min()), int(own[:, 1].max())) if len(own) else (0, -1)
        prefixed = None if prefix is None else int(prefix[0])
        ordered = mask.layer.causal and mask.batch.tree is None
        low, high = mask.bounds(context + begin, context + end - 1, m, reach, prefixed, ordered)
        seen = oracle(mask, n, m)[begin:end].any(0)
        assert not seen[:low].any() and not seen[high:].any() and 0 <= low <= high, str(mask)
        tight += bool(seen.any()) and bool(seen[low]) and bool(seen[high - 1])
        arrays = [None if x is None else np.asarray(x)[None] for x in (prefixed, ordered)]
        pair = None if reach is None else tuple(np.array([x]) for x in reach)
        same = mask.bounds(np.array([context + begin]), np.array([context + end - 1]), np.array([m]), pair, *arrays, np)
        assert [int(x[0]) for x in same] == [low, high], str(mask)
    assert tight > 250, "bounds are the first and last key that is seen, in most masks"


def test_masks_compose():
    rng = np.random.default_rng(2)
    for _ in range(200):
        (one, n, m), (two, *_) = drawn(rng), drawn(rng)
        if None not in (one.layer.chunk_size, two.layer.chunk_size):
            two = Visibility(two.layer._replace(chunk_size=one.layer.chunk_size))
        first, second = (Visibility(x.layer._replace(span_window=None)) for x in (one, two))
        both = Visibility(first.layer & second.layer)
        np.testing.assert_array_equal(both.as_array(n, m), first.as_array(n, m) & second.as_array(n, m))
    with pytest.raises(ValueError, match="chunk_size=2 and chunk_size=3 have no common mask"):
        LayerMask(chunk_size=2) & LayerMask(chunk_size=3)


def test_masks_of_batches_compose():
    """The common mask of two is the keys that both allow, or none: drawn so that all kinds of arrays meet each other."""
    rng, composed, refused = np.random.default_rng(3), Counter(), 0
    for _ in range(3000):
        (one, n, m), (two, _, _) = drawn(rng), drawn(rng)
        while np.size(two.batch.spans) > 1 or two.batch.tree is not None:  # of another request
            two = drawn(rng)[0]
        batch = two.batch._replace(prefix=None if two.batch.prefix is None else np.minimum(two.batch.prefix, m))
        if rng.integers(2):
            batch = batch._replace(spans=one.batch.spans, prefix=one.batch.prefix)
        if two.layer.causal and one.batch.tree is not None and rng.integers(2):
            batch = batch._replace(tree=np.tril(one.batch.tree | (rng.random(one.batch.tree.shape) < 0.3)))
        layer = two.layer._replace(chunk_size=one.layer.chunk_size, span_window=one.layer.span_window)
        two = Visibility(LayerMask(False) if rng.integers(3) == 0 else layer, batch)
        if rng.integers(2):
            one, two = two, one
        try:
            both = one & two
        except ValueError as error:
            assert "have no common mask" in str(error)
            refused += 1
            continue
        want = one.as_array(n, m) & two.as_array(n, m)
        np.testing.assert_array_equal(both.as_array(n, m), want, f"{one} & {two} = {both}")
        composed.update(name for name, array in both.batch._asdict().items() if array is not None)
        composed["plain"] += both.batch.is_plain
    assert min(composed[name] for name in ("plain", *BatchMask._fields)) > 30 and refused > 300, (composed, refused)


def test_what_two_masks_may_not_have():
    spans, tree, flags = np.zeros((2, 2), np.int32), np.ones((1, 1, 1), bool), np.array([True])
    plain = Visibility(LayerMask())
    with pytest.raises(ValueError, match="one adds keys that the other may not allow"):
        plain & Visibility(LayerMask(), BatchMask(spans=spans))
    with pytest.raises(ValueError, match="one adds keys that the other may not allow"):
        Visibility(LayerMask(), BatchMask(spans=spans)) & Visibility(LayerMask(), BatchMask(spans=spans.copy()))
    with pytest.raises(ValueError, match="a tree meets causality, or a tree of its size"):
        Visibility(LayerMask(), BatchMask(tree)) & Visibility(LayerMask(), BatchMask(is_causal=flags))
    same = Visibility(LayerMask(), BatchMask(spans=spans))
    assert (same & same) == same and (plain & Visibility(LayerMask(False, (3, None)))) == Visibility(LayerMask(True, (3, None)))


def test_masks_of_a_batch_are_validated():
    ints = np.int32
    tree, spans, prefix = np.tril(np.ones((2, 2, 2), bool)), np.full((3, 2), -1, ints), np.array([1, 0], ints)
    good, lens = BatchMask(tree, spans, prefix), (np.array([2, 1]), np.array([4, 1]))
    assert good.validate(2, 3, *lens) is good and BatchMask().validate(2, 3) == BatchMask()
    for wrong, message in (
        (good._replace(tree=tree[:1]), "tree_mask has shape [1, 2, 2]: must be [2, *, *]"),
        (good._replace(tree=tree[:, :1]), "tree_mask has shape [2, 1, 2]: must be [R, W, W]"),
        (good._replace(tree=tree | True), "tree_mask[0, 0, 1] = True: must be False above the diagonal"),
        (good._replace(spans=spans[:2]), "spans has 2 rows: must be at least num_actual_tokens=3"),
        (
            good._replace(spans=spans * 0 + 1),
            "spans[2] = [1, 1]: must be (first, last) with 0 <= first",
        ),
        (good._replace(prefix=prefix + ints(4)), "prefix[0] = 5: must be between 0 and seq_lens[0] = 4"),
        (good._replace(prefix=prefix.astype(float)), "prefix has dtype float64: must be int32"),
        (good._replace(is_causal=np.ones(3, bool)), "causal has shape [3]: must be [2]"),
    ):
        with pytest.raises(AttnError, match=re.escape(message)):
            wrong.validate(2, 3, *lens)
    # on a device, or without lengths, values are not read
    assert good._replace(tree=torch.ones(2, 2, 2, dtype=torch.bool)).validate(2, 3, *lens)
    assert good._replace(tree=tree | True).validate(2, 3)


def test_a_mask_says_what_it_is():
    mask = Visibility(LayerMask(window=(127, 0), chunk_size=512), BatchMask(spans=np.zeros((5, 2), np.int32)))
    line = "Visibility(LayerMask(window=(127, 0), chunk_size=512), BatchMask(spans=int32[5, 2]))"
    assert repr(mask) == str(mask) == f"{mask}" == line
    assert [repr(x) for x in (LayerMask(), BatchMask())] == ["LayerMask()", "BatchMask()"]
    assert repr(Visibility(LayerMask(False, span_window=False))) == "Visibility(LayerMask(causal=False, span_window=False))"


@pytest.mark.parametrize("xp", [np, torch, jnp], ids=["numpy", "torch", "jax"])
def test_arrays_of_a_mask_are_printed_by_dtype_and_shape(xp):
    batch = BatchMask(xp.ones((2, 4, 4), dtype=bool if xp is np else xp.bool), prefix=xp.zeros(2, dtype=xp.int32))
    assert repr(batch) == "BatchMask(tree=bool[2, 4, 4], prefix=int32[2])"


def test_a_traced_mask_is_printed_too():
    lines = []
    jax.jit(lambda spans: lines.append(repr(BatchMask(spans=spans))))(jnp.zeros((5, 2), jnp.int32))
    assert lines == ["BatchMask(spans=int32[5, 2])"]
    assert repr(BatchMask(spans=0, prefix="rows")) == "BatchMask(spans=0, prefix='rows')"  # a tree of other leaves


def test_one_request_of_a_batch():
    mask = Visibility(LayerMask(False), BatchMask(None, np.arange(10).reshape(5, 2), np.array([7, 8]), np.array([True, False])))
    first, second = mask.select(0, slice(0, 2)), mask.select(1, slice(2, 5))
    assert (first.layer.causal, second.layer.causal) == (True, False)
    assert first.batch.spans.tolist() == [[0, 1], [2, 3]] and second.batch.prefix.tolist() == [8]
    assert first.batch.is_causal is None and Visibility(LayerMask()).batch.is_plain
