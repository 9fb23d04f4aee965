"""TORCH_SDPA: PyTorch's own choice of kernel, on any device, with any mask, differentiable: the universal fallback."""

import torch

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.functional import attention
from attn.torch.diffusion.backends._dense import DenseBackend
from attn.torch.diffusion.backends._sdpa import SDPABase


class SDPABackend(DenseBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm", "xpu", "npu", "cpu"),
        dtypes=("float32", "float16", "bfloat16", "float64"),
        head_sizes=(MultipleOf(1),),
        features=frozenset({Feature.MASK, Feature.BACKWARD}),
    )

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type["SDPAImpl"]:
        return SDPAImpl


class SDPAImpl(SDPABase):
    backend = SDPABackend
    can_return_lse = True

    def _attend_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # torch keeps the log-sum-exp to itself: the written-out formula has it
        mask = keys.mask if keys.present is None else keys.present[:, None, None, :]
        out, lse = attention(query, key, value, causal=self.causal, scale=self.scale, mask=mask, return_lse=True)
        return out, lse
