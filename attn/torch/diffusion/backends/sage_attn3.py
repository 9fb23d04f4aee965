"""SAGE_ATTN_3: SageAttention 3's FP4 kernels for Blackwell: approximate, so chosen only within an error budget.

`sageattn3_blackwell` takes [B, H, S, D], scales by 1 / sqrt(D) and nothing else, and repeats no kv heads: other scales are
multiplied into the query, grouped heads are repeated.
"""

import math

import torch

from attn.capabilities import Capabilities
from attn.diffusion.backends.dense import Keys
from attn.errors import UnsupportedError
from attn.torch.diffusion.backends._dense import DenseBackend, DenseImpl


class SageAttention3Backend(DenseBackend):
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(64, 128, 256),
        packages=("sageattn3",),
        install="git+https://github.com/thu-ml/SageAttention#subdirectory=sageattention3_blackwell",
        archs=(("cuda", ("sm_10*", "sm_12*")),),
    )
    error = 0.1
    error_note = "4-bit queries, keys and values: not measured here, 0.1 is assumed"

    @staticmethod
    def get_name() -> str:
        return "SAGE_ATTN_3"

    @staticmethod
    def get_impl_cls() -> type["SageAttention3Impl"]:
        return SageAttention3Impl


class SageAttention3Impl(DenseImpl):
    backend = SageAttention3Backend

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys) -> torch.Tensor:
        from sageattn3 import sageattn3_blackwell

        if keys.present is not None:
            raise UnsupportedError("SAGE_ATTN_3: a mask of keys is not supported: pad nothing, or take another backend")
        if self.causal and query.shape[1] != key.shape[1]:
            shape = f"{query.shape[1]} rows and {key.shape[1]} keys"
            raise UnsupportedError(f"SAGE_ATTN_3: causal with {shape}: supports equally many")
        factor = self.scale * math.sqrt(self.head_size)
        group = self.num_heads // self.num_kv_heads
        heads = [
            x.transpose(1, 2).contiguous() for x in ((query * factor).to(query.dtype), *(
                y.repeat_interleave(group, 2) if group > 1 else y for y in (key, value)
            ))
        ]  # fmt: skip
        out: torch.Tensor = sageattn3_blackwell(*heads, is_causal=self.causal)
        return out.transpose(1, 2)
