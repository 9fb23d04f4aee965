"""Bad arguments to the oracle: a ValueError with the field, its value and what is allowed."""

import numpy as np
import pytest

from attn import reference

Q, KV, CACHE = np.zeros((2, 4, 8)), np.zeros((3, 2, 8)), np.zeros((5, 4, 2, 8))
MLA = np.zeros((1, 3, 4)), np.zeros((1, 3, 2)), np.zeros((2, 6)), np.zeros((2, 2))
GOOD = {"query_start_loc": [0, 2], "seq_lens": [3], "block_table": [[1]]}


def paged(**kwargs):
    return lambda: reference.paged_attention(Q, CACHE, CACHE, **{**GOOD, **kwargs})


def cascade(**kwargs):
    return lambda: reference.cascade_attention(
        Q,
        CACHE,
        CACHE,
        **{**GOOD, "seq_lens": [7], "block_table": [[1, 2]], "common_prefix_len": 4, **kwargs},
    )


def dense(**kwargs):
    return lambda: reference.attention(Q, KV, KV, **kwargs)


def sparse(indices, rank=2):
    query = np.zeros((len(indices), 1, 4))
    return lambda: reference.sparse_mla(query, np.zeros((3, 4)), indices, scale=1.0, kv_lora_rank=rank)


BAD = {
    "num_heads=6 is not a multiple of num_kv_heads=4": lambda: reference.attention(
        np.zeros((1, 6, 8)), np.zeros((1, 4, 8)), np.zeros((1, 4, 8))
    ),
    "key has shape=(3, 2, 8) (expected (3, 2, 9))": lambda: reference.attention(np.zeros((1, 4, 9)), KV, KV),
    "value has shape=(4, 2, 8) (expected (3, 2, 8))": lambda: reference.attention(Q, KV, np.zeros((4, 2, 8))),
    "query has shape=(4, 8) (3 dimensions)": lambda: reference.attention(Q[0], KV, KV),
    "a side of window=-1 (>= 0)": dense(window=(-1, 0)),
    "window=4 (a pair": dense(window=4),
    "logits_soft_cap=-1.0 (> 0": dense(logits_soft_cap=-1.0),
    "scale=nan (one finite number)": dense(scale=np.nan),
    "mask has dtype=float64 (bool": dense(mask=np.zeros((2, 3))),
    "mask has shape=(3, 2) (broadcastable to (4, 2, 3))": dense(mask=np.ones((3, 2), bool)),
    "sinks has shape=(2,) (expected (4,))": dense(sinks=[0.0, 0.0]),
    "alibi_slopes has shape=(3,) (expected (4,))": dense(alibi_slopes=[0.0] * 3),
    "key_positions has shape=(2,) (expected (3,))": dense(key_positions=[0, 1]),
    "query_positions has dtype=float64 (an integer dtype)": dense(query_positions=[0.0, 1.0]),
    "key has dtype=uint8 (a float or signed integer dtype": lambda: reference.attention(Q, KV.astype(np.uint8), KV),
    "query_start_loc=[0, 3] (from 0, never falling, at most T=2)": paged(query_start_loc=[0, 3]),
    "query_start_loc=[1, 2] (from 0": paged(query_start_loc=[1, 2]),
    "query_start_loc has shape=(3,) (expected (2,))": paged(query_start_loc=[0, 1, 2]),
    "seq_lens=[-1] (>= 0)": paged(seq_lens=[-1]),
    "seq_lens[0]=5 needs 2 blocks, block_table has 1 columns": paged(seq_lens=[5]),
    "block_table[0] contains [5] (0..4)": paged(block_table=[[5]]),
    "block_table has 2 rows (expected 1": paged(block_table=[[1], [1]]),
    "k_scale has shape=(3,) (scalar or (2,))": paged(k_scale=[1.0, 1.0, 1.0]),
    "mask has 2 entries (expected 1": paged(mask=[None, None]),
    "key_cache has dtype=uint8": lambda: reference.paged_attention(Q, CACHE.astype(np.uint8), CACHE, **GOOD),
    "tree_mask replaces the causal triangle": paged(tree_mask=np.ones((1, 2, 2), bool), causal=False),
    "tree_mask has shape=(1, 2, 3) (broadcastable to (1, 2, 2))": paged(tree_mask=np.ones((1, 2, 3), bool)),
    "seq_lens[0]=1 is less than its 2 tree tokens": paged(tree_mask=np.ones((1, 2, 2), bool), seq_lens=[1]),
    "common_prefix_len=3 is not a multiple of block_size=4": cascade(common_prefix_len=3),
    "window=(1, 0) (cascade attention supports none)": cascade(window=(1, 0)),
    "alibi_slopes given (cascade attention supports none)": cascade(alibi_slopes=[1.0] * 4),
    "common_prefix_len=8 is more than the shortest context (5 keys)": cascade(common_prefix_len=8),
    "columns of block_table differ": lambda: reference.cascade_attention(
        Q,
        CACHE,
        CACHE,
        query_start_loc=[0, 1, 2],
        seq_lens=[6, 6],
        block_table=[[0, 1], [2, 3]],
        common_prefix_len=4,
    ),
    "slot_mapping contains [20] (-1..19)": lambda: reference.write_kv(KV, KV, CACHE, CACHE, [0, 20, 1]),
    "slot_mapping contains [-2] (-1..19)": lambda: reference.write_kv(KV, KV, CACHE, CACHE, [0, -2, 1]),
    "key has dtype=float64 for a cache of uint8 codes": lambda: reference.write_kv(
        KV, KV, CACHE.astype(np.uint8), CACHE, [0, 1, 2]
    ),
    "attn_type='causal' (decoder, encoder_decoder, encoder, encoder_only)": lambda: reference.sliding_window_to_pair(
        4, "causal"
    ),
    "sliding_window=0 (>= 1)": lambda: reference.sliding_window_to_pair(0, "decoder"),
    "num_heads=0 (>= 1)": lambda: reference.alibi_slopes(0),
    "choices are not sorted": lambda: reference.tree_mask_from_choices([(0, 0), (0,)]),
    "without its parent (0,)": lambda: reference.tree_depths([(1,), (0, 0)]),
    "choices contain a path twice": lambda: reference.tree_mask_from_choices([(0,), (0,)]),
    "head_offset=2 + num_heads=4 is more than total_heads=4": lambda: reference.block_sparse_mask(
        1, 1, num_heads=4, block_size=1, local_blocks=1, vert_stride=1, head_offset=2
    ),
    "chunk=0 (>= 1)": lambda: reference.chunked_mask(1, 1, 0),
    "indices row 1 lists key 2 more than once": sparse([[0, 1], [2, 2]]),
    "indices contain -2 (>= -1)": sparse([[0, -2]]),
    "kv_lora_rank=5 (1..4)": sparse([[0, 1]], rank=5),
    "w_uk has shape=(6, 3, 5) (expected (6, 3, 4))": lambda: reference.mla_absorbed(
        *MLA, np.zeros((6, 3, 5)), np.zeros((6, 3, 5)), scale=1.0
    ),
    "rank=2 (0..1)": lambda: reference.dcp_local_lens([3], 2, 2, 1),
    "interleave=0 (>= 1)": lambda: reference.dcp_key_positions(3, 2, 0, 0),
    "got 1 outs and 2 lses": lambda: reference.merge_states([np.zeros((1, 1, 1))], [np.zeros((1, 1))] * 2),
    "lses[1] has shape=(2, 1) (expected (1, 2))": lambda: reference.merge_states(
        [np.zeros((2, 1, 1))] * 2, [np.zeros((1, 2)), np.zeros((2, 1))]
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_raise_value_error(message):
    with pytest.raises(ValueError) as caught:
        BAD[message]()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"spans": [[0, 1]]}, r"spans has shape=\(1, 2\) \(expected \(3, 2\)\)"),  # would be that of every row
        ({"spans": [[0.0, 1.0]] * 3}, "spans has dtype=float64"),
        ({"tree": [[True, True, True]]}, r"tree has shape=\(1, 3\)"),
        ({"tree": [[1, 0, 0], [1, 1, 0], [1, 0, 1]]}, "tree has dtype=int64"),
        ({"prefix": 2.5}, r"prefix=2.5 \(an integer\)"),
        ({"prefix": -1}, "prefix=-1"),
    ],
)
def test_what_rows_see_is_checked(given, words):
    with pytest.raises(ValueError, match=words):
        reference.visible_mask(3, 5, **given)


def test_spans_and_trees_may_be_lists():
    spans = [[-1, -1], [0, 2], [0, 2]]
    assert (reference.visible_mask(3, 3, spans=spans) == reference.visible_mask(3, 3, spans=np.array(spans))).all()
    tree = [[True, False], [True, True]]
    assert reference.visible_mask(2, 3, tree=tree).tolist() == [[True, True, False], [True, True, True]]
