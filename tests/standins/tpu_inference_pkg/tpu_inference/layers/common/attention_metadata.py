"""A batch as the engine describes it, on all devices of the mesh."""

from dataclasses import dataclass
from functools import partial

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "input_positions",
        "block_tables",
        "seq_lens",
        "query_start_loc",
        "request_distribution",
        "mamba_state_indices",
        "pcp",
    ],
    meta_fields=["padded_num_reqs", "pcp_cache_pages", "use_causal_mask"],
)
@dataclass
class AttentionMetadata:
    input_positions: jax.Array
    block_tables: jax.Array | None = None
    seq_lens: jax.Array | None = None
    query_start_loc: jax.Array | None = None
    request_distribution: jax.Array | None = None
    mamba_state_indices: jax.Array | None = None
    pcp: object | None = None
    padded_num_reqs: int = -1
    pcp_cache_pages: int | None = None
    use_causal_mask: bool = True


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["input_positions", "seq_lens", "query_start_loc", "request_distribution", "mamba_state_indices"],
    meta_fields=["padded_num_reqs"],
)
@dataclass
class SharedAttentionMetadata:
    input_positions: jax.Array
    seq_lens: jax.Array | None = None
    query_start_loc: jax.Array | None = None
    request_distribution: jax.Array | None = None
    mamba_state_indices: jax.Array | None = None
    padded_num_reqs: int = -1
