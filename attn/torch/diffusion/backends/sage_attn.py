"""SAGE_ATTN: SageAttention, int8 queries and keys: approximate, so chosen only within an error budget.

The package subtracts the keys' mean in place, changing its caller's tensor: it gets a copy. It knows neither masks nor
grouped causality (rows and keys must be equally many). PyPI's 1.0.6 has Triton kernels for head sizes 64, 96 and 128;
later versions take the same arguments.
"""

import torch

from attn.capabilities import Capabilities
from attn.diffusion.backends.dense import Keys
from attn.errors import UnsupportedError
from attn.torch.diffusion.backends._dense import DenseBackend, DenseImpl


class SageAttentionBackend(DenseBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(64, 96, 128),
        packages=("sageattention",),
        install="sageattention",
        archs=(("cuda", ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121")),),
    )
    error = 0.02
    error_note = "int8 queries and keys: 0.01-0.02 on normal inputs, version 1.0.6"

    @staticmethod
    def get_name() -> str:
        return "SAGE_ATTN"

    @staticmethod
    def get_impl_cls() -> type["SageAttentionImpl"]:
        return SageAttentionImpl


class SageAttentionImpl(DenseImpl):
    backend = SageAttentionBackend

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys) -> torch.Tensor:
        from sageattention import sageattn

        if keys.present is not None:
            raise UnsupportedError("SAGE_ATTN: a mask of keys is not supported: pad nothing, or take another backend")
        if self.causal and query.shape[1] != key.shape[1]:
            shape = f"{query.shape[1]} rows and {key.shape[1]} keys"
            raise UnsupportedError(f"SAGE_ATTN: causal with {shape}: supports equally many")
        out: torch.Tensor = sageattn(
            query.contiguous(), key.clone(), value.contiguous(), tensor_layout="NHD", is_causal=self.causal,
            sm_scale=self.scale,
        )  # fmt: skip
        return out
