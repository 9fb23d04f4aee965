"""Batches, and their answers by the float64 oracle, for the jax tests.

Everything shares one set of shapes, since compiling is what takes the time here.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.jax.testing import compiling_fast
from tests.jax import mla_batches
from tests.levels import LEVEL

H, K, D, P, N = 4, 2, 16, 8, 40
#: rms error of a row over its rms (docs/semantics.md §16, rule B)
ROW_ERROR = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass
class Batch:
    """A call in NumPy: q, k, v rounded to `dtype`, a cache [2, N, P, K, D] filled with context, and the neutral batch."""

    query_lens: list[int]
    seq_lens: list[int]
    dtype: str = "float32"
    causal: bool = True
    tree: Any = None
    seed: int = 0
    q: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)
    cache: Any = field(init=False)
    common: CommonAttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        rows = sum(self.query_lens)
        self.q, self.k, self.v = (self._normal(rng, rows, heads, D) for heads in (H, K, K))
        self.cache = self._normal(rng, 2, N, P, K, D)
        ids, tables = iter(rng.permutation(N)), []
        for length in self.seq_lens:
            tables.append([next(ids) for _ in range(-(-length // P))])
        self.common = CommonAttentionMetadata.from_lens(
            self.query_lens, self.seq_lens, tables, P, causal=self.causal, tree_mask=self.tree, strict=False
        )

    def _normal(self, rng: np.random.Generator, *shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(self.dtype))

    def rows(self, r: int) -> slice:
        start = self.common.query_start_loc
        return slice(int(start[r]), int(start[r + 1]))

    def written(self) -> tuple[Any, Any]:
        """The cache's halves as the oracle writes them."""
        return reference.write_kv(self.k, self.v, self.cache[0], self.cache[1], self.common.slot_mapping)

    def expected(self, keys: Any = None, values: Any = None, **rules: Any) -> tuple[Any, Any]:
        """(out, lse) in float64; the cache is `keys`, `values` [N, P, K, D], or the batch's own after its write."""
        if keys is None:
            keys, values = self.written()
        requests = {name: getattr(self.common, name) for name in ("query_start_loc", "seq_lens", "block_table")}
        rules |= {"causal": self.causal, "tree_mask": self.tree}
        return reference.paged_attention(self.q, keys, values, **requests, **rules)


def assert_close(got: Any, want: Any, dtype: str = "float32") -> None:
    """(out, lse) against the oracle's: NaN and empty rows in the same places, and each row within its dtype's error."""
    for name, actual, expected in (("out", got[0], want[0]), ("lse", got[1], want[1])):
        actual = np.asarray(actual, np.float64)
        assert actual.shape == expected.shape, name
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), name)
    out, lse = np.asarray(got[0], np.float64), np.asarray(got[1], np.float64)
    with np.errstate(invalid="ignore"):
        error = np.sqrt(np.nanmean((out - want[0]) ** 2, axis=-1))
        size = np.sqrt(np.nanmean(want[0] ** 2, axis=-1))
    assert not (error > ROW_ERROR[dtype] * (size + 1e-3)).any(), np.nanmax(error / (size + 1e-3))
    live = np.isfinite(want[1])
    np.testing.assert_array_equal(lse[~live & ~np.isnan(want[1])], -np.inf)
    np.testing.assert_allclose(lse[live], want[1][live], atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module", autouse=True)
def _compiling_fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `make test` XLA optimises little for a CPU, which halves these tests' time. Under `--full` it compiles as it does for
    users, and tests/test_conformance.py lets it at every level. A module that compares codes bit for bit sets `EXACT`: XLA of
    jax 0.10.1 then rounds twice from float32 to fp8."""
    if os.environ.get(LEVEL) == "full" or jax.default_backend() != "cpu" or getattr(request.module, "EXACT", False):
        yield
        return
    with compiling_fast():
        yield


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """A mixed batch by default: decodes, a chunk, a prefill, one without rows, one with more rows than keys."""

    def make(query_lens: Any = (1, 5, 20, 0, 3, 1), seq_lens: Any = (33, 40, 20, 9, 2, 8), **more: Any) -> Batch:
        return Batch(list(query_lens), list(seq_lens), **more)

    return make


@pytest.fixture(scope="session")
def make_mla() -> Callable[..., mla_batches.Batch]:
    return mla_batches.Batch


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    return assert_close
