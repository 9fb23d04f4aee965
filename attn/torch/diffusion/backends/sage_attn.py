"""SAGE_ATTN: SageAttention with int8 queries and keys: approximate, so chosen only within an error budget.

The package subtracts the keys' mean in place, so it is passed a copy. It supports neither masks nor causality with different
numbers of rows and keys. PyPI's 1.0.6 has Triton kernels for head sizes 64, 96 and 128. They treat the padding of the last tile
of 64 keys as keys of score 0, unless a causal mask covers it (error 0.28 at 77 keys). They divide by the maximum of the
centred keys, which is 0 for a single key. Values outside float16's range overflow. Later versions take the same arguments.
`error` is that of a model of the kernels over inputs of many kinds.
"""

import torch

from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch import records
from attn.torch.diffusion.backends._dense import DenseImpl


class SageAttentionBackend(DiffusionAttentionBackend):
    name = "SAGE_ATTN"
    capabilities = records.CUDA(
        head_sizes=(64, 96, 128),
        packages=("sageattention",),
        install="sageattention",
        archs=(("cuda", ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121")),),
    )
    min_keys = 2
    key_multiple = 64
    key_masks = False
    causal_unequal = False
    error = 0.05
    error_note = "int8 queries and keys: 0.013 on normal inputs, more on sharp scores and heavy tails"


class SageAttentionImpl(DenseImpl, backend=SageAttentionBackend):
    def _attend(self, call: DenseCall) -> torch.Tensor:
        from sageattention import sageattn

        return sageattn(
            call.query.contiguous(),
            call.key.clone(),
            call.value.contiguous(),
            tensor_layout="NHD",
            is_causal=self.causal,
            sm_scale=self.scale,
        )
