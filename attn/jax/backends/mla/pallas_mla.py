"""PALLAS_MLA: this package's Pallas kernel for multi-head latent attention on TPUs.

One launch writes the new tokens and attends all pages. It is fast because a page is loaded once for keys and values, and
scores never leave VMEM. On a CPU the same kernel runs in TPU interpret mode, thousands of times slower, for tests. For
`fp8_ds_mla` caches, and on GPUs, use XLA_MLA.
"""

import jax
import jax.numpy as jnp

from attn.capabilities import Feature
from attn.jax import records
from attn.jax.backends import _calls
from attn.jax.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl, write
from attn.jax.kernels.tpu import mla_attention as kernel
from attn.jax.kernels.tpu._plan import Batch

#: Compiled once per shape; layers that differ only in numbers share the program.
_attend = _calls.in_32_bits(jax.jit(kernel.mla_attention, static_argnames="rules"))


class PallasMLABackend(MLACommonBackend):
    name = "PALLAS_MLA"
    # a page is one DMA of whole tiles; pages longer than a block of keys would have to be split
    block_sizes = (16, 32, 64, 128, 256)
    interpreted_on = ("cpu",)
    capabilities = records.PALLAS(
        kv_cache_dtypes=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        features=frozenset({Feature.MLA, Feature.NON_CAUSAL, Feature.DCP, Feature.NAN_SAFE}),
        refusals=records.NOT_INVARIANT,
    )

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[N, P, lanes]: L + Dr padded with zeros to a multiple of 128 (640 for 576); `logical_kv_cache` includes them."""
        return (num_blocks, block_size, kernel.row_lanes(head_size))


class PallasMLAImpl(MLACommonImpl, backend=PallasMLABackend):
    def _write(self, rows: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        # the kernel multiplies whole lanes, so what pads a row must be zeros
        return write(jnp.pad(rows, ((0, 0), (0, kv_cache.shape[2] - rows.shape[1]))), kv_cache, slot_mapping)

    def _write_and_decode(self, call: DecodeCall) -> tuple[jax.Array, jax.Array, jax.Array]:
        meta, lse = call.meta, self.need_to_return_lse_for_decode
        rules = kernel.MLAParams(self.kv_lora_rank, self.scale, meta.max_query_len, meta.causal, lse)
        batch = Batch(*meta.requests, self._slots(meta))
        return _attend(call.query, call.rows, call.kv_cache, batch, rules, k_scale=call.k_scale)
