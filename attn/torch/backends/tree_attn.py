"""TREE_ATTN: speculative decoding's draft trees, verified in one pass by the kernels of TRITON_ATTN.

A request of at most W new tokens sees all its context and, among the new ones, what its tree says; longer requests are
causal. A tree is part of the metadata (`tree_mask`), one a request.
"""

from attn.torch.backends import _triton


class TreeAttentionBackend(_triton.TritonPagedBackend):
    name = "TREE_ATTN"
    capabilities = _triton.capabilities(("cuda", "rocm"), attn_types=("decoder",))


class TreeAttentionImpl(_triton.TritonPagedImpl, backend=TreeAttentionBackend):
    pass
