"""TORCH_SDPA: the kernel that PyTorch chooses, on any device, with any mask, differentiable: the universal fallback.

Single rows that repeat (`launcher`) are FlashAttention's on CUDA if it takes them: PyTorch's choice, cuDNN, builds a plan for
each new number of keys.
"""

from collections.abc import Callable

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from attn.arguments import fold_sign
from attn.capabilities import Feature
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch import records
from attn.torch.alignment import aligned
from attn.torch.diffusion.backends._dense import bottom_right
from attn.torch.diffusion.backends._sdpa import SDPABase, masked

_SCORES_AT_ONCE = 1 << 24  #: 64 MiB of scores in float32


class SDPABackend(DiffusionAttentionBackend):
    name = "TORCH_SDPA"
    capabilities = records.ANYWHERE(
        platforms=("cuda", "rocm", "xpu", "npu", "cpu"), features=frozenset({Feature.MASK, Feature.BACKWARD})
    )


class SDPAImpl(SDPABase, backend=SDPABackend):
    can_return_lse = True

    def launcher(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        general = super().launcher(query, key, value)
        # FlashAttention's operator takes heads of a multiple of 8, which torch's function would pad
        if query.shape[1] != 1 or not query.is_cuda or query.shape[3] % 8:
            return general
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        # asked once, for all calls of the shape
        params = SDPAParams(q, k, v, None, 0.0, False, self.num_heads != self.num_kv_heads)  # type: ignore[call-arg]
        return self._by_flash_attention if can_use_flash_attention(params) else general

    def _by_flash_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        arrays = fold_sign(aligned(query), self.signed_scale), aligned(key), aligned(value)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*arrays, scale=self.scale)[0]
        return out.transpose(1, 2)

    def _attend_lse(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-sum-exp, which torch does not return, in float32 (float64 for float64), some rows at a time."""
        query, (key, value, mask) = call.query, masked(call)
        batch, rows = query.shape[:2]
        wide = torch.promote_types(query.dtype, torch.float32)
        group = self.num_heads // self.num_kv_heads
        k, v = (x.to(wide).repeat_interleave(group, 2).transpose(1, 2) for x in (key, value))
        out = query.new_empty(batch, self.num_heads, rows, self.head_size)
        lse = query.new_empty(batch, self.num_heads, rows, dtype=wide)
        triangle = bottom_right(rows, key.shape[1], query.device) if self.causal else None
        # at least one row at a time, whatever it takes
        step = max(1, _SCORES_AT_ONCE // max(1, batch * self.num_heads * key.shape[1]))
        for start in range(0, rows, step):
            rows = slice(start, start + step)
            scores = query[:, rows].transpose(1, 2).to(wide) @ k.transpose(2, 3) * self.scale
            if mask is not None:
                scores = scores.masked_fill(~(mask if mask.shape[2] == 1 else mask[:, :, rows]), -torch.inf)
            if triangle is not None:
                scores = scores.masked_fill(~triangle[rows], -torch.inf)
            log = scores.logsumexp(-1)
            # a row without a key: -inf minus -inf would be NaN
            weights = torch.where(log[..., None] == -torch.inf, 0, torch.exp(scores - log[..., None]))
            out[:, :, rows], lse[:, :, rows] = (weights @ v).to(query.dtype), log
        return out.transpose(1, 2), lse
