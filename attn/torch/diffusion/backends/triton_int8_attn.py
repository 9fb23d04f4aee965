"""TRITON_INT8_ATTN: this package's own kernel with 8-bit scores, as in SageAttention: approximate, on NVIDIA and AMD GPUs.

It is the fastest where int8 products have twice the throughput of 16-bit ones and no hand-written kernel is available (Ampere,
Ada); on Hopper and later cuDNN is faster. Unlike the `sageattention` package of PyPI it supports padded keys, any length,
causality over any shape, head sizes up to 256, and the log-sum-exp. See `attn.torch.kernels.int8_attention`;
`error` is that of a model of the kernels over inputs of many kinds.
"""

import torch

from attn.capabilities import MultipleOf
from attn.diffusion.backends.dense import DenseCall
from attn.torch import records
from attn.torch.diffusion.backends._triton import TritonBackend, TritonImpl, present_first


class TritonInt8AttentionBackend(TritonBackend):
    name = "TRITON_INT8_ATTN"
    capabilities = records.TRITON(dtypes=("bfloat16", "float16"), head_sizes=(MultipleOf(8, 32, 256),))
    error = 0.035
    error_note = "int8 queries and keys: 0.011 on normal inputs, more on sharp scores and heavy tails"


class TritonInt8AttentionImpl(TritonImpl, backend=TritonInt8AttentionBackend):
    def _launch(self, call: DenseCall, lse: torch.Tensor | None) -> torch.Tensor:
        from attn.torch.kernels.int8_attention import DenseKeys, int8_attention

        out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        int8_attention(out, lse, call.query, DenseKeys(*present_first(call), _mean(call)), self.scale, self.causal)
        return out


def _mean(call: DenseCall) -> torch.Tensor:
    """Return the mean [B, K, D] float32 of the present keys; 0 if there are none."""
    if call.present is None:
        # float32, as the kernel takes it: rounded to the keys' dtype it would be another vector than their mean
        return call.key.mean(1, dtype=torch.float32)
    present = call.present[:, :, None, None]
    # an entry without keys: 0 / 0 would be NaN
    count = call.present.sum(1)[:, None, None].clamp(min=1)
    # absent keys may be NaN
    return torch.where(present, call.key, 0).sum(1, dtype=torch.float32) / count
