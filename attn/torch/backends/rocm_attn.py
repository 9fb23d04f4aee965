"""ROCM_ATTN: the kernels of TRITON_ATTN under the name by which AMD's GPUs have always asked for them.

The AMD launch rules live with the kernels, which ask what they are compiled for; what this class adds is its platform,
so that it is chosen there and refused elsewhere.
"""

from attn.torch.backends import _triton


class RocmAttentionBackend(_triton.TritonPagedBackend):
    capabilities = _triton.capabilities(("rocm",))

    @staticmethod
    def get_name() -> str:
        return "ROCM_ATTN"

    @staticmethod
    def get_impl_cls() -> type["RocmAttentionImpl"]:
        return RocmAttentionImpl


class RocmAttentionImpl(_triton.TritonPagedImpl):
    backend = RocmAttentionBackend
