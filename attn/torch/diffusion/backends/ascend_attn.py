"""ASCEND_ATTN: Huawei's fused attention for Ascend NPUs, `torch_npu.npu_fusion_attention`.

Its masks are inverted (True = do not attend), its causal triangle is bottom-right with `sparse_mode=3` and a fixed
2048 x 2048 mask, and `inner_precise=2` keeps rows without keys from becoming NaN. Signature of torch_npu 2.13.
"""

import torch

from attn.capabilities import Capabilities, Feature, MultipleOf
from attn.diffusion.backends.abstract import DiffusionAttentionBackend
from attn.diffusion.backends.dense import DenseCall
from attn.torch.diffusion.backends._dense import DenseImpl, bottom_right

_COMPRESSED = 2048  #: the size of the square causal mask that sparse_mode 3 reads
_CAUSAL, _DEFAULT_MASK = 3, 0
_ROWS_WITHOUT_KEYS = 2


class AscendAttentionBackend(DiffusionAttentionBackend):
    name = "ASCEND_ATTN"
    capabilities = Capabilities(
        framework="torch",
        platforms=("npu",),
        dtypes=("bfloat16", "float16"),
        head_sizes=(MultipleOf(8, 8, 256),),
        features=frozenset({Feature.MASK}),
        packages=("torch_npu",),
        install="torch_npu",
    )


class AscendAttentionImpl(DenseImpl, backend=AscendAttentionBackend):
    def _attend(self, call: DenseCall) -> torch.Tensor:
        import torch_npu

        query, key = call.query, call.key
        rows, length = query.shape[1], key.shape[1]
        mask = call.mask if call.present is None else call.present[:, None, None, :]
        rules = {}
        if mask is not None:
            # a full mask and the compressed causal one exclude each other: causality becomes part of the mask
            mask = mask & bottom_right(rows, length, query.device) if self.causal else mask
            # [B, 1 or H, S, M], a shape that the function documents
            full = (query.shape[0], 1 if mask.shape[1] == 1 else self.num_heads, rows, length)
            rules = {"atten_mask": ~mask.expand(full), "sparse_mode": _DEFAULT_MASK}
        elif self.causal:
            triangle = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=query.device).triu(1)
            rules = {"atten_mask": triangle, "sparse_mode": _CAUSAL}
        out: torch.Tensor = torch_npu.npu_fusion_attention(
            query, key, call.value, self.num_heads, "BSND", scale=self.scale, inner_precise=_ROWS_WITHOUT_KEYS, **rules
        )[0]
        if mask is not None:
            out = torch.where(mask.any(-1).transpose(1, 2)[..., None], out, 0)
        # the first rows are before the first key
        elif self.causal and rows > length:
            out[:, : rows - length] = 0
        return out
