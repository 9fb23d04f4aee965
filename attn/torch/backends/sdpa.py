"""TORCH_SDPA: PyTorch's own attention over a paged cache, the fallback that serves every feature on every device.

`F.scaled_dot_product_attention` computes plain attention. `_ragged.attend` computes everything else, including calls for the
log-sum-exp, which that function does not return. This backend is never the fastest: it is chosen if no kernel serves the
layer, and other backends are compared with it.
"""

import torch
from torch.nn import functional as F

from attn.capabilities import ATTN_TYPES
from attn.torch import kv_cache as caches
from attn.torch import records
from attn.torch.backends import _ragged
from attn.torch.backends._paged import PagedAttentionBackend
from attn.torch.backends._ragged import RaggedAttentionImpl, RequestParams, Work

_MASK_AT_ONCE = 1 << 24  #: rows x keys x heads of a masked call: bounds torch's allocation if it has no fused kernel


class TorchSDPABackend(PagedAttentionBackend):
    name = "TORCH_SDPA"
    capabilities = records.ANYWHERE(
        kv_cache_dtypes=(*_ragged.KV_CACHE_DTYPES, "int8_per_token_head", "fp8_per_token_head"),
        attn_types=ATTN_TYPES,
        features=_ragged.FEATURES,
    )


class TorchSDPAImpl(RaggedAttentionImpl, backend=TorchSDPABackend):
    def _attend_one(self, work: Work, rules: RequestParams) -> None:
        work = rules.drop_empty_rows(work)
        dtype = work.query.dtype
        if not caches.is_quantised(work.key.dtype):  # codes are exact in every dtype of a query
            dtype = torch.promote_types(dtype, work.key.dtype)
        # torch adds its mask to scores and multiplies masked values by 0, so a NaN or an infinity may reach every row
        if work.lse is None and rules.sinks is None and rules.plain() and work.as_type(dtype).finite():
            _sdpa(work.as_type(dtype), rules)
        else:
            _ragged.attend(work, rules)


def _sdpa(work: Work, rules: RequestParams) -> None:
    """Compute plain attention by torch; every row must see a key.

    Heads of a group are folded into rows, since `enable_gqa` repeats the keys (13 times slower for one query row in
    bfloat16 on a CPU). Masks are explicit except for square scores, because `is_causal` aligns its mask top left.
    """
    dtype, group = work.key.dtype, work.query.shape[1] // work.key.shape[0]
    # as many rows as keys: a square, which torch masks without an array
    if rules.is_causal() and work.position == work.first_key and work.query.shape[0] > 1:
        query, wide = work.query.transpose(0, 1).to(dtype), [x.repeat_interleave(group, 0) for x in (work.key, work.value)]
        result = F.scaled_dot_product_attention(query[None], wide[0][None], wide[1][None], is_causal=True, scale=rules.scale)
        work.fill(_ragged.weigh(rules, result[0].transpose(0, 1), None), None)
        return
    n, num_heads, _ = work.query.shape
    step = n if rules.see_all(work) else max(1, _MASK_AT_ONCE // (num_heads * work.key.shape[1]))
    for tile in rules.split(work, max(1, step)):
        seen = rules.seen(tile)
        result = F.scaled_dot_product_attention(
            _ragged.fold(tile.query, tile.key.shape[0])[None].to(dtype),
            tile.key[None],
            tile.value[None],
            attn_mask=None if seen is None else seen.repeat(group, 1),
            scale=rules.scale,
        )
        tile.fill(_ragged.weigh(rules, _ragged.unfold(result[0], tile.query.shape[0]), None), None)
