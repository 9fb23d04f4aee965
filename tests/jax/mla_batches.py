"""MLA batches, and their answers by the float64 oracle, for the jax tests; small, since compiling takes the time."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from attn import reference
from attn.backends.metadata import CommonAttentionMetadata
from attn.dtypes import kv_cache_element
from attn.jax import MLAAttention
from attn.jax.backends.mla._mla import latent_rows

#: rms error of a row over its rms (docs/semantics.md §16, rule B)
ROW_ERROR = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALL = (32, 16, 24, 20)  #: L, Dr, Dn, Dv
DEEPSEEK = (512, 64, 128, 128)


@dataclass
class Batch:
    """A call in NumPy, and a layer with its cache filled: every slot that no request owns holds NaN, where it can."""

    query_lens: tuple[int, ...] = (1, 5, 20, 0, 3, 1)
    seq_lens: tuple[int, ...] = (33, 40, 20, 9, 2, 8)
    dims: tuple[int, int, int, int] = SMALL
    heads: int = 4
    page: int = 16
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    backend: str = "XLA_MLA"
    causal: bool = True
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        (rank, rope, nope, value), rows = self.dims, sum(self.query_lens)

        def draw(*shape: int, gain: float = 1.0) -> Any:
            return (rng.standard_normal(shape, np.float32) * gain).astype(jnp.dtype(self.dtype))

        self.q = draw(rows, self.heads, nope + rope)
        self.kv_c, self.k_pe = draw(rows, rank), draw(rows, rope)
        self.w = draw(rank, self.heads, nope + value, gain=rank**-0.5)
        self.num_blocks = sum(-(-length // self.page) for length in self.seq_lens) + 2
        ids = iter(rng.permutation(self.num_blocks))
        tables = [[next(ids) for _ in range(-(-length // self.page))] for length in self.seq_lens]
        self.common = CommonAttentionMetadata.from_lens(
            self.query_lens, self.seq_lens, tables, self.page, causal=self.causal, strict=False
        )
        given = {name: getattr(self, name) for name in ("kv_cache_dtype", "dtype", "backend", "k_scale")}
        sizes = (self.heads, rank, nope, rope, value)
        self.layer = MLAAttention(*sizes, jnp.asarray(self.w), block_size=self.page, **given, **self.options)
        self.layer.impl.need_to_return_lse_for_decode = True
        self.context = draw(self.num_blocks * self.page, rank + rope)
        live = np.zeros(self.num_blocks * self.page, bool)
        for r, length in enumerate(self.seq_lens):
            live[self.slots_of(r)[: length - self.query_lens[r]]] = True
        filler = self.context if self.element == "uint8" else np.where(live[:, None], self.context, np.nan)
        empty = self.layer.new_kv_cache(self.num_blocks)
        self.cache = self.layer.impl._write(self.stored(filler), empty, jnp.arange(len(live)))
        self.metadata = self.layer.backend.get_builder_cls()(self.layer.kv_cache_spec).build(0, self.common)

    @property
    def element(self) -> str:
        return kv_cache_element(self.kv_cache_dtype, self.dtype)

    def slots_of(self, r: int) -> Any:
        position = np.arange(self.seq_lens[r])
        return self.common.block_table[r, position // self.page] * self.page + position % self.page

    def stored(self, rows: Any) -> Any:
        rows = jnp.asarray(np.asarray(rows).astype(jnp.dtype(self.dtype)))
        rank = self.dims[0]
        return latent_rows(rows[:, :rank], rows[:, rank:], jnp.dtype(self.element), self.k_scale)

    def arguments(self) -> tuple[Any, ...]:
        """(q, kv_c, k_pe, kv_cache, attn_metadata), rows that the builder adds filled with NaN."""
        missing = self.metadata.slot_mapping.shape[0] - len(self.q)
        pad = [np.concatenate([x, np.full((missing, *x.shape[1:]), np.nan, x.dtype)]) for x in (self.q, self.kv_c, self.k_pe)]
        return *map(jnp.asarray, pad), jnp.array(self.cache), self.metadata

    def rows_of(self, cache: Any) -> Any:
        """What every slot of a cache is worth, [N * P, L + Dr] in float64."""
        rows = np.asarray(self.layer.backend.logical_kv_cache(cache)[0]).reshape(self.num_blocks * self.page, -1)
        if rows.dtype == np.uint8:
            return np.concatenate(reference.unpack_fp8_ds_mla(rows), axis=1)
        return rows[:, : self.dims[0] + self.dims[1]].astype(np.float64) * np.float64(np.float32(self.k_scale))

    def expected(self, cache: Any, mask_of: Any = None) -> tuple[Any, Any]:
        """(out [T, H, Dv], lse [H, T]) over a cache that has been written, unabsorbed, in float64."""
        rank, _, nope, value = self.dims
        out, lse = np.zeros((len(self.q), self.heads, value)), np.full((self.heads, len(self.q)), -np.inf)
        start, w = self.common.query_start_loc, self.w.astype(np.float64)
        everything = self.rows_of(cache)
        for r in range(len(self.query_lens)):
            mine, rows = slice(start[r], start[r + 1]), everything[self.slots_of(r)]
            q = self.q[mine].astype(np.float64)
            halves = q[..., :nope], q[..., nope:], rows[:, :rank], rows[:, rank:], w[..., :nope], w[..., nope:]
            seen = {"causal": self.causal} if mask_of is None else {"causal": False, "mask": mask_of(r)}
            out[mine], lse[:, mine] = reference.mla_unabsorbed(*halves, scale=(nope + self.dims[1]) ** -0.5, **seen)
        return out, lse

    def check(self, got: Any, cache: Any, mask_of: Any = None) -> None:
        """Output, lse, padding and the cache's other slots."""
        (out, lse), rows = got, len(self.q)
        want, want_lse = self.expected(cache, mask_of)
        out, lse = np.asarray(out).astype(np.float32), np.asarray(lse)
        error = np.sqrt(np.mean((out[:rows] - want) ** 2, axis=-1))
        size = np.sqrt(np.mean(want**2, axis=-1))
        assert (error <= ROW_ERROR[self.dtype] * (size + 1e-3)).all(), np.max(error / (size + 1e-3))
        assert not out[rows:].any() and np.isneginf(lse[:, rows:]).all()
        seen = np.isfinite(want_lse)
        assert np.isneginf(lse[:, :rows][~seen]).all()
        # the absorbed query is rounded to the activations' dtype
        limit = 1e-4 if self.dtype == "float32" else 2e-2
        np.testing.assert_allclose(lse[:, :rows][seen], want_lse[seen], atol=limit, rtol=1e-5)
        slots = self.common.slot_mapping
        kept = np.setdiff1d(np.arange(self.num_blocks * self.page), slots)
        before, after = (np.asarray(x).reshape(self.num_blocks * self.page, -1) for x in (self.cache, cache))
        np.testing.assert_array_equal(after[kept].view(np.uint8), before[kept].view(np.uint8))
        stored = np.asarray(self.stored(np.concatenate([self.kv_c, self.k_pe], axis=1)))
        written = slots >= 0
        np.testing.assert_array_equal(after[slots[written], : stored.shape[1]], stored[written])
