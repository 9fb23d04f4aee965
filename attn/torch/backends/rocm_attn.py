"""ROCM_ATTN: the kernels of TRITON_ATTN, under the established name for AMD GPUs.

The kernels choose AMD's launch rules by the target they are compiled for. This class only limits the platform, so that it
is available on ROCm alone.
"""

from attn.torch.backends import _triton


class RocmAttentionBackend(_triton.TritonPagedBackend):
    name = "ROCM_ATTN"
    capabilities = _triton.capabilities(("rocm",))


class RocmAttentionImpl(_triton.TritonPagedImpl, backend=RocmAttentionBackend):
    pass
