"""SAGE_ATTN_3: SageAttention 3's FP4 kernels for Blackwell: approximate, so chosen only within an error budget.

`sageattn3_blackwell` takes [B, H, S, D], always scales by 1 / sqrt(D), and requires as many kv heads as query heads: other
scales are multiplied into the query, and grouped heads are repeated. It subtracts the keys' mean in place, so it is passed a
copy. For head sizes from 256 it falls back to PyTorch's attention and prints a message, so those are left to TORCH_SDPA.
(Source of 2026-11.) `error` is that of a model of the kernels over inputs of many kinds: no Blackwell device was
available.
"""

import math

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch import records
from attn.torch.diffusion.backends._dense import DenseImpl


class SageAttention3Backend(DiffusionAttentionBackend):
    name = "SAGE_ATTN_3"
    capabilities = records.CUDA(
        head_sizes=(64, 128),
        packages=("sageattn3",),
        install="git+https://github.com/thu-ml/SageAttention#subdirectory=sageattention3_blackwell",
        archs=(("cuda", ("sm_10*", "sm_12*")),),
    )
    min_keys = 2
    key_masks = False
    causal_unequal = False
    error = 0.35
    error_note = "4-bit queries, keys, weights and values: 0.19 on normal inputs, more on sharp scores"


class SageAttention3Impl(DenseImpl, backend=SageAttention3Backend):
    def _attend(self, call: DenseCall) -> torch.Tensor:
        from sageattn3 import sageattn3_blackwell

        factor = self.scale * math.sqrt(self.head_size)
        group = self.num_heads // self.num_kv_heads
        key, value = (x.repeat_interleave(group, 2) if group > 1 else x for x in (call.key, call.value))
        q, v = ((call.query * factor).to(call.query.dtype).transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous())
        k = key.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out: torch.Tensor = sageattn3_blackwell(q, k, v, is_causal=self.causal)
        return out.transpose(1, 2)
