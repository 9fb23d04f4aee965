"""CUDNN_ATTN: cuDNN's fused attention through PyTorch, the fastest exact backend for images and video on Hopper.

It reaches 611 of 788 TFLOP/s at Flux's shape on an H200. cuDNN does not support a single key; since PyTorch is restricted to
cuDNN, that raises an error instead of selecting another kernel.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn.capabilities import Capabilities, Device, Feature, Request
from attn.diffusion.backends import cudnn
from attn.diffusion.backends.dense import DenseCall
from attn.torch.diffusion.backends._dense import DenseBackend
from attn.torch.diffusion.backends._sdpa import SDPABase


class CuDNNAttentionBackend(DenseBackend):
    name = "CUDNN_ATTN"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=cudnn.HEAD_SIZES,
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
        archs=(("cuda", ("sm_80+",)),),
    )
    min_keys = 2

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) + cudnn.head_size_reasons(request, device)


class CuDNNAttentionImpl(SDPABase, backend=CuDNNAttentionBackend):
    def _attend(self, call: DenseCall) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super()._attend(call)

    def _attend_heads_first(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super()._attend_heads_first(query, key, value)
