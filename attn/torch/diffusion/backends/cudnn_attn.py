"""CUDNN_ATTN: cuDNN's fused attention through PyTorch, the fastest exact backend for images and video on Hopper.

It reaches 611 of 788 TFLOP/s at Flux's shape on an H200. cuDNN does not support a single key; since PyTorch is restricted to
cuDNN, that raises an error instead of selecting another kernel.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn.arguments import fold_sign
from attn.capabilities import Device, Feature, Request
from attn.diffusion.backends import cudnn
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch import records
from attn.torch.alignment import aligned
from attn.torch.diffusion.backends._sdpa import SDPABase


class CuDNNAttentionBackend(DiffusionAttentionBackend):
    name = "CUDNN_ATTN"
    capabilities = records.CUDA(head_sizes=cudnn.HEAD_SIZES, features=frozenset({Feature.MASK, Feature.BACKWARD}))
    min_keys = 2

    @classmethod
    def why_not(cls, request: Request, device: Device | None = None) -> list[str]:
        return super().why_not(request, device) + cudnn.head_size_reasons(request, device)


class CuDNNAttentionImpl(SDPABase, backend=CuDNNAttentionBackend):
    def launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        general = super().launcher(query, key, value)
        # as in `_attend_heads_first`: such a call needs a mask
        if self.causal and query.shape[1] != key.shape[1]:
            return general

        def launch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            # the operator that `sdpa_kernel` would lead to: entering and leaving that costs the host 100 us
            out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                fold_sign(aligned(query), self.signed_scale),
                aligned(key),
                aligned(value),
                attn_bias=None,
                compute_log_sumexp=False,
                is_causal=self.causal,
                scale=self.scale,
            )[0]
            return out.transpose(1, 2)

        return launch

    def _attend(self, call: DenseCall) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super()._attend(call)

    def _attend_heads_first(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return super()._attend_heads_first(query, key, value)
