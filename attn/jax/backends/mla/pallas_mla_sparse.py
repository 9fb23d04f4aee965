"""PALLAS_MLA_SPARSE: this package's Pallas kernel for latent attention over chosen keys (DeepSeek-V3.2) on TPUs.

Keys are copied to VMEM one by one and attended there; XLA_MLA_SPARSE gathers them in HBM first. A key costs as much time as
three to four keys of PALLAS_MLA, so use that for contexts up to a few times `topk`. On a CPU the kernel runs in TPU interpret
mode, thousands of times slower, for tests. For caches of other dtypes than bfloat16, use XLA_MLA_SPARSE.
"""

import math

import jax
import jax.numpy as jnp

from attn.capabilities import Feature
from attn.jax import records
from attn.jax.backends import _calls
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend
from attn.jax.backends.mla._sparse import SparseMLAImpl
from attn.jax.kernels.tpu import mla_sparse_attention as kernel

#: Compiled once per shape; layers that differ only in numbers share the program.
_attend = _calls.in_32_bits(jax.jit(kernel.mla_sparse_attention, static_argnames=("kv_lora_rank", "scale")))


class PallasMLASparseBackend(MLACommonBackend):
    name = "PALLAS_MLA_SPARSE"
    interpreted_on = ("cpu",)
    capabilities = records.PALLAS(
        dtypes=("bfloat16",),
        kv_cache_dtypes=("auto", "bfloat16"),
        features=frozenset({Feature.SPARSE_MLA, Feature.DCP, Feature.NAN_SAFE}),
        refusals=records.NOT_INVARIANT,
    )

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[N, P, words, 2, 128]: L + Dr padded with zeros to a multiple of 256: 768 for 576; so is a logical row."""
        return (num_blocks, block_size, *kernel.row_shape(head_size))

    @staticmethod
    def logical_kv_cache(kv_cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = kv_cache.reshape(*kv_cache.shape[:2], 1, -1)
        return rows, rows


class PallasMLASparseImpl(SparseMLAImpl, backend=PallasMLASparseBackend):
    def _write(self, rows: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        # zeros pad a row, since the kernel multiplies all of its words
        width = math.prod(kv_cache.shape[2:])
        return super()._write(jnp.pad(rows, ((0, 0), (0, width - rows.shape[1]))), kv_cache, slot_mapping)

    def _decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
        rules = {"kv_lora_rank": self.kv_lora_rank, "scale": self.scale}
        return _attend(call.query, call.kv_cache, self._indices(call), call.meta.requests, **rules)
