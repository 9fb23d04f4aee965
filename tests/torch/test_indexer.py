"""The lightning indexer's scores, and the set it chooses with ties tolerated (under 5 s)."""

import numpy as np
import pytest
import torch

from attn.torch.indexer import lightning_indexer

HEADS, SIZE, P = 4, 8, 4


def drawn(q_lens, seq_lens, seed=0, ties=False):
    g = torch.Generator().manual_seed(seed)
    used = [-(-m // P) for m in seq_lens]
    ids = torch.randperm(sum(used) + 2, generator=g).tolist()
    table = torch.full((len(used), max(used)), -1, dtype=torch.int32)
    for r, n in enumerate(used):
        table[r, :n] = torch.tensor([ids.pop() for _ in range(n)])
    cache = torch.randn(sum(used) + 2, P, SIZE, generator=g)
    query, weights = torch.randn(sum(q_lens), HEADS, SIZE, generator=g), torch.randn(sum(q_lens), HEADS, generator=g)
    if ties:  # small integers: many scores are equal, and all are exact
        cache, query, weights = cache.sign(), query.sign(), weights.sign()
    starts = torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32)
    return query, weights, cache, starts, torch.tensor(seq_lens, dtype=torch.int32), table


def by_definition(query, weights, cache, starts, lens, table):
    for r, m in enumerate(lens.tolist()):
        keys = np.stack([cache[table[r, j // P], j % P].double().numpy() for j in range(m)]) if m else np.zeros((0, SIZE))
        n = int(starts[r + 1] - starts[r])
        for i in range(n):
            row = int(starts[r]) + i
            dots = np.maximum(query[row].double().numpy() @ keys.T, 0)
            yield row, (weights[row].double().numpy() @ dots)[: max(0, m - n + i + 1)]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("topk", [1, 5, 40])
def test_the_best_positions_are_chosen(topk, ties):
    batch = drawn([1, 6, 3, 2], [20, 9, 3, 33], ties=ties)
    indices, scores = lightning_indexer(*batch, topk=topk)
    assert indices.shape == (12, topk) and indices.dtype == torch.int32
    for row, want in by_definition(*batch):
        seen = len(want)
        np.testing.assert_allclose(scores[row, :seen].numpy(), want, rtol=1e-5, atol=1e-5)
        assert torch.isneginf(scores[row, seen:]).all()
        chosen = indices[row][indices[row] >= 0].tolist()
        assert len(set(chosen)) == len(chosen) == min(topk, seen) and max(chosen) < seen
        assert (indices[row, len(chosen) :] == -1).all()
        left = np.delete(want, chosen)
        assert not len(left) or want[chosen].min() >= left.max() - 1e-5  # of equal scores any may be taken


def test_rows_before_the_sequence_choose_nothing():
    indices, _ = lightning_indexer(*drawn([5, 2], [3, 0]), topk=4)
    assert (indices[:2] == -1).all() and (indices[5:] == -1).all()
    assert indices[4].sort().values.tolist() == [-1, 0, 1, 2]
