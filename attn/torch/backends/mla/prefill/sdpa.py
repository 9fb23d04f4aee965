"""TORCH_SDPA: MLA prefill in plain torch operators, one request at a time, on any device.

On a CPU it calls the operator that implements `F.scaled_dot_product_attention` directly, because that also returns the
log-sum-exp; values are padded with zeros to the keys' width, which the operator requires. On other devices, and where that
operator would not be exact (NaN or infinity in masked keys or values), `_ragged.attend` computes the result.
"""

import torch

from attn.backends.mla.prefill.abstract import MLAPrefillBackend, PrefillCall
from attn.capabilities import Feature
from attn.torch import records
from attn.torch.backends import _cpu_kernel, _ragged
from attn.torch.backends._ragged import RequestParams, Work
from attn.visibility import LayerMask, Visibility


class TorchSDPAPrefillBackend(MLAPrefillBackend):
    name = "TORCH_SDPA"
    capabilities = records.ANYWHERE(features=frozenset({Feature.MLA, Feature.LSE, Feature.NAN_SAFE}))

    def _attend(self, call: PrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = call.q, call.k, call.v
        queries, keys = call.meta.query_start_loc_cpu.tolist(), call.key_start_loc_cpu.tolist()
        rules = RequestParams(self.scale, Visibility(LayerMask(call.causal)))
        # not cleared: requests follow one another without gaps, and each fills its rows
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for r in range(len(queries) - 1):
            rows, k_rows = slice(queries[r], queries[r + 1]), slice(keys[r], keys[r + 1])
            work = Work(q[rows], k[k_rows].transpose(0, 1), v[k_rows].transpose(0, 1), 0, 0, out[rows], lse[:, rows])
            if q.device.type != "cpu" or not _by_kernel(work, rules, call.causal):
                _ragged.attend(work, rules)
        return out, lse


def _by_kernel(work: Work, rules: RequestParams, causal: bool) -> bool:
    """Run the CPU kernel on one request. Returns False if the result would not be exact."""
    wide = work.key.shape[2]
    # a masked NaN would reach rows that do not see it; without causality nothing is masked
    if work.key.shape[1] == 0 or work.value.shape[2] > wide or (causal and not work.finite()):
        return False
    # [1, H, m, D]
    value = torch.nn.functional.pad(work.value, (0, wide - work.value.shape[2]))[None]
    query, key = work.query.transpose(0, 1)[None], work.key.contiguous()[None]
    result, log = _cpu_kernel.attend(query, key, value, rules.scale, causal)
    # a score of NaN or infinity: the caller computes the request by definition instead
    if not _cpu_kernel.finite(log):
        return False
    work.fill(result[0].transpose(0, 1)[..., : work.value.shape[2]], log[0])
    # a log-sum-exp of 0 may be of a row that the kernel got wrong
    _cpu_kernel.correct(work, rules, log[0])
    return True
