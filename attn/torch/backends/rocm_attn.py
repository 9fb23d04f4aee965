"""ROCM_ATTN: the kernels of TRITON_ATTN under the name by which AMD's GPUs have always asked for them.

The AMD launch rules live with the kernels, which ask what they are compiled for; what this class adds is its platform,
so that it is chosen there and refused elsewhere.
"""

from attn.torch.backends import _triton


class RocmAttentionBackend(_triton.TritonPagedBackend):
    name = "ROCM_ATTN"
    capabilities = _triton.capabilities(("rocm",))


class RocmAttentionImpl(_triton.TritonPagedImpl, backend=RocmAttentionBackend):
    pass
