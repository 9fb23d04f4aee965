"""TORCH_MLA: multi-head latent attention in plain torch operators, on any device that torch supports.

It is the reference implementation and the fallback. A request's latents are gathered from its pages once for all heads, and
`_ragged.attend` attends them in float32 (float64 for float64). The gathered rows are the keys, and their first columns are the
values. The loop over requests needs their lengths on the host.

Where a layer requests `batch_invariant`, the projections and the prefills are computed one request at a time as well.
"""

from dataclasses import replace

import torch

from attn.capabilities import LATENT_CACHE_DTYPES, Feature
from attn.torch import records
from attn.torch.backends import _ragged
from attn.torch.backends._paged import check_replays
from attn.torch.backends._ragged import RequestParams, Work
from attn.torch.backends.mla import _rows
from attn.torch.backends.mla._mla import DecodeCall, MLACommonBackend, MLACommonImpl


class TorchMLABackend(MLACommonBackend):
    name = "TORCH_MLA"
    capabilities = records.ANYWHERE(
        kv_cache_dtypes=LATENT_CACHE_DTYPES,
        features=frozenset({Feature.MLA, Feature.LSE, Feature.DCP, Feature.NAN_SAFE, Feature.BATCH_INVARIANT}),
    )


class TorchMLAImpl(MLACommonImpl, backend=TorchMLABackend):
    can_return_lse_for_decode = True

    def _writes_by_kernel(self, kv_cache: torch.Tensor) -> bool:
        return False

    def _decode(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, meta = call.q, call.meta
        check_replays(self.backend.get_name(), q)
        exact = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank, dtype=exact)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=exact)
        starts, lengths = meta.host_lens()
        # a number of keys for each row, which slices need on the host
        limits = None if meta.limits is None else meta.limits.cpu().tolist()
        for r in range(meta.num_reqs):
            start, stop, total = int(starts[r]), int(starts[r + 1]), int(lengths[r])
            if start == stop:
                continue
            # the request's tokens in order, wherever its pages are
            position = torch.arange(total, device=q.device)
            pages = meta.block_table[r].long()[position // meta.block_size]
            rows = _rows.gather(call.kv_cache, pages, position % meta.block_size)
            rows = _rows.decode(rows, self.kv_cache_dtype, call.layer._k_scale)[None]
            values, first, q_rows = rows[..., : self.kv_lora_rank], total - (stop - start), slice(start, stop)
            work = Work(q[q_rows], rows, values, first, 0, out[q_rows], lse[:, q_rows])
            self._attend(work, None if limits is None else limits[start:stop])
        return out, lse

    def _attend(self, work: Work, limits: list[int] | None) -> None:
        """Attend one request's rows: causal, or each over its number of keys in `limits`."""
        # the default mask is causal
        rules = RequestParams(self.scale)
        if limits is None:
            _ragged.attend(work, rules)
            return
        for i, seen in enumerate(limits):
            # one row over its first `seen` keys, as if it were the last of them
            _ragged.attend(replace(work.narrow(i, i + 1, 0, seen), position=seen - 1), rules)
