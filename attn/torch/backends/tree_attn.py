"""TREE_ATTN: verify the draft trees of speculative decoding in one pass, with the kernels of TRITON_ATTN.

The metadata holds one tree per request (`tree_mask`, W wide). In a request of at most W new tokens, each token sees the
whole context and those new tokens that the tree allows; longer requests are causal.
"""

from attn.torch.backends import _triton


class TreeAttentionBackend(_triton.TritonPagedBackend):
    name = "TREE_ATTN"
    capabilities = _triton.capabilities(("cuda", "rocm"), attn_types=("decoder",))


class TreeAttentionImpl(_triton.TritonPagedImpl, backend=TreeAttentionBackend):
    pass
