"""The float64 NumPy oracle: what every backend must compute, written for correctness over speed.

It imports only NumPy and the standard library, so that torch and jax share it. Attention functions return
`(out, lse)` in float64: lse is the natural log and excludes sinks, a row without keys is (0, -inf), masked
values are selected away and never multiplied, and a visible NaN reaches exactly the rows that see it. No
optimised backend imports this package.

Shape letters: T tokens in the batch, R requests, S longest context, H query heads, K kv heads,
D head_size, N blocks, P block_size; n queries and m keys of one sequence; Dv value head size.
"""

from attn.reference._cascade import cascade_attention
from attn.reference._dcp import dcp_key_positions, dcp_local_lens
from attn.reference._dense import attention
from attn.reference._masks import (
    alibi_slopes,
    block_sparse_mask,
    chunked_mask,
    sliding_window_to_pair,
    tree_depths,
    tree_mask_from_choices,
    visible_mask,
)
from attn.reference._mla import mla_absorbed, mla_unabsorbed, pack_fp8_ds_mla, sparse_mla, unpack_fp8_ds_mla
from attn.reference._paged import paged_attention, write_kv
from attn.reference._quant import (
    dequantize,
    from_bf16_bits,
    pack_int4,
    per_token_head_scales,
    quantize,
    to_bf16_bits,
    unpack_int4,
)
from attn.reference._states import apply_sinks, merge_states

__all__ = [
    "alibi_slopes",
    "apply_sinks",
    "attention",
    "block_sparse_mask",
    "cascade_attention",
    "chunked_mask",
    "dcp_key_positions",
    "dcp_local_lens",
    "dequantize",
    "from_bf16_bits",
    "merge_states",
    "mla_absorbed",
    "mla_unabsorbed",
    "pack_fp8_ds_mla",
    "pack_int4",
    "paged_attention",
    "per_token_head_scales",
    "quantize",
    "sliding_window_to_pair",
    "sparse_mla",
    "to_bf16_bits",
    "tree_depths",
    "tree_mask_from_choices",
    "unpack_fp8_ds_mla",
    "unpack_int4",
    "visible_mask",
    "write_kv",
]
