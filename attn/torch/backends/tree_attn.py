"""TREE_ATTN: speculative decoding's draft trees, verified in one pass by the kernels of TRITON_ATTN.

A request of at most W new tokens sees all its context and, among the new ones, what its tree says; longer requests are
causal. A tree is part of the metadata (`tree_mask`), one a request.
"""

from attn.torch.backends import _triton


class TreeAttentionBackend(_triton.TritonPagedBackend):
    capabilities = _triton.capabilities(("cuda", "rocm"), attn_types=("decoder",))

    @staticmethod
    def get_name() -> str:
        return "TREE_ATTN"

    @staticmethod
    def get_impl_cls() -> type["TreeAttentionImpl"]:
        return TreeAttentionImpl


class TreeAttentionImpl(_triton.TritonPagedImpl):
    backend = TreeAttentionBackend
