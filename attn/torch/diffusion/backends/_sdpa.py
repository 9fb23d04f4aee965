"""Dense attention by `F.scaled_dot_product_attention`, shared by TORCH_SDPA and CUDNN_ATTN."""

import torch
from torch.nn import functional as F

from attn.arguments import fold_sign
from attn.diffusion.backends.dense import DenseCall
from attn.torch.alignment import aligned
from attn.torch.diffusion.backends._dense import DenseImpl, bottom_right


def masked(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (key, value, mask): absent keys and values zeroed, and a bool mask that broadcasts to [B, H, S, M], or None."""
    if call.present is None:
        return call.key, call.value, call.mask
    # absent keys and values may hold anything, and torch multiplies them by 0
    gone = ~call.present[:, :, None, None]
    return call.key.masked_fill(gone, 0), call.value.masked_fill(gone, 0), call.present[:, None, None, :]


class SDPABase(DenseImpl):
    """Base of the implementations by SDPA: the call, its masks, and rows without keys."""

    traceable = True

    def _attend(self, call: DenseCall) -> torch.Tensor:
        query, (key, value, mask) = call.query, masked(call)
        rows, length = query.shape[1], key.shape[1]
        # torch's `is_causal` aligns top left, which is bottom right of a square only, and excludes a mask
        square = self.causal and rows == length and mask is None
        if self.causal and not square:
            triangle = bottom_right(rows, length, query.device)
            mask = triangle[None, None] if mask is None else mask & triangle
        out = self._by_torch(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, square)
        # kernels of torch differ in a row without a key: NaN, 0 or a mean of values
        return out if mask is None else torch.where(mask.any(-1).transpose(1, 2)[..., None], out, 0)

    def _attend_heads_first(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, length = query.shape[2], key.shape[2]
        # such rows need a triangle as their mask
        if self.causal and rows != length:
            return super()._attend_heads_first(query, key, value)
        query = fold_sign(aligned(query), self.signed_scale)
        return self._by_torch(query, aligned(key), aligned(value), None, self.causal)

    def _by_torch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Call torch's function. query: [B, H, S, D]; key, value: [B, K, M, D]; returns [B, S, H, D]."""
        grouped, rows = self.num_heads != self.num_kv_heads, query.shape[2]
        # On a CPU torch repeats the keys of grouped heads. Heads of a group that have one row each are rows of one head; its
        # kernels for GPUs know groups, and were not measured so.
        folded = grouped and rows == 1 and (mask is None or mask.shape[1] == 1) and query.device.type == "cpu"
        if folded:
            query, grouped = query.unflatten(1, (self.num_kv_heads, -1)).flatten(2, 3), False
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and not folded, scale=self.scale, enable_gqa=grouped
        )
        return out.flatten(1, 2)[:, None] if folded else out.transpose(1, 2)
