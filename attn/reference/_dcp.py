"""Decode context parallelism: which tokens of a sequence a rank holds (docs/semantics.md §15).

Token t is on rank (t // interleave) % world. A rank's keys are strided, so a causal rule over them uses
their global positions: pass `dcp_key_positions` to `attention` as key_positions.
"""

import numpy as np
import numpy.typing as npt

from attn.reference._check import I64, ints, require, whole


def dcp_local_lens(seq_lens: npt.ArrayLike, world: int, rank: int, interleave: int) -> I64:
    """Return how many of each sequence's tokens are on this rank: int64, the shape of `seq_lens`.

    base = L // I // W * I;  base + clip(L - base * W - rank * I, 0, I).
    """
    lengths = ints("seq_lens", seq_lens)
    require(bool((lengths >= 0).all()), f"seq_lens={lengths.tolist()} (>= 0)")
    size, index, run = _check_group(world, rank, interleave)
    # Every full round over the ranks (W * I tokens) leaves I tokens on each; of the tokens after the last full round, a
    # rank holds those past the I of each rank before it, at most I.
    base = lengths // run // size * run
    return base + np.clip(lengths - base * size - index * run, 0, run)


def dcp_key_positions(seq_len: int, world: int, rank: int, interleave: int) -> I64:
    """Return the global positions of this rank's keys, in cache order: int64 [local length], increasing."""
    size, index, run = _check_group(world, rank, interleave)
    local = np.arange(int(dcp_local_lens(whole("seq_len", seq_len), size, index, run)), dtype=np.int64)
    # The inverse of (t // I) % W = r: the local key's round, then the rank's place in it, then the place within the run.
    return local // run * size * run + index * run + local % run


def _check_group(world: int, rank: int, interleave: int) -> tuple[int, int, int]:
    size = whole("world", world, least=1)
    return size, whole("rank", rank, most=size - 1), whole("interleave", interleave, least=1)
