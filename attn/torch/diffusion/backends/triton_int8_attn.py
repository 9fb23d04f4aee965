"""TRITON_INT8_ATTN: our own kernel with 8-bit scores, in SageAttention's manner: approximate, on NVIDIA and AMD GPUs.

Where products of int8 run at twice the rate of 16 bits and nothing hand-written is at hand (Ampere, Ada) it is the fast
one; on Hopper and later cuDNN is ahead of it. Unlike the `sageattention` package of PyPI it takes padded keys, any length,
causality over any shape, head sizes up to 256, and returns the log-sum-exp. See `attn.torch.kernels.int8_attention`;
`error`: tests/testing/approximate.py.
"""

import torch

from attn.capabilities import Capabilities, MultipleOf
from attn.diffusion.backends.dense import Keys
from attn.torch.diffusion.backends._dense import DenseImpl
from attn.torch.diffusion.backends._triton import TritonBackend, front


class TritonInt8AttentionBackend(TritonBackend):
    name = "TRITON_INT8_ATTN"
    capabilities = Capabilities(
        framework="torch",
        platforms=("cuda", "rocm"),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 32, 256),),
        packages=("triton",),
        archs=(("cuda", ("sm_80+",)),),
    )
    error = 0.035
    error_note = "int8 queries and keys: 0.011 on normal inputs, more on sharp scores and heavy tails"


class TritonInt8AttentionImpl(DenseImpl, backend=TritonInt8AttentionBackend):
    can_return_lse = True

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys) -> torch.Tensor:
        return self._run(query, key, value, keys, None)

    def _attend_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows = query.shape[:2]
        lse = torch.empty(batch, self.num_heads, rows, dtype=torch.float32, device=query.device)
        return self._run(query, key, value, keys, lse), lse

    def _run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: Keys, lse: torch.Tensor | None
    ) -> torch.Tensor:
        from attn.torch.kernels.int8_attention import int8_attention

        mean = _mean(keys, key)
        key, value, lens = front(keys, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        int8_attention(out, lse, query, key, value, lens, mean, self.scale, self.causal)
        return out


def _mean(keys: Keys, key: torch.Tensor) -> torch.Tensor:
    """The mean [B, K, D] float32 of the keys that are there; 0 where none is."""
    if keys.present is None:
        return key.mean(1, dtype=torch.float32)
    there = keys.present[:, :, None, None]
    count = keys.present.sum(1)[:, None, None].clamp(min=1)
    return torch.where(there, key, 0).sum(1, dtype=torch.float32) / count
